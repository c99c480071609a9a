"""The WFST decoder on small graphs: words, n-best, settings, damaged files, and agreement with an n-gram decoder."""

import random
import sys

import numpy as np
import pytest
from rapidfuzz.distance import Levenshtein

pytest.importorskip("kaldi_decoder")
import kaldifst
import tlg

import fst_decoder
from config import DecoderConfig
from ctc import greedy_collapse
from evaluate_model_helpers import BLANK, PHONEMES, SILENCE
from fst_decoder import GRAPH_ORDER, FstDecoder, read_token_order
from language_model import LanguageModelError, NgramDecoder
from lexicon import Lexicon
from ngram import train_ngram
from synthetic_sentences import draw_sentence, phoneme_labels, vocabulary

HOMOPHONES = {"too": "to", "two": "to", "sea": "see", "sun": "son", "knew": "new", "hour": "our", "no": "know"}
TEXT = "see you at the sea"
N_SENTENCES = 100


@pytest.fixture(scope="module")
def sentences():
    """Training text, and sentences that are not in it."""
    draw = random.Random(0)
    return [
        list(dict.fromkeys(" ".join(draw_sentence("Conversation", split, (2, 7), draw)[1]) for _ in range(number)))
        for split, number in (("train", 3000), ("val", N_SENTENCES + 30))
    ]


@pytest.fixture(scope="module")
def lexicon():
    words = {*vocabulary("Conversation"), *HOMOPHONES}
    return {word: [tuple(phoneme_labels([HOMOPHONES.get(word, word)])[:-1])] for word in sorted(words)}


@pytest.fixture(scope="module")
def arpa(tmp_path_factory, sentences, lexicon):
    text = [*sentences[0], TEXT, "it is two hours", "me too"]
    path = tmp_path_factory.mktemp("lm") / "lm.arpa"
    train_ngram(text, 3, lexicon).save(path)
    return path


@pytest.fixture(scope="module")
def graph(tmp_path_factory, arpa, lexicon):
    """Paths of TLG.fst and words.txt; tokens.txt lies beside them."""
    return tlg.write_tlg(tmp_path_factory.mktemp("graph"), arpa, lexicon)


def emissions(labels, noise=0.0, peak=8.0, seed=0):
    """(frames, 41) log-probabilities of a label sequence: one or two frames a label, blanks between, Gaussian noise."""
    rng = np.random.default_rng(seed)
    path = [BLANK]
    for label in labels:
        path += [label] * int(rng.integers(1, 3)) + [BLANK] * int(rng.integers(1, 3))
    logits = rng.normal(0.0, noise, (len(path), len(PHONEMES)))
    logits[np.arange(len(path)), path] += peak
    return (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)


def spoken(lexicon, text):
    return [label for word in text.split() for label in (*lexicon[word][0], SILENCE)]


PLAIN = {"lm_weight": 1, "blank_penalty": 0}


def decoder(graph, **settings):
    return FstDecoder(*graph, DecoderConfig(**PLAIN | settings))


# ---- decoding ----


def test_clean_emissions_give_the_sentence(graph, lexicon, sentences):
    decode = decoder(graph).decode
    for text in [TEXT, *sentences[1][:10]]:
        assert decode(emissions(spoken(lexicon, text)))[0].text == text


def test_hypotheses_are_distinct_fall_and_repeat(graph, lexicon):
    settings = {"n_best": 20, "acoustic_scale": 0.8, "lm_weight": 1.7}
    decode = decoder(graph, **settings).decode
    log_probs = emissions(spoken(lexicon, TEXT), noise=2.0)
    hypotheses = decode(log_probs)
    assert len(hypotheses) == len({hypothesis.text for hypothesis in hypotheses}) == 20
    scores = [hypothesis.score for hypothesis in hypotheses]
    assert scores == sorted(scores, reverse=True)
    for hypothesis in hypotheses:
        assert hypothesis.score == pytest.approx(0.8 * hypothesis.acoustic_score + 1.7 * hypothesis.lm_score)
    decode(emissions(spoken(lexicon, "we know"), noise=3.0))  # another trial between
    assert decode(log_probs) == hypotheses


def test_the_scores_are_the_paths_own(graph, lexicon, arpa):
    """On clean emissions the path is known, and a sentence of common n-grams needs no back-off."""
    (best,) = decoder(graph, n_best=1, blank_penalty=0.5).decode(log_probs := emissions(spoken(lexicon, TEXT)))
    path = log_probs.max(1) - 0.5 * (log_probs.argmax(1) == BLANK)
    assert best.acoustic_score == pytest.approx(path.sum(), abs=1e-3)
    assert best.lm_score == pytest.approx(tlg.sentence_log_prob(tlg.read_arpa(arpa), TEXT), abs=0.05)


def test_a_wide_lattice_finds_no_better_hypotheses(graph, lexicon, monkeypatch):
    log_probs = emissions(spoken(lexicon, TEXT), noise=1.5)
    narrow = decoder(graph, n_best=5, beam_size=1000).decode(log_probs)
    monkeypatch.setattr(fst_decoder, "_LATTICE_BEAMS", (25.0,))
    wide = decoder(graph, n_best=5, beam_size=1000).decode(log_probs)
    assert [hypothesis.text for hypothesis in narrow] == [hypothesis.text for hypothesis in wide]


def test_no_frames_and_no_words(graph):
    assert [hypothesis.text for hypothesis in decoder(graph).decode(np.zeros((0, 41), np.float32))] == [""]
    blanks = np.full((5, 41), -20.0, np.float32)
    blanks[:, BLANK] = 0.0
    assert decoder(graph, beam_threshold=5.0).decode(blanks)[0].text == ""


@pytest.mark.parametrize("n_best", [1, 10])
def test_a_sentence_that_breaks_off_gives_its_words_so_far(graph, lexicon, n_best):
    labels = spoken(lexicon, TEXT)[:-1]  # no silence after the last word, so no path ends within a narrow beam
    hypotheses = decoder(graph, n_best=n_best, beam_threshold=6.0).decode(emissions(labels, peak=30.0))
    assert hypotheses[0].text.startswith("see you at the")
    assert len(decoder(graph, n_best=n_best, beam_threshold=100.0).decode(emissions(labels, peak=30.0))) == n_best


@pytest.mark.parametrize(
    "wrong", [np.zeros(41), np.zeros((3, 40)), np.full((3, 41), np.nan), np.full((3, 41), -np.inf)]
)
def test_emissions_of_another_form_are_refused(graph, wrong):
    with pytest.raises(ValueError, match=r"shape|is (nan|-inf)"):
        decoder(graph).decode(wrong)


# ---- settings ----


@pytest.mark.parametrize(
    "setting",
    [{"beam_size": 3}, {"beam_threshold": 2.0}, {"lm_weight": 6.0}, {"acoustic_scale": 0.1}, {"blank_penalty": 9.0}],
)
@pytest.mark.parametrize("n_best", [1, 10])
def test_every_setting_changes_the_result(graph, lexicon, sentences, setting, n_best):
    def texts(**settings):
        decode = decoder(graph, n_best=n_best, **settings).decode
        return [
            [hypothesis.text for hypothesis in decode(emissions(spoken(lexicon, text), noise=3.0, seed=i))]
            for i, text in enumerate(sentences[1][:6])
        ]

    assert texts() != texts(**setting)


def test_a_graph_has_word_and_silence_scores_of_its_own(graph, lexicon):
    log_probs = emissions(spoken(lexicon, TEXT), noise=3.0)
    plain = decoder(graph)
    other = plain.with_settings(DecoderConfig(word_score=3.0, silence_score=-3.0, **PLAIN))
    assert plain.decode(log_probs) == other.decode(log_probs)
    with pytest.raises(ValueError, match="lm_weight is 0"):
        decoder(graph, lm_weight=0.0)


# ---- the order of the tokens ----


def test_another_token_order_gives_another_sentence(graph, lexicon, monkeypatch, tmp_path):
    log_probs = emissions(spoken(lexicon, TEXT))
    tokens = graph[0].parent / "tokens.txt"
    assert read_token_order(tokens) == GRAPH_ORDER
    monkeypatch.setattr(fst_decoder, "GRAPH_ORDER", tuple(range(41)))  # silence last, as in the model's output
    assert Levenshtein.distance(decoder(graph).decode(log_probs)[0].text.split(), TEXT.split()) >= 4
    given = FstDecoder(*graph, DecoderConfig(), tokens_path=tokens)
    assert given.decode(log_probs)[0].text == TEXT


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [("SIL", "|", None), ("ZH", "QQ", "'QQ' is no phoneme class\n.*no token for ZH"), ("ZH", "Z", "2 tokens for Z"),
     ("<blk> 1", "#7 1", "'#7' is no phoneme")],
)  # fmt: skip
def test_token_tables(graph, tmp_path, old, new, message):
    path = tmp_path / "tokens.txt"
    path.write_text((graph[0].parent / "tokens.txt").read_text().replace(f"\n{old}", f"\n{new}"))
    if message is None:
        assert read_token_order(path) == GRAPH_ORDER
    else:
        with pytest.raises(ValueError, match=message):
            read_token_order(path)


# ---- files ----


def test_all_missing_files_are_named_at_once(tmp_path):
    with pytest.raises(ValueError, match=r"no_words[^\n]*\n.*no_graph"):
        FstDecoder(tmp_path / "no_graph", tmp_path / "no_words", DecoderConfig())


@pytest.mark.parametrize(("kept", "message"), [(0, "cut short: 0 bytes"), (20, "cut short"), (-7, "cannot be loaded")])
def test_a_truncated_graph_is_refused(graph, tmp_path, kept, message):
    path = tmp_path / "TLG.fst"
    path.write_bytes(graph[0].read_bytes()[:kept])
    with pytest.raises(ValueError, match=message):
        FstDecoder(path, graph[1], DecoderConfig())


def test_other_files_and_other_graphs_are_refused(graph, tmp_path):
    with pytest.raises(ValueError, match="no OpenFst file"):
        FstDecoder(graph[1], graph[1], DecoderConfig())
    path = tmp_path / "lattice.fst"
    lattice = kaldifst.Lattice()
    lattice.start = lattice.add_state()
    lattice.write(str(path))
    with pytest.raises(ValueError, match="vector graph with lattice4 arcs"):
        FstDecoder(path, graph[1], DecoderConfig())
    path.unlink()
    kaldifst.compile("0 1 57 9999\n1\n").write(str(path))
    with pytest.raises(ValueError, match=r"reads the tokens \[57\].*\n.*gives the word 9999"):
        FstDecoder(path, graph[1], DecoderConfig())


def test_a_const_graph_decodes_the_same(graph, lexicon, tmp_path):
    path = tmp_path / "const.fst"
    kaldifst.StdConstFst(kaldifst.StdVectorFst.read(str(graph[0]))).write(str(path))
    log_probs = emissions(spoken(lexicon, TEXT), noise=1.5)
    assert decoder((path, graph[1])).decode(log_probs) == decoder(graph).decode(log_probs)


def test_all_holes_of_a_word_table_are_named(graph, tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("<unk> 0\na 1\nb\nc 4\nd 4\n")
    with pytest.raises(ValueError, match="line 3") as raised:
        FstDecoder(graph[0], path, DecoderConfig())
    for part in ("line 5: id 4 is 'c' already", "2 ids below 4, the first [2, 3]", "id 0 is '<unk>'"):
        assert part in str(raised.value)


def test_a_graph_beyond_the_memory_is_refused(graph, monkeypatch):
    monkeypatch.setattr(fst_decoder, "available_memory", lambda: 1000.0)
    with pytest.raises(ValueError, match=r"needs about .* GB of memory; 1e-06 GB are free"):
        decoder(graph)
    FstDecoder(*graph, DecoderConfig(), check_memory=False)


def test_without_the_wheels_the_error_says_what_to_install(graph, monkeypatch):
    monkeypatch.setitem(sys.modules, "kaldi_decoder", None)
    with pytest.raises(LanguageModelError, match="pip install -r requirements_extras"):
        decoder(graph)


# ---- agreement ----


def lexicon_decoder(arpa, lexicon, beam_size=200, beam_threshold=60.0):
    """The n-gram decoder on the same n-gram and lexicon: log-probabilities -> (text, score)."""
    config = DecoderConfig(
        beam_size=beam_size, beam_threshold=beam_threshold, lm_weight=1, silence_score=0, blank_penalty=0
    )
    search = NgramDecoder(Lexicon(lexicon), config, arpa)

    def decode(log_probs):
        best = search.decode(log_probs)[0]
        return best.text, best.score

    return decode


def best_path_score(log_probs, labels):
    """Log-probability of the best CTC path of the labels, by dynamic programming over blanks and labels."""
    path = [BLANK] + [entry for label in labels for entry in (label, BLANK)]
    scores = np.full(len(path), -np.inf)
    scores[:2] = log_probs[0, path[:2]]
    for frame in log_probs[1:]:
        entered = np.concatenate([[-np.inf], scores[:-1]])
        skipped = np.concatenate([[-np.inf, -np.inf], scores[:-2]])
        allowed = [i > 1 and path[i] != BLANK and path[i] != path[i - 2] for i in range(len(path))]
        scores = np.maximum(np.maximum(scores, entered), np.where(allowed, skipped, -np.inf)) + frame[path]
    return max(scores[-2:])


def test_the_best_path_agrees_with_an_ngram_decoder(graph, arpa, lexicon, sentences):
    """On noisy sentences; where the two differ, the graph's hypothesis is the better one by the graph's rules."""
    grams = tlg.read_arpa(arpa)
    words_of = {pronunciation: word for word, (pronunciation,) in lexicon.items()}
    decode, other = decoder(graph, n_best=1, beam_size=500).decode, lexicon_decoder(arpa, lexicon)
    texts = sentences[1][:N_SENTENCES]
    greedy_errors, reasons = 0, []
    for i, text in enumerate(texts):
        log_probs = emissions(spoken(lexicon, text), noise=1.8, peak=6.0, seed=i)
        spelled = " ".join(map(str, greedy_collapse(log_probs.argmax(1).tolist()))).split(f" {SILENCE}")
        greedy = [words_of.get(tuple(map(int, word.split())), "?") for word in spelled if word]
        greedy_errors += Levenshtein.distance(greedy, text.split())

        (ours,), (theirs, their_score) = decode(log_probs), other(log_probs)
        by_rule = {  # the acoustic score that the graph's rules give, the n-gram's own probability
            said: (best_path_score(log_probs, spoken(lexicon, said)), tlg.sentence_log_prob(grams, said))
            for said in (ours.text, theirs)
        }
        assert ours.acoustic_score == pytest.approx(by_rule[ours.text][0], abs=0.01)
        assert ours.lm_score >= by_rule[ours.text][1] - 0.05  # a path through back-off arcs may cost less, never more
        if ours.text != theirs:
            assert ours.score >= sum(by_rule[theirs]) - 0.05, (ours, theirs)
            if their_score > sum(by_rule[theirs]) + 0.05:
                reasons.append("theirs has a silence more than the graph allows")
            elif ours.lm_score > by_rule[ours.text][1] + 0.05:
                reasons.append("ours goes through back-off arcs")
            else:
                reasons.append("theirs lost ours to its beam")
    print(f"{len(texts) - len(reasons)} of {len(texts)} agree; {sorted(reasons)}")
    assert len(texts) >= 100
    assert greedy_errors >= 0.2 * sum(len(text.split()) for text in texts)
    assert len(reasons) <= 0.05 * len(texts), reasons
