"""Write a single-GRU checkpoint in the layout of the original code, which can then load it and train on.

    python convert_checkpoint.py --model_path trained_models/my_gru --output_dir converted
    python convert_checkpoint.py --model_path t15_pretrained_rnn_baseline --output_dir plain --trust_checkpoint

The output directory gets checkpoint/best_checkpoint and checkpoint/args.yaml. The input is a checkpoint of this project
with model.architecture: gru, or one of the original's own. A triple decoder has no place in that layout.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import yaml

from checkpointing import CheckpointError, check_parameters, find_checkpoint, load_checkpoint, save_checkpoint
from config import config_from_dict
from evaluate_model_helpers import check_writable, write_text_atomically
from original_format import SETTINGS, OriginalFormatError, original_args, original_checkpoint
from rnn_model import build_model
from training_log import log_to_terminal

logger = logging.getLogger("b2txt")


def convert(
    model_path: str | Path,
    output_dir: str | Path,
    config_path: str | Path | None = None,
    trust_checkpoint: bool = False,
) -> list[Path]:
    """Read a checkpoint, check it against its own settings, write it in the original's layout.

    Args:
        model_path: run directory or checkpoint file.
        output_dir: is made; must not hold a checkpoint yet.
        config_path: settings in place of the args.yaml beside a checkpoint of the original.
        trust_checkpoint: read one that holds more than tensors and plain values, which runs code in it.
    Returns:
        the files written.
    Raises:
        CheckpointError: the input cannot be read, is a triple decoder, or lacks what its settings say.
        FileExistsError: the output is there already.
    """
    path, _ = find_checkpoint(model_path)
    checkpoint = load_checkpoint(path, trust=trust_checkpoint, original_settings=config_path)
    config = config_from_dict(checkpoint["config"])
    try:
        written = original_checkpoint(checkpoint, config)
    except OriginalFormatError as error:
        raise CheckpointError(f"{path}: {error}") from error
    with torch.device("meta"):
        check_parameters(build_model(config), checkpoint["model_state_dict"], path)
    directory = check_writable(Path(output_dir) / "checkpoint")
    targets = [directory / "best_checkpoint", directory / SETTINGS]
    existing = [str(target) for target in targets if target.exists()]
    if existing:
        raise FileExistsError(f"{', '.join(existing)}: there already; choose another --output_dir")
    save_checkpoint(written, targets[0])
    write_text_atomically(targets[1], yaml.safe_dump(original_args(config), sort_keys=False, allow_unicode=True))
    return targets


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; its names are those of `convert`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--model_path", required=True, help="run directory or checkpoint file")
    add("--output_dir", required=True, help="the run directory to write")
    add("--config_path", help="settings of an original checkpoint that has no args.yaml beside it")
    add("--trust_checkpoint", action="store_true", help="read a file that holds Python objects: runs code in it")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 2 for what the user can put right."""
    options = parse_arguments(arguments)
    log_to_terminal()
    try:
        files = convert(**vars(options))
    except (ValueError, OSError) as error:
        print(f"convert_checkpoint.py: {error}", file=sys.stderr)
        return 2
    print("\n".join(f"written: {path}" for path in files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
