"""What the benchmarks share: two ways timed in turn, the ratio with its spread, and a data set of the real shape."""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from config import Config, load_config
from training_log import progress_bar

ROOT = Path(__file__).resolve().parent.parent
N_FEATURES = 512
LENGTHS = (300, 800, 1500)  # bins of a trial: least, most frequent, most


def seconds(function: Callable[[], Any]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def in_turn(functions: Sequence[Callable[[], float]], rounds: int, what: str) -> list[tuple[float, ...]]:
    """What the functions return, called one after the other, `rounds` times."""
    found = []
    with progress_bar(rounds, 0, "round", what) as bar:
        for _ in range(rounds):
            found.append(tuple(function() for function in functions))
            bar.update()
    return found


def spread(values: Iterable[float]) -> dict[str, float]:
    values = list(values)
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def in_words(values: dict[str, float], digits: int = 2) -> str:
    """median (min to max)."""
    return "{median:.{d}f} ({min:.{d}f} to {max:.{d}f})".format(d=digits, **values)


def peak_memory() -> float:
    """GB of this process at the most. Not getrusage's, which is also that of the parent before this program began."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024 / 1e9


def parser_of(description: str) -> argparse.ArgumentParser:
    """With the option that every benchmark has: --json, read by run_all.py."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write ratios and figures there")
    return parser


def finish(file: str | None, ratios: dict[str, dict[str, float]], figures: dict[str, Any]) -> None:
    """Print the ratios, and write everything to the file if there is one."""
    for name, values in ratios.items():
        print(f"{name}: {in_words(values)}", flush=True)
    if file:
        Path(file).write_text(json.dumps({"ratios": ratios, "figures": figures}, indent=2) + "\n")


def whole_design(name: str, overrides: Sequence[str]) -> Config:
    """A shipped configuration with all the networks that it has: the reference trains the adversary always."""
    config = load_config(ROOT / name, overrides)
    config.adversarial.enabled = config.model.architecture == "triple_gru"
    return config


def config_for(name: str, data: Path, overrides: Sequence[str] = ()) -> Config:
    """A shipped configuration, in float32, on a data set of `write_noise`; a triple decoder's with its adversary."""
    sessions = sorted(path.name for path in Path(data).iterdir())
    return whole_design(
        name,
        [
            f"dataset.dataset_dir={data}",
            f"dataset.sessions={json.dumps(sessions)}",
            "dataset.dataset_probability_val=null",
            "use_amp=false",
            "gradient_accumulation_steps=1",
            "log_with=none",
            *overrides,
        ],
    )


def write_noise(
    root: Path,
    n_sessions: int,
    trials: dict[str, int],
    lengths: tuple[int, int, int] = LENGTHS,
    bins_a_label: int = 28,
    seed: int = 0,
) -> Path:
    """A data set of noise in the T15 layout, each of n_sessions with so many trials of each split.

    Args:
        lengths: least, most frequent and most bins of a trial (triangular).
        bins_a_label: of the random labels.
    """
    rng = np.random.default_rng(seed)
    least, _, most = lengths
    noise = rng.standard_normal((4 * most, N_FEATURES), dtype=np.float32)
    with progress_bar(n_sessions, 0, "session", "Writing noise") as bar:
        for number in range(n_sessions):
            session = f"t15.2030.{1 + number // 28:02d}.{1 + number % 28:02d}"
            (root / session).mkdir(parents=True)
            for split, n_trials in trials.items():
                with h5py.File(root / session / f"data_{split}.hdf5", "w") as file:
                    for i in range(n_trials):
                        n_bins = int(rng.triangular(*lengths)) if most > least else least
                        first = rng.integers(len(noise) - n_bins)
                        labels = rng.integers(1, 41, max(1, n_bins // bins_a_label))
                        padded = np.zeros(500, np.int32)
                        padded[: len(labels)] = labels
                        group = file.create_group(f"trial_{i:04d}")
                        group["input_features"] = noise[first : first + n_bins]
                        group["seq_class_ids"] = group["transcription"] = padded
                        group.attrs.update(
                            n_time_steps=n_bins, seq_len=len(labels), session=session, block_num=i // 20,
                            trial_num=i % 20, sentence_label="noise",
                        )  # fmt: skip
            bar.update()
    return root
