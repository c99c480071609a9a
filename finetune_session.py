"""Adapt a trained decoder to a new recording session from some of its trials.

    python finetune_session.py --model_path trained_models/mine --session t15.2030.02.06 --output_dir adapted
    python finetune_session.py ... --train everything          # all weights, not the day layer alone
    python finetune_session.py ... --trials 20                 # the first 20 of its train trials

The signal drifts between sessions: electrodes move, units come and go. The new session's day layer starts as the one
of the session nearest in date and is trained on the session's own data_train.hdf5. The result is a run directory whose
model knows the old sessions and the new one; with the day layer alone trained, the old ones decode as before. Where the
session has a data_val.hdf5, its PER before and after is shown.
"""

import argparse
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from backend import Backend
from checkpointing import check_parameters, find_checkpoint, load_checkpoint, save_checkpoint
from config import Config, check_config, config_from_dict, save_config
from dataset import EvalBatches, TrainBatches, make_loader
from dataset_index import DataError, Trial, index_splits
from evaluate_model_helpers import check_writable, write_text_atomically
from optimizer import make_optimizer
from rnn_model import build_model
from training_log import log_to_terminal, progress_bar
from training_step import INITIALISATION, TrainingStep
from validation import validate
from weight_transfer import take_weights

logger = logging.getLogger("b2txt")

PARTS = ("day_layer", "everything")
# Chosen on simulated drift (benchmarks/bench_finetune.py). A session's few trials are soon known by heart: with the
# training's own dropout and noise, ten times this rate and twice as many steps, the PER of a near session rose.
N_BATCHES = 100
LEARNING_RATE = 0.001
LEAST_DAY_DROPOUT, LEAST_RNN_DROPOUT, LEAST_WHITE_NOISE, LEAST_OFFSET = 0.3, 0.4, 1.0, 0.2
MOST_TRIALS_A_BATCH = 32


def finetune(
    model_path: str | Path,
    session: str,
    output_dir: str | Path,
    data_dir: str | Path | None = None,
    train: str = "day_layer",
    trials: int | None = None,
    num_batches: int = N_BATCHES,
    learning_rate: float = LEARNING_RATE,
    device: str | None = None,
) -> dict[str, Any]:
    """Add a session to a trained model, or adapt it to more trials of one that it knows.

    Args:
        model_path: run directory or checkpoint file, of the original decoder too.
        session: folder in the data set; it need not be one of the model's.
        output_dir: new run directory.
        data_dir: in place of the checkpoint's dataset_dir.
        train: 'day_layer' or 'everything'.
        trials: the first so many of the session's train trials, by block and trial number; None: all.
        num_batches: optimiser steps.
        learning_rate: at its highest.
        device: 'cpu', 'cuda', 'xla' or None to choose.
    Returns:
        session, started_from, train, n_trials, num_batches, and per_before and per_after on the session's val trials
        (None where there are none), which finetuning.json in output_dir holds too.
    Raises:
        ValueError: with what is wrong with the options, the checkpoint or the data, before anything is computed.
        FileExistsError: output_dir holds a checkpoint already.
    """
    session = session.rstrip("/")
    _check_options(session, train, trials, num_batches, learning_rate)
    path, _ = find_checkpoint(model_path)
    directory = Path(output_dir) / "checkpoint"
    if (directory / "best_checkpoint").exists():
        raise FileExistsError(f"{directory / 'best_checkpoint'}: there already; choose another --output_dir")
    checkpoint = load_checkpoint(path)
    whole = config_from_dict(checkpoint["config"])
    if data_dir is not None:
        whole.dataset.dataset_dir = str(Path(data_dir).absolute())
    config = _session_config(whole, session, train, num_batches, learning_rate)
    splits, undecodable = _session_trials(config, session, trials)
    config.dataset.batch_size = min(MOST_TRIALS_A_BATCH, len(splits["train"]))
    backend = Backend(device, use_amp=config.use_amp, gpu_number=config.gpu_number, use_tpu=config.use_tpu)
    if backend.world_size > 1:
        raise ValueError("finetuning runs in one process: start it with python, not a launcher")
    logger.info("%s", backend.description)
    backend.seed(config.seed, INITIALISATION)
    model = build_model(config)
    transfer = take_weights(model, config, checkpoint, path)
    check_writable(directory)
    model.to(backend.device)

    def rate_of_errors() -> float | None:
        if not splits["val"] and not undecodable:
            return None
        batches = EvalBatches(splits["val"], config)
        return validate(model, make_loader(batches, config), splits["val"], config, backend, undecodable)["avg_PER"]

    results = {"session": session, "started_from": transfer.sessions[session], "train": train}
    results |= {"n_trials": len(splits["train"]), "num_batches": num_batches, "per_before": rate_of_errors()}
    _train(model, config, splits["train"], backend)
    results["per_after"] = rate_of_errors()
    _write(model, checkpoint, whole, session, results, directory)
    return results


def _check_options(session: str, train: str, trials: int | None, num_batches: int, learning_rate: float) -> None:
    problems = []
    if Path(session).name != session:
        problems.append(
            f"--session is the name of a folder in the data set, not {session!r}; --data_dir says where it is"
        )
    if train not in PARTS:
        problems.append(f"--train is one of {', '.join(PARTS)}, not {train!r}")
    for name, value in (("trials", trials), ("num_batches", num_batches)):
        if value is not None and value < 1:
            problems.append(f"--{name} is 1 or more, not {value}")
    if not learning_rate > 0:
        problems.append(f"--learning_rate is above 0, not {learning_rate}")
    if problems:
        raise ValueError("\n".join(problems))


def _session_config(whole: Config, session: str, train: str, num_batches: int, learning_rate: float) -> Config:
    """The model's settings with the one session and a schedule of its own: a short warm-up, then a cosine to zero."""
    config, everything = whole.copy(), train == "everything"
    config.init_from_checkpoint, config.init_checkpoint_path = False, None
    config.adversarial.enabled = False  # the adversary needs more than a session's trials to learn from
    config.model.rnn_trainable = config.model.output_trainable = everything
    config.model.input_network.input_trainable = True
    config.gradient_accumulation_steps, config.num_training_batches = 1, num_batches
    config.lr_scheduler_type = "cosine"
    for group in ("", "_day"):
        config[f"lr_max{group}"], config[f"lr_min{group}"] = learning_rate, 0.0
        config[f"lr_decay_steps{group}"] = num_batches
        config[f"lr_warmup_steps{group}"] = num_batches // 10
    model, dataset = config.model, config.dataset
    transforms, network = dataset.data_transforms, model.input_network
    for section, name, least in (
        (model, "rnn_dropout", LEAST_RNN_DROPOUT),
        (network, "input_layer_dropout", LEAST_DAY_DROPOUT),
        (transforms, "white_noise_std", LEAST_WHITE_NOISE),
        (transforms, "constant_offset_std", LEAST_OFFSET),
    ):
        section[name] = max(section[name], least)
    dataset.sessions, dataset.dataset_probability_val, dataset.must_include_days = [session], None, None
    dataset.n_time_buckets = 1
    dataset.bad_trials_dict = {
        name: blocks for name, blocks in (dataset.bad_trials_dict or {}).items() if name == session
    } or None
    check_config(config)
    return config


def _session_trials(config: Config, session: str, n_trials: int | None) -> tuple[dict[str, list[Trial]], list[Trial]]:
    """Trials of 'train' and, where the session has the file, 'val'; and val trials that cannot be decoded."""
    root = Path(config.dataset.dataset_dir)
    if root.is_dir() and not (root / session).is_dir():
        there = sorted(path.name for path in root.iterdir() if path.is_dir())
        raise DataError([f"{root} has no session {session!r}; it has {', '.join(there) or 'none'}"])
    has_val = (root / session / "data_val.hdf5").is_file()
    left_out: list = []
    splits = {"val": []} | index_splits(config, ("train", "val") if has_val else ("train",), left_out=left_out)
    if not splits["train"]:
        raise DataError([f"{session}: no train trial can be used"])
    if n_trials is not None and n_trials > len(splits["train"]):
        logger.info("%s has %d train trials that can be used", session, len(splits["train"]))
    if n_trials is not None:
        splits["train"] = splits["train"][:n_trials]
    return splits, [trial for trial, _ in left_out if trial.split == "val"]


def _train(model: torch.nn.Module, config: Config, trials: Sequence[Trial], backend: Backend) -> None:
    step = TrainingStep(model, make_optimizer(model, config, backend.device), config, backend)
    n_batches = config.num_training_batches
    loader = make_loader(TrainBatches(trials, config), config, end=n_batches)
    with progress_bar(n_batches, 0, "batch", "Finetuning") as progress:
        for number, batch in enumerate(loader):
            metrics = step([batch], number)
            if number % 20 == 0 or number == n_batches - 1:
                loss = float(metrics[0])
                if not loss < float("inf"):
                    raise ValueError(f"training diverged at batch {number + 1}: try a lower --learning_rate")
                progress.set_postfix_str(f"loss {loss:.2f}", refresh=False)
            progress.update()


def _write(
    model: torch.nn.Module,
    checkpoint: Mapping[str, Any],
    whole: Config,
    session: str,
    results: Mapping[str, Any],
    directory: Path,
) -> None:
    """The checkpoint of all sessions, its settings, and what was reached."""
    dataset, before = whole.dataset, checkpoint["model_state_dict"]
    if session not in dataset.sessions:
        if dataset.dataset_probability_val is not None:
            dataset.dataset_probability_val = [*dataset.dataset_probability_val, 1]
        dataset.sessions = [*dataset.sessions, session]
    place = dataset.sessions.index(session)
    parameters = {}
    for name, value in model.state_dict().items():
        value = value.cpu()
        if "day_layers." in name:
            value = torch.cat([before[name][:place], value, before[name][place + 1 :]])
        parameters[name] = value
    whole.init_from_checkpoint, whole.init_checkpoint_path = False, None
    whole.output_dir = str(directory.parent)
    with torch.device("meta"):
        check_parameters(build_model(whole), parameters, directory)
    state = {key: value for key, value in checkpoint.items() if key not in ("optimizer_state_dict", "history", "best")}
    per = float("nan") if results["per_after"] is None else results["per_after"]
    state |= {"model_state_dict": parameters, "config": whole.to_dict(), "sessions": list(dataset.sessions)}
    save_checkpoint(state | {"val_PER": per, "val_loss": float("nan")}, directory / "best_checkpoint")
    save_config(whole, directory / "args.yaml")
    write_text_atomically(directory.parent / "finetuning.json", json.dumps(results, indent=2) + "\n")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; its names are those of `finetune`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--model_path", required=True, help="run directory or checkpoint file")
    add("--session", required=True, help="folder in the data set, as t15.2025.04.13")
    add("--output_dir", required=True, help="the run directory to write")
    add("--data_dir", help="the data set (default: the checkpoint's)")
    add("--train", choices=PARTS, default="day_layer", help="what is trained (default: the day layer alone)")
    add("--trials", type=int, help="the first so many train trials (default: all)")
    add("--num_batches", type=int, default=N_BATCHES, help=f"optimiser steps (default: {N_BATCHES})")
    add("--learning_rate", type=float, default=LEARNING_RATE, help=f"at its highest (default: {LEARNING_RATE})")
    add("--device", choices=("cpu", "cuda", "xla"), help="default: a TPU if there is one, else CUDA, else the CPU")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 2 for what the user can put right, 130 for Ctrl-C."""
    options = parse_arguments(arguments)
    log_to_terminal()
    try:
        results = finetune(**vars(options))
    except (ValueError, OSError, MemoryError) as error:
        print(f"finetune_session.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("finetune_session.py: interrupted; nothing was written", file=sys.stderr)
        return 130
    before, after = results["per_before"], results["per_after"]
    work = f"{results['n_trials']} trials, {results['num_batches']} steps"
    print(f"{results['session']}: {results['train']} trained on {work}")
    if after is None:
        print("it has no val trials: its PER is not known")
    else:
        print(f"val PER {before:.1%} with the day layer of {results['started_from']}, {after:.1%} now")
        print(f"evaluate, with the data of all its sessions: evaluate_model.py --model_path {options.output_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
