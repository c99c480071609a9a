"""Hypotheses of a sentence, and the file of them: what decoders give, and what `rescore_nbest.py` reads.

An n-best file has one JSON object a line, one line a trial, in the submission's order:

    {"id": 0, "session": "t15.2023.08.13", "block": 8, "trial": 0, "reference": "you can see it",
     "hypotheses": [{"text": "you can see it", "score": -21.4, "acoustic_score": -9.1, "lm_score": -12.3}, ...]}

`hypotheses` stand by falling `score` (after `rescore_nbest.py`, by falling `total_score`, a further key); all scores
are natural logarithms. `reference` is there on val only.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from evaluate_model_helpers import write_text_atomically

# The text of a trial from which nothing was decoded, where no language model says what is likeliest: none may be empty.
COMMONEST_ENGLISH_WORD = "the"


class Hypothesis(NamedTuple):
    """One reading of a trial.

    Attributes:
        text: words, one space between two; '' where nothing was decoded.
        score: what the decoder ranks by: acoustic_scale · acoustic_score + lm_weight · lm_score, and what the
            decoder adds for words and silences.
        acoustic_score: log-probability of the frame path by which the decoder found the words, after the blank
            penalty. Another path may have more: silence_score is added for each frame of silence.
        lm_score: log-probability of the words, the end of the sentence included; 0 without a language model.
    """

    text: str
    score: float
    acoustic_score: float
    lm_score: float


@dataclass(frozen=True)
class TrialHypotheses:
    """The hypotheses of one trial, best first; never empty."""

    id: int
    session: str
    block: int
    trial: int
    hypotheses: tuple[Hypothesis, ...]
    reference: str | None = None  # the true sentence, by the rules of text_rules.py

    def to_json(self) -> str:
        """Its line in the file."""
        row = asdict(self) | {"hypotheses": [hypothesis._asdict() for hypothesis in self.hypotheses]}
        if self.reference is None:
            del row["reference"]
        return json.dumps(row, ensure_ascii=False, allow_nan=False)


def parse_line(line: str) -> TrialHypotheses:
    """The trial of one line.

    Raises:
        ValueError: the line is no such object, or holds no hypothesis.
    """
    try:
        row = json.loads(line)
        hypotheses = tuple(
            Hypothesis(_text(entry["text"]), *(float(entry[name]) for name in ("score", "acoustic_score", "lm_score")))
            for entry in row["hypotheses"]
        )
        trial = TrialHypotheses(
            int(row["id"]),
            _text(row["session"]),
            int(row["block"]),
            int(row["trial"]),
            hypotheses,
            None if row.get("reference") is None else _text(row["reference"]),
        )
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"no line of an n-best file ({error!r}): {line.strip()[:80]!r}") from error
    if not hypotheses:
        raise ValueError(f"trial {trial.id} has no hypothesis")
    return trial


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, found {value!r}")
    return value


def read_nbest(path: str | Path) -> list[TrialHypotheses]:
    """All trials of an n-best file.

    Raises:
        ValueError: the file cannot be read, is empty, or holds lines that are no trials: all of them, with numbers.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as an n-best file: {error}") from error
    trials, problems = [], []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                trials.append(parse_line(line))
            except ValueError as error:
                problems.append(f"line {number}: {error}")
    if problems:
        shown = problems[:10] + ([f"and {len(problems) - 10} more"] if len(problems) > 10 else [])
        raise ValueError(f"{path}:\n" + "\n".join(shown))
    if not trials:
        raise ValueError(f"{path}: holds no trial")
    return trials


def nbest_text(trials: Iterable[TrialHypotheses]) -> str:
    """The text of an n-best file."""
    return "".join(trial.to_json() + "\n" for trial in trials)


class NbestLog:
    """An n-best file that grows line by line beside its place, and takes it when it is complete.

    An interrupted decoding goes on where it was: lines that were written with the same key are kept.

    Attributes:
        done: the trials that are there.
    """

    def __init__(self, path: str | Path, key: dict):
        """
        Args:
            path: of the complete file; it is untouched until `finish`.
            key: whatever the hypotheses depend on.
        """
        self.path = Path(path)
        self._part = self.path.with_name(self.path.name + ".part")
        first = json.dumps(key, sort_keys=True)
        self.done = self._read_part(first)
        write_text_atomically(self._part, first + "\n" + nbest_text(self.done))
        self._file = open(self._part, "a", encoding="utf-8")  # noqa: SIM115 (closed by finish and by __exit__)

    def _read_part(self, first: str) -> list[TrialHypotheses]:
        trials: list[TrialHypotheses] = []
        try:
            lines = self._part.read_text(encoding="utf-8", errors="replace").split("\n")  # cut off within a letter
        except OSError:
            return trials
        if lines[:1] == [first]:
            for line in lines[1:]:
                try:
                    trials.append(parse_line(line))
                except ValueError:  # a line that a kill cut off
                    break
        return trials

    def add(self, trial: TrialHypotheses) -> None:
        """Write a trial; trials come in the order of the file."""
        self._file.write(trial.to_json() + "\n")
        self._file.flush()
        self.done.append(trial)

    def finish(self) -> None:
        """Put the complete file in its place."""
        write_text_atomically(self.path, nbest_text(self.done))
        self._file.close()
        self._part.unlink()

    def __enter__(self) -> "NbestLog":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
