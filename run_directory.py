"""The directory of a run: never two runs in one, nothing removed that a run did not write."""

import fcntl
import logging
import os
import shutil
import socket
from pathlib import Path
from typing import TextIO

from config import Config

logger = logging.getLogger("b2txt")

_held: dict[Path, TextIO] = {}  # lock files of this process; to close one is to give up the hold

# What a run and its evaluations write; overwriting removes these and nothing else.
LAUNCH_LOGS = "launch_logs"  # of launch_tpu_training.py, which writes there before the run begins
PROFILE = "profile"  # traces of steps
TRIALS = "train_val_trials.json"  # which are used
LOCK = ".in_use"  # held by the process that trains into the directory; it holds that process's number
EVALUATION_LOCK = ".evaluating"  # by one that evaluates into it, which a training need not hinder
_DOES = {LOCK: "trains into", EVALUATION_LOCK: "evaluates into"}
RUN_ENTRIES = ("tensorboard", "training_log", PROFILE, TRIALS, LAUNCH_LOGS)
CHECKPOINT_PATTERNS = (
    *("args.yaml", "best_checkpoint", "last_checkpoint", "*checkpoint_batch_*", ".*checkpoint.tmp"),
    "val_metrics.pkl",
)
EVALUATION_PATTERNS = (
    *("predictions_*.csv", "evaluation_*.json", "submission_*.csv", "report_*.html", "decoder_tuned.yaml"),
    *("emissions_*.npy", "emissions_*.json", "nbest_*.jsonl", "nbest_*.jsonl.part", "ngram_*.arpa"),
)


def check_vacant(
    output_dir: str | Path, resume: bool = False, overwrite: bool = False, checkpoint_dir: str | Path | None = None
) -> None:
    """Refuse to mix two runs: a directory with more in it than logs of a launch needs `resume` or `overwrite`.

    So does a checkpoint_dir elsewhere with a run's checkpoints in it; other files there are no hindrance.

    Raises:
        FileExistsError: saying what is there and which option to use.
    """
    output_dir, checkpoint_dir = Path(output_dir), Path(checkpoint_dir or Path(output_dir) / "checkpoint")
    existing = next(path for path in (output_dir, *output_dir.absolute().parents) if path.exists())
    if existing.is_dir() and not os.access(existing, os.W_OK):
        raise FileExistsError(f"{existing} cannot be written to; choose another --output_dir")
    check_not_in_use(output_dir)
    if output_dir.exists() and not output_dir.is_dir():
        raise FileExistsError(f"{output_dir} is a file; choose another --output_dir")
    if resume and overwrite:
        raise FileExistsError("--resume goes on with a run and --overwrite removes it: give one of them")
    found = _entries(output_dir)
    checkpoints = sorted(path.name for path in checkpoint_files(checkpoint_dir))
    if resume or not (found or checkpoints):
        return
    if not found and not overwrite:
        raise FileExistsError(
            f"checkpoint_dir {checkpoint_dir} holds an earlier run's files ({', '.join(checkpoints)}); go on with it "
            "by --resume, remove them by --overwrite, or choose another checkpoint_dir"
        )
    if not overwrite:
        raise FileExistsError(
            f"{output_dir} holds an earlier run ({', '.join(found)}); go on with it by --resume, remove it by "
            "--overwrite, or choose another --output_dir"
        )
    is_a_run = (output_dir / "training_log").is_file() or (output_dir / "checkpoint" / "args.yaml").is_file()
    if found and not is_a_run:
        raise FileExistsError(f"{output_dir} holds no earlier run ({', '.join(found)}): it is not overwritten")


def _entries(output_dir: Path) -> list[str]:
    """What is in it, sorted, but for the logs of a launch: those of the one that starts this run are there already."""
    if not output_dir.is_dir():
        return []
    return sorted(path.name for path in output_dir.iterdir() if path.name not in (LAUNCH_LOGS, *_DOES))


def check_not_in_use(output_dir: Path) -> None:
    """Refuse a directory into which another process trains; hold nothing.

    Raises:
        FileExistsError: naming the process.
    """
    path = Path(output_dir).resolve() / LOCK
    if path in _held or not path.exists():  # to open it a second time would give up this process's own hold
        return
    with open(path, "r+") as file:
        _lock(file)


def hold_directory(output_dir: str | Path, lock: str = LOCK) -> None:
    """Make a directory this process's own until `release_directory` or its end; the directory must be there.

    Args:
        lock: LOCK to train, EVALUATION_LOCK to evaluate.
    Raises:
        FileExistsError: naming the process that has it.
    """
    path = Path(output_dir).resolve() / lock
    if path in _held:
        return
    file = open(path, "a+")  # noqa: SIM115  closing it would give up the hold
    try:
        _lock(file)
    except FileExistsError:
        file.close()
        raise
    file.truncate(0)
    file.write(f"{os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    _held[path] = file


def release_directory(output_dir: str | Path, lock: str = LOCK) -> None:
    """Give up what `hold_directory` took, so that another process may go on with the run."""
    file = _held.pop(Path(output_dir).resolve() / lock, None)
    if file is not None:
        file.close()


def _lock(file: TextIO) -> None:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        file.seek(0)
        raise FileExistsError(
            f"{Path(file.name).parent}: process {file.read().strip()} {_DOES[Path(file.name).name]} this directory; "
            "wait for it, or choose another --output_dir"
        ) from error
    except OSError:  # a file system without locks
        logger.warning("%s: cannot be locked; see that no other run writes there", Path(file.name).parent)


def checkpoint_files(directory: str | Path) -> list[Path]:
    """What a run wrote into its checkpoint directory, which may hold other files too: it may be anywhere."""
    return [path for pattern in CHECKPOINT_PATTERNS for path in Path(directory).glob(pattern) if path.is_file()]


def remove_run(output_dir: str | Path, checkpoint_dir: str | Path) -> None:
    """Remove what an earlier run wrote, evaluations of its checkpoints included.

    Other files stay, checkpoints that a script named itself among them.
    """
    output_dir = Path(output_dir)
    checkpoints = checkpoint_files(output_dir / "checkpoint") + checkpoint_files(checkpoint_dir)
    evaluations = [path for pattern in EVALUATION_PATTERNS for path in output_dir.glob(pattern)]
    entries = set(RUN_ENTRIES)
    if "B2TXT_LAUNCHER" in os.environ:
        entries.remove(LAUNCH_LOGS)  # being written to: the launcher removed the earlier run's
    for path in [*(output_dir / name for name in entries), *checkpoints, *evaluations]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def choose_directories(config: Config, existing: str) -> tuple[str, str]:
    """Where a run writes: its output_dir and checkpoint_dir.

    Args:
        existing: 'keep' to move to a free directory; 'refuse', 'resume' or 'overwrite' as `check_vacant` says.
    Raises:
        FileExistsError: where it may not write.
    """
    if existing == "keep":
        take_free_directory(config)
    else:
        check_vacant(config.output_dir, existing == "resume", existing == "overwrite", config.checkpoint_dir)
    return str(config.output_dir), str(config.checkpoint_dir)


def take_free_directory(config: Config) -> None:
    """Point config.output_dir at the next free numbered directory if it exists with more in it than logs of a launch.

    And config.checkpoint_dir, where that lies elsewhere and holds a run's checkpoints.
    """
    wanted = Path(config.output_dir)
    if wanted.exists() and not (wanted.is_dir() and not _entries(wanted)):
        config.output_dir = _free_directory(wanted)  # a checkpoint_dir inside it moves along
    if checkpoint_files(config.checkpoint_dir):
        config.checkpoint_dir = _free_directory(Path(config.checkpoint_dir))


def _free_directory(wanted: Path) -> str:
    number = 2
    while (free := wanted.with_name(f"{wanted.name}_{number}")).exists():
        number += 1
    logger.warning("%s exists: writing to %s", wanted, free)
    return str(free)
