"""The decoders that the study compares, one training of one of them, and the file of results.

Four decoders, trained on the same batches. The single GRU of the original with its five layers has so many units that
its parameters are as many as those which the triple decoder decodes with (all but the NoisySpeechModel). The
CleanSpeechModel alone is the triple decoder without a noise estimate: the same layers, half of the parameters. The
triple decoder with `adversarial.enabled: false` has nothing that keeps speech out of the noise estimate; with gradient
reversal it is the whole design.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from checkpointing import latest_checkpoint
from config import Config, load_config
from rnn_model import build_model
from rnn_trainer import BrainToTextDecoder_Trainer, TrainingDiverged

SINGLE, CLEAN = "single GRU", "clean speech model alone"
TRIPLE, ADVERSARIAL = "triple, no adversary", "triple, gradient reversal"
DECODERS = {
    SINGLE: ("model.architecture=gru", "adversarial.enabled=false", "model.n_layers=5"),
    CLEAN: ("model.architecture=gru", "adversarial.enabled=false"),
    TRIPLE: ("adversarial.enabled=false",),
    ADVERSARIAL: ("adversarial.enabled=true",),
}
TUNING_SEEDS = (1, 2)  # with which the learning rate is chosen; they have no part in the results
RATES_OF_A_RUN = ("per", "edits", "phonemes", "wer", "word_edits", "words")


@dataclasses.dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        decoder: of DECODERS.
        learning_rate: lr_max; that of the day layers is the configuration's.
        noise: variance of the simulated structured noise, as a multiple of the default; None where data are given.
        settings: key=value, changed from the configuration.
        batches: length of the training; None for the configuration's.
        base: configuration and data where they are given, as `base_of` names them.
    """

    decoder: str
    learning_rate: float
    seed: int
    noise: float | None = 1.0
    settings: tuple[str, ...] = ()
    batches: int | None = None
    base: str = ""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Run":
        return cls(**{**values, "settings": tuple(values["settings"])})

    @property
    def name(self) -> str:
        """For a directory."""
        parts = [
            self.decoder,
            self.noise,
            f"lr {self.learning_rate}",
            self.seed,
            *self.settings,
            self.batches,
            self.base,
        ]
        text = " ".join(str(part) for part in parts if part not in (None, ""))
        return "".join(c if c.isalnum() or c in ".=-" else "_" for c in text)


class Results:
    """The lines of results.jsonl, {"run": ..., "results": ...}: one a training that was completed.

    A line that a kill has cut short is taken off.

    Attributes:
        done: the results of each run.
    Raises:
        ValueError: a line that is no result of a run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[Run, dict[str, Any]] = {}
        if not path.exists():
            return
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        for number, line in enumerate(content[:whole].splitlines(), 1):
            try:
                entry = json.loads(line)
                self.done[Run.from_dict(entry["run"])] = dict(entry["results"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: is no result of a training ({error}): remove it") from error
        if whole < len(content):
            os.truncate(path, whole)

    def add(self, run: Run, results: dict[str, Any]) -> None:
        self.done[run] = results
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"run": dataclasses.asdict(run), "results": results}) + "\n")
            file.flush()
            os.fsync(file.fileno())


def n_decoding_parameters(config: Config) -> int:
    """Parameters that decoding needs: all but those of the NoisySpeechModel."""
    with torch.device("meta"):
        named = build_model(config).named_parameters()
        return sum(p.numel() for name, p in named if not name.startswith("noisy_speech_model"))


def matched_units(config: Config) -> int:
    """Units of a single GRU of five layers with as many parameters as a triple decoder decodes with, or just fewer."""
    wanted, single = n_decoding_parameters(config), config.copy()
    single.model.architecture, single.adversarial.enabled, single.model.n_layers = "gru", False, 5
    low, high = 1, 2 * (config.model.noise_units + config.model.n_units)
    while high - low > 1:
        single.model.n_units = middle = (low + high) // 2
        low, high = (middle, high) if n_decoding_parameters(single) <= wanted else (low, middle)
    return low


def run_config(run: Run, config_path: Path, data: Path, output_dir: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a run: that of the file with `overrides`, then with what the run changes.

    Raises:
        ConfigError: of a configuration that is none, or cannot be changed so.
    """
    settings = [*overrides, "model.architecture=triple_gru"]
    triple = load_config(config_path, settings)
    settings += [*DECODERS[run.decoder], *run.settings]
    settings += [f"lr_max={run.learning_rate}", f"seed={run.seed}"]
    if run.batches is not None:
        names = ("num_training_batches", "lr_decay_steps", "lr_decay_steps_day")
        settings += [f"{name}={run.batches}" for name in names]
    if run.decoder == SINGLE:
        settings.append(f"model.n_units={matched_units(triple)}")
    config = load_config(config_path, settings)
    config.dataset.dataset_dir, config.output_dir = str(data), str(output_dir)
    config.checkpoint_dir = str(output_dir / "checkpoint")  # whatever the file says: each run has its own
    return config


def train(config: Config, device: str | None = None) -> tuple[BrainToTextDecoder_Trainer, str | None]:
    """Train, or go on where an interruption came.

    Returns:
        the trainer, and how the training diverged, if it did.
    """
    begun = latest_checkpoint(Path(config.checkpoint_dir)) is not None
    trainer = BrainToTextDecoder_Trainer(config, device, existing="resume" if begun else "overwrite")
    if trainer.step < config.num_training_batches and not trainer.stopped_early:
        try:
            trainer.train()
        except TrainingDiverged as error:
            return trainer, str(error)
    return trainer, None
