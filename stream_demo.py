"""Replay a trial as it was spoken: its bins come every 20 ms, phonemes and words appear, and the delay is shown.

    python stream_demo.py --model_path trained_models/causal
    python stream_demo.py --model_path trained_models/quickstart --accept_delay --session t15.2030.01.16 --trial 3

A model that was trained with dataset.data_transforms.smooth_causal needs no later bin. With the usual smoothing,
--accept_delay waits for four. Words come by an n-gram, by default of the data's train sentences. Where the output is no
terminal, only what stands at the end is printed.
"""

import argparse
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from checkpointing import find_checkpoint, load_checkpoint
from config import Config
from dataset_index import DataError, Trial, index_trials, split_files
from evaluate_model import EVAL_TYPES, evaluation_config
from evaluate_model_helpers import phonemes_to_text
from streaming import BIN_SECONDS, StreamingDecoder
from training_log import log_to_terminal
from trial_reader import TrialReader
from word_evaluation import WordOptions, make_words

CLEAR_LINE, LINE_UP = "\x1b[2K", "\x1b[1A"
LABEL = 10  # columns before phonemes and words


class Replay(NamedTuple):
    """What a replay gave: phoneme classes, the sentence (None without a decoder of words), and of each patch the
    seconds from the time at which its last bin was there to the time at which its phonemes were shown."""

    phonemes: list[int]
    text: str | None
    delays: list[float]


def replay(
    decoder: StreamingDecoder,
    features: np.ndarray,
    speed: float = 1.0,
    show: Callable[[list[int], str | None, float | None], None] = lambda phonemes, text, delay: None,
) -> Replay:
    """Push a trial's bins at the times at which they came.

    Args:
        decoder: at the start of a trial.
        features: (T, F).
        speed: of the clock, 1 for real time.
        show: is given the phonemes and the words so far and the last delay that is known, after each push that brings
            a patch.
    """
    model, delays = decoder.config.model, []
    size, stride = (model.patch_size, model.patch_stride) if model.patch_size else (1, 1)
    seconds = BIN_SECONDS / speed
    start = time.perf_counter()

    def bring(logits: torch.Tensor) -> None:
        if len(logits):
            show(decoder.phonemes, decoder.text, delays[-1] if delays else None)
            now, n_before = time.perf_counter() - start, len(delays)
            for patch in range(n_before, n_before + len(logits)):
                delays.append(now - seconds * (size + stride * patch))  # its last bin has ended then

    for i in range(len(features)):
        time.sleep(max(0.0, start + seconds * (i + 1) - time.perf_counter()))
        bring(decoder.push(features[i : i + 1]))
    bring(decoder.finish())
    return Replay(decoder.phonemes, decoder.hypotheses[0].text if decoder.hypotheses else None, delays)


class LiveLines:
    """Delay and phonemes on one line of a terminal, words on the next; of long ones the end."""

    def __init__(self) -> None:
        self.n_shown = 0

    def __call__(self, phonemes: list[int], text: str | None, delay: float | None) -> None:
        lines = ["" if delay is None else f"{1000 * delay:.0f} ms", ""][: 1 if text is None else 2]
        width = max(shutil.get_terminal_size().columns - LABEL - 1, 1)
        pairs = zip(lines, (phonemes_to_text(phonemes), text), strict=False)
        shown = "\n".join(f"{CLEAR_LINE}{label:{LABEL}}{content[-width:]}" for label, content in pairs)
        sys.stdout.write("\r" + LINE_UP * max(self.n_shown - 1, 0) + shown)
        sys.stdout.flush()
        self.n_shown = len(lines)

    def clear(self) -> None:
        """Make room for what is printed at the end."""
        if self.n_shown:
            sys.stdout.write("\r" + (CLEAR_LINE + LINE_UP) * (self.n_shown - 1) + CLEAR_LINE)


def find_trial(config: Config, eval_type: str, session: str | None, trial: str | None) -> Trial:
    """A trial of a split.

    Args:
        session: None for the last that has a file of the split.
        trial: its key, or the number in it: 'trial_0003' or '3'; None for the first by block and number.
    Raises:
        ValueError: it is not there, or the files are missing or damaged.
    """
    sessions = config.dataset.sessions
    if session is None:
        found, problems = split_files(config, eval_type)
        if not found:
            raise DataError(problems)
        session = sessions[max(found)]
    elif session not in sessions:
        raise ValueError(f"--session {session}: the model has no such session; it has {', '.join(sessions)}")
    own = config.copy()  # of this session alone: to check the files of all would take a while
    own.dataset.sessions, own.dataset.dataset_probability_val, own.dataset.bad_trials_dict = [session], None, None
    trials = index_trials(own, eval_type, labelled=False)
    if trial is None:
        return trials[0]
    key = f"trial_{int(trial):04d}" if trial.isascii() and trial.isdigit() else trial
    chosen = [each for each in trials if each.key == key]
    if not chosen:
        keys = [each.key for each in trials]
        raise ValueError(f"--trial {trial}: not in {trials[0].path}, which has {keys[0]} to {keys[-1]}")
    return chosen[0]


def read_features(config: Config, trial: Trial) -> np.ndarray:
    """(T, F) float32, all the features of the file."""
    own = config.copy()
    own.dataset.feature_subset = None  # the decoder takes its own from them
    features = np.empty((trial.n_time_steps, config.dataset.neural_dim), dtype=np.float32)
    TrialReader(own).read_into(features, trial)
    return features


def demo(
    model_path: str | Path,
    data_dir: str | Path | None = None,
    eval_type: str = "val",
    session: str | None = None,
    trial: str | None = None,
    speed: float = 1.0,
    accept_delay: bool = False,
    z_score_seconds: float | None = None,
    word_options: WordOptions | None = None,
) -> str:
    """Replay a trial on the terminal; the arguments are the options of the command.

    Returns:
        the lines for the end: phonemes, words, the true sentence, delays.
    Raises:
        ValueError: with what is wrong with options, checkpoint, data or language model.
    """
    if not 0 < speed < math.inf:
        raise ValueError(f"--speed is above 0, 1 for real time, not {speed}")
    options = word_options or WordOptions()
    problems = options.problems(eval_type)
    if problems:
        raise ValueError("\n".join(problems))
    path, _ = find_checkpoint(model_path)
    config = evaluation_config(load_checkpoint(path), data_dir=data_dir)
    chosen = find_trial(config, eval_type, session, trial)
    features = read_features(config, chosen)
    # One core is fast enough, and several wait for each other: on a machine that does other work, for long at times.
    torch.set_num_threads(1)
    decoder = StreamingDecoder(path, chosen.session, accept_delay=accept_delay, z_score_seconds=z_score_seconds)
    if options.kind != "none":
        with tempfile.TemporaryDirectory() as folder:  # of the n-gram's file, which is in memory then
            decoder.words = make_words(options, config, None, Path(folder), eval_type).decoder
        decoder.reset()
    print(f"{chosen.session} {chosen.key}, block {chosen.block_num}: {len(features) * BIN_SECONDS:.1f} s", flush=True)
    live = LiveLines() if sys.stdout.isatty() else None
    try:
        found = replay(decoder, features, speed, *([] if live is None else [live]))
    finally:
        if live is not None:
            live.clear()
    return format_replay(found, chosen.sentence_label, speed, decoder.delay_bins)


def format_replay(found: Replay, true_sentence: str, speed: float, delay_bins: int) -> str:
    """The lines for the end."""
    lines = [f"phonemes  {phonemes_to_text(found.phonemes)}"]
    if found.text is not None:
        lines.append(f"words     {found.text}")
    if true_sentence:
        lines.append(f"true      {true_sentence}")
    if found.delays:
        p50, p99, worst = (1000 * np.quantile(found.delays, share) for share in (0.5, 0.99, 1.0))
        clock = "" if speed == 1 else f", at {speed:g} times real time"
        lines.append(
            f"delay     p50 {p50:.1f} ms, p99 {p99:.1f} ms, worst {worst:.1f} ms "
            f"from a patch's last bin to its phonemes ({len(found.delays)} patches{clock})"
        )
        if delay_bins and speed == 1:
            waiting = 1000 * BIN_SECONDS * delay_bins
            lines.append(
                f"          {waiting:.0f} ms of it wait for the {delay_bins} later bins that the smoothing sees"
            )
    else:
        lines.append("delay     none: the trial is shorter than one patch")
    return "\n".join(lines)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; its names are those of `demo` and of WordOptions."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--model_path", required=True, help="run directory or checkpoint file")
    add("--data_dir", help="the data set (default: the checkpoint's)")
    add("--eval_type", choices=EVAL_TYPES, default="val", help="split of the trial (default: val)")
    add("--session", help="default: the last that has a file of the split")
    add("--trial", help="its key in the file, or the number in it: trial_0003 or 3 (default: the first)")
    add("--speed", type=float, default=1.0, help="of the clock (default: 1, real time)")
    add("--accept_delay", action="store_true", help="take a model whose smoothing sees later bins, and wait for them")
    z_score = "z-score the features by their running statistics, with this time constant (default: they are already)"
    add("--z_score_seconds", type=float, metavar="SECONDS", help=z_score)
    words = parser.add_argument_group("sentences").add_argument
    words("--lm", choices=("ngram", "none"), default="ngram", help="ngram (default), or none: phonemes only")
    words("--lm_text", nargs="+", default=(), metavar="FILE", help="text for the n-gram (default: train sentences)")
    words("--lm_file", help="an n-gram in place of text: ARPA or KenLM binary, of any order")
    words("--lexicon", help="dictionary file in place of CMUdict")
    words("--extra_words", help="dictionary file of further words and pronunciations")
    words("--decoder_config", help="YAML file with a decoder: section, as evaluate_model.py --tune_decoder writes it")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 2 for what the user can put right, 130 for Ctrl-C."""
    options = vars(parse_arguments(arguments))
    log_to_terminal()
    words = WordOptions(**{each.name: options.pop(each.name) for each in fields(WordOptions) if each.name in options})
    try:
        print(demo(**options, word_options=words))
    except (ValueError, OSError, MemoryError) as error:  # the project's own errors are ValueErrors
        print(f"stream_demo.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stream_demo.py: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
