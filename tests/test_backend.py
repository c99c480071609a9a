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


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(backend, "find_spec", lambda _: None)
    for device, words in (("cuda", "no CUDA GPU"), ("xla", "torch_xla is not installed"), ("mps", "not one of")):
        with pytest.raises(BackendError, match=words):
            choose_device(device)


def test_a_tracker_that_is_not_installed_is_refused_by_name():
    with pytest.raises(BackendError, match="log_with: 'clearml' is not installed"):
        Backend("cpu", log_with="clearml")


def test_seeds_differ_between_streams_steps_and_ranks():
    seeds = {
        Backend.fold_seed(seed, stream, step, rank)
        for seed in (0, 1)
        for stream in (0, 1)
        for step in range(9)
        for rank in (0, 1)
    }
    assert len(seeds) == 72


@pytest.mark.skipif(find_spec("torch_xla") is None, reason="torch_xla is not installed")
def test_a_cpu_run_never_loads_torch_xla_though_it_is_installed():
    code = (
        "import sys; from backend import Backend; b = Backend(); "
        "print(b.device, 'torch_xla' in sys.modules)"
    )  # fmt: skip
    environment = {"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.stdout.strip() == "cpu False", result.stderr
