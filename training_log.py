"""What a person watches while a run goes on: log lines in the terminal and in a file, and a progress bar."""

import logging
import sys
from pathlib import Path

from tqdm import tqdm

logger = logging.getLogger("b2txt")


class _TerminalHandler(logging.Handler):
    """Prints log lines above a progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


def log_to_terminal(is_main: bool = True) -> None:
    """Show the project's log lines: all of them on the main process, warnings on the others. May be called again."""
    for handler in [h for h in logger.handlers if isinstance(h, _TerminalHandler)]:
        logger.removeHandler(handler)
    handler = _TerminalHandler(logging.INFO if is_main else logging.WARNING)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def log_to_file(path: Path) -> None:
    """Add the log lines to a file too, with the time, and to no other file from now on."""
    for handler in [h for h in logger.handlers if isinstance(h, logging.FileHandler)]:
        logger.removeHandler(handler)
        handler.close()
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S"))
    logger.addHandler(handler)


def progress_bar(total: int, initial: int = 0, unit: str = "batch", description: str | None = None) -> tqdm:
    """A bar with rate and time left, on a terminal; nothing elsewhere."""
    return tqdm(
        total=total,
        initial=initial,
        unit=unit,
        desc=description,
        disable=None,
        dynamic_ncols=True,
        leave=False,
    )
