"""Emissions of a split, computed once: kept on disk trial by trial, so that an interrupted evaluation goes on.

`emissions_val.npy` is one float32 array of the log-probabilities of all trials' frames one below the other, in the
submission's order; `emissions_val.json` says of which trials, checkpoint and precision. Anything else there means
that they are computed anew.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap

from dataset_index import Trial, file_stamp
from evaluate_model_helpers import PHONEMES, write_text_atomically


class EmissionStore:
    """Log-probabilities of every trial, on disk; a frame that is not yet computed is NaN.

    Args:
        directory: of the two files.
        split: 'val' or 'test'.
        lengths: frames of each trial.
        key: whatever the emissions depend on; files with another key are replaced.
    Attributes:
        key: the same, and the lengths.
    """

    def __init__(self, directory: str | Path, split: str, lengths: Sequence[int], key: dict[str, Any]):
        self._array_path = Path(directory, f"emissions_{split}.npy")
        self._starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        key_path = self._array_path.with_suffix(".json")
        frames = hashlib.sha256(json.dumps(self._starts.tolist()).encode()).hexdigest()  # not their number alone
        self.key = {**key, "frames_sha256": frames}
        text = json.dumps(self.key, indent=2, sort_keys=True) + "\n"
        shape = (int(self._starts[-1]), len(PHONEMES))
        if not self._holds(key_path, text, shape):
            key_path.unlink(missing_ok=True)  # first, so that no kill leaves a key beside another key's emissions
            self._create(shape)
            write_text_atomically(key_path, text)
        self._array = open_memmap(self._array_path, mode="r+") if shape[0] else np.empty(shape, np.float32)

    def _holds(self, key_path: Path, text: str, shape: tuple[int, int]) -> bool:
        try:
            header = open_memmap(self._array_path, mode="r")
            return key_path.read_text() == text and header.shape == shape and header.dtype == np.float32
        except (OSError, ValueError, EOFError):
            return False

    def _create(self, shape: tuple[int, int]) -> None:
        temporary = self._array_path.with_name(f".{self._array_path.name}.{os.getpid()}.tmp")
        try:
            with open(temporary, "wb") as file:  # written, not only reserved: a full disk shows here, not later
                np.save(file, np.full(shape, np.nan, dtype=np.float32))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._array_path)
        finally:
            temporary.unlink(missing_ok=True)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        """(P, C) of a trial, float32."""
        return np.asarray(self._array[self._starts[index] : self._starts[index + 1]])

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[index] for index in range(len(self)))

    def __setitem__(self, index: int, log_probs: np.ndarray) -> None:
        rows = self._array[self._starts[index] : self._starts[index + 1]]
        if rows.shape != log_probs.shape:  # numpy would take one frame for all
            raise ValueError(f"trial {index} has emissions {rows.shape}, not {log_probs.shape}")
        rows[:-1] = log_probs[:-1]
        rows[-1:] = log_probs[-1:]  # last of all: a trial is there when its last frame is

    def missing(self) -> list[int]:
        """Trials that are still to compute."""
        return [i for i in range(len(self)) if self._starts[i] < self._starts[i + 1] and np.isnan(self[i][-1]).any()]

    def flush(self) -> None:
        """Write to the disk what was set."""
        if isinstance(self._array, np.memmap):
            self._array.flush()


def emission_key(checkpoint_path: Path, step: int, trials: Sequence[Trial], precision: str) -> dict[str, Any]:
    """What emissions depend on: the checkpoint's file, the trials' files, and the precision of the computation."""
    files = {path: list(file_stamp(path)) for path in sorted({trial.path for trial in trials})}
    listing = json.dumps([files, [(trial.path, trial.key, trial.n_time_steps) for trial in trials]])
    return {
        "checkpoint": str(checkpoint_path.resolve()),
        "checkpoint_file": list(file_stamp(checkpoint_path)),
        "step": step,
        "precision": precision,
        "n_trials": len(trials),
        "trials_sha256": hashlib.sha256(listing.encode()).hexdigest(),
    }
