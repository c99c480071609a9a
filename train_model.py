"""Train the decoder.

python train_model.py                                        # rnn_args.yaml beside this script
python train_model.py --config_path rnn_args_quickstart.yaml
python train_model.py --batch_size 16 --num_batches 50000 --output_dir trained_models/mine
python train_model.py --set lr_max=0.002 adversarial.grl_lambda=0.1
python train_model.py ... --resume                           # after an interruption: the same command, and --resume
"""

import argparse
import ctypes
import errno
import os
import shlex
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rnn_trainer import BrainToTextDecoder_Trainer

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from process_group import OTHER_ENDED  # noqa: E402


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--config_path", default=HERE / "rnn_args.yaml", help="default: rnn_args.yaml beside this script"
    )
    parser.add_argument("--batch_size", type=int, help="trials a device and micro-step (dataset.batch_size)")
    parser.add_argument("--num_batches", type=int, help="optimiser steps (num_training_batches)")
    parser.add_argument("--output_dir", help="where checkpoints and logs go")
    parser.add_argument("--data_dir", help="folder of the sessions' HDF5 files (dataset.dataset_dir)")
    parser.add_argument("--disable_mixed_precision", action="store_true", help="float32 everywhere (use_amp: false)")
    parser.add_argument(
        "--device", choices=("cpu", "cuda", "xla"), help="default: a TPU if there is one, else CUDA, else CPU"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the output directory's latest checkpoint")
    parser.add_argument(
        "--overwrite", action="store_true",
        help="remove an earlier run in the output directory; checkpoints that a script named itself stay",
    )  # fmt: skip
    parser.add_argument(
        "--profile_steps", type=_steps, metavar="FIRST:LAST",
        help="record these optimiser steps, counted from 1, in the output directory's profile folder, for TensorBoard",
    )  # fmt: skip
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE",
        help="any settings, e.g. dataset.batch_size=16; may be repeated",
    )  # fmt: skip
    return parser.parse_args(arguments)


def _steps(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last)):
        raise argparse.ArgumentTypeError(f"expected FIRST:LAST, such as 20:25, found {text!r}")
    return int(first), int(last)


def overrides(options: argparse.Namespace) -> list[str]:
    """The named options, and --set after them, as configuration overrides."""
    named = {
        "dataset.batch_size": options.batch_size,
        "num_training_batches": options.num_batches,
        "output_dir": options.output_dir,
        "dataset.dataset_dir": options.data_dir,
        "use_amp": False if options.disable_mixed_precision else None,
    }
    return [f"{key}={value}" for key, value in named.items() if value is not None] + options.set


def main(arguments: list[str] | None = None) -> int:
    """Parse, check, train, say where the results are. Returns the exit code, which `accelerate launch` ignores."""
    options = parse_arguments(arguments)
    if options.resume and options.overwrite:
        print("--resume goes on with a run and --overwrite removes it: give one of them", file=sys.stderr)
        return 2
    if threading.current_thread() is not threading.main_thread():
        # torch_xla's launcher runs this in a thread, and where Ctrl-C interrupts the main one that waits for this one:
        # let the signal end the process, as checkpoints allow.
        ctypes.CDLL(None).signal(int(signal.SIGINT), None)
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1 or "PJRT_LOCAL_PROCESS_COUNT" in os.environ
    try:
        code = train(options)
    except KeyboardInterrupt:
        print("interrupted before the training began", file=sys.stderr)
        code = 130
    except Exception as error:
        if not several:
            raise
        # Nothing else of this process may run: it would wait for the others, and they for it.
        code = 2
        if not _says_that_another_ended(error):
            traceback.print_exc()
        else:
            code = OTHER_ENDED
            print(_of_this_process(f"another process ended, and with it the run ({error})"), file=sys.stderr)
    if code and os.environ.get("PJRT_LOCAL_PROCESS_COUNT") == "1":
        raise SystemExit(code)  # accelerate launch passes this on, and not what is returned
    if code and several:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _of_this_process(message: object) -> str:
    rank = os.environ.get("RANK")
    return f"{message}" if rank is None else f"process {rank}: {message}"


def _says_that_another_ended(error: Exception) -> bool:
    """Whether the error is the end of a connection, and not a fault of this process."""
    import torch

    words = ("gloo", "Connection closed", "Connection reset", "Broken pipe", "NCCL")
    lost = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    return lost or isinstance(error, torch.distributed.DistError)


def train(options: argparse.Namespace) -> int:
    """What `main` does after parsing."""
    from config import load_config
    from processes import OtherProcessFailed
    from rnn_trainer import BrainToTextDecoder_Trainer, TrainingDiverged

    try:
        config = load_config(options.config_path, overrides(options))
        existing = "resume" if options.resume else "overwrite" if options.overwrite else "refuse"
        trainer = BrainToTextDecoder_Trainer(config, options.device, existing)
        done = _done_already(trainer)
        if done is None:
            try:
                trainer.train(options.profile_steps)
            except KeyboardInterrupt:
                if not trainer.backend.is_main:
                    return 130
                instead = " in place of --overwrite" if options.overwrite else ""
                print(f"interrupted; go on with the same command and --resume{instead}", file=sys.stderr)
                return 130
    except TrainingDiverged:  # its log has said so
        return 2
    except OtherProcessFailed:  # which has said why
        return OTHER_ENDED
    except (ValueError, OSError, MemoryError) as error:
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        more = f"; the disk of {config.output_dir} is full: free some space, and go on with --resume" if full else ""
        print(_of_this_process(f"{error}{more}"), file=sys.stderr)
        return 2
    trainer.backend.finish()
    if trainer.backend.is_main:
        print(done or _where_the_results_are(trainer))
    return 0


def _done_already(trainer: "BrainToTextDecoder_Trainer") -> str | None:
    if trainer.step >= trainer.config.num_training_batches:
        return f"{trainer.output_dir}: {trainer.step} batches are done already; for more, raise --num_batches"
    if trainer.stopped_early:
        return f"{trainer.output_dir}: stopped early already; for more, raise early_stopping_val_steps"
    return None


def _where_the_results_are(trainer: "BrainToTextDecoder_Trainer") -> str:
    folder = trainer.checkpoint_dir
    model_path = folder.parent if folder.name == "checkpoint" else folder
    return (
        f"checkpoints:  {folder}\nlog:          {trainer.output_dir / 'training_log'}\n"
        f"evaluate:     python evaluate_model.py --model_path {shlex.quote(str(model_path))} --eval_type val"
    )


if __name__ == "__main__":
    sys.exit(main())
