"""Phoneme emissions to words with the field's word-level graphs: TLG.fst and words.txt, through k2-fsa's wheels.

    decoder = FstDecoder("openwebtext_3gram_lm_sil/TLG.fst", "openwebtext_3gram_lm_sil/words.txt", settings)
    hypotheses = decoder.decode(log_probs)

The graph T o L o G holds the CTC rules, the lexicon with its silences, and the n-gram with its back-off arcs. What
differs from an n-gram asked directly: an epsilon back-off arc may be taken although the n-gram is there, where that
is cheaper, so `lm_score` is the graph's, which may lie above the n-gram's own.

What the wheels can do (kaldi_decoder 0.3.2): FasterDecoder gives one path and bounds its work by `beam` and
`max_active`. LatticeSimpleDecoder gives a lattice, but knows a beam only: on a graph of 18 MB it took 0.2 s a sentence
with beam 8, 5 s with 12, and over 10 s with the field's 17 (acoustic_scale 0.35, one core). So the best path comes from
the first, and the others from the narrowest lattice that suffices. The field's second pass over the lattice with an
unpruned G (G_no_prune.fst) is not here: the wheels cannot compose a lattice.
"""

import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from config import DecoderConfig
from evaluate_model_helpers import BLANK, PHONEMES, SILENCE
from language_model import LanguageModelError
from machine import available_memory
from nbest import Hypothesis
from text_rules import normalize

# Class of the input label 1, 2, ... of the published graphs: <blk>, SIL, then the phonemes in the table's order.
GRAPH_ORDER = (BLANK, SILENCE, *(index for index in range(len(PHONEMES)) if index not in (BLANK, SILENCE)))

_MAGIC = b"\xd6\xfd\xb2\x7e"  # the first bytes of an OpenFst file
_MEMORY_PER_BYTE = {"vector": 2.2, "const": 1.1}  # loaded graph / file; measured 2.0 to 2.1, and 1.0
_LABEL_CHECK_STATES = 50_000  # half a second; all states of a graph of many GB would take too long
_LATTICE_BEAMS = (4.0, 6.0, 8.0, 12.0, 17.0, 24.0, 34.0, 48.0)  # tried in turn; 8 and 17 are the field's beams
_MIN_ACTIVE = 20  # FasterDecoder's default
_TOKEN_NAMES = {"<blk>": BLANK, "<blank>": BLANK, "SIL": SILENCE} | {name: i for i, name in enumerate(PHONEMES)}


class _Path(NamedTuple):
    """Costs of a path, in the graph's units; compares by the total."""

    total: float
    graph: float
    acoustic: float

    def plus(self, graph: float, acoustic: float) -> "_Path":
        return _Path(self.total + graph + acoustic, self.graph + graph, self.acoustic + acoustic)


class FstDecoder:
    """The words of a trial by a WFST.

    A path costs graph - acoustic_scale / lm_weight * acoustic, so that paths rank as by the score
    acoustic_scale * acoustic + lm_weight * lm, the graph's costs standing as they are. Settings:

    - beam_size: states that the best path's search keeps a frame (max_active; 2 at least), and states a frame at
      which the lattice is wide enough. The field uses 7000: graph states are many more than word histories.
    - beam_threshold: how far a path's score may fall behind the best one's, for both searches
    - n_best: with 1, only the best path is searched. Fewer come back where no more lie within the beam.
    - lm_weight: above 0; the silences' and pronunciations' probabilities in the graph are weighted with it
    - blank_penalty: subtracted from the blank's log-probability before all else
    - word_score, silence_score: not used, a graph has its own

    Args:
        fst_path: TLG.fst, OpenFst's vector or const type with standard (tropical) arcs, no disambiguation symbols left
            on its input side.
        words_path: words.txt, `name id` a line. Words are given in their normal form (text_rules.py);
            names such as <s> and #0 are none.
        settings: as above.
        tokens_path: tokens.txt of the graph, where its input labels are not the published ones (see GRAPH_ORDER):
            <blk>, SIL or |, and every phoneme.
        check_memory: refuse a graph that the free memory cannot hold.
    Raises:
        ValueError: settings that cannot be honoured, files that are missing, damaged, too large or no decoding graph
            of these phonemes and words: all of the problems that show before the graph is loaded, then the graph's.
        LanguageModelError: the wheels are not installed.
    """

    searched = ("lm_weight", "blank_penalty")

    def __init__(
        self,
        fst_path: str | Path,
        words_path: str | Path,
        settings: DecoderConfig,
        tokens_path: str | Path | None = None,
        check_memory: bool = True,
    ):
        problems: list[str] = []
        words = _collect(problems, _read_table, words_path, "word table")
        order = GRAPH_ORDER if tokens_path is None else _collect(problems, read_token_order, tokens_path)
        _collect(problems, check_graph_file, fst_path, check_memory)
        _raise(problems)
        self._decoders, self._fst = _wheels()
        self._order = list(order)
        self._words = [None if re.fullmatch(r"<.*>|#\d+", name) else normalize(name) or None for name in words]
        self._graph = self._fst.StdFst.read(str(fst_path))
        if self._graph is None:
            raise ValueError(f"{fst_path}: cut short or damaged, it cannot be loaded; fetch or build it again")
        _raise(_label_problems(self._fst, self._graph, fst_path, len(words)))
        self._search_with(settings)

    def _search_with(self, settings: DecoderConfig) -> None:
        if settings.lm_weight == 0:
            raise ValueError("decoder.lm_weight is 0, but a graph's costs cannot be left out: set it above 0")
        self.settings = settings.copy()
        self._scale = settings.acoustic_scale / settings.lm_weight
        self._beam = settings.beam_threshold / settings.lm_weight

    def with_settings(self, settings: DecoderConfig) -> "FstDecoder":
        """A decoder of the same graph, which is shared, with other settings."""
        other = object.__new__(FstDecoder)
        other.__dict__.update(self.__dict__)
        other._search_with(settings)
        return other

    def decode(self, log_probs: np.ndarray) -> list[Hypothesis]:
        """The readings of a trial, best first, each text once; the same for the same input, whatever came before.

        Where no path ends as a sentence within the beams, the best unfinished ones are given.

        Args:
            log_probs: (P frames, C classes) natural logarithms of the softmax.
        Returns:
            One to n_best hypotheses; the text is '' where nothing was decoded.
        Raises:
            ValueError: another shape, or values that are not finite.
        """
        log_probs = np.asarray(log_probs, np.float32)
        if log_probs.ndim != 2 or log_probs.shape[1] != len(PHONEMES):
            raise ValueError(f"log-probabilities have the shape {log_probs.shape}; needed: (frames, {len(PHONEMES)})")
        if not np.isfinite(log_probs).all():
            frame, index = np.argwhere(~np.isfinite(log_probs))[0]
            raise ValueError(f"log-probability of frame {frame}, class {index} is {log_probs[frame, index]}")
        if len(log_probs) == 0:
            return [Hypothesis("", 0.0, 0.0, 0.0)]
        scores = log_probs[:, self._order]
        scores[:, self._order.index(BLANK)] -= self.settings.blank_penalty
        emissions = self._decoders.DecodableCtc(np.ascontiguousarray(scores * np.float32(self._scale)))

        finished, paths = self._best_path(emissions)
        if self.settings.n_best > 1:
            paths = self._with_alternatives(emissions, len(log_probs), finished, paths)
        hypotheses = [self._hypothesis(words, path) for words, path in paths.items()]
        return sorted(hypotheses, key=lambda hypothesis: (-hypothesis.score, hypothesis.text))[: self.settings.n_best]

    def _hypothesis(self, words: tuple[str, ...], path: _Path) -> Hypothesis:
        acoustic, language = -path.acoustic / self._scale, -path.graph
        score = self.settings.acoustic_scale * acoustic + self.settings.lm_weight * language
        return Hypothesis(" ".join(words), score, acoustic, language)

    def _best_path(self, emissions: Any) -> tuple[bool, dict[tuple[str, ...], _Path]]:
        """Whether a sentence's end was reached, and {words: path} of the best path; of no words if there is none."""
        most = max(2, self.settings.beam_size)  # the wheel refuses less
        options = self._decoders.FasterDecoderOptions(
            beam=self._beam, max_active=most, min_active=min(_MIN_ACTIVE, most - 1)
        )
        # A new one each time: its hash keeps the size that earlier trials needed, and pruning goes by its order.
        decoder = self._decoders.FasterDecoder(self._graph, options)
        decoder.decode(emissions)
        found, path = decoder.get_best_path()
        if not found:
            return False, {(): _Path(0.0, 0.0, 0.0)}
        _, _, labels, weight = self._fst.get_linear_symbol_sequence(path)
        words = tuple(word for word in map(self._word, labels) if word)
        return decoder.reached_final(), {words: _Path(0.0, 0.0, 0.0).plus(weight.value1, weight.value2)}

    def _with_alternatives(
        self, emissions: Any, n_frames: int, finished: bool, best: dict[tuple[str, ...], _Path]
    ) -> dict[tuple[str, ...], _Path]:
        """Add a lattice's word sequences to the best path.

        The lattice is widened until it holds a path as good as the best one and n_best others within its beam; or,
        since its work grows about tenfold a step, until it has beam_size states a frame.
        """
        paths = best
        for beam in sorted({min(beam, self._beam) for beam in (*_LATTICE_BEAMS, self._beam)}):
            config = self._decoders.LatticeSimpleDecoderConfig(beam=beam, lattice_beam=beam)
            decoder = self._decoders.LatticeSimpleDecoder(self._graph, config)
            lattice_finished = decoder.decode(emissions)
            _, lattice = decoder.get_raw_lattice()
            if lattice_finished >= finished and (found := self._lattice_paths(lattice)):
                if lattice_finished > finished:  # unfinished paths cost less: they owe the rest of the sentence
                    finished, best = True, {}
                costs = sorted(path.total for path in found.values())
                missed = any(path.total < costs[0] - 1e-3 for path in best.values())
                paths = found | {words: min(path, found.get(words, path)) for words, path in best.items()}
                enough = len(costs) >= self.settings.n_best and costs[self.settings.n_best - 1] <= costs[0] + beam
                if enough and not missed:
                    break
            if lattice.num_states >= self.settings.beam_size * n_frames:
                break
        return paths

    def _lattice_paths(self, lattice: Any) -> dict[tuple[str, ...], _Path]:
        """{words: best path} of the lattice's n_best best word sequences.

        Every state keeps its n_best best histories, which is exact: a history outside them has n_best better ones
        with the same continuations. (kaldifst's n shortest paths would be alignments of the same few words.)
        """
        from kaldifst.lib._kaldifst import _ArcIteratorLattice  # kaldifst.ArcIterator refuses a lattice

        arcs, waiting = [], [0] * lattice.num_states
        for state in range(lattice.num_states):
            iterator, leaving = _ArcIteratorLattice(lattice, state), []
            while not iterator.done:
                arc = iterator.value
                leaving.append((arc.nextstate, self._word(arc.olabel), arc.weight.value1, arc.weight.value2))
                waiting[arc.nextstate] += 1
                iterator.next()
            arcs.append(leaving)
        histories: list[dict[tuple[str, ...], _Path]] = [{} for _ in (*arcs, "end")]  # the last is of whole paths
        if arcs:
            histories[lattice.start][()] = _Path(0.0, 0.0, 0.0)
        ready = [state for state, count in enumerate(waiting) if count == 0]
        while ready:  # in topological order: the lattice's own numbers follow it between frames only
            state = ready.pop()
            kept, final = self._best(histories[state]), lattice.final(state)
            ends = [(-1, None, final.value1, final.value2)] if np.isfinite(final.value1) else []
            for target, word, graph, acoustic in arcs[state] + ends:
                into = histories[target]
                for words, path in kept:
                    words, path = (*words, word) if word else words, path.plus(graph, acoustic)
                    if words not in into or path < into[words]:
                        into[words] = path
                if target >= 0:
                    waiting[target] -= 1
                    if waiting[target] == 0:
                        ready.append(target)
            histories[state] = {}
        return dict(self._best(histories[-1]))

    def _best(self, paths: dict[tuple[str, ...], _Path]) -> list[tuple[tuple[str, ...], _Path]]:
        return sorted(paths.items(), key=lambda item: (item[1], item[0]))[: self.settings.n_best]

    def _word(self, label: int) -> str | None:
        """The word of an output label; None for epsilon and names that are no words."""
        if label >= len(self._words):
            raise ValueError(f"the graph gives the word {label}, but words.txt ends at {len(self._words) - 1}")
        return self._words[label]


# ---- checks ----


def read_token_order(path: str | Path) -> tuple[int, ...]:
    """The phoneme class of each input label 1, 2, ..., from a graph's tokens.txt; disambiguation symbols may follow.

    Raises:
        ValueError: the file cannot be read as a table, or has tokens that are no phonemes, missing, or twice there.
    """
    names = _read_table(path, "token table")[1:]
    while names and re.fullmatch(r"#\d+", names[-1]):
        names.pop()
    problems = [f"{path}: {name!r} is no phoneme class" for name in names if name not in _TOKEN_NAMES]
    order = [_TOKEN_NAMES[name] for name in names if name in _TOKEN_NAMES]
    problems += [f"{path}: no token for {PHONEMES[i]}" for i in range(len(PHONEMES)) if i not in order]
    problems += [f"{path}: {order.count(i)} tokens for {PHONEMES[i]}" for i in sorted(set(order)) if order.count(i) > 1]
    _raise(problems)
    return tuple(order)


def check_graph_file(path: str | Path, check_memory: bool = True) -> None:
    """Check a graph file's header, and its size against the free memory, without loading it.

    Raises:
        ValueError: no OpenFst file of a type that the decoders take, or one that does not fit.
    """
    try:
        size = Path(path).stat().st_size
        with open(path, "rb") as file:
            header = file.read(200)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read as a decoding graph: {error}") from error
    try:
        fst_type, position = _text(header, 4)
        arc_type, _ = _text(header, position)
    except (struct.error, ValueError):
        fst_type = arc_type = ""
    if not header.startswith(_MAGIC) or not fst_type or not arc_type:
        raise ValueError(f"{path}: is no OpenFst file, or cut short: {size} bytes that begin with {header[:16]!r}")
    if fst_type not in _MEMORY_PER_BYTE or arc_type != "standard":
        raise ValueError(
            f"{path}: is a {fst_type} graph with {arc_type} arcs; make it one of the const type with standard arcs "
            "(OpenFst's fstconvert, fstmap)"
        )
    needed, free = size * _MEMORY_PER_BYTE[fst_type], available_memory()
    if check_memory and free is not None and needed > free:
        raise ValueError(
            f"{path}: has {size / 1e9:.3g} GB and needs about {needed / 1e9:.3g} GB of memory; {free / 1e9:.3g} GB are "
            "free. Take a smaller graph (fewer words, a lower order, pruned), or check_memory=False to try"
        )


def _label_problems(fst: Any, graph: Any, path: str | Path, n_words: int) -> list[str]:
    """Labels that are no token or no word, in evenly spread states: the wheel would read beyond the emissions."""
    step = max(1, graph.num_states // _LABEL_CHECK_STATES)
    inputs, outputs = set(), set()
    for state in range(0, graph.num_states, step):
        for arc in fst.ArcIterator(graph, state):
            inputs.add(arc.ilabel)
            outputs.add(arc.olabel)
    problems = []
    wrong = sorted(label for label in inputs if not 0 <= label <= len(PHONEMES))
    if wrong:
        problems.append(
            f"{path}: reads the tokens {wrong[:5]}, known are 1 to {len(PHONEMES)}: it is of another phoneme table, or "
            "its disambiguation symbols are left in (T must read nothing for them)"
        )
    if outputs and max(outputs) >= n_words:
        problems.append(f"{path}: gives the word {max(outputs)}, but words.txt ends at {n_words - 1}: of another graph")
    if inputs <= {0} or outputs <= {0}:
        problems.append(f"{path}: reads no token or gives no word, nothing can be decoded with it")
    return problems


def _read_table(path: str | Path, what: str) -> list[str]:
    """The names of a `name id` file, by id; ValueError with all problems, ids other than 0, 1, ... among them."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as a {what}: {error}") from error
    names: dict[int, str] = {}
    problems = []
    for number, line in enumerate(lines, 1):
        fields = line.split()
        if len(fields) != 2 or not fields[1].isdecimal():
            problems.append(f"line {number}: needed are a name and its id, not {line[:60]!r}")
        elif names.setdefault(int(fields[1]), fields[0]) != fields[0]:
            problems.append(f"line {number}: id {fields[1]} is {names[int(fields[1])]!r} already")
    missing = [index for index in range(max(names, default=-1) + 1) if index not in names]
    if missing:
        problems.append(f"no name for {len(missing)} ids below {max(names)}, the first {missing[:5]}")
    if names.get(0) != "<eps>":
        problems.append(f"id 0 is {names.get(0)!r}; <eps> must have it")
    shown = problems[:10] + ([f"and {len(problems) - 10} more"] if len(problems) > 10 else [])
    _raise([f"{path}: {problem}" for problem in shown])
    return [names[index] for index in range(len(names))]


def _text(header: bytes, position: int) -> tuple[str, int]:
    """A string that OpenFst wrote, and where it ends."""
    (length,) = struct.unpack_from("<i", header, position)
    end = position + 4 + length
    if not 0 < length <= len(header) - position - 4:
        raise ValueError(f"a string of {length} bytes does not fit")
    return header[position + 4 : end].decode("ascii"), end


def _collect(problems: list[str], check: Callable, *arguments: Any) -> Any:
    """The check's result, or its problem added to the list."""
    try:
        return check(*arguments)
    except ValueError as error:
        problems.append(str(error))
        return None


def _raise(problems: list[str]) -> None:
    if problems:
        raise ValueError("\n".join(problems))


def _wheels() -> tuple[Any, Any]:
    try:
        import kaldi_decoder
        import kaldifst
    except ImportError as error:
        raise LanguageModelError(
            f"decoding with a WFST needs kaldi_decoder and kaldifst ({error}): pip install -r requirements_extras.txt"
        ) from error
    return kaldi_decoder, kaldifst
