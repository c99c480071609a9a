"""The commands as a user runs them, in processes of their own: train, kill, resume, evaluate."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny import training_config

from checkpointing import load_checkpoint
from config import save_config

ROOT = Path(__file__).resolve().parent.parent


def command(script, *arguments, cwd, **popen):
    """Start a script of the project from a directory that is not the project's."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, ROOT / script, *map(str, arguments)],
        cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **popen,
    )  # fmt: skip


def run(script, *arguments, cwd, code=0):
    process = command(script, *arguments, cwd=cwd)
    out, err = process.communicate(timeout=240)
    assert process.returncode == code, out + err
    return out + err


@pytest.fixture(scope="module")
def workplace(simulated, tmp_path_factory):
    """A directory with a configuration file that trains 24 batches, validating every 4."""
    directory = tmp_path_factory.mktemp("work")
    config = training_config(
        simulated, directory / "run", num_training_batches=24, batches_per_val_step=4, batches_per_save=3,
        log_with="tensorboard", lr_decay_steps=24,
    )  # fmt: skip
    save_config(config, directory / "args.yaml")
    return directory


@pytest.fixture(scope="module")
def whole_run(workplace):
    """An uninterrupted run."""
    output = run("train_model.py", "--config_path", "args.yaml", "--output_dir", "whole", cwd=workplace)
    assert "evaluate_model.py --model_path" in output
    return workplace / "whole"


@pytest.mark.parametrize("kill_after", [1, 10, 17])
def test_a_killed_and_resumed_run_equals_the_uninterrupted_one_bit_for_bit(workplace, whole_run, kill_after):
    name = f"killed_{kill_after}"
    options = ("--config_path", "args.yaml", "--output_dir", name, "--set", "batches_per_train_log=1")
    process = command("train_model.py", *options, cwd=workplace)
    log = workplace / name / "training_log"
    deadline = time.monotonic() + 120
    while not (log.exists() and f"batch {kill_after}:" in log.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert "batch 24:" not in log.read_text()  # it was killed in the middle

    run("train_model.py", *options, "--resume", cwd=workplace)
    whole = load_checkpoint(whole_run / "checkpoint" / "last_checkpoint")
    resumed = load_checkpoint(workplace / name / "checkpoint" / "last_checkpoint")
    assert resumed["step"] == whole["step"] == 24
    assert resumed["best"] == whole["best"]
    assert torch.equal(resumed["history"]["train_losses"], whole["history"]["train_losses"])
    for key, tensor in whole["model_state_dict"].items():
        assert torch.equal(resumed["model_state_dict"][key], tensor), key
    for index, state in whole["optimizer_state_dict"]["state"].items():
        for key, tensor in state.items():
            assert torch.equal(resumed["optimizer_state_dict"]["state"][index][key], tensor), (index, key)
    best = [load_checkpoint(run / "checkpoint" / "best_checkpoint") for run in (whole_run, workplace / name)]
    assert best[0]["step"] == best[1]["step"]


def test_evaluation_repeats_the_validation_of_the_training(workplace, whole_run, simulated):
    arguments = ("--model_path", whole_run, "--csv_path", simulated / "description.csv")
    assert "PER" in run("evaluate_model.py", *arguments, cwd=workplace)
    results = json.loads((whole_run / "evaluation_val.json").read_text())
    best = load_checkpoint(whole_run / "checkpoint" / "best_checkpoint")
    assert results["per"] == best["val_PER"] == results["edits"] / results["phonemes"]
    assert results["n_trials"] == 10 and len(results["per_by_session"]) == 2 and results["per_by_corpus"]
    with open(whole_run / "predictions_val.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert sum(int(row["edits"]) for row in rows) == results["edits"]


def test_the_test_split_gets_a_row_a_trial(workplace, whole_run):
    run("evaluate_model.py", "--model_path", whole_run, "--eval_type", "test", "--output_dir", "results", cwd=workplace)
    with open(workplace / "results" / "submission_test.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == [str(i) for i in range(8)]
    assert all(row["text"] for row in rows)
    assert (workplace / "results" / "predictions_test.csv").exists()


def test_an_earlier_run_is_neither_mixed_nor_lost(workplace, whole_run):
    options = ("--config_path", "args.yaml", "--output_dir", "whole")
    before = (whole_run / "checkpoint" / "last_checkpoint").read_bytes()
    assert "--resume" in run("train_model.py", *options, cwd=workplace, code=2)
    assert "give one of them" in run("train_model.py", *options, "--resume", "--overwrite", cwd=workplace, code=2)
    assert "done already" in run("train_model.py", *options, "--resume", cwd=workplace)
    wrong = ("--overwrite", "--data_dir", "nowhere")
    assert "nowhere" in run("train_model.py", *options, *wrong, cwd=workplace, code=2)
    assert (whole_run / "checkpoint" / "last_checkpoint").read_bytes() == before


def test_a_folder_that_no_run_wrote_is_never_overwritten(workplace):
    (workplace / "thesis").mkdir()
    (workplace / "thesis" / "chapter").write_text("years of work")
    options = ("--config_path", "args.yaml", "--output_dir", "thesis", "--overwrite")
    assert "holds no earlier run" in run("train_model.py", *options, cwd=workplace, code=2)
    assert (workplace / "thesis" / "chapter").read_text() == "years of work"


def test_all_mistakes_in_the_settings_are_told_at_once_before_anything_is_written(workplace):
    settings = ("--set", "lr_maxx=1", "dataset.batch_size=none")
    output = run(
        "train_model.py", "--config_path", "args.yaml", "--output_dir", "never", *settings, cwd=workplace, code=2
    )
    assert "lr_max" in output and "dataset.batch_size" in output
    assert "Traceback" not in output
    assert not (workplace / "never").exists()


def test_without_options_and_data_both_commands_say_how_to_get_some(workplace):
    nowhere = ("--data_dir", "no_data")
    for script in ("train_model.py", "evaluate_model.py"):
        output = run(script, *nowhere, cwd=workplace, code=2)
        assert "download_data.py" in output and "synthetic_data.py" in output
        assert "Traceback" not in output


def test_named_options_reach_the_configuration(workplace):
    options = ("--batch_size", 2, "--num_batches", 1, "--disable_mixed_precision", "--device", "cpu")
    options = ("--config_path", "args.yaml", "--output_dir", "named", *options)
    settings = ("--set", "use_amp=true", "--set", "lr_max=0.0123")  # a second one adds to the first
    assert "2 trials a device" in run("train_model.py", *options, *settings, cwd=workplace)
    state = load_checkpoint(workplace / "named" / "checkpoint" / "last_checkpoint")
    assert (state["step"], state["config"]["dataset"]["batch_size"]) == (1, 2)
    assert (state["config"]["use_amp"], state["config"]["lr_max"]) == (True, 0.0123)
