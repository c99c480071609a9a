"""Evaluate a trained decoder: checkpoint -> logits -> phonemes -> error rates, predictions and submission.

    python evaluate_model.py                                          # the model of rnn_args.yaml, on val
    python evaluate_model.py --model_path trained_models/quickstart   # a run's directory or a checkpoint file
    python evaluate_model.py --model_path D --eval_type test          # writes submission_test.csv, of phonemes for now

The checkpoint carries its model, sessions and preprocessing, and these are used whatever the configuration
says. Results lie in the run's directory, or in --output_dir where that is read-only.
"""

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backend import DEVICES, Backend, BackendError
from checkpointing import CheckpointError, find_checkpoint, load_checkpoint
from config import Config, config_from_dict, load_config
from ctc import greedy_collapse, output_lengths
from dataset import EvalBatches, make_loader
from dataset_index import LISTED_AS_BAD, DataError, Trial, index_trials
from evaluate_model_helpers import (
    check_writable,
    confusions,
    corpora_of_blocks,
    count_errors,
    json_rate,
    name_confusions,
    prediction_rows,
    read_description,
    sum_errors,
    sum_errors_by,
    trial_order,
    write_predictions,
    write_submission,
    write_text_atomically,
)
from inference import batch_logits
from rnn_model import build_model
from training_log import log_to_terminal, progress_bar

logger = logging.getLogger("b2txt")

DEFAULT_CONFIG = Path(__file__).resolve().parent / "rnn_args.yaml"
EVAL_TYPES = ("val", "test")
N_CONFUSIONS = 10
# Settings of the model that decide nothing once it is trained (its input network is as wide as its features).
TRAINING_ONLY = ("rnn_dropout", "rnn_trainable", "input_network")
SMOOTHING = ("smooth_data", "smooth_kernel_std", "smooth_kernel_size")


def evaluation(
    model_path: str | Path | None = None,
    config_path: str | Path | None = None,
    eval_type: str = "val",
    data_dir: str | Path | None = None,
    csv_path: str | Path | None = None,
    output_dir: str | Path | None = None,
    batch_size: int | None = None,
    device: str | None = None,
    mixed_precision: bool = True,
) -> dict[str, Any]:
    """Decode the val or test split with a trained model and write the results.

    Args:
        model_path: run directory or checkpoint file; by default the output_dir of the configuration.
        config_path: gives the place of the data and the batch size; by default the checkpoint's own
            configuration, or rnn_args.yaml where there is no model_path either.
        eval_type: 'val' (error rates) or 'test' (submission).
        data_dir, batch_size: in place of the configuration's.
        csv_path: description of the blocks, for error rates a corpus.
        output_dir: of the results, by default the run directory.
        device: 'cpu', 'cuda', 'xla' or None to choose.
        mixed_precision: False for float32 also where the configuration has use_amp.
    Returns:
        what evaluation_val.json holds (no error rates for test), and `files`, the paths written.
    Raises:
        ValueError: with what is wrong with checkpoint, configuration, data or directories, before anything is
            computed.
    """
    if eval_type not in EVAL_TYPES:
        raise ValueError(f"eval_type is 'val' or 'test', not {eval_type!r}")
    given = load_config(config_path or DEFAULT_CONFIG) if config_path or model_path is None else None
    checkpoint_path, run_dir = _find_model(model_path, given, data_dir, eval_type)
    directory = check_writable(output_dir or run_dir)
    description = read_description(csv_path) if csv_path else None
    checkpoint = load_checkpoint(checkpoint_path)
    config = evaluation_config(checkpoint, given, data_dir, batch_size)
    trials, undecodable, notes = list_trials(config, eval_type)
    backend = Backend(
        device, use_amp=config.use_amp and mixed_precision, gpu_number=config.gpu_number, use_tpu=config.use_tpu
    )
    if backend.world_size > 1:
        raise BackendError("evaluation runs in one process: start it with `python evaluate_model.py`, not a launcher")
    logger.info("%s, step %s; %s", checkpoint_path, checkpoint["step"], backend.description)
    model = restore_model(checkpoint, config, checkpoint_path).to(backend.device)

    decodable = [trial for trial in trials if trial not in undecodable]
    config.dataset.batch_size = min(config.dataset.batch_size, max(1, len(decodable)))
    phonemes = dict(zip(decodable, decode(model, decodable, config, backend), strict=True))
    decoded = [phonemes.get(trial, []) for trial in trials]
    places = [(trial.session, trial.block_num, trial.trial_num) for trial in trials]
    corpora = None
    if description is not None:
        corpora = corpora_of_blocks([place[:2] for place in places], description)
    results = {
        "eval_type": eval_type,
        "checkpoint": str(checkpoint_path),
        "step": checkpoint["step"],
        "n_trials": len(trials),
    }
    predictions = directory / f"predictions_{eval_type}.csv"
    if eval_type == "val":
        truths = [trial.labels for trial in trials]
        results |= error_rates([trial.session for trial in trials], truths, decoded, corpora) | notes
        write_predictions(predictions, prediction_rows(places, decoded, truths, corpora), len(trials))
        summary = directory / "evaluation_val.json"
        write_text_atomically(summary, json.dumps(results, indent=2, allow_nan=False) + "\n")
    else:
        rows = prediction_rows(places, decoded, corpora=corpora)
        write_predictions(predictions, rows, len(trials))
        summary = directory / "submission_test.csv"
        write_submission(summary, rows, [row["predicted_phonemes"] for row in rows])
    return results | {"files": [str(predictions), str(summary)]}


# ---- what is evaluated: configuration, trials, model ----


def _find_model(
    model_path: str | Path | None, given: Config | None, data_dir: str | Path | None, eval_type: str
) -> tuple[Path, Path]:
    """Checkpoint file and run directory; where both the model and the data are missing, both are said at once."""
    try:
        # Without a model_path the configuration's own run is meant; its checkpoints may lie elsewhere.
        inside = model_path or Path(given.output_dir, "checkpoint") == Path(given.checkpoint_dir)
        return find_checkpoint(model_path or (given.output_dir if inside else given.checkpoint_dir))
    except CheckpointError as error:
        if given is not None:
            given.dataset.dataset_dir = str(data_dir or given.dataset.dataset_dir)
            if not Path(given.dataset.dataset_dir).is_dir():
                try:
                    index_trials(given, eval_type)
                except DataError as no_data:
                    raise CheckpointError(f"{error}\n{no_data}") from error
        raise


def evaluation_config(
    checkpoint: dict[str, Any],
    given: Config | None = None,
    data_dir: str | Path | None = None,
    batch_size: int | None = None,
) -> Config:
    """The checkpoint's own configuration, with the place of the data and the batch size from elsewhere.

    Other preprocessing than the model was trained with has cost people half of their accuracy without a word;
    so where `given` differs, that is said and not followed.
    """
    config = config_from_dict(checkpoint["config"])
    if given is not None:
        for line in differences(config, given):
            logger.warning("%s; the checkpoint's is used", line)
        for name in ("dataset_dir", "batch_size", "num_dataloader_workers", "bad_trials_dict"):
            config.dataset[name] = given.dataset[name]
        config.use_amp, config.gpu_number, config.use_tpu = given.use_amp, given.gpu_number, given.use_tpu
    if data_dir is not None:
        config.dataset.dataset_dir = str(data_dir)
    if batch_size is not None:
        config.dataset.batch_size = batch_size
    return config


def differences(own: Config, given: Config) -> list[str]:
    """One line for each setting of model, preprocessing and sessions in which the two differ."""
    ours, theirs = _decisive_settings(own), _decisive_settings(given)
    lines = [
        f"{key} is {_short(theirs[key])} in the configuration and {_short(value)} in the checkpoint"
        for key, value in ours.items()
        if theirs[key] != value
    ]
    ours, theirs = own.dataset.sessions, given.dataset.sessions
    if ours != theirs:
        apart = sorted(set(ours) ^ set(theirs))
        what = f"not in both: {_short(apart)}" if apart else "the same in another order"
        lines.append(f"dataset.sessions: {len(theirs)} in the configuration, {len(ours)} in the checkpoint, {what}")
    return lines


def _decisive_settings(config: Config) -> dict[str, Any]:
    dataset, transforms = config.dataset, config.dataset.data_transforms
    settings = {f"model.{key}": value for key, value in config.model.to_dict().items() if key not in TRAINING_ONLY}
    settings |= {f"dataset.{key}": dataset[key] for key in ("neural_dim", "feature_subset")}
    return settings | {f"dataset.data_transforms.{key}": transforms[key] for key in SMOOTHING}


def _short(value: Any, width: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= width else text[: width - 4] + " ..."


def list_trials(config: Config, eval_type: str) -> tuple[list[Trial], set[Trial], dict[str, list[str]]]:
    """The trials to evaluate, in the submission's order.

    Validation leaves out a trial whose labels its frames cannot give. It would flatter the model not to count
    it, so it is counted as decoded to nothing. What bad_trials_dict lists is left out of val, by the user's
    will, and never out of test, where each trial needs its row.

    Returns:
        trials; those of them not to decode; and for val the names of those `counted_as_deletions` and
        `left_out_by_bad_trials_dict`.
    """
    labelled = eval_type == "val"
    left_out: list[tuple[Trial, str]] = []
    trials = index_trials(config, eval_type, labelled=labelled, left_out=left_out)
    notes = {"counted_as_deletions": [], "left_out_by_bad_trials_dict": []}
    undecodable = set()
    for trial, reason in left_out:
        if reason == LISTED_AS_BAD:
            notes["left_out_by_bad_trials_dict"].append(f"{trial.session} {trial.key}")
        else:
            notes["counted_as_deletions"].append(f"{trial.session} {trial.key}: {reason}")
            undecodable.add(trial)
    trials = sorted(
        [*trials, *undecodable], key=lambda trial: trial_order(trial.session, trial.block_num, trial.trial_num)
    )
    return trials, undecodable, notes if labelled else {}


def restore_model(checkpoint: dict[str, Any], config: Config, path: str | Path) -> torch.nn.Module:
    """The model of a checkpoint, in evaluation mode, on the CPU; every parameter must be there and fit."""
    with torch.device("meta"):  # no time and memory for initial values: at full scale they take minutes
        model = build_model(config)
    try:
        model.load_state_dict(checkpoint["model_state_dict"], assign=True)
    except RuntimeError as error:
        lines = "\n".join(str(error).splitlines()[:6])
        raise CheckpointError(f"{path}: its parameters are not those of its own configuration: {lines}") from error
    return model.float().eval()


def load_model(
    model_path: str | Path, device: torch.device | str = "cpu"
) -> tuple[torch.nn.Module, Config, dict[str, Any]]:
    """A trained model, ready to decode.

    Args:
        model_path: run directory or checkpoint file.
        device: where the model goes.
    Returns:
        model in evaluation mode, its configuration, and the checkpoint.
    """
    path, _ = find_checkpoint(model_path)
    checkpoint = load_checkpoint(path)
    config = evaluation_config(checkpoint)
    return restore_model(checkpoint, config, path).to(device), config, checkpoint


# ---- decoding ----


def compute_logits(
    model: torch.nn.Module, trials: Sequence[Trial], config: Config, backend: Backend
) -> Iterator[tuple[int, torch.Tensor]]:
    """Phoneme logits of every trial, the same whatever batch it is in.

    Args:
        model: on the backend's device, in evaluation mode.
        trials: in any order; those shorter than one patch have no frames and never meet the model.
        config: preprocessing, patches and batch size.
        backend: device and precision.
    Yields:
        index into trials, and logits (P, C) on the CPU, float32 (float64 of a float64 model); each trial once.
    """
    size, stride = config.model.patch_size, config.model.patch_stride
    dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    lengths = [output_lengths(trial.n_time_steps, size, stride) for trial in trials]
    decodable = [index for index, length in enumerate(lengths) if length > 0]
    for index in sorted(set(range(len(trials))) - set(decodable)):
        yield index, torch.empty(0, config.dataset.n_classes, dtype=dtype)
    if not decodable:
        return
    loader = make_loader(EvalBatches([trials[index] for index in decodable], config), config)
    for decoded in batch_logits(model, loader, config, backend):
        logits = decoded.logits.cpu()
        for row, trial_id in enumerate(decoded.batch["trial_ids"].tolist()):
            if trial_id >= 0:  # -1: it only fills the batch
                index = decodable[trial_id]
                yield index, logits[row, : lengths[index]]


def decode(model: torch.nn.Module, trials: Sequence[Trial], config: Config, backend: Backend) -> list[list[int]]:
    """Greedily decoded phoneme classes of every trial; none for a trial shorter than one patch."""
    decoded: list[list[int]] = [[] for _ in trials]
    with progress_bar(len(trials), 0, "trial", "Decoding") as progress:
        for index, logits in compute_logits(model, trials, config, backend):
            decoded[index] = greedy_collapse(np.asarray(logits.argmax(-1)))
            progress.update()
    return decoded


# ---- results ----


def error_rates(
    sessions: Sequence[str],
    truths: Sequence[Sequence[int]],
    decoded: Sequence[Sequence[int]],
    corpora: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Errors as evaluation_val.json has them: summed over trials, rates as fractions, null without reference.

    Args:
        sessions, truths, decoded, corpora: of each trial.
    """
    counts = [count_errors(true, ids) for true, ids in zip(truths, decoded, strict=True)]
    total = sum_errors(counts)
    rates = {"per": json_rate(total.rate), "edits": total.edits, "phonemes": total.length}
    for name, keys in (("session", sessions), ("corpus", corpora)):
        if keys is not None:
            groups = sum_errors_by(keys, counts)
            rates[f"per_by_{name}"] = {key: json_rate(count.rate) for key, count in groups.items()}
    commonest = name_confusions(confusions(zip(truths, decoded, strict=True)), N_CONFUSIONS)
    rates["confusions"] = [{"true": true, "decoded": wrong, "count": count} for true, wrong, count in commonest]
    return rates


def format_results(results: dict[str, Any]) -> str:
    """A short table of what `evaluation` returned, for the terminal."""
    lines = [f"{results['n_trials']} trials decoded"]
    if results["eval_type"] == "val":
        errors = f"{results['edits']} edits / {results['phonemes']} phonemes, {results['n_trials']} trials"
        lines = [f"PER      {_percent(results['per'])}  {errors}"]
        for title in ("session", "corpus"):
            groups = results.get(f"per_by_{title}", {})
            lines += [f"{title:<8} {_percent(rate)}  {name}" for name, rate in groups.items()]
        lines.append(f"the {len(results['confusions'])} commonest confusions:")
        for entry in results["confusions"]:
            true, wrong = (entry[side] or "nothing" for side in ("true", "decoded"))
            lines.append(f"{entry['count']:>14}  {true} decoded as {wrong}")
        for note in ("counted_as_deletions", "left_out_by_bad_trials_dict"):
            lines += [f"{note.replace('_', ' ')}: {name}" for name in results[note]]
    return "\n".join([*lines, *(f"written: {path}" for path in results["files"])])


def _percent(rate: float | None) -> str:
    return "  n/a " if rate is None else f"{100 * rate:5.1f}%"


# ---- command ----


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; its names are those of `evaluation`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--model_path", help="run directory or checkpoint file (default: the configuration's output_dir)")
    add("--config_path", help="YAML file that says where the data lie (default: the checkpoint's own)")
    add("--eval_type", choices=EVAL_TYPES, default="val", help="split to decode (default: val)")
    add("--data_dir", help="the data set, in place of the configuration's dataset_dir")
    add("--csv_path", help="description of the blocks, for error rates a corpus")
    add("--output_dir", help="where results go (default: the run directory)")
    add("--batch_size", type=int, help="trials a batch: changes the speed, not the results")
    add("--device", choices=DEVICES, help="default: a TPU if there is one, else CUDA, else the CPU")
    add("--disable_mixed_precision", action="store_true", help="float32 in place of bf16")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 2 for what the user can put right, 130 for Ctrl-C."""
    options = vars(parse_arguments(arguments))
    log_to_terminal()
    mixed_precision = not options.pop("disable_mixed_precision")
    try:
        results = evaluation(**options, mixed_precision=mixed_precision)
    except (ValueError, OSError, MemoryError) as error:  # the project's own errors are ValueErrors
        print(f"evaluate_model.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("evaluate_model.py: interrupted", file=sys.stderr)
        return 130
    print(format_results(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
