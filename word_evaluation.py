"""From emissions to sentences and word errors: which decoder, its language model, and what it brings.

`evaluate_model.py` computes the emissions; here are the words: the language model made or read and checked before
any computing, the decoding that goes on after an interruption, and the rates beside those of the lexicon alone.
"""

import contextlib
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from build_lm import WORDFREQ, build_lm, check_vocabulary, read_sentences, train_sentences
from config import Config, DecoderConfig, load_decoder_settings
from ctc import greedy_collapse
from dataset_index import file_stamp
from evaluate_model_helpers import (
    ErrorCount,
    bootstrap_interval,
    count_errors,
    json_rate,
    sum_errors,
    sum_errors_by,
    unreadable,
)
from language_model import DecoderPool, NgramDecoder, WordDecoder, kenlm_available, usable_processes
from lexicon import Lexicon, NearestWords, load_lexicon
from nbest import COMMONEST_ENGLISH_WORD, NbestLog, TrialHypotheses
from ngram import HIGHEST_ORDER
from training_log import progress_bar

logger = logging.getLogger("b2txt")

LANGUAGE_MODELS = ("ngram", "fst", "none")
LANGUAGE_MODEL_OPTIONS = ("lm_text", "lm_order", "lm_file", "word_frequencies", "lm_fst")
FILE_OPTIONS = (
    *("lm_text", "lm_file", "lm_fst", "lm_words", "word_frequencies"),
    *("lexicon", "extra_words", "decoder_config"),
)
DEFAULT_ORDER = 3
TUNED = "decoder_tuned.yaml"


@dataclass(frozen=True)
class WordOptions:
    """How sentences are made; the names are those of evaluate_model.py's options, which explain them."""

    lm: str = "ngram"
    lm_text: Sequence[str] = ()
    lm_order: int | None = None
    lm_file: str | None = None
    lm_fst: str | None = None
    lm_words: str | None = None
    word_frequencies: str | None = None
    lexicon: str | None = None
    extra_words: str | None = None
    decoder_config: str | None = None
    nbest: int | None = None
    decoder_processes: int | None = None
    tune_decoder: bool = False

    @property
    def kind(self) -> str:
        """--lm, which --lm_fst implies."""
        return "fst" if self.lm_fst is not None else self.lm

    def problems(self, split: str) -> list[str]:
        """Options that do not go together or are out of range, and files that cannot be opened.

        Args:
            split: 'val' or 'test'.
        """
        problems = []
        given = [f"--{name}" for name in LANGUAGE_MODEL_OPTIONS if self[name]]
        if self.lm not in LANGUAGE_MODELS:
            problems.append(f"--lm is one of {', '.join(LANGUAGE_MODELS)}, not {self.lm!r}")
        if self.lm == "none" and given:
            problems.append(f"--lm none takes no language model, but there is {', '.join(given)}")
        elif self.lm_fst is not None and given != ["--lm_fst"]:
            problems.append(f"a WFST holds its language model; {', '.join(given[:-1])} would change nothing")
        elif self.lm_file is not None and given != ["--lm_file"]:
            others = ", ".join(name for name in given if name != "--lm_file")
            problems.append(f"--lm_file is a finished model; {others} would change nothing")
        if self.tune_decoder and split != "val":
            problems.append("--tune_decoder needs val's true sentences; test takes its file with --decoder_config")
        if (self.lm_fst is None) != (self.lm_words is None):
            problems.append("--lm_fst (TLG.fst) and --lm_words (its words.txt) go together")
        if self.lm == "fst" and self.lm_fst is None:
            problems.append("--lm fst needs --lm_fst TLG.fst and --lm_words words.txt")
        if self.lm_order is not None and not 1 <= self.lm_order <= HIGHEST_ORDER:
            problems.append(f"--lm_order is from 1 to {HIGHEST_ORDER}, not {self.lm_order}")
        for name in ("nbest", "decoder_processes"):
            if self[name] is not None and self[name] < 1:
                problems.append(f"--{name} is 1 or more, not {self[name]}")
        if self.lm == "none" and (self.tune_decoder or self.nbest is not None):
            problems.append("--lm none takes the likeliest phonemes: there is nothing to tune and no n-best list")
        return problems + unreadable({f"--{name}": self[name] for name in FILE_OPTIONS if self[name] != WORDFREQ})

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


@dataclass
class Words:
    """What turns emissions into sentences, and what is known of its language model.

    Attributes:
        nearest: words by the lexicon alone.
        decoder: None with --lm none.
        lm_sentences: those that the language model was trained on, as far as known.
        facts: for the results: kind, order, source, shares outside the lexicon.
    """

    lexicon: Lexicon
    nearest: NearestWords
    decoder: WordDecoder | None
    lm_sentences: frozenset[str]
    facts: dict[str, Any]

    @property
    def likeliest_word(self) -> str:
        """The text of a trial from which no word was decoded."""
        return getattr(self.decoder, "likeliest_word", COMMONEST_ENGLISH_WORD)


def make_words(
    options: WordOptions, config: Config, references: Sequence[str] | None, directory: Path, split: str
) -> Words:
    """Read or train the language model and build the decoder, before any emission is computed.

    Args:
        config: of the data, whose train sentences are the language model's text by default; and of the decoder.
        references: the true sentences of val in normal form; none for test.
        directory: of the results; the language model that is trained goes there, as ngram_<split>.arpa.
    Raises:
        ValueError: with what is wrong with text, lexicon, language model or settings.
    """
    settings = load_decoder_settings(options.decoder_config, config.decoder)
    if options.nbest is not None:
        settings.n_best = options.nbest
    lexicon = load_lexicon(options.lexicon, options.extra_words)
    references = [text for text in references or () if text]
    facts: dict[str, Any] = {"kind": options.kind, "lexicon_words": len(lexicon)}
    if references:
        facts["references_outside_lexicon"] = check_vocabulary(references, lexicon, "the true sentences")
    decoder, sentences = None, []
    if options.kind == "fst":
        from fst_decoder import FstDecoder

        decoder = FstDecoder(options.lm_fst, options.lm_words, settings)
        logger.info("a WFST has word and silence scores of its own: word_score and silence_score are not used")
        paths = [str(options.lm_fst), str(options.lm_words)]
        facts |= {"source": paths, "size_and_time": [list(file_stamp(path)) for path in paths]}
    elif options.kind == "ngram":
        decoder, sentences = _ngram_decoder(
            options, config, settings, lexicon, directory / f"ngram_{split}.arpa", facts
        )
        _tell_lost(decoder)
        if decoder.has_lm and references:
            facts["perplexity"], _ = decoder.perplexity(references)
    if decoder is not None and settings.n_best > settings.beam_size:
        logger.warning(
            "n_best is %d, but a beam of %d holds no more sentences: see decoder.beam_size",
            *(settings.n_best, settings.beam_size),
        )
    return Words(lexicon, NearestWords(lexicon), decoder, frozenset(sentences), facts)


def _ngram_decoder(
    options: WordOptions, config: Config, settings: DecoderConfig, lexicon: Lexicon, arpa: Path, facts: dict[str, Any]
) -> tuple[NgramDecoder, list[str]]:
    if not kenlm_available():
        logger.warning("flashlight-text has no KenLM here: words are decoded by the lexicon alone, each as likely")
        facts |= {"kind": "lexicon"}
        return NgramDecoder(lexicon, settings), []
    if options.lm_file is not None:
        facts |= {"source": str(options.lm_file), "sha256": _sha256(options.lm_file)}
        return NgramDecoder(lexicon, settings, options.lm_file), []
    source = ", ".join(map(str, options.lm_text)) or "the train sentences of the data"
    sentences = read_sentences(options.lm_text) if options.lm_text else train_sentences(config)
    outside = check_vocabulary(sentences, lexicon, source)
    order = options.lm_order or DEFAULT_ORDER
    model = build_lm(sentences, lexicon, order, options.word_frequencies)
    model.save(arpa)
    facts |= {
        **{"source": source, "order": order, "word_frequencies": options.word_frequencies},
        **{"text_outside_lexicon": outside, "sha256": _sha256(arpa)},
        "ngrams": [len(each) for each in model.probabilities],
    }
    return NgramDecoder(lexicon, settings, arpa), sentences


def _sha256(path: str | Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"{path}: the language model cannot be read: {error.strerror}") from error


def _tell_lost(decoder: NgramDecoder) -> None:
    if decoder.lost:
        logger.info(
            "%d of %d words have no place beside six likelier ones that sound the same: %s%s",
            *(len(decoder.lost), decoder.n_words),
            ", ".join(decoder.lost[:10]),
            " ..." if len(decoder.lost) > 10 else "",
        )


def make_pool(
    words: Words, options: WordOptions, n_trials: int
) -> contextlib.AbstractContextManager[DecoderPool | None]:
    """The decoder's processes, to be made before a device is touched; None without a decoder."""
    if words.decoder is None:
        return contextlib.nullcontext()
    return DecoderPool(words.decoder, options.decoder_processes or usable_processes(n_trials))


def decode_words(
    pool: DecoderPool,
    emissions: Sequence[np.ndarray],
    places: Sequence[tuple[str, int, int]],
    references: Sequence[str] | None,
    path: Path,
    key: Mapping[str, Any],
) -> list[str]:
    """The likeliest sentence of every trial, '' where no word was decoded.

    All hypotheses are written to `path` as they come, so that an interrupted decoding goes on.

    Args:
        emissions: (P, C) log-probabilities of each trial.
        places: session, block and trial number of each.
        references: true sentence of each; None for test.
        path: of the n-best file.
        key: what the hypotheses depend on besides the pool's settings.
    """
    with NbestLog(path, {**key, "decoder": pool.settings.to_dict()}) as log:
        start = len(log.done)
        if start:
            logger.info("%s: going on after %d of %d trials", path, start, len(places))
        rest = (emissions[index] for index in range(start, len(places)))
        with progress_bar(len(places), start, "trial", "Words") as progress:
            for index, hypotheses in enumerate(pool.decode(rest), start):
                session, block, trial = places[index]
                reference = (references and references[index]) or None  # '' is one that nobody wrote down
                log.add(TrialHypotheses(index, session, block, trial, tuple(hypotheses), reference))
                progress.update()
        log.finish()
        return [trial.hypotheses[0].text for trial in log.done]


def greedy_phonemes(emissions: Sequence[np.ndarray]) -> list[list[int]]:
    """Greedily decoded classes of each trial; none for one without frames."""
    return [greedy_collapse(each.argmax(-1)) if len(each) else [] for each in emissions]


# ---- word errors ----


@dataclass(frozen=True)
class WordErrors:
    """Errors of each trial that has a reference: of words, of characters, and whether the sentence is wrong."""

    words: list[ErrorCount]
    characters: list[ErrorCount]
    sentences: list[ErrorCount]


def count_word_errors(references: Sequence[str], texts: Sequence[str]) -> WordErrors:
    """Errors of each trial; both sides in normal form.

    Args:
        references, texts: of each trial; a trial with an empty reference counts for nothing, as nothing is known.
    """
    known = [(true.split(), text.split()) for true, text in zip(references, texts, strict=True) if true]
    return WordErrors(
        [count_errors(true, words) for true, words in known],
        [count_errors(" ".join(true), " ".join(words)) for true, words in known],
        [ErrorCount(int(true != words), 1, 1) for true, words in known],
    )


def word_error_rates(errors: WordErrors, suffix: str = "") -> dict[str, Any]:
    """Rates as fractions, with 95% intervals: wer, cer, sentence_error_rate; null without references."""
    rates: dict[str, Any] = {}
    names = {"wer": errors.words, "cer": errors.characters, "sentence_error_rate": errors.sentences}
    for name, counts in names.items():
        rates[name + suffix] = json_rate(sum_errors(counts).rate)
        rates[f"{name}{suffix}_interval"] = bootstrap_interval(counts)
    return rates


def word_results(
    references: Sequence[str],
    lexicon_only: Sequence[str],
    decoded: Sequence[str] | None,
    words: Words,
    groups: Mapping[str, Sequence[str]],
) -> dict[str, Any]:
    """What evaluation_val.json has of words: the decoder's rates beside those of the lexicon alone.

    Args:
        references: true sentences in normal form, '' where there is none.
        lexicon_only: greedy phonemes turned to words by the lexicon alone.
        decoded: the decoder's best sentences; None with --lm none.
        groups: session and, where known, corpus of each trial.
    """
    results = word_error_rates(count_word_errors(references, lexicon_only), "_lexicon_only")
    if decoded is None:
        return results
    errors = count_word_errors(references, decoded)
    total = sum_errors(errors.words)
    results["trials_without_true_sentence"] = len(references) - len(errors.words)
    results |= word_error_rates(errors) | {"word_edits": total.edits, "words": total.length}
    for name, keys in groups.items():
        known = [key for key, true in zip(keys, references, strict=True) if true]
        by = sum_errors_by(known, errors.words)
        results[f"wer_by_{name}"] = {key: json_rate(count.rate) for key, count in by.items()}
    if words.lm_sentences:
        seen = [true in words.lm_sentences for true in references if true]
        for name, chosen in (("seen", True), ("unseen", False)):
            counts = [count for count, is_seen in zip(errors.words, seen, strict=True) if is_seen == chosen]
            results[f"wer_of_sentences_{name}_by_lm"] = json_rate(sum_errors(counts).rate)
        results["share_of_sentences_seen_by_lm"] = sum(seen) / len(seen) if seen else None
    return results


def decoding_key(emission_key: Mapping[str, Any], words: Words) -> dict[str, Any]:
    """What hypotheses depend on besides the decoder's settings."""
    listing = json.dumps([list(words.lexicon.items()), words.facts], sort_keys=True)
    return {"emissions": dict(emission_key), "words_sha256": hashlib.sha256(listing.encode()).hexdigest()}
