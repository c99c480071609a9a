"""N-gram language models from text: interpolated modified Kneser-Ney smoothing, written as ARPA files.

Chen and Goodman, "An empirical study of smoothing techniques for language modeling", 1999. At the bottom, below
the unigrams of the text, lie a nearly uniform distribution over the vocabulary and, where given, word frequencies of
the language at large, so that words which the text never has can still be decoded.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from evaluate_model_helpers import write_text_atomically

BEGIN, END, UNKNOWN = "<s>", "</s>", "<unk>"
HIGHEST_ORDER = 6  # that KenLM reads, as flashlight-text brings it
UNKNOWN_LOG10 = -10.0  # of a word outside the vocabulary: less than any word inside it
# Of the unigrams. Measured: of 0 to 0.8, 0.6 gave the least perplexity of conversational sentences that were not
# in the text (8,072 sentences of text, frequencies of the wordfreq package).
FREQUENCY_WEIGHT = 0.6

Ngram = tuple[str, ...]


class NgramModel:
    """Probabilities of an n-gram model, each order interpolated with the one below.

    Attributes:
        order: n.
        vocabulary: the words that have a probability, the end of the sentence not among them.
        probabilities: of each length from 1, {n-gram: P(last word | the words before)}.
        backoff: of each history length from 1, {history: weight of the next shorter history}.
    """

    def __init__(self, probabilities: list[dict[Ngram, float]], backoff: list[dict[Ngram, float]]):
        self.probabilities, self.backoff = probabilities, backoff
        self.order = len(probabilities)
        self.vocabulary = {word for (word,) in probabilities[0] if word != END}

    def probability(self, word: str, history: Ngram = ()) -> float:
        """P(word | history); 0 of a word outside the vocabulary.

        Args:
            history: the words before, of any number, "<s>" first where the sentence begins there.
        """
        history = history[max(0, len(history) - self.order + 1) :]
        weight = 1.0
        while history and (*history, word) not in self.probabilities[len(history)]:
            weight *= self.backoff[len(history) - 1].get(history, 1.0)
            history = history[1:]
        return weight * self.probabilities[len(history)].get((*history, word), 0.0)

    def to_arpa(self) -> str:
        """The model in the ARPA format, logarithms to the base of 10."""
        orders = [*self.probabilities, *[{}] * (self.order == 1)]  # KenLM reads no file without bigrams: there are 0
        lines = ["\\data\\"]
        lines += [f"ngram {n}={len(each) + 2 * (n == 1)}" for n, each in enumerate(orders, 1)]
        for n, ngrams in enumerate(orders, 1):
            lines += ["", f"\\{n}-grams:"]
            backoff = self.backoff[n - 1] if n < self.order else {}
            if n == 1:  # the beginning is never predicted
                begin = f"\t{math.log10(backoff[(BEGIN,)]):.7f}" if (BEGIN,) in backoff else ""
                lines += [f"{UNKNOWN_LOG10}\t{UNKNOWN}", f"-99\t{BEGIN}{begin}"]
            for ngram, probability in ngrams.items():
                weight = backoff.get(ngram)
                end = "" if weight is None else f"\t{math.log10(weight):.7f}"
                lines.append(f"{math.log10(probability):.7f}\t{' '.join(ngram)}{end}")
        return "\n".join([*lines, "", "\\end\\", ""])

    def save(self, path: str | Path) -> None:
        """Write the ARPA file, as a whole or not at all."""
        write_text_atomically(path, self.to_arpa())


def train_ngram(
    sentences: Iterable[str],
    order: int,
    vocabulary: Iterable[str] = (),
    frequencies: Mapping[str, float] | None = None,
    frequency_weight: float = FREQUENCY_WEIGHT,
) -> NgramModel:
    """An n-gram model of sentences in normal form (see text_rules.py).

    Args:
        sentences: words with one space between two.
        order: n, 1 to 6.
        vocabulary: words besides those of the sentences.
        frequencies: how often words are used in the language at large, in any unit; those of the vocabulary count.
        frequency_weight: their share of the unigrams, from 0 to below 1; the rest is the sentences'.
    Raises:
        ValueError: no sentence has a word, or a word is one of <s>, </s>, <unk>; an order, a weight or a frequency out
            of range.
    """
    sentences = [words for words in map(str.split, sentences) if words]
    words = {word for sentence in sentences for word in sentence} | set(vocabulary)
    _check(sentences, words, order, frequencies, frequency_weight)
    words |= {END}
    counts = _kneser_ney_counts(sentences, order)
    share_of_end = len(sentences) / sum(len(sentence) + 1 for sentence in sentences)
    background = _background(words - {END}, frequencies, share_of_end)
    unigrams, spare = _discounted(counts[0])
    rest = _nearly_uniform(words)
    weight = frequency_weight if background else 0.0
    probabilities = [
        {
            (word,): (1 - weight) * (unigrams.get((word,), 0.0) + spare[()] * rest[word])
            + weight * background.get(word, 0.0)
            for word in sorted(words)
        }
    ]
    backoff = []
    for ngrams in counts[1:]:
        discounted, spare = _discounted(ngrams)
        lower = probabilities[-1]
        probabilities.append(
            {ngram: share + spare[ngram[:-1]] * lower[ngram[1:]] for ngram, share in discounted.items()}
        )
        backoff.append(spare)
    return NgramModel(probabilities, backoff)


def _check(
    sentences: Sequence, words: set[str], order: int, frequencies: Mapping[str, float] | None, frequency_weight: float
) -> None:
    problems = []
    if not sentences:
        problems.append("the text holds no word")
    reserved = sorted(words & {BEGIN, END, UNKNOWN})
    if reserved:
        problems.append(f"{', '.join(reserved)} among the words: the model sets them itself")
    broken = sorted(word for word in words if word.split() != [word])
    if broken:
        problems.append(f"{broken[0]!r} in the vocabulary is not one word")
    if not 1 <= order <= HIGHEST_ORDER:
        problems.append(f"the order must be from 1 to {HIGHEST_ORDER}, not {order}")
    if not 0 <= frequency_weight < 1:
        problems.append(f"the weight of the word frequencies must be from 0 to below 1, not {frequency_weight}")
    wrong = [word for word, each in (frequencies or {}).items() if not 0 <= each < math.inf]
    if wrong:
        problems.append(f"the frequency of {wrong[0]!r} is {frequencies[wrong[0]]}: it must be 0 or more")
    if problems:
        raise ValueError("no language model can be made:\n" + "\n".join(problems))


def _kneser_ney_counts(sentences: Sequence[list[str]], order: int) -> list[Counter]:
    """Of each length: how often an n-gram of full length stands in the text; of a shorter one, after how many
    different words (it is asked for only where the longer one is unknown). One that begins a sentence has no word
    before it, and keeps its number."""
    raw = [Counter() for _ in range(order)]
    for sentence in sentences:
        words = (BEGIN, *sentence, END)
        for n, counter in enumerate(raw, 1):
            counter.update(words[i : i + n] for i in range(len(words) - n + 1))
    counts = raw[-1:]
    for shorter, longer in zip(raw[-2::-1], raw[:0:-1], strict=True):
        distinct = Counter(ngram[1:] for ngram in longer)
        distinct.update({ngram: number for ngram, number in shorter.items() if ngram[0] == BEGIN})
        counts.insert(0, distinct)
    counts[0].pop((BEGIN,), None)
    return counts


def _discounted(counts: Counter) -> tuple[dict[Ngram, float], dict[Ngram, float]]:
    """Each n-gram's share of its history after discounting, and what each history has to spare for the rest."""
    discounts = _discounts(counts)
    totals: dict[Ngram, int] = defaultdict(int)
    spared: dict[Ngram, float] = defaultdict(float)
    for ngram, number in counts.items():
        totals[ngram[:-1]] += number
        spared[ngram[:-1]] += discounts[min(number, 3)]
    shares = {ngram: (number - discounts[min(number, 3)]) / totals[ngram[:-1]] for ngram, number in counts.items()}
    return shares, {history: spared[history] / total for history, total in totals.items()}


def _discounts(counts: Counter) -> tuple[float, float, float, float]:
    """What to take off a count of 0, 1, 2, and 3 or more (Chen and Goodman's D1, D2, D3+).

    They rest on how many n-grams come once to four times. In a small text one of these numbers may be 0, or their
    ratio meaningless, so each is taken as 1 at the least, and a discount as between 0.05 and 0.95 of its count.
    """
    numbers = Counter(counts.values())
    once, twice, thrice, four_times = (max(1, numbers[n]) for n in (1, 2, 3, 4))
    base = once / (once + 2 * twice)
    raw = (1 - 2 * base * twice / once, 2 - 3 * base * thrice / twice, 3 - 4 * base * four_times / thrice)
    return 0.0, *(min(max(discount, 0.05), 0.95 * n) for n, discount in enumerate(raw, 1))


def _nearly_uniform(words: set[str]) -> dict[str, float]:
    """Probabilities that fall from the shortest word to the longest, by a third over 124,000 words.

    Were they equal, a decoder's choice between homophones that the text never has would be left to chance, and
    differ from one run to the next. KenLM's logarithms, float32, still tell two neighbours apart.
    """
    ranked = sorted(words, key=lambda word: (len(word), word))
    weights = [1 / (1 + 4e-6 * rank) for rank in range(len(ranked))]
    total = sum(weights)
    return {word: weight / total for word, weight in zip(ranked, weights, strict=True)}


def _background(words: set[str], frequencies: Mapping[str, float] | None, share_of_end: float) -> dict[str, float]:
    """Probabilities of the words by their frequencies in the language, the sentence's end as often as in the text."""
    numbers = {word: frequencies.get(word, 0.0) for word in words} if frequencies else {}
    largest = max(numbers.values(), default=0.0)
    if not largest:
        return {}
    shares = {word: number / largest for word, number in numbers.items()}  # first, since a sum of huge ones is infinite
    total = math.fsum(shares.values())
    return {word: (1 - share_of_end) * share / total for word, share in shares.items()} | {END: share_of_end}
