"""Search the settings of a word decoder on val: Optuna, over emissions that are computed once."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from config import DecoderConfig
from evaluate_model_helpers import ErrorCount, count_errors, sum_errors, write_text_atomically
from language_model import DecoderPool
from training_log import progress_bar

logger = logging.getLogger("b2txt")

N_SEARCHES = 60
# The least WER of many settings on some hundred sentences is mostly the luckiest: neighbours differ by a word or two.
# Measured on 100 trials, the settings chosen on one half and their WER taken on the other: the mean of the five best
# had 0.3 points less than the single best.
N_AVERAGED = 5
# What is searched, and where. The beam is not: wider is never worse, only slower. Nor is acoustic_scale: with it
# all weights would grow together and the ranking stay.
RANGES = {
    "lm_weight": (0.2, 5.0),
    "word_score": (-4.0, 4.0),
    "silence_score": (-4.0, 4.0),
    "blank_penalty": (-1.0, 4.0),
}


def tune_decoder(
    pool: DecoderPool,
    emissions: Sequence[np.ndarray],
    references: Sequence[str],
    path: str | Path,
    n_searches: int = N_SEARCHES,
    seed: int = 0,
) -> dict[str, Any]:
    """Find settings of a low WER, write them, and use them in the pool from now on.

    They are the mean of the five best, where that is no worse than each of them and than the pool's, else the best.
    The same trials choose the settings and are then decoded with them, which flatters. So each half of the trials
    is also decoded with the settings that were chosen on the other half.

    Args:
        pool: its settings are the ones to beat, and are tried first.
        emissions: (P, C) log-probabilities of each trial.
        references: true sentence of each in normal form, '' where it is not known.
        path: YAML file that evaluate_model.py --decoder_config takes.
    Returns:
        wer_before, wer_after, wer_cross_validated (fractions), n_searches, and the settings found.
    Raises:
        ValueError: no trial has a reference, or the optuna package is missing.
    """
    try:
        import optuna  # here: a second, and only tuning needs it
    except ImportError as error:
        raise ValueError(f"--tune_decoder needs the optuna package ({error}): pip install optuna") from error
    known = [index for index, true in enumerate(references) if true]
    if not known:
        raise ValueError("--tune_decoder needs trials with a true sentence (sentence_label); there is none")
    chosen, true = [emissions[index] for index in known], [references[index].split() for index in known]
    before = pool.settings
    tried: list[tuple[DecoderConfig, list]] = []

    def errors_with(settings: DecoderConfig) -> list:
        nbest = pool.decode(chosen, settings)
        return [count_errors(a, b[0].text.split()) for a, b in zip(true, nbest, strict=True)]

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    ranges = {name: RANGES[name] for name in pool.decoder.searched}
    start = {name: min(max(before[name], low), high) for name, (low, high) in ranges.items()}
    study.enqueue_trial(start)
    tried.append((before, errors_with(before)))
    with progress_bar(n_searches, 0, "setting", "Tuning") as progress:
        for _ in range(n_searches):
            trial = study.ask()
            settings = before.copy()
            for name, (low, high) in ranges.items():
                settings[name] = round(trial.suggest_float(name, low, high), 4)
            settings.n_best = 1
            tried.append((settings, errors_with(settings)))
            rate = sum_errors(tried[-1][1]).rate
            study.tell(trial, rate)
            progress.set_postfix_str(f"WER {100 * rate:.2f}%, best {100 * study.best_value:.2f}%", refresh=False)
            progress.update()

    def errors_with_mean(numbers: Sequence[int]) -> list[ErrorCount]:
        settings = before.copy()
        for name in ranges:
            settings[name] = round(float(np.mean([tried[number][0][name] for number in numbers])), 4)
        settings.n_best = 1
        tried.append((settings, errors_with(settings)))
        return tried[-1][1]

    searched = [each for _, each in tried]
    counts = _choose(searched, slice(None), errors_with_mean)
    best = next(settings for settings, each in tried if each is counts).copy()
    best.n_best = before.n_best
    held_out = _cross_validated(searched, errors_with_mean)
    facts = {
        "wer_before": sum_errors(tried[0][1]).rate,
        "wer_after": sum_errors(counts).rate,
        "wer_cross_validated": held_out,
        "n_searches": n_searches,
        "settings": best.to_dict(),
    }
    header = (
        f"# Found by --tune_decoder: WER {facts['wer_after']:.2%} on val, {facts['wer_before']:.2%} before;\n"
        f"# {held_out:.2%} on trials that had no part in the choice.\n"
    )
    write_text_atomically(path, header + yaml.safe_dump({"decoder": facts["settings"]}, sort_keys=False))
    logger.info(
        "tuned: WER %.2f%% before, %.2f%% after (%.2f%% on trials that had no part in the choice); %s",
        *(100 * facts[name] for name in ("wer_before", "wer_after", "wer_cross_validated")),
        ", ".join(f"{name} {best[name]:g}" for name in ranges),
    )
    if facts["wer_cross_validated"] >= facts["wer_before"]:
        logger.warning("on trials that had no part in the choice the settings before were as good: keep those")
    pool.settings = best
    return facts


Errors = Sequence[ErrorCount]  # of each trial, with some settings


def _choose(tried: Sequence[Errors], which: slice, with_mean: Callable[[Sequence[int]], Errors]) -> Errors:
    """The errors of all trials with the settings that are chosen on those of a slice.

    Args:
        tried: for each of the settings tried, those before first; of equally good ones the earlier are the better.
        with_mean: the errors with the mean of the settings of those numbers.
    """

    def edits(errors: Errors) -> int:
        return sum_errors(errors[which]).edits

    best = sorted(range(len(tried)), key=lambda number: edits(tried[number]))[:N_AVERAGED]
    if best[0] == 0:  # nothing beats the settings before
        return tried[best[0]]
    mean = with_mean(best)
    # Worse than each of them: they lie around settings that are no good.
    return mean if edits(mean) <= min(edits(tried[best[-1]]), edits(tried[0])) else tried[best[0]]


def _cross_validated(tried: Sequence[Errors], with_mean: Callable[[Sequence[int]], Errors]) -> float:
    """WER of each half of the trials (every second one) with what was chosen on the other half.

    Args:
        tried, with_mean: as `_choose` takes.
    """
    halves = slice(0, None, 2), slice(1, None, 2)
    total = sum_errors([])
    for half, other in (halves, halves[::-1]):
        total += sum_errors(_choose(tried, half, with_mean)[other])
    return total.rate
