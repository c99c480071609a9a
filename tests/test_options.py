"""Options of the configuration and of the commands, each changed and the difference seen.

Here are those whose effect shows in a training; the options of a single module are tested beside it.
"""

import math
import re
import shlex
import sys
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_config, training_config
from trained_run import evaluate

import backend
import evaluate_model
import train_model
from backend import Backend
from checkpointing import CheckpointError, find_checkpoint, load_checkpoint
from config import save_config
from ctc import output_lengths
from optimizer import GROUP_NAMES
from rnn_model import build_model
from rnn_trainer import BrainToTextDecoder_Trainer
from run_directory import check_vacant, remove_run

NOTHING_RANDOM = {
    "model__rnn_dropout": 0,
    "dataset__data_transforms__white_noise_std": 0,
    "dataset__data_transforms__constant_offset_std": 0,
    "dataset__data_transforms__random_cut": 0,
}


@pytest.fixture
def train(simulated, tmp_path):
    """train_model.py as a function: a configuration's changes, and more options; returns the exit code."""

    def call(*options, **overrides):
        overrides = {"output_dir": tmp_path / "run", "num_training_batches": 3} | overrides
        save_config(training_config(simulated, **overrides), tmp_path / "settings.yaml")
        return train_model.main(
            ["--config_path", str(tmp_path / "settings.yaml"), "--device", "cpu", *map(str, options)]
        )

    return call


def log_of(trainer):
    return (trainer.output_dir / "training_log").read_text()


def parameters_of(trainer):
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def names_that_differ(first, second):
    return {name for name in first if not torch.equal(first[name], second[name])}


def take_steps(trainer, n_steps=1, at=0):
    """The metrics of the last of the steps `at`, `at` + 1, ..., each with the batch of its number."""
    for trainer.step in range(at, at + n_steps):
        metrics = trainer.train_step([trainer.train_batches[trainer.step]])
    return dict(zip(("loss", "clean", "noisy", "noise_l2", "norm"), metrics.tolist(), strict=True))


def scripted_validation(trainer, results):
    """A validation that finds the given pairs of PER and loss, one a call."""
    results = iter(results)

    def validation(**_):
        per, loss = next(results)
        return {"avg_PER": per, "avg_loss": loss, "edits": 1, "phonemes": 2, "n_trials": 1, "day_PERs": {},
                "trials": trainer.val_trials[:1], "true_seq": [[1]], "decoded_seqs": [[1]],
                "losses": [5.0], "n_frames": [1]}  # fmt: skip

    return validation


# ---- optimisation


@pytest.mark.parametrize(
    ("change", "at", "n_steps", "moved"),
    [  # the warm-up ends with step 1, the rates reach their least value at step 6
        ({"lr_max": 0.02}, 2, 1, {"bias", "other"}),
        ({"lr_max_day": 0.02}, 2, 1, {"day_layers"}),
        ({"lr_min": 0.002}, 9, 1, {"bias", "other"}),
        ({"lr_min_day": 0.002}, 9, 1, {"day_layers"}),
        ({"lr_decay_steps": 9}, 4, 1, {"bias", "other"}),
        ({"lr_decay_steps_day": 9}, 4, 1, {"day_layers"}),
        ({"lr_warmup_steps": 4}, 0, 1, {"bias", "other"}),
        ({"lr_warmup_steps_day": 4}, 0, 1, {"day_layers"}),
        ({"lr_scheduler_type": "linear"}, 3, 1, {"bias", "day_layers", "other"}),
        ({"weight_decay": 0.5}, 2, 1, {"other"}),
        ({"weight_decay_day": 0.5}, 2, 1, {"day_layers"}),
        ({"epsilon": 0.01}, 2, 1, {"bias", "day_layers", "other"}),
        ({"beta0": 0.5}, 2, 2, {"bias", "day_layers", "other"}),
        ({"beta1": 0.5}, 2, 2, {"bias", "day_layers", "other"}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_setting_of_the_optimiser_moves_the_parameters_of_its_groups(make_trainer, change, at, n_steps, moved):
    def after_steps(**overrides):
        trainer = make_trainer(**overrides)
        take_steps(trainer, n_steps, at)
        return [torch.cat([p.detach().flatten() for p in group["params"]]) for group in trainer.optimizer.param_groups]

    groups = zip(GROUP_NAMES, after_steps(), after_steps(**change), strict=True)
    assert {name for name, before, after in groups if not torch.equal(before, after)} == moved


@pytest.mark.parametrize(
    ("change", "at", "noisy_weight", "noise_l2_weight"),
    [
        ({}, 0, 0.2, 0.3),
        ({"noisy_loss_weight": 0.7}, 0, 0.7, 0.3),
        ({"noise_l2_weight": 5}, 0, 0.2, 5),
        ({"warmup_steps": 4}, 0, 0.05, 0.3),
        ({"warmup_steps": 4}, 1, 0.1, 0.3),
        ({"warmup_steps": 4}, 9, 0.2, 0.3),
    ],
)
def test_the_parts_of_the_loss_weigh_what_they_are_told_to(make_trainer, change, at, noisy_weight, noise_l2_weight):
    found = take_steps(make_trainer(**{f"adversarial__{key}": value for key, value in change.items()}), at=at)
    expected = found["clean"] + noisy_weight * found["noisy"] + noise_l2_weight * found["noise_l2"]
    assert found["loss"] == pytest.approx(expected, rel=1e-5)


def test_grl_lambda_and_its_warm_up_change_only_what_lies_before_the_reversal(make_trainer):
    def after_a_step(**overrides):
        trainer = make_trainer(grad_norm_clip_value=0, **overrides)
        take_steps(trainer)
        return parameters_of(trainer)

    base = after_a_step()
    moved = names_that_differ(base, after_a_step(adversarial__grl_lambda=5))
    assert moved and all(name.startswith(("noise_model.", "day_layers.")) for name in moved)
    weak = {"adversarial__grl_lambda": 5, "adversarial__noisy_loss_weight": 0.1}
    warming_up = {"adversarial__grl_lambda": 10, "adversarial__noisy_loss_weight": 0.2, "adversarial__warmup_steps": 2}
    assert not names_that_differ(after_a_step(**weak), after_a_step(**warming_up))  # half of both at the first step


@pytest.mark.parametrize(
    ("key", "held"), [("model__rnn_trainable", ".recurrent."), ("model__input_network__input_trainable", "day_layers.")]
)
def test_a_part_held_fixed_keeps_its_weights(make_trainer, key, held):
    def moved(trainable):
        trainer = make_trainer(**{key: trainable})
        before = parameters_of(trainer)
        take_steps(trainer, 2)
        return names_that_differ(before, parameters_of(trainer))

    free = moved(True)
    assert any(held in name for name in free)
    assert moved(False) == {name for name in free if held not in name}


@pytest.mark.parametrize("key", ["model__rnn_dropout", "model__input_network__input_layer_dropout"])
def test_dropout_acts_in_training_and_not_in_validation(make_trainer, key):
    none, some, again = (make_trainer(**NOTHING_RANDOM | {key: value}) for value in (0, 0.5, 0.5))
    assert none.validation()["avg_loss"] == some.validation()["avg_loss"]
    assert take_steps(none)["loss"] != take_steps(some)["loss"] == take_steps(again)["loss"]


# ---- seeds and batches


def test_the_seed_decides_the_first_weights_and_the_other_one_does_not(make_trainer):
    base = parameters_of(make_trainer())
    assert not names_that_differ(base, parameters_of(make_trainer()))
    assert not names_that_differ(base, parameters_of(make_trainer(dataset__seed=2)))
    assert names_that_differ(base, parameters_of(make_trainer(seed=11)))


@pytest.mark.parametrize(
    ("random_part", "differs"),
    [({}, False), ({"model__rnn_dropout": 0.3}, True), ({"dataset__data_transforms__white_noise_std": 1.0}, True)],
    ids=["nothing random", "dropout", "augmentation"],
)
def test_the_seed_decides_dropout_and_augmentation(make_trainer, random_part, differs):
    one, other = (make_trainer(**NOTHING_RANDOM | random_part, seed=seed) for seed in (1, 2))
    other.model.load_state_dict(one.model.state_dict())
    assert (take_steps(one)["loss"] != take_steps(other)["loss"]) == differs


def test_the_seed_of_the_data_set_decides_the_batches_and_the_other_one_does_not(make_trainer):
    def first_batches(**overrides):
        batches = make_trainer(**overrides).train_batches
        return [batches[i]["trial_ids"].tolist() for i in range(5)]

    assert first_batches() == first_batches(seed=11)
    assert first_batches() != first_batches(dataset__seed=2)


def test_a_drawn_seed_is_logged_and_a_resumed_run_goes_on_with_it(make_trainer):
    trainer = make_trainer(seed=-1, num_training_batches=3)
    trainer.train()
    assert f"seed: {trainer.config.seed} (drawn" in log_of(trainer)
    assert make_trainer("resume", seed=-1).config.seed == trainer.config.seed


def test_accumulated_batches_are_the_next_ones_of_the_plan_and_make_one_step(make_trainer, monkeypatch):
    trainer = make_trainer(gradient_accumulation_steps=2, dataset__batch_size=2, num_training_batches=3)
    assert "a batch is one optimiser step: 2 trials a device x 2 accumulated x 1 process(es) = 4 trials" in log_of(
        trainer
    )
    seen, step = [], trainer.train_step

    def train_step(batches):
        seen.append([batch["trial_ids"].tolist() for batch in batches])
        return step(batches)

    monkeypatch.setattr(trainer, "train_step", train_step)
    assert len(trainer.train()["train_losses"]) == 3
    plan = [trainer.train_batches[i]["trial_ids"].tolist() for i in range(6)]
    assert seen == [plan[0:2], plan[2:4], plan[4:6]]


def test_loader_workers_change_nothing_in_a_training(make_trainer):
    trainers = [make_trainer(num_training_batches=2, dataset__num_dataloader_workers=n) for n in (0, 2)]
    for trainer in trainers:
        trainer.train()
    assert trainers[0].train_losses == trainers[1].train_losses
    assert not names_that_differ(*map(parameters_of, trainers))


# ---- the model


@pytest.mark.parametrize(
    ("change", "units", "layers"),
    [  # units and layers of the noise, clean and noisy models
        ({}, (4, 5, 5), (2, 3, 2)),
        ({"n_units": 7}, (4, 7, 7), (2, 3, 2)),
        ({"noise_units": 7}, (7, 5, 5), (2, 3, 2)),
        ({"n_layers": 1}, (4, 5, 5), (2, 1, 2)),
        ({"noise_n_layers": 3}, (4, 5, 5), (3, 3, 2)),
        ({"noisy_n_layers": 1}, (4, 5, 5), (2, 3, 1)),
    ],
)
def test_the_model_has_the_units_and_layers_asked_for(change, units, layers):
    model = build_model(tiny_config(**{f"model__{key}": value for key, value in change.items()}))
    parts = [part.recurrent for part in (model.noise_model, model.clean_speech_model, model.noisy_speech_model)]
    assert tuple(part.hidden_size for part in parts) == units
    assert tuple(part.num_layers for part in parts) == layers


@pytest.mark.parametrize(
    ("size", "stride", "log_with"), [(9, 4, "none"), (9, 3, "none"), (0, 4, "tensorboard")]
)  # with a picture of what has no patches
def test_patches_are_of_the_size_and_stride_asked_for(make_trainer, size, stride, log_with):
    trainer = make_trainer(
        model__patch_size=size, model__patch_stride=stride, num_training_batches=1, log_with=log_with
    )
    trainer.train()
    assert trainer.model.clean_speech_model.recurrent.gru.input_size == max(size, 1) * 8
    logits = trainer.validation(return_logits=True)["logits"]
    lengths = [output_lengths(trial.n_time_steps, size, stride) for trial in trainer.val_trials]
    assert [len(frames) for frames in logits] == lengths


# ---- device and precision


def test_use_amp_reaches_the_matrix_products(make_trainer, monkeypatch):
    monkeypatch.setattr(Backend, "_has_bf16", lambda _: True)
    exact, rounded = (take_steps(make_trainer(use_amp=use_amp)) for use_amp in (False, True))
    assert exact["clean"] != rounded["clean"]
    assert exact["clean"] == pytest.approx(rounded["clean"], rel=0.05)


@pytest.mark.parametrize(("use_tpu", "said"), [(True, True), (False, False)])
def test_a_tpu_that_is_wished_for_and_missing_is_said_and_training_goes_on(make_trainer, use_tpu, said):
    trainer = make_trainer(use_tpu=use_tpu, num_training_batches=1)
    assert len(trainer.train()["train_losses"]) == 1
    assert ("use_tpu is true and no TPU is attached" in log_of(trainer)) == said


@pytest.mark.parametrize(
    ("kind", "gpu_number", "n_gpus", "taken"),
    [("cuda", "1", 2, [1]), ("cuda", 0, 2, [0]), ("cuda", "1", 1, [0]), ("cuda", "7", 4, [0]), ("cpu", "1", 2, [])],
)
def test_gpu_number_says_which_gpu_and_the_first_is_taken_where_it_is_not_there(
    monkeypatch, caplog, kind, gpu_number, n_gpus, taken
):
    found = []
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    accelerator = SimpleNamespace(device=torch.device(kind), process_index=0, num_processes=1, is_main_process=True)
    accelerator.local_process_index = 0
    monkeypatch.setattr(backend, "_make_accelerator", lambda *_: accelerator)
    Backend(kind, gpu_number=gpu_number)
    assert found == taken
    assert (f"this machine has {n_gpus} GPU(s); taking number 0" in caplog.text) == (
        bool(taken) and taken[0] != int(gpu_number)
    )


# ---- logging and validation


@pytest.mark.parametrize(
    ("n_batches", "train_log", "val_step", "logged", "validated"),
    [(5, 2, 10, [2, 4, 5], [5]), (4, 1, 2, [1, 2, 3, 4], [2, 4]), (4, 10, 3, [4], [3, 4])],
)
def test_training_is_logged_and_validated_after_so_many_batches_and_at_the_end(
    make_trainer, n_batches, train_log, val_step, logged, validated
):
    trainer = make_trainer(
        num_training_batches=n_batches, batches_per_train_log=train_log, batches_per_val_step=val_step
    )
    statistics = trainer.train()
    log = log_of(trainer)
    assert [int(n) for n in re.findall(r"batch (\d+): loss", log)] == logged
    assert [int(n) for n in re.findall(r"validation after batch (\d+): PER", log)] == validated
    assert (len(statistics["train_losses"]), len(statistics["val_PERs"])) == (n_batches, len(validated))


@pytest.mark.parametrize(
    ("change", "validation_line", "session_lines", "session_numbers"),
    [
        ({}, True, 2, 2),
        ({"log_individual_day_val_PER": False}, True, 0, 0),
        ({"log_val_skip_logs": True}, False, 0, 2),  # the trackers still get them
    ],
)
def test_what_a_validation_logs(make_trainer, monkeypatch, change, validation_line, session_lines, session_numbers):
    trainer = make_trainer(num_training_batches=1, **change)
    numbers = {}
    monkeypatch.setattr(trainer.backend, "log", lambda values, step: numbers.update(values))
    trainer.train()
    log = log_of(trainer)
    assert ("validation after batch 1: PER" in log) == validation_line == ("decoded" in log)
    assert len(re.findall(r"t15\.\S+ PER", log)) == session_lines
    assert sum(name.startswith("val_PER/t15.") for name in numbers) == session_numbers
    assert "val/PER" in numbers


def test_early_stopping_is_off_unless_asked_for(make_trainer, monkeypatch):
    steps = []
    for early_stopping in (False, True):
        trainer = make_trainer(
            num_training_batches=6, batches_per_val_step=1, early_stopping=early_stopping, early_stopping_val_steps=2
        )
        monkeypatch.setattr(trainer, "validation", scripted_validation(trainer, [(0.5, 1.0)] * 6))
        trainer.train()
        steps.append(trainer.step)
    assert steps == [6, 3]


def test_resuming_a_run_that_stopped_early_trains_no_further_unless_it_may(train, make_trainer, monkeypatch, capsys):
    def validation(self, **_):
        return scripted_validation(self, [(0.5, 1.0)])()

    monkeypatch.setattr(BrainToTextDecoder_Trainer, "validation", validation)
    settings = {"num_training_batches": 9, "batches_per_val_step": 1, "early_stopping": True}
    assert train(**settings, early_stopping_val_steps=2) == 0
    last = find_checkpoint(make_trainer("resume", **settings).output_dir)[0].with_name("last_checkpoint")
    assert load_checkpoint(last)["step"] == 3
    capsys.readouterr()
    assert train("--resume", **settings, early_stopping_val_steps=2) == 0
    assert "stopped early already" in capsys.readouterr().out and load_checkpoint(last)["step"] == 3
    assert train("--resume", **settings, early_stopping_val_steps=4) == 0
    assert load_checkpoint(last)["step"] == 5


# ---- what is written


WRITTEN = {"args.yaml", "best_checkpoint", "last_checkpoint", "val_metrics.pkl"}


@pytest.mark.parametrize(
    ("change", "more", "fewer"),
    [
        ({}, set(), set()),
        ({"save_best_checkpoint": False}, set(), {"best_checkpoint"}),
        ({"save_all_val_steps": True}, {"checkpoint_batch_3", "checkpoint_batch_4"}, set()),
        ({"save_final_model": True}, {"final_checkpoint_batch_4"}, set()),
        ({"save_val_metrics": False}, set(), {"val_metrics.pkl"}),
        ({"batches_per_save": 2}, {"checkpoint_batch_2", "checkpoint_batch_4"}, set()),
        ({"batches_per_save": 10**9}, set(), set()),
        (  # both ask for a checkpoint of the same step
            {"batches_per_save": 3, "save_all_val_steps": True}, {"checkpoint_batch_3", "checkpoint_batch_4"}, set(),
        ),
    ],
)  # fmt: skip
def test_each_saving_option_adds_or_drops_its_files(make_trainer, change, more, fewer):
    trainer = make_trainer(num_training_batches=4, **change)
    trainer.train()
    assert {path.name for path in trainer.checkpoint_dir.iterdir()} == (WRITTEN | more) - fewer
    for path in trainer.checkpoint_dir.glob("*checkpoint_batch_*"):
        assert load_checkpoint(path)["step"] == int(path.name.rpartition("_")[2])


def test_without_a_best_checkpoint_the_last_one_is_evaluated(make_trainer):
    trainer = make_trainer(save_best_checkpoint=False, num_training_batches=4)
    trainer.train()
    results = evaluate(trainer.output_dir, device="cpu", lm="none", lexicon=None)
    assert results["step"] == 4 and results["per"] == trainer.val_PERs[-1]
    assert results["checkpoint"].endswith("last_checkpoint")


def test_a_kill_while_a_periodic_checkpoint_is_written_does_not_keep_the_run_from_resuming(make_trainer, monkeypatch):
    class Killed(BaseException):
        pass

    trainer = make_trainer(batches_per_save=4)
    save = torch.save

    def save_or_be_killed(state, file):
        if state["step"] == 4:
            file.write(b"half of it")
            file.flush()
            raise Killed
        save(state, file)

    monkeypatch.setattr(torch, "save", save_or_be_killed)
    with pytest.raises(Killed):
        trainer.train()
    monkeypatch.undo()
    half_written = [path for path in trainer.checkpoint_dir.iterdir() if path.suffix == ".tmp"]
    assert len(half_written) == 1
    assert make_trainer("resume", batches_per_save=4).step == 3
    assert not half_written[0].exists()


# ---- a checkpoint_dir that is not in output_dir


def test_checkpoints_go_elsewhere_are_resumed_from_there_and_evaluated(train, tmp_path, capsys):
    elsewhere = tmp_path / "big disk" / "weights"
    assert train(checkpoint_dir=elsewhere) == 0
    assert {"best_checkpoint", "last_checkpoint", "args.yaml"} <= {path.name for path in elsewhere.iterdir()}
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"training_log", "train_val_trials.json", ".in_use"}
    assert train("--resume", "--num_batches", 5, checkpoint_dir=elsewhere) == 0
    assert load_checkpoint(elsewhere / "last_checkpoint")["step"] == 5
    command = re.findall(r"evaluate: .*evaluate_model.py (.*)", capsys.readouterr().out)[-1]
    model_path = evaluate_model.parse_arguments(shlex.split(command)).model_path  # as a shell reads it
    assert (
        evaluate(model_path, output_dir=tmp_path / "results", device="cpu", lm="none", lexicon=None)["n_trials"] == 10
    )


def test_checkpoints_elsewhere_are_neither_mixed_with_another_runs_nor_lost(train, tmp_path, capsys):
    elsewhere = tmp_path / "weights"
    elsewhere.mkdir()
    (elsewhere / "thesis.tex").write_text("years of work")
    assert train(checkpoint_dir=elsewhere) == 0  # other files are no hindrance
    before = (elsewhere / "best_checkpoint").read_bytes()
    assert train(checkpoint_dir=elsewhere, output_dir=tmp_path / "other") == 2
    assert "weights holds an earlier run's files" in capsys.readouterr().err
    assert (elsewhere / "best_checkpoint").read_bytes() == before and not (tmp_path / "other").exists()


def test_a_second_trainer_takes_a_free_checkpoint_dir_too(make_trainer, tmp_path):
    first, second = (make_trainer(checkpoint_dir=tmp_path / "weights") for _ in range(2))
    assert [first.output_dir, second.output_dir] == [tmp_path / "run", tmp_path / "run_2"]
    assert [first.checkpoint_dir, second.checkpoint_dir] == [tmp_path / "weights", tmp_path / "weights_2"]


@pytest.mark.parametrize("place", [".", "run", "run/checkpoint", "run/weights", "weights"])
def test_overwriting_never_removes_what_no_run_wrote(train, tmp_path, place):
    checkpoint_dir = tmp_path / place
    others = [checkpoint_dir / "thesis.tex", checkpoint_dir / "chapters" / "one.tex", checkpoint_dir / ".editor.tmp"]
    assert train(checkpoint_dir=checkpoint_dir, batches_per_save=1) == 0
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_text("years of work")
    assert train("--overwrite", checkpoint_dir=checkpoint_dir, num_training_batches=2) == 0
    assert all(path.read_text() == "years of work" for path in others)
    assert (tmp_path / "settings.yaml").exists()
    assert load_checkpoint(checkpoint_dir / "last_checkpoint")["step"] == 2
    assert not (checkpoint_dir / "checkpoint_batch_3").exists()


def test_a_folder_with_a_checkpoint_folder_of_another_program_is_no_run(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "model.ckpt").write_text("weeks of work")
    with pytest.raises(FileExistsError, match="holds no earlier run"):
        check_vacant(tmp_path, overwrite=True)


def test_a_linked_checkpoint_folder_is_emptied_and_stays_linked(tmp_path):
    disk, run = tmp_path / "disk", tmp_path / "run"
    disk.mkdir(), run.mkdir()
    (disk / "best_checkpoint").touch()
    (run / "checkpoint").symlink_to(disk)
    remove_run(run, run / "checkpoint")
    assert (run / "checkpoint").is_symlink() and not list(disk.iterdir())


# ---- resuming with other settings


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model__rnn_trainable", False),
        ("model__input_network__input_trainable", False),
        ("adversarial__enabled", False),
        ("dataset__feature_subset", "[0, 1, 2]"),
    ],
)
def test_settings_that_a_resumed_run_cannot_change_are_refused_in_words(make_trainer, key, value):
    make_trainer(num_training_batches=1).train()
    with pytest.raises(CheckpointError, match=f"(?s)cannot be resumed.*{re.escape(key.replace('__', '.'))}: .* now"):
        make_trainer("resume", **{key: value})


# ---- command lines


def test_named_options_are_settings_and_set_comes_after_them():
    options = train_model.parse_arguments(
        ["--batch_size", "2", "--num_batches", "7", "--output_dir", "o", "--data_dir", "d", "--disable_mixed_precision",
         "--set", "num_training_batches=8", "lr_max=0.1"]
    )  # fmt: skip
    assert train_model.overrides(options) == [
        "dataset.batch_size=2", "num_training_batches=7", "output_dir=o", "dataset.dataset_dir=d", "use_amp=False",
        "num_training_batches=8", "lr_max=0.1",
    ]  # fmt: skip
    assert train_model.overrides(train_model.parse_arguments([])) == []


def test_a_named_option_changes_the_run(train, tmp_path):
    assert train("--disable_mixed_precision", "--num_batches", 1, "--batch_size", 3, use_amp=True) == 0
    state = load_checkpoint(tmp_path / "run" / "checkpoint" / "last_checkpoint")
    assert (state["step"], state["config"]["use_amp"], state["config"]["dataset"]["batch_size"]) == (1, False, 3)


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_device_is_the_one_asked_for(make_trainer, tmp_path, monkeypatch, capsys, command):
    trainer = make_trainer(num_training_batches=1)
    trainer.train()
    options = {
        "train": [train_model, "--config_path", trainer.checkpoint_dir / "args.yaml", "--output_dir", tmp_path / "new"],
        "evaluate": [evaluate_model, "--model_path", trainer.output_dir, "--lm", "none"],
    }
    module, *arguments = options[command]
    arguments = list(map(str, arguments))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert module.main([*arguments, "--device", "cuda"]) == 2
    assert "PyTorch sees no CUDA GPU" in capsys.readouterr().err
    monkeypatch.setattr(backend, "tpu_attached", lambda: True)  # it would be chosen
    assert module.main([*arguments, "--device", "cpu"]) == 0
    assert "device cpu (as asked for)" in capsys.readouterr().err


@pytest.mark.parametrize("options", [(), ("--overwrite",)])
def test_ctrl_c_in_training_ends_it_in_a_line_that_says_how_to_go_on(train, monkeypatch, capsys, options):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(BrainToTextDecoder_Trainer, "train_step", stop)
    assert train(*options) == 130
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == "interrupted; go on with the same command and --resume" + " in place of --overwrite" * len(options)


@pytest.mark.parametrize("place", ["rnn_trainer", "rnn_trainer.index_splits"])
def test_ctrl_c_while_importing_or_reading_data_ends_it_in_a_line(train, monkeypatch, capsys, place):
    class Module:
        def __getattr__(self, _):
            raise KeyboardInterrupt

    if place == "rnn_trainer":
        monkeypatch.setitem(sys.modules, place, Module())
    else:
        monkeypatch.setattr(place, lambda *_, **__: Module().any)
    assert train() == 130
    assert capsys.readouterr().err == "interrupted before the training began\n"


def test_ctrl_c_in_an_evaluation_ends_it_in_a_line(monkeypatch, capsys):
    def stop(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluate_model, "evaluation", stop)
    assert evaluate_model.main([]) == 130
    assert capsys.readouterr().err == "evaluate_model.py: interrupted\n"


def test_a_directory_that_cannot_be_made_is_said_without_a_traceback(train, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert train(output_dir=tmp_path / "file" / "run") == 2
    assert "Not a directory" in capsys.readouterr().err
    assert train(checkpoint_dir=tmp_path / "file") == 2
    assert "File exists" in capsys.readouterr().err and (tmp_path / "file").read_text() == "mine"


def test_a_huge_number_is_no_fault(make_trainer):
    huge = dict.fromkeys(
        ("batches_per_train_log", "batches_per_val_step", "batches_per_save", "early_stopping_val_steps",
         "lr_decay_steps", "adversarial__warmup_steps", "dataset__days_per_batch", "dataset__n_time_buckets",
         "dataset__max_seq_elements", "seed", "dataset__seed"), 10**15,
    )  # fmt: skip
    trainer = make_trainer(**huge, num_training_batches=1)
    assert all(map(math.isfinite, trainer.train()["train_losses"]))


def test_runs_too_long_for_the_disk_are_refused_before_anything_is_written(make_trainer, tmp_path):
    for key in ("save_all_val_steps", "batches_per_save"):
        with pytest.raises(CheckpointError, match="save less"):
            make_trainer(num_training_batches=10**15, **{key: 1 if key == "batches_per_save" else True})
    assert not (tmp_path / "run").exists()


def test_evaluation_without_a_model_path_finds_checkpoints_kept_elsewhere(make_trainer, tmp_path):
    trainer = make_trainer(checkpoint_dir=tmp_path / "elsewhere" / "weights", num_training_batches=2)
    trainer.train()
    save_config(trainer.config, tmp_path / "args.yaml")
    options = {"output_dir": tmp_path / "results", "device": "cpu", "lm": "none", "lexicon": None}
    results = evaluate(config_path=tmp_path / "args.yaml", **options)
    assert results["checkpoint"] == str(tmp_path / "elsewhere" / "weights" / "best_checkpoint")


def test_fewer_processes_than_tpu_cores_are_said(make_trainer):
    for cores, use_tpu, said in ((8, True, True), (1, True, False), (8, False, False)):
        trainer = make_trainer(num_tpu_cores=cores, use_tpu=use_tpu)
        trainer.backend.kind = "xla"
        trainer._log_device()
        assert (f"num_tpu_cores is {cores}, and this run has 1 process" in log_of(trainer)) == said
