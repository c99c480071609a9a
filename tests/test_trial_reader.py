"""Features from files to batches: the same by bytes and by h5py, memory that is used again, files that change."""

import gc
import os

import h5py
import numpy as np
import pytest
import torch
from t15_files import N_FEATURES, SESSIONS, small_config, write_data_set, write_split

import trial_reader
from dataset import DataError, EvalBatches, TrainBatches, make_loader
from dataset_index import index_trials
from trial_reader import TrialReader

LENGTHS = [50, 60, 41]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("B2TXT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(trial_reader, "_unused", [])


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_data_set(tmp_path_factory.mktemp("data"))


def one_file(folder, **data):
    """Path of a val file of three trials, configuration, trials."""
    path = write_split(folder, SESSIONS[0], "val", LENGTHS)
    config = small_config(folder, SESSIONS[:1], **data)
    return path, config, index_trials(config, "val")


def written(path, key):
    with h5py.File(path) as file:
        return file[key]["input_features"][()]


def rewrite(path, **storage):
    """Store the features of all trials otherwise, and return them."""
    with h5py.File(path, "a") as file:
        for group in file.values():
            features = group["input_features"][()]
            del group["input_features"]
            group.create_dataset("input_features", data=features, **storage)


def read(config, trials, n_rows=4, n_bins=64):
    return TrialReader(config).read_batch(trials, (n_rows, n_bins, N_FEATURES), longest=n_bins)


def refuse_h5py(monkeypatch):
    def refuse(*_):
        raise AssertionError("h5py was asked")

    monkeypatch.setattr(TrialReader, "_read_by_h5py", refuse)


# ---- what is read ----


def test_plain_files_are_read_without_h5py_and_rows_beyond_a_trial_are_zero(tmp_path, monkeypatch):
    path, config, trials = one_file(tmp_path)
    expected = [written(path, trial.key) for trial in trials]
    refuse_h5py(monkeypatch)
    dirty = torch.full((4, 64, N_FEATURES), 7.0)
    trial_reader._unused.append(dirty.numpy().reshape(-1))
    batch = read(config, trials)
    assert batch.data_ptr() == dirty.data_ptr()
    for row, features in enumerate(expected):
        np.testing.assert_array_equal(batch[row, : len(features)], features)
        assert not batch[row, len(features) :].any()
    assert not batch[len(expected) :].any()


@pytest.mark.parametrize(
    "storage", [{"chunks": (10, 2)}, {"compression": "gzip"}, {"dtype": "<f8"}, {"dtype": ">f4"}], ids=str
)
def test_other_storage_gives_the_same(tmp_path, storage):
    path, config, trials = one_file(tmp_path)
    plain = read(config, trials)
    rewrite(path, **storage)
    trials = index_trials(config, "val")
    assert [trial.offset for trial in trials] == [None] * 3
    assert torch.equal(read(config, trials), plain)


def test_a_file_with_a_user_block_gives_the_same(tmp_path):
    path, config, trials = one_file(tmp_path)
    plain = read(config, trials)
    with h5py.File(path) as source, h5py.File(tmp_path / "copy", "w", userblock_size=512) as copy:
        for key in source:
            source.copy(key, copy)
    os.replace(tmp_path / "copy", path)
    assert torch.equal(read(config, index_trials(config, "val")), plain)


@pytest.mark.parametrize("of", ["group", "features"])
def test_a_link_to_another_file_gives_what_it_leads_to(tmp_path, of):
    path, config, trials = one_file(tmp_path)
    plain = read(config, trials)
    linked = tmp_path / "linked.hdf5"
    path.rename(linked)
    with h5py.File(linked) as source, h5py.File(path, "w") as file:
        file["before"] = np.zeros(1 << 16)  # so that the other file's offsets are in this one too
        for key in source:
            if of == "group":
                file[key] = h5py.ExternalLink(linked, key)
            else:
                group = file.create_group(key)
                group.attrs.update(source[key].attrs)
                group["seq_class_ids"] = source[key]["seq_class_ids"][()]
                group["input_features"] = h5py.ExternalLink(linked, f"{key}/input_features")
        del file["before"]
    trials = index_trials(config, "val")
    assert [trial.offset for trial in trials] == [None] * 3
    assert torch.equal(read(config, trials), plain)


@pytest.mark.parametrize("plainly", [True, False])
def test_a_feature_subset_is_taken_in_its_order(tmp_path, plainly, monkeypatch):
    path, config, trials = one_file(tmp_path, feature_subset=[3, 0])
    if plainly:
        refuse_h5py(monkeypatch)
    else:
        rewrite(path, chunks=(10, 2))
        trials = index_trials(config, "val")
    batch = TrialReader(config).read_batch(trials, (3, 64, 2), longest=64)
    np.testing.assert_array_equal(batch[1, :60], written(path, trials[1].key)[:, [3, 0]])


def test_reading_ahead_changes_nothing(root):
    config = small_config(root)
    trials = index_trials(config, "train")
    reader = TrialReader(config)
    reader.expect(trials)
    assert torch.equal(reader.read_batch(trials[:4], (4, 128, N_FEATURES), 128), read(config, trials[:4], n_bins=128))


# ---- memory ----


def test_memory_is_used_again_when_nothing_refers_to_it(tmp_path):
    _, config, trials = one_file(tmp_path)
    batch = read(config, trials)
    address = batch.data_ptr()
    del batch
    gc.collect()
    assert read(config, trials, n_bins=60).data_ptr() == address


@pytest.mark.parametrize(
    "kept",
    [
        lambda batch: batch[0, 3:5],
        lambda batch: batch.numpy()[0, 3:5],
        lambda batch: batch.transpose(0, 1).detach()[3:5, 0],
        lambda batch: torch.from_numpy(batch.numpy())[0, 3:5],
    ],
)
def test_memory_is_not_used_again_while_a_part_of_the_batch_is_held(tmp_path, kept):
    _, config, trials = one_file(tmp_path)
    part = kept(read(config, trials))
    before = part.tolist()
    gc.collect()
    others = [read(config, list(reversed(trials))) for _ in range(3)]
    assert part.tolist() == before
    assert others[0][0, 3:5].tolist() != before


def test_few_buffers_are_kept(tmp_path):
    _, config, trials = one_file(tmp_path)
    batches = [read(config, trials) for _ in range(6)]
    del batches
    gc.collect()
    kept = read(config, trials)
    assert kept.numel() and len(trial_reader._unused) <= trial_reader.BUFFERS_KEPT


# ---- files ----


def test_open_files_are_bounded_and_reused(root, monkeypatch):
    monkeypatch.setattr(trial_reader, "MAX_OPEN_FILES", 2)
    config = small_config(root)
    batches = TrainBatches(index_trials(config, "train"), config)
    opened, plain_open = [], os.open
    monkeypatch.setattr(os, "open", lambda path, flags: opened.append(path) or plain_open(path, flags))
    for i in range(20):
        assert batches[i]["weights"].all()
        assert len(batches.reader._files) <= 2
    one_day = [trial for trial in batches.trials if trial.day == 0]
    opened.clear()
    for batch in make_loader(EvalBatches(one_day, config), config, num_workers=0):
        assert batch["weights"].any()
    assert opened == [one_day[0].path]


def test_closed_files_give_their_descriptors_back(root):
    config = small_config(root)
    reader = TrialReader(config)
    before = len(os.listdir("/proc/self/fd"))
    reader.expect(index_trials(config, "train"))
    assert len(os.listdir("/proc/self/fd")) > before
    del reader
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_changes_between_index_and_reading_is_not_read_at_the_old_place(tmp_path):
    path, config, trials = one_file(tmp_path)
    with h5py.File(path, "a") as file:
        file[trials[0].key]["input_features"][...] = 2.0
    os.utime(path, ns=(1, 1))
    assert torch.equal(read(config, trials)[0, :50], torch.full((50, N_FEATURES), 2.0))


def test_files_that_change_under_a_run_are_named(tmp_path):
    path = write_split(tmp_path, SESSIONS[0], "val", [50, 60])
    config = small_config(tmp_path, SESSIONS[:1])
    batches = EvalBatches(index_trials(config, "val"), config, batch_size=2)
    write_split(tmp_path, SESSIONS[0], "val", [50, 61])
    with pytest.raises(DataError, match=r"data_val\.hdf5, trial_0001 .*\(61, 6\), and was \(60, 6\).*--resume"):
        list(make_loader(batches, config))
    path.unlink()
    batches = EvalBatches(batches.trials, config)
    iterator = iter(make_loader(batches, config, num_workers=2))
    with pytest.raises(DataError, match=r"data_val\.hdf5, trial_000"):
        next(iterator)
    iterator._shutdown_workers()  # left to the garbage collector, its threads may complain of files closed twice


def test_a_file_that_ends_early_is_named(tmp_path):
    path, config, trials = one_file(tmp_path)
    os.truncate(path, trials[1].offset + 40)
    with pytest.raises(DataError, match=r"data_val\.hdf5, trial_000.*cannot be read any more"):
        read(config, trials)


def test_reading_ahead_of_a_missing_file_leaves_the_error_to_the_reading(tmp_path):
    path, config, trials = one_file(tmp_path)
    path.unlink()
    reader = TrialReader(config)
    reader.expect(trials)
    with pytest.raises(DataError, match="cannot be read any more"):
        reader.read_batch(trials, (3, 64, N_FEATURES), 64)


def test_a_forked_process_opens_files_of_its_own(root):
    config = small_config(root)
    batches = EvalBatches(index_trials(config, "val"), config)
    expected = batches[0]["features"].clone()
    inherited = dict(batches.reader._files)
    assert inherited
    child = os.fork()
    if child == 0:  # nothing of pytest may run in the child
        same = torch.equal(batches[0]["features"], expected)
        own = all(file is not inherited[path] for path, file in batches.reader._files.items())
        os._exit(0 if same and own else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(batches[0]["features"], expected)
    assert all(batches.reader._files[path] is file for path, file in inherited.items())
