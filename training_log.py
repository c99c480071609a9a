"""What a person watches while a run goes on: log lines in the terminal and in a file, and a progress bar."""

import logging
import os
import sys
from pathlib import Path

from tqdm import tqdm

logger = logging.getLogger("b2txt")

_bars = True  # whether this process shows progress bars


class _EarlyLines(logging.Handler):
    """Keeps what is said before there is a file to write it to."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


class _TerminalHandler(logging.Handler):
    """Prints log lines above a progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


def _remove_handlers(kind: type[logging.Handler]) -> list[logging.Handler]:
    handlers = [handler for handler in logger.handlers if isinstance(handler, kind)]
    for handler in handlers:
        logger.removeHandler(handler)
        handler.close()
    return handlers


def log_to_terminal() -> None:
    """Show the project's log lines, and remember them for `log_to_file`. Called again, it starts afresh."""
    global _bars
    _bars = True
    for kind in (_TerminalHandler, _EarlyLines, logging.FileHandler):
        _remove_handlers(kind)
    logger.addHandler(_EarlyLines())
    handler = _TerminalHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def speak_little() -> None:
    """Show no bars and no more than errors from now on: one of several processes speaks for all.

    But for those of launch_tpu_training.py, which has a file for what each says.
    """
    global _bars
    _bars = False
    if "B2TXT_LAUNCHER" in os.environ:
        return
    for handler in logger.handlers:
        handler.setLevel(logging.ERROR)


def log_to_file(path: Path) -> None:
    """Write the log lines to a file too, with the time: those since `log_to_terminal`, and those to come."""
    handler = _file_handler(path)
    for early in _remove_handlers(_EarlyLines):
        for record in early.records:
            handler.handle(record)
    logger.addHandler(handler)


def go_on_in_file(path: Path) -> None:
    """Write the lines to come to this file and to no other: a trainer made since may have taken the log to its own."""
    files = [handler.baseFilename for handler in logger.handlers if isinstance(handler, logging.FileHandler)]
    if files == [os.path.abspath(path)]:
        return
    for kind in (_EarlyLines, logging.FileHandler):
        _remove_handlers(kind)
    logger.addHandler(_file_handler(path))


def _file_handler(path: Path) -> logging.FileHandler:
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S"))
    return handler


def progress_bar(total: int, initial: int = 0, unit: str = "batch", description: str | None = None) -> tqdm:
    """A bar with rate and time left, on a terminal, of the process that speaks; nothing elsewhere."""
    return tqdm(
        total=total,
        initial=initial,
        unit=unit,
        desc=description,
        disable=None if _bars else True,
        dynamic_ncols=True,
        leave=False,
    )
