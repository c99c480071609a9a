"""Rescore an n-best list with a causal language model of `transformers`, and tune its weight on val.

    python rescore_nbest.py --nbest D/nbest_val.jsonl --model M
    python rescore_nbest.py --nbest D/nbest_test.jsonl --tuned D/nbest_val_rescored_tuned.json --submission D/test.csv

M is a directory or a name on the Hugging Face hub. The first tunes the weight and writes nbest_val_rescored.jsonl and
nbest_val_rescored_tuned.json; the second takes model and weight from there. The hypotheses of a trial are ranked by

    total_score = score + weight · llm_score · (mean of words + 1 over the trial's hypotheses) / (words + 1)

score is the decoder's; llm_score is the model's log-probability of the sentence and its end (llm_scores.py); the
+ 1 is that end. So the model's log-probability a word is compared, since its sum alone prefers short sentences, and
the mean brings it back to the size of the decoder's score, which is a sum: without it, a wrong word would weigh less
the longer the sentence. It is divided by words, which hypotheses share, and not by tokens: a rare word has many
tokens, all but the first of them easy, and would raise a mean over tokens. Log-probabilities a word still prefer
sentences with many easy words; --length_normalisation none ranks by score + weight · llm_score.

The weight is the one with the least WER of all that are not negative, found exactly. Tuned and tested on the same
trials a WER flatters: the cross-validated one is the one to report.
"""

import argparse
import json
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evaluate_model_helpers import (
    ErrorCount,
    count_errors,
    json_rate,
    sum_errors,
    write_submission,
    write_text_atomically,
)
from interpolation_weight import FOLDS, ScoredTrial, cross_validated_errors, errors_at, tune_weight
from llm_scores import SentenceScorer
from nbest import COMMONEST_ENGLISH_WORD, Hypothesis
from rescoring_request import NORMALISATIONS, Settings, check_request, submission_rows
from training_log import log_to_terminal

logger = logging.getLogger("b2txt")

DEVICES = ("cpu", "cuda")


def rescore(
    nbest: str | Path,
    model: str | None = None,
    output: str | Path | None = None,
    weight: float | None = None,
    tuned: str | Path | None = None,
    sentence_case: bool | None = None,
    length_normalisation: str | None = None,
    batch_size: int = 32,
    device: str | None = None,
    submission: str | Path | None = None,
) -> dict[str, Any]:
    """Rescore an n-best file and write it anew, the hypotheses of each trial re-ordered.

    Args:
        nbest: file of the decoder, with references (val) or without (test).
        model: directory or name; by default that of `tuned`.
        output: n-best file to write; by default `<nbest>_rescored.jsonl`. The scores in it are the decoder's, with
            llm_score and total_score added; so it may be rescored again.
        weight: of the language model; by default that of `tuned`, else tuned on the references.
        tuned: file that an earlier run wrote beside its output, `<output>_tuned.json`.
        sentence_case, length_normalisation: see `Settings`; by default those of `tuned`.
        batch_size: sentences a batch; changes the speed, not the results.
        device: 'cpu' or 'cuda'; by default CUDA if there is a GPU.
        submission: CSV to write, of the best hypothesis a trial.
    Returns:
        what `<output>_tuned.json` holds, and `files`, the paths written. WERs are fractions, None without references.
    Raises:
        ValueError: with all that is wrong with the options and files, before the model is loaded; or what is wrong
            with the model.
    """
    given = Settings(model, weight, sentence_case, length_normalisation)
    trials, settings, kind, paths = check_request(Path(nbest), given, output, tuned, submission, batch_size, device)
    # By falling score whatever the file's order: for a file that was rescored before, too, 'before' is the decoder.
    ordered = [sorted(trial.hypotheses, key=lambda entry: -entry.score) for trial in trials]
    shown = {entry.text: presented(entry.text, settings.sentence_case) for entries in ordered for entry in entries}
    unique = sorted(set(shown.values()))  # each is scored once, however many trials have it
    scorer = SentenceScorer(settings.model, kind)
    logger.info("%s on %s, %s: %d sentences of %d trials", scorer.name, kind, scorer.dtype, len(unique), len(trials))
    by_sentence = dict(zip(unique, scorer.log_probabilities(unique, batch_size), strict=True))
    llm_scores = [[by_sentence[shown[entry.text]] for entry in entries] for entries in ordered]

    scored = [
        scored_trial(entries, scores, trial.reference, settings.length_normalisation)
        for trial, entries, scores in zip(trials, ordered, llm_scores, strict=True)
    ]
    tuning = settings.weight is None
    if tuning:
        settings = settings._replace(weight=tune_weight(scored))
    rankings = [trial.ranking(settings.weight) for trial in scored]
    changed = sum(entries[rank[0]].text != entries[0].text for entries, rank in zip(ordered, rankings, strict=True))
    results = settings._asdict() | {"nbest": str(nbest), "n_trials": len(trials), "n_changed": changed}
    if scored[0].edits is not None:
        results |= error_rates(scored, settings.weight, tuning)

    lines = []
    for trial, entries, scores, numbers, ranking in zip(trials, ordered, llm_scores, scored, rankings, strict=True):
        totals = numbers.totals(settings.weight)
        hypotheses = [entries[i]._asdict() | {"llm_score": scores[i], "total_score": float(totals[i])} for i in ranking]
        row = json.loads(trial.to_json()) | {"hypotheses": hypotheses}
        lines.append(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
    write_text_atomically(paths["output"], "".join(lines))
    if tuning:
        write_text_atomically(paths["tuned"], json.dumps(results, indent=2, allow_nan=False) + "\n")
    if submission:
        texts = [
            next((entries[i].text for i in ranking if entries[i].text), COMMONEST_ENGLISH_WORD)
            for entries, ranking in zip(ordered, rankings, strict=True)
        ]
        write_submission(submission, submission_rows(trials), texts)
    return results | {"files": [str(path) for path in paths.values()]}


# ---- scores and results ----


def presented(text: str, sentence_case: bool) -> str:
    """The text as the language model reads it: 'i think so' -> 'I think so.' in sentence case."""
    if not sentence_case or not text:
        return text
    text = re.sub(r"\bi\b", "I", text)
    return f"{text[0].upper()}{text[1:]}."


def scored_trial(
    hypotheses: Sequence[Hypothesis], llm_scores: Sequence[float], reference: str | None, length_normalisation: str
) -> ScoredTrial:
    """The numbers of a trial; see the formula at the top."""
    scores, slopes = np.array([entry.score for entry in hypotheses]), np.array(llm_scores, dtype=np.float64)
    if length_normalisation == "words":
        lengths = np.array([len(entry.text.split()) + 1 for entry in hypotheses])
        slopes = slopes * lengths.mean() / lengths
    if reference is None:
        return ScoredTrial(scores, slopes)
    counts = [count_errors(reference.split(), entry.text.split()) for entry in hypotheses]
    return ScoredTrial(scores, slopes, np.array([count.edits for count in counts]), counts[0].length)


def error_rates(scored: Sequence[ScoredTrial], weight: float, tuned: bool) -> dict[str, Any]:
    """Word error rates as fractions, of all trials: summed and divided once."""
    oracle = sum_errors(ErrorCount(int(trial.edits.min()), trial.length, 1) for trial in scored)
    held_out = cross_validated_errors(scored) if tuned else None
    return {
        "n_words": oracle.length,
        "wer_before": json_rate(errors_at(scored, 0.0).rate),
        "wer_after": json_rate(errors_at(scored, weight).rate),
        "wer_cross_validated": None if held_out is None else json_rate(held_out.rate),
        "wer_oracle": json_rate(oracle.rate),
    }


def format_results(results: dict[str, Any]) -> str:
    """A short table of what `rescore` returned, for the terminal."""
    changed = f"another best hypothesis in {results['n_changed']} of {results['n_trials']} trials"
    lines = [f"weight {results['weight']:.4g}: {changed}"]
    names = {
        "wer_before": "the decoder's best",
        "wer_after": "after rescoring",
        "wer_cross_validated": f"cross-validated: a weight tuned on other trials ({FOLDS} folds)",
        "wer_oracle": "the best hypothesis of each list",
    }
    lines += [f"WER {100 * results[key]:5.1f}%  {name}" for key, name in names.items() if results.get(key) is not None]
    return "\n".join([*lines, *(f"written: {path}" for path in results["files"])])


# ---- command ----


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; its names are those of `rescore`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--nbest", required=True, help="n-best file of the decoder")
    add("--model", help="directory of a causal language model, or its name on the hub (default: that of --tuned)")
    add("--output", help="n-best file to write (default: <nbest>_rescored.jsonl)")
    weight = parser.add_mutually_exclusive_group()
    weight.add_argument("--weight", type=float, help="of the language model (default: tuned on the references)")
    weight.add_argument("--tuned", help="<output>_tuned.json of a run on val: its model, weight and options")
    add("--sentence_case", action=argparse.BooleanOptionalAction, help="the model reads 'I see.' for 'i see'")
    add("--length_normalisation", choices=NORMALISATIONS, help="words (default) or none, see above")
    add("--batch_size", type=int, default=32, help="sentences a batch: changes the speed, not the results")
    add("--device", choices=DEVICES, help="default: CUDA if there is a GPU, else the CPU")
    add("--submission", help="CSV to write for the competition, of the best hypotheses")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 2 for what the user can put right, 130 for Ctrl-C."""
    options = vars(parse_arguments(arguments))
    log_to_terminal()
    try:
        results = rescore(**options)
    except (ValueError, OSError, MemoryError) as error:  # the project's own errors are ValueErrors
        print(f"rescore_nbest.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("rescore_nbest.py: interrupted", file=sys.stderr)
        return 130
    print(format_results(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
