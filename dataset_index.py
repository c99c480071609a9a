"""What is on disk, and whether it is right: every trial of a split, checked before the first batch.

A data set in the T15 layout is `<dataset_dir>/<session>/data_{train,val,test}.hdf5`, one group a trial:
`input_features` float32 (T, F); for train and val also `seq_class_ids` int32 (500,) padded with zeros;
attributes `n_time_steps`, `seq_len`, `session`, `block_num`, `trial_num`, `sentence_label`.

Reading every value of 17 GB takes minutes, so what a file holds is kept in a cache, one JSON file for each
HDF5 file, and read again only when size or modification time have changed. The cache holds facts and knows
nothing of the configuration; the checks are made anew at every start.
"""

import hashlib
import json
import logging
import os
import shlex
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import h5py
import numpy as np
from tqdm import tqdm

from ctc import output_lengths, required_frames

logger = logging.getLogger("b2txt")

CACHE_FORMAT = 3  # raise it when _Facts or what is looked at changes
PROBLEMS_SHOWN = 20
SPLITS = ("train", "val", "test")
ALWAYS_NEEDED = ("input_features", "n_time_steps", "block_num", "trial_num")
LISTED_AS_BAD = "listed in dataset.bad_trials_dict"  # the reason of trials that the user leaves out
LABELS_NEED = ("seq_class_ids", "seq_len")
# What h5py raises on damaged files, depending on which structure is hit (MemoryError: a nonsensical size).
READ_ERRORS = (OSError, RuntimeError, KeyError, ValueError, TypeError, MemoryError)


class DataError(ValueError):
    """The data set cannot be used as it is; the message lists every problem found, one a line."""

    def __init__(self, problems: str | Sequence[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        lines = self.problems[:PROBLEMS_SHOWN]
        if len(self.problems) > len(lines):
            lines = [*lines, f"... and {len(self.problems) - len(lines)} more"]
        if len(lines) > 1:
            lines = [f"{len(self.problems)} problems in the data set:", *("  - " + line for line in lines)]
        super().__init__("\n".join(lines))


@dataclass(frozen=True)
class Trial:
    """One sentence of one session.

    `day` is the index of the session in config.dataset.sessions; `key` the group in the file, `trial_0003`.
    Where there are no labels, seq_len is 0, labels is empty and sentence_label is ''.
    `offset` is the byte of the file at which its features begin, where they are float32 and one run of bytes, and
    `file_stamp` (size, time of change) is of the file that this was read from.
    """

    session: str
    day: int
    split: str
    path: str
    key: str
    block_num: int
    trial_num: int
    n_time_steps: int
    seq_len: int = 0
    labels: tuple[int, ...] = ()
    sentence_label: str = ""
    offset: int | None = None
    file_stamp: tuple[int, int] | None = None

    def __str__(self) -> str:
        return f"{self.path}, {self.key} (block {self.block_num}, trial {self.trial_num})"


@dataclass
class _Facts:
    """What a group of a file holds, right or wrong. None stands for what is missing."""

    key: str
    shape: list[int] | None = None
    offset: int | None = None  # byte of the file, where the features are one run of little-endian float32
    n_not_finite: int = 0
    first_not_finite: list[int] = field(default_factory=list)  # [time bin, feature]
    n_time_steps: int | None = None
    block_num: int | None = None
    trial_num: int | None = None
    session: str | None = None
    n_label_ids: int | None = None  # how many seq_class_ids has room for
    seq_len: int | None = None
    labels: list[int] = field(default_factory=list)  # the first seq_len of seq_class_ids
    sentence_label: str = ""

    @property
    def missing(self) -> set[str]:
        fields = {"input_features": self.shape, "seq_class_ids": self.n_label_ids}
        for name in ("n_time_steps", "block_num", "trial_num", "seq_len"):
            fields[name] = getattr(self, name)
        return {name for name, value in fields.items() if value is None}


def index_trials(config, split: str, labelled: bool = True, left_out: list | None = None) -> list[Trial]:
    """Every usable trial of a split, in the order of config.dataset.sessions, then block, then trial.

    A labelled split is one to train or validate on: trials that cannot be used (shorter than one patch,
    labels that do not fit into the output frames, listed in bad_trials_dict) are left out, each with a logged
    line. For labelled=False all trials are kept, since each needs its row in a submission; labels are kept
    where they exist.

    Args:
        split: 'train', 'val' or 'test'.
        left_out: a list to which (Trial, reason) of each trial left out is appended.
    Raises:
        DataError: with all problems of all files of the split.
    """
    trials, problems = _index_split(config, split, labelled, [] if left_out is None else left_out)
    _warn_of_listed_trials_that_are_nowhere(config)
    if problems:
        raise DataError(problems)
    return trials


def index_splits(
    config, splits: Sequence[str], labelled: bool = True, left_out: list | None = None
) -> dict[str, list[Trial]]:
    """index_trials of several splits, with the problems of all of them in one DataError."""
    trials, problems = {}, []
    left_out = [] if left_out is None else left_out
    for split in splits:
        trials[split], found = _index_split(config, split, labelled, left_out)
        problems += [problem for problem in found if problem not in problems]
    _warn_of_listed_trials_that_are_nowhere(config)
    if problems:
        raise DataError(problems)
    return trials


def _index_split(config, split: str, labelled: bool, left_out: list) -> tuple[list[Trial], list[str]]:
    paths, problems = split_files(config, split)
    trials: list[Trial] = []
    n_read, n_before = 0, len(left_out)
    for day, path in tqdm(paths.items(), desc=f"Checking {split} files", unit="file", disable=None, leave=False):
        stamp = file_stamp(path) if path.exists() else None  # before it is read: a change after shows
        facts, found = read_facts(path)
        problems += found
        n_read += len(facts)
        session = config.dataset.sessions[day]
        bad = _bad_trials(config, session)
        if not facts and not found:
            problems.append(f"{path}: holds no trials")
        unlabelled = [trial.key for trial in facts if trial.missing & set(LABELS_NEED)]
        if labelled and facts and len(unlabelled) == len(facts):
            problems.append(f"{path}: no trial has labels (seq_class_ids and seq_len); this is no file to train on")
            continue
        of_session, elsewhere = [], set()
        for trial_facts in facts:
            listed_bad = (trial_facts.block_num, trial_facts.trial_num) in bad
            # A listed trial is not checked: listing it is how to go on with a file that has a fault.
            found = [] if labelled and listed_bad else _check_trial(trial_facts, config, labelled)
            if found and listed_bad:  # unlabelled: it keeps its row in a submission, with nothing decoded
                logger.warning("Not decoded: %s, %s: %s", path, trial_facts.key, LISTED_AS_BAD)
                trial_facts = replace(trial_facts, n_time_steps=0)
            elif found:
                problems += [f"{path}, {trial_facts.key}: {problem}" for problem in found]
                continue
            trial = _make_trial(trial_facts, session, day, split, path, stamp, config, labelled)
            if trial_facts.session not in (None, session):
                elsewhere.add(trial_facts.session)
            reason = LISTED_AS_BAD if listed_bad else _unusable(trial, config)
            if labelled and reason:
                logger.warning("Left out: %s: %s", trial, reason)
                left_out.append((trial, reason))
            else:
                of_session.append(trial)
        if elsewhere:
            logger.warning("%s lies in the directory of %s, but its trials name %s", path, session, sorted(elsewhere))
        if split == "train" and facts and not of_session:
            logger.warning("%s: no usable train trial; its day layer will stay as it is at the start", session)
        problems += _duplicates(of_session)
        trials += sorted(of_session, key=lambda trial: (trial.block_num, trial.trial_num, trial.key))
    if n_read and not trials and not problems:
        reasons = [f"{trial}: {reason}" for trial, reason in left_out[n_before:][:3]]
        problems.append(f"All {n_read} {split} trials were left out; the first: {'; '.join(reasons)}")
    return trials, problems


def split_files(config, split: str) -> tuple[dict[int, Path], list[str]]:
    """The files of a split by day, and what is missing that the split cannot do without."""
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; it must be 'train', 'val' or 'test'")
    root = Path(config.dataset.dataset_dir).expanduser()
    sessions = list(config.dataset.sessions)
    how_to = (
        f"Download the data with `python download_data.py`, simulate some with `python synthetic_data.py "
        f"--output_dir {shlex.quote(str(root))}`, or say where they lie with --data_dir (dataset.dataset_dir)."
    )
    if not root.is_dir():
        return {}, [f"There is no data set directory {root}. {how_to}"]
    paths = {day: root / session / f"data_{split}.hdf5" for day, session in enumerate(sessions)}
    found = {day: path for day, path in paths.items() if path.is_file()}
    no_directory = [session for session in sessions if not (root / session).is_dir()]
    if len(no_directory) == len(sessions):
        return {}, [f"None of the {len(sessions)} sessions ({sessions[0]}, ...) has a directory in {root}. {how_to}"]

    problems = []
    if split == "train":
        no_file = [sessions[day] for day in paths if day not in found]
        if no_file:
            problems.append(
                f"{len(no_file)} of {len(sessions)} sessions have no data_train.hdf5 in {root}, and their day layers "
                f"cannot be trained: {', '.join(no_file)}. Add the files, or take these sessions from "
                "dataset.sessions, and their entries from dataset.dataset_probability_val."
            )
    elif split == "test" and no_directory:
        problems.append(
            f"{len(no_directory)} of {len(sessions)} sessions have no directory in {root}: {', '.join(no_directory)}. "
            "A submission numbers the trials of all sessions, so without them its later rows would be other trials'. "
            "Add them; an empty directory stands for a session without test trials."
        )
    elif no_directory:
        logger.warning("No directory in %s for: %s; evaluated without them", root, ", ".join(no_directory))
    if split == "test":
        alone = [
            sessions[day] for day in paths if day not in found and (root / sessions[day] / "data_val.hdf5").is_file()
        ]
        if alone:  # the real sessions have both or neither
            logger.warning(
                "These sessions have a data_val.hdf5 and no data_test.hdf5: %s. If the files are missing, the "
                "submission lacks their rows and numbers the later ones wrongly", ", ".join(alone),
            )  # fmt: skip
    if split == "val":
        # Sessions with a probability of 0 take no part in validation: the real ones of that kind have no val file.
        probabilities = list(config.dataset.dataset_probability_val or [1] * len(sessions))
        if len(probabilities) != len(sessions):
            problems.append(
                f"dataset.dataset_probability_val has {len(probabilities)} entries, not {len(sessions)}, one a session"
            )
        else:
            found = {day: path for day, path in found.items() if probabilities[day] != 0}
            alone = [
                session
                for day, session in enumerate(sessions)
                if probabilities[day] != 0 and day not in found and session not in no_directory
            ]
            if found and alone:
                logger.warning(
                    "No data_val.hdf5 in %s for: %s; evaluated without them. Add the files, or give these sessions "
                    "a 0 in dataset.dataset_probability_val", root, ", ".join(alone),
                )  # fmt: skip
    if not found and not problems:
        but = " (of the sessions whose dataset.dataset_probability_val is not 0)" if split == "val" else ""
        problems.append(f"No session{but} has a data_{split}.hdf5 in {root}: there is no {split} trial at all.")
    return found, problems


def _check_trial(facts: _Facts, config, labelled: bool) -> list[str]:
    """What is wrong with a trial, in words."""
    missing = facts.missing & {*ALWAYS_NEEDED, *(LABELS_NEED if labelled else ())}
    if missing:
        return [f"{', '.join(sorted(missing))} missing"]
    problems = []
    if len(facts.shape) != 2 or facts.shape[1] != config.dataset.neural_dim:
        problems.append(
            f"input_features is {tuple(facts.shape)}; by dataset.neural_dim it is (T, {config.dataset.neural_dim})"
        )
    elif facts.n_time_steps != facts.shape[0]:
        problems.append(f"n_time_steps is {facts.n_time_steps}, but input_features has {facts.shape[0]} time bins")
    if facts.n_not_finite:
        time_bin, feature = facts.first_not_finite
        problems.append(
            f"{facts.n_not_finite} NaN or infinite values in input_features, the first at time bin {time_bin}, "
            f"feature {feature}; list the trial in dataset.bad_trials_dict to go on without it"
        )
    return problems + (_check_labels(facts, config) if labelled else [])


def _check_labels(facts: _Facts, config) -> list[str]:
    if not 0 <= facts.seq_len <= facts.n_label_ids:
        return [f"seq_len is {facts.seq_len}, but seq_class_ids holds {facts.n_label_ids}"]
    if facts.seq_len > config.dataset.max_seq_elements:
        return [f"{facts.seq_len} labels are more than dataset.max_seq_elements ({config.dataset.max_seq_elements})"]
    wrong = sorted({label for label in facts.labels if not 1 <= label < config.dataset.n_classes})
    if wrong:
        return [f"label ids {wrong} among the {facts.seq_len} labels; they must be 1 to {config.dataset.n_classes - 1}"]
    return []


def _make_trial(
    facts: _Facts,
    session: str,
    day: int,
    split: str,
    path: Path,
    stamp: tuple[int, int],
    config,
    labelled: bool,
) -> Trial:
    labels = tuple(facts.labels)
    if not labelled and (facts.missing & set(LABELS_NEED) or _check_labels(facts, config)):
        labels = ()
    return Trial(
        session=session,
        day=day,
        split=split,
        path=str(path),
        key=facts.key,
        block_num=facts.block_num,
        trial_num=facts.trial_num,
        n_time_steps=facts.n_time_steps or 0,
        seq_len=len(labels),
        labels=labels,
        sentence_label=facts.sentence_label if labels else "",
        offset=facts.offset,
        file_stamp=stamp,
    )


def _unusable(trial: Trial, config) -> str:
    """Why a trial cannot be trained or validated on; '' where it can."""
    model = config.model
    # In training a random cut takes 0 to random_cut - 1 bins: the labels must fit into what is left.
    cut = max(config.dataset.data_transforms.random_cut - 1, 0) if trial.split == "train" else 0
    frames = output_lengths(max(trial.n_time_steps - cut, 0), model.patch_size, model.patch_stride)
    after = f" after a random cut of up to {cut}" if cut else ""
    if frames < 1:
        return f"{trial.n_time_steps} time bins{after} are fewer than one patch of {model.patch_size}"
    if trial.seq_len == 0:
        return "it has no labels (seq_len is 0)"
    if required_frames(trial.labels) > frames:
        return (
            f"its {trial.seq_len} labels need {required_frames(trial.labels)} output frames, but {trial.n_time_steps} "
            f"time bins{after} give {frames}"
        )
    return ""


def _bad_trials(config, session: str) -> set[tuple[int, int]]:
    """(block, trial) of a session listed in bad_trials_dict, {session: {block: [trials]}}; keys may be strings."""
    blocks = (config.dataset.bad_trials_dict or {}).get(session) or {}
    return {(int(block), int(trial)) for block, trials in blocks.items() for trial in trials}


def _warn_of_listed_trials_that_are_nowhere(config) -> None:
    """Name what bad_trials_dict lists and no file holds: a mistyped number would leave the bad trial in."""
    for session in config.dataset.bad_trials_dict or {}:
        directory = Path(config.dataset.dataset_dir).expanduser() / session
        paths = [path for split in SPLITS if (path := directory / f"data_{split}.hdf5").is_file()]
        try:
            places = set().union(*map(_places, paths))
        except READ_ERRORS:  # an unreadable file is named where it is indexed; what is in it is not known
            continue
        blocks = {block for block, _ in places}
        nowhere = [
            f"block {block} trial {trial}" + ("" if block in blocks else " (no such block)")
            for block, trial in sorted(_bad_trials(config, session) - places)
        ]
        if paths and nowhere:
            logger.warning(
                "dataset.bad_trials_dict lists trials that no file in %s holds: %s", directory, ", ".join(nowhere)
            )


def _places(path: Path) -> set[tuple[int, int]]:
    """(block, trial) of the trials of a file. Only attributes are read: it may be of a split that is not asked for."""
    with h5py.File(path, "r") as file:
        attributes = [group.attrs for group in file.values()]
        return {
            (_whole_number("block_num", of_trial["block_num"]), _whole_number("trial_num", of_trial["trial_num"]))
            for of_trial in attributes
            if {"block_num", "trial_num"} <= set(of_trial)
        }


def _duplicates(trials: list[Trial]) -> list[str]:
    counts = Counter((trial.block_num, trial.trial_num) for trial in trials)
    twice = [trial for trial in trials if counts[trial.block_num, trial.trial_num] > 1]
    if twice and twice[0].split == "train":  # harmless there: nothing is looked up by block and trial
        logger.warning("Found more than once: %s", "; ".join(str(trial) for trial in twice[:4]))
        return []
    return [f"{trial}: found {counts[trial.block_num, trial.trial_num]} times" for trial in twice]


# ---- reading the files, and keeping what was read ----


def read_facts(path: Path) -> tuple[list[_Facts], list[str]]:
    """What the groups of a file hold, from the cache if the file has not changed since, and what cannot be read."""
    try:
        status = path.stat()
        resolved = str(path.resolve())
    except OSError as error:
        return [], [f"{path}: {error}"]
    version = {
        "format": CACHE_FORMAT,
        "path": resolved,
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
    }
    directory = cache_directory()
    kept = None
    if directory is not None:
        kept = directory / f"{path.stem}-{hashlib.sha256(resolved.encode()).hexdigest()[:24]}.json"
        try:
            content = json.loads(kept.read_text())
            if content["version"] == version:
                return [_Facts(**facts) for facts in content["trials"]], []
        except (OSError, ValueError, KeyError, TypeError):
            pass  # not there, or not ours: read the data
    facts, problems = _read_file(path)
    if kept is not None and not problems:
        _write_atomically(kept, json.dumps({"version": version, "trials": [asdict(trial) for trial in facts]}))
    return facts, problems


def file_stamp(file: str | os.PathLike | int) -> tuple[int, int]:
    """Size in bytes and time of the last change in ns, of a path or an open file: a change shows in one of them."""
    state = os.stat(file)
    return state.st_size, state.st_mtime_ns


def cache_directory() -> Path | None:
    """Where the index is kept: beside the user's other caches, since the data may lie on a read-only disk."""
    if os.environ.get("B2TXT_CACHE_DIR"):
        return Path(os.environ["B2TXT_CACHE_DIR"]).expanduser()
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "b2txt-tpu"
    try:
        return Path.home() / ".cache" / "b2txt-tpu"
    except RuntimeError:  # a user without a home directory
        return None


def _write_atomically(path: Path, text: str) -> None:
    """Best effort: without the cache the next start is slow, but right."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".index-", delete=False) as file:
            temporary = file.name
            file.write(text)
        os.replace(temporary, path)
    except OSError as error:
        logger.debug("The index could not be kept in %s: %s", path.parent, error)
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def _read_file(path: Path) -> tuple[list[_Facts], list[str]]:
    facts, problems = [], []
    try:
        with h5py.File(path, "r") as file:
            for key in file:
                try:
                    facts.append(_read_trial(key, file[key], file.filename))
                except READ_ERRORS as error:
                    problems.append(f"{path}, {key}: cannot be read ({_in_a_line(error)}); the file is damaged")
    except READ_ERRORS as error:
        problems.append(
            f"{path}: cannot be read as HDF5 ({_in_a_line(error)}); an incomplete download? Delete it and fetch it anew"
        )
    return facts, problems


def _read_trial(key: str, group: h5py.Group, path: str) -> _Facts:
    facts = _Facts(key)
    if not isinstance(group, h5py.Group):
        return facts
    attributes = dict(group.attrs)
    for name in ("n_time_steps", "block_num", "trial_num", "seq_len"):
        if name in attributes:
            setattr(facts, name, _whole_number(name, attributes[name]))
    facts.session = _text(attributes["session"]) if "session" in attributes else None
    facts.sentence_label = _text(attributes.get("sentence_label", ""))
    if "input_features" in group:
        features = group["input_features"]
        facts.shape, facts.offset = list(features.shape), _offset(features, path)
        # Where shape and n_time_steps disagree the trial is refused anyway, and a damaged shape may be huge.
        if features.ndim == 2 and features.shape[0] == facts.n_time_steps:
            finite = np.isfinite(features[()])
            if not finite.all():
                facts.n_not_finite = int(finite.size - finite.sum())
                facts.first_not_finite = [int(index) for index in np.argwhere(~finite)[0]]
    if "seq_class_ids" in group:
        ids = group["seq_class_ids"][()]
        facts.n_label_ids = int(ids.size)
        if facts.seq_len is not None:
            facts.labels = [int(label) for label in ids.ravel()[: max(facts.seq_len, 0)]]
    return facts


def _offset(dataset: h5py.Dataset, path: str) -> int | None:
    """Where in the file at `path` a dataset's values begin; None where they are not one run of bytes there."""
    plain = dataset.dtype == np.dtype("<f4") and dataset.external is None and not dataset.is_virtual
    here = dataset.file.filename == path and dataset.file.userblock_size == 0  # a link may lead to another file
    return dataset.id.get_offset() if plain and here else None


def _whole_number(name: str, value) -> int:
    try:
        number = int(value)
        if number == float(value):
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"the attribute {name} is {value!r}, not a whole number")


def _text(value) -> str:
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.item()
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
