"""Make an n-gram language model (an ARPA file) from text, for evaluate_model.py --lm_file.

    python build_lm.py --text sentences.txt more.txt --order 3 --output lm.arpa
    python build_lm.py --data_dir data/hdf5_data_final --word_frequencies wordfreq --output lm.arpa

The text is a sentence a line, written as it may be (see text_rules.py); --data_dir takes the train sentences of a
data set. The vocabulary is the lexicon's and the text's. For corpora of more than some million sentences use KenLM's
lmplz; evaluate_model.py takes its files.
"""

import argparse
import logging
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from config import Config
from dataset_index import DataError, index_trials, read_facts
from evaluate_model_helpers import check_writable
from lexicon import Lexicon, load_lexicon
from ngram import FREQUENCY_WEIGHT, NgramModel, train_ngram
from text_rules import normalize
from training_log import log_to_terminal

logger = logging.getLogger("b2txt")

MOST_OUTSIDE = 0.5  # of a text's words outside the lexicon: it is another language, or no text
WORDFREQ = "wordfreq"


class TextError(ValueError):
    """Text or word frequencies from which no language model can be made."""


def read_sentences(paths: Sequence[str | Path]) -> list[str]:
    """The lines of text files in normal form, those without a word left out.

    Raises:
        TextError: files that cannot be read as UTF-8, or hold no word (all are named).
    """
    sentences, problems = [], []
    for path in paths:
        try:
            lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            problems.append(f"{path}: cannot be read as text in UTF-8: {error}")
            continue
        normal = [sentence for sentence in map(normalize, lines) if sentence]
        if not normal:
            problems.append(f"{path}: holds no word")
        sentences += normal
    if problems:
        raise TextError("\n".join(problems))
    return sentences


def train_sentences(config: Config, option: str = "--lm_text") -> list[str]:
    """The sentences of a data set's train split in normal form, each as often as it was spoken.

    Args:
        option: of the command that takes other text, for the message.
    Raises:
        TextError: the files cannot be used, or hold no sentence.
    """
    try:
        labels = [trial.sentence_label for trial in index_trials(config, "train", labelled=False)]
    except DataError as error:
        others = "; --lm_file takes a finished model, --lm none goes without" if option == "--lm_text" else ""
        raise TextError(
            f"{error}\n(the language model's text is the data's train sentences; {option} takes another{others})"
        ) from error
    sentences = [sentence for sentence in map(normalize, labels) if sentence]
    if not sentences:
        raise TextError(
            f"{config.dataset.dataset_dir}: no train trial has a sentence_label; name text files with {option}"
        )
    return sentences


def check_vocabulary(sentences: Sequence[str], lexicon: Lexicon, source: str) -> float:
    """The share of the sentences' words that the lexicon lacks; logged, with the commonest of them.

    Raises:
        TextError: it is more than half, so that something is wrong with one of the two.
    """
    counts = Counter(word for sentence in sentences for word in sentence.split())
    outside = Counter({word: number for word, number in counts.items() if word not in lexicon})
    share = outside.total() / max(counts.total(), 1)
    examples = f", as {', '.join(word for word, _ in outside.most_common(5))}" if outside else ""
    message = f"{source}: {share:.2%} of {counts.total()} words are not in the lexicon{examples}"
    if share > MOST_OUTSIDE:
        raise TextError(f"{message}; is it English text, and the lexicon the right one?")
    logger.info(message)
    return share


def read_frequencies(source: str, lexicon: Lexicon) -> dict[str, float]:
    """How often the lexicon's words are used, from the wordfreq package or a file.

    Args:
        source: 'wordfreq', or a file with a word and a number a line.
    Raises:
        TextError: the package is missing, or the file is no such list or has no word of the lexicon.
    """
    entries = _wordfreq() if source == WORDFREQ else _read_frequency_file(source)
    frequencies: dict[str, float] = {}
    for word, number in entries.items():
        normal = normalize(word)
        if normal in lexicon:
            frequencies[normal] = frequencies.get(normal, 0.0) + number
    if not any(frequencies.values()):
        raise TextError(f"{source}: none of its {len(entries)} words is in the lexicon with a number above 0")
    return frequencies


def _wordfreq() -> Mapping[str, float]:
    try:
        import wordfreq
    except ImportError as error:
        raise TextError(f"word frequencies need the wordfreq package ({error}): pip install wordfreq") from error
    return wordfreq.get_frequency_dict("en", wordlist="large")


def _read_frequency_file(path: str) -> dict[str, float]:
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(f"{path}: cannot be read as a list of word frequencies: {error}") from error
    frequencies: dict[str, float] = {}
    problems = []
    for number, line in enumerate(lines, 1):
        fields = line.replace(",", " ").split()
        if not fields:
            continue
        try:
            word, frequency = fields[0], float(fields[1])
            if len(fields) != 2 or not 0 <= frequency < math.inf:
                raise ValueError
        except (ValueError, IndexError):
            problems.append(f"line {number}: {line[:60]!r}")
        else:
            frequencies[word] = frequencies.get(word, 0.0) + frequency
    if problems or not frequencies:
        shown = "\n".join(problems[:10]) or "it is empty"
        shown += f"\nand {len(problems) - 10} more" if len(problems) > 10 else ""
        raise TextError(f"{path}: each line must be a word and a number of 0 or more:\n{shown}")
    return frequencies


def build_lm(
    sentences: Sequence[str],
    lexicon: Lexicon,
    order: int = 3,
    word_frequencies: str | None = None,
    frequency_weight: float = FREQUENCY_WEIGHT,
) -> NgramModel:
    """An n-gram model of sentences in normal form over the words of the lexicon and the sentences.

    Args:
        word_frequencies: as `read_frequencies` takes; None: words that the text lacks are all about as likely.
    """
    frequencies = read_frequencies(word_frequencies, lexicon) if word_frequencies else None
    return train_ngram(sentences, order, lexicon, frequencies, frequency_weight)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--text", nargs="+", default=[], metavar="FILE", help="text files, a sentence a line")
    add("--data_dir", help="a data set, whose train sentences are taken too")
    add("--order", type=int, default=3, help="n of the n-grams, 1 to 6 (default: 3)")
    add("--word_frequencies", help="'wordfreq' or a file of words and numbers, for words that the text lacks")
    add(
        "--frequency_weight",
        type=float,
        default=FREQUENCY_WEIGHT,
        help=f"their share of the unigrams (default: {FREQUENCY_WEIGHT})",
    )
    add("--lexicon", help="dictionary file in place of CMUdict")
    add("--extra_words", help="dictionary file of further words and pronunciations")
    add("--output", required=True, help="the ARPA file to write")
    return parser.parse_args(arguments)


def _data_set(directory: str) -> Config:
    """A configuration of all that lies in a directory, of as many features as there are."""
    files = sorted(Path(directory).expanduser().glob("*/data_train.hdf5"))
    if not files:
        raise TextError(f"{directory}: no session there has a data_train.hdf5; name a data set with --data_dir")
    config = Config()
    config.dataset.dataset_dir = directory
    config.dataset.sessions = [path.parent.name for path in files]
    shapes = [trial.shape for trial in read_facts(files[0])[0] if trial.shape and len(trial.shape) == 2]
    config.dataset.neural_dim = shapes[0][1] if shapes else config.dataset.neural_dim
    return config


def run(options: argparse.Namespace) -> None:
    """Read, train, write."""
    output = Path(options.output)
    if not options.text and not options.data_dir:
        raise TextError("there is no text: name files with --text, or a data set with --data_dir")
    if output.is_dir():
        raise TextError(f"{output}: is a directory; name a file with --output")
    inputs = [*options.text, options.lexicon, options.extra_words, options.word_frequencies]
    if output.resolve() in [Path(path).resolve() for path in inputs if path]:
        raise TextError(f"{output}: is read, and would be overwritten; name another file with --output")
    check_writable(output.parent, "--output")
    sentences = read_sentences(options.text)
    if options.data_dir:
        sentences += train_sentences(_data_set(options.data_dir), "--text")
    lexicon = load_lexicon(options.lexicon, options.extra_words)
    check_vocabulary(sentences, lexicon, "the text")
    model = build_lm(sentences, lexicon, options.order, options.word_frequencies, options.frequency_weight)
    model.save(output)
    numbers = ", ".join(f"{len(ngrams)} {n}-grams" for n, ngrams in enumerate(model.probabilities, 1))
    logger.info("%s: %s from %d sentences", output, numbers, len(sentences))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 2 for what the user can put right, 130 for Ctrl-C."""
    options = parse_arguments(arguments)
    log_to_terminal()
    try:
        run(options)
    except (ValueError, OSError, MemoryError) as error:
        print(f"build_lm.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("build_lm.py: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
