"""Small hand-made data sets in the T15 layout, for tests that need to know exactly what is on disk."""

from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np

from config import Config, config_from_dict
from synthetic_data import write_trial

SESSIONS = ("t15.2023.08.11", "t15.2023.08.13", "t15.2023.08.18")
N_FEATURES = 6
TRIALS_A_BLOCK = 10


def write_split(
    root: Path,
    session: str,
    split: str,
    lengths: Sequence[int],
    labels: Sequence[int] = (5, 5, 40),
    seed: int = 0,
    n_features: int = N_FEATURES,
) -> Path:
    """One file of trials of the given lengths, block 1 trial 0 to 9, block 2 and so on; unlabelled for 'test'."""
    path = Path(root) / session / f"data_{split}.hdf5"
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng([seed, *session.encode(), *split.encode()])
    with h5py.File(path, "w") as file:
        for i, length in enumerate(lengths):
            features = rng.normal(size=(length, n_features)).astype(np.float32)
            block, trial = 1 + i // TRIALS_A_BLOCK, i % TRIALS_A_BLOCK
            with_labels = () if split == "test" else (list(labels), "a sentence")
            write_trial(file, f"trial_{i:04d}", features, session, block, trial, *with_labels)
    return path


def write_data_set(root: Path, n_trials: int = 8, sessions: Sequence[str] = SESSIONS) -> Path:
    """Train, val and test of each session, but train only of the first; lengths between 40 and 119 bins."""
    rng = np.random.default_rng(0)
    for session in sessions:
        for split in ("train",) if session == sessions[0] else ("train", "val", "test"):
            write_split(root, session, split, rng.integers(40, 120, n_trials).tolist())
    return Path(root)


def small_config(root: Path, sessions: Sequence[str] = SESSIONS, **dataset) -> Config:
    """A checked configuration for such a data set; keywords are keys of its dataset section."""
    values = {
        "adversarial": {},
        "model": {"n_input_features": N_FEATURES, "input_network": {"input_layer_sizes": [N_FEATURES]}},
        "dataset": {
            "dataset_dir": str(root),
            "sessions": list(sessions),
            "dataset_probability_val": [1] * len(sessions),
            "neural_dim": N_FEATURES,
            "batch_size": 4,
            "days_per_batch": 2,
            "n_time_buckets": 3,
            **dataset,
        },
    }
    return config_from_dict(values)
