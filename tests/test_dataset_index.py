"""The index of a data set: order, what is left out, every problem in one message, and the cache."""

import logging
import shutil

import h5py
import numpy as np
import pytest
from t15_files import N_FEATURES, SESSIONS, small_config, write_data_set, write_split

import dataset_index
from dataset_index import DataError, index_splits, index_trials
from synthetic_data import write_trial


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("B2TXT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def root(tmp_path):
    return write_data_set(tmp_path / "data")


def change(path, key, **changes):
    """Replace features or seq_class_ids of a trial, or its attributes; None removes."""
    with h5py.File(path, "r+") as file:
        for name, value in changes.items():
            where = file[key] if name in ("input_features", "seq_class_ids") else file[key].attrs
            if name in where:
                del where[name]
            if value is not None:
                where[name] = value


def test_trials_come_by_session_then_block_then_trial(root):
    with h5py.File(root / SESSIONS[1] / "data_train.hdf5", "r+") as file:  # written last, and first in its block
        write_trial(file, "trial_0099", np.zeros((50, N_FEATURES)), SESSIONS[1], 0, 7, [1, 2], "first")
    trials = index_trials(small_config(root), "train")
    assert [(t.day, t.block_num, t.trial_num) for t in trials] == sorted(
        (t.day, t.block_num, t.trial_num) for t in trials
    )
    assert len(trials) == 3 * 8 + 1
    first = next(trial for trial in trials if trial.day == 1)
    assert (first.session, first.split, first.key, first.n_time_steps) == (SESSIONS[1], "train", "trial_0099", 50)
    assert (first.labels, first.seq_len, first.sentence_label) == ((1, 2), 2, "first")


def test_sessions_without_val_data_or_with_probability_0_take_no_part(root):
    assert {t.day for t in index_trials(small_config(root), "val")} == {1, 2}
    config = small_config(root, dataset_probability_val=[1, 1, 0])
    assert {t.day for t in index_trials(config, "val")} == {1}
    assert {t.day for t in index_trials(config, "test", labelled=False)} == {1, 2}  # it is about val alone


def test_a_session_to_validate_on_without_a_val_file_is_named(root, caplog):
    (root / SESSIONS[1] / "data_val.hdf5").unlink()
    index_trials(small_config(root, dataset_probability_val=[0, 1, 1]), "val")
    assert f"No data_val.hdf5 in {root} for: {SESSIONS[1]}; evaluated without them" in caplog.text
    caplog.clear()
    index_trials(small_config(root, dataset_probability_val=None), "val")  # null: all are validated on
    assert f"for: {SESSIONS[0]}, {SESSIONS[1]}; evaluated without" in caplog.text
    caplog.clear()
    index_trials(small_config(root, dataset_probability_val=[0, 0, 1]), "val")
    assert not caplog.records


def test_no_data_set_says_how_to_get_one(tmp_path):
    for directory in (tmp_path / "nowhere", tmp_path):  # tmp_path exists, and holds no session
        with pytest.raises(DataError, match=r"download_data\.py.*synthetic_data\.py.*--data_dir"):
            index_trials(small_config(directory), "train")


def test_a_missing_session_directory_is_an_error_in_training_and_said_in_validation(root, caplog):
    config = small_config(root, sessions=(*SESSIONS, "t15.2099.01.01"))
    with pytest.raises(DataError, match=r"t15\.2099\.01\.01"):
        index_trials(config, "train")
    assert {t.day for t in index_trials(config, "val")} == {1, 2}
    assert "t15.2099.01.01" in caplog.text


def test_every_fault_of_every_file_is_in_one_message(root):
    path = root / SESSIONS[2] / "data_train.hdf5"
    nan = np.zeros((60, N_FEATURES), np.float32)
    nan[17, 3] = np.nan
    faults = [
        ({"input_features": nan, "n_time_steps": 60}, r"1 NaN or infinite .* time bin 17, feature 3"),
        ({"n_time_steps": 1000}, r"n_time_steps is 1000, but input_features has \d+"),
        ({"input_features": np.zeros((60, 9))}, r"\(60, 9\)"),
        ({"block_num": None, "seq_class_ids": None}, "block_num, seq_class_ids missing"),
        ({"seq_class_ids": np.array([1, 2])}, "seq_len is 3, but seq_class_ids holds 2"),
        ({"seq_class_ids": np.array([1, 0, 41])}, r"label ids \[0, 41\]"),
        ({"seq_class_ids": np.ones(9, int), "seq_len": 9}, r"9 labels are more than .*max_seq_elements \(8\)"),
    ]
    for i, (changes, _) in enumerate(faults):
        change(path, f"trial_{i:04d}", **changes)
    (root / SESSIONS[0] / "data_train.hdf5").write_bytes(b"no HDF5")
    with pytest.raises(DataError) as caught:
        index_trials(small_config(root, max_seq_elements=8), "train")
    assert len(caught.value.problems) == len(faults) + 1
    assert f"{len(faults) + 1} problems" in str(caught.value)
    for i, (_, message) in enumerate(faults):
        assert caught.match(rf"{SESSIONS[2]}/data_train\.hdf5, trial_{i:04d}: .*{message}")
    assert caught.match(f"{SESSIONS[0]}/data_train.hdf5: cannot be read as HDF5")


def test_of_very_many_problems_the_first_are_shown_and_the_rest_counted(root):
    config = small_config(root, max_seq_elements=2)
    with pytest.raises(DataError, match=r"\.\.\. and 4 more") as caught:
        index_trials(config, "train")
    assert len(caught.value.problems) == 24
    assert len(str(caught.value).splitlines()) == 22


def test_problems_of_several_splits_come_together(root):
    (root / SESSIONS[0] / "data_train.hdf5").unlink()
    (root / SESSIONS[1] / "data_train.hdf5").write_bytes(b"no HDF5")
    change(root / SESSIONS[1] / "data_val.hdf5", "trial_0002", seq_len=501)
    with pytest.raises(DataError, match="3 problems") as caught:
        index_splits(small_config(root), ["train", "val"])
    assert caught.match(f"no data_train.hdf5 .*{SESSIONS[0]}") and caught.match("data_val.hdf5, trial_0002")


def test_a_damaged_group_is_named(root):
    path = root / SESSIONS[1] / "data_val.hdf5"
    with h5py.File(path) as file:
        offset = h5py.h5o.get_info(file["trial_0005"].id).addr
    data = bytearray(path.read_bytes())
    data[offset : offset + 16] = b"\xff" * 16
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"data_val\.hdf5, trial_0005: cannot be read .*damaged"):
        index_trials(small_config(root), "val")


def test_a_file_without_trials_is_an_error(root):
    write_split(root, SESSIONS[1], "train", [])
    with pytest.raises(DataError, match=rf"{SESSIONS[1]}/data_train\.hdf5: holds no trials"):
        index_trials(small_config(root), "train")


@pytest.mark.parametrize(
    ("length", "labels", "split", "kept"),
    [
        (15, [1], "train", False),  # 15 - 2 bins, one too few for a patch of 14
        (16, [1], "train", True),
        (14, [1], "val", True),  # no cut in validation
        (13, [1], "val", False),
        (28, [1, 2, 3, 4], "train", True),  # 26 bins, 4 frames
        (28, [1, 2, 2, 4], "train", False),  # a doubled label needs a frame more
        (26, [1, 2, 3, 4], "val", True),
        (26, [1, 1, 2, 3], "val", False),
        (60, [], "val", False),
    ],
)
def test_trials_that_cannot_be_used_are_left_out_by_name(tmp_path, caplog, length, labels, split, kept):
    write_split(tmp_path, SESSIONS[0], split, [100], labels)
    path = write_split(tmp_path, SESSIONS[0], split, [100, length], labels or [1])
    if not labels:
        change(path, "trial_0001", seq_len=0)
    config = small_config(tmp_path, SESSIONS[:1])
    left_out = []
    with caplog.at_level(logging.WARNING, logger="b2txt"):
        trials = index_trials(config, split, left_out=left_out)
    assert [trial.key for trial in trials] == ["trial_0000", "trial_0001"][: 1 + kept]
    assert [trial.key for trial, _ in left_out] == ["trial_0001"] * (not kept)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (not kept)
    assert all(f"{path}, trial_0001 (block 1, trial 1)" in line for line in lines)
    assert len(index_trials(config, split, labelled=False)) == 2


def test_the_patch_size_and_the_random_cut_decide(tmp_path):
    write_split(tmp_path, SESSIONS[0], "train", [100, 15], [1])
    config = small_config(tmp_path, SESSIONS[:1])
    assert len(index_trials(config, "train")) == 1
    config.dataset.data_transforms.random_cut = 2
    assert len(index_trials(config, "train")) == 2
    config.model.patch_size, config.dataset.data_transforms.random_cut = 0, 15
    assert len(index_trials(config, "train")) == 2
    config.dataset.data_transforms.random_cut = 16
    assert len(index_trials(config, "train")) == 1


def test_all_trials_left_out_is_an_error(tmp_path):
    write_split(tmp_path, SESSIONS[0], "train", [10, 12])
    with pytest.raises(DataError, match=r"All 2 train trials were left out.*fewer than one patch"):
        index_trials(small_config(tmp_path, SESSIONS[:1]), "train")


def test_listed_bad_trials_are_left_out_whatever_they_hold(root):
    path = root / SESSIONS[1] / "data_train.hdf5"
    change(path, "trial_0003", input_features=np.full((60, N_FEATURES), np.inf), n_time_steps=60)
    bad = {SESSIONS[1]: {1: [3, 5], 2: [0]}}
    left_out = []
    trials = index_trials(small_config(root, bad_trials_dict=bad), "train", left_out=left_out)
    assert len(trials) == 24 - 2
    assert {(trial.key, reason) for trial, reason in left_out} == {
        ("trial_0003", "listed in dataset.bad_trials_dict"),
        ("trial_0005", "listed in dataset.bad_trials_dict"),
    }
    assert len(index_trials(small_config(root, bad_trials_dict=bad), "val")) == 16 - 2
    # Each trial of the test split needs its row in a submission.
    assert len(index_trials(small_config(root, bad_trials_dict=bad), "test", labelled=False)) == 16


def test_listed_bad_trials_that_no_file_holds_are_named(root, caplog):
    write_split(root, SESSIONS[1], "test", [60] * 12)  # block 2, trials 0 and 1, are here alone
    bad = {SESSIONS[1]: {1: [3, 77], 2: [1], 40: [0]}, SESSIONS[0]: {1: [0]}}
    index_splits(small_config(root, bad_trials_dict=bad), ["train", "val"])
    (said,) = [r.getMessage() for r in caplog.records if "no file" in r.getMessage()]
    assert said.endswith(f"{root / SESSIONS[1]} holds: block 1 trial 77, block 40 trial 0 (no such block)")
    caplog.clear()
    (root / SESSIONS[1] / "data_test.hdf5").write_bytes(b"no HDF5")  # it may hold what is missing
    index_trials(small_config(root, bad_trials_dict=bad), "val")
    assert "no file" not in caplog.text


def test_a_session_that_loses_all_its_train_trials_is_named(root, caplog):
    trials = index_trials(small_config(root, bad_trials_dict={SESSIONS[0]: {1: list(range(8))}}), "train")
    assert {trial.day for trial in trials} == {1, 2}
    assert f"{SESSIONS[0]}: no usable train trial" in caplog.text


def test_trials_that_name_another_session_are_taken_with_a_warning(root, caplog):
    change(root / SESSIONS[1] / "data_val.hdf5", "trial_0000", session=SESSIONS[2])
    trials = index_trials(small_config(root), "val")
    assert trials[0].session == SESSIONS[1] and trials[0].day == 1
    assert SESSIONS[2] in caplog.text


def test_a_trial_found_twice_is_an_error_where_results_are_looked_up_by_it(root, caplog):
    for split in ("train", "val"):
        change(root / SESSIONS[1] / f"data_{split}.hdf5", "trial_0001", trial_num=0)
    with pytest.raises(DataError, match=r"trial_0001 \(block 1, trial 0\): found 2 times"):
        index_trials(small_config(root), "val")
    assert len(index_trials(small_config(root), "train")) == 24
    assert "trial_0001" in caplog.text


def test_labels_that_do_not_matter_cannot_stop_an_unlabelled_reading(root):
    change(root / SESSIONS[1] / "data_val.hdf5", "trial_0000", seq_class_ids=np.array([77]), seq_len=1)
    trials = index_trials(small_config(root), "val", labelled=False)
    assert trials[0].labels == () and trials[0].seq_len == 0
    assert trials[1].labels == (5, 5, 40) and trials[1].sentence_label == "a sentence"


def test_an_unknown_split_is_refused(root):
    with pytest.raises(ValueError, match="'train', 'val' or 'test'"):
        index_trials(small_config(root), "valid")


# ---- the cache ----


def test_a_second_start_reads_no_values(root, monkeypatch):
    first = index_trials(small_config(root), "train")
    monkeypatch.setattr(dataset_index, "_read_file", lambda path: pytest.fail(f"{path} was read again"))
    assert index_trials(small_config(root), "train") == first
    # The configuration is no part of it.
    with pytest.raises(DataError, match="max_seq_elements"):
        index_trials(small_config(root, max_seq_elements=2), "train")


def test_a_changed_file_is_read_again(root):
    config = small_config(root)
    index_trials(config, "train")
    write_split(root, SESSIONS[1], "train", [70] * 8, seed=1)
    assert {t.n_time_steps for t in index_trials(config, "train") if t.day == 1} == {70}


def test_faults_are_found_again_at_every_start(root):
    path = root / SESSIONS[1] / "data_val.hdf5"
    change(path, "trial_0002", input_features=np.full((60, N_FEATURES), np.nan), n_time_steps=60)
    (root / SESSIONS[2] / "data_val.hdf5").write_bytes(b"")
    for _ in range(2):
        with pytest.raises(DataError, match="2 problems") as caught:
            index_trials(small_config(root), "val")
        assert caught.match("360 NaN") and caught.match(SESSIONS[2])


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"version": null, "trials": [{"a": 1}]}'])
def test_a_broken_cache_is_made_anew(root, cache, content):
    first = index_trials(small_config(root), "train")
    kept = sorted(cache.iterdir())
    assert len(kept) == 3 and all(path.suffix == ".json" for path in kept)
    for path in kept:
        path.write_text(content)
    assert index_trials(small_config(root), "train") == first
    assert sorted(cache.iterdir()) == kept and all(path.stat().st_size > 100 for path in kept)


def test_a_cache_directory_that_cannot_be_written_is_no_error(root, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("B2TXT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert len(index_trials(small_config(root), "train")) == 24


def test_where_the_cache_lies(monkeypatch, tmp_path):
    assert dataset_index.cache_directory() == tmp_path / "cache"
    monkeypatch.delenv("B2TXT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert str(dataset_index.cache_directory()) == "/xdg/b2txt-tpu"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert str(dataset_index.cache_directory()) == "/home/somebody/.cache/b2txt-tpu"


def test_a_test_split_without_a_sessions_directory_is_refused_since_ids_would_shift(root):
    shutil.rmtree(root / SESSIONS[1])
    with pytest.raises(DataError, match=rf"no directory.*{SESSIONS[1]}.*later rows would be other trials"):
        index_trials(small_config(root), "test", labelled=False)
    (root / SESSIONS[1]).mkdir()
    assert {t.day for t in index_trials(small_config(root), "test", labelled=False)} == {2}


def test_a_missing_test_file_beside_a_val_file_is_said(root, caplog):
    (root / SESSIONS[1] / "data_test.hdf5").unlink()
    index_trials(small_config(root), "test", labelled=False)
    assert f"no data_test.hdf5: {SESSIONS[1]}." in caplog.text  # the first session has neither


@pytest.mark.parametrize("fault", ["nan", "length"])
def test_a_faulty_test_trial_listed_as_bad_keeps_its_row_undecoded(root, fault):
    with h5py.File(root / SESSIONS[1] / "data_test.hdf5", "a") as file:
        if fault == "nan":
            file["trial_0002"]["input_features"][3, 1] = np.nan
        else:
            file["trial_0002"].attrs["n_time_steps"] = 5
    with pytest.raises(DataError):
        index_trials(small_config(root), "test", labelled=False)
    config = small_config(root, bad_trials_dict={SESSIONS[1]: {1: [2, 3]}})
    trials = index_trials(config, "test", labelled=False)
    assert len(trials) == 16
    lengths = {t.key: t.n_time_steps for t in trials if t.session == SESSIONS[1]}
    assert lengths["trial_0002"] == 0 and lengths["trial_0003"] > 0  # listed, but nothing is wrong with it


@pytest.mark.parametrize("value", ["abc", 3.7, float("nan")])
def test_an_attribute_that_is_no_whole_number_is_named(root, value):
    with h5py.File(root / SESSIONS[1] / "data_val.hdf5", "a") as file:
        file["trial_0001"].attrs["block_num"] = value
    with pytest.raises(DataError, match=r"trial_0001.*attribute block_num is .*not a whole number"):
        index_trials(small_config(root), "val")
