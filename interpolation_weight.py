"""The weight between a decoder's scores and a language model's that gives the fewest word errors, found exactly.

The total score of a hypothesis is a line over the weight: its score at weight 0, and a slope. Which line of a trial
is the highest changes only where two lines cross, so the errors of all trials are constant between such crossings,
and one sum over the sorted crossings finds the best weight of all (Och, Minimum Error Rate Training in Statistical
Machine Translation, ACL 2003).
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from evaluate_model_helpers import ErrorCount, sum_errors

FOLDS = 5  # of cross-validation


class ScoredTrial(NamedTuple):
    """The N hypotheses of a trial as numbers.

    Attributes:
        scores: (N,) total scores at weight 0, falling.
        slopes: (N,) what a weight of 1 adds to them.
        edits: (N,) word errors of each; None without a reference.
        length: words of the reference.
    """

    scores: np.ndarray
    slopes: np.ndarray
    edits: np.ndarray | None = None
    length: int = 0

    def totals(self, weight: float) -> np.ndarray:
        """(N,) what the hypotheses are ranked by."""
        return self.scores + weight * self.slopes

    def ranking(self, weight: float) -> np.ndarray:
        """(N,) places of the hypotheses, best first; the earlier one where two are equal."""
        return np.argsort(-self.totals(weight), kind="stable")

    def errors(self, weight: float) -> ErrorCount:
        """Errors of the best hypothesis."""
        return ErrorCount(int(self.edits[self.ranking(weight)[0]]), self.length, 1)


def errors_at(trials: Sequence[ScoredTrial], weight: float) -> ErrorCount:
    """Word errors of all trials at a weight."""
    return sum_errors(trial.errors(weight) for trial in trials)


def best_lines(trial: ScoredTrial) -> list[tuple[float, int]]:
    """The upper envelope of a trial's lines: (weight from which on a hypothesis is the best, its place).

    Weights rise from 0, where the steepest of the best ones stands: the best one just above 0.
    """
    scores, slopes = trial.scores, trial.slopes

    def steepest(places: np.ndarray) -> int:
        return int(places[np.argmax(slopes[places])])

    current, weight = steepest(np.flatnonzero(scores == scores.max())), 0.0
    lines = [(weight, current)]
    while len(steeper := np.flatnonzero(slopes > slopes[current])):
        with np.errstate(over="ignore"):
            crossings = (scores[current] - scores[steeper]) / (slopes[steeper] - slopes[current])
        weight = max(weight, float(crossings.min()))
        if not np.isfinite(weight):
            break
        current = steepest(steeper[crossings == crossings.min()])
        lines.append((weight, current))
    return lines


def tune_weight(trials: Sequence[ScoredTrial]) -> float:
    """The weight, not negative, at which the trials have the fewest word errors.

    Errors are constant between two weights. Of equally good stretches the one with the smallest weights counts, and
    of that its middle, which moves least when the trials are others; 0 if nothing is better than 0, and twice the
    start of a stretch without an end.
    """
    changes: dict[float, int] = {}  # of the sum of errors, where a weight is passed
    errors = at_zero = errors_at(trials, 0.0).edits
    for trial in trials:
        # Just above 0 another of equally good hypotheses may be the best, so there may be a change at 0 too.
        before = trial.errors(0.0).edits
        for weight, place in best_lines(trial):
            changes[weight] = changes.get(weight, 0) + int(trial.edits[place]) - before
            before = int(trial.edits[place])
    weights = sorted(weight for weight, change in changes.items() if change)
    best, start, end = at_zero, None, None
    for weight, following in itertools.zip_longest(weights, weights[1:]):
        errors += changes[weight]
        if errors < best:
            best, start, end = errors, weight, following
    if start is None:
        return 0.0
    if end is None:
        return 2 * start or 1.0
    return (start + end) / 2


def cross_validated_errors(trials: Sequence[ScoredTrial], folds: int = FOLDS) -> ErrorCount | None:
    """Word errors of each fold at the weight that is best for the others; None with fewer than two trials.

    Trial i is in fold i mod `folds`, so that each fold has trials of each session.
    """
    folds = min(folds, len(trials))
    if folds < 2:
        return None
    counts = []
    for fold in range(folds):
        weight = tune_weight([trial for place, trial in enumerate(trials) if place % folds != fold])
        counts.append(errors_at(trials[fold::folds], weight))
    return sum_errors(counts)
