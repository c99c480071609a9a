"""A data set of a few trials in the T15 layout, a run of a model of random parameters on it, and its evaluation."""

import csv
from dataclasses import fields
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

import evaluate_model
from checkpointing import save_checkpoint
from config import config_from_dict, save_config
from rnn_model import build_model
from synthetic_data import write_trial
from word_evaluation import WordOptions

LEXICON = str(Path(__file__).parent / "words.dict")
N_FEATURES = 6
# Not in the order of their dates: the submission's order must not rest on the configuration's.
SESSIONS = ["t15.2023.08.13", "t15.2023.08.11"]
# (block, trial, time bins), in an order in which they must not come out. Patches are 4 bins, stride 2.
TRIALS = {
    "t15.2023.08.13": [(10, 0, 30), (9, 11, 41), (9, 2, 3)],
    "t15.2023.08.11": [(2, 0, 64), (2, 1, 17)],
}
IN_ORDER = [
    ("t15.2023.08.11", 2, 0),
    ("t15.2023.08.11", 2, 1),
    ("t15.2023.08.13", 9, 2),  # shorter than one patch
    ("t15.2023.08.13", 9, 11),
    ("t15.2023.08.13", 10, 0),
]
TOO_SHORT = 2  # its place
DESCRIPTION = "Date,Block number,Corpus\n2023-08-11,2,50-Word\n2023-08-13,9,Switchboard\n2023-08-13,10,50-Word\n"


def write_split(root: Path, split: str, labelled: bool) -> None:
    rng = np.random.default_rng(0)
    for session, trials in TRIALS.items():
        (root / session).mkdir(parents=True, exist_ok=True)
        with h5py.File(root / session / f"data_{split}.hdf5", "w") as file:
            for i, (block, number, bins) in enumerate(trials):
                labels = rng.integers(1, 41, size=3).tolist() if labelled else None
                features = rng.normal(size=(bins, N_FEATURES))
                write_trial(
                    file, f"trial_{i:04d}", features, session, block, number, labels, "a b" if labelled else None
                )


def make_config(root: Path):
    return config_from_dict(
        {
            "output_dir": str(root / "run"),
            "use_amp": False,
            "log_with": "none",
            "model": {
                "n_input_features": N_FEATURES,
                "n_units": 8,
                "noise_units": 8,
                "patch_size": 4,
                "patch_stride": 2,
                "day_layers": "shared",
                "input_network": {"input_layer_sizes": [N_FEATURES]},
            },
            "adversarial": {"enabled": True},
            "dataset": {
                "dataset_dir": str(root / "data"),
                "neural_dim": N_FEATURES,
                "batch_size": 2,
                "sessions": SESSIONS,
                "data_transforms": {"smooth_kernel_size": 20},
            },
        }
    )


def checkpoint_of(model, config, step=7) -> dict:
    transforms, dataset = config.dataset.data_transforms, config.dataset
    return {
        "model_state_dict": model.state_dict(),
        "step": step,
        "config": config.to_dict(),
        "preprocessing": {key: transforms[key] for key in transforms if key.startswith("smooth")},
        "sessions": dataset.sessions,
    }


def lively_model(config, seed=0):
    """A model that emits many phonemes, others in each session: large weights, other day layers each day."""
    torch.manual_seed(seed)
    model = build_model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def make_run(root: Path) -> None:
    """In `root`: data/ with val and test, description.csv, and run/ with a best_checkpoint."""
    write_split(root / "data", "val", labelled=True)
    write_split(root / "data", "test", labelled=False)
    (root / "description.csv").write_text(DESCRIPTION)
    config = make_config(root)
    save_checkpoint(checkpoint_of(lively_model(config), config), root / "run" / "checkpoint" / "best_checkpoint")
    save_config(config, root / "run" / "checkpoint" / "args.yaml")


def evaluate(*arguments, **options) -> dict[str, Any]:
    """`evaluate_model.evaluation` with the tests' lexicon, the options of sentences among the others."""
    words = {field.name: options.pop(field.name) for field in fields(WordOptions) if field.name in options}
    return evaluate_model.evaluation(*arguments, **options, word_options=WordOptions(**{"lexicon": LEXICON} | words))


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))
