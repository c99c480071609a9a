"""The one module that knows Accelerate's and torch_xla's runtime: device, processes, precision, seeds, reductions.

Accelerate is imported when a backend is made, not before: where torch_xla is installed, importing it otherwise
puts everything behind XLA, on a machine without a TPU as well. Accelerate's loaders, gradient accumulation,
schedulers and save_state are not used: on XLA each of them is wrong or missing for this job.
"""

import contextlib
import logging
import os
import sys
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from processes import Processes
from tpu_host import GOOGLE_PCI_VENDOR, find_chips

logger = logging.getLogger("b2txt")

DEVICES = ("cpu", "cuda", "xla")
LENGTHS = ("n_time_steps", "label_lengths")  # of a batch
LONGEST_WAIT = timedelta(minutes=30)  # of processes for each other: the first of a host reads all of the data


class BackendError(ValueError):
    """A device or tracker that was asked for and is not there."""


def tpu_attached() -> bool:
    """Whether this machine has a TPU that torch_xla can use; starts no runtime."""
    return find_spec("torch_xla") is not None and bool(find_chips()[0])


def choose_device(requested: str | None = None, use_tpu: bool = True) -> tuple[str, str]:
    """The kind of device to run on, and why: a TPU if there is one, else CUDA, else the CPU.

    Args:
        use_tpu: False to pass over a TPU unless it is asked for.
        requested: 'cpu', 'cuda' or 'xla'; None to choose. XLA on a CPU is never chosen, only asked for: here, or by
            PJRT_DEVICE=CPU where an XLA launcher (accelerate launch) started this process.
    Returns:
        'cpu', 'cuda' or 'xla', and a sentence for the log.
    Raises:
        BackendError: naming what was asked for and what is missing.
    """
    if requested is not None:
        if requested not in DEVICES:
            raise BackendError(f"device {requested!r} is not one of {', '.join(DEVICES)}")
        if requested == "cuda" and not torch.cuda.is_available():
            raise BackendError("device cuda was asked for, and PyTorch sees no CUDA GPU; use --device cpu")
        if requested == "xla" and find_spec("torch_xla") is None:
            raise BackendError("device xla was asked for, and torch_xla is not installed; ./setup_env.sh installs it")
        return requested, "as asked for"
    if started_by_xla_launcher():
        _check_that_xla_was_meant()
        return "xla", "started by an XLA launcher"
    no_tpu = "no TPU is attached"
    if tpu_attached():
        if use_tpu:
            return "xla", "a TPU is attached"
        no_tpu = "the TPU is passed over, since use_tpu is false"
    if torch.cuda.is_available():
        return "cuda", f"a CUDA GPU is there; {no_tpu}"
    return "cpu", f"{no_tpu}, and there is no CUDA GPU"


def started_by_xla_launcher() -> bool:
    """Whether torch_xla's spawn, which `accelerate launch` uses for XLA, started this process."""
    return "PJRT_LOCAL_PROCESS_COUNT" in os.environ


def _check_that_xla_was_meant() -> None:
    """Refuse XLA on a CPU where nobody asked for it: torch_xla sets PJRT_DEVICE by itself where it is missing.

    Raises:
        BackendError: with what was looked for and how to rehearse.
    """
    if tpu_attached():
        return
    try:  # what the launcher was started with, before torch_xla added to it
        given = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return
    if not any(entry.startswith(b"PJRT_DEVICE=") for entry in given):
        raise BackendError(
            "the launcher started this process for a TPU; looked for one among the PCI devices (vendor "
            f"{GOOGLE_PCI_VENDOR}) and found none. To rehearse on this machine's processor: PJRT_DEVICE=CPU accelerate "
            "launch ... with the same options; to train here without XLA: python train_model.py"
        )


class Backend:
    """A device, the processes that share the work, and the precision.

    Args:
        device: 'cpu', 'cuda', 'xla' or None to choose.
        use_amp: bf16 matmuls where the device has them; float32 with a warning elsewhere.
        gpu_number: which GPU, where one process runs on CUDA; a number that is not there means the first.
        log_with: name of an Accelerate tracker, or 'none'.
        use_tpu: False to pass over a TPU unless it is asked for.
    """

    _ran_backward = False  # in this process, on any device

    def __init__(
        self,
        device: str | None = None,
        use_amp: bool = False,
        gpu_number: int | str = 0,
        log_with: str = "none",
        use_tpu: bool = True,
    ) -> None:
        self.kind, reason = choose_device(device, use_tpu)
        if self.kind == "xla" and Backend._ran_backward and "torch_xla" not in sys.modules:
            raise BackendError(
                "this process has trained on another device before torch_xla was imported, after which torch_xla "
                "crashes in every backward pass; train on XLA in a new process, or import torch_xla first"
            )
        if self.kind == "cuda" and "LOCAL_RANK" not in os.environ:
            torch.cuda.set_device(self._gpu_index(gpu_number))
        if os.environ.get("ACCELERATE_USE_CPU") == "True" and "MASTER_PORT" in os.environ and "RANK" not in os.environ:
            logger.warning(
                "accelerate launch --cpu started one process only, whatever --num_processes says; for N of them: "
                "torchrun --nproc_per_node N train_model.py --device cpu"
            )
        self.accelerator = _make_accelerator(self.kind, log_with)
        self.device = self.accelerator.device
        self.processes = Processes(self.accelerator)
        self.rank, self.world_size = self.processes.rank, self.processes.count
        self.is_main = self.processes.is_main
        self.amp = use_amp and self._has_bf16()
        self.watch = XlaWatch() if self.kind == "xla" else None
        self.description = f"device {self.device} ({reason}), {'bf16 matmuls' if self.amp else 'float32'}"

    def _gpu_index(self, gpu_number: int | str) -> int:
        index, count = int(gpu_number), torch.cuda.device_count()
        if index < count:
            return index
        logger.warning("gpu_number %s is not there: this machine has %d GPU(s); taking number 0", index, count)
        return 0

    def _has_bf16(self) -> bool:
        if self.kind == "xla" or (self.kind == "cuda" and torch.cuda.is_bf16_supported()):
            return True
        logger.warning("use_amp is true, but on this %s the work is done in float32", self.kind.upper())
        return False

    def autocast(self) -> contextlib.AbstractContextManager:
        """bf16 inside matmuls where that was asked for and is there; parameters stay float32."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.amp)

    def prepare(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """The model wrapped for the processes there are, and the optimiser that goes with it.

        Every process then has the parameters of the main one.
        """
        if self.kind == "xla":  # gradients are exchanged in `clip_gradients`, once an optimiser step
            if self.processes.count > 1:
                import torch_xla.core.xla_model as xm

                xm.broadcast_master_param(model)
            return model, optimizer
        return self.accelerator.prepare(model, optimizer)

    def gradients_stay_local(self, model: torch.nn.Module, local: bool) -> contextlib.AbstractContextManager:
        """While `local`, gradients are accumulated without being exchanged between the processes."""
        return self.accelerator.no_sync(model) if local else contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of `loss`, a mean over this process's trials."""
        Backend._ran_backward = True
        self.accelerator.backward(loss)

    def clip_gradients(self, parameters: list[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
        """Scale the gradients down to a total norm of max_norm (0: leave them); returns the norm before.

        On XLA the gradients are averaged over the processes first.
        """
        if self.kind != "xla":
            return self.accelerator.clip_grad_norm_(parameters, max_norm or float("inf"))
        import torch_xla.core.xla_model as xm

        gradients = [p.grad for p in parameters if p.grad is not None]
        if self.world_size > 1:
            xm.all_reduce(xm.REDUCE_SUM, gradients, scale=1 / self.world_size)
        norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        if max_norm:
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # torch's own, without its wait for the device
            for gradient in gradients:
                gradient.mul_(factor.to(gradient.dtype))
        return norm

    def seed(self, *entropy: int) -> None:
        """Seed every device's random numbers from a tuple of integers, the rank included by the caller.

        Called before each micro-step, so that dropout is a function of (seed, step) and a resumed run draws what
        the uninterrupted one would have drawn.
        """
        torch.manual_seed(self.fold_seed(*entropy))
        if self.kind == "xla":
            import torch_xla

            torch_xla.manual_seed(self.fold_seed(*entropy) & 0x7FFFFFFF)

    @staticmethod
    def fold_seed(*entropy: int) -> int:
        """One seed of 63 bits from several integers."""
        return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)

    def generator(self, *entropy: int) -> torch.Generator | None:
        """A generator on the device; None on XLA, where a generator would fall back to the host."""
        if self.kind == "xla":
            self.seed(*entropy)
            return None
        return torch.Generator(self.device).manual_seed(self.fold_seed(*entropy))

    def to_device(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The batch on the device; on CUDA the copy of pinned memory overlaps with computing.

        There the lengths stay on the host, where CTC wants them: it would wait for the device to have them.
        """
        on_host = LENGTHS if self.kind == "cuda" else ()
        return {
            name: tensor if name in on_host else tensor.to(self.device, non_blocking=True)
            for name, tensor in batch.items()
        }

    def scalar(self, value: float) -> torch.Tensor:
        """(1,) float32 on the device, for a number that changes from step to step.

        XLA compiles a Python number that is exactly 0 or 1 into the program, and so would compile it anew.
        """
        if self.kind == "cuda":  # a copy from the host would wait for all that is still running
            return torch.full((1,), value, dtype=torch.float32, device=self.device)
        return torch.tensor([value], dtype=torch.float32).to(self.device)

    def end_program(self, name: str, batch: dict[str, torch.Tensor] | None = None) -> None:
        """On XLA: run what was asked for since the last call, as one program; elsewhere it ran already.

        Args:
            name: of the program, in words: 'training step'.
            batch: whose shapes the program depends on. A second compilation for the same shapes is warned of.
        """
        if self.watch is not None:
            self.watch.end_program(name, None if batch is None else tuple(batch["features"].shape))

    def wait_for_device(self) -> None:
        """Until all that was asked of the device is done."""
        if self.kind == "cuda":
            torch.cuda.synchronize()
        elif self.kind == "xla":
            import torch_xla.core.xla_model as xm

            xm.wait_device_ops()

    def program_counts(self) -> dict[str, float]:
        """On XLA what `XlaWatch` counts, under names for the trackers; nothing elsewhere."""
        return {f"xla/{name}": count for name, count in self.watch.counts().items()} if self.watch else {}

    def build(self, make_model: Callable[[], torch.nn.Module]) -> torch.nn.Module:
        """The model on this device, with weights in the main process only: `prepare` gives them to the others.

        Orthogonal weights of 7,168 units take a processor a minute, and a host would hold them once a process.
        """
        if self.is_main:
            return make_model().to(self.device)
        with torch.device("meta"):
            model = make_model()
        return model.to_empty(device=self.device)

    def check_parameters(self, model: torch.nn.Module) -> str:
        """A checksum of the parameters, 8 hexadecimal digits, after comparing them over the processes.

        Raises:
            RuntimeError: naming the parameters that are not the same everywhere.
        """
        names, parameters = zip(*model.named_parameters(), strict=True)
        with torch.no_grad():
            sums = torch.stack([parameter.float().sum() for parameter in parameters]).cpu()
        self.processes.assert_equal(sums, list(names), "parameters")
        return f"{zlib.crc32(sums.numpy().tobytes()):08x}"

    def log(self, values: dict[str, float], step: int) -> None:
        """Numbers to the trackers."""
        self.accelerator.log(values, step=step)

    def log_image(self, name: str, image: np.ndarray, step: int) -> None:
        """A picture (height, width, 3) of uint8 to the trackers that show pictures."""
        for tracker in self.accelerator.trackers:
            if tracker.name == "tensorboard":
                tracker.log_images({name: image[None]}, step=step, dataformats="NHWC")
            elif hasattr(tracker, "log_images"):
                tracker.log_images({name: [image]}, step=step)

    @property
    def shows_images(self) -> bool:
        """Whether a tracker takes pictures."""
        return any(hasattr(tracker, "log_images") for tracker in self.accelerator.trackers)

    def start_trackers(self, settings: dict[str, Any], first_step: int, directory: Path) -> None:
        """Begin to log into `directory`, after `first_step`: what an interrupted run logged beyond it is hidden."""
        from accelerate.utils import ProjectConfiguration

        self.accelerator.project_configuration = ProjectConfiguration(str(directory), str(directory))
        options = {"tensorboard": {"purge_step": first_step + 1}} if first_step else {}
        self.accelerator.init_trackers("tensorboard", config=settings, init_kwargs=options)

    def finish(self) -> None:
        """Flush the trackers, and part from the other processes once all are here: one that left would end them."""
        self.processes.together(None)
        self.accelerator.end_training()


class XlaWatch:
    """Counts what makes an XLA step slow, and says in words when a program is compiled that should not be.

    A training step is one program a length to which trials are padded. Its first use compiles it, for minutes on a
    TPU; a later compilation means that a shape or a constant changed without need.
    """

    def __init__(self) -> None:
        import torch_xla
        import torch_xla.debug.metrics as metrics

        self._sync, self._metrics = torch_xla.sync, metrics
        self._known: set[tuple[str, tuple[int, ...] | None]] = set()

    def counts(self) -> dict[str, int]:
        """Since the process began: programs compiled and run, transfers from the device, operations on the host."""
        counter, metric = self._metrics.counter_value, self._metrics.metric_data
        fallbacks = [name for name in self._metrics.counter_names() if name.startswith("aten::")]
        return {
            "compilations": counter("UncachedCompile") or 0,
            "executions": (metric("ExecuteTime") or [0])[0],
            "transfers_from_device": (metric("TransferFromDeviceTime") or [0])[0],
            "host_fallbacks": sum(counter(name) for name in fallbacks),
        }

    def end_program(self, name: str, shape: tuple[int, ...] | None) -> None:
        """Run what is pending as the program `name` for features (B, T, F) of `shape`."""
        before, start = self._metrics.counter_value("UncachedCompile") or 0, time.perf_counter()
        self._sync()
        compiled = (self._metrics.counter_value("UncachedCompile") or 0) - before
        of_shape = "" if shape is None else f" for {shape[0]} trials of {shape[1]} bins"
        if compiled and (name, shape) in self._known:
            logger.warning(
                "the %s%s was compiled again, which takes time and should not be: something in it changed its shape "
                "or became a constant",
                name, of_shape,
            )  # fmt: skip
        elif compiled and shape is not None:
            logger.info("compiled the %s%s in %.1f s", name, of_shape, time.perf_counter() - start)
        self._known.add((name, shape))


def _prepare_xla() -> None:
    """Choose XLA's device and precision, before anything runs on it.

    Raises:
        BackendError: where a variable of the environment would round the weights themselves to bf16.
    """
    rounding = [name for name in ("XLA_USE_BF16", "XLA_DOWNCAST_BF16") if os.environ.get(name, "0") not in ("", "0")]
    if rounding:
        raise BackendError(
            f"{rounding[0]} is set: it turns weights and optimiser state into bf16, where small updates vanish. Unset "
            "it, and have mixed_precision: 'no' in the Accelerate file; use_amp: true is bf16 where it does no harm"
        )
    wanted = os.environ.setdefault("PJRT_DEVICE", "TPU" if tpu_attached() else "CPU")
    if wanted not in ("CPU", "TPU") or (wanted == "TPU" and not tpu_attached()):
        raise BackendError(
            f"PJRT_DEVICE is {wanted}, and torch_xla {'finds no TPU here' if wanted == 'TPU' else 'has no such device'}"
            "; unset it, or set it to CPU to rehearse on this machine's processor"
        )
    _choose_chip()
    import torch_xla.backends

    # Of float32 products only: a TPU rounds their factors to bf16 otherwise. bf16 products are not touched.
    if torch_xla.backends.get_mat_mul_precision() != "highest":
        logging.getLogger("torch_xla.backends").setLevel(logging.ERROR)  # not to be set twice, it warns the first time
        torch_xla.backends.set_mat_mul_precision("highest")


def _choose_chip() -> None:
    """Which of the host's chips this process has, before the runtime starts: one, whoever started it.

    A process that opened several would be as many replicas with one thread to serve them, and wait for ever.
    """
    if started_by_xla_launcher():
        return  # it has chosen
    if os.environ["PJRT_DEVICE"] == "CPU" and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise BackendError("XLA on a CPU runs in one process; rehearse several with --device cpu")
    if os.environ["PJRT_DEVICE"] == "CPU":
        n_devices = int(os.environ.get("CPU_NUM_DEVICES", 1))
        os.environ["CPU_NUM_DEVICES"] = "1"
    elif "LOCAL_RANK" in os.environ:  # launch_tpu_training.py, torchrun
        from torch_xla._internal import tpu

        os.environ["PJRT_LOCAL_PROCESS_RANK"] = os.environ["LOCAL_RANK"]
        os.environ["PJRT_LOCAL_PROCESS_COUNT"] = os.environ["LOCAL_WORLD_SIZE"]
        if int(os.environ["LOCAL_WORLD_SIZE"]) > 1:
            tpu.configure_topology(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
            return
        n_devices = 1
        tpu.configure_one_chip_topology()
    else:
        from torch_xla._internal import tpu

        n_devices = len(find_chips()[0])
        tpu.configure_one_chip_topology()
    if n_devices > 1:
        logger.warning(
            "this machine has %d XLA devices, and this process takes one of them; for all: "
            "python launch_tpu_training.py --num_cores %d, with the same options but --device", n_devices, n_devices,
        )  # fmt: skip


def _make_accelerator(kind: str, log_with: str) -> Any:
    if kind != "xla" and "accelerate" not in sys.modules:
        os.environ["USE_TORCH_XLA"] = "0"  # read once, when Accelerate is imported
    if kind == "xla":
        _prepare_xla()
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.tracking import get_available_trackers
    from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration

    available = [str(tracker) for tracker in get_available_trackers()]
    if log_with != "none" and log_with not in available:
        raise BackendError(
            f"log_with: {log_with!r} is not installed here; what is: {', '.join(available) or 'nothing'}, or none"
        )
    if PartialState._shared_state and PartialState().device.type != kind:
        # Accelerate keeps one device a process; a script that asks for another one starts afresh.
        AcceleratorState._reset_state(reset_partial_state=True)
    connection = InitProcessGroupKwargs(timeout=LONGEST_WAIT)
    accelerator = Accelerator(
        cpu=kind == "cpu",
        mixed_precision="no",  # autocast is ours: on TPU Accelerate's bf16 would round the weights themselves
        log_with=None if log_with == "none" else log_with,
        project_config=ProjectConfiguration(logging_dir="."),  # `start_trackers` says where
        kwargs_handlers=[connection],
    )
    if accelerator.device.type != kind and started_by_xla_launcher():
        raise BackendError(f"this launcher starts XLA: leave out --device {kind}, or start with torchrun or python")
    if accelerator.device.type != kind:
        raise BackendError(
            f"device {kind} was chosen, and Accelerate, imported before this module, is on {accelerator.device}; "
            f"set USE_TORCH_XLA={int(kind == 'xla')} before importing accelerate"
        )
    if kind == "xla" and accelerator.num_processes > 1 and int(os.environ.get("CPU_NUM_DEVICES", 1)) > 1:
        raise BackendError("CPU_NUM_DEVICES is for `python train_model.py` alone: the launcher would start threads")
    return accelerator
