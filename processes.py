"""The processes that share a run: who is the first, sums over all, waiting, and stopping together.

Each process works on its own part of every batch and calls everything here at the same point of the program: a
process that does not would leave the others waiting. So whatever only one of them can know (a directory that is
taken, a file that cannot be written) is asked by one and answered to all, errors included.
"""

import json
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")

MESSAGE_BYTES = 1 << 16  # of one answer: constant, so that on XLA there is one program for all


class OtherProcessFailed(RuntimeError):
    """Another process failed and has said why; this one has nothing to add."""


class Processes:
    """The processes of an Accelerator, one of which is this one.

    Args:
        accelerator: started, with its processes connected.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self.rank, self.count = accelerator.process_index, accelerator.num_processes
        self.local_rank = int(os.environ.get("LOCAL_RANK", max(0, accelerator.local_process_index)))
        self.is_main = accelerator.is_main_process

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise sum over the processes, of tensors on the host that have the same shape everywhere.

        On XLA, where each shape costs a compilation, float64 is summed as float32.
        """
        if self.count == 1:
            return values
        device = self._accelerator.device
        if device.type != "xla":
            return self._accelerator.reduce(values.to(device), reduction="sum").cpu()
        import torch_xla
        import torch_xla.core.xla_model as xm

        given = values.float() if values.dtype == torch.float64 else values
        total = xm.all_reduce(xm.REDUCE_SUM, given.to(device))
        torch_xla.sync()
        return total.cpu().to(values.dtype)

    def together(self, function: Callable[[], T] | None) -> T | None:
        """Run function() where there is one; goes on only when it succeeded in every process that had one.

        Raises:
            OtherProcessFailed: where another process failed; the one that failed raises its own error.
        """
        error = result = None
        try:
            result = function() if function else None
        except Exception as found:
            error = found
        failures = self.sum(torch.tensor([int(error is not None)]))
        if error is not None:
            raise error
        if failures.item():
            raise OtherProcessFailed(f"process {self.rank}: stopped, since another process could not go on")
        return result

    def on_main(self, function: Callable[[], T]) -> T:
        """The result of function() in the main process, in all of them: what JSON can hold, at most 64 KiB.

        Raises:
            OtherProcessFailed: where it raised an error in the main process, which raises that itself.
            ValueError: in the main process, if the result is larger.
        """
        if self.count == 1:
            return function()

        def answer() -> bytes:
            text = json.dumps(function()).encode()
            if len(text) > MESSAGE_BYTES:
                raise ValueError(f"an answer of {len(text)} bytes, and at most {MESSAGE_BYTES} are handed on")
            return text

        text = self.together(answer if self.is_main else None)
        message = torch.zeros(MESSAGE_BYTES, dtype=torch.int32)
        if self.is_main:
            message[: len(text)] = torch.tensor(list(text), dtype=torch.int32)
        return json.loads(bytes(self.sum(message).tolist()).rstrip(b"\0"))

    def local_main_first(self, function: Callable[[], T]) -> T:
        """function() in every process, in the first of each host before the others: they find its caches."""
        first = self.together(function if self.local_rank == 0 else None)
        rest = self.together(function if self.local_rank != 0 else None)
        return first if self.local_rank == 0 else rest

    def check_settings(self, settings: dict[str, Any]) -> None:
        """Refuse to share a run with processes that were given other settings.

        Raises:
            ValueError: naming the settings, theirs and the main process's.
            OtherProcessFailed: where another process has other settings.
        """
        of_main = self.on_main(lambda: settings)

        def compare() -> None:
            here = json.loads(json.dumps(settings))
            differing = [key for key in here if here[key] != of_main.get(key)]
            if differing:
                lines = [f"  {key}: {here[key]} here, {of_main.get(key)} in process 0" for key in differing]
                raise ValueError("\n".join(["the processes were started with different settings:", *lines]))

        self.together(compare)

    def assert_equal(self, values: torch.Tensor, names: list[str], what: str) -> None:
        """Check that float32 values (n,) are the same everywhere.

        Raises:
            RuntimeError: naming those that are not, and the processes.
        """
        table = torch.zeros(self.count, len(values))
        table[self.rank] = values
        table = self.sum(table)
        differing = (table != table[0]).any(0)
        if differing.any():
            found = [name for name, differs in zip(names, differing.tolist(), strict=True) if differs]
            ranks = (table != table[0]).any(1).nonzero().flatten().tolist()
            raise RuntimeError(
                f"{what} differ between process 0 and process(es) {ranks}: {', '.join(found[:5])}"
                f"{f' and {len(found) - 5} more' if len(found) > 5 else ''}"
            )
