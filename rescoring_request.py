"""What `rescore_nbest.py` is asked to do: its settings and files, all checked before a model is loaded."""

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from backend import BackendError, choose_device
from evaluate_model_helpers import check_writable, row_problems
from llm_scores import LlmError, import_transformers, missing_directory
from nbest import TrialHypotheses, read_nbest

logger = logging.getLogger("b2txt")

NORMALISATIONS = ("words", "none")


class Settings(NamedTuple):
    """What decides a ranking, None where it is not said; the file for --tuned holds these and the results of tuning.

    Attributes:
        model: directory or name.
        weight: of the language model, 0 or more; None to tune it.
        sentence_case: whether the model reads 'Can I see it.' for 'can i see it'. Off by default: a model of written
            text may gain by it, one of transcripts loses; run both on val, and keep the better.
        length_normalisation: 'words' or 'none'.
    """

    model: str | None = None
    weight: float | None = None
    sentence_case: bool | None = None
    length_normalisation: str | None = None

    def problems(self) -> list[str]:
        """What is wrong with them, one line each."""
        problems = []
        number = isinstance(self.weight, (int, float)) and not isinstance(self.weight, bool)
        if self.weight is not None and not (number and 0 <= self.weight < math.inf):
            problems.append(f"weight is {self.weight!r}; it is a number from 0 on")
        if self.model is not None and not isinstance(self.model, str):
            problems.append(f"model is {self.model!r}; it is a directory or a name")
        if not isinstance(self.sentence_case, bool):
            problems.append(f"sentence_case is {self.sentence_case!r}; it is true or false")
        if self.length_normalisation not in NORMALISATIONS:
            problems.append(f"length_normalisation is {self.length_normalisation!r}; it is words or none")
        return problems


DEFAULTS = Settings(sentence_case=False, length_normalisation="words")


def check_request(
    nbest: Path,
    given: Settings,
    output: str | Path | None,
    tuned: str | Path | None,
    submission: str | Path | None,
    batch_size: int,
    device: str | None,
) -> tuple[list[TrialHypotheses], Settings, str, dict[str, Path]]:
    """What the command line says, made complete.

    Args:
        given: of the command line; the others are `rescore`'s.
    Returns:
        trials; settings, of which only the weight may be None, to be tuned; 'cpu' or 'cuda'; and the files to write:
        'output', and 'tuned' and 'submission' where there are such.
    Raises:
        ValueError: all that is wrong, a line or more each.
    """
    problems = []
    trials: list[TrialHypotheses] = []
    try:
        import_transformers()
    except LlmError as error:
        problems.append(str(error))
    try:
        trials = read_nbest(nbest)
        problems += [f"{nbest}: {problem}" for problem in trial_problems(trials)]
    except ValueError as error:
        problems.append(str(error))
    settings = DEFAULTS
    try:
        settings = read_settings(tuned) if tuned else settings
    except ValueError as error:
        problems.append(str(error))
    else:
        problems += _conflicts(given, settings) if tuned else []
    settings = settings._replace(**{name: value for name, value in given._asdict().items() if value is not None})
    if settings.model is None and not tuned:
        problems.append("no language model: give --model, or --tuned")
    problems += settings.problems()
    problems += filter(None, [settings.model and missing_directory(settings.model)])
    try:
        device, _ = choose_device(device, use_tpu=False)
    except BackendError as error:
        problems.append(str(error))
    if batch_size < 1:
        problems.append(f"--batch_size is {batch_size}; it is 1 or more")
    if settings.weight is None and not tuned and trials and trials[0].reference is None:
        problems.append(f"{nbest}: has no references to tune the weight on: give --tuned, of a run on val, or --weight")

    paths = {"output": Path(output or nbest.with_name(f"{nbest.stem}_rescored.jsonl"))}
    if settings.weight is None:
        paths["tuned"] = paths["output"].with_name(f"{paths['output'].stem}_tuned.json")
    if submission:
        paths["submission"] = Path(submission)
        problems += [f"{nbest}: no submission: {problem}" for problem in submission_problems(trials)]
    inputs = [nbest, *([Path(tuned)] if tuned else [])]
    problems += _path_problems(inputs, list(paths.values()), Path(settings.model or ""))
    if problems:
        raise ValueError("\n".join(problems))
    return trials, settings, device, paths


def read_settings(path: str | Path) -> Settings:
    """The settings that an earlier run tuned.

    Raises:
        ValueError: no such file, or not of that kind.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        settings = Settings(**{name: content[name] for name in Settings._fields})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: cannot be read as a file for --tuned: {error!r}") from error
    problems = settings.problems() + [f"{name} is null" for name in ("model", "weight") if content[name] is None]
    if problems:
        raise ValueError(f"{path}: " + "; ".join(problems))
    return settings


def _conflicts(given: Settings, tuned: Settings) -> list[str]:
    """What the command line says and the file for --tuned says otherwise; another model's name is only warned of."""
    if given.model is not None and given.model != tuned.model:
        logger.warning("the weight was tuned for %s and is used for %s", tuned.model, given.model)
    lines = ["give --weight or --tuned, not both"] if given.weight is not None else []
    for name in ("sentence_case", "length_normalisation"):
        ours, theirs = getattr(given, name), getattr(tuned, name)
        if ours is not None and ours != theirs:
            lines.append(f"--{name} is {ours}, and the weight of --tuned was tuned with {theirs}: leave the option out")
    return lines


def trial_problems(trials: Sequence[TrialHypotheses]) -> list[str]:
    """What keeps an n-best file from being rescored, one line each."""
    problems = []
    for trial in trials:
        broken = [entry.text for entry in trial.hypotheses if not all(math.isfinite(score) for score in entry[1:])]
        if broken:
            problems.append(f"trial {trial.id}: a score of {broken[0]!r} is not finite")
    problems = problems[:10] + ([f"and {len(problems) - 10} more"] if len(problems) > 10 else [])
    without = [trial.id for trial in trials if trial.reference is None]
    if 0 < len(without) < len(trials):
        problems.append(
            f"{len(without)} of {len(trials)} trials lack a reference (first {without[0]}); give all or none"
        )
    return problems


def submission_rows(trials: Sequence[TrialHypotheses]) -> list[dict[str, Any]]:
    """The rows of `write_submission`."""
    return [{"id": trial.id, "session": trial.session, "block": trial.block, "trial": trial.trial} for trial in trials]


def submission_problems(trials: Sequence[TrialHypotheses]) -> list[str]:
    """What `write_submission` would refuse, before the model runs for it."""
    problems = row_problems(submission_rows(trials), len(trials))
    broken = [trial.id for trial in trials if any("\n" in entry.text for entry in trial.hypotheses)]
    return problems + ([f"trial {broken[0]} has a line break in a text"] if broken else [])


def _path_problems(inputs: Sequence[Path], outputs: Sequence[Path], model: Path) -> list[str]:
    """Files that would be written over an input or each other, or where nothing can be written."""
    problems = []
    seen = {path.resolve(): "is read" for path in inputs}
    for path in outputs:
        if path.resolve() in seen:
            problems.append(f"{path}: would be written, and {seen[path.resolve()]} too: name another file")
        elif path.exists() and path.with_name("config.json").exists() and path.resolve().parent == model.resolve():
            problems.append(f"{path}: may belong to the model: name a file outside its directory")
        elif path.is_dir():
            problems.append(f"{path}: is a directory: name a file")
        seen[path.resolve()] = "is written"
    for directory in dict.fromkeys(path.parent for path in outputs):
        try:
            check_writable(directory, "--output and --submission")
        except ValueError as error:
            problems.append(str(error))
    return problems
