"""What the operating system is asked for: free memory, cores, and that a process ends when its parent does."""

import ctypes
import os
import re
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None)  # before a fork, after which nothing should be loaded


def available_memory() -> int | None:
    """Bytes that programs may still take, by Linux; None elsewhere."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def usable_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def die_with(parent: int) -> None:
    """Ask to be killed when the parent is, by whatever; for a new process to call before anything else.

    Args:
        parent: its process id: where it has died already, this process ends at once. Nothing happens beyond Linux.
    """
    if hasattr(_LIBC, "prctl"):
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
