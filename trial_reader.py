"""Reads trials' features from their files into the arrays of batches, as fast as memory takes them.

HDF5 stores a dataset that is neither chunked nor compressed as one run of bytes. The index knows where it begins, so
that a trial is one read of the file into its place in the batch, by several threads at once. Anything else is read by
h5py, and so is a file that has changed since it was indexed. benchmarks/bench_loading.py measures what that gains.
"""

import contextlib
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import h5py
import numpy as np
import torch

from dataset_index import READ_ERRORS, DataError, Trial, file_stamp

MAX_OPEN_FILES = 64  # a process; the real set has 45 sessions
READING_THREADS = min(4, os.cpu_count() or 1)
BUFFERS_KEPT = 2  # of batches that are no longer used, a process


class _OpenFile:
    """A file, open for reading bytes; for h5py too once that is asked for."""

    def __init__(self, path: str):
        self.path, self._hdf5 = path, None
        self.descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)

    @property
    def hdf5(self) -> h5py.File:
        if self._hdf5 is None:
            self._hdf5 = h5py.File(self.path, "r")
        return self._hdf5

    def close(self) -> None:
        """Of h5py's; the descriptor is closed when nobody holds this any more."""
        if self._hdf5 is not None:
            self._hdf5.close()

    def holds_bytes_of(self, trial: Trial) -> bool:
        """Whether the index knows where in this file the trial's features are."""
        return trial.offset is not None and hasattr(os, "preadv") and file_stamp(self.descriptor) == trial.file_stamp


class TrialReader:
    """Reads trials; a file is opened when first needed, in the process that needs it, and a bounded number is kept.

    Open files and threads can neither be pickled nor be shared with a forked process: they are left out of the pickled
    state, and those that a process finds from its parent are not used.
    """

    def __init__(self, config):
        self.neural_dim = config.dataset.neural_dim
        subset = config.dataset.feature_subset
        self.feature_subset = None if subset is None else np.array(subset)
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._files: OrderedDict[str, _OpenFile] = OrderedDict()
        self._threads: ThreadPoolExecutor | None = None
        self._hdf5_lock = threading.Lock()
        self._process = os.getpid()

    def __getstate__(self) -> dict:
        return {"neural_dim": self.neural_dim, "feature_subset": self.feature_subset}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._start_afresh()

    def read_batch(self, trials: Sequence[Trial], shape: tuple[int, int, int], longest: int) -> torch.Tensor:
        """The features of trials in the first rows of a tensor (B, T, F), zero elsewhere.

        Its memory is used again for another batch when no tensor refers to it any more.

        Args:
            trials: B or fewer.
            shape: (B, T, F).
            longest: the largest T that will be asked for.
        Raises:
            DataError: if a trial cannot be read, or is not what it was when it was indexed.
        """
        out = _array(shape, room=shape[0] * longest * shape[2])
        out[len(trials) :] = 0
        self._open_files(trials)
        jobs = [(row, trial, self._files[trial.path]) for row, trial in enumerate(trials)]
        part = -(-len(trials) // READING_THREADS)
        parts = [jobs[start : start + part] for start in range(0, len(trials), part or 1)]
        if len(parts) > 1:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(READING_THREADS, thread_name_prefix="trial-reader")
            list(self._threads.map(lambda jobs: self._fill(out, jobs), parts))
        else:
            self._fill(out, jobs)
        self._close_files_beyond_the_bound()
        return torch.from_numpy(out)

    def _fill(self, out: np.ndarray, jobs: Sequence[tuple[int, Trial, _OpenFile]]) -> None:
        for row, trial, file in jobs:
            self._read(out[row, : trial.n_time_steps], trial, file)
            out[row, trial.n_time_steps :] = 0

    def read_into(self, out: np.ndarray, trial: Trial) -> None:
        """Fill out (n_time_steps, F) with the features of a trial; DataError as in `read_batch`."""
        self._open_files([trial])
        self._read(out, trial, self._files[trial.path])
        self._close_files_beyond_the_bound()

    def expect(self, trials: Sequence[Trial]) -> None:
        """Ask the system to read these trials from the disk meanwhile; they will be asked for next."""
        if hasattr(os, "posix_fadvise"):
            try:
                self._open_files(trials)
                n_bytes = 4 * self.neural_dim
                for trial in trials:
                    if trial.offset is not None:
                        descriptor = self._files[trial.path].descriptor
                        os.posix_fadvise(descriptor, trial.offset, n_bytes * trial.n_time_steps, os.POSIX_FADV_WILLNEED)
            except (OSError, DataError):
                pass  # whoever reads the trials will say what is wrong
            self._close_files_beyond_the_bound()

    def _read(self, out: np.ndarray, trial: Trial, file: _OpenFile) -> None:
        try:
            if file.holds_bytes_of(trial):
                whole = out if self.feature_subset is None else np.empty((len(out), self.neural_dim), np.float32)
                _read_bytes(file.descriptor, whole, trial.offset)
                if whole is not out:
                    np.take(whole, self.feature_subset, axis=1, out=out)
            else:
                with self._hdf5_lock:
                    self._read_by_h5py(out, trial, file.hdf5)
        except READ_ERRORS as error:
            raise self._unreadable(trial, error) from error

    def _read_by_h5py(self, out: np.ndarray, trial: Trial, file: h5py.File) -> None:
        data = file[trial.key]["input_features"]
        expected = (trial.n_time_steps, self.neural_dim)
        if data.shape != expected:
            raise ValueError(f"input_features is {data.shape}, and was {expected} at the start")
        if self.feature_subset is not None:
            out[:] = data[()][:, self.feature_subset]
        elif data.size:
            data.read_direct(out)

    def _unreadable(self, trial: Trial, error: Exception) -> DataError:
        file = self._files.pop(trial.path, None)
        if file is not None:
            file.close()
        return DataError(
            f"{trial}: cannot be read any more ({' '.join(str(error).split())}). Was the file changed or moved "
            "since the start? Put it right and go on with --resume"
        )

    def _open_files(self, trials: Sequence[Trial]) -> None:
        if self._process != os.getpid():
            self._start_afresh()
        for trial in trials:
            if trial.path in self._files:
                self._files.move_to_end(trial.path)
                continue
            try:
                self._files[trial.path] = _OpenFile(trial.path)
            except OSError as error:
                raise self._unreadable(trial, error) from error

    def _close_files_beyond_the_bound(self) -> None:
        while len(self._files) > MAX_OPEN_FILES:
            self._files.popitem(last=False)[1].close()


def _read_bytes(descriptor: int, out: np.ndarray, offset: int) -> None:
    """Fill the array from the file's bytes at `offset`."""
    left = memoryview(out).cast("B") if out.size else b""
    while len(left):
        n_read = os.preadv(descriptor, [left], offset)
        if n_read == 0:
            raise OSError("the file ends before the trial does")
        left, offset = left[n_read:], offset + n_read


_unused: list[np.ndarray] = []  # flat float32 arrays, of this process; whichever thread drops a batch appends to it


def _array(shape: tuple[int, ...], room: int) -> np.ndarray:
    """A float32 array with whatever the memory holds, in memory for `room` numbers (which takes none until used).

    Memory that is new to a process is filled with zeros by the system, page by page, which takes several times as long
    as reading into memory that it has used before.
    """
    size, kept = int(np.prod(shape)), []
    with contextlib.suppress(IndexError):  # whoever else takes one meanwhile
        while True:
            kept.append(_unused.pop())
    kept.sort(key=len)
    fitting = next((number for number, flat in enumerate(kept) if flat.size >= size), None)
    flat = np.empty(max(size, room), np.float32) if fitting is None else kept.pop(fitting)
    _unused.extend(kept[-BUFFERS_KEPT:])  # the largest stay: they serve every batch
    array = flat[:size].reshape(shape)
    weakref.finalize(array, _unused.append, flat).atexit = False
    return array
