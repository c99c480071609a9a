"""The PER of a val split on this machine's processor, in trials a second, against one trial at a time.

    python benchmarks/bench_evaluation.py

The three shipped sizes with random weights and lively classifiers, at their own batch sizes; 96 trials of 300 to 1,500
bins of noise of 8 sessions. From files to errors counted: ours as the trainer validates (validation.py), the reference
opens a file for each trial, runs the model on it and collapses in Python. In turn; and both decode the same phonemes,
but for frames whose two best logits are equal to within 1e-5 (of logits that vary by 1). Beside them what is possible
in float32: the model's matrix products alone, at the rate of a large product measured in the same run. Bar: 5 times the
reference, or three quarters of what is possible.
"""

import os

os.environ.setdefault("USE_TORCH_XLA", "0")

import sys
import tempfile
from pathlib import Path
from typing import Any

import paired
import reference
import torch
from bench_step import product_rate
from paired import in_turn, in_words, seconds, spread

from backend import Backend
from config import Config
from dataset import EvalBatches, make_loader
from dataset_index import Trial, index_splits
from evaluate_model_helpers import count_errors, sum_errors
from inference import batch_logits
from rnn_model import build_model
from validation import validate

CONFIGS = ("rnn_args_quickstart.yaml", "rnn_args_original.yaml", "rnn_args_compact.yaml")
LEAST_RATIO, LEAST_OF_POSSIBLE, LEAST_GAP = 5.0, 0.75, 1e-5


def gflops_a_trial(model: torch.nn.Module, trials: list[Trial], config: Config) -> float:
    """Of the matrix products that a trial of mean length takes: every weight once a frame, a day's once a bin."""
    bins = sum(trial.n_time_steps for trial in trials) / len(trials)
    frames = bins / config.model.patch_stride
    weights = sum(
        p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "noisy" not in name and "day_" not in name
    )
    return 2e-9 * (frames * weights + bins * config.model.n_input_features**2)


@torch.no_grad()
def make_lively(model: torch.nn.Module, out: torch.nn.Linear, trial: Trial, config: Config) -> None:
    """Scale a classifier of random weights such that it tells many phonemes, with blanks between them."""
    model.eval()
    batch = reference.read_trials([trial])
    features, _ = reference.transform(batch["features"], batch["n_time_steps"], config, training=False)
    logits = model(features, batch["day_indices"])[0]
    out.weight /= logits.std(0).mean()
    out.bias.copy_((out.bias - logits.mean(0)) / logits.std(0).mean())
    out.bias[0] += 2


def check_paths(ours: torch.nn.Module, theirs: torch.nn.Module, trial: Trial, config: Config) -> None:
    """Of a trial that was decoded differently: that the classes which differ are as likely as each other."""
    found = next(batch_logits(ours, [EvalBatches([trial], config, batch_size=1)[0]], config, Backend("cpu")))
    logits = found.logits[0, : found.lengths[0]]
    best = logits.topk(2).values
    close = (best[:, 0] - best[:, 1]) < LEAST_GAP * logits.abs().max().clamp(min=1)
    differ = logits.argmax(-1) != reference.best_path(theirs, trial, config)
    if (differ & ~close).any():
        raise AssertionError(f"{trial}: decoded differently by the reference")


def measure(name: str, data: Path, rounds: int) -> tuple[dict[str, float], dict[str, Any]]:
    config = paired.config_for(name, data)
    trials = index_splits(config, ("val",))["val"]
    torch.manual_seed(config.seed)
    theirs = reference.make_model(config)
    speech = theirs if config.model.architecture == "gru" else theirs.clean_speech_model
    make_lively(theirs, speech.out, trials[0], config)
    ours, backend = build_model(config), Backend("cpu")
    ours.load_state_dict(reference.our_parameters(theirs))
    loader = make_loader(EvalBatches(trials, config), config)
    decoded: dict[str, list[list[int]]] = {}
    pers: dict[str, float] = {}

    def evaluate_ours() -> None:
        metrics = validate(ours, loader, trials, config, backend)
        decoded["ours"], pers["ours"] = metrics["decoded_seqs"], metrics["avg_PER"]

    def evaluate_theirs() -> None:
        decoded["reference"] = reference.decode(theirs, trials, config)
        counts = [count_errors(t.labels, ids) for t, ids in zip(trials, decoded["reference"], strict=True)]
        pers["reference"] = sum_errors(counts).rate

    evaluate_ours()
    rates = in_turn(
        [
            lambda: len(trials) / seconds(evaluate_theirs),
            lambda: len(trials) / seconds(evaluate_ours),
            lambda: product_rate(times=20) / gflops_a_trial(theirs, trials, config),
        ],
        rounds,
        name,
    )
    pairs = list(zip(trials, decoded["ours"], decoded["reference"], strict=True))
    for trial, mine, other in pairs:
        if mine != other:
            check_paths(ours, theirs, trial, config)
    figures = {
        "trials a second, reference": spread(rate[0] for rate in rates),
        "trials a second, ours": spread(rate[1] for rate in rates),
        "trials a second, the products alone": spread(rate[2] for rate in rates),
        "times the reference, possible": spread(most / theirs for theirs, _, most in rates),
        "of what is possible": spread(ours / most for _, ours, most in rates),
        "PER, reference": pers["reference"],
        "PER, ours": pers["ours"],
        "phonemes decoded": sum(map(len, decoded["ours"])),
        "trials decoded differently": sum(mine != other for _, mine, other in pairs),
    }
    return spread(ours / theirs for theirs, ours, _ in rates), figures


def main() -> int:
    parser = paired.parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    ratios, figures = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        data = paired.write_noise(Path(folder, "noise"), 8, {"train": 1, "val": 12})
        for name in CONFIGS:
            short = name.removeprefix("rnn_args_").removesuffix(".yaml")
            ratios[f"evaluation, {short}"], figures[short] = measure(name, data, options.rounds)
            print(f"{short}, {torch.get_num_threads()} threads")
            for what, value in figures[short].items():
                print(f"  {what}: " + (in_words(value) if isinstance(value, dict) else f"{value:.4g}"))
    paired.finish(options.json, ratios, figures)
    passed = (
        ratios[f"evaluation, {short}"]["median"] >= LEAST_RATIO
        or figures[short]["of what is possible"]["median"] >= LEAST_OF_POSSIBLE
        for short in figures
    )
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
