"""This machine and its TPU, looked at from outside: chips, who holds them, memory, variables of the environment.

Nothing here imports torch_xla or starts a TPU's runtime, which would take the chips from those that are to have them.
"""

import fcntl
import importlib.metadata
import os
import re
import shlex
import socket
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

PCI_DEVICES, PROCESSES, LOCK_FILE = Path("/sys/bus/pci/devices"), Path("/proc"), Path("/tmp/libtpu_lockfile")
GOOGLE_PCI_VENDOR = "0x1ae0"
# As torch_xla 2.9 counts chips (torch_xla/_internal/tpu.py), whose import takes seconds and asks the network.
CHIPS = {"0x0027": "v2 or v3", "0x005e": "v4", "0x0063": "v5e", "0x006f": "v6e", "0x0076": "7x"}
CHIPS |= dict.fromkeys(("0x0056", "0x0062"), "an unnamed kind")
FIRST_PORT = 8476  # torch_xla's: the chips' processes talk to each other over this port and the next ones

_BF16 = "it would turn weights and optimiser state into bf16"
_OWN_CHIP = "each process takes a chip of its own"
REMOVED = {
    "XLA_USE_BF16": _BF16,
    "XLA_DOWNCAST_BF16": _BF16,
    "XRT_TPU_CONFIG": "it belongs to a runtime that is no more",
    "USE_TORCH_XLA": "Accelerate is to use XLA",
    **dict.fromkeys(("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"), _OWN_CHIP),
    **dict.fromkeys(("TPU_PROCESS_BOUNDS", "TPU_CHIPS_PER_PROCESS_BOUNDS"), _OWN_CHIP),
    **dict.fromkeys(
        ("TPU_PROCESS_ADDRESSES", "TPU_PROCESS_PORT", "CLOUD_TPU_TASK_ID", "PJRT_LOCAL_PROCESS_RANK",
         "PJRT_LOCAL_PROCESS_COUNT"),
        "each process of this host sets its own",
    ),
}  # fmt: skip
# Where torch_xla looks next for the machine's shape, if TPU_SKIP_MDS_QUERY says that only the environment knows it.
OTHER_NAMES = {
    "TPU_PROCESS_BOUNDS": "TPU_HOST_BOUNDS",
    "TPU_CHIPS_PER_PROCESS_BOUNDS": "TPU_CHIPS_PER_HOST_BOUNDS",
    "CLOUD_TPU_TASK_ID": "TPU_WORKER_ID",
}


@dataclass
class Findings:
    """What the checks found, in words: problems forbid a start, warnings do not."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def free_host_gb() -> float:
    """Memory that programs can still have, in GB."""
    kb = re.search(r"MemAvailable:\s+(\d+) kB", (PROCESSES / "meminfo").read_text())
    return int(kb.group(1)) * 1024 / 1e9 if kb else float("inf")


def check_tpu(n_processes: int | None, config_path: str, findings: Findings) -> None:
    """Whether so many processes (None: not known) can have the chips of this machine."""
    problems = findings.problems
    if find_spec("torch_xla") is None:
        problems.append("torch_xla is not installed; ./setup_env.sh tpu installs it (Linux on x86-64)")
    elif find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ and find_chips()[0]:
        problems.append("libtpu, the TPU's library, is not installed; ./setup_env.sh tpu installs it")
    if _is_installed("tensorflow"):
        findings.warnings.append(
            "tensorflow is installed and takes the TPU's library when it is imported; "
            "pip uninstall tensorflow, and install tensorflow-cpu if it is needed"
        )
    chips, others = find_chips()
    if not chips:
        also = f", and {len(others)} other devices of that maker ({', '.join(sorted(set(others)))})" if others else ""
        rehearse = f"python launch_tpu_training.py --config {shlex.quote(config_path)} --backend cpu --num_cores 2"
        problems.append(
            f"no TPU here: looked for PCI devices of vendor {GOOGLE_PCI_VENDOR} with a TPU's device number in "
            f"{PCI_DEVICES}, found none{also}. To rehearse on this machine's processor:\n{rehearse}"
        )
        return
    n_chips = len(chips)
    if CHIPS["0x0027"] in chips:
        problems.append("the chips are of TPU v2 or v3, with two cores each; one process a chip needs v4 or later")
    if n_processes not in (None, 1, n_chips):
        possible = "--num_cores 1" if n_chips == 1 else f"--num_cores 1 (one chip) or --num_cores {n_chips} (all)"
        problems.append(
            f"{n_processes} processes do not go with the {n_chips} chip(s) here; possible: {possible}. "
            "Without --num_cores it is num_tpu_cores of the configuration"
        )
    hosts = [host for host in os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]
    if len(hosts) > 1 and n_processes != 1:
        problems.append(
            f"TPU_WORKER_HOSTNAMES names {len(hosts)} hosts ({', '.join(hosts)}), and this program serves one; "
            "use a TPU of one host, such as v5e-8, or --num_cores 1"
        )
    holders = chip_holders()
    for pid, (devices, command) in holders.items():
        problems.append(f"process {pid} holds {', '.join(devices)}: {command}; end it (kill {pid}), or wait for it")
    if not holders:
        problems += _lock_file_problems()
        problems += _port_problems(n_chips if n_processes != 1 else 1)


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)  # tensorflow-cpu has a module of the same name
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def find_chips() -> tuple[list[str], list[str]]:
    """The kinds of the TPU chips of this machine, one a chip; and device numbers of what else their maker made."""
    chips, others = [], []
    for vendor in PCI_DEVICES.glob("*/vendor"):
        if vendor.read_text().strip() == GOOGLE_PCI_VENDOR:
            number = vendor.with_name("device").read_text().strip()
            chips += [CHIPS[number]] if number in CHIPS else []
            others += [number] if number not in CHIPS else []
    return chips, others


def chip_holders() -> dict[int, tuple[list[str], str]]:
    """The devices of chips that processes have open, and their commands, by process number.

    Of other users' processes only the superuser sees what they have open.
    """
    holders = {}
    for process in PROCESSES.glob("[0-9]*"):
        try:
            opened = {os.readlink(descriptor) for descriptor in (process / "fd").iterdir()}
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # another user's, or it has just ended
            continue
        devices = sorted(name for name in opened if re.fullmatch(r"/dev/(accel\d+|vfio/.+)", name))
        if devices:
            holders[int(process.name)] = devices, command
    return holders


def _lock_file_problems() -> list[str]:
    """Of the file by which libtpu knows that it is in use; one that nobody holds and is ours is no problem."""
    try:
        with open(LOCK_FILE, "r+b") as file:
            for lock in (fcntl.lockf, fcntl.flock):  # two kinds that do not see each other
                lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return []
    except BlockingIOError:
        return [f"a process holds {LOCK_FILE}: it uses the TPU's library, or its compiler; end it, or wait for it"]
    except OSError as error:
        return [
            f"{LOCK_FILE} is there, and no process is seen that holds the chips, but it is another user's "
            f"({error.strerror}); if nobody uses the TPU: sudo rm {LOCK_FILE}"
        ]
    return []


def remove_stale_lock_file() -> bool:
    """Remove libtpu's lock file if it is there and ours; whether it was. To be called when nobody holds it."""
    stale = LOCK_FILE.exists() and LOCK_FILE.stat().st_uid == os.getuid()
    if stale:
        LOCK_FILE.unlink()
    return stale


def _port_problems(n_processes: int) -> list[str]:
    taken = []
    for port in range(FIRST_PORT, FIRST_PORT + n_processes):
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: an old connection is no bar
            try:
                listener.bind(("", port))
            except OSError:
                taken.append(str(port))
    if not taken:
        return []
    return [f"port {', '.join(taken)} is in use, and the chips' processes need it; `ss -ltnp` says by whom"]


def clean_environment(environment: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """Without the variables that would hinder one process a chip; and a line on each that was removed."""
    cleaned, said = dict(environment), []
    for name, reason in REMOVED.items():
        if name not in environment:
            continue
        value, other = cleaned.pop(name), OTHER_NAMES.get(name)
        moved = ""
        if other and environment.get("TPU_SKIP_MDS_QUERY") and other not in environment:
            cleaned[other] = value
            moved = f"; kept as {other}"
        said.append(f"{name}={value} is removed: {reason}{moved}")
    return cleaned, said
