"""A trace of a few optimiser steps, for TensorBoard's profile page: where a step's time goes."""

import logging
from pathlib import Path
from typing import Any

from backend import Backend

logger = logging.getLogger("b2txt")


class StepProfiler:
    """Records optimiser steps first to last, counted from 1 as the log does, in the main process.

    PyTorch's profiler on CPU and CUDA, torch_xla's on XLA. TensorBoard shows either with a plugin of its own
    (torch-tb-profiler, xprof).

    Args:
        steps: first and last step; None to record nothing.
        directory: where the trace goes.
    """

    def __init__(self, steps: tuple[int, int] | None, directory: Path, backend: Backend) -> None:
        self.first, self.last = steps if steps and backend.is_main else (0, 0)
        self.directory, self.backend = directory, backend
        self._profiler: Any = None

    def before(self, step: int) -> None:
        """To be called before step number `step`."""
        if step == self.first:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._profiler = self._start()

    def after(self, step: int) -> None:
        """To be called after step number `step`; stops with the last one."""
        if step == self.last:
            self.close()

    def close(self) -> None:
        """Write the trace, if one is being recorded."""
        if self._profiler is None:
            return
        self.backend.wait_for_device()
        self._profiler.stop()
        self._profiler = None
        logger.info("profile of steps %d to %d: tensorboard --logdir %s", self.first, self.last, self.directory)

    def _start(self) -> Any:
        self.backend.wait_for_device()
        if self.backend.kind == "xla":
            return _XlaTrace(self.directory)
        import torch.profiler

        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.backend.kind == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profiler = torch.profiler.profile(
            activities=activities, on_trace_ready=torch.profiler.tensorboard_trace_handler(str(self.directory))
        )
        profiler.start()
        return profiler


class _XlaTrace:
    def __init__(self, directory: Path) -> None:
        import torch_xla.debug.profiler as profiler

        self.stop = profiler.stop_trace
        profiler.start_trace(str(directory))
