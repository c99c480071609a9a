"""Whole training on XLA: the CPU's results, checkpoints that move between devices, and one program a step."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import training_step
from backend import Backend, BackendError
from checkpointing import load_checkpoint
from optimizer import make_optimizer
from training_step import TrainingStep

NOTHING_RANDOM = {
    "model__rnn_dropout": 0.0,
    **{f"dataset__data_transforms__{key}": 0 for key in ("white_noise_std", "constant_offset_std", "random_cut")},
}


def train(make_trainer, device, existing="keep", in_float64=False, **settings):
    """Trains, and returns the losses. On the CPU in a process of its own, without XLA, as one would."""
    if device == "xla":
        return train_here(make_trainer, device, existing, in_float64, settings)
    arguments = repr((str(make_trainer.data), existing, in_float64, {k: str(v) for k, v in settings.items()}))
    folders = [str(folder) for folder in Path(__file__).parents[:3]]
    code = f"import sys; sys.path[:0] = {folders}\nfrom test_xla_training import *\ntrain_in_a_process{arguments}"
    environment = {**os.environ, "USE_TORCH_XLA": "0"}
    del environment["PJRT_DEVICE"]
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def train_in_a_process(data, existing, in_float64, settings):
    from tiny import training_config

    from rnn_trainer import BrainToTextDecoder_Trainer

    def make(existing, device, **overrides):
        return BrainToTextDecoder_Trainer(training_config(data, **overrides), device, existing)

    print(json.dumps(train_here(make, "cpu", existing, in_float64, settings)))


def train_here(make_trainer, device, existing, in_float64, settings):
    trainer = make_trainer(existing, device, **settings)
    if in_float64:
        trainer.model.double()
        trainer.optimizer = make_optimizer(trainer.model, trainer.config, trainer.backend.device)
        trainer.training_step = TrainingStep(trainer.model, trainer.optimizer, trainer.config, trainer.backend)
    return trainer.train()["train_losses"]


@pytest.mark.parametrize(
    ("architecture", "accumulation", "adversarial"),
    [("triple_gru", 1, True), ("triple_gru", 2, False), ("gru", 1, False)],
)
def test_the_loss_curve_in_float64_is_that_of_the_cpu(make_trainer, tmp_path, architecture, accumulation, adversarial):
    settings = {
        "num_training_batches": 50, "batches_per_val_step": 50, "gradient_accumulation_steps": accumulation,
        "model__architecture": architecture, "adversarial__enabled": adversarial, **NOTHING_RANDOM,
    }  # fmt: skip
    on_cpu, on_xla = (
        torch.tensor(train(make_trainer, device, in_float64=True, output_dir=tmp_path / device, **settings))
        for device in ("cpu", "xla")
    )
    assert len(on_cpu) == 50
    assert on_cpu.std() > 1
    torch.testing.assert_close(on_xla, on_cpu, rtol=1e-8, atol=0)


def test_checkpoints_move_between_devices_both_ways(make_trainer, tmp_path):
    """Three rounds, on XLA, CPU and XLA, each resuming the one before, are the run that stayed on the CPU."""
    settings = {"batches_per_val_step": 2, "lr_decay_steps": 6, "lr_decay_steps_day": 6, **NOTHING_RANDOM}
    stayed = train(make_trainer, "cpu", output_dir=tmp_path / "stayed", num_training_batches=6, **settings)
    for batches, device in ((2, "xla"), (4, "cpu"), (6, "xla")):
        moved = train(
            make_trainer, device, "resume", output_dir=tmp_path / "moved", num_training_batches=batches, **settings
        )
    assert len(moved) == 6
    torch.testing.assert_close(torch.tensor(moved), torch.tensor(stayed), rtol=1e-4, atol=0)
    state, expected = (
        load_checkpoint(tmp_path / run / "checkpoint" / "last_checkpoint") for run in ("moved", "stayed")
    )
    assert state["model_state_dict"].keys() == expected["model_state_dict"].keys()
    for name, value in state["model_state_dict"].items():
        assert value.device.type == "cpu"
        torch.testing.assert_close(value, expected["model_state_dict"][name], rtol=1e-3, atol=1e-5)


def counts(trainer):
    import torch_xla
    import torch_xla.core.xla_model as xm

    torch_xla.sync(wait=True)
    xm.wait_device_ops()
    return trainer.backend.watch.counts()


def difference(after, before):
    return {name: after[name] - before[name] for name in after}


def short_batch(batch):
    """The same with one trial only, as the end of a data set gives it: the others have zero weight and no labels."""
    batch = {name: tensor.clone() for name, tensor in batch.items()}
    for name in ("weights", "label_lengths", "n_time_steps", "features", "labels"):
        batch[name][1:] = 0
    return batch


def bucket(batch):
    return batch["features"].shape[1]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_after_warm_up_a_step_is_one_program_and_nothing_else(make_trainer, monkeypatch, tmp_path, accumulation):
    """Over all buckets, learning rates and grl_lambda of exactly 0 and 1, short batches, validation, and a resume."""
    n_steps = 45
    monkeypatch.setattr(training_step, "adversarial_ramp", lambda step, _: (0.0, 0.3, 1.0)[step % 3])
    settings = {
        "num_training_batches": n_steps, "gradient_accumulation_steps": accumulation, "batches_per_val_step": 15,
        "batches_per_train_log": 1000, "lr_max": 1.0, "lr_max_day": 1.0, "lr_min": 0.0, "lr_min_day": 0.0,
        "lr_warmup_steps": 4, "lr_warmup_steps_day": 4, "lr_decay_steps": 40, "lr_decay_steps_day": 40,
        "adversarial__grl_lambda": 1.0, "dataset__data_transforms__n_time_masks": 1, "save_val_logits": True,
        "dataset__data_transforms__n_channel_masks": 1, "dataset__data_transforms__channel_mask_size": 2,
        "dataset__data_transforms__random_walk_std": 0.1, "dataset__data_transforms__static_gain_std": 0.1,
        "early_stopping": False, "model__input_network__input_layer_dropout": 0.1,
    }  # fmt: skip
    seen, rates, programs_before = [], set(), None

    def watched(trainer, step_of):
        def train_step(batches):
            if trainer.step % 5 == 4:
                batches = [*batches[:-1], short_batch(batches[-1])]
            before = counts(trainer)
            metrics = step_of(batches)
            seen.append((tuple(map(bucket, batches)), difference(counts(trainer), before)))
            rates.update(float(group["lr"].cpu()) for group in trainer.optimizer.param_groups)
            return metrics

        return train_step

    for existing, until in (("keep", 30), ("resume", n_steps)):
        trainer = make_trainer(existing, "xla", **settings | {"num_training_batches": until})
        if programs_before is None:
            programs_before = counts(trainer)["compilations"] - 1  # the optimiser's initial state is one of the run's
        trainer.train_step = watched(trainer, trainer.train_step)
        trainer.train()

    buckets = set(trainer.train_batches.shapes.buckets)
    assert {size for sizes, _ in seen for size in sizes} == buckets and len(buckets) == 2
    assert {0.0, 1.0} <= rates
    assert len(seen) == n_steps
    warm: set[tuple[str, int]] = set()
    for sizes, found in seen:
        programs = {("micro-batch", size) for size in sizes[:-1]} | {("last", sizes[-1])}
        assert found["host_fallbacks"] == 0
        assert found["transfers_from_device"] == 0
        assert found["executions"] == accumulation
        assert found["compilations"] == len(programs - warm), (sizes, found)
        warm |= programs
    compiled = counts(trainer)["compilations"] - programs_before
    assert compiled <= (2 if accumulation == 1 else 3) * len(buckets) + 4
    log = (tmp_path / "run" / "training_log").read_text()
    assert "compiled again" not in log
    assert f"compiled the training step for 4 trials of {max(buckets)} bins" in log


def test_a_second_compilation_of_a_program_is_warned_of_in_words(caplog):
    backend = Backend("xla")
    caplog.set_level(logging.INFO, logger="b2txt")
    batch = {"features": torch.ones(4, 80, 2)}
    for factor in (0.5, 0.25, 1.0):  # a Python number that becomes exactly 1 is compiled into the program
        result = batch["features"].to(backend.device) * factor + 7
        backend.end_program("training step", batch)
        del result
    messages = [record for record in caplog.records if "training step for 4 trials of 80 bins" in record.message]
    assert [record.levelname for record in messages] == ["INFO", "WARNING"]
    assert "compiled again" in messages[1].message


def test_counters_go_to_the_trackers(make_trainer, monkeypatch):
    logged = {}
    monkeypatch.setattr(Backend, "log", lambda self, values, step: logged.update(values))
    make_trainer(device="xla", num_training_batches=2, batches_per_val_step=2).train()
    assert logged["xla/compilations"] >= 2
    assert logged["xla/executions"] >= 2
    assert {"xla/transfers_from_device", "xla/host_fallbacks"} <= set(logged)


@pytest.mark.parametrize("variable", ["XLA_USE_BF16", "XLA_DOWNCAST_BF16"])
def test_rounding_the_weights_to_bf16_is_refused(monkeypatch, variable):
    """Case 34: mixed_precision: bf16 in the Accelerate file sets it, and small updates vanish."""
    monkeypatch.setenv(variable, "1")
    with pytest.raises(BackendError, match=f"{variable} is set.*mixed_precision: 'no'"):
        Backend("xla")


def test_parameters_and_optimiser_state_stay_float32_under_amp(make_trainer):
    trainer = make_trainer(device="xla", use_amp=True, num_training_batches=2, batches_per_val_step=2)
    losses = trainer.train()["train_losses"]
    assert all(torch.isfinite(torch.tensor(losses)))
    values = [*trainer.model.parameters(), *(v for s in trainer.optimizer.state.values() for v in s.values())]
    assert {value.dtype for value in values} == {torch.float32}


def test_the_same_seed_gives_the_same_run(make_trainer, tmp_path):
    runs = [
        make_trainer(device="xla", output_dir=tmp_path / str(i), seed=seed).train()["train_losses"]
        for i, seed in enumerate((1, 1, 2))
    ]
    assert runs[0] == runs[1] != runs[2]


def test_steps_are_profiled_on_xla(make_trainer, tmp_path):
    make_trainer(device="xla", num_training_batches=3, batches_per_val_step=3).train(profile_steps=(2, 3))
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))


def test_sums_over_processes_and_the_main_one_s_weights_on_xla():
    """With one replica, which stands for two: an all-reduce over one is what came in."""
    backend = Backend("xla")
    backend.world_size = backend.processes.count = 2
    for values in (torch.arange(5), torch.rand(3, 2), torch.rand(4, dtype=torch.float64)):
        total = backend.processes.sum(values)
        assert total.dtype == values.dtype and total.device.type == "cpu"
        torch.testing.assert_close(total, values, rtol=1e-6, atol=0)
    assert backend.processes.on_main(lambda: {"a": [1, "\u00e9"]}) == {"a": [1, "\u00e9"]}
    model = torch.nn.Linear(3, 2).to(backend.device)
    before = model.weight.detach().cpu().clone()
    backend.prepare(model, None)
    torch.testing.assert_close(model.weight.detach().cpu(), before)


def test_a_process_of_a_tpu_host_takes_the_chip_of_its_local_rank(monkeypatch):
    from torch_xla._internal import tpu

    import backend as module

    taken = []
    monkeypatch.setattr(tpu, "configure_topology", lambda rank, count: taken.append((rank, count)))
    monkeypatch.setattr(tpu, "configure_one_chip_topology", lambda: taken.append("one"))
    monkeypatch.setattr(module, "find_chips", lambda: (["v5e"] * 8, []))
    monkeypatch.setattr(os, "environ", {"PJRT_DEVICE": "TPU", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"})
    module._choose_chip()
    assert taken == [(3, 8)] and os.environ["PJRT_LOCAL_PROCESS_RANK"] == "3"
    monkeypatch.setattr(os, "environ", {"PJRT_DEVICE": "TPU"})
    module._choose_chip()
    assert taken[1:] == ["one"]
