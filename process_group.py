"""Start one process a rank, keep a log of each, show rank 0, and end them all when one fails.

No process is left over: each leads a process group of its own, which is killed when `run_processes` returns, however
it returns; and each asks the kernel to be killed when this process dies by a signal that cannot be caught.
"""

import contextlib
import fcntl
import functools
import os
import pty
import queue
import re
import shlex
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from machine import die_with

# Seconds. From the first failure to the end of all: half a minute where nothing hangs in a driver, else 40 s.
BY_THEMSELVES_S = 5.0  # after the first failure: an error is worth more than the signal that cuts it off
INTERRUPTED_S = 20.0  # after a forwarded Ctrl-C or SIGTERM: what was begun may be finished
TERMINATED_S = 10.0  # after SIGTERM
KILLED_S = 10.0  # after SIGKILL; one that is still there hangs in a driver
SHOWN_LINES = 20
OTHER_ENDED = 3  # a process's exit code where it only ends because another one did

_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen
    log: Path
    code: int | None = None  # exit code, or minus the signal; None while it runs


def run_processes(
    command: list[str], environments: list[dict[str, str]], log_dir: str | Path, append: bool = False
) -> int:
    """Run the command once for each environment, and wait for all.

    Output goes to log_dir/rank_<i>.log, rank 0's to stdout as well; where that is a terminal, rank 0 gets one too.

    Args:
        append: go on in the logs that are there. Otherwise logs of earlier processes are removed.
    Returns:
        0; or the exit code of the first that failed, 128 + the signal if one ended it, after the others were ended
        within a minute; or 130 after Ctrl-C and 143 after SIGTERM, which all of them got.
    Raises:
        OSError: a log cannot be written, or the command not started; none is left running.
    """
    group = _Group(command, Path(log_dir))
    with group.catching_signals():
        try:
            group.start(environments, append)
            return group.wait()
        finally:
            group.kill()


class _Group:
    def __init__(self, command: list[str], log_dir: Path) -> None:
        self.command, self.log_dir = command, log_dir
        self.ranks: list[_Rank] = []
        self.events: queue.SimpleQueue = queue.SimpleQueue()  # its put() may be called in a signal handler
        self.screen: threading.Thread | None = None
        self.on_terminal = sys.stdout.isatty()

    @contextlib.contextmanager
    def catching_signals(self) -> Iterator[None]:
        """Turn SIGINT, SIGTERM and SIGHUP into events: a signal number each."""
        caught = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
            caught.append(signal.SIGHUP)
        before = {number: signal.signal(number, lambda n, _: self.events.put(n)) for number in caught}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # ---- starting ------------------------------------------------------------------------------------------------

    def start(self, environments: list[dict[str, str]], append: bool) -> None:
        self.log_dir.mkdir(parents=True, exist_ok=True)
        if not append:
            for path in self.log_dir.glob("rank_*.log"):
                path.unlink()
        source, rank_0_log = -1, None
        for number, environment in enumerate(environments):
            path = self.log_dir / f"rank_{number}.log"
            log = open(path, "ab")  # noqa: SIM115  rank 0's stays open for the thread that writes it
            started = time.strftime("%Y-%m-%d %H:%M:%S")
            log.write(f"---- {started}, rank {number} of {len(environments)}: {shlex.join(self.command)}\n".encode())
            log.flush()
            if number == 0:
                (source, output), rank_0_log = (_terminal() if self.on_terminal else os.pipe()), log
            else:
                output = log.fileno()
            process = subprocess.Popen(
                self.command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True, preexec_fn=functools.partial(die_with, os.getpid()),
            )  # fmt: skip
            self.ranks.append(_Rank(number, process, path))
            if number == 0:
                os.close(output)
            else:
                log.close()
        # Threads only now: between fork and exec a process with several is not safe.
        self.screen = threading.Thread(target=_show, args=(source, rank_0_log), daemon=True)
        self.screen.start()
        for rank in self.ranks:
            threading.Thread(target=self._watch, args=(rank,), daemon=True).start()

    def _watch(self, rank: _Rank) -> None:
        """An event, the rank, when its process has ended."""
        with contextlib.suppress(ChildProcessError):  # `kill` was first
            # Left unreaped (WNOWAIT), its number cannot become another process's before `kill` is done with it.
            end = os.waitid(os.P_PID, rank.process.pid, os.WEXITED | os.WNOWAIT)
            rank.code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
            self.events.put(rank)

    # ---- waiting -------------------------------------------------------------------------------------------------

    def wait(self) -> int:
        running = list(self.ranks)
        first: _Rank | None = None  # that failed
        interrupted = 0  # by this signal
        plan: list[tuple[float, int]] = []  # (when, signal for those that still run), 0: give up
        while running:
            try:
                event = self.events.get(timeout=max(0.0, plan[0][0] - time.monotonic()) if plan else None)
            except queue.Empty:
                _, number = plan.pop(0)
                if number == 0:
                    self.say(f"cannot be killed, it hangs in the system: {_names(running)}")
                    break
                self.say(f"{_signal_name(number)} to {_names(running)}")
                _send(running, number)
                continue
            if isinstance(event, _Rank):
                running.remove(event)
                if event.code and first is None and not interrupted:
                    first = event
                    if running:
                        self.say(f"rank {event.number} ended: {_how(event.code)}; ending {_names(running)}")
                    plan = _ending(BY_THEMSELVES_S)
                elif event.code and first is not None and first.code == OTHER_ENDED and not _was_sent(plan):
                    first = event  # the one that the other ended for
            elif first is None and not interrupted:
                interrupted = event
                self.say(f"{_signal_name(event)} to all processes; once more kills them")
                _send(running, event)
                plan = _ending(INTERRUPTED_S)
            else:
                self.say(f"killing {_names(running)}")
                plan = [(time.monotonic(), signal.SIGKILL), (time.monotonic() + KILLED_S, 0)]
        if first is not None:
            self.report(first)
            return first.code if first.code > 0 else 128 - first.code
        return 128 + interrupted if interrupted else 0

    def report(self, first: _Rank) -> None:
        """Which rank failed first, how, and what it said last."""
        self.screen.join(1.0 if first.number == 0 else 0.0)  # its log is written there
        lines = first.log.read_text(errors="replace").splitlines()[-SHOWN_LINES:] if first.log.exists() else []
        hint = ""
        if first.code == -signal.SIGKILL:
            hint = "\nIf nobody sent it, the machine ran out of memory: `dmesg` would say so."
        said = "\n".join(f"    {line}" for line in lines)
        self.say(f"\nrank {first.number} ended first: {_how(first.code)}.{hint}\nlast in {first.log}:\n{said}")

    def say(self, text: str) -> None:
        """A line on stderr, below rank 0's progress bar if there is one."""
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(f"\n{text}" if self.on_terminal else text, file=sys.stderr, flush=True)

    # ---- ending --------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """Kill what is left of each rank, helpers that it started included, and reap it."""
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.process.pid, signal.SIGKILL)
        deadline = time.monotonic() + KILLED_S
        for rank in self.ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, deadline - time.monotonic()))
        if self.screen is not None:
            self.screen.join(2.0)


def _ending(patience_s: float) -> list[tuple[float, int]]:
    """When those that still run get SIGTERM, SIGKILL, and are given up."""
    terminate = time.monotonic() + patience_s
    kill = terminate + TERMINATED_S
    return [(terminate, signal.SIGTERM), (kill, signal.SIGKILL), (kill + KILLED_S, 0)]


def _was_sent(plan: list[tuple[float, int]]) -> bool:
    """Whether a signal of the plan was sent, so that what ends now does so by it."""
    return len(plan) < 3


def _send(ranks: list[_Rank], number: int) -> None:
    """A signal to each process itself: it ends its helpers, or they see that it is gone."""
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid, number)


def _names(ranks: list[_Rank]) -> str:
    numbers = ", ".join(str(rank.number) for rank in ranks)
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"killed by {_signal_name(-code)}"


def _signal_name(number: int) -> str:
    names = {known.value: known.name for known in signal.Signals}  # not of every real-time signal
    return names.get(number, f"signal {number}")


def _terminal() -> tuple[int, int]:
    """A pseudo-terminal whose lines end in a plain newline: our end, and the process's."""
    ours, theirs = pty.openpty()
    settings = termios.tcgetattr(theirs)
    settings[1] &= ~termios.OPOST
    termios.tcsetattr(theirs, termios.TCSANOW, settings)
    _copy_window_size(ours)
    return ours, theirs


def _copy_window_size(terminal: int) -> None:
    with contextlib.suppress(OSError):
        size = fcntl.ioctl(sys.stdout.fileno(), termios.TIOCGWINSZ, bytes(8))
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, size)


def _show(source: int, log: BinaryIO) -> None:
    """Copy what comes to stdout, and to the log its lines without a progress bar's redraws."""
    rest, is_terminal, shown, logged = b"", os.isatty(source), True, True
    while data := _read(source):
        if is_terminal:
            _copy_window_size(source)  # the window may have been resized
        shown = shown and _write(data)
        *lines, rest = (rest + data).split(b"\n")
        logged = logged and _log(log, [_without_redraws(line) for line in lines])
        rest = rest[max(rest.rfind(b"\r", 0, -1), 0) :]  # a bar is redrawn for hours without a newline
    if logged and rest:
        _log(log, [_without_redraws(rest)])
    with contextlib.suppress(OSError):
        log.close()
    os.close(source)


def _log(log: BinaryIO, lines: list[bytes]) -> bool:
    """Write to a log; False where it cannot be, as on a full disk: what comes must be read all the same."""
    try:
        log.writelines(lines)
        log.flush()
    except OSError as error:
        print(f"{log.name}: not written any more ({error.strerror})", file=sys.stderr, flush=True)
        return False
    return True


def _read(source: int) -> bytes:
    try:
        return os.read(source, 1 << 16)
    except OSError:  # how a pseudo-terminal ends
        return b""


def _write(data: bytes) -> bool:
    """To stdout, whole; False where nobody reads it any more."""
    try:
        while data:
            data = data[os.write(sys.stdout.fileno(), data) :]
    except OSError:
        return False
    return True


def _without_redraws(line: bytes) -> bytes:
    """The last that stood in a line, with a newline; nothing where that was a bar's blanks."""
    last = _ESCAPES.sub(b"", line.rstrip(b"\r").rpartition(b"\r")[2]).rstrip()
    return b"" if b"\r" in line and not last else last + b"\n"
