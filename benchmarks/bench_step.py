"""A training step on this machine's processor, in valid bins a second, against the same model in plain PyTorch.

    python benchmarks/bench_step.py                                    # original; compact with its adversary
    python benchmarks/bench_step.py --config_path rnn_args_compact.yaml

Trials of 300 to 1,500 bins of noise, of 4 of 12 sessions; both models at their full width, with augmentation, dropout,
clipping and AdamW. The reference (reference.py) pads a batch to its longest trial. Batches are ready before the clock
starts. In every round one step each; in the same run the rate of a product of two matrices of 2,048 x 2,048 in float32,
and a profile of one of our steps. The two have the same loss on the same weights, which is checked first. Bar: 1.5
times the reference. About two minutes for each model on two cores.
"""

import os

os.environ.setdefault("USE_TORCH_XLA", "0")

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import paired
import reference
import torch
from paired import in_turn, in_words, seconds, spread

from backend import Backend
from config import Config
from dataset import EvalBatches, TrainBatches, batch_shapes
from dataset_index import index_splits
from loss import trial_losses
from optimizer import make_optimizer
from rnn_model import build_model
from training_step import TrainingStep

LEAST_RATIO = 1.5
CONFIGS = ("rnn_args_original.yaml", "rnn_args_compact.yaml")
KINDS = {  # of operators, by how their names begin
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"),
    "random numbers": ("aten::normal_", "aten::uniform_", "aten::bernoulli_", "aten::random_"),
    "AdamW": ("aten::_fused_adamw_", "aten::sqrt", "aten::addcdiv"),
    "CTC": ("aten::_ctc_loss",),
    "copies and joins": ("aten::copy_", "aten::cat", "aten::index", "aten::fill_", "aten::zero_"),
    "norm of the gradients": ("aten::linalg_vector_norm", "aten::norm"),
}


def product_rate(size: int = 2048, times: int = 4) -> float:
    """GFLOP/s of a float32 product of two square matrices."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    torch.mm(a, b)
    return 2e-9 * size**3 * times / seconds(lambda: [torch.mm(a, b) for _ in range(times)])


def check_losses(config: Config, theirs: torch.nn.Module, ours: torch.nn.Module, trials: list) -> None:
    """That both have one loss: of a trial, nothing random."""
    for decoder in (theirs, ours):
        decoder.train()
        for module in decoder.modules():
            if isinstance(module, (torch.nn.Dropout, torch.nn.RNNBase)) or hasattr(module, "dropout"):
                module.train(False)
    batch, plain = EvalBatches(trials[:1], config, batch_size=1)[0], reference.read_trials(trials[:1])
    with torch.no_grad():
        features, n_time_steps = reference.transform(plain["features"], plain["n_time_steps"], config, training=False)
        expected = reference.batch_loss(theirs, plain, config, augment=False)
        found = trial_losses(
            ours, config, features, n_time_steps, batch["day_indices"], batch["labels"], batch["label_lengths"]
        ).total.mean()
    difference = abs(found / expected - 1).item()
    if difference > 1e-4:
        raise AssertionError(f"the two are not the same model: losses {expected.item():.4f} and {found.item():.4f}")


def profile(step: Any) -> dict[str, float]:
    """Shares of a step's time by kind of operator, and the GFLOP/s of its matrix products over the whole step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_flops=True) as found:
        taken = seconds(step)
    shares = dict.fromkeys((*KINDS, "elementwise and the rest"), 0.0)
    events = found.key_averages()
    for event in events:
        kind = next((kind for kind, names in KINDS.items() if event.key.startswith(names)), "elementwise and the rest")
        shares[kind] += event.self_cpu_time_total
    total = sum(shares.values())
    return {name: share / total for name, share in shares.items()} | {
        "GFLOP/s": sum(event.flops for event in events) / taken / 1e9
    }


def measure(name: str, data: Path, options: Any) -> tuple[dict[str, float], dict[str, Any]]:
    """The ratio of valid bins a second, and figures."""
    config = paired.config_for(name, data, [f"dataset.batch_size={options.batch_size}"])
    trials = index_splits(config, ("train", "val"))
    torch.manual_seed(config.seed)
    theirs, ours = reference.make_model(config), build_model(config)
    ours.load_state_dict(reference.our_parameters(theirs))
    check_losses(config, theirs, ours, trials["train"])
    their_optimizer, scheduler = reference.make_optimizer(theirs, config)
    step = TrainingStep(ours, make_optimizer(ours, config, "cpu"), config, Backend("cpu"))
    shapes = batch_shapes(trials["train"] + trials["val"], config)
    our_batches = TrainBatches(trials["train"], config, shapes=shapes)
    their_batches = reference.train_batches(trials["train"], config, config.seed)
    n_done, wasted = 0, {"ours": [], "reference": []}

    def run_ours() -> float:
        nonlocal n_done
        batch = our_batches[n_done]
        n_done += 1
        return rate(batch, "ours", lambda: step([batch], n_done))

    def run_theirs() -> float:
        batch = next(their_batches)
        return rate(batch, "reference", lambda: reference.train_step(theirs, their_optimizer, scheduler, batch, config))

    def rate(batch: dict[str, torch.Tensor], who: str, function: Any) -> float:
        valid = batch["n_time_steps"].sum().item()
        wasted[who].append(1 - valid / batch["features"][..., 0].numel())
        return valid / seconds(function)

    run_theirs(), run_ours()
    rates = in_turn([run_theirs, run_ours, product_rate], options.rounds, name)
    batch = our_batches[n_done]
    figures = {
        "valid bins a second, reference": spread(rate[0] for rate in rates),
        "valid bins a second, ours": spread(rate[1] for rate in rates),
        "padding, reference": statistics.mean(wasted["reference"]),
        "padding, ours": statistics.mean(wasted["ours"]),
        "GFLOP/s of a large product": spread(rate[2] for rate in rates),
        "profile": profile(lambda: step([batch], n_done)),
    }
    return spread(ours / theirs for theirs, ours, _ in rates), figures


def report(name: str, figures: dict[str, Any]) -> None:
    print(f"{name}, {torch.get_num_threads()} threads")
    for what, value in figures.items():
        if what == "profile":
            rate = value["GFLOP/s"]
            share = rate / figures["GFLOP/s of a large product"]["median"]
            print(f"  the step's matrix products over its whole time: {rate:.0f} GFLOP/s, {share:.0%} of that")
            for kind, part in sorted(value.items(), key=lambda item: -item[1]):
                if kind != "GFLOP/s":
                    print(f"    {part:6.1%}  {kind}")
        else:
            print(f"  {what}: " + (in_words(value, 0) if isinstance(value, dict) else f"{value:.0%}"))


def main() -> int:
    parser = paired.parser_of(__doc__)
    parser.add_argument("--config_path", choices=CONFIGS, help="this one alone")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    ratios, figures = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        data = paired.write_noise(Path(folder, "noise"), 12, {"train": 24, "val": 1})
        for name in [options.config_path] if options.config_path else CONFIGS:
            short = name.removeprefix("rnn_args_").removesuffix(".yaml")
            ratios[f"CPU step, {short}"], figures[short] = measure(name, data, options)
            report(short, figures[short])
    paired.finish(options.json, ratios, figures)
    return 0 if all(ratio["median"] >= LEAST_RATIO for ratio in ratios.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
