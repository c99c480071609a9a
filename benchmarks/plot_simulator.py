"""Draws the statistics of simulated features beside those of a real trial.

    python benchmarks/plot_simulator.py --output pictures/simulator_statistics.png

The real figures are those of one published trial (participant T12, Willett et al. 2023, "A high-performance speech
neuroprosthesis", Dryad doi:10.5061/dryad.x69p8czpq: 256 features, 591 bins of 20 ms, z-scored). They stand below as
numbers: the trial itself is neither needed nor shipped. The simulated ones are taken over windows as long as that
trial, for correlations and principal components depend on the length.
"""

import argparse
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench_simulator import SETTINGS

from synthetic_data import make_participant, simulate_session
from synthetic_neural import Settings, sessions_of

REAL_BINS, REAL_FEATURES = 591, 256
PERCENTILES = (0, 1, 25, 50, 75, 99, 100)
REAL_PERCENTILES = (-3.3, -1.6, -0.77, -0.33, 0.70, 2.74, 6.4)
LAGS = (1, 2, 5, 10, 25, 50)
REAL_AUTOCORRELATION = (0.085, 0.088, 0.096, 0.076, 0.030, 0.008)
CORRELATION_PERCENTILES = (1, 25, 50, 75, 99)
REAL_CORRELATIONS = (-0.10, -0.02, 0.02, 0.05, 0.17)
REAL_COMPONENTS = (0.040, 0.020, 0.016)
REAL_HALF = 50  # components that hold half of the variance
COLORS = {"real": "black", "default": "tab:blue", "quickstart": "tab:orange", "clear": "tab:green"}


def statistics(features: np.ndarray) -> dict[str, np.ndarray]:
    """Of one window (T, F), as the real trial's."""
    z = (features - features.mean(0)) / features.std(0)
    correlations = np.corrcoef(z.T)
    between = correlations[np.triu_indices(len(correlations), 1)]
    components = np.linalg.eigvalsh(correlations)[::-1] / len(correlations)
    return {
        "percentiles": np.percentile(z, PERCENTILES),
        "autocorrelation": np.array([(z[lag:] * z[:-lag]).mean() for lag in LAGS]),
        "correlations": np.percentile(between, CORRELATION_PERCENTILES),
        "components": components[:3],
        "half": np.searchsorted(np.cumsum(components), 0.5) + 1.0,
    }


def simulated_statistics(name: str, n_windows: int) -> dict[str, np.ndarray]:
    """Means over windows of the length, and of half of the features, that the real trial has."""
    changes, words = SETTINGS[name]
    session = next(sessions_of(make_participant(Settings(**changes), words)))
    rng = np.random.default_rng(0)
    windows = []
    while len(windows) < n_windows:
        for block in simulate_session(session, 0, (200, 0, 0), words):
            for start in range(0, len(block.features) - REAL_BINS, REAL_BINS):
                chosen = rng.choice(block.features.shape[1], REAL_FEATURES, replace=False)
                windows.append(statistics(block.features[start : start + REAL_BINS, chosen].astype(float)))
    windows = windows[:n_windows]
    return {key: np.mean([window[key] for window in windows], axis=0) for key in windows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", default="pictures/simulator_statistics.png")
    parser.add_argument("--windows", type=int, default=30, help="windows to average over (30)")
    options = parser.parse_args()
    shown = {
        "real": {
            "percentiles": REAL_PERCENTILES,
            "autocorrelation": REAL_AUTOCORRELATION,
            "correlations": REAL_CORRELATIONS,
            "components": REAL_COMPONENTS,
            "half": REAL_HALF,
        }
    }
    shown |= {name: simulated_statistics(name, options.windows) for name in SETTINGS}

    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    panels = [
        ("autocorrelation", "Autocorrelation, mean over features", [f"{lag * 20} ms" for lag in LAGS]),
        ("percentiles", "Percentiles of the z-scored features", [f"{p}%" for p in PERCENTILES]),
        ("correlations", "Percentiles of the correlation of two features", [f"{p}%" for p in CORRELATION_PERCENTILES]),
        ("components", "Variance of the first principal components", ["1st", "2nd", "3rd"]),
    ]
    for axis, (key, title, ticks) in zip(axes.flat, panels, strict=True):
        places = np.arange(len(ticks))
        for offset, (name, values) in zip((-0.3, -0.1, 0.1, 0.3), shown.items(), strict=True):
            label = "real trial (T12)" if name == "real" else f"simulated, {name}"
            if key == "components":
                label += f" (half of the variance: {values['half']:.0f} components)"
            axis.bar(places + offset, values[key], 0.19, color=COLORS[name], label=label)
        axis.set_xticks(places, ticks)
        axis.set_title(title)
        axis.axhline(0, color="gray", linewidth=0.8)
        axis.spines[["top", "right"]].set_visible(False)
        if key == "components":
            axis.set_ylim(top=0.23)  # room for the legend
        axis.legend(frameon=False, fontsize=8.5)
    figure.suptitle(f"Simulated features beside a real trial ({REAL_FEATURES} features, windows of {REAL_BINS} bins)")
    Path(options.output).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output, dpi=110)

    for name, values in shown.items():
        print(name)
        for key, value in values.items():
            print(f"    {key}: {' '.join(f'{number:.3g}' for number in np.atleast_1d(value))}")
    print(f"written: {options.output}")


if __name__ == "__main__":
    main()
