"""Does the NoiseModel help? Trains decoders with and without it on data whose noise is known, and measures.

    python experiments/denoising_study.py           # the whole study, on simulated data: about 2.5 hours on 2 cores
    python experiments/denoising_report.py --results trained_models/denoising_study/results.jsonl    # so far

    # the comparison alone, on any data, of any triple decoder: the table is shown at the end
    python experiments/denoising_study.py --ablate rnn_args_compact.yaml --data_dir data/hdf5_data_final

Stopped at any time, the same command goes on, with the trainings that it was in from their last validation (on
simulated data every 300 batches, which is all of most of them). Each training that is complete is a line of JSON in
<output_dir>/results.jsonl. What is compared stands in compared_decoders.py, what is measured in denoising_measures.py.

On simulated data each decoder is tuned by the same rule: of the learning rates RATES the best on seeds that have no
part in the results, and while that is the lowest or the highest tried, one further. The last weights are measured.

With --ablate each decoder is trained with each of --rates (by default the configuration's) and each of --seeds, and
the best checkpoint is evaluated as evaluate_model.py does it, with a 3-gram of the train sentences.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from compared_decoders import (
    ADVERSARIAL,
    CLEAN,
    DECODERS,
    RATES_OF_A_RUN,
    SINGLE,
    TRIPLE,
    TUNING_SEEDS,
    Results,
    Run,
    run_config,
    train,
)
from denoising_measures import noise_measures
from denoising_report import ablation_table

from config import Config, check_config, load_config
from dataset import EvalBatches, make_loader
from dataset_index import Trial, index_splits, index_trials
from evaluate_model import evaluation
from evaluate_model_helpers import check_writable
from machine import die_with, usable_cores
from rnn_trainer import BrainToTextDecoder_Trainer
from run_directory import hold_directory, release_directory
from synthetic_data import simulate
from text_rules import normalize
from training_log import log_to_terminal, progress_bar
from validation import look_at_trials, noise_share
from word_evaluation import WordOptions, make_words

NOISES = (0.0, 1.0, 2.0)  # variance of the structured noise, as a multiple of the simulator's
CONFIG = Path(__file__).resolve().parent.parent / "rnn_args_quickstart.yaml"
NEW_NOISE = 0.3  # share of a feature's variance of the noise that no training has seen
RATES = (0.02, 0.04)
SEEDS, FEWER_SEEDS = (10, 11, 12), (10, 11)  # of the decoders themselves; of what is changed, and of long trainings
BATCHES, MORE_BATCHES = 300, 900
# What each training of --ablate sets itself, so that --set cannot.
SET_BY_RUNS = ("model.architecture", "adversarial.enabled", "seed", "lr_max", "output_dir", "checkpoint_dir")
FITTED_TRIALS = 30  # of each session's train trials, for the probe and the linear estimate

# What is changed from the quickstart's: lambda 0.5, weight 0.2, no L2, warm-up 200, 128 units.
CHANGES = {
    ADVERSARIAL: (
        *((f"adversarial.grl_lambda={value}",) for value in (0, 0.1, 1, 10)),
        ("adversarial.noisy_loss_weight=1",),
        *((f"adversarial.noise_l2_weight={value}",) for value in (30, 1000)),
        *((f"model.noise_units={value}",) for value in (32, 512)),
        ("adversarial.warmup_steps=0",),
        ("adversarial.warmup_steps=0", "adversarial.grl_lambda=10"),
        ("adversarial.noise_l2_weight=30", "adversarial.grl_lambda=10"),
    ),
    TRIPLE: (("adversarial.noise_l2_weight=1000",),),
    SINGLE: (),
    CLEAN: (),
}


# ---- the plan of the study ----


def tuned_rate(decoder: str, done: Mapping[Run, Mapping[str, Any]]) -> tuple[float | None, list[Run]]:
    """The learning rate of the lowest mean val PER over the tuning seeds, or the trainings needed to know it."""
    rates = list(RATES)
    while True:
        runs = {rate: [Run(decoder, rate, seed, batches=BATCHES) for seed in TUNING_SEEDS] for rate in rates}
        missing = [run for of_rate in runs.values() for run in of_rate if run not in done]
        if missing:
            return None, missing
        best = min(rates, key=lambda rate: statistics.mean(done[run].get("per", 1.0) for run in runs[rate]))
        if min(rates) < best < max(rates):
            return best, []
        rates.append(best / 2 if best == min(rates) else best * 2)


def plan(done: Mapping[Run, Mapping[str, Any]]) -> tuple[list[Run], int, int]:
    """The trainings that can begin, in order; how many of the study are done; how many it has, as far as is known."""
    missing, wanted = [], []
    total = len(DECODERS) * (len(SEEDS) * len(NOISES) + len(FEWER_SEEDS))
    total += len(FEWER_SEEDS) * sum(len(changes) for changes in CHANGES.values())
    for decoder in DECODERS:
        rate, needed = tuned_rate(decoder, done)
        missing += needed
        if rate is not None:
            wanted += [Run(decoder, rate, seed, noise, (), BATCHES) for seed in SEEDS for noise in NOISES]
            for seed in FEWER_SEEDS:
                wanted += [Run(decoder, rate, seed, 1.0, settings, BATCHES) for settings in CHANGES[decoder]]
                wanted.append(Run(decoder, rate, seed, 1.0, (), MORE_BATCHES))
    # Seed by seed, so that a study that was stopped has something of everything.
    missing += sorted((run for run in wanted if run not in done), key=lambda run: (run.seed, len(run.settings)))
    tuning = {run for run in [*done, *missing] if run.seed in TUNING_SEEDS}
    n_done = sum(run in done for run in (*tuning, *wanted))
    return missing, n_done, total + max(len(tuning), len(DECODERS) * (len(RATES) + 1) * len(TUNING_SEEDS))


# ---- simulated data ----


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
                    directory,
                    sessions=4,
                    trials=(200, 60, 0),
                    speaking_rate=6.0,
                    speech_variance=0.1,
                    words_per_sentence=(2, 4),
                    structured_noise=noise,
                    new_noise=NEW_NOISE if new else 0.0,
                    write_parts=not new,
                )


def simulated_run(run: Run, folder: Path) -> dict[str, Any]:
    """Train on a simulated set and measure on its val trials and on those of the other sets."""
    directory, start = folder / "runs" / run.name, time.perf_counter()
    begun = directory.exists()
    overrides = ("log_with=none", "save_best_checkpoint=false", "save_val_metrics=false", "batches_per_train_log=50",
                 f"batches_per_val_step={min(run.batches, BATCHES)}")  # fmt: skip
    config = run_config(run, CONFIG, data_set(folder, run.noise), directory, overrides)
    trainer, diverged = train(config, "cpu")
    if diverged:
        results = {"diverged": diverged}
    elif run.seed in TUNING_SEEDS:
        results = {"per": trainer.val_PERs[-1]}
    else:
        results = _measure(run, trainer, folder)
    shutil.rmtree(directory)
    # Of a training that goes on after an interruption the time is not known.
    return results | {"seconds": None if begun else round(time.perf_counter() - start, 1)}


def _measure(run: Run, trainer: BrainToTextDecoder_Trainer, folder: Path) -> dict[str, Any]:
    config = trainer.config
    found = evaluation(config.output_dir, word_options=WordOptions(decoder_processes=1), device="cpu")
    results = {name: found[name] for name in RATES_OF_A_RUN}
    results["parameters"] = sum(parameter.numel() for parameter in trainer.model.parameters())
    results["per_new_noise"] = per_on(trainer, data_set(folder, run.noise, new=True))
    few: list[Trial] = []
    for day in range(len(config.dataset.sessions)):
        few += [trial for trial in trainer.train_trials if trial.day == day][:FITTED_TRIALS]
    return results | noise_measures(trainer.model, few, trainer.val_trials, config)


def per_on(trainer: BrainToTextDecoder_Trainer, data: Path) -> float:
    """PER on the val trials of another data set of the same sessions."""
    config = trainer.config.copy()
    config.dataset.dataset_dir = str(data)
    return trainer.validation(make_loader(EvalBatches(index_trials(config, "val"), config), config))["avg_PER"]


def study(folder: Path, processes: int) -> Results:
    """All trainings of the plan that are not done yet, so many at a time.

    Raises:
        FileExistsError: another process works on the same directory.
        ValueError: its results cannot be read, or it cannot be written to.
    """
    hold_directory(check_writable(folder))
    try:
        results = Results(folder / "results.jsonl")
        make_data(folder)
        missing, n_done, total = plan(results.done)
        context = multiprocessing.get_context("spawn")
        with (
            progress_bar(total, n_done, "training", "Study") as bar,
            ProcessPoolExecutor(processes, context, _begin_worker, (os.getpid(), folder, processes)) as pool,
        ):
            running: dict[Future, Run] = {}
            try:
                while missing or running:
                    for run in missing:
                        if len(running) < processes and run not in running.values():
                            running[pool.submit(simulated_run, run, folder)] = run
                    bar.refresh()  # a training takes minutes: show that time goes on
                    for future in wait(running, timeout=5, return_when=FIRST_COMPLETED).done:
                        run = running.pop(future)
                        results.add(run, future.result())
                        bar.update()
                        bar.set_postfix_str(f"PER {results.done[run].get('per', 1):.1%} by {run.decoder}")
                    missing, _, bar.total = plan(results.done)
            except BaseException:  # the pool would wait for its trainings, which can begin again
                for process in multiprocessing.active_children():
                    process.terminate()
                raise
        return results
    finally:
        release_directory(folder)


def _begin_worker(parent: int, folder: Path, processes: int) -> None:
    """What a training says goes to a file: the terminal has the study's progress. The cores are shared out."""
    die_with(parent)
    torch.set_num_threads(max(1, usable_cores() // processes))
    log = os.open(folder / f"worker_{os.getpid()}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)


# ---- the comparison on given data ----


def ablate(
    config_path: str | Path,
    folder: str | Path,
    data_dir: str | Path | None = None,
    seeds: Sequence[int] = SEEDS,
    rates: Sequence[float] | None = None,
    num_batches: int | None = None,
    device: str | None = None,
    overrides: Sequence[str] = (),
) -> Results:
    """Train every decoder with every rate and seed on given data, one after the other; PER and WER of each on val.

    Args:
        config_path: of the triple decoder; the others are made from it.
        folder: of runs and results.
        data_dir: in place of the configuration's.
        rates: lr_max; the configuration's where there are none.
        num_batches: in place of the configuration's.
        device: as for train_model.py.
        overrides: key=value.
    Returns:
        the results of these trainings.
    Raises:
        ValueError: with what is wrong with configuration, data or language model, before the first training.
        FileExistsError: another process works on the same directory.
    """
    folder = Path(folder)
    config = load_config(config_path, list(overrides))
    _check_is_ours(config, config_path, overrides, num_batches)
    data = Path(data_dir or config.dataset.dataset_dir).absolute()
    config.dataset.dataset_dir = str(data)
    settings = {name: value for name, value in config.to_dict().items() if not name.endswith("_dir")}
    base = hashlib.sha256(json.dumps([settings, str(data)], sort_keys=True).encode()).hexdigest()[:8]
    runs = [
        Run(decoder, rate, seed, None, (), num_batches, base)
        for seed in seeds
        for rate in rates or [config.lr_max]
        for decoder in DECODERS
    ]
    hold_directory(check_writable(folder))
    try:
        results = Results(folder / "results.jsonl")
        _check_ablation(runs, config_path, data, folder, overrides)
        for number, run in enumerate(runs, 1):
            if run not in results.done:
                print(
                    f"\n== training {number} of {len(runs)}: {run.decoder}, rate {run.learning_rate:g}, seed {run.seed}"
                )
                found = given_run(run, config_path, data, folder, device, overrides)
                results.add(run, found)
                print("diverged" if "diverged" in found else f"PER {found['per']:.2%}, WER {found['wer']:.2%}")
        results.done = {run: results.done[run] for run in runs}
        return results
    finally:
        release_directory(folder)


def _check_is_ours(config: Config, path: str | Path, overrides: Sequence[str], num_batches: int | None) -> None:
    """That the configuration is of a triple decoder, and no override is one that every training sets itself."""
    problems = []
    if config.model.architecture != "triple_gru":
        problems.append(
            f"{path}: model.architecture is {config.model.architecture}: the comparison takes the configuration of a "
            "triple decoder, such as rnn_args_compact.yaml, and makes the single GRU from it"
        )
    lengths = ("num_training_batches", "lr_decay_steps", "lr_decay_steps_day") if num_batches is not None else ()
    for override in overrides:
        if (key := override.partition("=")[0].strip()) in (*SET_BY_RUNS, *lengths):
            problems.append(f"--set {override}: each training sets {key} itself (see --seeds, --rates, --num_batches)")
    if problems:
        raise ValueError("\n".join(problems))


def _check_ablation(
    runs: Sequence[Run], config_path: str | Path, data: Path, folder: Path, overrides: Sequence[str]
) -> None:
    """What would fail after hours: every run's settings, the data, the language model."""
    log_to_terminal()
    for run in runs:
        check_config(config := run_config(run, config_path, data, folder / "runs" / run.name, overrides))
    references = [normalize(trial.sentence_label) for trial in index_splits(config, ("train", "val"))["val"]]
    with tempfile.TemporaryDirectory() as scratch:
        make_words(WordOptions(), config, references, Path(scratch), "val")


def given_run(
    run: Run, config_path: str | Path, data: Path, folder: Path, device: str | None, overrides: Sequence[str]
) -> dict[str, Any]:
    """Train on given data; PER and WER of the best checkpoint, the noise's share of the signal of the last weights."""
    directory = folder / "runs" / run.name
    trainer, diverged = train(run_config(run, config_path, data, directory, overrides), device)
    share = (
        None
        if diverged
        else noise_share(look_at_trials(trainer.model, trainer.val_trials, trainer.config, trainer.backend))
    )
    trainer.backend.finish()
    if diverged:
        return {"diverged": diverged}
    # One process: a pool would have to fork before the device was touched.
    found = evaluation(directory, word_options=WordOptions(decoder_processes=1), device=device)
    results = {name: found[name] for name in RATES_OF_A_RUN}
    results["parameters"] = sum(parameter.numel() for parameter in trainer.model.parameters())
    return results | {"noise_share": share}


# ---- the command ----


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--output_dir", help="data, runs and results (trained_models/denoising_study; with --ablate .../ablation)")
    add("--processes", type=int, help="trainings at a time, on simulated data (as many as cores)")
    add("--ablate", metavar="CONFIG", help="compare on given data, with this configuration of a triple decoder")
    add("--data_dir", help="the data set (the configuration's)")
    add("--seeds", type=int, nargs="+", help=f"of the trainings {SEEDS}")
    add("--rates", type=float, nargs="+", help="values of lr_max, each tried for each decoder (the configuration's)")
    add("--num_batches", type=int, help="length of each training (the configuration's)")
    add("--device", choices=("cpu", "cuda", "xla"), help="default: a TPU if there is one, else CUDA, else CPU")
    add("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="settings for all of them")
    options = parser.parse_args(arguments)
    names = ("data_dir", "seeds", "rates", "num_batches", "device", "set")
    given = [name for name in names if options.__dict__[name] not in (None, [])]
    if options.ablate is None and given:
        parser.error(f"--{given[0]} goes with --ablate; the study on simulated data is what this file says")
    if options.ablate is not None and options.processes is not None:
        parser.error("--processes is of the study on simulated data; with --ablate there is one training at a time")
    if options.processes is not None and options.processes < 1:
        parser.error(f"--processes is 1 or more, not {options.processes}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2 for what the user can put right, 130 for Ctrl-C."""
    options = parse_arguments(arguments)
    try:
        if options.ablate is None:
            folder = Path(options.output_dir or "trained_models/denoising_study")
            study(folder, options.processes or usable_cores())
            print(f"complete; to show it: python experiments/denoising_report.py --results {folder / 'results.jsonl'}")
        else:
            folder = Path(options.output_dir or "trained_models/ablation")
            results = ablate(
                options.ablate, folder, options.data_dir, options.seeds or SEEDS, options.rates, options.num_batches,
                options.device, options.set,
            )  # fmt: skip
            print(f"\n{ablation_table(results.done)}\n{folder / 'results.jsonl'}")
    except (ValueError, OSError, MemoryError) as error:
        print(f"denoising_study.py: {error}", file=sys.stderr)
        return 2
    except BrokenProcessPool:
        print(
            "denoising_study.py: a training was killed, as for want of memory (--processes 1 takes less); its last "
            f"words are in {folder}/worker_*.log; the same command goes on",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("denoising_study.py: interrupted; the same command goes on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
