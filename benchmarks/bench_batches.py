"""What buckets do to batches: padding, and whether any session, trial or length is drawn more often than it should be.

    python benchmarks/bench_batches.py

No data are read: 45 sessions of 60 to 350 trials of 300 to 1,500 bins (triangular around 800, each session shifted by
up to 150, as sessions differ in their sentences), and batches of 64 trials of 4 sessions. A plan is a function of seed
and step alone, so that the 4,000 drawn here are those of a training. Bars: valid bins are 0.85 of the padded ones at
least; sessions and trials are drawn as often as the law says (the mean square of their deviations is at most 1.1
times that of independent draws), and so are lengths.
"""

import sys
from typing import Any

import numpy as np
import paired
from paired import spread

from config import load_config
from dataset import TrainBatches, batch_shapes
from dataset_index import Trial

N_SESSIONS, N_BATCHES = 45, 4_000
LEAST_VALID, MOST_DEVIATION, MOST_LENGTH_ERROR = 0.85, 1.1, 0.005


def imagined_trials(seed: int) -> list[Trial]:
    """Trials without files."""
    rng = np.random.default_rng(seed)
    trials = []
    for day in range(N_SESSIONS):
        shift = rng.integers(-150, 151)
        for number in range(int(rng.integers(60, 351))):
            n_bins = int(np.clip(rng.triangular(*paired.LENGTHS) + shift, paired.LENGTHS[0], paired.LENGTHS[2]))
            trials.append(Trial(f"s{day}", day, "train", "", f"trial_{number}", 0, number, n_bins, 1, (1,)))
    return trials


def deviation(found: np.ndarray, expected: np.ndarray) -> float:
    """Mean square of counts minus their expectation, in standard errors of independent draws: 1 if they were that."""
    return float(np.mean((found - expected) ** 2 / expected))


def measure(seed: int) -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    trials = imagined_trials(seed)
    lengths, days = (np.array([getattr(trial, name) for trial in trials]) for name in ("n_time_steps", "day"))
    config = load_config(paired.ROOT / "rnn_args_original.yaml", [f"dataset.seed={seed}", "dataset.batch_size=64"])
    shapes = batch_shapes(trials, config)
    batches = TrainBatches(trials, config, shapes=shapes)
    rng = np.random.default_rng(seed)
    of_day = [np.flatnonzero(days == day) for day in range(N_SESSIONS)]
    plans, plain, valid, valid_plain = [], [], [], []
    for number in range(N_BATCHES):
        bucket, (drawn,) = batches.plan(number)
        plans.append(drawn)
        valid.append(lengths[drawn].sum() / (len(drawn) * shapes.buckets[bucket]))
        # The reference: random sessions, random trials of each, padded to the longest.
        drawn = np.concatenate([rng.choice(of_day[day], 16, False) for day in rng.choice(N_SESSIONS, 4, False)])
        plain.append(drawn)
        valid_plain.append(lengths[drawn].mean() / lengths[drawn].max())
    chosen = np.array(plans)
    expected_share = 1 / (N_SESSIONS * np.bincount(days)[days])
    n_drawn = chosen.size
    by_trial = np.bincount(chosen.ravel(), minlength=len(trials))
    by_day = sum(np.isin(np.arange(N_SESSIONS), days[drawn]) for drawn in plans)  # batches in which a session is
    law_length = float((expected_share * lengths).sum())
    grid = (10, 50, 90)
    figures = {
        "trials": len(trials),
        "buckets": list(shapes.buckets),
        "share of batches of each bucket": batches.bucket_shares.tolist(),
        "sessions, deviation": deviation(by_day, np.full(N_SESSIONS, by_day.mean())),
        "trials, deviation": deviation(by_trial, n_drawn * expected_share),
        "trials never drawn": int((by_trial == 0).sum()),
        "mean length drawn over the law's": float(lengths[chosen].mean() / law_length),
        "lengths drawn, 10, 50, 90%": np.percentile(lengths[chosen], grid).tolist(),
        "lengths by the law, 10, 50, 90%": [
            float(np.interp(q / 100, np.cumsum(expected_share[order]), lengths[order]))
            for order in [np.argsort(lengths)]
            for q in grid
        ],
        "sessions in a batch": spread(len(set(days[drawn])) for drawn in plans),
        "standard deviation of lengths in a batch": spread(lengths[drawn].std() for drawn in plans),
        "the same without buckets": spread(lengths[drawn].std() for drawn in plain),
        "standard deviation of a batch's mean length": float(np.std([lengths[drawn].mean() for drawn in plans])),
        "that without buckets": float(np.std([lengths[drawn].mean() for drawn in plain])),
    }
    ratios = {
        "padding: valid over padded bins": spread(valid),
        "padding: without buckets": spread(valid_plain),
    }
    figures["valid over padded bins, of all"] = float(
        lengths[chosen].sum() / sum(64 * shapes.buckets[batches.plan(number)[0]] for number in range(N_BATCHES))
    )
    return ratios, figures


def main() -> int:
    parser = paired.parser_of(__doc__)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    ratios, figures = measure(options.seed)
    for name, value in figures.items():
        if isinstance(value, list):
            value = ", ".join(f"{each:.3g}" if each < 1 else f"{each:.0f}" for each in value)
        elif isinstance(value, dict):
            value = paired.in_words(value, 1)
        print(f"{name}: {value:.3f}" if isinstance(value, float) else f"{name}: {value}")
    paired.finish(options.json, ratios, figures)
    passed = (
        figures["valid over padded bins, of all"] >= LEAST_VALID
        and max(figures["sessions, deviation"], figures["trials, deviation"]) <= MOST_DEVIATION
        and abs(figures["mean length drawn over the law's"] - 1) <= MOST_LENGTH_ERROR
    )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
