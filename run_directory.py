"""The directory of a run: never two runs in one, nothing removed that a run did not write."""

import logging
import shutil
from pathlib import Path

from config import Config

logger = logging.getLogger("b2txt")

# What a run and its evaluations write; overwriting removes these and nothing else.
RUN_ENTRIES = ("checkpoint", "tensorboard", "training_log")
EVALUATION_PATTERNS = ("predictions_*.csv", "evaluation_*.json", "submission_*.csv")


def check_vacant(output_dir: str | Path, resume: bool = False, overwrite: bool = False) -> None:
    """Refuse to mix two runs: a directory with something in it needs `resume` or `overwrite`.

    Raises:
        FileExistsError: saying what is there and which option to use.
    """
    output_dir = Path(output_dir)
    if output_dir.exists() and not output_dir.is_dir():
        raise FileExistsError(f"{output_dir} is a file; choose another --output_dir")
    if resume and overwrite:
        raise FileExistsError("--resume goes on with a run and --overwrite removes it: give one of them")
    found = sorted(path.name for path in output_dir.iterdir()) if output_dir.is_dir() else []
    if not found or resume:
        return
    if not overwrite:
        raise FileExistsError(
            f"{output_dir} holds an earlier run ({', '.join(found)}); go on with it by --resume, remove it by "
            "--overwrite, or choose another --output_dir"
        )
    if not set(found) & set(RUN_ENTRIES):
        raise FileExistsError(f"{output_dir} holds no earlier run ({', '.join(found)}): it is not overwritten")


def remove_run(output_dir: str | Path, checkpoint_dir: str | Path) -> None:
    """Remove what an earlier run wrote, evaluations of its checkpoints included; other files stay."""
    output_dir = Path(output_dir)
    evaluations = [path for pattern in EVALUATION_PATTERNS for path in output_dir.glob(pattern)]
    for path in [*(output_dir / name for name in RUN_ENTRIES), Path(checkpoint_dir), *evaluations]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def take_free_directory(config: Config) -> None:
    """Point config.output_dir at the next free numbered directory if it exists with something in it."""
    wanted = Path(config.output_dir)
    if not wanted.exists() or (wanted.is_dir() and not any(wanted.iterdir())):
        return
    number = 2
    while (free := wanted.with_name(f"{wanted.name}_{number}")).exists():
        number += 1
    config.output_dir = str(free)  # a checkpoint_dir inside it moves along
    logger.warning("%s exists: writing to %s", wanted, free)
