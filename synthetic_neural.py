"""The neural side of the simulator: from a sentence's phonemes to binned features.

A feature is the sum of three parts, in units of its own standard deviation:

    speech    phonemes -> overlapping segments -> articulatory drive of 12 dimensions -> tuning of the electrode
    noise     structured: shared by many channels and not tied to speech; what the NoiseModel is for
    private   skewed like counts, independent over time and electrodes; the two features of an electrode correlate

It then gets the session's gain and offset and is z-scored over its block, as recordings are. The numbers below are
set so that the default resembles a real trial (Willett et al. 2023, participant T12): the autocorrelation of its
slow signal, the spread of its channel correlations, its principal components and its skew. Speech is easy to read over
several bins and hard in a single one, for most of the structured noise is fast and lies in the dimensions that speech
uses: only averaging over time removes it.

Axes: T bins of a trial, N bins of a block, F features, C classes, D dimensions of the articulatory drive.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from ctc import required_frames
from evaluate_model_helpers import PHONEMES, SILENCE
from synthetic_sentences import phoneme_labels

BIN_SECONDS = 0.02
CLIP = 10.0
PATCH_SIZE, PATCH_STRIDE = 14, 4  # of the decoders: a trial is long enough for its labels at these

ARTICULATION = {
    "vowel": "AA AE AH AO AW AY EH ER EY IH IY OW OY UH UW",
    "high": "IH IY UH UW Y W EY",
    "low": "AA AE AO AW AY",
    "front": "AE EH EY IH IY Y",
    "back": "AA AO OW OY UH UW W K G NG",
    "round": "AO OW OY UH UW W SH ZH CH JH",
    "glide": "AW AY EY OW OY",
    "tense": "IY UW EY OW AA AO",
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
    "silence": "|",
}
N_RANDOM = 8  # dimensions of each phoneme's own beside the articulatory ones, so that no two are alike
N_DIMENSIONS = 12  # principal axes of the phonemes that are kept
ANTICIPATION = 0.5  # of the coming phoneme's drive, added to the present one's
COARTICULATION = 0.22  # width of the blend between two phonemes, in mean durations of one
TOKEN_NOISE = 0.2  # how differently the same phoneme is spoken each time, relative to how phonemes differ

ARRAY_STRENGTH = (1.0, 0.6, 0.75, 0.95)  # tuning of the four arrays
STRONGEST = 1.08  # no feature's share of speech is above this multiple of the mean
DRIFT = 0.3  # share of a tuning vector that is new in the next session, as a standard deviation

# Structured noise, as the mean share of a feature's variance.
DRIVE_NOISE = 1.7  # fast, in the dimensions that speech uses; as a multiple of the share of speech
COMMON_SLOW, COMMON_FAST = 0.008, 0.016  # one pattern of one sign: arousal, the reference electrode
MIXED_SLOW, N_MIXED = 0.012, 6  # patterns of both signs, wandering over seconds
ARTEFACTS, N_ARTEFACTS = 0.008, 3  # bursts on a part of the electrodes, as from movement
OFFSET_DRIFT = 0.003  # of a feature's offset in the course of a block
LEAST_PRIVATE = 0.05  # private noise that every feature keeps

SAME_ELECTRODE = 0.4  # correlation of the private noise of an electrode's two features
SKEW = 0.2  # of the spike-band power that is not the counted spikes'


@dataclasses.dataclass(frozen=True)
class Settings:
    electrodes: int = 256
    seed: int = 0
    speaking_rate: float = 2.5  # phonemes a second
    speech_variance: float = 0.075  # mean share of a feature's variance that is speech
    structured_noise: float = 1.0  # its variance, as a multiple of the constants above
    new_noise: float = 0.0  # mean share of a feature's variance of noise whose patterns are the session's own

    @property
    def phoneme_bins(self) -> float:
        """Mean duration of a phoneme in bins."""
        return 1 / (self.speaking_rate * BIN_SECONDS)

    @property
    def explained(self) -> float:
        """Mean share of a feature's variance that is not private."""
        shared = DRIVE_NOISE * self.speech_variance + COMMON_SLOW + COMMON_FAST + MIXED_SLOW + ARTEFACTS + OFFSET_DRIFT
        return self.speech_variance + self.structured_noise * shared + self.new_noise


def generator(seed: int, *key: int) -> np.random.Generator:
    """One of many independent generators of a seed, told apart by integers."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))


# ---- timing ----


@dataclasses.dataclass(frozen=True)
class Utterance:
    """One sentence as it is spoken: segment j is of class classes[j] and ends before bin ends[j]."""

    sentence: str
    labels: list[int]
    classes: np.ndarray
    ends: np.ndarray

    @property
    def n_time_steps(self) -> int:
        return int(self.ends[-1])

    def frame_classes(self) -> np.ndarray:
        """(T,) the class spoken in each bin; silence before, between words and after."""
        return np.repeat(self.classes, np.diff(self.ends, prepend=0))


def _classes(feature: str) -> list[int]:
    return [PHONEMES.index(name) for name in ARTICULATION[feature].split()]


def _duration_factors() -> np.ndarray:
    """(C,) mean duration of each class relative to the mean phoneme's; of silence, that of a pause between words."""
    factors = np.ones(len(PHONEMES))
    for feature, factor in (("vowel", 1.15), ("glide", 1.15), ("stop", 0.8), ("fricative", 1.05)):
        factors[_classes(feature)] *= factor
    factors[SILENCE] = 0.8
    return factors


DURATION_FACTORS = _duration_factors()


def speak(sentence: str, words: list[str], settings: Settings, rng: np.random.Generator) -> Utterance:
    """Give every phoneme a duration, with silence before and after the sentence and a pause after every word."""
    labels = phoneme_labels(words)
    classes = np.array([SILENCE, *labels])
    mean = settings.phoneme_bins * rng.lognormal(0, 0.1)
    bins = mean * DURATION_FACTORS[classes] * rng.lognormal(-0.045, 0.3, len(classes))
    bins[0], bins[-1] = mean * rng.uniform(1, 2.5, 2)
    bins = np.maximum(np.rint(bins), 1).astype(int)
    # At least a quarter more output frames than CTC needs; where speech is very fast, by a longer silence at the end.
    least = PATCH_SIZE + PATCH_STRIDE * int(np.ceil(1.25 * required_frames(labels)))
    bins[-1] += max(0, least - bins.sum())
    return Utterance(sentence, labels, classes, np.cumsum(bins))


# ---- articulation ----


def phoneme_code(rng: np.random.Generator) -> np.ndarray:
    """(C, D) articulatory drive of each class: the principal axes of its articulatory and its random features."""
    table = np.zeros((len(PHONEMES), len(ARTICULATION)))
    for column, feature in enumerate(ARTICULATION):
        table[_classes(feature), column] = 1
    table = np.concatenate([table, rng.normal(0, 0.5, (len(PHONEMES), N_RANDOM))], axis=1)[1:]
    table -= table.mean(0)
    axes = np.linalg.svd(table, full_matrices=False)[2][:N_DIMENSIONS]
    return np.concatenate([np.zeros((1, N_DIMENSIONS)), table @ axes.T])  # the blank is never spoken


def speech_drive(utterance: Utterance, code: np.ndarray, width: float, rng: np.random.Generator) -> np.ndarray:
    """(T, D) articulatory drive: the phoneme spoken and a part of the coming one, blended over `width` bins."""
    tokens = code[utterance.classes]
    tokens = tokens + TOKEN_NOISE * rng.normal(0, code[1:].std(0), tokens.shape)
    tokens[:-1] += ANTICIPATION * tokens[1:]
    time = np.arange(utterance.n_time_steps)[:, None]
    passed = 0.5 + 0.5 * np.tanh((time - utterance.ends[None, :-1] + 0.5) / (2 * width))  # a sigmoid a boundary
    ones = np.ones_like(passed[:, :1])
    active = np.concatenate([ones, passed], 1) - np.concatenate([passed, 0 * ones], 1)  # (T, segments), sums to 1
    return (active @ tokens).astype(np.float32)


# ---- participant and sessions ----


class Participant:
    """What stays the same over the sessions: the phonemes' code and the electrodes.

    Args:
        reference: sentences as (sentence, words), of the length to be simulated; the drive's covariance and the mean
            length of a trial are measured on them.
    """

    def __init__(self, settings: Settings, reference: Sequence[tuple[str, list[str]]]):
        self.settings = settings
        rng = generator(settings.seed, 0)
        self.code = phoneme_code(rng)
        self.width = COARTICULATION * settings.phoneme_bins
        n = settings.electrodes
        strength = np.repeat(ARRAY_STRENGTH, -(-n // len(ARRAY_STRENGTH)))[:n] * rng.lognormal(0, 0.35, n)
        self.strength = np.concatenate([strength, strength * rng.lognormal(0, 0.1, n)])
        self.crossings = np.exp(rng.uniform(np.log(0.2), np.log(3), n))  # mean threshold crossings a bin
        spoken = [speak(*sentence, settings, rng) for sentence in reference]
        self.mean_bins = float(np.mean([utterance.n_time_steps for utterance in spoken]))
        drive = np.concatenate([speech_drive(utterance, self.code, self.width, rng) for utterance in spoken])
        self.drive_mean = drive.mean(0)
        self.drive_covariance = np.cov(drive.T)

    def draw_patterns(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Standard normal tuning and noise patterns (rows, F); an electrode's second feature resembles its first."""
        patterns = {}
        for name, rows in {"speech": N_DIMENSIONS, "mixed": N_MIXED, "common": 1, "offset": 1}.items():
            first, second = rng.normal(size=(2, rows, self.settings.electrodes))
            patterns[name] = np.concatenate([first, 0.8 * first + 0.6 * second], axis=1)
        return patterns


class Session:
    """Tuning and noise patterns of one session.

    Attributes:
        speech: (D, F) tuning to the drive.
        shared: name -> (latents, F), the patterns of the structured noise; each latent has a variance of about one.
        new: (N_MIXED, F), those of `new_noise`, which no other session has; zero where there is none.
        private: (F,) standard deviation of the private noise.
        gain, offset: (F,) of the raw signal.
    """

    def __init__(
        self,
        participant: Participant,
        patterns: dict[str, np.ndarray],
        rng: np.random.Generator,
        new_rng: np.random.Generator,
    ):
        self.participant, settings = participant, participant.settings
        n, n_features = settings.electrodes, 2 * settings.electrodes
        covariance = participant.drive_covariance

        strength = participant.strength * rng.lognormal(0, 0.15, n_features)  # the gain of the tuning drifts
        shares = settings.speech_variance * _capped(strength, STRONGEST)
        speech = patterns["speech"]
        speech = speech * np.sqrt(shares / np.einsum("df,de,ef->f", speech, covariance, speech))
        white_to_drive = np.linalg.cholesky(covariance + 1e-9 * np.eye(N_DIMENSIONS)).T
        common = np.abs(1 + 0.5 * patterns["common"])
        common /= np.sqrt((common**2).mean())
        centres = rng.integers(n, size=(N_ARTEFACTS, 1))
        bumps = np.exp(-0.5 * ((np.arange(n) - centres) / (n / 16)) ** 2)
        bumps = np.concatenate([bumps, bumps], axis=1)
        shared = {
            "drive": np.sqrt(DRIVE_NOISE) * white_to_drive @ speech,
            "common_slow": np.sqrt(COMMON_SLOW) * common,
            "common_fast": np.sqrt(COMMON_FAST) * common,
            "mixed": np.sqrt(MIXED_SLOW / N_MIXED) * patterns["mixed"],
            "artefacts": np.sqrt(ARTEFACTS / (bumps**2).sum(0).mean()) * bumps,
            "offset": np.sqrt(OFFSET_DRIFT) * patterns["offset"],
        }
        shared = {name: np.sqrt(settings.structured_noise) * rows for name, rows in shared.items()}
        new = np.sqrt(settings.new_noise / N_MIXED) * participant.draw_patterns(new_rng)["mixed"]
        explained = shares + sum((rows**2).sum(0) for rows in (*shared.values(), new))
        self.speech = speech.astype(np.float32)
        self.shared = {name: rows.astype(np.float32) for name, rows in shared.items()}
        self.new = new.astype(np.float32)
        self.private = np.sqrt(np.maximum(1 - explained, LEAST_PRIVATE)).astype(np.float32)
        self.gain = rng.lognormal(0, 0.3, n_features).astype(np.float32)
        self.offset = rng.normal(0, 1, n_features).astype(np.float32)


def _capped(strength: np.ndarray, most: float) -> np.ndarray:
    """Scaled to a mean of about one, with nothing above `most`."""
    for _ in range(50):
        strength = np.minimum(strength / strength.mean(), most)
    return strength


def sessions_of(participant: Participant) -> Iterator[Session]:
    """Session after session, without end; the patterns walk away from the first one's, keeping their size."""
    seed = participant.settings.seed
    patterns = participant.draw_patterns(generator(seed, 1))
    index = 0
    while True:
        rng = generator(seed, 2, index)
        if index:
            new = participant.draw_patterns(rng)
            patterns = {name: np.sqrt(1 - DRIFT**2) * patterns[name] + DRIFT * new[name] for name in patterns}
        yield Session(participant, patterns, rng, generator(seed, 5, index))
        index += 1


# ---- signals ----


def _slow(n_bins: int, count: int, seconds: tuple[float, float], rng: np.random.Generator) -> np.ndarray:
    """(N, count) latents of variance one, each with an exponential memory drawn from a range."""
    memory = np.exp(rng.uniform(*np.log(seconds), count)) / BIN_SECONDS
    spectrum = 1 / np.sqrt(1 + (2 * np.pi * np.fft.rfftfreq(n_bins)[:, None] * memory) ** 2)
    latents = np.fft.irfft(np.fft.rfft(rng.normal(size=(n_bins, count)), axis=0) * spectrum, n=n_bins, axis=0)
    return (latents / latents.std(0)).astype(np.float32)


def _bursts(n_bins: int, rng: np.random.Generator) -> np.ndarray:
    """(N, N_ARTEFACTS) rare bumps of 0.1 to 0.5 s, of a variance of about one."""
    latents = np.zeros((n_bins, N_ARTEFACTS), dtype=np.float32)
    for _ in range(rng.poisson(n_bins / 150)):
        start, length, which = rng.integers([0, 6, 0], [n_bins, 26, N_ARTEFACTS])
        bump = rng.gamma(2.0, 1.5) * np.hanning(length + 2)[1:-1]
        latents[start : start + length, which] += bump[: n_bins - start]
    return latents


def _private(n_bins: int, session: Session, rng: np.random.Generator) -> np.ndarray:
    """(n_bins, F) private noise: counts of threshold crossings; spike-band power of these spikes and of others."""
    rates = session.participant.crossings
    n = len(rates)
    noise = np.empty((n_bins, 2 * n), dtype=np.float32)
    counts, power = noise[:, :n], noise[:, n:]
    counts[:] = rng.poisson(rates, (n_bins, n))
    counts -= rates.astype(np.float32)
    counts /= np.sqrt(rates).astype(np.float32)
    rng.standard_normal(out=(others := np.empty((n_bins, n), dtype=np.float32)), dtype=np.float32)
    others += np.float32(SKEW) * (others**2 - 1)
    others *= np.float32(np.sqrt((1 - SAME_ELECTRODE**2) / (1 + 2 * SKEW**2)))
    np.multiply(counts, np.float32(SAME_ELECTRODE), out=power)
    power += others
    noise *= session.private
    return noise


def simulate_block(
    session: Session, utterances: Sequence[Utterance], rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The features of one block's trials, one after the other.

    Returns:
        float32 (N, F) each: the features, z-scored over the block and clipped; and, in the same units and with their
        means over the block removed, the speech and the structured noise that they hold.
    """
    participant = session.participant
    drive = np.concatenate([speech_drive(u, participant.code, participant.width, rng) for u in utterances])
    n_bins = len(drive)
    speech = drive @ session.speech
    latents = {
        "drive": rng.standard_normal((n_bins, N_DIMENSIONS), dtype=np.float32),
        "common_slow": _slow(n_bins, 1, (0.5, 3), rng),
        "common_fast": rng.standard_normal((n_bins, 1), dtype=np.float32),
        "mixed": _slow(n_bins, N_MIXED, (0.2, 3), rng),
        "artefacts": _bursts(n_bins, rng),
        "offset": np.linspace(-1.7, 1.7, n_bins, dtype=np.float32)[:, None],
    }
    noise = np.concatenate(list(latents.values()), 1) @ np.concatenate([session.shared[name] for name in latents])
    features = speech + noise
    start = 0
    for utterance in utterances:  # by trials, to need little memory
        end = start + utterance.n_time_steps
        features[start:end] += _private(end - start, session, rng)
        start = end
    if participant.settings.new_noise:  # drawn last: all else is what it is without
        new = _slow(n_bins, N_MIXED, (0.2, 3), rng) @ session.new
        noise += new
        features += new
    # The session's raw scale, which z-scoring a block takes out again, as it does from recordings.
    features *= session.gain
    features += session.offset
    mean = features.mean(0, dtype=np.float64)
    std = np.maximum(features.std(0, dtype=np.float64), 1e-6)
    features -= mean.astype(np.float32)
    features /= std.astype(np.float32)
    np.clip(features, -CLIP, CLIP, out=features)
    for part in (speech, noise):
        part -= part.mean(0, dtype=np.float64).astype(np.float32)
        part *= (session.gain / std).astype(np.float32)
    return features, speech, noise
