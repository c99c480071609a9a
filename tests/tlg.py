"""Small decoding graphs for tests, made as the published ones: a token graph T, a lexicon L and an n-gram G, composed.

    T  input 0 = epsilon, 1 = blank, 2 = silence, 3 ... = phonemes; the CTC topology, two equal phonemes parted by blank
    L  phonemes, silence and, for homophones, a disambiguation symbol -> the word
    G  an ARPA file's n-grams with back-off arcs, which read the word #0

TLG = T o min(det(L o G)); T reads nothing for a disambiguation symbol, so that none is left in it.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import kaldifst

from evaluate_model_helpers import BLANK, PHONEMES, SILENCE

Pronunciation = tuple[int, ...]  # phoneme classes, without the silence that follows every word
CLASSES = (BLANK, SILENCE, *range(1, SILENCE))  # the graph's token order: class of the input label 1, 2, ...
TOKENS = {index: token for token, index in enumerate(CLASSES, 1)}  # class -> input label
FIRST_DISAMBIGUATION = len(CLASSES) + 1  # the label of #0


def read_arpa(path: str | Path) -> dict[tuple[str, ...], tuple[float, float]]:
    """{n-gram: (log-probability, log back-off)}, natural logarithms."""
    grams = {}
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        fields = line.split("\t")
        if len(fields) > 1:
            backoff = float(fields[2]) if len(fields) > 2 else 0.0
            grams[tuple(fields[1].split())] = (float(fields[0]) * math.log(10), backoff * math.log(10))
    return grams


def sentence_log_prob(grams: Mapping[tuple[str, ...], tuple[float, float]], text: str, order: int = 3) -> float:
    """Natural log-probability of a sentence and its end by the ARPA file's own rule: back off only where it must."""

    def word(history: tuple[str, ...], name: str) -> float:
        if (*history, name) in grams:
            return grams[(*history, name)][0]
        return (grams[history][1] if history in grams else 0.0) + word(history[1:], name)

    words = ("<s>", *text.split(), "</s>")
    return sum(word(words[max(0, i - order + 1) : i], words[i]) for i in range(1, len(words)))


def word_ids(lexicon: Mapping[str, Sequence[Pronunciation]]) -> dict[str, int]:
    """The word table, with the names that are no words at the ends, as in the published words.txt."""
    return {
        name: i for i, name in enumerate(["<eps>", *(word.upper() for word in sorted(lexicon)), "#0", "<s>", "</s>"])
    }


def token_graph(disambiguation: int) -> "kaldifst.StdVectorFst":
    """T; state 0 is 'blank or nothing yet', state i 'in token i + 1'. `disambiguation`: how many symbols there are."""
    tokens = range(2, len(CLASSES) + 1)
    lines = ["0 0 1 0"]
    for token in tokens:
        state = token - 1
        lines += [f"0 {state} {token} {token}", f"{state} {state} {token} 0", f"{state} 0 1 0"]
        lines += [f"{state} {other - 1} {other} {other}" for other in tokens if other != token]
    for state in range(len(CLASSES)):
        lines += [f"{state} {state} 0 {FIRST_DISAMBIGUATION + k}" for k in range(disambiguation)]
        lines.append(f"{state}")
    return _compiled(lines, "olabel")


def lexicon_graph(lexicon: Mapping[str, Sequence[Pronunciation]]) -> tuple["kaldifst.StdVectorFst", int]:
    """L, and how many disambiguation symbols it uses: #0 for the back-off arcs, #1, #2, ... after homophones.

    Every homophone has one: were the first to go without, each would drag all words that may follow into the
    determinization.
    """
    ids = word_ids(lexicon)
    lines, next_state, homophones = [f"0 0 {FIRST_DISAMBIGUATION} {ids['#0']}", "0"], 1, Counter()
    words_of = Counter(pronunciation for pronunciations in lexicon.values() for pronunciation in pronunciations)
    for word in sorted(lexicon):
        for pronunciation in lexicon[word]:
            labels = [TOKENS[index] for index in (*pronunciation, SILENCE)]
            if words_of[pronunciation] > 1:
                homophones[pronunciation] += 1
                labels.append(FIRST_DISAMBIGUATION + homophones[pronunciation])
            states = [0, *range(next_state, next_state + len(labels) - 1), 0]
            next_state += len(labels) - 1
            outputs = [ids[word.upper()]] + [0] * (len(labels) - 1)
            lines += [f"{a} {b} {i} {o}" for a, b, i, o in zip(states, states[1:], labels, outputs, strict=False)]
    return _compiled(lines, "olabel"), 1 + max(homophones.values(), default=0)


def grammar_graph(
    grams: Mapping[tuple[str, ...], tuple[float, float]], ids: Mapping[str, int]
) -> "kaldifst.StdVectorFst":
    """G of `read_arpa`'s n-grams; `ids` as of `word_ids`. Words that `ids` lacks are left out."""
    order = max(map(len, grams))
    contexts = {gram[:-1] for gram in grams} | {gram for gram in grams if len(gram) < order and gram[-1] != "</s>"}
    states: dict[tuple[str, ...], int] = defaultdict(lambda: len(states))
    _ = states[("<s>",)] if order > 1 else states[()]  # the first state of the text is the start
    lines = []
    for context in sorted(contexts - {("<unk>",)}, key=lambda context: (context != ("<s>",), context)):
        if context:
            backoff = grams[context][1] if context in grams else 0.0
            lines.append(f"{states[context]} {states[context[1:]]} {ids['#0']} 0 {-backoff!r}")
    for gram, (log_prob, _) in grams.items():
        source = states[gram[:-1]]
        if gram[-1] == "</s>":
            lines.append(f"{source} {-log_prob!r}")
        elif gram[-1].upper() in ids and gram[-1] != "<s>":
            target = gram[-(order - 1) :] if order > 1 else ()
            while target not in contexts:
                target = target[1:]
            word = ids[gram[-1].upper()]
            lines.append(f"{source} {states[target]} {word} {word} {-log_prob!r}")
    return _compiled(lines, "ilabel")


def write_tlg(
    directory: str | Path, arpa: str | Path, lexicon: Mapping[str, Sequence[Pronunciation]]
) -> tuple[Path, Path]:
    """Write TLG.fst, words.txt and tokens.txt of an ARPA file and {word: pronunciations}; paths of the first two."""
    directory = Path(directory)
    ids = word_ids(lexicon)
    lexicon_fst, disambiguation = lexicon_graph(lexicon)
    graph = kaldifst.compose(lexicon_fst, grammar_graph(read_arpa(arpa), ids))
    kaldifst.determinize_star(graph)
    kaldifst.minimize_encoded(graph)
    kaldifst.arcsort(graph, sort_type="ilabel")
    kaldifst.compose(token_graph(disambiguation), graph).write(str(directory / "TLG.fst"))
    (directory / "words.txt").write_text("".join(f"{name} {i}\n" for name, i in ids.items()), encoding="utf-8")
    names = ["<eps>", "<blk>", "SIL", *(PHONEMES[index] for index in CLASSES[2:])]
    names += [f"#{k}" for k in range(disambiguation)]
    (directory / "tokens.txt").write_text("".join(f"{name} {i}\n" for i, name in enumerate(names)), encoding="utf-8")
    return directory / "TLG.fst", directory / "words.txt"


def _compiled(lines: Iterable[str], sort: str) -> "kaldifst.StdVectorFst":
    graph = kaldifst.compile("\n".join(lines) + "\n")
    kaldifst.arcsort(graph, sort_type=sort)
    return graph
