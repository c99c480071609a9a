"""Simulated neural recordings of attempted speech, in the file layout of the T15 data.

    python synthetic_data.py --output_dir data/simulated
    python synthetic_data.py --output_dir data/quickstart --sessions 4 --trials 200 24 24 \\
        --speaking_rate 6.5 --speech_variance 0.28 --max_words 4

A feature is the sum of three parts, in units of its own standard deviation, and is then given the session's gain and
offset and z-scored over its block, as recordings are:

    speech      phonemes -> overlapping segments -> articulatory drive (D dimensions) -> tuning of the electrode
    noise       structured, shared by many channels, not tied to speech: what the NoiseModel is for
    private     skewed like counts, independent over time and electrodes (the two features of one electrode correlate)

Everything is drawn from (seed, session, block), so a session is the same whatever the number of sessions.
"""

import argparse
import dataclasses
import datetime
import json
import os
import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import h5py
import numpy as np
from tqdm import tqdm

from ctc import required_frames
from evaluate_model_helpers import PHONEMES, SILENCE
from synthetic_sentences import GRAMMARS, draw_sentence, phoneme_labels

LABEL_WIDTH = 500  # width of seq_class_ids and transcription in the T15 files
BIN_SECONDS = 0.02
CLIP = 10.0
TRIALS_PER_BLOCK = 50
PATCH_SIZE, PATCH_STRIDE = 14, 4  # a trial is long enough for its labels at these

# Structured noise: mean share of a feature's variance.
COMMON_SLOW, COMMON_FAST = 0.008, 0.016  # one pattern of one sign: arousal, the reference electrode
MIXED_SLOW = 0.012  # patterns of both signs, wandering over seconds
ARTEFACTS = 0.008  # bursts on a part of an array, as from movement
DRIVE_NOISE = 1.5  # fast noise in the dimensions that speech uses, as a multiple of the speech's share
N_MIXED, N_ARTEFACTS = 6, 3

ARRAY_STRENGTH = (1.0, 0.6, 0.75, 0.95)  # tuning of the four arrays
STRONGEST = 1.08  # no feature's share of speech is above this multiple of the mean
DRIFT = 0.3  # share of a tuning vector that is new in the next session, as a standard deviation
ANTICIPATION = 0.5  # of the coming phoneme's drive, beside the present one's
TOKEN_NOISE = 0.2  # how differently the same phoneme is spoken each time

ARTICULATION = {
    "vowel": "AA AE AH AO AW AY EH ER EY IH IY OW OY UH UW",
    "high": "IH IY UH UW Y W EY",
    "low": "AA AE AO AW AY",
    "front": "AE EH EY IH IY Y",
    "back": "AA AO OW OY UH UW W K G NG",
    "round": "AO OW OY UH UW W SH ZH CH JH",
    "glide": "AW AY EY OW OY",
    "rhotic": "ER R",
    "labial": "B P M F V W",
    "dental": "TH DH F V",
    "alveolar": "T D S Z N L",
    "palatal": "SH ZH CH JH Y",
    "velar": "K G NG",
    "glottal": "HH",
    "stop": "B D G K P T CH JH",
    "fricative": "F V S Z SH ZH TH DH HH CH JH",
    "nasal": "M N NG",
    "lateral": "L",
    "voiced": "AA AE AH AO AW AY B D DH EH ER EY G IH IY JH L M N NG OW OY R UH UW V W Y Z ZH",
    "tense": "IY UW EY OW AA AO",
    "silence": "|",
}
N_DIMENSIONS = 12
N_RANDOM_DIMENSIONS = 8  # beside the articulatory ones, so that no two phonemes are alike


class SimulationError(ValueError):
    """What cannot be simulated, all problems at once, one a line."""


@dataclasses.dataclass(frozen=True)
class Settings:
    electrodes: int
    seed: int
    speaking_rate: float
    speech_variance: float
    words_per_sentence: tuple[int, int]

    @property
    def n_features(self) -> int:
        return 2 * self.electrodes

    @property
    def phoneme_bins(self) -> float:
        """Mean duration of a phoneme."""
        return 1 / (self.speaking_rate * BIN_SECONDS)


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


# ---- sentences and their timing ----


@dataclasses.dataclass
class Utterance:
    """One sentence as it is spoken: segment j has class classes[j] and ends at bin ends[j] (exclusive)."""

    sentence: str
    labels: list[int]
    classes: np.ndarray
    ends: np.ndarray
    split: str = ""

    @property
    def n_time_steps(self) -> int:
        return int(self.ends[-1])

    def frame_classes(self) -> np.ndarray:
        """(T,) the class spoken in each bin, silence before and after."""
        return np.repeat(self.classes, np.diff(self.ends, prepend=0))


def _duration_factors() -> np.ndarray:
    """Mean duration of each class relative to the mean phoneme (vowels long, stops short; silence: a pause)."""
    factors = np.ones(len(PHONEMES))
    for feature, factor in (("vowel", 1.15), ("glide", 1.15), ("stop", 0.8), ("fricative", 1.05)):
        factors[_classes(feature)] *= factor
    factors[SILENCE] = 0.8
    return factors


def _classes(feature: str) -> list[int]:
    return [PHONEMES.index(name) for name in ARTICULATION[feature].split()]


def speak(sentence: str, words: list[str], settings: Settings, rng: np.random.Generator) -> Utterance:
    """Give every phoneme a duration, with silence before and after the sentence and a pause after every word."""
    labels = phoneme_labels(words)
    classes = np.array([SILENCE, *labels])
    mean = settings.phoneme_bins * rng.lognormal(0, 0.1)
    bins = mean * _duration_factors()[classes] * rng.lognormal(-0.045, 0.3, len(classes))
    bins[0], bins[-1] = mean * rng.uniform(1, 2.5, 2)
    bins = np.maximum(np.rint(bins), 1).astype(int)
    # A quarter more output frames than CTC needs at least, by a longer silence at the end.
    least = PATCH_SIZE + PATCH_STRIDE * int(np.ceil(1.25 * required_frames(labels)))
    bins[-1] += max(0, least - bins.sum())
    return Utterance(sentence, labels, classes, np.cumsum(bins))


# ---- the participant and the sessions ----


def phoneme_code(rng: np.random.Generator) -> np.ndarray:
    """(C, D) articulatory drive of each class: standardised articulatory features and a few random ones."""
    code = np.zeros((len(PHONEMES), len(ARTICULATION)))
    for column, feature in enumerate(ARTICULATION):
        code[_classes(feature), column] = 1
    code = np.concatenate([code, rng.normal(0, 0.5, (len(PHONEMES), N_RANDOM_DIMENSIONS))], axis=1)
    code = code[1:] - code[1:].mean(0)
    axes = np.linalg.svd(code, full_matrices=False)[2][:N_DIMENSIONS]
    return np.concatenate([np.zeros((1, N_DIMENSIONS)), code @ axes.T])


def speech_drive(utterance: Utterance, code: np.ndarray, width: float, rng: np.random.Generator) -> np.ndarray:
    """(T, D) articulatory drive: the phoneme spoken, mixed with the coming one, blended over `width` bins."""
    tokens = code[utterance.classes]
    tokens = tokens + TOKEN_NOISE * rng.normal(0, code.std(0), tokens.shape)
    time = np.arange(utterance.n_time_steps)[:, None]
    passed = 0.5 + 0.5 * np.tanh((time - utterance.ends[None, :-1] + 0.5) / (2 * width))  # a sigmoid
    ones = np.ones_like(time)
    active = np.concatenate([ones, passed], 1) - np.concatenate([passed, 0 * ones], 1)  # (T, segments), sums to 1
    tokens[:-1] += ANTICIPATION * tokens[1:]
    return (active @ tokens).astype(np.float32)


class Participant:
    """What stays the same over the sessions: the phoneme code, the electrodes' statistics, the drive's covariance."""

    def __init__(self, settings: Settings):
        self.settings = settings
        rng = _generator(settings.seed, 0)
        self.code = phoneme_code(rng)
        self.coarticulation = 0.22 * settings.phoneme_bins
        n = settings.electrodes
        strength = np.repeat(ARRAY_STRENGTH, -(-n // len(ARRAY_STRENGTH)))[:n] * rng.lognormal(0, 0.35, n)
        self.strength = np.concatenate([strength, strength * rng.lognormal(0, 0.1, n)])
        self.counts = np.exp(rng.uniform(np.log(0.4), np.log(4), n))  # mean threshold crossings a bin
        draw = random.Random(settings.seed)
        reference = [
            speak(*draw_sentence("Conversation", "train", settings.words_per_sentence, draw), settings, rng)
            for _ in range(64)
        ]
        self.mean_bins = float(np.mean([utterance.n_time_steps for utterance in reference]))
        drive = np.concatenate([speech_drive(u, self.code, self.coarticulation, rng) for u in reference])
        self.drive_mean = drive.mean(0)
        self.drive_covariance = np.cov(drive.T)

    def draw_tuning(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Standard normal tuning and noise patterns; the second feature of an electrode resembles the first."""
        n = self.settings.electrodes
        rows = {"drive": self.drive_covariance.shape[0], "mixed": N_MIXED, "common": 1}
        tuning = {}
        for name, count in rows.items():
            first, second = rng.normal(size=(2, count, n))
            tuning[name] = np.concatenate([first, 0.8 * first + 0.6 * second], axis=1)
        return tuning


class Session:
    """Tuning and noise patterns of one session.

    Attributes:
        speech: (D, F) tuning; speech = (drive - its mean) @ speech.
        shared: (K, F) patterns of the structured noise, each for a latent of variance one.
        private: (F,) standard deviation of the private noise.
    """

    def __init__(self, participant: Participant, tuning: dict[str, np.ndarray], rng: np.random.Generator):
        settings = participant.settings
        share = settings.speech_variance
        n, n_features = settings.electrodes, settings.n_features
        drive = participant.drive_covariance
        white_to_drive = np.linalg.cholesky(drive + 1e-9 * np.eye(len(drive))).T
        # How strongly each feature is tuned drifts a little; its share of variance is the mean's, at most STRONGEST.
        strength = participant.strength * rng.lognormal(0, 0.15, n_features)
        shares = share * _capped(strength, STRONGEST)
        speech = tuning["drive"]
        speech = speech * np.sqrt(shares / np.einsum("df,de,ef->f", speech, drive, speech))
        common = np.abs(1 + 0.5 * tuning["common"])
        common /= np.sqrt((common**2).mean())
        mixed = tuning["mixed"] * np.sqrt(MIXED_SLOW / N_MIXED)
        patches = np.zeros((N_ARTEFACTS, n_features))
        for row in patches:
            centre, spread = rng.integers(n), n / 16
            distance = np.abs(np.arange(n) - centre)
            row[:] = np.tile(np.exp(-0.5 * (distance / spread) ** 2), 2)
        patches *= np.sqrt(ARTEFACTS / np.maximum((patches**2).sum(0).mean(), 1e-9))
        self.speech = speech.astype(np.float32)
        self.shared = {
            "drive": (np.sqrt(DRIVE_NOISE) * white_to_drive @ speech).astype(np.float32),
            "common_slow": (np.sqrt(COMMON_SLOW) * common).astype(np.float32),
            "common_fast": (np.sqrt(COMMON_FAST) * common).astype(np.float32),
            "mixed": mixed.astype(np.float32),
            "artefacts": patches.astype(np.float32),
        }
        structured = sum((pattern.astype(float) ** 2).sum(0) for pattern in self.shared.values())
        self.private = np.sqrt(np.maximum(1 - shares - structured, 0.05)).astype(np.float32)
        self.gain = np.exp(rng.normal(0, 0.3, n_features)).astype(np.float32)
        self.offset = rng.normal(0, 1, n_features).astype(np.float32)
        self.participant = participant


def _capped(strength: np.ndarray, most: float) -> np.ndarray:
    """Scaled to a mean of one, nothing above `most`."""
    strength = strength / strength.mean()
    for _ in range(50):
        strength = np.minimum(strength, most)
        strength = strength / strength.mean()
    return np.minimum(strength, most)


def _slow(n_bins: int, count: int, seconds: tuple[float, float], rng: np.random.Generator) -> np.ndarray:
    """(n_bins, count) float32 latents of variance one, each with an exponential memory drawn from a range."""
    memory = np.exp(rng.uniform(*np.log(seconds), count)) / BIN_SECONDS
    spectrum = 1 / np.sqrt(1 + (2 * np.pi * np.fft.rfftfreq(n_bins)[:, None] * memory) ** 2)
    latents = np.fft.irfft(np.fft.rfft(rng.normal(size=(n_bins, count)), axis=0) * spectrum, n=n_bins, axis=0)
    return (latents / np.maximum(latents.std(0), 1e-9)).astype(np.float32)


def _bursts(n_bins: int, rng: np.random.Generator) -> np.ndarray:
    """(n_bins, N_ARTEFACTS) float32: rare bumps of 0.1 to 0.5 s, of variance about one."""
    latents = np.zeros((n_bins, N_ARTEFACTS), dtype=np.float32)
    for _ in range(rng.poisson(n_bins / 150)):
        length = int(rng.integers(6, 26))
        start = int(rng.integers(max(n_bins - length, 1)))
        bump = rng.gamma(2.0, 1.5) * np.hanning(length + 2)[1:-1]
        latents[start : start + length, rng.integers(N_ARTEFACTS)] += bump[: n_bins - start]
    return latents


def simulate_block(
    session: Session, utterances: Sequence[Utterance], rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The features of one block's trials, one after the other.

    Returns:
        features (N, F), z-scored over the block and clipped; and of it speech and structured noise, (N, F) each, in
        the same units with their means removed. N bins in all; float32.
    """
    participant = session.participant
    settings = participant.settings
    n, n_bins = settings.electrodes, sum(utterance.n_time_steps for utterance in utterances)
    drive = np.concatenate([speech_drive(u, participant.code, participant.coarticulation, rng) for u in utterances])
    speech = (drive - participant.drive_mean.astype(np.float32)) @ session.speech
    latents = {
        "drive": rng.standard_normal((n_bins, drive.shape[1]), dtype=np.float32),
        "common_slow": _slow(n_bins, 1, (0.5, 3), rng),
        "common_fast": rng.standard_normal((n_bins, 1), dtype=np.float32),
        "mixed": _slow(n_bins, N_MIXED, (0.2, 3), rng),
        "artefacts": _bursts(n_bins, rng),
    }
    noise = np.concatenate(list(latents.values()), 1) @ np.concatenate(list(session.shared.values()))
    features = np.empty((n_bins, 2 * n), dtype=np.float32)
    # Threshold crossings: counts. Spike-band power: partly the same spikes, partly a skewed background.
    features[:, :n] = rng.poisson(participant.counts, (n_bins, n))
    features[:, :n] -= participant.counts.astype(np.float32)
    features[:, :n] /= np.sqrt(participant.counts).astype(np.float32)
    background = rng.standard_normal((n_bins, n), dtype=np.float32)
    background = (background + 0.15 * (background**2 - 1)) / np.float32(np.sqrt(1 + 2 * 0.15**2))
    features[:, n:] = np.float32(0.4) * features[:, :n] + np.float32(np.sqrt(1 - 0.4**2)) * background
    features *= session.private
    features += speech
    features += noise
    # The session's gain and offset, which z-scoring a block takes out again, as in the recordings.
    features *= session.gain
    features += session.offset
    mean, std = features.mean(0, dtype=np.float64), features.std(0, dtype=np.float64) + 1e-9
    features -= mean.astype(np.float32)
    features /= std.astype(np.float32)
    np.clip(features, -CLIP, CLIP, out=features)
    for part in (speech, noise):
        part -= part.mean(0)
        part *= (session.gain / std).astype(np.float32)
    return features, speech, noise


def _generator(seed: int, *key: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))


def sessions_of(participant: Participant) -> Iterator[Session]:
    """Session after session, without end: tuning and noise patterns walk away from the first one's."""
    seed = participant.settings.seed
    tuning = participant.draw_tuning(_generator(seed, 1))
    index = 0
    while True:
        rng = _generator(seed, 2, index)
        if index:
            step = participant.draw_tuning(rng)
            tuning = {name: np.sqrt(1 - DRIFT**2) * tuning[name] + DRIFT * step[name] for name in tuning}
        yield Session(participant, tuning, rng)
        index += 1


# ---- the data set ----


@dataclasses.dataclass
class Block:
    number: int
    corpus: str
    splits: list[str]  # of its trials, in order


def plan_blocks(trials: tuple[int, int, int], rng: np.random.Generator) -> list[Block]:
    """Blocks of at most 50 trials: some of train, then some that val and test share; one in three of small vocabulary."""
    n_train, n_val, n_test = trials
    train = ["train"] * n_train
    held_out = list(rng.permutation(["val"] * n_val + ["test"] * n_test)) if n_val + n_test else []
    blocks = []
    for splits in (train, held_out):
        if not splits:
            continue
        n_blocks = -(-len(splits) // TRIALS_PER_BLOCK)
        n_blocks = max(n_blocks, min(2, len(splits)))
        for index, part in enumerate(np.array_split(np.array(splits), n_blocks)):
            corpus = "50-Word" if index % 3 == 1 else "Conversation"
            blocks.append(Block(len(blocks) + 1, corpus, part.tolist()))
    return blocks


def session_names(count: int) -> list[str]:
    """Invented dates, three and four days apart by turns."""
    first = datetime.date(2030, 1, 6)
    days = [first + datetime.timedelta(days=3 * index + index // 2) for index in range(count)]
    return [f"t15.{day:%Y.%m.%d}" for day in days]


def _check(sessions, trials, settings: Settings, output_dir: Path) -> list[str]:
    problems = []
    if isinstance(sessions, int):
        if sessions < 1:
            problems.append(f"sessions is {sessions}: at least 1 is needed")
    else:
        if not sessions:
            problems.append("sessions is empty: give a number or names such as t15.2030.01.06")
        if len(set(sessions)) != len(sessions):
            problems.append("sessions holds a name twice")
        for name in sessions:
            try:
                datetime.datetime.strptime(name, "t15.%Y.%m.%d")
            except ValueError:
                problems.append(f"session {name!r} is not named t15.YYYY.MM.DD")
    if len(trials) != 3 or min(trials, default=0) < 0 or trials[0] < 1:
        problems.append(f"trials is {tuple(trials)}: give train, val and test a session, train at least 1")
    if settings.electrodes < 4:
        problems.append(f"electrodes is {settings.electrodes}: at least 4 are needed, one an array")
    if settings.seed < 0:
        problems.append(f"seed is {settings.seed}: it must be 0 or more")
    if not 0.5 <= settings.speaking_rate <= 15:
        problems.append(f"speaking_rate is {settings.speaking_rate}: give 0.5 to 15 phonemes a second")
    if not 0 < settings.speech_variance <= 0.35:
        problems.append(f"speech_variance is {settings.speech_variance}: give more than 0 and at most 0.35")
    fewest, most = settings.words_per_sentence
    if not 1 <= fewest <= most:
        problems.append(
            f"words_per_sentence is {fewest} to {most}: the first must be 1 or more and not above the second"
        )
    if most > 40:
        problems.append(
            f"words_per_sentence goes up to {most}: more than 40 do not fit the files' {LABEL_WIDTH} labels"
        )
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        problems.append(f"{output_dir} exists and is not an empty directory: choose another, or remove it first")
    return problems


def simulate(
    output_dir: str | os.PathLike,
    *,
    sessions: int | Sequence[str] = 4,
    trials: tuple[int, int, int] = (180, 32, 32),
    electrodes: int = 256,
    seed: int = 0,
    speaking_rate: float = 2.8,
    speech_variance: float = 0.08,
    words_per_sentence: tuple[int, int] = (3, 12),
    write_noise: bool = False,
    progress: bool = True,
) -> list[str]:
    """Write a simulated data set in the T15 layout.

    Args:
        output_dir: a new or empty directory; it appears under this name when it is complete.
        sessions: how many, or their names. The first has a train split only.
        trials: sentences of train, val and test in a session.
        electrodes: each gives two features.
        speaking_rate: phonemes a second.
        speech_variance: mean share of a feature's variance that is speech; no feature's is above 1.2 times that.
        words_per_sentence: fewest and most.
        write_noise: write the structured noise of each trial along, as the dataset `noise` (T, F) of its group.
        progress: show a bar, if standard error is a terminal.
    Returns:
        the names of the sessions.
    Raises:
        SimulationError: an option cannot be met, or the disk is too small.
    """
    output_dir = Path(output_dir)
    settings = Settings(electrodes, seed, speaking_rate, speech_variance, tuple(words_per_sentence))
    problems = _check(sessions, trials, settings, output_dir)
    if problems:
        raise SimulationError("\n".join(problems))
    names = session_names(sessions) if isinstance(sessions, int) else list(sessions)
    participant = Participant(settings)
    n_trials = len(names) * trials[0] + (len(names) - 1) * (trials[1] + trials[2])
    _check_disk(output_dir, n_trials, participant, write_noise)

    partial = output_dir.with_name(output_dir.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)  # of a run that was killed
    partial.mkdir(parents=True)
    try:
        with (
            tqdm(total=n_trials, unit="trial", disable=None if progress else True) as bar,
            open(partial / "description.csv", "w") as description,
            open(partial / "test_transcriptions.csv", "w") as answers,
        ):
            description.write("Date,Post-implant day,Block number,Number of sentences,Corpus,Split\n")
            answers.write("session,block,trial,sentence,phonemes\n")
            first = datetime.datetime.strptime(names[0], "t15.%Y.%m.%d")
            for index, (name, session) in enumerate(zip(names, sessions_of(participant), strict=False)):
                date = datetime.datetime.strptime(name, "t15.%Y.%m.%d")
                counts = trials if index else (trials[0], 0, 0)
                for block in _write_session(partial / name, session, name, index, counts, write_noise, answers, bar):
                    split = "Train" if "train" in block.splits else "Val/Test"
                    description.write(
                        f"{date:%Y-%m-%d},{25 + (date - first).days},{block.number},{len(block.splits)},"
                        f"{block.corpus},{split}\n"
                    )
        record = {**dataclasses.asdict(settings), "sessions": names, "trials": list(trials)}
        (partial / "simulation.json").write_text(json.dumps(record, indent=1) + "\n")
        if output_dir.exists():
            output_dir.rmdir()
        partial.rename(output_dir)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return names


def _check_disk(output_dir: Path, n_trials: int, participant: Participant, write_noise: bool) -> None:
    trial_bytes = participant.mean_bins * participant.settings.n_features * 4 * (2 if write_noise else 1)
    needed = n_trials * (trial_bytes + 8192)
    existing = next(path for path in (output_dir, *output_dir.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > 0.95 * free:
        raise SimulationError(
            f"{n_trials} trials need about {needed / 1e9:.1f} GB and {existing} has {free / 1e9:.1f} GB free: "
            "simulate fewer sessions, trials or electrodes, or choose another disk"
        )


def _write_session(directory, session, name, index, counts, write_noise, answers, bar) -> list[Block]:
    """Write the files of one session and the test sentences; returns the session's blocks."""
    settings = session.participant.settings
    directory.mkdir()
    blocks = plan_blocks(counts, _generator(settings.seed, 3, index))
    files = {
        split: h5py.File(directory / f"data_{split}.hdf5", "w")
        for split, count in zip(("train", "val", "test"), counts, strict=True)
        if count
    }
    written = dict.fromkeys(files, 0)
    try:
        for block in blocks:
            rng = _generator(settings.seed, 4, index, block.number)
            draw = random.Random(int(rng.integers(2**62)))
            utterances = []
            for split in block.splits:
                utterance = speak(*draw_sentence(block.corpus, split, settings.words_per_sentence, draw), settings, rng)
                utterance.split = split
                utterances.append(utterance)
            features, _, noise = simulate_block(session, utterances, rng)
            start = 0
            for trial_num, utterance in enumerate(utterances):
                split, end = utterance.split, start + utterance.n_time_steps
                labels, sentence = utterance.labels, utterance.sentence
                if split == "test":
                    phonemes = " ".join(PHONEMES[label] for label in labels)
                    answers.write(f"{name},{block.number},{trial_num},{sentence},{phonemes}\n")
                    labels = sentence = None
                group = write_trial(
                    files[split],
                    f"trial_{written[split]:04d}",
                    features[start:end],
                    name,
                    block.number,
                    trial_num,
                    labels,
                    sentence,
                )
                if write_noise:
                    group.create_dataset("noise", data=noise[start:end])
                written[split] += 1
                start = end
                bar.update()
    finally:
        for file in files.values():
            file.close()
    return blocks


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output_dir", default="data/simulated", help="a new or empty directory")
    parser.add_argument("--sessions", nargs="+", default=["4"], help="how many, or names such as t15.2030.01.06")
    parser.add_argument(
        "--trials", nargs=3, type=int, default=[180, 32, 32], metavar=("TRAIN", "VAL", "TEST"), help="a session"
    )
    parser.add_argument("--electrodes", type=int, default=256, help="each gives two features")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--speaking_rate", type=float, default=2.8, help="phonemes a second")
    parser.add_argument(
        "--speech_variance", type=float, default=0.08, help="signal to noise: speech's share of a feature's variance"
    )
    parser.add_argument("--min_words", type=int, default=None, help="fewest words of a sentence")
    parser.add_argument("--max_words", type=int, default=12, help="most words of a sentence")
    parser.add_argument("--write_noise", action="store_true", help="write each trial's structured noise along")
    options = parser.parse_args(arguments)
    numbered = len(options.sessions) == 1 and options.sessions[0].lstrip("-").isdigit()
    fewest = options.min_words if options.min_words is not None else min(3, options.max_words)
    try:
        names = simulate(
            options.output_dir,
            sessions=int(options.sessions[0]) if numbered else options.sessions,
            trials=tuple(options.trials),
            electrodes=options.electrodes,
            seed=options.seed,
            speaking_rate=options.speaking_rate,
            speech_variance=options.speech_variance,
            words_per_sentence=(fewest, options.max_words),
            write_noise=options.write_noise,
        )
    except SimulationError as error:
        print(error, file=sys.stderr)
        return 2
    print(
        f"Simulated {len(names)} sessions in {options.output_dir}. Speech explains {options.speech_variance:.0%} of "
        "a feature's variance (recordings: at most about 10%)."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
