"""From phoneme emissions to sentences: beam search over a lexicon and an n-gram language model, in this process.

The search is flashlight-text's (Kahn et al., "Flashlight", ICML 2022), which torchaudio's ctc_decoder wraps; it is
called directly here since the wrapper drops the acoustic and language model scores that an n-best list needs and
builds the lexicon anew for every change of a setting. Its wheel brings KenLM. Nothing here imports torch.
"""

import contextlib
import logging
import math
import multiprocessing
import os
import signal
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import ModuleType
from typing import Protocol, Self

import numpy as np

from config import DecoderConfig
from evaluate_model_helpers import BLANK, PHONEMES, SILENCE
from lexicon import Lexicon
from machine import die_with, usable_cores
from nbest import Hypothesis
from ngram import UNKNOWN

logger = logging.getLogger("b2txt")

WORDS_A_PRONUNCIATION = 6  # as many as a node of flashlight's trie has room for
# Of a run of frames that are blank beyond doubt, one is searched: all that they say is that nothing comes. In a
# good decoder they are 72% of the frames.
CERTAIN_BLANK = math.log(0.999)
LN_10 = math.log(10)  # KenLM's logarithms are to the base of 10


class LanguageModelError(ValueError):
    """A language model, a lexicon or emissions that cannot be used."""


class WordDecoder(Protocol):
    """What evaluation needs of a decoder, whatever its language model is.

    Attributes:
        searched: the settings that tuning searches.
        settings: in force.
    """

    searched: tuple[str, ...]
    settings: DecoderConfig

    def decode(self, log_probs: np.ndarray) -> list[Hypothesis]: ...

    def with_settings(self, settings: DecoderConfig) -> Self: ...


class NgramDecoder:
    """Beam search over the words of a lexicon, scored by an n-gram model, the silence class ending each word.

    Attributes:
        settings: of the search; they are in force as they were at construction.
        has_lm: False where only the lexicon decides.
        n_words: of the lexicon.
        lost: the words that no pronunciation has room for, since six likelier ones share it.
        likeliest_word: by the language model, without any context.
    """

    searched = ("lm_weight", "word_score", "silence_score", "blank_penalty")

    def __init__(self, lexicon: Lexicon, settings: DecoderConfig, lm_path: str | Path | None = None):
        """
        Args:
            lexicon: the words that can be decoded.
            settings: beam, weights and scores.
            lm_path: ARPA file or KenLM binary of any order; None: the lexicon alone, each word as likely.
        Raises:
            LanguageModelError: flashlight-text is missing, the file cannot be read or knows no word.
        """
        text, dictionary = _import_flashlight()
        self.has_lm = lm_path is not None
        self._dictionary = dictionary.Dictionary([*lexicon, UNKNOWN])
        if lm_path is None:
            self._lm = text.ZeroLM()
        else:
            self._lm = _load_kenlm(lm_path, self._dictionary)
        context = self._lm.start(True)  # without a sentence's beginning: what a word is worth anywhere
        scores = {word: self._lm.score(context, index)[1] for index, word in enumerate(lexicon)}
        self._check_vocabulary(scores, lm_path)
        self.lost = self._fill_trie(text, lexicon, scores)
        self.n_words = len(lexicon)
        self.likeliest_word = max(scores, key=scores.get)
        self._search_with(settings)

    def _check_vocabulary(self, scores: dict[str, float], lm_path: str | Path | None) -> None:
        if not scores:
            raise LanguageModelError("the lexicon holds no word")
        if self.has_lm:
            unknown = self._lm.score(self._lm.start(True), self._dictionary.get_index(UNKNOWN))[1]
            if all(score == unknown for score in scores.values()):
                raise LanguageModelError(
                    f"{lm_path}: knows none of the {len(scores)} words of the lexicon, which are in lower case, as "
                    f"'{next(iter(scores))}'; write its text by the rules of text_rules.py (build_lm.py does)"
                )

    def _fill_trie(self, text, lexicon: Lexicon, scores: dict[str, float]) -> list[str]:
        self._trie = text.Trie(len(PHONEMES), SILENCE)
        reachable = set()
        for pronunciation, words in lexicon.by_pronunciation().items():
            for word in sorted(words, key=lambda word: (-scores[word], len(word), word))[:WORDS_A_PRONUNCIATION]:
                self._trie.insert([*pronunciation, SILENCE], self._dictionary.get_index(word), scores[word])
                reachable.add(word)
        self._trie.smear(text.SmearingMode.MAX)
        return [word for word in lexicon if word not in reachable]

    def _search_with(self, settings: DecoderConfig) -> None:
        text, _ = _import_flashlight()
        self.settings = settings.copy()
        self._options = text.LexiconDecoderOptions(
            beam_size=settings.beam_size,
            beam_size_token=len(PHONEMES),
            beam_threshold=settings.beam_threshold,
            lm_weight=settings.lm_weight * LN_10,
            word_score=settings.word_score,
            unk_score=-math.inf,
            sil_score=settings.silence_score,
            log_add=False,
            criterion_type=text.CriterionType.CTC,
        )

    def with_settings(self, settings: DecoderConfig) -> "NgramDecoder":
        """A decoder of the same lexicon and language model, which are shared, with other settings."""
        other = object.__new__(NgramDecoder)
        other.__dict__.update(self.__dict__)
        other._search_with(settings)
        return other

    def decode(self, log_probs: np.ndarray) -> list[Hypothesis]:
        """The likeliest sentences of a trial, different ones, best first.

        Args:
            log_probs: (P, C) natural logarithms of the class probabilities, in the order of PHONEMES.
        Returns:
            1 to n_best hypotheses; a single empty one where no frame holds anything.
        Raises:
            LanguageModelError: emissions of another shape, or not finite.
        """
        stream = self.stream()
        stream.push(log_probs)
        return stream.finish()

    def stream(self) -> "WordStream":
        """The decoding of one trial whose frames come one after the other. Several may be under way at once."""
        return WordStream(self)

    def _new_search(self):
        text, _ = _import_flashlight()
        unknown = self._dictionary.get_index(UNKNOWN)
        return text.LexiconDecoder(self._options, self._trie, self._lm, SILENCE, BLANK, unknown, [], False)

    def _text(self, result) -> str:
        """The words of a result of flashlight's, where an index below 0 stands for none."""
        return " ".join(self._dictionary.get_entry(index) for index in result.words if index >= 0)

    def perplexity(self, sentences: Iterable[str]) -> tuple[float, float]:
        """How well the language model foresees sentences in normal form.

        Returns:
            exp of the mean negative log-probability of a word, the sentence's end included, over the words of the
            lexicon; and the share of words that are not in the lexicon, which are left out of it.
        Raises:
            LanguageModelError: there is no language model, or no sentence.
        """
        if not self.has_lm:
            raise LanguageModelError("a perplexity needs a language model")
        unknown = self._dictionary.get_index(UNKNOWN)
        total, n_sentences, n_words, n_outside = 0.0, 0, 0, 0
        for sentence in sentences:
            state = self._lm.start(False)
            for word in sentence.split():
                index = self._dictionary.get_index(word) if self._dictionary.contains(word) else unknown
                state, score = self._lm.score(state, index)
                n_words += 1
                if index == unknown:
                    n_outside += 1
                else:
                    total += score
            total += self._lm.finish(state)[1]
            n_sentences += 1
        if not n_sentences:
            raise LanguageModelError("a perplexity needs sentences")
        return math.exp(-total * LN_10 / (n_words - n_outside + n_sentences)), n_outside / max(n_words, 1)


class WordStream:
    """A trial that is decoded while it comes: in whatever chunks, the hypotheses are those of the whole.

    Made by `NgramDecoder.stream`.
    """

    def __init__(self, decoder: NgramDecoder):
        self._decoder = decoder
        self._search = decoder._new_search()
        self._search.decode_begin()
        self._after_certain_blank = False
        self._n_searched, self._skipped = 0, []
        self._hypotheses: list[Hypothesis] | None = None

    def push(self, log_probs: np.ndarray) -> None:
        """Take the next frames.

        Args:
            log_probs: (P, C) as to `NgramDecoder.decode`, P of 0 or more.
        Raises:
            LanguageModelError: as `NgramDecoder.decode`, and nothing is taken then; or the trial has ended.
        """
        if self._hypotheses is not None:
            raise LanguageModelError("the trial has ended: NgramDecoder.stream() begins the next")
        emissions, skipped, after_certain_blank = _emissions(
            log_probs, self._decoder.settings, self._after_certain_blank
        )
        if len(emissions):
            self._search.decode_step(emissions.ctypes.data, *emissions.shape)
        self._after_certain_blank = after_certain_blank
        self._n_searched += len(emissions)
        self._skipped += skipped

    @property
    def text(self) -> str:
        """The words of the likeliest path so far, without the one that has not ended; what comes may change them."""
        if self._hypotheses is not None:
            return self._hypotheses[0].text
        return self._decoder._text(self._search.get_best_hypothesis()) if self._n_searched else ""

    def finish(self) -> list[Hypothesis]:
        """The trial's hypotheses, as `NgramDecoder.decode` gives them of all its frames."""
        if self._hypotheses is None:
            self._hypotheses = self._ranked() if self._n_searched else [Hypothesis("", 0.0, 0.0, 0.0)]
        return self._hypotheses

    def _ranked(self) -> list[Hypothesis]:
        decoder, settings = self._decoder, self._decoder.settings
        self._search.decode_end()
        results = self._search.get_all_final_hypothesis()
        texts, skipped = map(decoder._text, results), math.fsum(self._skipped)
        hypotheses: dict[str, Hypothesis] = {}
        # Flashlight leaves ties in an order that changes with every run.
        for words, result in sorted(zip(texts, results, strict=True), key=lambda pair: (-pair[1].score, pair[0])):
            if words not in hypotheses:  # the same words with other pronunciations come later, as less likely
                acoustic = result.emittingModelScore / settings.acoustic_scale + skipped
                lm_score = result.lmScore * LN_10 if decoder.has_lm else 0.0
                score = result.score + settings.acoustic_scale * skipped
                hypotheses[words] = Hypothesis(words, score, acoustic, lm_score)
                if len(hypotheses) == settings.n_best:
                    break
        return list(hypotheses.values())


def _import_flashlight() -> tuple[ModuleType, ModuleType]:
    try:
        import flashlight.lib.text.decoder as decoder
        import flashlight.lib.text.dictionary as dictionary
    except ImportError as error:
        raise LanguageModelError(
            f"decoding words needs the flashlight-text package ({error}): pip install flashlight-text "
            "(wheels for Python up to 3.12), or decode phonemes alone with --lm none"
        ) from error
    return decoder, dictionary


def kenlm_available() -> bool:
    """Whether flashlight's KenLM can be loaded; its wheels on PyPI have it, a build of one's own may not."""
    try:
        from flashlight.lib.text.decoder.kenlm import KenLM  # noqa: F401
    except ImportError:
        return False
    return True


def _load_kenlm(path: str | Path, dictionary):
    if not kenlm_available():
        raise LanguageModelError(
            "flashlight-text has no KenLM here, so that no n-gram can be read: pip install --force-reinstall "
            "flashlight-text (its wheels bring it); where it must be built, install a C++ compiler, CMake and "
            "'pip install git+https://github.com/kpu/kenlm' first"
        )
    from flashlight.lib.text.decoder.kenlm import KenLM

    path = Path(path)
    if not path.is_file() or not os.access(path, os.R_OK):
        raise LanguageModelError(f"{path}: no file that can be read as a language model (ARPA or KenLM binary)")
    try:
        with quiet_stderr():  # KenLM prints a bar of its own for ARPA files
            return KenLM(str(path), dictionary)
    except (RuntimeError, ValueError, MemoryError) as error:
        reason = str(error).splitlines()[-1] if str(error) else type(error).__name__
        raise LanguageModelError(f"{path}: KenLM cannot read it as an ARPA or binary file: {reason}") from error


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Nothing that libraries write to the process's stderr is shown."""
    saved = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def _emissions(
    log_probs: np.ndarray, settings: DecoderConfig, after_certain_blank: bool
) -> tuple[np.ndarray, list[float], bool]:
    """What the search reads: float32, without the frames of certain blanks that follow one, penalised and scaled;
    the log-probability of blank in each frame left out, after the penalty; and whether the last frame was a certain
    blank, as the one before the first may have been."""
    log_probs = np.asarray(log_probs, dtype=np.float32)
    if log_probs.ndim != 2 or log_probs.shape[1] != len(PHONEMES):
        raise LanguageModelError(f"emissions must be (frames, {len(PHONEMES)}), not {log_probs.shape}")
    if np.isnan(log_probs).any() or (log_probs == np.inf).any():
        raise LanguageModelError("emissions hold NaN or infinity: the model that made them has diverged")
    certain = log_probs[:, BLANK] > CERTAIN_BLANK
    skip = certain & np.concatenate([[after_certain_blank], certain])[:-1]
    emissions = log_probs[~skip]  # a copy, whose blanks can be changed
    emissions[:, BLANK] -= settings.blank_penalty
    emissions *= settings.acoustic_scale
    skipped = (log_probs[skip, BLANK] - settings.blank_penalty).tolist()
    return np.ascontiguousarray(emissions), skipped, bool(certain[-1]) if len(certain) else after_certain_blank


# ---- many trials, several processes ----

_worker_decoder: WordDecoder | None = None  # of a worker process: it came with the fork


class DecoderPool:
    """A decoder in several processes, which share its memory: the same results as in one, in the same order.

    The processes are forks, and begin at once: make a pool before CUDA or XLA is touched.

    Attributes:
        settings: that trials are decoded with; may be changed.
    """

    def __init__(self, decoder: WordDecoder, processes: int = 1):
        self.decoder, self.processes, self.settings = decoder, processes, decoder.settings
        self._executor = None
        if processes > 1:
            global _worker_decoder
            _worker_decoder = decoder
            context = multiprocessing.get_context("fork")
            self._executor = ProcessPoolExecutor(processes, context, initializer=_begin_worker, initargs=(os.getpid(),))
            with warnings.catch_warnings():  # Python 3.12 warns of forks beside threads; these never run torch
                warnings.simplefilter("ignore", DeprecationWarning)
                self._executor.submit(int).result()  # all are started by the first task
            _worker_decoder = None

    def decode(
        self, emissions: Iterable[np.ndarray], settings: DecoderConfig | None = None
    ) -> Iterator[list[Hypothesis]]:
        """Hypotheses of each trial, in the order of the emissions, each as soon as it and those before are ready.

        Args:
            emissions: (P, C) log-probabilities of each trial.
            settings: in place of the pool's.
        Raises:
            LanguageModelError: as NgramDecoder.decode; or a process was killed, mostly for want of memory.
        """
        settings = settings or self.settings
        if self._executor is None:
            decoder = self.decoder if settings == self.decoder.settings else self.decoder.with_settings(settings)
            yield from map(decoder.decode, emissions)
            return
        try:
            tasks = [self._executor.submit(_decode_in_worker, each, settings) for each in emissions]
            for task in tasks:
                yield task.result()
        except BrokenProcessPool as error:
            raise LanguageModelError(
                "a decoding process was killed, mostly for want of memory: --decoder_processes 1 takes the least"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)


def _begin_worker(parent: int) -> None:
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the main process, which ends these


_settings_in_worker: tuple[DecoderConfig, WordDecoder] | None = None


def _decode_in_worker(log_probs: np.ndarray, settings: DecoderConfig) -> list[Hypothesis]:
    global _settings_in_worker
    if settings == _worker_decoder.settings:
        return _worker_decoder.decode(log_probs)
    if _settings_in_worker is None or _settings_in_worker[0] != settings:
        _settings_in_worker = settings, _worker_decoder.with_settings(settings)
    return _settings_in_worker[1].decode(log_probs)


def usable_processes(n_trials: int) -> int:
    """As many processes as this one may use CPUs, but none for fewer than 50 trials."""
    return max(1, min(usable_cores(), n_trials // 50))
