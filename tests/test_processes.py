"""Two real processes over gloo: they train, validate, save and fail as one."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from two_processes import free_port, run_on, start

from backend import Backend
from checkpointing import load_checkpoint
from process_group import OTHER_ENDED

ROOT = Path(__file__).resolve().parent.parent
NOTHING_RANDOM = {
    "model__rnn_dropout": 0.0, "dataset__data_transforms__white_noise_std": 0,
    "dataset__data_transforms__constant_offset_std": 0, "dataset__data_transforms__random_cut": 0,
}  # fmt: skip
TWENTY = {"num_training_batches": 20, "batches_per_val_step": 10, "batches_per_train_log": 7, "lr_decay_steps": 20}


@pytest.mark.parametrize("accumulation", [1, 3])
def test_two_ranks_are_one_rank_with_twice_the_batch(simulated, tmp_path, accumulation):
    settings = TWENTY | NOTHING_RANDOM | {"gradient_accumulation_steps": accumulation}
    two = settings | {"output_dir": tmp_path / "two", "dataset__batch_size": 4, "dataset__days_per_batch": 1}
    one = settings | {"output_dir": tmp_path / "one", "dataset__batch_size": 8, "dataset__days_per_batch": 2}
    first, second = run_on(2, "train", simulated, two, "keep", True)
    (alone,) = run_on(1, "train", simulated, one, "keep", True)
    assert first == second
    assert len(first["train_losses"]) == 20
    for name in ("train_losses", "val_losses", "parameters"):
        found, expected = torch.tensor(first[name]), torch.tensor(alone[name])
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    assert first["val_PERs"] == alone["val_PERs"] and first["day_PERs"] == alone["day_PERs"]
    assert first["lr"] == alone["lr"]  # the schedule counts optimiser steps, however many processes there are


def test_validation_counts_every_trial_once_and_gives_what_one_process_gives(simulated, tmp_path):
    """Case 30: a split that does not divide evenly."""
    settings = {"output_dir": tmp_path / "two", "dataset__batch_size": 3}
    first, second = run_on(2, "validate", simulated, settings)
    (alone,) = run_on(1, "validate", simulated, settings | {"output_dir": tmp_path / "one"})
    assert first == second
    assert first["n_trials"] == 10 and sum(map(len, first["decoded"])) > 10
    for name in ("PER", "day_PERs", "decoded", "shapes"):
        assert first[name] == alone[name]
    for name in ("loss", "logits", "features"):
        torch.testing.assert_close(torch.tensor(first[name]), torch.tensor(alone[name]), rtol=1e-4, atol=1e-3)


def test_ranks_share_buckets_and_no_trials_and_draw_their_own_noise(simulated, tmp_path):
    """Case 33."""
    first, second = run_on(2, "draws", simulated, {"output_dir": tmp_path / "run", "dataset__batch_size": 2})
    assert first["bins"] == second["bins"]
    assert all(not set(a) & set(b) for a, b in zip(first["trials"], second["trials"], strict=True))
    assert first["dropout"] != second["dropout"] and first["noise"] != second["noise"]


def test_ranks_begin_and_end_with_the_same_weights_and_a_drawn_seed_is_drawn_once(simulated, tmp_path):
    first, second = run_on(2, "train", simulated, {"output_dir": tmp_path / "run", "seed": -1})
    assert first == second and first["checksum"] != first["end"]
    assert f"checksum {first['checksum']}" in (tmp_path / "run" / "training_log").read_text()
    assert Path(first["output_dir"]) == tmp_path / "run"  # and not one directory a rank


def test_weights_that_differ_between_processes_are_found_by_name():
    said = run_on(2, "differing_parameters")
    assert said == ["parameters differ between process 0 and process(es) [1]: weight"] * 2


@pytest.mark.parametrize("accumulation", [1, 4])
def test_gradients_are_reduced_once_an_optimiser_step(simulated, tmp_path, accumulation):
    """Case 31."""
    settings = {"output_dir": tmp_path / "run", "gradient_accumulation_steps": accumulation}
    for found in run_on(2, "reductions", simulated, settings):
        assert found["numbers"] == found["parameters"] > 0


def test_processes_that_disagree_about_the_best_do_not_wait_for_each_other(simulated, tmp_path):
    settings = {"output_dir": tmp_path / "run", "num_training_batches": 6, "batches_per_val_step": 2}
    first, second = run_on(2, "disagree_about_the_best", simulated, settings)
    assert first == [0.98, 0.96, 0.94] and second == [0.02, 0.04, 0.06]
    assert load_checkpoint(tmp_path / "run" / "checkpoint" / "best_checkpoint")["step"] == 6
    assert all("one process" in said for said in run_on(2, "evaluate", tmp_path / "run"))


def test_an_error_of_the_main_process_ends_the_others_without_words():
    assert run_on(2, "on_main_fails") == ["a full disk", "other"]


# ---- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def command(simulated, tmp_path):
    from tiny import training_config

    from config import save_config

    settings = {"num_training_batches": 16, "batches_per_val_step": 4, "batches_per_train_log": 1, "lr_decay_steps": 16}
    save_config(training_config(simulated, tmp_path / "run", **settings), tmp_path / "args.yaml")
    return [str(ROOT / "train_model.py"), "--config_path", str(tmp_path / "args.yaml"), "--device", "cpu"]


def end_of(processes, timeout=60):
    """Exit codes and what was said, once all have ended; none may live longer than `timeout` seconds."""
    deadline = time.monotonic() + timeout
    said = [process.communicate(timeout=max(1, deadline - time.monotonic())) for process in processes]
    return [process.returncode for process in processes], [out + err for out, err in said]


def wait_for(path, words, processes, timeout=120):
    deadline = time.monotonic() + timeout
    while not (path.exists() and words in path.read_text()):
        assert all(p.poll() is None for p in processes) and time.monotonic() < deadline, end_of(processes, 5)
        time.sleep(0.005)


def test_a_run_that_lost_a_rank_resumes_as_if_it_had_not(command, tmp_path):
    whole = end_of(start([*command, "--output_dir", str(tmp_path / "whole")], 2), 200)
    assert whole[0] == [0, 0], whole
    processes = start(command, 2)
    wait_for(tmp_path / "run" / "training_log", "batch 6:", processes)
    os.kill(processes[1].pid, signal.SIGKILL)
    codes, said = end_of(processes)
    assert codes == [OTHER_ENDED, -signal.SIGKILL]
    assert "another process ended" in said[0] and "Traceback" not in said[0]
    codes, said = end_of(start([*command, "--resume"], 2), 200)
    assert codes == [0, 0], said
    first, second = (load_checkpoint(tmp_path / run / "checkpoint" / "last_checkpoint") for run in ("whole", "run"))
    assert first["step"] == second["step"] == 16
    for name, value in first["model_state_dict"].items():
        assert torch.equal(second["model_state_dict"][name], value), name


def test_a_failing_loader_of_one_rank_ends_both_with_its_message(command, simulated, tmp_path):
    """Case 37: the files of one of them are damaged while it reads."""
    for rank in range(2):
        shutil.copytree(simulated, tmp_path / f"data_{rank}")
    command = [*command, "--data_dir", str(tmp_path / "data_{rank}"), "--set", "num_training_batches=4000"]
    processes = start(command, 2)
    wait_for(tmp_path / "run" / "training_log", "batch 3:", processes)
    for path in (tmp_path / "data_1").glob("*/data_train.hdf5"):
        os.truncate(path, 3000)
    codes, said = end_of(processes)
    assert codes == [OTHER_ENDED, 2]
    assert said[1].count("process 1: ") == 1 and "cannot be read any more" in said[1] and "Traceback" not in said[1]
    assert "another process ended" in said[0] and "Traceback" not in said[0]


def test_what_one_process_refuses_two_refuse_once(command, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "something").write_text("")
    codes, said = end_of(start(command, 2))
    assert codes == [2, OTHER_ENDED]
    assert sum("holds an earlier run" in words for words in said) == 1


def test_processes_with_different_settings_do_not_train_together(command, tmp_path):
    codes, said = end_of(start([*command, "--set", "lr_max=0.01{rank}", "lr_min=0.001"], 2))
    assert codes == [OTHER_ENDED, 2]
    assert "process 1: the processes were started with different settings" in said[1]
    assert "lr_max: 0.011 here, 0.01 in process 0" in said[1]
    assert not (tmp_path / "run").exists()


def test_a_directory_into_which_another_process_trains_is_refused_in_every_way(command, tmp_path):
    alone = [*command, "--set", "num_training_batches=4000"]
    (first,) = start(alone, 1)
    wait_for(tmp_path / "run" / "training_log", "batch 3:", [first])
    for option in ("--overwrite", "--resume"):
        codes, said = end_of(start([*command, option], 1))
        assert codes == [2] and f"process {first.pid} on " in said[0] and "trains into this directory" in said[0]
    first.kill()
    end_of([first])
    codes, said = end_of(start([*command, "--overwrite"], 1))
    assert codes == [0], said


def test_another_number_of_trials_a_step_is_said_when_resuming(simulated, tmp_path):
    settings = {"output_dir": tmp_path / "run", "num_training_batches": 2}
    run_on(1, "train", simulated, settings)
    run_on(2, "train", simulated, settings | {"num_training_batches": 3}, "resume")
    assert "resuming with 8 trials an optimiser step: 4 before" in (tmp_path / "run" / "training_log").read_text()


# ---- launchers -------------------------------------------------------------------------------------------------------


def launched(*launcher, command, cwd, **variables):
    """Start a launcher of train_model.py from another directory."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "USE_TORCH_XLA": "0"} | variables
    line = [sys.executable, "-m", *map(str, launcher), *command, "--num_batches", "4"]
    return subprocess.Popen(
        line, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip


def test_torchrun_and_accelerate_launch_train_alike(command, tmp_path):
    states = []
    for name, launcher in {
        "torchrun": ["torch.distributed.run", "--nproc_per_node", 2, "--master_port", free_port()],
        "accelerate": ["accelerate.commands.launch", "--multi_gpu", "--num_processes", 2, "--num_machines", 1,
                       "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", free_port()],
    }.items():  # fmt: skip
        process = launched(*launcher, command=[*command, "--output_dir", str(tmp_path / name)], cwd=tmp_path)
        codes, said = end_of([process], 200)
        assert codes == [0], said
        assert said[0].count("evaluate:") == 1  # one of them speaks
        assert "x 2 process(es) = 8 trials" in said[0]
        states.append(load_checkpoint(tmp_path / name / "checkpoint" / "last_checkpoint")["model_state_dict"])
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_of_two_machines_only_the_first_writes(command, tmp_path):
    """One process on each, the second with a working directory of its own."""
    port = free_port()
    machines = []
    for rank in range(2):
        (tmp_path / f"machine_{rank}").mkdir()
        launcher = ["torch.distributed.run", "--nnodes", 2, "--nproc_per_node", 1, "--node_rank", rank,
                    "--master_addr", "127.0.0.1", "--master_port", port]  # fmt: skip
        line = [*command, "--output_dir", "here"]
        machines.append(launched(*launcher, command=line, cwd=tmp_path / f"machine_{rank}"))
    codes, said = end_of(machines, 200)
    assert codes == [0, 0], said
    assert "x 2 process(es) = 8 trials" in said[0] and "evaluate:" not in said[1]
    assert (tmp_path / "machine_0" / "here" / "checkpoint" / "last_checkpoint").is_file()
    assert list((tmp_path / "machine_1").iterdir()) == []


def test_a_checkpoint_that_one_host_lacks_is_said(simulated, tmp_path):
    said = run_on(2, "resume_without_the_file", simulated, {"output_dir": tmp_path / "run"})
    assert said[0] == "other" and "is not on this host" in said[1] and "copy it there" in said[1]


def test_accelerate_launch_cpu_is_said_to_start_one_process_only(caplog, monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    monkeypatch.setenv("MASTER_PORT", "29500")
    Backend("cpu")
    assert "one process only" in caplog.text and "torchrun" in caplog.text


def test_no_process_holds_two_copies_of_the_model():
    for found in run_on(2, "peak_of_initialisation"):
        assert found["growth"] < 1.8 * found["parameters"], found
