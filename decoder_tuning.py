"""Search the settings of a word decoder on val: Optuna, over emissions that are computed once."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from config import DecoderConfig
from evaluate_model_helpers import count_errors, sum_errors, write_text_atomically
from language_model import DecoderPool
from training_log import progress_bar

logger = logging.getLogger("b2txt")

N_SEARCHES = 60
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
    """Find the settings of the least WER, write them, and use them in the pool from now on.

    The same trials choose the settings and are then decoded with them, which flatters. So each half of the trials
    is also decoded with the settings that were best on the other half.

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
    best, counts = min(tried, key=lambda pair: sum_errors(pair[1]).rate)
    best = best.copy()
    best.n_best = before.n_best
    held_out = _cross_validated([each for _, each in tried])
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
    pool.settings = best
    return facts


def _cross_validated(counts: Sequence[Sequence]) -> float:
    """WER of each half of the trials (every second one) with what was best on the other half.

    Args:
        counts: errors of each trial, for each of the settings tried.
    """
    total = sum_errors([])
    for half in (0, 1):
        chosen = min(counts, key=lambda each: sum_errors(each[half::2]).rate if len(each) > half else 0.0)
        total += sum_errors(chosen[1 - half :: 2])
    return total.rate
