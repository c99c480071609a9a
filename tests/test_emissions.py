"""emissions.py: log-probabilities on disk, trial by trial, and when they are computed anew."""

import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from t15_files import SESSIONS, small_config, write_split

import emissions
from dataset_index import index_trials
from emissions import EmissionStore, emission_key
from evaluate_model_helpers import PHONEMES

LENGTHS = [3, 0, 5, 1]
KEY = {"step": 3}


def log_probs(index, length):
    return np.random.default_rng(index).normal(size=(length, len(PHONEMES))).astype(np.float32)


def fill(store, indices):
    for index in indices:
        store[index] = log_probs(index, LENGTHS[index])
    store.flush()


def is_whole(store):
    return all(np.array_equal(each, log_probs(i, LENGTHS[i])) for i, each in enumerate(store))


def reopened(directory, key=KEY, lengths=LENGTHS):
    return EmissionStore(directory, "val", lengths, key)


def test_a_trial_comes_back_as_it_was_set(tmp_path):
    store = reopened(tmp_path)
    assert len(store) == 4 and store.missing() == [0, 2, 3]
    fill(store, [0, 2, 3])
    assert store.missing() == [] and is_whole(store) and store[1].shape == (0, 41)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["emissions_val.json", "emissions_val.npy"]
    assert np.load(tmp_path / "emissions_val.npy").shape == (9, 41)
    assert json.loads((tmp_path / "emissions_val.json").read_text())["step"] == 3


@given(st.sets(st.sampled_from([0, 2, 3])), st.sampled_from([0, 2, 3]), st.integers(0, 4))
@settings(deadline=None, max_examples=30)
def test_after_a_kill_only_the_missing_trials_are_computed(tmp_path_factory, done, cut, frames):
    """A kill within a trial leaves its last frame NaN."""
    directory = tmp_path_factory.mktemp("emissions")
    store = reopened(directory)
    fill(store, done)
    frames = min(frames, LENGTHS[cut] - 1)
    store._array[store._starts[cut] + frames : store._starts[cut + 1]] = np.nan
    store.flush()
    store = reopened(directory)
    assert store.missing() == sorted({0, 2, 3} - (done - {cut}))
    fill(store, store.missing())
    assert is_whole(reopened(directory)) and not reopened(directory).missing()


@pytest.mark.parametrize(
    ("key", "lengths"), [({"step": 4}, LENGTHS), ({}, LENGTHS), (KEY, [3, 0, 5, 2]), (KEY, [5, 0, 3, 1]), (KEY, [])]
)
def test_another_key_or_other_frames_are_computed_anew(tmp_path, key, lengths):
    fill(reopened(tmp_path), [0, 2, 3])
    assert reopened(tmp_path, key, lengths).missing() == [i for i, length in enumerate(lengths) if length]
    assert reopened(tmp_path).missing() == [0, 2, 3]


def test_val_and_test_have_files_of_their_own(tmp_path):
    fill(reopened(tmp_path), [0, 2, 3])
    EmissionStore(tmp_path, "test", [2], KEY)[0] = log_probs(0, 2)
    assert is_whole(reopened(tmp_path))


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_trials_without_frames_are_never_missing(tmp_path, lengths):
    for _ in range(2):
        store = reopened(tmp_path, lengths=lengths)
        assert store.missing() == [] and [each.shape for each in store] == [(0, 41)] * len(lengths)
        for index in range(len(lengths)):
            store[index] = log_probs(0, 0)
        store.flush()


def test_emissions_of_another_length_are_refused(tmp_path):
    store = reopened(tmp_path)
    for wrong in (log_probs(0, 2), log_probs(0, 4), log_probs(0, 3)[:, :40], log_probs(0, 1)):
        with pytest.raises(ValueError, match=r"trial 0 has emissions \(3, 41\), not"):
            store[0] = wrong
    assert store.missing() == [0, 2, 3]


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x93NUMPY",
        npy(np.zeros((9, 41), np.float32))[:-1],
        npy(np.zeros((9, 41), np.float32))[:200],
        npy(np.zeros((9, 41), np.float64)),
        npy(np.zeros((41, 9), np.float32)),
        npy(np.zeros(369, np.float32)),
        npy(np.array([{}], dtype=object)),
        b"PK\x03\x04 no archive",
        b"PK\x05\x06" + bytes(18),  # an empty one
        b"no array at all",
    ],
)
def test_a_broken_or_foreign_array_is_replaced(tmp_path, content):
    fill(reopened(tmp_path), [0, 2, 3])
    (tmp_path / "emissions_val.npy").write_bytes(content)
    store = reopened(tmp_path)
    assert store.missing() == [0, 2, 3]
    fill(store, [0, 2, 3])
    assert is_whole(reopened(tmp_path))


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff", b'{"step": 3}'])
def test_an_array_without_its_key_is_replaced(tmp_path, content):
    fill(reopened(tmp_path), [0, 2, 3])
    path = tmp_path / "emissions_val.json"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    assert reopened(tmp_path).missing() == [0, 2, 3]


def test_a_key_without_its_array_is_no_key(tmp_path):
    fill(reopened(tmp_path), [0, 2, 3])
    (tmp_path / "emissions_val.npy").unlink()
    assert reopened(tmp_path).missing() == [0, 2, 3]


def test_a_full_disk_shows_at_once_and_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(file, array):
        file.write(bytes(100))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(emissions.np, "save", full)
    with pytest.raises(OSError, match="No space left"):
        reopened(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_no_kill_leaves_a_key_beside_emissions_of_another(tmp_path, monkeypatch):
    fill(reopened(tmp_path), [0, 2, 3])

    def killed(*_):
        raise KeyboardInterrupt

    for name in ("os.fsync", "os.replace"):
        with monkeypatch.context() as patch:
            patch.setattr(name, killed)
            with pytest.raises(KeyboardInterrupt):
                reopened(tmp_path, {"step": 4})
    with monkeypatch.context() as patch:
        patch.setattr(emissions, "write_text_atomically", killed)  # the array is there, its key is not
        with pytest.raises(KeyboardInterrupt):
            reopened(tmp_path, {"step": 4})
    assert [path.name for path in tmp_path.iterdir()] == ["emissions_val.npy"]
    for key in ({"step": 4}, KEY):
        assert reopened(tmp_path, key).missing() == [0, 2, 3]


# ---- the key


@pytest.fixture
def key_of(tmp_path):
    """key_of(step, precision, lengths): the key of two sessions' val trials and a checkpoint, as they are now."""
    for session in SESSIONS[:2]:
        write_split(tmp_path, session, "val", [40, 50])
    (tmp_path / "checkpoint").write_bytes(b"weights")

    def key_of(step=3, precision="float32", trials=slice(None)):
        found = index_trials(small_config(tmp_path, SESSIONS[:2]), "val")[trials]
        return emission_key(tmp_path / "checkpoint", step, found, precision)

    key_of.directory = tmp_path
    return key_of


def test_the_key_is_the_same_as_long_as_nothing_changes(key_of, monkeypatch):
    first = key_of()
    assert key_of() == first and json.loads(json.dumps(first)) == first and first["n_trials"] == 4
    monkeypatch.chdir(key_of.directory)
    assert emission_key(Path("checkpoint"), 3, [], "")["checkpoint"] == first["checkpoint"]


def test_the_key_changes_with_whatever_the_emissions_depend_on(key_of):
    keys = [key_of(), key_of(step=4), key_of(precision="bf16"), key_of(trials=slice(1, None))]
    keys.append(key_of(trials=slice(None, None, -1)))
    checkpoint, data = key_of.directory / "checkpoint", key_of.directory / SESSIONS[1] / "data_val.hdf5"
    for path in (checkpoint, data):
        state = os.stat(path)
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 10**9))
        keys.append(key_of())
    checkpoint.write_bytes(b"other weights")
    keys.append(key_of())
    write_split(key_of.directory, SESSIONS[1], "val", [40, 60])
    keys.append(key_of())
    texts = [json.dumps(key, sort_keys=True) for key in keys]
    assert len(set(texts)) == len(texts) == 9
