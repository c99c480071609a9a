"""Faults that people met in this job, each as a case: a clear message that says what to do, or simply working.

The number in a test's name is the case's. Faults of other parts are tested beside their modules:

    1 bf16 without CUDA                     test_rnn_trainer: amp_on_a_cpu
    3 half precision into CTC               test_ctc: half_precision_logits
    4 optimiser made before the move        test_optimizer
    5-7 torch_xla beside a CPU run          test_backend
    8 an output directory used twice        test_end_to_end: an_earlier_run
    9, 15 checkpoints                       test_checkpointing
    10 resuming                             test_end_to_end: a_killed_and_resumed_run; test_documented_use: a_killed_run
    11, 12 checkpoints of CUDA, mismatched  test_original_format
    13 other preprocessing                  test_evaluate_model: the_checkpoint_all_else; test_original_format
    14 final and periodic checkpoints       test_rnn_trainer: only_the_named_checkpoints
    24, 29, 30, 31, 33 several processes    test_processes, test_dataset
    26 no clipping                          test_rnn_trainer: clipping
    27 unknown keys                         test_config
    28 divergence                           test_rnn_trainer: no_number, only_blanks
    32 a schedule a process                 test_processes: twice_the_batch
    34-36 XLA                               xla/test_xla_training
    37 a failing loader                     test_processes: failing_loader
    38 Accelerate's file for a TPU          xla/test_launchers
    39, 40 starting on a TPU                test_launch_tpu_training
    41 collapse before removing blanks      test_ctc: repeats
    42 edits are summed                     test_evaluate_model_helpers
    43 another order of the tokens          test_language_model, test_fst_decoder: token orders
    44 no language model, no memory         test_word_evaluation: nothing_waits; test_fst_decoder: memory
    45 capitals, another language           test_word_evaluation, test_language_model, test_build_lm
    46, 47 the submission                   test_word_evaluation, test_evaluate_model_helpers
"""

import h5py
import numpy as np
import pytest
import torch
from t15_files import N_FEATURES, SESSIONS, small_config, write_data_set, write_split

from config import ConfigError, n_features
from ctc import ctc_loss, output_lengths
from data_augmentations import transform_data
from dataset import EvalBatches, TrainBatches, make_loader
from dataset_index import DataError, index_trials
from rnn_model import build_model


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("B2TXT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def root(tmp_path):
    return write_data_set(tmp_path)


def tiny_model(config):
    config.model.n_units = config.model.noise_units = 4
    return build_model(config).eval()


def test_16_sessions_without_a_val_file_are_no_fault_but_none_with_one_is(root):
    config = small_config(root)
    assert not (root / SESSIONS[0] / "data_val.hdf5").exists()
    assert {trial.session for trial in index_trials(config, "val")} == set(SESSIONS[1:])
    for session in SESSIONS[1:]:
        (root / session / "data_val.hdf5").unlink()
    with pytest.raises(DataError, match=r"No session .* has a data_val\.hdf5 in"):
        index_trials(config, "val")


def test_16_a_val_split_of_probability_0_everywhere_is_said(root):
    with pytest.raises(DataError, match=r"dataset_probability_val is not 0.*no val trial"):
        index_trials(small_config(root, dataset_probability_val=[0, 0, 0]), "val")


def test_17_sessions_without_a_train_file_are_named(root):
    for session in SESSIONS[:2]:
        (root / session / "data_train.hdf5").unlink()
    with pytest.raises(DataError, match=rf"2 of 3 sessions .*{SESSIONS[0]}, {SESSIONS[1]}.*dataset\.sessions"):
        index_trials(small_config(root), "train")


def test_18_more_days_per_batch_than_sessions(root):
    config = small_config(root, SESSIONS[:2], days_per_batch=4, batch_size=4)
    batch = TrainBatches(index_trials(config, "train"), config)[0]
    assert batch["weights"].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("probabilities", [[1], [1] * 4])
def test_19_val_probabilities_of_another_length_than_sessions(root, probabilities):
    with pytest.raises(ConfigError, match=r"dataset_probability_val.*3"):
        small_config(root, dataset_probability_val=probabilities)
    config = small_config(root)  # and where a script changed them after reading
    config.dataset.dataset_probability_val = probabilities
    with pytest.raises(DataError, match=f"has {len(probabilities)} entries, not 3"):
        index_trials(config, "val")


def test_20_the_model_follows_a_feature_subset(root):
    config = small_config(root, feature_subset=[5, 1])
    batch = EvalBatches(index_trials(config, "val"), config)[0]
    assert n_features(config) == batch["features"].shape[2] == 2
    logits = tiny_model(config)(batch["features"], batch["day_indices"])
    assert logits.shape[2] == 41


def test_21_the_unlabelled_test_split_goes_through_the_same_classes(root):
    config = small_config(root)
    trials = index_trials(config, "test", labelled=False)
    seen = []
    for batch in make_loader(EvalBatches(trials, config), config):
        assert not batch["label_lengths"].any()
        seen += batch["trial_ids"][batch["weights"] == 1].tolist()
    assert sorted(seen) == list(range(16))
    with pytest.raises(DataError, match=r"data_test\.hdf5: no trial has labels"):
        index_trials(config, "test")


def test_22_every_trial_that_is_kept_has_a_finite_loss_after_every_random_cut(tmp_path, caplog):
    lengths = [13, *range(30, 38)]  # [5, 5, 40, 40] needs 6 frames, 34 bins
    write_split(tmp_path, SESSIONS[0], "train", lengths, labels=[5, 5, 40, 40])
    config = small_config(tmp_path, SESSIONS[:1], batch_size=len(lengths))
    trials = index_trials(config, "train")
    assert [trial.n_time_steps for trial in trials] == [36, 37]
    for name in ("trial_0000", "trial_0001", "trial_0006"):
        assert f"{SESSIONS[0]}/data_train.hdf5, {name} " in caplog.text
    batch = TrainBatches(trials, config)[0]
    generator = torch.Generator().manual_seed(0)
    least = 99
    for _ in range(20):
        transforms = config.dataset.data_transforms
        features, n_time_steps = transform_data(batch["features"], batch["n_time_steps"], transforms, True, generator)
        lengths = output_lengths(n_time_steps, config.model.patch_size, config.model.patch_stride)
        logits = torch.zeros(len(features), int(lengths.max()), 41)
        assert ctc_loss(logits, batch["labels"], lengths, batch["label_lengths"]).isfinite().all()
        least = min(least, int(n_time_steps.min()))
    assert least == 34  # the longest cut was met: one bin fewer would not do


def test_22_a_trial_shorter_than_a_patch_stays_in_an_unlabelled_batch(tmp_path):
    write_split(tmp_path, SESSIONS[0], "test", [5, 60])
    config = small_config(tmp_path, SESSIONS[:1], batch_size=2)
    batch = EvalBatches(index_trials(config, "test", labelled=False), config)[0]
    logits = tiny_model(config)(batch["features"], batch["day_indices"])
    lengths = output_lengths(batch["n_time_steps"], config.model.patch_size, config.model.patch_stride)
    assert logits.isfinite().all() and sorted(lengths.tolist())[0] == 0


def test_23_evaluation_sees_as_many_frames_as_training(root):
    config = small_config(root)
    features, n_time_steps = torch.randn(1, 60, N_FEATURES), torch.tensor([60])
    config.dataset.data_transforms.random_cut = 0
    for training in (True, False):
        smoothed, lengths = transform_data(features, n_time_steps, config.dataset.data_transforms, training)
        assert smoothed.shape[1] == 60
        frames = output_lengths(lengths, config.model.patch_size, config.model.patch_stride)
        assert frames.item() == 12


def test_24_files_opened_before_workers_start_do_no_harm(root):
    config = small_config(root)
    batches = TrainBatches(index_trials(config, "train"), config)
    alone = [batches[i] for i in range(4)]  # files are open now
    for one, other in zip(make_loader(batches, config, 0, 4, num_workers=2), alone, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_25_a_truncated_file_is_named(root, share):
    path = root / SESSIONS[1] / "data_train.hdf5"
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(DataError, match=rf"{SESSIONS[1]}/data_train\.hdf5: cannot be read as HDF5.*fetch it anew"):
        index_trials(small_config(root), "train")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_25_values_that_are_no_numbers_are_named(root, value):
    with h5py.File(root / SESSIONS[2] / "data_val.hdf5", "r+") as file:
        file["trial_0004/input_features"][11, 2] = value
    with pytest.raises(
        DataError, match=r"data_val\.hdf5, trial_0004: 1 NaN or infinite.*bin 11, feature 2.*bad_trials"
    ):
        index_trials(small_config(root), "val")


def test_25_a_wrong_number_of_features_is_named(root):
    config = small_config(root)
    config.dataset.neural_dim = 512
    with pytest.raises(DataError, match=r"trial_0000: input_features is \(\d+, 6\).*neural_dim.*512"):
        index_trials(config, "val", labelled=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_02_smoothing_takes_every_dtype_on_a_cpu(root, dtype):
    config = small_config(root)
    features = torch.randn(2, 30, N_FEATURES).to(dtype)
    smoothed, _ = transform_data(features, torch.tensor([30, 20]), config.dataset.data_transforms, training=False)
    assert smoothed.dtype == dtype
    assert torch.isfinite(smoothed).all()
