"""The trainer: steps, rounds, validation, checkpoints, resuming, and what it says when things go wrong."""

import json
import logging
import math
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import rnn_trainer
from checkpointing import CheckpointError, check_same_run, load_checkpoint
from ctc import greedy_collapse, output_lengths
from dataset import EvalBatches, make_loader
from evaluate_model_helpers import edit_distance
from rnn_trainer import TrainingDiverged
from validation import look_at_trials, save_validation


def state_of(trainer):
    moments = [state[name] for state in trainer.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq", "step")]
    return [tensor.clone() for tensor in (*trainer.model.state_dict().values(), *moments)]


def assert_equal_states(first, second):
    assert len(first) == len(second)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_training_returns_its_four_records_and_goes_on_when_called_again(make_trainer):
    trainer = make_trainer()
    for round_ in (1, 2):
        statistics = trainer.train()
        assert trainer.step == 6 * round_
        assert set(statistics) == {"train_losses", "val_losses", "val_PERs", "val_metrics"}
        assert len(statistics["train_losses"]) == 6 * round_
        assert (
            len(statistics["val_PERs"]) == len(statistics["val_losses"]) == len(statistics["val_metrics"]) == 2 * round_
        )
        assert all(math.isfinite(loss) for loss in statistics["train_losses"])


def test_training_lowers_the_loss(make_trainer):
    losses = make_trainer(num_training_batches=40, lr_decay_steps=200, lr_max=0.02, batches_per_val_step=40).train()[
        "train_losses"
    ]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(make_trainer, tmp_path):
    whole = make_trainer(output_dir=tmp_path / "whole")
    whole.train()
    first = make_trainer(num_training_batches=3)
    first.train()
    second = make_trainer("resume")
    assert second.step == 3
    second.train()
    assert_equal_states(state_of(whole), state_of(second))
    assert second.train_losses == whole.train_losses
    assert second.val_PERs == whole.val_PERs
    assert (second.best_PER, second.best_step) == (whole.best_PER, whole.best_step)


def test_a_second_round_can_be_resumed_too(make_trainer, tmp_path):
    whole = make_trainer(output_dir=tmp_path / "whole", num_training_batches=3)
    whole.train()
    whole.train()
    first = make_trainer(num_training_batches=3)
    first.train()
    second = make_trainer("resume", num_training_batches=3)
    second.train()
    assert_equal_states(state_of(whole), state_of(second))


def test_resuming_with_another_model_is_refused_and_another_rate_is_said(make_trainer, caplog):
    make_trainer(num_training_batches=3).train()
    with pytest.raises(CheckpointError, match=r"model\.n_units: 5 in the checkpoint, 7 now"):
        make_trainer("resume", model__n_units=7)
    logging.getLogger("b2txt").propagate = True
    check_same_run({"lr_max": 1.0, "dataset": {"sessions": []}}, {"lr_max": 2.0, "dataset": {"sessions": []}}, "x")
    assert "lr_max: 1.0 before, 2.0 now" in caplog.text


def test_resuming_without_a_checkpoint_starts_from_the_beginning_and_says_so(make_trainer):
    trainer = make_trainer("resume")
    assert trainer.step == 0
    said = f"no checkpoint in {trainer.checkpoint_dir}: starting from the beginning"
    assert said in (trainer.output_dir / "training_log").read_text()


def test_a_damaged_last_checkpoint_is_passed_over_in_resuming(make_trainer):
    first = make_trainer(num_training_batches=3)
    first.train()
    (first.checkpoint_dir / "last_checkpoint").unlink()  # it may share its content with the best one
    (first.checkpoint_dir / "last_checkpoint").write_bytes(b"half")
    second = make_trainer("resume")
    assert second.step == 3
    second.train()
    assert load_checkpoint(first.checkpoint_dir / "last_checkpoint")["step"] == 6
    assert not list(first.checkpoint_dir.glob(".*"))


@pytest.mark.parametrize("split", [[4], [2, 2], [1, 3]])
def test_micro_batches_and_padding_trials_do_not_change_a_step(make_trainer, split):
    """One batch of 4 trials, or micro-batches of 2 and 2, or of 1 and 3, each padded to 5: the same step."""

    def step(batch_sizes):
        trainer = make_trainer(
            model__rnn_dropout=0, dataset__data_transforms__white_noise_std=0,
            dataset__data_transforms__constant_offset_std=0, dataset__data_transforms__random_cut=0,
            dataset__n_time_buckets=1,
        )  # fmt: skip
        trainer.model.double()
        trials, batches = trainer.train_trials[:4], []
        for size in batch_sizes:
            batch = EvalBatches(trials[:size], trainer.config, batch_size=5)[0]
            trials = trials[size:]
            batches.append({**batch, "features": batch["features"].double(), "weights": batch["weights"].double()})
        metrics = trainer.train_step(batches)
        return metrics, [p.detach().clone() for p in trainer.model.parameters()]

    metrics, parameters = step([4])
    metrics_split, parameters_split = step(split)
    torch.testing.assert_close(metrics, metrics_split, rtol=1e-6, atol=1e-6)
    for one, other in zip(parameters, parameters_split, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_clipping_bounds_the_step_and_zero_switches_it_off(make_trainer):
    def after_step(clip):
        trainer = make_trainer(grad_norm_clip_value=clip, epsilon=1000.0, weight_decay=0)  # steps follow gradients
        before = torch.nn.utils.parameters_to_vector(trainer.model.parameters())
        norm = trainer.train_step([trainer.train_batches[0]])[-1]
        return norm, (torch.nn.utils.parameters_to_vector(trainer.model.parameters()) - before).norm().item()

    norm, free = after_step(0)
    norm_clipped, clipped = after_step(0.1)
    assert norm == norm_clipped > 0.1
    assert clipped / free == pytest.approx(0.1 / norm.item(), rel=0.05)


def test_only_the_named_checkpoints_are_written(make_trainer, tmp_path):
    trainer = make_trainer(save_final_model=True, save_val_logits=False, save_all_val_steps=True, batches_per_save=2)
    trainer.train()
    trainer._save_checkpoint("epoch_5", 5)
    names = {path.name for path in (tmp_path / "run" / "checkpoint").iterdir()}
    assert names == {
        "args.yaml", "best_checkpoint", "last_checkpoint", "val_metrics.pkl", "epoch_5", "final_checkpoint_batch_6",
        *(f"checkpoint_batch_{step}" for step in (2, 3, 4, 6)),
    }  # fmt: skip
    assert load_checkpoint(tmp_path / "run" / "checkpoint" / "epoch_5")["epoch"] == 5


def test_a_checkpoint_holds_plain_values_and_its_preprocessing(make_trainer):
    trainer = make_trainer(num_training_batches=3)
    trainer.train()
    state = load_checkpoint(trainer.checkpoint_dir / "best_checkpoint")
    assert state["preprocessing"] == {
        "smooth_data": True, "smooth_kernel_std": 2, "smooth_kernel_size": 100, "smooth_causal": False,
        "feature_subset": None, "patch_size": 14, "patch_stride": 4,
    }  # fmt: skip
    assert state["sessions"] == trainer.config.dataset.sessions
    assert state["val_PER"] == trainer.best_PER


@pytest.mark.parametrize(
    ("options", "arrays"),
    [({}, {"logits"}), ({"save_val_data": True}, {"logits", "input_features"}), ({"save_val_logits": False}, set())],
    ids=["default", "data", "no logits"],
)
def test_the_best_validation_is_kept_under_the_original_s_names(make_trainer, options, arrays):
    trainer = make_trainer(num_training_batches=3, **options)
    trainer.train()
    kept = pickle.loads((trainer.checkpoint_dir / "val_metrics.pkl").read_bytes())
    assert {"logits", "input_features"} & set(kept) == arrays
    assert kept["avg_PER"] == trainer.best_PER and kept["avg_loss"] == trainer.best_loss and kept["step"] == 3
    trials = trainer.val_trials
    assert kept["day_indicies"] == [trial.day for trial in trials]
    assert kept["block_nums"] == [trial.block_num for trial in trials]
    assert kept["trial_nums"] == [trial.trial_num for trial in trials]
    assert ["".join(map(chr, codes)) for codes in kept["transcription"]] == [trial.sentence_label for trial in trials]
    assert [len(true) for true in kept["true_seq"]] == kept["phone_seq_lens"]
    edits = [edit_distance(a, b) for a, b in zip(kept["true_seq"], kept["decoded_seqs"], strict=True)]
    for day, sums in kept["day_PERs"].items():
        of_day = [index for index, trial in enumerate(trials) if trial.day == day]
        assert sums["total_edit_distance"] == sum(edits[index] for index in of_day)
        assert sums["total_seq_length"] == sum(kept["phone_seq_lens"][index] for index in of_day)
    if "logits" in arrays:
        assert [len(logits) for logits in kept["logits"]] == kept["n_time_steps"]
        assert [greedy_collapse(logits.argmax(-1)) for logits in kept["logits"]] == kept["decoded_seqs"]
    if "input_features" in arrays:
        assert [len(features) for features in kept["input_features"]] == [trial.n_time_steps for trial in trials]


def test_a_kill_while_validation_results_are_written_leaves_the_earlier_ones(make_trainer, monkeypatch):
    trainer = make_trainer(num_training_batches=3)
    trainer.train()
    before = (trainer.checkpoint_dir / "val_metrics.pkl").read_bytes()

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("checkpointing.os.fsync", stop)
    metrics = trainer.validation(return_logits=True)
    with pytest.raises(KeyboardInterrupt):
        save_validation(metrics, trainer.checkpoint_dir, 9)
    assert (trainer.checkpoint_dir / "val_metrics.pkl").read_bytes() == before
    assert not list(trainer.checkpoint_dir.glob(".*"))


def test_validation_counts_every_trial_once_and_sums_edits(make_trainer):
    trainer = make_trainer(dataset__batch_size=3)
    metrics = trainer.validation(return_logits=True, return_data=True)
    assert metrics["n_trials"] == len(trainer.val_trials) == len(metrics["logits"]) == 10
    assert metrics["true_seq"] == [list(trial.labels) for trial in trainer.val_trials]
    assert metrics["phonemes"] == sum(len(trial.labels) for trial in trainer.val_trials)
    assert metrics["avg_PER"] == metrics["edits"] / metrics["phonemes"]
    assert sum(count.edits for count in metrics["day_PERs"].values()) == metrics["edits"]
    assert [len(data) for data in metrics["input_features"]] == [trial.n_time_steps for trial in trainer.val_trials]


def test_validation_reads_another_loader(make_trainer):
    trainer = make_trainer()
    loader = torch.utils.data.DataLoader(EvalBatches(trainer.train_trials[:5], trainer.config), batch_size=None)
    assert trainer.validation(loader)["n_trials"] == 5


def test_validation_takes_batches_as_well_as_a_loader_of_them(make_trainer):
    trainer = make_trainer()
    trainer.undecodable = trainer.val_trials[:1]
    expected = trainer.validation()
    assert expected["n_trials"] == 11
    for loader in (trainer.val_batches, make_loader(trainer.val_batches, trainer.config)):
        assert trainer.validation(loader)["edits"] == expected["edits"]
    part = trainer.validation(make_loader(trainer.val_batches, trainer.config, end=1))
    assert part["n_trials"] < 5  # nothing is added to a part


def test_inference_gives_the_logits_of_validation(make_trainer):
    trainer = make_trainer(dataset__n_time_buckets=1)
    batch = EvalBatches(trainer.val_trials[:2], trainer.config, batch_size=2)[0]
    logits = trainer.inference(batch["features"].numpy(), batch["day_indices"], batch["n_time_steps"])
    expected = trainer.validation(return_logits=True)["logits"]
    for row, trial_id in enumerate(batch["trial_ids"].tolist()):
        frames = len(expected[trial_id])
        torch.testing.assert_close(logits[row, :frames], torch.from_numpy(expected[trial_id]), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "days", "lengths", "problems"),
    [
        ((2, 30, 8), [1, 0], [0, 31], ["n_time_steps of trial 0 is 0; possible are 1 to 30", "of trial 1 is 31;"]),
        ((2, 30, 8), [-1, 3], [30, 1], ["day_indices of trial 0 is -1; possible are 0 to 2 (t15.2030.01.06", "is 3;"]),
        ((1, 30, 9), [5], [99], ["9 features a time bin; the model takes 8", "n_time_steps", "day_indices"]),
        ((2, 30, 8), [1], 30, ["n_time_steps is (); it must be (2,)", "day_indices is (1,); it must be (2,)"]),
        ((30, 8), [1], [30], ["features is (30, 8); it must be (trials, time bins, 8 features)"]),
        ((1, 13, 8), [1], [13], ["13 time bins; one patch takes 14"]),
        ((0, 30, 8), [], [], ["no trial"]),
    ],
)
def test_inference_names_everything_that_does_not_fit(make_trainer, shape, days, lengths, problems):
    trainer = make_trainer()
    with pytest.raises(ValueError, match="inference is not possible") as caught:
        trainer.inference(torch.zeros(shape), days, lengths)
    assert len(str(caught.value).splitlines()) == 1 + len(problems)
    assert all(problem in str(caught.value) for problem in problems)
    assert trainer.inference(torch.zeros(2, 30, 8), [0, 2], [1, 30]).shape == (2, 5, 41)


def test_an_existing_output_directory_is_kept_and_a_numbered_one_taken(make_trainer, tmp_path):
    first, second, third = make_trainer(), make_trainer(), make_trainer()
    assert [t.output_dir for t in (first, second, third)] == [tmp_path / n for n in ("run", "run_2", "run_3")]
    assert third.checkpoint_dir == tmp_path / "run_3" / "checkpoint"


def test_two_trainers_of_one_script_write_each_to_its_own_log(make_trainer):
    first, second = make_trainer(num_training_batches=2), make_trainer(num_training_batches=3)
    with pytest.raises(ValueError, match="nowhere"):
        make_trainer(dataset__dataset_dir="/nowhere")
    for trainer in (first, second, first):
        trainer.train()
    ends = [[line.split(" trained ")[1].split(";")[0] for line in log.splitlines() if " trained " in line]
            for log in ((trainer.output_dir / "training_log").read_text() for trainer in (first, second))]  # fmt: skip
    assert ends == [["2 batches", "4 batches"], ["3 batches"]]


def test_overwriting_removes_the_earlier_run_and_nothing_else(make_trainer, tmp_path):
    make_trainer(num_training_batches=3).train()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    (tmp_path / "run" / "predictions_val.csv").write_text("old")
    trainer = make_trainer("overwrite")
    assert trainer.step == 0
    written = {"checkpoint", "training_log", "train_val_trials.json", ".in_use"}
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"notes.txt", *written}


def test_nothing_is_written_when_the_data_are_wrong(make_trainer, tmp_path):
    with pytest.raises(ValueError, match="nowhere"):
        make_trainer(dataset__dataset_dir=tmp_path / "nowhere")
    assert not (tmp_path / "run").exists()


def test_early_stopping_counts_validations_without_a_better_per(make_trainer, monkeypatch):
    trainer = make_trainer(
        num_training_batches=20, batches_per_val_step=1, early_stopping=True, early_stopping_val_steps=3
    )
    pers = iter([(0.9, 5.0), (0.8, 5.0), (0.8, 4.0), (0.8, 4.5), (0.85, 3.0), (0.8, 4.0), (0.1, 0.1)])

    def validation(**_):
        per, loss = next(pers)
        return {"avg_PER": per, "avg_loss": loss, "edits": 1, "phonemes": 2, "n_trials": 1, "day_PERs": {},
                "trials": trainer.val_trials[:1], "true_seq": [[1]], "decoded_seqs": [[1]],
                "losses": [5.0], "n_frames": [1]}  # fmt: skip

    monkeypatch.setattr(trainer, "validation", validation)
    trainer.train()
    assert trainer.step == 6  # the third validation was better by its loss; three after it were not
    assert (trainer.best_PER, trainer.best_loss, trainer.best_step) == (0.8, 4.0, 3)


def worse_each_time(trainer):
    """A stand-in for trainer.validation."""
    trial = trainer.val_trials[:1]
    return lambda **_: {
        "avg_PER": 0.5 + trainer.step / 100, "avg_loss": 1.0, "edits": 1, "phonemes": 2, "n_trials": 1, "day_PERs": {},
        "trials": trial, "true_seq": [[1]], "decoded_seqs": [[1]], "losses": [5.0], "n_frames": [1],
    }  # fmt: skip


def test_a_new_round_counts_validations_without_gain_anew_and_a_resumed_one_goes_on(make_trainer, monkeypatch):
    settings = {"batches_per_val_step": 1, "early_stopping": True, "early_stopping_val_steps": 3}
    trainer = make_trainer(num_training_batches=6, **settings)
    monkeypatch.setattr(trainer, "validation", worse_each_time(trainer))
    steps = []
    for _ in range(3):
        trainer.train()
        steps.append(trainer.step)
    assert steps == [4, 6, 9]  # stopped early, at the end of the round, stopped early
    assert [trainer.validations_without_gain, trainer.stopped_early] == [3, True]

    settings["output_dir"] = trainer.output_dir.with_name("resumed")
    first = make_trainer(num_training_batches=3, **settings)
    monkeypatch.setattr(first, "validation", worse_each_time(first))
    first.train()  # to batch 3, two validations without gain
    second = make_trainer("resume", num_training_batches=10, **settings)
    monkeypatch.setattr(second, "validation", worse_each_time(second))
    second.train()
    assert second.step == 4


def test_what_training_returns_does_not_change_afterwards(make_trainer):
    trainer = make_trainer(num_training_batches=2)
    first = trainer.train()
    trainer.train()
    assert [len(record) for record in first.values()] == [2, 1, 1, 1]


def test_a_loss_that_is_no_number_stops_training_and_says_so(make_trainer):
    trainer = make_trainer(num_training_batches=3)
    trainer.train()
    with torch.no_grad():
        trainer.model.clean_speech_model.out.bias[0] = math.nan
    with pytest.raises(TrainingDiverged, match=r"diverged at batch 4: loss nan.*after batch 3.*lower lr_max"):
        trainer.train()
    state = load_checkpoint(trainer.checkpoint_dir / "last_checkpoint")
    assert all(torch.isfinite(tensor).all() for tensor in state["model_state_dict"].values())


def test_divergence_before_the_first_checkpoint_says_that_there_is_none(make_trainer):
    trainer = make_trainer(num_training_batches=3)
    with torch.no_grad():
        trainer.model.clean_speech_model.out.bias[0] = math.nan
    with pytest.raises(TrainingDiverged, match="No checkpoint had been written"):
        trainer.train()


def test_a_model_that_emits_only_blanks_is_said_to(make_trainer, caplog):
    trainer = make_trainer()
    logging.getLogger("b2txt").propagate = True
    with torch.no_grad():
        trainer.model.clean_speech_model.out.bias[0] = 50.0
    trainer.best_PER, trainer.best_loss, trainer.best_step = 0.3, 1.0, 10
    trainer._warn_of_blanks(trainer.validation())
    assert "nothing but blanks, after a PER of 30.00%" in caplog.text
    trainer.best_PER = math.inf
    for _ in range(2):
        trainer._warn_of_blanks(trainer.validation())
    assert "still nothing but blanks" in caplog.text


@pytest.mark.parametrize(
    ("scale", "told"), [(0.0, "the NoiseModel does nothing"), (1.0, ""), (1e3, "more than there is to take")]
)
def test_noise_estimates_that_are_nothing_or_too_much_are_told(make_trainer, caplog, scale, told):
    """At the end of training, from the share that the log states too."""
    trainer = make_trainer(num_training_batches=1, lr_max=1e-12, lr_min=0)
    logging.getLogger("b2txt").propagate = True
    with torch.no_grad():
        for parameter in trainer.model.noise_model.projection.parameters():
            parameter.mul_(scale)
    trainer.train()
    assert ("usual: 0.5% to 100%" in caplog.text) == bool(told) and told in caplog.text
    signal, noise = [], []
    for trial in look_at_trials(trainer.model, trainer.val_trials, trainer.config, trainer.backend):
        signal.append(trial.signal.ravel())
        noise.append(trial.noise.ravel())
    share = np.square(np.concatenate(noise)).sum() / np.square(np.concatenate(signal)).sum()
    assert trainer.val_metrics[-1]["noise_share"] == pytest.approx(share, rel=1e-3)
    stated = float(re.search(r"noise ([\d.]+)% of the signal", caplog.text)[1])
    assert stated == pytest.approx(100 * share, rel=1e-3, abs=0.06)


def test_the_trials_that_are_looked_at_are_those_about_the_median_in_length(make_trainer):
    trainer = make_trainer()
    seen = look_at_trials(trainer.model, trainer.val_trials, trainer.config, trainer.backend)
    lengths = sorted(trial.n_time_steps for trial in trainer.val_trials)
    found = [look.trial.n_time_steps for look in seen]
    assert found == lengths[max(0, len(lengths) // 2 - 7) : len(lengths) // 2 + 1][::-1]
    for look in seen:  # each is its own, whatever its neighbours in the batch
        alone = look_at_trials(trainer.model, [look.trial], trainer.config, trainer.backend)[0]
        for name in ("signal", "noise", "logits"):
            assert np.allclose(getattr(look, name), getattr(alone, name), atol=1e-5)
        assert len(look.signal) == output_lengths(look.trial.n_time_steps, 14, 4)


def test_a_single_gru_has_no_share_of_noise(make_trainer):
    trainer = make_trainer(num_training_batches=1, model__architecture="gru", adversarial__enabled=False)
    assert trainer.train()["val_metrics"][-1]["noise_share"] is None


def test_tensorboard_gets_every_number_and_the_picture(make_trainer, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = make_trainer(log_with="tensorboard", num_training_batches=4)
    trainer.train()
    trainer.backend.finish()
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    tags = events.Tags()
    assert {f"train/{name}" for name in (*rnn_trainer.STEP_METRICS, "lr", "lr_day_layers", "grl_lambda")} <= set(
        tags["scalars"]
    )
    assert {"train/trials_per_second", "val/PER", "val/loss", "val/noise_share"} <= set(tags["scalars"])
    assert sum(tag.startswith("val_PER/t15.") for tag in tags["scalars"]) == 2
    assert tags["images"] == ["val/trial"]
    assert [event.step for event in events.Scalars("train/loss")] == [2, 4]


def test_a_trial_listed_as_bad_is_neither_trained_on_nor_counted(make_trainer):
    session = make_trainer(num_training_batches=1).config.dataset.sessions[1]
    listed = next((t.block_num, t.trial_num) for t in make_trainer().val_trials if t.session == session)
    config = {"dataset__bad_trials_dict": f"{{{session}: {{{listed[0]}: [{listed[1]}]}}}}", "log_with": "tensorboard"}
    trainer = make_trainer(num_training_batches=2, **config)
    trainer.train()
    assert trainer.validation()["n_trials"] == 9
    assert make_trainer("resume", output_dir=trainer.output_dir, **config).step == 2


def test_adversarial_training_can_be_switched_off(make_trainer):
    trainer = make_trainer(adversarial__enabled=False)
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    changed = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed and not any(name.startswith("noisy_speech_model.") for name in changed)


def test_amp_on_a_cpu_warns_and_trains_in_float32(make_trainer):
    trainer = make_trainer(use_amp=True, num_training_batches=2)
    assert "use_amp is true, but" in (trainer.output_dir / "training_log").read_text()
    assert len(trainer.train()["train_losses"]) == 2


def test_the_log_averages_every_step_though_a_validation_came_between(make_trainer, monkeypatch):
    trainer = make_trainer(num_training_batches=4, batches_per_train_log=4, batches_per_val_step=3)
    logged = {}
    monkeypatch.setattr(trainer.backend, "log", lambda values, step: logged.update(values))
    losses = trainer.train()["train_losses"]
    assert logged["train/loss"] == pytest.approx(sum(losses) / 4)


def test_a_random_seed_is_drawn_and_kept(make_trainer):
    trainer = make_trainer(seed=-1)
    assert trainer.config.seed >= 0
    assert f"seed: {trainer.config.seed}" in (trainer.checkpoint_dir / "args.yaml").read_text()


def test_steps_are_profiled_into_the_run_s_directory(make_trainer):
    trainer = make_trainer()
    trainer.train(profile_steps=(2, 3))
    (trace,) = (trainer.output_dir / "profile").glob("*.pt.trace.json")
    events = [event.get("name") for event in json.loads(trace.read_text())["traceEvents"]]
    assert events.count("aten::_ctc_loss") == 2  # one a step
    assert "profile of steps 2 to 3" in (trainer.output_dir / "training_log").read_text()


def test_a_profile_that_reaches_beyond_the_run_is_written_at_its_end(make_trainer):
    trainer = make_trainer(num_training_batches=3)
    trainer.train(profile_steps=(3, 9))
    assert len(list((trainer.output_dir / "profile").iterdir())) == 1


@pytest.mark.parametrize("n_micro", [3, 2])
def test_micro_batches_are_one_batch_of_all_their_trials(make_trainer, tmp_path, n_micro):
    """Also where a step has fewer of them than it accumulates."""
    nothing_random = {
        f"dataset__data_transforms__{k}": 0 for k in ("white_noise_std", "constant_offset_std", "random_cut")
    }
    settings = {"model__rnn_dropout": 0.0, "dataset__n_time_buckets": 1, **nothing_random}
    parts = make_trainer(output_dir=tmp_path / "parts", gradient_accumulation_steps=3, **settings)
    whole = make_trainer(output_dir=tmp_path / "whole", **settings)
    batches = [parts.train_batches[i] for i in range(n_micro)]
    found = parts.train_step(batches)
    expected = whole.train_step([{name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert_close = torch.testing.assert_close
    for a, b in zip(parts.optimizer.state.values(), whole.optimizer.state.values(), strict=True):
        assert_close(a["exp_avg"], b["exp_avg"], rtol=1e-4, atol=1e-7)


def test_a_directory_is_held_from_the_start_to_the_end_of_training(make_trainer):
    """Another process may then go on with the run, though this one, a notebook, lives on."""

    def other_process_may_write():
        code = f"from run_directory import check_not_in_use as c; from pathlib import Path; c(Path({str(directory)!r}))"
        environment = {"PYTHONPATH": str(Path(rnn_trainer.__file__).parent)}
        return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True).returncode == 0

    trainer = make_trainer(num_training_batches=2)
    directory = trainer.output_dir
    assert not other_process_may_write()
    trainer.train()
    assert other_process_may_write()
    trainer.train()
