"""Checkpoint files: atomic, found again, refused in words."""

import shutil
import zipfile
from types import SimpleNamespace

import pytest
import torch

import checkpointing
from checkpointing import (
    CheckpointError,
    check_disk,
    copy_checkpoint,
    find_checkpoint,
    latest_checkpoint,
    load_checkpoint,
    remove_temporary_files,
    save_checkpoint,
)


def state(step=1):
    return {"model_state_dict": {"w": torch.ones(3)}, "config": {}, "preprocessing": {}, "sessions": [], "step": step}


def test_what_is_saved_is_loaded(tmp_path):
    save_checkpoint(state(7), tmp_path / "new" / "best_checkpoint")
    loaded = load_checkpoint(tmp_path / "new" / "best_checkpoint")
    assert loaded["step"] == 7
    assert torch.equal(loaded["model_state_dict"]["w"], torch.ones(3))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("unexpected pos")])
def test_a_full_disk_leaves_the_earlier_checkpoint_and_says_so(tmp_path, monkeypatch, error):
    path = tmp_path / "best_checkpoint"
    save_checkpoint(state(1), path)

    def fail(_, file):
        file.write(b"half")
        raise error

    monkeypatch.setattr(checkpointing.torch, "save", fail)
    with pytest.raises(CheckpointError, match="earlier file of that name is untouched"):
        save_checkpoint(state(2), path)
    assert load_checkpoint(path)["step"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["best_checkpoint"]


def test_a_copy_outlives_the_original(tmp_path):
    save_checkpoint(state(1), tmp_path / "last_checkpoint")
    copy_checkpoint(tmp_path / "last_checkpoint", tmp_path / "best_checkpoint")
    save_checkpoint(state(2), tmp_path / "last_checkpoint")
    assert load_checkpoint(tmp_path / "best_checkpoint")["step"] == 1


def test_copying_works_without_hard_links(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("not supported")

    monkeypatch.setattr(checkpointing.os, "link", refuse)
    save_checkpoint(state(1), tmp_path / "last_checkpoint")
    copy_checkpoint(tmp_path / "last_checkpoint", tmp_path / "best_checkpoint")
    assert load_checkpoint(tmp_path / "best_checkpoint")["step"] == 1


def test_the_latest_checkpoint_is_the_one_furthest_on(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    for name, step in (("last_checkpoint", 20), ("checkpoint_batch_25", 25), ("checkpoint_batch_9", 9), ("other", 99)):
        save_checkpoint(state(step), tmp_path / name)
    assert latest_checkpoint(tmp_path).name == "checkpoint_batch_25"


def test_a_checkpoint_is_found_by_file_by_run_and_by_its_folder(tmp_path):
    folder = tmp_path / "run" / "checkpoint"
    save_checkpoint(state(), folder / "last_checkpoint")
    for path in (tmp_path / "run", folder, folder / "last_checkpoint"):
        assert find_checkpoint(path) == (folder / "last_checkpoint", tmp_path / "run")
    save_checkpoint(state(), folder / "best_checkpoint")
    assert find_checkpoint(tmp_path / "run")[0].name == "best_checkpoint"
    with pytest.raises(CheckpointError, match="looked for best_checkpoint"):
        find_checkpoint(tmp_path)


def test_what_is_no_checkpoint_is_refused_by_name_and_in_few_words(tmp_path):
    (tmp_path / "text").write_text("hello")
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    torch.save({"weights": 1}, tmp_path / "other")
    torch.save([{}], tmp_path / "list")
    torch.save({"config": SimpleNamespace()}, tmp_path / "objects")
    with zipfile.ZipFile(tmp_path / "zip", "w") as file:
        file.writestr("a", "b")
    save_checkpoint(state(), tmp_path / "cut")
    (tmp_path / "cut").write_bytes((tmp_path / "cut").read_bytes()[:-200])
    ours = "not a PyTorch checkpoint of this project or of the original decoder"
    for name, words in {
        **dict.fromkeys(("text", "empty", "zip", "cut"), f"{ours}, or a damaged one"),
        "folder": "cannot be read (Is a directory)",
        "other": f"{ours} (no config, model_state_dict, preprocessing, sessions, step)",
        "list": f"{ours} (no config, model_state_dict, preprocessing, sessions, step)",
        "objects": "it holds more than tensors and plain values (types.SimpleNamespace), and to read such a file runs "
        "code in it; where you trust its source, convert_checkpoint.py --trust_checkpoint makes a plain one of it, and "
        "evaluate_model.py --trust_checkpoint reads it as it is",
        "none": "no such checkpoint",
    }.items():
        for device in ("cpu", "meta"):  # read in two ways
            with pytest.raises(CheckpointError) as caught:
                load_checkpoint(tmp_path / name, device)
            assert str(caught.value) == f"{tmp_path / name}: {words}"


def test_a_file_in_the_serialization_of_old_is_read(tmp_path):
    torch.save(state(), tmp_path / "old", _use_new_zipfile_serialization=False)
    assert load_checkpoint(tmp_path / "old")["step"] == state()["step"]


def test_unreadable_checkpoints_are_passed_over_by_name(tmp_path, caplog):
    (tmp_path / "last_checkpoint").write_bytes(b"half")
    with pytest.raises(CheckpointError, match=r"(?s)No checkpoint in .* can be read:.*last_checkpoint: not a.*--overw"):
        latest_checkpoint(tmp_path)
    save_checkpoint(state(20), tmp_path / "checkpoint_batch_20")
    save_checkpoint(state(25), tmp_path / "best_checkpoint")
    assert latest_checkpoint(tmp_path).name == "best_checkpoint"
    assert f"{tmp_path / 'last_checkpoint'}: not a PyTorch checkpoint" in caplog.text


def test_a_pickle_that_runs_code_is_not_read(tmp_path):
    torch.save({"config": SimpleNamespace()}, tmp_path / "evil")
    with pytest.raises(CheckpointError, match="evil"):
        load_checkpoint(tmp_path / "evil")


def test_temporary_files_of_a_killed_process_are_removed(tmp_path):
    (tmp_path / ".last_checkpoint.tmp").write_text("half")
    (tmp_path / "last_checkpoint").write_text("whole")
    remove_temporary_files(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["last_checkpoint"]


def test_a_disk_too_small_for_the_checkpoints_is_refused_at_the_start(tmp_path, monkeypatch):
    model = torch.nn.Linear(1000, 1000)  # 4 MB, 12 MB with the optimiser's moments
    config = SimpleNamespace(
        checkpoint_dir=str(tmp_path / "run" / "checkpoint"), save_best_checkpoint=True, save_final_model=False,
        save_all_val_steps=False, batches_per_save=0, num_training_batches=100, batches_per_val_step=10,
    )  # fmt: skip
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(checkpointing.shutil, "disk_usage", lambda _: usage._replace(free=40_000_000))
    check_disk(model, config)
    config.save_all_val_steps = True
    with pytest.raises(CheckpointError, match=r"13 checkpoints of 0.01 GB need 0.2 GB"):
        check_disk(model, config)
