"""The training curves of the original single GRU and of the triple decoder, side by side on one simulated set.

    python benchmarks/bench_architectures.py                    # simulates, trains both: 6 minutes on 2 cores

Both have the settings of rnn_args_quickstart.yaml, the single GRU five layers (the original's) in place of the three
models. The bar is that the single GRU, as it is trained here, learns: a val PER that falls to a fifth, and within 5
points of the triple decoder's.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from config import load_config
from rnn_trainer import BrainToTextDecoder_Trainer
from synthetic_data import simulate

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURES = {
    "single GRU": ["model.architecture=gru", "adversarial.enabled=false", "model.n_layers=5"],
    "triple decoder": [],
}
MOST_PER, MOST_DIFFERENCE = 0.2, 0.05


def train(overrides: list[str], data: Path, output_dir: Path, batches: int, seed: int) -> dict:
    """Val PERs, train losses and seconds of one training."""
    lengths = [f"{name}={batches}" for name in ("num_training_batches", "lr_decay_steps", "lr_decay_steps_day")]
    config = load_config(
        ROOT / "rnn_args_quickstart.yaml", [*lengths, f"batches_per_val_step={batches // 8}", *overrides]
    )
    config.dataset.dataset_dir, config.output_dir, config.seed = str(data), str(output_dir), seed
    start = time.perf_counter()
    trainer = BrainToTextDecoder_Trainer(config)
    statistics = trainer.train()
    return {
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "val_PERs": statistics["val_PERs"],
        "train_losses": statistics["train_losses"],
        "seconds": time.perf_counter() - start,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data_dir", help="a simulated set, as quickstart.sh makes it, in place of simulating one")
    parser.add_argument("--batches", type=int, default=400, help="optimiser steps (400)")
    parser.add_argument("--seed", type=int, default=10)
    parser.add_argument("--json", help="write the figures there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(options.data_dir or Path(folder, "data"))
        if not options.data_dir:
            simulate(data, 4, (200, 30, 1), speaking_rate=6.0, speech_variance=0.1, words_per_sentence=(2, 4))
        figures = {
            name: train(overrides, data, Path(folder, name), options.batches, options.seed)
            for name, overrides in ARCHITECTURES.items()
        }
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2) + "\n")
    print(f"\n{'val PER after batch':>20}" + "".join(f"{name:>18}" for name in figures))
    for number, pers in enumerate(zip(*(each["val_PERs"] for each in figures.values()), strict=True), 1):
        print(f"{number * (options.batches // 8):>20}" + "".join(f"{per:>18.1%}" for per in pers))
    for what, value in (("parameters", "{parameters:,}"), ("seconds", "{seconds:.0f}")):
        print(f"{what:>20}" + "".join(f"{value.format(**each):>18}" for each in figures.values()))
    single, triple = (each["val_PERs"][-1] for each in figures.values())
    return 0 if single <= MOST_PER and single - triple <= MOST_DIFFERENCE else 1


if __name__ == "__main__":
    sys.exit(main())
