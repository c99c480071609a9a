"""The launcher: what it checks before it starts processes, what it gives them, and how all of them end."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from tiny import training_config

import launch_tpu_training
import process_group
import tpu_host
from config import save_config
from run_directory import check_vacant, remove_run, take_free_directory

ROOT = Path(__file__).resolve().parent.parent
V5E = "0x0063"


@pytest.fixture
def settings(simulated, tmp_path):
    """A configuration file of the simulated data, whose run goes to tmp_path / "run"."""
    save_config(training_config(simulated, tmp_path / "run"), tmp_path / "args.yaml")
    return tmp_path / "args.yaml"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine without chips, processes and lock file: machine(chips=8) puts some in."""
    devices, processes = tmp_path / "pci", tmp_path / "proc"
    devices.mkdir(), processes.mkdir()
    monkeypatch.setattr(tpu_host, "PCI_DEVICES", devices)
    monkeypatch.setattr(tpu_host, "PROCESSES", processes)
    monkeypatch.setattr(tpu_host, "LOCK_FILE", tmp_path / "libtpu_lockfile")
    monkeypatch.setattr(tpu_host, "FIRST_PORT", 20000 + os.getpid() % 10000)
    monkeypatch.setattr(tpu_host, "find_spec", lambda name: name)
    monkeypatch.setattr(tpu_host, "_is_installed", lambda name: False)
    for name in (*tpu_host.REMOVED, "TPU_SKIP_MDS_QUERY", "TPU_WORKER_HOSTNAMES", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)

    def put(chips=0, kind=V5E, vendor="0x1ae0", free_gb=400.0):
        for i in range(chips):
            (devices / f"0000:00:{i:02x}.0").mkdir()
            (devices / f"0000:00:{i:02x}.0" / "vendor").write_text(vendor + "\n")
            (devices / f"0000:00:{i:02x}.0" / "device").write_text(kind + "\n")
        (processes / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable:   {int(free_gb * 1e9 / 1024)} kB\n")

    put()
    return put


@pytest.fixture
def refused(settings, capfd):
    """refused(*options): what the launcher says when it starts nothing."""

    def run(*options):
        assert launch_tpu_training.main(["--config", str(settings), *options], script="/nowhere") == 2
        return capfd.readouterr().err

    return run


@pytest.fixture
def planned(settings, capfd, tmp_path):
    """planned(*options): what it prints with --dry_run: on stdout, and warnings."""

    def run(*options):
        code = launch_tpu_training.main(["--config", str(settings), "--dry_run", *options], script="/nowhere")
        said = capfd.readouterr()
        assert code == 0, said.err
        assert not (tmp_path / "run").exists()
        return said

    return run


# ---- checks ------------------------------------------------------------------------------------------------------


def test_no_tpu_is_said_in_seconds_with_what_was_looked_for_and_the_rehearsal(settings):
    if tpu_host.find_chips()[0]:
        pytest.skip("there is one")
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, ROOT / "launch_tpu_training.py", "--config", settings],
        capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert time.monotonic() - start < 30
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "0x1ae0" in done.stderr and "/sys/bus/pci/devices" in done.stderr
    assert f"python launch_tpu_training.py --config {settings} --backend cpu --num_cores 2" in done.stderr


def test_neither_the_launcher_nor_the_script_starts_a_runtime_before_the_processes(settings):
    """Case 39: torch_xla would then refuse to spawn, and the parent would hold the chips."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\nimport train_model\nassert 'torch' not in sys.modules\n"
        f"import launch_tpu_training as l\nl.main(['--config', {str(settings)!r}, '--dry_run', '--num_cores', '2'])\n"
        "assert 'torch_xla' not in sys.modules and 'accelerate' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_other_devices_of_the_maker_are_no_chips(machine, refused):
    machine(chips=2, kind="0x0042")
    assert "found none, and 2 other devices of that maker (0x0042)" in refused()


def test_all_problems_are_listed_at_once(machine, refused, tmp_path, monkeypatch):
    monkeypatch.setattr(tpu_host, "find_spec", lambda name: None)
    machine(chips=4)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "training_log").touch()
    said = refused("--num_cores", "3", "--data_dir", str(tmp_path / "no_data"))
    assert said.startswith("4 problems; nothing was started:\n  - ")
    assert "torch_xla is not installed; ./setup_env.sh tpu" in said
    assert "3 processes do not go with the 4 chip(s) here; possible: --num_cores 1 (one chip) or --num_cores 4" in said
    assert said.count("There is no data set directory") == 1
    assert "--overwrite" in said


def test_mistakes_in_the_configuration_stand_beside_those_of_the_machine(machine, refused):
    said = refused("--set", "lr_maxx=1", "dataset.batch_size=none")
    assert "lr_max" in said and "dataset.batch_size" in said and "no TPU here" in said


@pytest.mark.parametrize("options", [("--lr_max", "1"), ("--num_cores", "0"), ("--device", "cpu")])
def test_options_that_train_model_does_not_know_or_the_launcher_decides_are_refused(settings, options):
    with pytest.raises(SystemExit) as refusal:
        launch_tpu_training.main(["--config", str(settings), *options], script="/nowhere")
    assert refusal.value.code == 2


@pytest.mark.parametrize(("n_chips", "n_cores"), [(8, 8), (8, 1), (4, 4), (1, 1)])
def test_one_chip_and_all_chips_are_possible(machine, planned, n_chips, n_cores):
    machine(chips=n_chips)
    plan = planned("--num_cores", str(n_cores)).out
    assert f"{n_cores} on TPU v5e, one a chip" in plan
    assert f"4 trials a core x 1 accumulated x {n_cores} process(es) = {4 * n_cores} an optimiser step" in plan


def test_without_num_cores_the_configuration_says_how_many(machine, planned, refused):
    machine(chips=4)
    assert "4 on TPU" in planned("--set", "num_tpu_cores=4").out
    assert "8 processes do not go with the 4 chip(s) here" in refused()


def test_chips_with_two_cores_and_several_hosts_are_refused(machine, refused, monkeypatch):
    machine(chips=4, kind="0x0027")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "10.0.0.1,10.0.0.2")
    said = refused("--num_cores", "4")
    assert "v2 or v3" in said and "names 2 hosts (10.0.0.1, 10.0.0.2)" in said


def test_a_process_that_holds_chips_is_named(machine, refused, tmp_path):
    machine(chips=8)
    for number, target in (("41", "/dev/null"), ("42", "/dev/accel3"), ("43", "/dev/vfio/7")):
        descriptors = tmp_path / "proc" / number / "fd"
        descriptors.mkdir(parents=True)
        (descriptors / "5").symlink_to(target)
        (descriptors.parent / "cmdline").write_bytes(b"python\0train.py\0")
    (tmp_path / "libtpu_lockfile").touch()  # theirs
    said = refused()
    assert "process 42 holds /dev/accel3: python train.py" in said and "process 43 holds /dev/vfio/7" in said
    assert "process 41" not in said and "libtpu_lockfile" not in said


def test_a_lock_file_that_is_held_or_another_users_is_a_problem(machine, refused, tmp_path):
    machine(chips=8)
    lock_file = tmp_path / "libtpu_lockfile"
    with open(lock_file, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "a process holds" in refused()
    lock_file.unlink()
    lock_file.mkdir()  # cannot be opened for writing, by the superuser neither
    assert f"sudo rm {lock_file}" in refused()


def test_a_lock_file_that_was_left_over_is_removed_when_the_processes_start_and_not_before(
    machine, planned, settings, tmp_path, capfd
):
    machine(chips=1)
    lock_file, script = tmp_path / "libtpu_lockfile", tmp_path / "child.py"
    script.write_text("import os; print('chip', os.environ['TPU_VISIBLE_CHIPS'])")
    lock_file.touch()
    planned("--num_cores", "1")
    assert lock_file.exists()
    assert launch_tpu_training.main(["--config", str(settings), "--num_cores", "1"], script) == 0
    assert not lock_file.exists()
    said = capfd.readouterr().out
    assert "removed libtpu's lock file" in said and "chip 0" in said


def test_ports_of_the_chips_that_are_in_use_are_named(machine, refused, monkeypatch):
    machine(chips=8)
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        monkeypatch.setattr(tpu_host, "FIRST_PORT", port)
        assert str(port) in refused() and "is in use" in refused()


def test_memory_that_cannot_do_is_a_problem_and_tight_memory_a_warning(machine, planned, refused):
    machine(chips=8, free_gb=8)
    assert "8 processes need about 8.8 GB of this machine's memory, and 8.0 GB are free" in refused()
    machine(free_gb=10)
    assert "warning: 8 processes need about 8.8 GB" in planned().err
    machine(free_gb=100)
    assert planned().err == ""


def test_tensorflow_is_warned_of(machine, planned, monkeypatch):
    machine(chips=8)
    monkeypatch.setattr(tpu_host, "_is_installed", lambda name: name == "tensorflow")
    assert "warning: tensorflow is installed" in planned().err


def test_a_missing_library_of_the_tpu_is_a_problem(machine, refused, monkeypatch):
    machine(chips=8)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(tpu_host, "find_spec", lambda name: None if name == "libtpu" else name)
    assert "libtpu, the TPU's library, is not installed; ./setup_env.sh tpu" in refused("--num_cores", "8")


def test_a_disk_that_is_too_small_is_a_problem(machine, refused, monkeypatch):
    machine(chips=8)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100}))
    assert "checkpoints of 0.00 GB need" in refused()


# ---- the processes' environment ----------------------------------------------------------------------------------


def test_what_hinders_one_process_a_chip_is_removed_and_said(machine, planned, monkeypatch):
    machine(chips=8)
    for name, value in {"XLA_USE_BF16": "1", "TPU_PROCESS_ADDRESSES": "local", "TPU_VISIBLE_DEVICES": "0"}.items():
        monkeypatch.setenv(name, value)
    said = planned().out
    assert "XLA_USE_BF16=1 is removed: it would turn weights and optimiser state into bf16" in said
    assert "TPU_PROCESS_ADDRESSES=local is removed" in said and "TPU_VISIBLE_DEVICES=0 is removed" in said
    cleaned, _ = tpu_host.clean_environment(dict(os.environ) | {"HOME": "here"})
    assert not set(cleaned) & set(tpu_host.REMOVED) and cleaned["HOME"] == "here"


def test_the_shape_of_a_machine_that_only_the_environment_knows_is_kept_under_another_name():
    shape = {"TPU_PROCESS_BOUNDS": "1,1,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,4,1", "CLOUD_TPU_TASK_ID": "0"}
    moved = {"TPU_HOST_BOUNDS": "1,1,1", "TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1", "TPU_WORKER_ID": "0"}
    assert tpu_host.clean_environment(shape)[0] == {}
    assert tpu_host.clean_environment(shape | {"TPU_SKIP_MDS_QUERY": "1"})[0] == moved | {"TPU_SKIP_MDS_QUERY": "1"}
    kept = {"TPU_SKIP_MDS_QUERY": "1", "TPU_HOST_BOUNDS": "1,1,1", "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1"}
    assert tpu_host.clean_environment(kept | {"TPU_PROCESS_BOUNDS": "2,2,1"})[0] == kept


def test_each_process_of_a_tpu_has_its_rank_and_none_has_a_topology(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(224))
    environments = launch_tpu_training.process_environments("tpu", 8, {"HOME": "here"})
    assert [environment["LOCAL_RANK"] for environment in environments] == [str(i) for i in range(8)]
    assert len({environment["MASTER_PORT"] for environment in environments}) == 1
    for environment in environments:
        assert environment["RANK"] == environment["LOCAL_RANK"]
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "8"
        assert environment["PJRT_DEVICE"] == "TPU" and environment["MASTER_ADDR"] == "127.0.0.1"
        assert environment["OMP_NUM_THREADS"] == "28" and environment["HOME"] == "here"
        assert not set(environment) & set(tpu_host.REMOVED)


def test_a_single_process_of_a_tpu_sees_the_first_chip_only():
    (environment,) = launch_tpu_training.process_environments("tpu", 1, {"OMP_NUM_THREADS": "3"})
    assert environment["TPU_VISIBLE_CHIPS"] == "0" and environment["LOCAL_WORLD_SIZE"] == "1"
    assert environment["TPU_PROCESS_BOUNDS"] == environment["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "1,1,1"
    assert environment["OMP_NUM_THREADS"] == "3"


def test_options_and_environment_reach_the_processes(settings, tmp_path, capfd):
    script = tmp_path / "child.py"
    script.write_text("import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))")
    options = ["--set", "lr_max=0.002", "--num_cores", "2", "--backend", "cpu", "--num_batches", "7"]
    assert launch_tpu_training.main(["--config", str(settings), *options], script) == 0
    for rank in range(2):
        log = (tmp_path / "run" / "launch_logs" / f"rank_{rank}.log").read_text().splitlines()
        assert f"rank {rank} of 2" in log[0]
        arguments, environment = json.loads(log[1])
        assert arguments == [
            *("--config_path", str(settings), "--set", "lr_max=0.002", "--num_batches", "7", "--device", "cpu")
        ]
        assert (environment["RANK"], environment["WORLD_SIZE"]) == (str(rank), "2")
        assert (environment["USE_TORCH_XLA"], environment["B2TXT_LAUNCHER"]) == ("0", "1")
    assert capfd.readouterr().out.count('"RANK"') == 1  # rank 0 alone is shown


def test_on_a_tpu_the_number_of_processes_becomes_a_setting():
    *_, passed = launch_tpu_training.parse_arguments(["--num_cores", "1", "--set", "seed=3", "--resume"])
    assert passed[2:] == ["--set", "seed=3", "--resume", "--device", "xla", "--set", "num_tpu_cores=1"]


# ---- the output directory ----------------------------------------------------------------------------------------


def test_a_directory_with_nothing_but_launch_logs_is_vacant(simulated, tmp_path, monkeypatch):
    logs = tmp_path / "run" / "launch_logs"
    logs.mkdir(parents=True)
    (logs / "rank_0.log").touch()
    check_vacant(tmp_path / "run")
    check_vacant(tmp_path / "run", overwrite=True)
    config = training_config(simulated, tmp_path / "run")
    take_free_directory(config)
    assert config.output_dir == str(tmp_path / "run")

    monkeypatch.setenv("B2TXT_LAUNCHER", "1")
    remove_run(tmp_path / "run", tmp_path / "run" / "checkpoint")
    assert (logs / "rank_0.log").exists()  # written to at this moment
    monkeypatch.delenv("B2TXT_LAUNCHER")
    remove_run(tmp_path / "run", tmp_path / "run" / "checkpoint")
    assert not logs.exists()


# ---- processes ---------------------------------------------------------------------------------------------------

DRIVER = """
import os, sys
sys.path.insert(0, sys.argv[1])
import process_group as group
group.BY_THEMSELVES_S, group.INTERRUPTED_S, group.TERMINATED_S = 0.7, 0.5, 0.3
environments = [os.environ | {"RANK": str(rank)} for rank in range(3)]
sys.exit(group.run_processes([sys.executable, "child.py"], environments, "logs", *map(bool, sys.argv[2:])))
"""
CHILD = """
import os, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
"""
SLEEP = 'print("ready", os.getpid())\ntime.sleep(60)\n'


@pytest.fixture
def start(tmp_path):
    """start(code of each rank's process, ...): a process that runs three of them, logs in tmp_path / "logs"."""
    started = []

    def begin(code, *arguments, **popen):
        (tmp_path / "child.py").write_text(CHILD + textwrap.dedent(code))
        where = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | popen
        process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, ROOT, *arguments],
            cwd=tmp_path, env=os.environ | {"PYTHONUNBUFFERED": "1"}, text=True, **where,
        )  # fmt: skip
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def log_of(tmp_path, rank):
    path = tmp_path / "logs" / f"rank_{rank}.log"
    return path.read_text() if path.exists() else ""


def pids(tmp_path, word="ready"):
    """The process numbers of all three ranks, once each has printed `ready <number>`."""
    deadline = time.monotonic() + 10
    while True:
        found = [line.split()[1] for rank in range(3) for line in log_of(tmp_path, rank).splitlines() if word in line]
        if len(found) == 3:
            return list(map(int, found))
        assert time.monotonic() < deadline
        time.sleep(0.01)


def all_end(numbers):
    """Whether the processes end within five seconds; those that nobody has reaped yet are at an end."""

    def runs(number):
        try:
            return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    deadline = time.monotonic() + 5
    while any(map(runs, numbers)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(runs, numbers))


def test_all_end_well_and_each_has_a_log(start, tmp_path):
    code = 'print("rank", rank); print("error", rank, file=sys.stderr)'
    out, err = (process := start(code)).communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "rank 0\nerror 0\n", "")
    assert all(log_of(tmp_path, rank).endswith(f"rank {rank}\nerror {rank}\n") for rank in range(3))
    (tmp_path / "logs" / "rank_7.log").touch()
    start(code, "append").communicate(timeout=20)
    assert log_of(tmp_path, 1).count("rank 1\n") == 2 and (tmp_path / "logs" / "rank_7.log").exists()
    start(code).communicate(timeout=20)
    assert log_of(tmp_path, 1).count("rank 1\n") == 1 and not (tmp_path / "logs" / "rank_7.log").exists()


def test_the_first_failure_counts_and_the_others_may_end_by_themselves(start, tmp_path):
    code = """
    from pathlib import Path
    first = Path("first")
    if rank == 1:
        print("last words of 1")
        first.with_name("writing").write_text(str(os.getpid()))
        first.with_name("writing").rename(first)
        sys.exit(4)
    while not (first.exists() and ") Z " in Path(f"/proc/{first.read_text()}/stat").read_text()):
        time.sleep(0.01)
    time.sleep(0.1)
    print(f"last words of {rank}")
    sys.exit((5, 4, 0)[rank])
    """
    _, err = (process := start(code)).communicate(timeout=20)
    assert process.returncode == 4
    assert "rank 1 ended: exit code 4; ending ranks 0, 2" in err and "SIGTERM" not in err
    assert "rank 1 ended first: exit code 4" in err and "    last words of 1" in err and "logs/rank_1.log" in err
    assert "last words of 2" in log_of(tmp_path, 2)


def test_one_that_ends_because_of_another_is_not_called_the_first(start):
    code = """
    if rank == 0:
        time.sleep(0.2)
        print("the reason")
    sys.exit((2, 3, 3)[rank])
    """
    _, err = (process := start(code)).communicate(timeout=20)
    assert process.returncode == 2 and "rank 0 ended first: exit code 2" in err and "    the reason" in err


def test_a_log_that_cannot_be_written_stops_nothing(capsys):
    """A full disk: rank 0 would block if nobody read what it says."""
    with open("/dev/full", "ab", buffering=0) as full:
        assert not process_group._log(full, [b"x" * 100_000])
    assert "/dev/full: not written any more (No space left on device)" in capsys.readouterr().err


def test_a_killed_process_takes_the_others_along_even_deaf_ones_and_their_helpers(start, tmp_path):
    code = """
    helper = subprocess.Popen(["sleep", "60"])
    print("ready", os.getpid())
    print("helper", helper.pid)
    if rank == 2:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
    """
    process = start(code)
    numbers = pids(tmp_path) + pids(tmp_path, "helper")
    start_s = time.monotonic()
    _, err = process.communicate(timeout=20)
    assert time.monotonic() - start_s < 5
    assert process.returncode == 128 + signal.SIGKILL
    assert "rank 2 ended first: killed by SIGKILL" in err and "out of memory" in err
    assert "SIGTERM to ranks 0, 1" in err and "SIGKILL to ranks 0, 1" in err
    assert all_end(numbers)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_reaches_every_process_once(start, tmp_path, number, code):
    process = start("""
    caught = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: caught.append(number))
    print("ready", os.getpid())
    while not caught:
        time.sleep(0.01)
    time.sleep(0.2)
    print("caught", *map(int, caught))
    sys.exit(7)
    """, start_new_session=True)  # fmt: skip
    numbers = pids(tmp_path)
    os.killpg(process.pid, number)  # as a terminal does
    process.communicate(timeout=20)
    assert process.returncode == code
    assert all(f"caught {int(number)}\n" in log_of(tmp_path, rank) for rank in range(3))
    assert all_end(numbers)


@pytest.mark.parametrize("times", [1, 2])
def test_deaf_processes_are_killed_after_a_while_or_by_a_second_ctrl_c(start, tmp_path, times):
    process = start("for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)\n" + SLEEP)
    numbers = pids(tmp_path)
    for _ in range(times):
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130 and ("killing" in err) == (times == 2)
    assert all_end(numbers)


def test_no_process_outlives_a_killed_launcher(start, tmp_path):
    process = start(SLEEP)
    numbers = pids(tmp_path)
    process.kill()
    assert all_end(numbers)


def test_rank_0_has_a_terminal_where_the_launcher_has_one_and_its_log_no_redraws(start, tmp_path):
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, 0x5414, bytes([40, 0, 123, 0, 0, 0, 0, 0]))  # TIOCSWINSZ: 40 lines of 123 columns
    process = start(
        """
        if rank == 0:
            print("columns", os.get_terminal_size(2).columns, sys.stderr.isatty())
            for i in range(3):
                sys.stderr.write(f"\\r{i} of 3")
            sys.stderr.write("\\r      \\rloss 1\\n\\r3 of 3")
            sys.stderr.write("\\r      \\r")
        """,
        stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    try:
        while data := os.read(ours, 4096):
            shown += data
    except OSError:  # its end
        pass
    os.close(ours)
    assert process.wait(20) == 0
    assert b"\r1 of 3\r2 of 3" in shown
    assert log_of(tmp_path, 0).splitlines()[1:] == ["columns 123 True", "loss 1"]


def test_a_reader_that_goes_away_stops_nothing(start, tmp_path):
    process = start("""
    print("ready", os.getpid())
    for i in range(20):
        time.sleep(0.02)
        print("line", i)
    """)
    pids(tmp_path)
    process.stdout.close()
    assert process.wait(20) == 0
    process.stdout = None
    assert "line 19" in log_of(tmp_path, 0)
