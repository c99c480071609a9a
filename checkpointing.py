"""Checkpoint files: written so that a kill or a full disk never costs the one before, and found again.

A run's directory holds `checkpoint/best_checkpoint`, `checkpoint/last_checkpoint`, `checkpoint/args.yaml` and
others by name. A file is a dict of tensors and plain Python values, read with `weights_only=True`.
"""

import contextlib
import logging
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from config import Config
from original_format import OriginalFormatError, is_original, read_original

logger = logging.getLogger("b2txt")

NOT_OURS = "not a PyTorch checkpoint of this project or of the original decoder"
# The original's files hold their val_PER as such; they are numbers, and run no code.
NUMPY_SCALARS = [
    *((np._core.multiarray.scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    *(np.dtype, *{type(np.dtype(kind)) for kind in "?bBhHiIlLqQefd"}),
]
LISTED = 8  # differences that a message names
ADAM_COPIES = 3  # a parameter and its two moments
FIXED = ("adversarial.enabled", "dataset.feature_subset")  # with the model, what a resumed run cannot change


class CheckpointError(ValueError):
    """A checkpoint that is missing, unreadable, or does not fit; or a disk too small for one."""


def save_checkpoint(state: dict[str, Any], path: Path) -> None:
    """Write `state` to a temporary file, flush it to the disk, and rename it to `path`.

    Raises:
        CheckpointError: if it cannot be written; what stood at `path` is still there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(path) as file:
            torch.save(_on_cpu(state), file)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: not written ({error}); an earlier file of that name is untouched") from error


def _on_cpu(value: Any) -> Any:
    """The same with every tensor on the CPU, so that any machine can read it."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    return type(value)(map(_on_cpu, value)) if isinstance(value, list | tuple) else value


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A temporary file to write to; flushed to the disk and renamed to `path` when all is written, else removed."""
    temporary = _temporary(path)
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _flush_directory(path.parent)
    except (Exception, KeyboardInterrupt):
        temporary.unlink(missing_ok=True)
        raise


def copy_checkpoint(source: Path, path: Path) -> None:
    """Give a written checkpoint a second name, at no cost in space where the file system has hard links."""
    temporary = _temporary(path)
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:
        shutil.copyfile(source, temporary)
    os.replace(temporary, path)
    _flush_directory(path.parent)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.checkpoint.tmp")


def _flush_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_checkpoint(
    path: Path,
    map_location: str | torch.device = "cpu",
    trust: bool = False,
    original_settings: str | Path | None = None,
) -> dict[str, Any]:
    """Read a checkpoint of this project or of the original decoder, on the CPU unless told otherwise.

    Args:
        trust: read a file that holds other objects than tensors and plain values too, which runs code in it.
        original_settings: a YAML file for a checkpoint of the original decoder without an args.yaml beside it.
    Raises:
        CheckpointError: naming the file and what is wrong with it.
        ConfigError: the settings beside a checkpoint of the original decoder cannot be used.
    """
    try:
        with torch.serialization.safe_globals(NUMPY_SCALARS):
            state = torch.load(
                path,
                map_location=map_location,
                weights_only=not trust,
                mmap=map_location == "cpu" and zipfile.is_zipfile(path),
            )
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such checkpoint") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    except Exception as error:  # a file of any kind can raise anything, and what torch says of it misleads
        foreign = re.search(r"(?i)unsupported (?:global: )?global (\S+)", str(error))
        if foreign and isinstance(error, pickle.UnpicklingError):
            raise CheckpointError(
                f"{path}: it holds more than tensors and plain values ({foreign[1]}), and to read such a file runs "
                "code in it; where you trust its source, convert_checkpoint.py --trust_checkpoint makes a plain one of "
                "it, and evaluate_model.py --trust_checkpoint reads it as it is"
            ) from error
        raise CheckpointError(f"{path}: {NOT_OURS}, or a damaged one") from error
    if isinstance(state, dict) and is_original(state.get("model_state_dict")):
        try:
            return read_original(state, path, original_settings)
        except OriginalFormatError as error:
            raise CheckpointError(str(error)) from error
    keys = set(state) if isinstance(state, dict) else set()
    missing = {"model_state_dict", "config", "preprocessing", "sessions", "step"} - keys
    if missing:
        raise CheckpointError(f"{path}: {NOT_OURS} (no {', '.join(sorted(missing))})")
    return state


def check_parameters(model: torch.nn.Module, parameters: Mapping[str, torch.Tensor], path: Path) -> None:
    """Refuse parameters other than the model's own: to take those that fit would give a decoder that decodes nothing.

    Raises:
        CheckpointError: listing what is missing, unknown, of another shape, or not finite.
    """
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in parameters.items()}
    lines = [f"{name}: missing" for name in expected if name not in found]
    lines += [f"{name}: no parameter of the model" for name in found if name not in expected]
    lines += [
        f"{name}: {found[name]} in the file, {shape} in the model"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    lines += [
        f"{name}: holds NaN or infinity, as after training that diverged"
        for name, value in parameters.items()
        if value.is_floating_point() and not value.is_meta and not torch.isfinite(value).all()
    ]
    if lines:
        more = [f"and {len(lines) - LISTED} more"] if len(lines) > LISTED else []
        raise CheckpointError("\n  - ".join([f"{path}: its parameters are not the model's:", *lines[:LISTED], *more]))


def find_checkpoint(model_path: str | Path) -> tuple[Path, Path]:
    """The checkpoint file and the run's directory that `model_path` means.

    Args:
        model_path: a run's directory, its checkpoint directory, or a checkpoint file.
    Returns:
        the file (best_checkpoint, or last_checkpoint where no best one was written), and the run's directory.
    """
    path = Path(model_path).resolve()
    if path.is_file():
        return path, path.parent.parent if path.parent.name == "checkpoint" else path.parent
    for directory in (path / "checkpoint", path):
        for name in ("best_checkpoint", "last_checkpoint"):
            if (directory / name).is_file():
                run = directory.parent if directory.name == "checkpoint" else directory
                return directory / name, run
    raise CheckpointError(
        f"{path}: no checkpoint there (looked for best_checkpoint and last_checkpoint, in it and in its "
        "checkpoint folder); train first, or name another"
    )


def latest_checkpoint(directory: Path) -> Path | None:
    """The checkpoint that is furthest on, to resume from; None where there is none.

    One that cannot be read, as after a fault of the disk, is passed over with a warning: a good one may lie beside it.

    Raises:
        CheckpointError: if there are some and none can be read.
    """
    candidates = [directory / "last_checkpoint", *directory.glob("*checkpoint_batch_*"), directory / "best_checkpoint"]
    steps, unreadable = {}, []
    for path in candidates:
        if path.is_file() and path.suffix != ".tmp":  # not a half-written one
            try:
                steps[path] = load_checkpoint(path)["step"]
            except CheckpointError as error:
                unreadable.append(str(error))
    if unreadable and not steps:
        raise CheckpointError(
            "\n  - ".join([f"No checkpoint in {directory} can be read:", *unreadable])
            + "\nPut an intact copy in the place of one of them, or begin anew with --overwrite or another --output_dir"
        )
    for reason in unreadable:
        logger.warning("%s; passed over", reason)
    return max(steps, key=steps.get, default=None)


def remove_temporary_files(directory: Path) -> None:
    """Remove what a killed process was writing."""
    for path in directory.glob(".*checkpoint.tmp"):
        path.unlink()


def check_disk(model: torch.nn.Module, config: Any) -> None:
    """Refuse a run whose checkpoints would not fit on the disk.

    Raises:
        CheckpointError: with the space needed and free, and the settings that need less.
    """
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    fixed = sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)
    size = trained * ADAM_COPIES + fixed
    files = 2 + config.save_best_checkpoint + config.save_final_model  # last, and the one being written
    if config.save_all_val_steps:
        files += config.num_training_batches // config.batches_per_val_step
    if config.batches_per_save:
        files += config.num_training_batches // config.batches_per_save
    directory = Path(config.checkpoint_dir)
    standing = sum(path.stat().st_size for path in directory.glob("*checkpoint*")) if directory.is_dir() else 0
    while not directory.exists():
        directory = directory.parent
    free = shutil.disk_usage(directory).free + standing
    if files * size > free:
        raise CheckpointError(
            f"{config.checkpoint_dir}: {files} checkpoints of {size / 1e9:.2f} GB need {files * size / 1e9:.1f} GB, "
            f"and {free / 1e9:.1f} GB are free; choose another output_dir, or save less "
            "(batches_per_save, save_all_val_steps, save_final_model)"
        )


def check_same_run(saved: dict[str, Any], given: dict[str, Any], path: Path) -> None:
    """Refuse to resume with another model or other sessions; name the settings that changed otherwise."""
    # A key that is younger than the checkpoint had the effect of its default.
    saved, given = flat_settings(Config().to_dict()) | flat_settings(saved), flat_settings(given)
    changed = [key for key in given if saved.get(key) != given[key] and not key.endswith(("_dir", "sessions"))]
    fatal = [k for k in changed if k in FIXED or (k.startswith("model.") and not k.endswith("dropout"))]
    if saved.get("dataset.sessions") != given["dataset.sessions"]:
        fatal.append("dataset.sessions")
    if fatal:
        lines = [f"  {key}: {saved.get(key)} in the checkpoint, {given[key]} now" for key in fatal]
        raise CheckpointError("\n".join([f"{path} cannot be resumed with this configuration:", *lines]))
    for key in changed:
        logger.warning("resuming with another %s: %s before, %s now", key, saved.get(key), given[key])


def flat_settings(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one level of dotted names; lists as text, since trackers take only plain values."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= flat_settings(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, int | float | str) else str(value)
    return flat
