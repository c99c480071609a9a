"""Evaluate a trained decoder: checkpoint -> emissions -> phonemes and sentences -> error rates and submission.

    python evaluate_model.py                                          # the model of rnn_args.yaml, on val
    python evaluate_model.py --model_path trained_models/quickstart   # a run's directory or a checkpoint file
    python evaluate_model.py --model_path D --lm_text more.txt --word_frequencies wordfreq --tune_decoder
    python evaluate_model.py --model_path D --eval_type test --decoder_config D/decoder_tuned.yaml
    python evaluate_model.py --model_path D --check_submission D/submission_test.csv

The checkpoint carries its model, sessions and preprocessing, and these are used whatever the configuration
says. By default sentences are decoded with a 3-gram of the data's train sentences. Results lie in the run's
directory, or in --output_dir where that is read-only. An interrupted evaluation goes on where it was.
"""

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from backend import DEVICES, Backend, BackendError
from checkpointing import CheckpointError, check_parameters, find_checkpoint, load_checkpoint
from config import Config, ConfigError, config_from_dict, load_config
from ctc import output_lengths
from dataset import EvalBatches, make_loader
from dataset_index import LISTED_AS_BAD, DataError, Trial, index_trials
from decoder_tuning import tune_decoder
from emissions import EmissionStore, emission_key
from evaluate_model_helpers import (
    check_writable,
    corpora_of_blocks,
    prediction_rows,
    read_description,
    submission_problems,
    trial_order,
    unreadable,
    write_predictions,
    write_submission,
    write_text_atomically,
)
from evaluation_report import error_rates, format_results
from html_report import write_report
from inference import batch_logits
from language_model import DecoderPool
from rnn_model import build_model
from run_directory import EVALUATION_LOCK, hold_directory, release_directory
from text_rules import normalize
from training_log import log_to_terminal, progress_bar
from word_evaluation import (
    LANGUAGE_MODELS,
    TUNED,
    WordOptions,
    Words,
    decode_words,
    decoding_key,
    greedy_phonemes,
    make_pool,
    make_words,
    word_results,
)

logger = logging.getLogger("b2txt")

DEFAULT_CONFIG = Path(__file__).resolve().parent / "rnn_args.yaml"
EVAL_TYPES = ("val", "test")
ONE_PROCESS = "evaluation runs in one process: start it with `python evaluate_model.py`, not a launcher"
# Settings of the model that decide nothing once it is trained (its input network is as wide as its features).
TRAINING_ONLY = ("rnn_dropout", "rnn_trainable", "output_trainable", "input_network")
SMOOTHING = ("smooth_data", "smooth_kernel_std", "smooth_kernel_size", "smooth_causal")


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
    word_options: WordOptions | None = None,
    trust_checkpoint: bool = False,
) -> dict[str, Any]:
    """Decode the val or test split with a trained model and write the results.

    Args:
        model_path: run directory or checkpoint file; by default the output_dir of the configuration.
        config_path: gives the place of the data, the batch size and the decoder's settings; by default the
            checkpoint's own configuration, or rnn_args.yaml where there is no model_path either. Of a checkpoint of the
            original decoder without an args.yaml beside it, it gives all settings.
        eval_type: 'val' (error rates) or 'test' (submission).
        data_dir, batch_size: in place of the configuration's.
        csv_path: description of the blocks, for error rates a corpus.
        output_dir: of the results, by default the run directory.
        device: 'cpu', 'cuda', 'xla' or None to choose.
        mixed_precision: False for float32 also where the configuration has use_amp.
        word_options: how sentences are made.
        trust_checkpoint: read a checkpoint that holds more than tensors and plain values, which runs code in it.
    Returns:
        what evaluation_val.json holds (no error rates for test), and `files`, the paths written.
    Raises:
        ValueError: with what is wrong with checkpoint, configuration, data, language model or directories, before
            anything is computed.
        FileExistsError: another process evaluates into the directory.
    """
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:  # before anything for which one process could wait for another
        raise BackendError(ONE_PROCESS)
    if eval_type not in EVAL_TYPES:
        raise ValueError(f"eval_type is 'val' or 'test', not {eval_type!r}")
    options = word_options or WordOptions()
    problems = options.problems(eval_type) + unreadable({"--csv_path": csv_path})
    try:
        given = load_config(config_path or DEFAULT_CONFIG) if config_path or model_path is None else None
        checkpoint_path, run_dir = _find_model(model_path, given, data_dir, eval_type)
    except (ConfigError, CheckpointError) as error:
        raise type(error)("\n".join([*problems, str(error)])) from error
    if problems:
        raise ValueError("\n".join(problems))
    directory = check_writable(output_dir or run_dir)
    hold_directory(directory, EVALUATION_LOCK)
    try:
        description = read_description(csv_path) if csv_path else None
        checkpoint = load_checkpoint(checkpoint_path, "cpu", trust_checkpoint, config_path)
        config = evaluation_config(checkpoint, given, data_dir, batch_size)
        trials, undecodable, notes = list_trials(config, eval_type)
        split = _Split(eval_type, trials, undecodable, description)
        words = make_words(options, config, split.references, directory, eval_type)
        results = {"eval_type": eval_type, "checkpoint": str(checkpoint_path), "step": checkpoint["step"]}
        results |= {"n_trials": len(trials)} | notes
        with make_pool(words, options, len(trials)) as pool:  # forks: before a device is touched
            emissions = _emissions(checkpoint, checkpoint_path, config, split, directory, device, mixed_precision)
            return _decode_and_write(results, emissions, split, words, pool, options.tune_decoder, directory)
    finally:
        release_directory(directory, EVALUATION_LOCK)


def _decode_and_write(
    results: dict[str, Any],
    emissions: EmissionStore,
    split: "_Split",
    words: Words,
    pool: DecoderPool | None,
    tune: bool,
    directory: Path,
) -> dict[str, Any]:
    """Phonemes, sentences and the files; returns the results, added to those given."""
    results |= {"lm": words.facts}
    phonemes = greedy_phonemes(emissions)
    lexicon_only = [words.nearest.sentence(ids) for ids in phonemes]
    files, texts, nbest = [], lexicon_only, directory / f"nbest_{split.name}.jsonl"
    if pool is None and nbest.exists():
        logger.warning("%s: is of an earlier evaluation, whose other results are overwritten", nbest)
    if pool is not None:
        if tune:
            results["tuning"] = tune_decoder(pool, emissions, split.references, directory / TUNED)
            files.append(directory / TUNED)
        files.append(nbest)
        key = decoding_key(emissions.key, words)
        texts = decode_words(pool, emissions, split.places, split.references, files[-1], key)

    rows = prediction_rows(split.places, phonemes, split.truths, split.corpora, texts, split.references)
    files.append(directory / f"predictions_{split.name}.csv")
    write_predictions(files[-1], rows, len(split.trials))
    if split.name == "val":
        groups = {"session": split.sessions} | ({"corpus": split.corpora} if split.corpora else {})
        results |= error_rates(split.truths, phonemes, groups)
        results |= word_results(split.references, lexicon_only, None if pool is None else texts, words, groups)
        files.append(directory / "evaluation_val.json")
        write_text_atomically(files[-1], json.dumps(results, indent=2, allow_nan=False) + "\n")
        files.append(directory / "report_val.html")
        write_report(files[-1], results, rows)  # last: if it fails, the results are on the disk
    else:
        files.append(directory / "submission_test.csv")
        write_submission(files[-1], rows, [text or words.likeliest_word for text in texts])
    return results | {"files": [str(path) for path in files]}


def check_submission(
    path: str | Path,
    model_path: str | Path | None = None,
    config_path: str | Path | None = None,
    data_dir: str | Path | None = None,
) -> int:
    """Check a submission file against the test split of a data set.

    Args:
        path: the file.
        model_path, config_path, data_dir: where the data set is said, as for `evaluation`.
    Returns:
        the number of its rows.
    Raises:
        ValueError: listing what is wrong.
    """
    given = load_config(config_path or DEFAULT_CONFIG) if config_path or model_path is None else None
    if model_path is None:
        config = given
        config.dataset.dataset_dir = str(data_dir or given.dataset.dataset_dir)
    else:
        checkpoint_path, _ = _find_model(model_path, given, data_dir, "test")
        config = evaluation_config(
            load_checkpoint(checkpoint_path, "cpu", original_settings=config_path), given, data_dir
        )
    trials, _, _ = list_trials(config, "test")
    problems = submission_problems(path, len(trials))
    if problems:
        more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
        raise ValueError("\n".join([f"{path}: cannot be handed in:", *problems[:20], *more]))
    return len(trials)


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
    """The checkpoint's own configuration, with the place of the data, the batch size and the decoder from elsewhere.

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
        config.decoder = given.decoder.copy()
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


class _Split:
    """The trials of a split, in the submission's order, and what is known of each."""

    def __init__(self, name: str, trials: list[Trial], undecodable: set[Trial], description: dict | None):
        self.name, self.trials, self.undecodable = name, trials, undecodable
        labelled = name == "val"
        self.sessions = [trial.session for trial in trials]
        self.places = [(trial.session, trial.block_num, trial.trial_num) for trial in trials]
        self.truths = [trial.labels for trial in trials] if labelled else None
        self.references = [normalize(trial.sentence_label) for trial in trials] if labelled else None
        self.corpora = None
        if description is not None:
            self.corpora = corpora_of_blocks([place[:2] for place in self.places], description)


def restore_model(checkpoint: dict[str, Any], config: Config, path: str | Path) -> torch.nn.Module:
    """The model of a checkpoint, in evaluation mode, on the CPU; every parameter must be there and fit."""
    with torch.device("meta"):  # no time and memory for initial values: at full scale they take minutes
        model = build_model(config)
    check_parameters(model, checkpoint["model_state_dict"], path)
    model.load_state_dict(checkpoint["model_state_dict"], assign=True)
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


def _emissions(
    checkpoint: dict[str, Any],
    checkpoint_path: Path,
    config: Config,
    split: _Split,
    directory: Path,
    device: str | None,
    mixed_precision: bool,
) -> EmissionStore:
    """Log-probabilities of every trial; those computed before are on the disk."""
    backend = Backend(
        device, use_amp=config.use_amp and mixed_precision, gpu_number=config.gpu_number, use_tpu=config.use_tpu
    )
    if backend.world_size > 1:
        raise BackendError(ONE_PROCESS)
    logger.info("%s, step %s; %s", checkpoint_path, checkpoint["step"], backend.description)
    size, stride = config.model.patch_size, config.model.patch_stride
    lengths = [
        0 if trial in split.undecodable else output_lengths(trial.n_time_steps, size, stride) for trial in split.trials
    ]
    key = emission_key(checkpoint_path, checkpoint["step"], split.trials, backend.description)
    store = EmissionStore(directory, split.name, lengths, key)
    missing = store.missing()
    if not missing:
        return store
    n_there = sum(length > 0 for length in lengths) - len(missing)
    if n_there:
        logger.info("%d of %d trials have their emissions already", n_there, len(store))
    model = restore_model(checkpoint, config, checkpoint_path).to(backend.device)
    config.dataset.batch_size = min(config.dataset.batch_size, len(missing))
    with progress_bar(len(missing), 0, "trial", "Emissions") as progress:
        for index, logits in compute_logits(model, [split.trials[i] for i in missing], config, backend):
            store[missing[index]] = logits.float().log_softmax(-1).numpy()
            progress.update()
    store.flush()
    return store


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
    add("--trust_checkpoint", action="store_true", help="read a file that holds Python objects: runs code in it")
    words = parser.add_argument_group("sentences").add_argument
    words("--lm", choices=LANGUAGE_MODELS, default="ngram", help="ngram (default), fst, or none: greedy phonemes only")
    words("--lm_text", nargs="+", default=(), metavar="FILE", help="text for the n-gram (default: train sentences)")
    words("--lm_order", type=int, help="n of the n-gram (default: 3)")
    words("--lm_file", help="an n-gram in place of text: ARPA or KenLM binary, of any order")
    words("--word_frequencies", help="'wordfreq' or a file of words and numbers, for words that the text lacks")
    words("--lm_fst", help="TLG.fst of a published language model, with --lm fst (implied)")
    words("--lm_words", help="its words.txt")
    words("--lexicon", help="dictionary file in place of CMUdict")
    words("--extra_words", help="dictionary file of further words and pronunciations")
    words("--decoder_config", help="YAML file with a decoder: section, as --tune_decoder writes it")
    words("--tune_decoder", action="store_true", help="on val: search the decoder's settings, write decoder_tuned.yaml")
    words("--nbest", type=int, metavar="N", help="hypotheses a trial in nbest_<split>.jsonl (default: decoder.n_best)")
    words("--decoder_processes", type=int, help="default: as many as there are CPUs; changes no result")
    add("--check_submission", metavar="CSV", help="check this file against the test split, and do nothing else")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 2 for what the user can put right, 130 for Ctrl-C."""
    options = vars(parse_arguments(arguments))
    log_to_terminal()
    mixed_precision = not options.pop("disable_mixed_precision")
    submission = options.pop("check_submission")
    word_options = WordOptions(**{field.name: options.pop(field.name) for field in fields(WordOptions)})
    try:
        if submission is not None:
            places = {name: options[name] for name in ("model_path", "config_path", "data_dir")}
            print(f"{submission}: {check_submission(submission, **places)} rows, nothing wrong")
            return 0
        results = evaluation(**options, mixed_precision=mixed_precision, word_options=word_options)
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
