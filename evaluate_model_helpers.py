"""What evaluation knows about phonemes, errors and result files.

The phoneme table of the Brain-to-Text '25 data, error counts that are summed and divided once (never averages
of rates), the description of its blocks, and the prediction and submission files.
"""

import csv
import io
import itertools
import logging
import math
import os
import re
import tempfile
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rapidfuzz.distance import Levenshtein

logger = logging.getLogger("b2txt")

# The order is the data's own: class 0 is the CTC blank, 40 the silence that follows every word.
# fmt: off
PHONEMES: tuple[str, ...] = (
    "BLANK",
    "AA", "AE", "AH", "AO", "AW", "AY", "B", "CH", "D", "DH", "EH", "ER", "EY",
    "F", "G", "HH", "IH", "IY", "JH", "K", "L", "M", "N", "NG", "OW", "OY",
    "P", "R", "S", "SH", "T", "TH", "UH", "UW", "V", "W", "Y", "Z", "ZH",
    "|",
)
# fmt: on
BLANK = 0
SILENCE = len(PHONEMES) - 1
UNKNOWN_CORPUS = "unknown"

_PHONEME_IDS = {name: index for index, name in enumerate(PHONEMES)}
_DESCRIPTION_COLUMNS = ("Date", "Block number", "Corpus")
SUBMISSION_COLUMNS = ("id", "text")
# pandas.read_csv takes these for no value at all, in quotes too (its STR_NA_VALUES, in the lower case of our texts
# and as others may write them).
READ_AS_MISSING = frozenset(
    [
        *("nan", "NaN", "-nan", "-NaN", "null", "NULL", "None", "NA", "N/A", "n/a", "<NA>", "#N/A", "#NA"),
        *("#N/A N/A", "1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN"),
    ]
)


def phonemes_to_text(ids: Iterable[int]) -> str:
    """Names of phoneme classes, one space between two: [16, 6, 40] -> 'HH AY |'."""
    ids = list(ids)
    wrong = [index for index in ids if not 0 <= index < len(PHONEMES)]
    if wrong:
        raise ValueError(f"no phoneme has the class {wrong[0]}; classes are 0 to {len(PHONEMES) - 1}")
    return " ".join(PHONEMES[index] for index in ids)


def text_to_phonemes(text: str) -> list[int]:
    """Classes of phoneme names between any white space: 'HH AY  | ' -> [16, 6, 40]."""
    names = text.split()
    wrong = [name for name in names if name not in _PHONEME_IDS]
    if wrong:
        raise ValueError(f"{wrong[0]!r} in {text!r} is no phoneme; phonemes are {' '.join(PHONEMES)}")
    return [_PHONEME_IDS[name] for name in names]


# ---- errors ----


@dataclass(frozen=True)
class ErrorCount:
    """Edits against the length of the reference, over one trial or the sum of many.

    Counts are added and divided once, by `rate`: a mean of trials' or sessions' rates is another number.
    """

    edits: int = 0
    length: int = 0  # labels in the references
    n_trials: int = 0

    def __add__(self, other: "ErrorCount") -> "ErrorCount":
        if not isinstance(other, ErrorCount):
            return NotImplemented
        return ErrorCount(self.edits + other.edits, self.length + other.length, self.n_trials + other.n_trials)

    @property
    def rate(self) -> float:
        """Edits / length, a fraction that may exceed 1; NaN where there is no reference to err against.

        NaN and not None, so that a log can print it and no comparison with it is ever true; `json_rate`
        turns it into the null that JSON has.
        """
        return self.edits / self.length if self.length else math.nan


def json_rate(rate: float) -> float | None:
    """A rate as JSON can hold it: None for NaN."""
    return None if math.isnan(rate) else rate


def edit_distance(true: Sequence[int], decoded: Sequence[int]) -> int:
    """Least number of substitutions, insertions and deletions between two label sequences."""
    return Levenshtein.distance(true, decoded)


def count_errors(true: Sequence[int], decoded: Sequence[int]) -> ErrorCount:
    """Errors of one trial."""
    return ErrorCount(edit_distance(true, decoded), len(true), 1)


def sum_errors(counts: Iterable[ErrorCount]) -> ErrorCount:
    """Errors of all trials together; its rate is the micro-averaged PER."""
    return sum(counts, ErrorCount())


def sum_errors_by(keys: Iterable[Hashable], counts: Iterable[ErrorCount]) -> dict:
    """Errors a group, in the order in which the groups first come.

    Args:
        keys: the group of each trial: its session, its corpus.
        counts: errors of each trial.
    """
    groups: dict = {}
    for key, count in zip(keys, counts, strict=True):
        groups[key] = groups.get(key, ErrorCount()) + count
    return groups


def bootstrap_interval(
    counts: Sequence[ErrorCount], n_resamples: int = 2000, seed: int = 0
) -> tuple[float, float] | None:
    """A 95% interval of the summed rate, by drawing as many trials again and again (the percentile bootstrap).

    Trials are what is drawn, since the errors of one sentence hang together (Bisani and Ney, "Bootstrap estimates
    for confidence intervals in ASR performance evaluation", 2004).

    Returns:
        lower and upper end, fractions; None where no trial has a reference.
    """
    edits = np.array([count.edits for count in counts])
    lengths = np.array([count.length for count in counts])
    if not lengths.sum():
        return None
    draw = np.random.default_rng(seed)
    rates = []
    for _ in range(n_resamples):
        drawn = draw.integers(len(counts), size=len(counts))
        rates.append(edits[drawn].sum() / max(lengths[drawn].sum(), 1))
    low, high = np.quantile(rates, [0.025, 0.975])
    return float(low), float(high)


def confusions(pairs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Counter:
    """What was decoded in place of what, over (true, decoded) sequences.

    Returns:
        Counter of (true class, decoded class): substitutions; (true class, None): deletions;
        (None, decoded class): insertions. Its total is the edit distance of all pairs.
    """
    counter: Counter = Counter()
    for true, decoded in pairs:
        for edit in Levenshtein.editops(true, decoded):
            counter[
                None if edit.tag == "insert" else true[edit.src_pos],
                None if edit.tag == "delete" else decoded[edit.dest_pos],
            ] += 1
    return counter


def name_confusions(counter: Counter, n: int | None = None) -> list[tuple[str, str, int]]:
    """The n commonest confusions as (true name, decoded name, count); '' for nothing (deleted, inserted).

    Ties stand in the order of the classes, so that the same errors always give the same list.
    """
    ranked = sorted(counter.items(), key=lambda item: (-item[1], *(-1 if i is None else i for i in item[0])))
    names = ["" if index is None else PHONEMES[index] for pair, _ in ranked[:n] for index in pair]
    return [(names[2 * i], names[2 * i + 1], count) for i, (_, count) in enumerate(ranked[:n])]


# ---- sessions and blocks ----


def session_date(session: str) -> str | None:
    """'t15.2023.08.11' -> '2023-08-11'; None for a session that is not named after its date."""
    match = re.search(r"(\d{4})\.(\d{2})\.(\d{2})$", session)
    return "-".join(match.groups()) if match else None


def trial_order(session: str, block_num: int, trial_num: int) -> tuple:
    """Sort key of the submission's rows: date of the session, then block, then trial."""
    return session_date(session) or session, session, block_num, trial_num


def read_description(csv_path: str | Path) -> dict[tuple[str, int], str]:
    """The corpus of every block, from the description that comes with the T15 data.

    Returns:
        {(date 'YYYY-MM-DD', block number): corpus}
    Raises:
        ValueError: no such file, missing columns, a row that cannot be read, a block with two corpora.
    """
    csv_path = Path(csv_path)
    try:
        text = csv_path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{csv_path}: cannot be read as the description of the blocks: {error}") from error
    reader = csv.DictReader(io.StringIO(text, newline=""))
    columns = [name.strip() for name in reader.fieldnames or ()]
    reader.fieldnames = columns
    missing = [name for name in _DESCRIPTION_COLUMNS if name not in columns]
    if missing:
        raise ValueError(f"{csv_path}: lacks the columns {missing}; found {columns}")
    description: dict[tuple[str, int], str] = {}
    problems = []
    for row in reader:
        date, block, corpus = ((row[name] or "").strip() for name in _DESCRIPTION_COLUMNS)
        if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", date) or not block.isdigit() or not corpus:
            problems.append(f"line {reader.line_num}: date {date!r} (YYYY-MM-DD), block {block!r}, corpus {corpus!r}")
        elif description.setdefault((date, int(block)), corpus) != corpus:
            known = description[date, int(block)]
            problems.append(f"line {reader.line_num}: block {block} of {date} is {known!r} and {corpus!r}")
    if problems:
        raise ValueError(f"{csv_path}: rows that cannot be used:\n" + "\n".join(problems))
    return description


def corpora_of_blocks(blocks: Sequence[tuple[str, int]], description: Mapping[tuple[str, int], str]) -> list[str]:
    """The corpus of each (session, block number), 'unknown' with one warning where it is not described."""
    corpora = [description.get((session_date(session), block)) for session, block in blocks]
    absent = sorted({block for block, corpus in zip(blocks, corpora, strict=True) if corpus is None})
    if absent:
        named = ", ".join(f"{session} block {block}" for session, block in absent[:5])
        more = f" and {len(absent) - 5} more" if len(absent) > 5 else ""
        logger.warning("the description has no row for %s%s: corpus '%s'", named, more, UNKNOWN_CORPUS)
    return [corpus or UNKNOWN_CORPUS for corpus in corpora]


# ---- result files ----


def check_writable(directory: str | Path, option: str = "--output_dir") -> Path:
    """Make the directory and try it with a file, so that no long computation ends in nothing.

    Args:
        option: of the command that chooses another place, for the message.
    """
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ValueError(
            f"{directory}: results cannot be written there ({error.strerror or error}); "
            f"name a directory that can be written with {option}"
        ) from error
    return directory


def unreadable(files: Mapping[str, str | Path | Sequence[str | Path] | None]) -> list[str]:
    """What is wrong with files that a command is to read, without opening them.

    Args:
        files: of each option the file or files, or None.
    """
    problems = []
    for option, paths in files.items():
        for path in [paths] if isinstance(paths, str | Path) else paths or ():
            path = Path(path)
            if not path.exists():
                problems.append(f"{option} {path}: no such file")
            elif path.is_dir():
                problems.append(f"{option} {path}: is a directory, not a file")
            elif not os.access(path, os.R_OK):
                problems.append(f"{option} {path}: may not be read by this user")
    return problems


def prediction_rows(
    places: Sequence[tuple[str, int, int]],
    decoded: Sequence[Sequence[int]],
    truths: Sequence[Sequence[int]] | None = None,
    corpora: Sequence[str] | None = None,
    texts: Sequence[str] | None = None,
    references: Sequence[str] | None = None,
) -> list[dict]:
    """One row a trial for `write_predictions`; its id is its place.

    Args:
        places: session, block and trial number of each trial, in the submission's order.
        decoded: phoneme classes of each trial.
        truths: true phoneme classes, for the columns of truth and errors.
        corpora: of each trial, for that column.
        texts, references: decoded and true sentences, for theirs; where a true sentence is '', as nothing is known,
            so are its errors.
    """
    rows = []
    for index, ((session, block, trial), ids) in enumerate(zip(places, decoded, strict=True)):
        row = {"id": index, "session": session, "block": block, "trial": trial}
        if corpora is not None:
            row["corpus"] = corpora[index]
        if truths is not None:
            row["true_phonemes"] = phonemes_to_text(truths[index])
        row["predicted_phonemes"] = phonemes_to_text(ids)
        if truths is not None:
            row |= {"edits": edit_distance(truths[index], ids), "n_phonemes": len(truths[index])}
        if texts is not None:
            if references is not None:
                row["true_sentence"] = references[index]
            row["predicted_sentence"] = texts[index]
            if references is not None:
                true, words = references[index].split(), texts[index].split()
                row |= {"word_edits": edit_distance(true, words) if true else "", "n_words": len(true) or ""}
        rows.append(row)
    return rows


def write_text_atomically(path: str | Path, text: str) -> None:
    """Write a file that is either the old one or the whole new one, also if the disk fills up on the way."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_predictions(path: str | Path, rows: Sequence[Mapping], n_trials: int) -> None:
    """Write one row a trial as CSV; the columns are the first row's keys.

    Args:
        path: replaced as a whole.
        rows: each with id, session, block, trial and any further columns, in the submission's order.
        n_trials: trials that must be there.
    Raises:
        ValueError: rows are missing, added or out of order; nothing is written then.
    """
    _check(path, row_problems(rows, n_trials))
    _write_csv(path, list(rows[0]) if rows else ["id"], rows)


def write_submission(path: str | Path, rows: Sequence[Mapping], texts: Sequence[str]) -> None:
    """Write the submission: `id,text`, a row a trial, in the order of session date, block and trial; and read it back.

    Args:
        path: replaced as a whole.
        rows: each with id, session, block and trial, in order.
        texts: of each row, never empty: readers take an empty cell for a missing value. So they do a text that is
            only "null" or "nan"; such a word gets a space after it, which parts no words and hides it from them.
    Raises:
        ValueError: rows are missing, added, out of order, empty or hold a line break, and nothing is written then;
            or what was written cannot be read back.
    """
    problems = row_problems(rows, len(texts))
    problems += [f"row {i}: line break in {text!r}" for i, text in enumerate(texts) if len(text.splitlines()) > 1]
    problems += [f"row {i}: no text" for i, text in enumerate(texts) if not text.strip()]
    _check(path, problems)
    submission = [
        dict(zip(SUBMISSION_COLUMNS, (row["id"], _unmistakable(text.strip())), strict=True))
        for row, text in zip(rows, texts, strict=True)
    ]
    _write_csv(path, SUBMISSION_COLUMNS, submission)
    problems = submission_problems(path, len(rows))
    if problems:
        raise ValueError(f"{path}: was written wrongly:\n" + "\n".join(problems[:10]))


def _unmistakable(text: str) -> str:
    return text + " " if text in READ_AS_MISSING else text


def submission_problems(path: str | Path, n_trials: int) -> list[str]:
    """What is wrong with a submission file, one line each; nothing if it can be handed in.

    Args:
        n_trials: trials of the test split, one row each.
    """
    try:
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            rows = [(reader.line_num, row) for row in reader]
    except OSError as error:
        return [f"cannot be read: {error.strerror}"]
    except (UnicodeDecodeError, csv.Error) as error:
        return [f"cannot be read as a CSV file in UTF-8: {error}"]
    if header != list(SUBMISSION_COLUMNS):
        return [f"the first line must be {','.join(SUBMISSION_COLUMNS)}, not {','.join(header)[:60]!r}"]
    problems = [] if len(rows) == n_trials else [f"{len(rows)} rows for {n_trials} test trials"]
    seen: dict[str, int] = {}
    for expected, (number, row) in enumerate(rows):
        if len(row) != len(SUBMISSION_COLUMNS):
            reason = f"{len(row)} fields; a text that holds a comma stands in quotes" if row else "is empty"
            problems.append(f"line {number}: {reason}")
            continue
        identifier, text = row
        if identifier in seen:
            problems.append(f"line {number}: id {identifier} stands in line {seen[identifier]} already")
        elif identifier != str(expected):
            problems.append(f"line {number}: id {identifier!r} where {expected} is due; ids count from 0")
        seen.setdefault(identifier, number)
        if not any(letter.isalnum() for letter in text):
            problems.append(f"line {number}: no word in the text {text[:40]!r}")
        elif text in READ_AS_MISSING:
            problems.append(f"line {number}: pandas reads {text!r} as a missing value; write a space after it")
        elif "\0" in text or len((text + "x").splitlines()) > 1:
            problems.append(f"line {number}: a line break or a NUL byte in the text")
    return problems


def row_problems(rows: Sequence[Mapping], n_trials: int) -> list[str]:
    """What keeps rows with id, session, block and trial from being a result file, one line each."""
    problems = []
    if len(rows) != n_trials:
        problems.append(f"{len(rows)} rows for {n_trials} trials")
    wrong = [(i, row["id"]) for i, row in enumerate(rows) if row["id"] != i]
    if wrong:
        problems.append(f"ids must count from 0: row {wrong[0][0]} has id {wrong[0][1]}")
    places = [trial_order(row["session"], row["block"], row["trial"]) for row in rows]
    for before, after in itertools.pairwise(places):
        if before >= after:
            problems.append(
                f"{after[1]} block {after[2]} trial {after[3]} must not stand after "
                f"{before[1]} block {before[2]} trial {before[3]}"
            )
    return problems


def _check(path: str | Path, problems: list[str]) -> None:
    if problems:
        raise ValueError(f"{path} not written:\n" + "\n".join(problems[:10]))


def _write_csv(path: str | Path, columns: Sequence[str], rows: Iterable[Mapping]) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text_atomically(path, text.getvalue())
