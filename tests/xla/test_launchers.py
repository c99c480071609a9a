"""train_model.py as Accelerate's launcher for XLA starts it, on a CPU; and by hand where there are several devices."""

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

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ("-m", "accelerate.commands.launch", "--config_file", ROOT / "accelerate_config_tpu.yaml")


@pytest.fixture
def start(simulated, tmp_path):
    """Start train_model.py from another directory, with variables of the environment; None removes one."""
    settings = {"num_training_batches": 4, "batches_per_val_step": 4, "dataset__n_time_buckets": 1}
    save_config(training_config(simulated, tmp_path / "run", **settings), tmp_path / "args.yaml")

    def begin(*before, options=(), **variables):
        environment = {k: v for k, v in (os.environ | {"OMP_NUM_THREADS": "1"} | variables).items() if v is not None}
        line = [sys.executable, *before, ROOT / "train_model.py", "--config_path", "args.yaml", *options]
        return subprocess.Popen(
            list(map(str, line)), cwd=tmp_path, env=environment, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    return begin


def running_in_group(group):
    """Processes of a process group that are not dead and waiting to be collected."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, number = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it has just ended
            continue
        if int(number) == group and state != "Z":
            found.append(path.parent.name)
    return found


def test_accelerate_launch_trains_through_xla(start, tmp_path):
    """Case 38: the file says XLA, and eight processes, of which a CPU has one."""
    process = start(*LAUNCH, PJRT_DEVICE="CPU")
    said = process.communicate(timeout=240)[0]
    assert process.returncode == 0, said
    assert "device xla:0 (started by an XLA launcher)" in said and "x 1 process(es) = 4 trials" in said
    state = load_checkpoint(tmp_path / "run" / "checkpoint" / "last_checkpoint")
    assert state["step"] == 4 and all(torch.isfinite(v).all() for v in state["model_state_dict"].values())


def test_without_a_tpu_and_without_being_asked_it_stops_and_says_how_to_rehearse(start, tmp_path):
    process = start(*LAUNCH, PJRT_DEVICE=None)
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 2
    assert "vendor 0x1ae0" in said and "found none" in said and "PJRT_DEVICE=CPU accelerate launch" in said
    assert "Traceback" not in said and not (tmp_path / "run").exists()


def test_an_error_of_the_script_is_the_launcher_s_exit_code(start):
    process = start(*LAUNCH, options=["--set", "lr_maxx=1"], PJRT_DEVICE="CPU")
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 2 and "lr_max" in said and "Traceback" not in said


def test_ctrl_c_ends_what_the_launcher_started(start, tmp_path):
    process = start(*LAUNCH, options=["--num_batches", "100000"], PJRT_DEVICE="CPU")
    log, deadline = tmp_path / "run" / "training_log", time.monotonic() + 120
    while not (log.exists() and "batch 2:" in log.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode != 0
    deadline = time.monotonic() + 20
    while running_in_group(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_by_hand_one_of_several_devices_is_taken_and_said(start):
    process = start(options=["--device", "xla", "--num_batches", "2"], PJRT_DEVICE="CPU", CPU_NUM_DEVICES="8")
    said = process.communicate(timeout=240)[0]
    assert process.returncode == 0, said
    assert "this machine has 8 XLA devices, and this process takes one" in said
    assert "launch_tpu_training.py --num_cores 8" in said and "x 1 process(es) = 4 trials" in said


def test_several_processes_of_xla_on_a_cpu_are_refused(start):
    ranks = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    process = start(options=["--device", "xla"], PJRT_DEVICE="CPU", **ranks)
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 2 and "XLA on a CPU runs in one process" in said
