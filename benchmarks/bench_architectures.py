"""Training curves on one simulated set: the single GRU in plain PyTorch, the same trained here, the triple decoder.

    python benchmarks/bench_architectures.py                    # simulates, trains all three one after the other

All have the settings of rnn_args_quickstart.yaml; the single GRU has five layers, the original's number, in place of
the three models. The first is trained as the original's code does it (benchmarks/reference.py): other batches, padded
to their longest trial, in another order. Bar: this project's single GRU ends with a val PER at most 2 points above it.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import reference

from config import Config, load_config
from dataset_index import index_splits
from evaluate_model_helpers import count_errors, sum_errors
from rnn_trainer import BrainToTextDecoder_Trainer
from synthetic_data import simulate
from training_log import progress_bar

ROOT = Path(__file__).resolve().parent.parent
SINGLE = ["model.architecture=gru", "adversarial.enabled=false", "model.n_layers=5"]
N_VALIDATIONS, MOST_WORSE = 8, 0.02


def settings(overrides: list[str], data: Path, output_dir: Path, options: argparse.Namespace) -> Config:
    """The quickstart's, for so many batches."""
    lengths = [f"{name}={options.batches}" for name in ("num_training_batches", "lr_decay_steps", "lr_decay_steps_day")]
    every = f"batches_per_val_step={options.batches // N_VALIDATIONS}"
    config = load_config(ROOT / "rnn_args_quickstart.yaml", [*lengths, every, *overrides])
    config.dataset.dataset_dir, config.output_dir, config.seed = str(data), str(output_dir), options.seed
    return config


def train(config: Config) -> tuple[torch.nn.Module, list[float]]:
    """The trained model and its val PERs."""
    trainer = BrainToTextDecoder_Trainer(config)
    return trainer.model, trainer.train()["val_PERs"]


def train_reference(config: Config) -> tuple[torch.nn.Module, list[float]]:
    """The same in plain PyTorch."""
    torch.manual_seed(config.seed)
    model = reference.make_model(config)
    optimizer, scheduler = reference.make_optimizer(model, config)
    splits = index_splits(config, ("train", "val"))
    batches, pers = reference.train_batches(splits["train"], config, config.seed), []
    with progress_bar(config.num_training_batches, 0, "batch", "Reference") as progress:
        for number in range(1, config.num_training_batches + 1):
            loss = reference.train_step(model, optimizer, scheduler, next(batches), config)
            if number % config.batches_per_val_step == 0:
                decoded = reference.decode(model, splits["val"], config)
                counts = [count_errors(t.labels, ids) for t, ids in zip(splits["val"], decoded, strict=True)]
                pers.append(sum_errors(counts).rate)
                progress.set_postfix_str(f"loss {loss:.2f}, PER {pers[-1]:.1%}")
            progress.update()
    return model, pers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data_dir", help="a simulated set, as quickstart.sh makes it, in place of simulating one")
    parser.add_argument("--batches", type=int, default=400, help="optimiser steps (400)")
    parser.add_argument("--seed", type=int, default=10)
    parser.add_argument("--json", help="write the figures there")
    options = parser.parse_args()
    if options.batches % N_VALIDATIONS:
        parser.error(f"--batches must be a multiple of {N_VALIDATIONS}, so that all are validated at the same batches")
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(options.data_dir or Path(folder, "data"))
        if not options.data_dir:
            simulate(
                data, sessions=4, trials=(200, 30, 1), speaking_rate=6.0, speech_variance=0.1, words_per_sentence=(2, 4)
            )
        for name, overrides, function in (
            ("GRU, plain PyTorch", SINGLE, train_reference),
            ("GRU", SINGLE, train),
            ("triple decoder", [], train),
        ):
            start = time.perf_counter()
            model, pers = function(settings(overrides, data, Path(folder, name), options))
            n_parameters = sum(parameter.numel() for parameter in model.parameters())
            figures[name] = {"val_PERs": pers, "parameters": n_parameters, "seconds": time.perf_counter() - start}
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2) + "\n")
    print(f"\n{'val PER after batch':>20}" + "".join(f"{name:>20}" for name in figures))
    for number, pers in enumerate(zip(*(each["val_PERs"] for each in figures.values()), strict=True), 1):
        print(f"{number * (options.batches // N_VALIDATIONS):>20}" + "".join(f"{per:>20.1%}" for per in pers))
    for what, value in (("parameters", "{parameters:,}"), ("seconds", "{seconds:.0f}")):
        print(f"{what:>20}" + "".join(f"{value.format(**each):>20}" for each in figures.values()))
    plain, ours, _ = (each["val_PERs"][-1] for each in figures.values())
    return 0 if ours - plain <= MOST_WORSE else 1


if __name__ == "__main__":
    sys.exit(main())
