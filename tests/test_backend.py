"""The choice of a device, and what is kept away from it."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import backend
from backend import Backend, BackendError, choose_device

ROOT = Path(__file__).resolve().parent.parent


def test_a_tpu_comes_before_cuda_and_cuda_before_the_cpu(monkeypatch):
    for tpu, cuda, kind in ((True, True, "xla"), (False, True, "cuda"), (False, False, "cpu")):
        monkeypatch.setattr(backend, "tpu_attached", lambda tpu=tpu: tpu)
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        assert choose_device()[0] == kind
    assert choose_device("cpu") == ("cpu", "as asked for")


def test_a_tpu_is_passed_over_where_use_tpu_is_false(monkeypatch):
    monkeypatch.setattr(backend, "tpu_attached", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    kind, reason = choose_device(use_tpu=False)
    assert kind == "cpu" and "use_tpu is false" in reason
    assert choose_device()[0] == "xla"


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(backend, "find_spec", lambda _: None)
    for device, words in (("cuda", "no CUDA GPU"), ("xla", "torch_xla is not installed"), ("mps", "not one of")):
        with pytest.raises(BackendError, match=words):
            choose_device(device)


def test_a_tracker_that_is_not_installed_is_refused_by_name():
    with pytest.raises(BackendError, match="log_with: 'clearml' is not installed"):
        Backend("cpu", log_with="clearml")


def test_on_cuda_lengths_stay_on_the_host_and_scalars_are_made_on_the_device(monkeypatch):
    """Seen without a GPU by the meta device in its place: nothing could come back from there."""
    made = Backend("cpu")
    monkeypatch.setattr(made, "kind", "cuda")
    monkeypatch.setattr(made, "device", torch.device("meta"))
    names = ("features", "n_time_steps", "day_indices", "labels", "label_lengths", "weights", "trial_ids")
    on_device = made.to_device({name: torch.ones(2) for name in names})
    on_host = {name for name, tensor in on_device.items() if tensor.device.type == "cpu"}
    assert on_host == {"n_time_steps", "label_lengths"}
    assert made.scalar(0.5).device.type == "meta" and made.scalar(0.5).shape == (1,)


def test_seeds_differ_between_streams_steps_and_ranks():
    seeds = {
        Backend.fold_seed(seed, stream, step, rank)
        for seed in (0, 1)
        for stream in (0, 1)
        for step in range(9)
        for rank in (0, 1)
    }
    assert len(seeds) == 72


def in_a_new_process(code):
    """What the code prints, run by itself with nothing of the tests' environment."""
    environment = {"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "", "PJRT_DEVICE": "CPU", "HOME": str(ROOT)}
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n{code}"
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


needs_torch_xla = pytest.mark.skipif(find_spec("torch_xla") is None, reason="torch_xla is not installed")

TRAIN_ON_CPU = """
import torch
from rnn_model import build_model
from tiny import tiny_config
model = build_model(tiny_config())
model(torch.randn(2, 20, 6), torch.tensor([0, 1]), mode="full")[0].sum().backward()
"""


@needs_torch_xla
@pytest.mark.parametrize(("device", "reason"), [("TPU", "finds no TPU here"), ("CUDA", "has no such device")])
def test_an_xla_device_that_is_not_there_is_refused_in_words(device, reason):
    code = f"""
import os
os.environ["PJRT_DEVICE"] = "{device}"
from backend import Backend, BackendError
try:
    Backend("xla")
except BackendError as error:
    print(error)
"""
    assert f"PJRT_DEVICE is {device}, and torch_xla {reason}" in in_a_new_process(code)


@needs_torch_xla
def test_a_cpu_run_never_loads_torch_xla_though_it_is_installed():
    code = "from backend import Backend; b = Backend(); print(b.device, 'torch_xla' in sys.modules)"
    assert in_a_new_process(code) == "cpu False"


@needs_torch_xla
def test_the_model_runs_on_a_cpu_after_torch_xla_replaced_torch_nn_gru():
    code = "import torch, torch_xla; print('torch_xla' in torch.nn.GRU.__module__)" + TRAIN_ON_CPU
    assert in_a_new_process(code) == "True"


@needs_torch_xla
def test_xla_after_training_on_a_cpu_is_refused_in_words_and_does_not_crash_later():
    code = """
import torch
from backend import Backend, BackendError
Backend("cpu").backward(torch.ones(1, requires_grad=True).sum())
try:
    Backend("xla")
except BackendError as error:
    print(error)
"""
    assert "train on XLA in a new process" in in_a_new_process(code)
