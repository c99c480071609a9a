"""Train the decoder.

python train_model.py                                        # rnn_args.yaml beside this script
python train_model.py --config_path rnn_args_quickstart.yaml
python train_model.py --batch_size 16 --num_batches 50000 --output_dir trained_models/mine
python train_model.py --set lr_max=0.002 adversarial.grl_lambda=0.1
python train_model.py ... --resume                           # after an interruption: the same command, and --resume
"""

import argparse
import shlex
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))


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
        "--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE",
        help="any settings, e.g. dataset.batch_size=16; may be repeated",
    )  # fmt: skip
    return parser.parse_args(arguments)


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
    """Parse, check, train, say where the results are. Returns the exit code."""
    options = parse_arguments(arguments)
    try:
        return train(options)
    except KeyboardInterrupt:
        print("interrupted before the training began", file=sys.stderr)
        return 130


def train(options: argparse.Namespace) -> int:
    """What `main` does after parsing."""
    from config import load_config
    from rnn_trainer import BrainToTextDecoder_Trainer, TrainingDiverged
    from run_directory import check_vacant

    try:
        config = load_config(options.config_path, overrides(options))
        check_vacant(config.output_dir, options.resume, options.overwrite, config.checkpoint_dir)
        existing = "resume" if options.resume else "overwrite" if options.overwrite else "keep"
        trainer = BrainToTextDecoder_Trainer(config, options.device, existing)
        if trainer.step >= config.num_training_batches:
            print(f"{config.output_dir}: {trainer.step} batches are done already; for more, raise --num_batches")
            return 0
        if trainer.stopped_early:
            print(f"{config.output_dir}: stopped early already; for more, raise early_stopping_val_steps")
            return 0
        try:
            trainer.train()
        except KeyboardInterrupt:
            instead = " in place of --overwrite" if options.overwrite else ""
            print(f"interrupted; go on with the same command and --resume{instead}", file=sys.stderr)
            return 130
    except TrainingDiverged:  # the trainer has said so in its log
        return 2
    except (ValueError, OSError, MemoryError) as error:
        print(error, file=sys.stderr)
        return 2
    folder = trainer.checkpoint_dir
    model_path = folder.parent if folder.name == "checkpoint" else folder
    print(
        f"checkpoints:  {folder}\nlog:          {trainer.output_dir / 'training_log'}\n"
        f"evaluate:     python evaluate_model.py --model_path {shlex.quote(str(model_path))} --eval_type val"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
