"""Batches: what they hold, the plan's law, shards, workers, and files that change under a run."""

import itertools
import pickle
from dataclasses import replace

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from t15_files import N_FEATURES, SESSIONS, small_config, write_data_set, write_split

import dataset
from dataset import BatchShapes, DataError, EvalBatches, TrainBatches, Trial, batch_shapes, make_loader, time_buckets
from dataset_index import index_trials


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("B2TXT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_data_set(tmp_path_factory.mktemp("data"))


def imagined_trials(day_lengths):
    """Trials without files, for what concerns the plan alone: a list of lengths a day."""
    return [
        Trial(f"day{day}", day, "train", f"/nowhere/{day}", f"trial_{i:04d}", 1, i, length, 1, (1,))
        for day, lengths in enumerate(day_lengths)
        for i, length in enumerate(lengths)
    ]


def imagined_config(n_days, **data):
    return small_config("/nowhere", [f"day{day}" for day in range(n_days)], **data)


def same_batch(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


# ---- what a batch holds ----


def check_batch(batch, trials, shapes, subset=slice(None)):
    n_bins = batch["features"].shape[1]
    assert n_bins in shapes.buckets
    types = {key: (tuple(value.shape), value.dtype) for key, value in batch.items()}
    size = (shapes.batch_size,)
    assert types == {
        "features": ((*size, n_bins, shapes.n_features), torch.float32),
        "n_time_steps": (size, torch.int64),
        "day_indices": (size, torch.int64),
        "labels": ((*size, shapes.label_width), torch.int64),
        "label_lengths": (size, torch.int64),
        "weights": (size, torch.float32),
        "trial_ids": (size, torch.int64),
    }
    for row, trial_id in enumerate(batch["trial_ids"].tolist()):
        if trial_id == -1:
            assert batch["weights"][row] == 0 and batch["label_lengths"][row] == 0
            assert batch["n_time_steps"][row] == n_bins
            assert not batch["features"][row].any() and not batch["labels"][row].any()
            continue
        trial = trials[trial_id]
        with h5py.File(trial.path) as file:
            features = file[trial.key]["input_features"][()][:, subset]
        assert batch["weights"][row] == 1
        assert batch["day_indices"][row] == trial.day
        assert batch["n_time_steps"][row] == len(features)
        np.testing.assert_array_equal(batch["features"][row, : len(features)], features)
        assert not batch["features"][row, len(features) :].any()
        assert batch["label_lengths"][row] == len(trial.labels)
        assert batch["labels"][row, : len(trial.labels)].tolist() == list(trial.labels)
        assert not batch["labels"][row, len(trial.labels) :].any()


def test_a_batch_holds_what_the_files_hold(root):
    config = small_config(root)
    trials = index_trials(config, "train")
    batches = TrainBatches(trials, config)
    for i in range(10):
        check_batch(batches[i], trials, batches.shapes)


def test_a_feature_subset_is_taken_in_its_order(root):
    config = small_config(root, feature_subset=[4, 0, 3])
    trials = index_trials(config, "val")
    batches = EvalBatches(trials, config)
    assert batches.shapes.n_features == 3
    for i in range(len(batches)):
        check_batch(batches[i], trials, batches.shapes, [4, 0, 3])


def test_training_and_validation_share_shapes(root):
    config = small_config(root)
    train, val = index_trials(config, "train"), index_trials(config, "val")
    shapes = batch_shapes(train + val, config)
    assert len(shapes.buckets) == 3 and shapes.label_width == 8 and shapes.batch_size == 4
    assert shapes.buckets[-1] >= max(trial.n_time_steps for trial in train + val)
    for batches, indices in (
        (TrainBatches(train, config, shapes=shapes), 20),
        (EvalBatches(val, config, shapes=shapes), 4),
    ):
        assert {batches[i]["features"].shape[1] for i in range(indices)} <= set(shapes.buckets)
        assert {batches[i]["labels"].shape for i in range(indices)} == {(4, 8)}


def test_the_label_width_is_that_of_the_longest_label_rounded_up():
    config = imagined_config(1)
    (trial,) = imagined_trials([[50]])
    for n_labels, width in ((0, 8), (1, 8), (8, 8), (9, 16)):
        assert batch_shapes([replace(trial, seq_len=n_labels, labels=(1,) * n_labels)], config).label_width == width


# ---- time buckets ----


def padded_bins(lengths, buckets):
    return sum(min(bucket for bucket in buckets if bucket >= length) for length in lengths)


@given(st.lists(st.integers(1, 120), min_size=1, max_size=12), st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_buckets_hold_every_length_and_none_waste_less(lengths, n_buckets):
    buckets = time_buckets(lengths, n_buckets)
    assert list(buckets) == sorted(set(buckets)) and 1 <= len(buckets) <= n_buckets
    assert all(bucket % 8 == 0 for bucket in buckets)
    assert max(lengths) <= buckets[-1] < max(lengths) + 8
    # With so few lengths the least number in a bucket is 1 to 3; every other choice that respects it is tried.
    least = max(1, len(lengths) // (4 * n_buckets))
    ends = sorted({-(-length // 8) * 8 for length in lengths})
    choices = [
        (*chosen, ends[-1])
        for k in range(n_buckets)
        for chosen in itertools.combinations(ends[:-1], k)
        if np.histogram(lengths, [0, *(e + 0.5 for e in (*chosen, ends[-1]))])[0].min() >= least
    ]
    assert padded_bins(lengths, buckets) == min(padded_bins(lengths, choice) for choice in choices)


def test_padding_waste_at_the_real_scale_is_small_and_no_bucket_nearly_empty():
    lengths = np.random.default_rng(0).integers(300, 1501, 8072)
    buckets = time_buckets(lengths, 6)
    assert len(buckets) == 6
    assert lengths.sum() / padded_bins(lengths, buckets) > 0.88
    assert np.histogram(lengths, [0, *(b + 0.5 for b in buckets)])[0].min() >= len(lengths) / 24


def test_no_trials_no_batches():
    for make in (TrainBatches, EvalBatches):
        with pytest.raises(DataError, match="no trials"):
            make([], imagined_config(1))


# ---- the plan ----

UNEVEN = [[40] * 3 + [90] * 2, [40, 60, 90, 90, 110], [60] * 30, [110, 40, 40, 41, 42, 43, 44]]


@pytest.mark.parametrize("world_size", [1, 3])
def test_days_are_uniform_and_trials_uniform_within_their_day(world_size):
    # 7 trials from 3 days: parts of unequal size, days of unequal size, buckets that a day may not have.
    trials = imagined_trials(UNEVEN)
    batches = TrainBatches(trials, imagined_config(4, batch_size=7, days_per_batch=3), world_size=world_size)
    n = 6000
    counts = np.zeros((n, len(trials)))
    for step in range(n):
        np.add.at(counts[step], batches.plan(step)[1].ravel(), 1)
    expected = np.array([1 / (4 * len(UNEVEN[trial.day])) for trial in trials])
    share = counts / (7 * world_size)
    # Micro-steps are independent, trials within one are not: the error is estimated from the micro-steps.
    error = share.std(0) / np.sqrt(n)
    assert np.all(np.abs(share.mean(0) - expected) < 5 * error)
    of_day = np.array([share[:, [t.day == day for t in trials]].sum(1) for day in range(4)])
    assert np.all(np.abs(of_day.mean(1) - 1 / 4) < 5 * of_day.std(1) / np.sqrt(n))


def test_the_plan_depends_on_seed_and_step_alone():
    trials, config = imagined_trials(UNEVEN), imagined_config(4)
    first = [TrainBatches(trials, config).plan(i)[1].tolist() for i in range(30)]
    other = TrainBatches(trials, config)
    assert [other.plan(i)[1].tolist() for i in reversed(range(30))] == first[::-1]
    assert len({str(plan) for plan in first}) > 20
    config.num_training_batches, config.gradient_accumulation_steps, config.dataset.num_dataloader_workers = 7, 2, 3
    assert TrainBatches(trials, config).plan(5)[1].tolist() == first[5]
    config.dataset.seed = 2
    assert TrainBatches(trials, config).plan(5)[1].tolist() != first[5]


def test_all_trials_of_a_micro_step_are_of_one_bucket_and_few_days():
    trials = imagined_trials(UNEVEN)
    batches = TrainBatches(trials, imagined_config(4, batch_size=8, days_per_batch=2))
    for step in range(200):
        bucket, indices = batches.plan(step)
        assert indices.shape == (1, 8)
        assert {batches.shapes.bucket_of(trials[i]) for i in indices[0]} == {bucket}
        days = [trials[i].day for i in indices[0]]
        assert all(days.count(day) in (4, 8) for day in days)


def test_ranks_take_different_trials_while_there_are_enough():
    trials = imagined_trials([[50] * 40, [55] * 40, [60] * 40])
    config = imagined_config(3, batch_size=6, days_per_batch=2, n_time_buckets=1)
    for step in range(50):
        assert len(np.unique(TrainBatches(trials, config, world_size=4).plan(step)[1])) == 24


def test_a_day_with_too_few_trials_repeats_them_evenly():
    batches = TrainBatches(imagined_trials([[50] * 3]), imagined_config(1, batch_size=8))
    for step in range(20):
        assert sorted(np.bincount(batches.plan(step)[1][0]).tolist()) == [2, 3, 3]


def test_two_ranks_together_draw_what_one_does_with_twice_the_batch(root):
    config = small_config(root, batch_size=4, days_per_batch=1)
    trials = index_trials(config, "train")
    ranks = [TrainBatches(trials, config, rank, 2) for rank in range(2)]
    config = small_config(root, batch_size=8, days_per_batch=2)
    alone = TrainBatches(trials, config)
    for step in range(10):
        one, two, both = ranks[0][step], ranks[1][step], alone[step]
        assert one["features"].shape == two["features"].shape  # the same bucket
        together = {key: torch.cat([one[key], two[key]]) for key in one}
        assert same_batch(together, both)


def test_more_days_per_batch_than_sessions():
    batches = TrainBatches(imagined_trials([[50] * 9, [50] * 9]), imagined_config(2, batch_size=8, days_per_batch=4))
    for step in range(20):
        days = [batches.trials[i].day for i in batches.plan(step)[1][0]]
        assert days.count(0) == days.count(1) == 4


def test_more_days_per_batch_than_trials_in_a_batch():
    batches = TrainBatches(imagined_trials([[50]] * 5), imagined_config(5, batch_size=2, days_per_batch=4))
    assert batches.plan(0)[1].shape == (1, 2)


def test_must_include_days_are_in_every_batch_of_every_rank():
    trials = imagined_trials([[50] * 9] * 5)
    config = imagined_config(5, batch_size=6, days_per_batch=3, must_include_days=[-1, 1])
    batches = TrainBatches(trials, config, world_size=2)
    others = set()
    for step in range(60):
        for indices in batches.plan(step)[1]:
            days = [trials[i].day for i in indices]
            assert days.count(4) == days.count(1) == 2
            others |= set(days) - {1, 4}
    assert others == {0, 2, 3}
    config.dataset.days_per_batch = 2  # no place for others
    days = [trials[i].day for i in TrainBatches(trials, config).plan(0)[1][0]]
    assert days.count(4) == days.count(1) == 3


def test_a_must_include_day_without_trials_in_the_bucket_gives_its_part_to_others():
    trials = imagined_trials([[50] * 9, [100] * 9])
    config = imagined_config(2, batch_size=4, days_per_batch=2, must_include_days=[0], n_time_buckets=2)
    batches = TrainBatches(trials, config)
    seen = {frozenset(trials[i].day for i in batches.plan(step)[1][0]) for step in range(40)}
    assert seen == {frozenset([0]), frozenset([1])}


def test_must_include_days_that_cannot_be_are_refused():
    trials = imagined_trials([[50]] * 3)
    config = imagined_config(3, batch_size=1, days_per_batch=2, must_include_days=[0, 1])
    with pytest.raises(DataError, match="must_include_days names 2 days, but a batch has trials of 1"):
        TrainBatches(trials, config)
    config.dataset.must_include_days = [3, 0, -4]
    with pytest.raises(DataError, match=r"must_include_days names \[3, -4\]"):
        TrainBatches(trials, config)


# ---- evaluation ----


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("batch_size", [1, 5])
def test_every_trial_once_over_all_ranks(root, world_size, batch_size):
    config = small_config(root)
    trials = index_trials(config, "val")
    shapes = batch_shapes(index_trials(config, "train") + trials, config)
    ranks = [EvalBatches(trials, config, batch_size, rank, world_size, shapes) for rank in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1
    seen = []
    for i in range(len(ranks[0])):
        together = [batches[i] for batches in ranks]
        assert len({batch["features"].shape for batch in together}) == 1
        for batch in together:
            check_batch(batch, trials, ranks[0].shapes)
            real = batch["weights"] == 1
            seen += batch["trial_ids"][real].tolist()
            if real.any():  # padding is of the day of the batch's first trial
                assert (batch["day_indices"][~real] == batch["day_indices"][0]).all()
    assert sorted(seen) == list(range(len(trials)))


def test_no_trials_are_no_batches_of_given_shapes(root):
    config = small_config(root)
    shapes = batch_shapes(index_trials(config, "val"), config)
    assert list(make_loader(EvalBatches([], config, shapes=shapes), config)) == []


def test_an_unlabelled_split_has_empty_labels_and_keeps_trials_without_a_frame(tmp_path):
    write_split(tmp_path, SESSIONS[0], "test", [0, 5, 60, 200])
    config = small_config(tmp_path, SESSIONS[:1])
    trials = index_trials(config, "test", labelled=False)
    batches = EvalBatches(trials, config)
    assert min(batches.shapes.buckets) >= config.model.patch_size
    seen = []
    for batch in make_loader(batches, config):
        check_batch(batch, trials, batches.shapes)
        assert not batch["labels"].any() and not batch["label_lengths"].any()
        seen += batch["trial_ids"].tolist()
    assert {0, 1, 2, 3} <= set(seen)


def test_a_batch_larger_than_this_machine_is_refused(root):
    config = small_config(root, batch_size=10**9)
    with pytest.raises(DataError, match=r"a batch of 1000000000 trials.*lower dataset\.batch_size"):
        batch_shapes(index_trials(config, "val"), config)


def test_trials_beyond_the_given_shapes_are_refused_by_name(root):
    config = small_config(root)
    trials = index_trials(config, "val")
    for shapes in (BatchShapes(4, (40,), 8, N_FEATURES), BatchShapes(4, (200,), 2, N_FEATURES)):
        with pytest.raises(DataError, match=r"data_val\.hdf5, trial_00.*batch_shapes"):
            EvalBatches(trials, config, shapes=shapes)


# ---- loading ----


def test_workers_and_the_start_change_no_batch(root):
    config = small_config(root)
    batches = TrainBatches(index_trials(config, "train"), config)
    expected = [batches[i] for i in range(8)]
    for num_workers, start in ((0, 0), (1, 3), (2, 0), (2, 5)):
        loaded = list(make_loader(batches, config, start, 8, num_workers))
        assert len(loaded) == 8 - start
        assert all(map(same_batch, loaded, expected[start:]))


def test_where_a_tpu_s_runtime_has_started_workers_are_not_forked(root, monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    config = small_config(root)
    batches = TrainBatches(index_trials(config, "train"), config)
    expected = [batches[i] for i in range(3)]  # files are open here, which cannot be handed over
    loader = make_loader(batches, config, 0, 3, num_workers=1)
    assert loader.multiprocessing_context.get_start_method() == "spawn"
    assert all(map(same_batch, loader, expected))


def test_a_loader_without_end_goes_on(root):
    config = small_config(root, num_dataloader_workers=0)
    loader = make_loader(TrainBatches(index_trials(config, "train"), config), config)
    assert len(list(itertools.islice(loader, 50))) == 50


def test_the_number_of_workers_comes_from_the_configuration(root):
    config = small_config(root, num_dataloader_workers=2)
    batches = EvalBatches(index_trials(config, "val"), config)
    assert make_loader(batches, config).num_workers == 2
    assert make_loader(batches, config, num_workers=0).num_workers == 0
    assert len(make_loader(batches, config)) == len(batches)


def test_making_an_iterator_leaves_the_global_random_state_alone(root):
    config = small_config(root)
    batches = EvalBatches(index_trials(config, "val"), config)
    before = torch.random.get_rng_state()
    next(iter(make_loader(batches, config)))
    next(iter(make_loader(batches, config, num_workers=1)))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_few_shared_memory_means_fewer_workers(tmp_path, monkeypatch, caplog):
    usage = dataset.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(dataset.shutil, "disk_usage", lambda _: usage._replace(free=64_000_000))
    assert dataset._workers_that_fit(4, 1_000_000, str(tmp_path)) == 4 and not caplog.text
    assert dataset._workers_that_fit(4, 12_000_000, str(tmp_path)) == 2
    assert dataset._workers_that_fit(4, 200_000_000, str(tmp_path)) == 0
    assert "0 loader workers in place of 4" in caplog.text
    assert dataset._workers_that_fit(4, 200_000_000, str(tmp_path / "none")) == 4


def test_batches_can_be_pickled_after_files_were_opened(root):
    config = small_config(root)
    for batches in (
        TrainBatches(index_trials(config, "train"), config),
        EvalBatches(index_trials(config, "val"), config),
    ):
        before = batches[1]
        assert same_batch(pickle.loads(pickle.dumps(batches))[1], before)
