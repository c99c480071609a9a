"""Does the NoiseModel help? Trains decoders with and without it on data whose noise is known, and measures.

    python experiments/denoising_study.py               # the whole study, on simulated data; 2.5 hours on 2 cores
    python experiments/denoising_study.py --ablate rnn_args_compact.yaml --data_dir data/hdf5_data_final

Stopped at any time, the same command goes on. Each training is a line of JSON in <output_dir>/results.jsonl;
`python experiments/denoising_report.py` makes tables and pictures of it.

Three decoders with the same batches: the single GRU of the original with five layers; the triple decoder with
`adversarial.enabled: false`, so that nothing keeps speech out of the noise estimate; and the triple decoder with
gradient reversal. The single GRU is given so many units that it has the parameters which the triple decoder decodes
with (all but the NoisySpeechModel). Each is tuned by the same rule: of the learning rates RATES the best on seeds that
have no part in the results, and while that is the lowest or the highest, one further.

With --ablate the same comparison runs on any data with any configuration: PER and WER of the best checkpoint.
"""

import argparse
import dataclasses
import json
import logging
import multiprocessing
import os
import shutil
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a training has a core of its own; before torch is imported

import torch  # noqa: E402
from denoising_measures import noise_measures  # noqa: E402

from config import Config, load_config  # noqa: E402
from dataset import EvalBatches, make_loader  # noqa: E402
from dataset_index import Trial, index_trials  # noqa: E402
from evaluate_model import evaluation  # noqa: E402
from machine import die_with  # noqa: E402
from rnn_model import build_model  # noqa: E402
from rnn_trainer import BrainToTextDecoder_Trainer, TrainingDiverged  # noqa: E402
from synthetic_data import simulate  # noqa: E402
from training_log import progress_bar  # noqa: E402
from word_evaluation import WordOptions  # noqa: E402

SINGLE, TRIPLE, ADVERSARIAL = "single GRU", "triple, no adversary", "triple, gradient reversal"
DECODERS = {
    SINGLE: ("model.architecture=gru", "adversarial.enabled=false", "model.n_layers=5"),
    TRIPLE: ("adversarial.enabled=false",),
    ADVERSARIAL: (),
}
NOISES = (0.0, 1.0, 2.0)  # variance of the structured noise, as a multiple of the simulator's
NEW_NOISE = 0.3  # share of a feature's variance of the noise that no training has seen
RATES = (0.01, 0.02, 0.04)
TUNING_SEEDS, SEEDS, SENSITIVITY_SEEDS = (1, 2), (10, 11, 12, 13), (10, 11, 12)
BATCHES = 300
PROBED_TRIALS = 30  # of each session's train trials, for the probe and the linear estimate

# What is changed from the quickstart's: lambda 0.5, weight 0.2, no L2, warm-up 200, 128 units.
SENSITIVITY = {
    ADVERSARIAL: (
        *((f"adversarial.grl_lambda={value}",) for value in (0, 0.1, 1, 10)),
        *((f"adversarial.noisy_loss_weight={value}",) for value in (0.05, 1)),
        *((f"adversarial.noise_l2_weight={value}",) for value in (30, 1000)),
        *((f"model.noise_units={value}",) for value in (32, 512)),
        ("adversarial.warmup_steps=0",),
        ("adversarial.warmup_steps=0", "adversarial.grl_lambda=10"),
    ),
    TRIPLE: (("adversarial.noise_l2_weight=1000",),),
    SINGLE: (),
}


@dataclasses.dataclass(frozen=True)
class Run:
    """One training: what differs between them."""

    decoder: str
    learning_rate: float
    seed: int
    noise: float | None = 1.0  # of the simulated data; None where the data are given
    settings: tuple[str, ...] = ()
    batches: int | None = BATCHES  # None: the configuration's

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Run":
        return cls(**{**values, "settings": tuple(values["settings"])})

    @property
    def name(self) -> str:
        """For a directory."""
        parts = [self.decoder, self.noise, f"lr {self.learning_rate}", self.seed, *self.settings]
        text = " ".join(str(part) for part in parts if part is not None)
        return "".join(c if c.isalnum() or c in ".=" else "_" for c in text)


class Results:
    """The lines of results.jsonl: {"run": ..., "results": ...}, one a training that was completed.

    Raises:
        ValueError: a line that is none of this study's.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.done = path, {}
        if not path.exists():
            return
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        for number, line in enumerate(content[:whole].splitlines(), 1):
            try:
                entry = json.loads(line)
                self.done[Run.from_dict(entry["run"])] = entry["results"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: is no result of this study ({error})") from error
        if whole < len(content):  # a kill came in the midst of a line
            os.truncate(path, whole)

    def add(self, run: Run, results: dict[str, Any]) -> None:
        self.done[run] = results
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"run": dataclasses.asdict(run), "results": results}) + "\n")
            file.flush()
            os.fsync(file.fileno())


# ---- the plan ----


def tuned_rate(decoder: str, done: dict[Run, dict[str, Any]], like: Run) -> tuple[float | None, list[Run]]:
    """The learning rate of the lowest mean val PER over the tuning seeds, and the trainings still needed to know it."""
    rates = list(RATES)
    while True:
        runs = {
            rate: [dataclasses.replace(like, decoder=decoder, learning_rate=rate, seed=seed) for seed in TUNING_SEEDS]
            for rate in rates
        }
        missing = [run for of_rate in runs.values() for run in of_rate if run not in done]
        if missing:
            return None, missing
        best = min(rates, key=lambda rate: statistics.mean(done[run]["per"] for run in runs[rate]))
        if best == min(rates):
            rates.append(best / 2)
        elif best == max(rates):
            rates.append(best * 2)
        else:
            return best, []


def plan(done: dict[Run, dict[str, Any]]) -> tuple[list[Run], int]:
    """The trainings that can begin now and are not done, most important first; and how many the study has in all."""
    like, wanted, missing = Run("", 0.0, 0), [], []
    for decoder in DECODERS:
        rate, needed = tuned_rate(decoder, done, like)
        missing += needed
        if rate is None:
            continue
        main = [Run(decoder, rate, seed, noise) for seed in SEEDS for noise in NOISES]
        changed = [
            Run(decoder, rate, seed, settings=settings)
            for seed in SENSITIVITY_SEEDS
            for settings in SENSITIVITY[decoder]
        ]
        wanted += main + changed
    # Seed by seed, so that a study that was stopped has something of everything.
    missing += sorted((run for run in wanted if run not in done), key=lambda run: (run.seed, len(run.settings)))
    total = len(DECODERS) * len(NOISES) * len(SEEDS)
    total += len(SENSITIVITY_SEEDS) * sum(len(changes) for changes in SENSITIVITY.values())
    tuning = [run for run in {*done, *missing} if run.seed in TUNING_SEEDS]
    return missing, total + max(len(tuning), len(DECODERS) * len(RATES) * len(TUNING_SEEDS))


# ---- one training ----


def matched_units(config: Config) -> int:
    """Units of a single GRU of five layers with as many parameters as a triple decoder decodes with."""

    def parameters(settings: Config) -> int:
        with torch.device("meta"):
            named = build_model(settings).named_parameters()
            return sum(p.numel() for name, p in named if not name.startswith("noisy_speech_model"))

    wanted, single = parameters(config), config.copy()
    single.model.architecture, single.adversarial.enabled, single.model.n_layers = "gru", False, 5
    low, high = 1, 2 * config.model.noise_units + 2 * config.model.n_units
    while high - low > 1:
        single.model.n_units = middle = (low + high) // 2
        low, high = (middle, high) if parameters(single) <= wanted else (low, middle)
    return low


def run_config(run: Run, config_path: Path, data: Path, output_dir: Path, overrides: Sequence[str]) -> Config:
    """The configuration of a run: of the file, with what the run changes."""
    settings = [*overrides, *DECODERS[run.decoder], f"lr_max={run.learning_rate}", f"seed={run.seed}", *run.settings]
    if run.batches is not None:
        names = ("num_training_batches", "lr_decay_steps", "lr_decay_steps_day")
        settings += [f"{name}={run.batches}" for name in names]
    if run.decoder == SINGLE:
        settings.append(f"model.n_units={matched_units(load_config(config_path, list(overrides)))}")
    config = load_config(config_path, settings)
    config.dataset.dataset_dir, config.output_dir = str(data), str(output_dir)
    return config


def train(config: Config, device: str | None = None) -> tuple[BrainToTextDecoder_Trainer, str | None]:
    """Train, or go on with a training that was interrupted; with what diverged, if it did."""
    trainer = BrainToTextDecoder_Trainer(config, device, existing="resume")
    if trainer.step < config.num_training_batches:
        try:
            trainer.train()
        except TrainingDiverged as error:
            return trainer, str(error)
    return trainer, None


def simulated_run(run: Run, folder: Path) -> dict[str, Any]:
    """Train on a simulated set and measure on its val trials and on those of the other sets."""
    directory = folder / "runs" / run.name
    overrides = [
        "log_with=none", "save_best_checkpoint=false", "save_val_metrics=false",
        f"batches_per_val_step={run.batches // 3}", "batches_per_train_log=50",
    ]  # fmt: skip
    config = run_config(run, ROOT / "rnn_args_quickstart.yaml", data_set(folder, run.noise), directory, overrides)
    config.dataset.sessions = sorted(path.name for path in Path(config.dataset.dataset_dir).iterdir() if path.is_dir())
    trainer, diverged = train(config, "cpu")
    if diverged:
        shutil.rmtree(directory)
        return {"diverged": diverged, "per": 1.0, "wer": 1.0}
    if run.seed in TUNING_SEEDS:
        shutil.rmtree(directory)
        return {"per": trainer.val_PERs[-1]}
    found = evaluation(directory, word_options=WordOptions(decoder_processes=1), device="cpu")
    results = {name: found[name] for name in ("per", "edits", "phonemes", "wer", "word_edits", "words")}
    results["parameters"] = sum(parameter.numel() for parameter in trainer.model.parameters())
    results["per_by_noise"] = {str(run.noise): found["per"]}
    for noise, new in [*((noise, False) for noise in NOISES if noise != run.noise), (run.noise, True)]:
        per = per_on(trainer, data_set(folder, noise, new))
        if new:
            results["per_new_noise"] = per
        else:
            results["per_by_noise"][str(noise)] = per
    few = [trial for day in range(len(config.dataset.sessions)) for trial in _of_day(trainer.train_trials, day)]
    results |= noise_measures(trainer.model, few, trainer.val_trials, config)
    results["noise_shares"] = [metrics["noise_share"] for metrics in trainer.val_metrics]
    shutil.rmtree(directory)
    return results


def _of_day(trials: Sequence[Trial], day: int) -> list[Trial]:
    return [trial for trial in trials if trial.day == day][:PROBED_TRIALS]


def per_on(trainer: BrainToTextDecoder_Trainer, data: Path) -> float:
    """PER on the val trials of another data set of the same sessions."""
    config = trainer.config.copy()
    config.dataset.dataset_dir = str(data)
    return trainer.validation(make_loader(EvalBatches(index_trials(config, "val"), config), config))["avg_PER"]


def given_run(
    run: Run, config_path: Path, data: Path, folder: Path, device: str | None, overrides: Sequence[str]
) -> dict[str, Any]:
    """Train on given data; PER and WER of the best checkpoint."""
    directory = folder / "runs" / run.name
    trainer, diverged = train(run_config(run, config_path, data, directory, overrides), device)
    trainer.backend.finish()
    if diverged:
        return {"diverged": diverged, "per": 1.0, "wer": 1.0}
    found = evaluation(directory, device=device)
    results = {name: found[name] for name in ("per", "edits", "phonemes", "wer", "word_edits", "words")}
    results["parameters"] = sum(parameter.numel() for parameter in trainer.model.parameters())
    return results | {"noise_shares": [metrics["noise_share"] for metrics in trainer.val_metrics]}


# ---- the simulated data ----


def data_set(folder: Path, noise: float, new: bool = False) -> Path:
    return folder / "data" / (f"noise_{noise:g}" + ("_new" if new else ""))


def make_data(folder: Path) -> None:
    """The quickstart's data with twice its val trials: the same sentences and tuning in all sets."""
    for noise in NOISES:
        for new in (False, True):
            directory = data_set(folder, noise, new)
            if not directory.exists():
                directory.parent.mkdir(parents=True, exist_ok=True)
                print(f"simulating {directory}", file=sys.stderr)
                simulate(
                    directory, sessions=4, trials=(200, 60, 0),
                    speaking_rate=6.0, speech_variance=0.1, words_per_sentence=(2, 4),
                    structured_noise=noise, new_noise=NEW_NOISE if new else 0.0, write_parts=not new,
                )  # fmt: skip


# ---- the commands ----


def study(folder: Path, processes: int) -> Results:
    """All trainings of the plan that are not done yet, so many at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    results = Results(folder / "results.jsonl")
    make_data(folder)
    context = multiprocessing.get_context("spawn")
    missing, total = plan(results.done)
    with (
        ProcessPoolExecutor(processes, context, _begin_worker, (os.getpid(), folder)) as pool,
        progress_bar(total, total - len(missing), "training", "Study") as bar,
    ):
        running = {}
        while True:
            missing, bar.total = plan(results.done)
            for run in missing:
                if len(running) < processes and run not in running.values():
                    running[pool.submit(simulated_run, run, folder)] = run
            if not running:
                return results
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                run = running.pop(future)
                results.add(run, future.result())
                bar.update()
                bar.set_postfix_str(f"PER {results.done[run]['per']:.1%}, {run.decoder}")


def _begin_worker(parent: int, folder: Path) -> None:
    """What a training says goes to a file: the terminal has the study's progress."""
    die_with(parent)
    log = os.open(folder / f"worker_{os.getpid()}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--output_dir", default="trained_models/denoising_study", help="data, runs and results")
    add("--processes", type=int, default=os.cpu_count(), help="trainings at a time (as many as cores)")
    options = parser.parse_args(arguments)
    logging.getLogger("b2txt").setLevel(logging.WARNING)
    study(Path(options.output_dir), options.processes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
