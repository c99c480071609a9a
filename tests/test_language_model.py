"""Beam search over words: on emissions made by hand, with a small lexicon and n-grams of a few sentences."""

import itertools
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import language_model
from config import DecoderConfig
from evaluate_model_helpers import BLANK, PHONEMES, SILENCE
from language_model import DecoderPool, LanguageModelError, NgramDecoder
from lexicon import Lexicon, load_lexicon
from ngram import train_ngram

pytest.importorskip("flashlight.lib.text.decoder")

SENTENCES = [
    "i want water",
    "i see you",
    "you see the sea",
    "i need water",
    "i want to see you",
    "no i do",
    "i know you",
]
PLAIN = {"silence_score": 0, "blank_penalty": 0, "lm_weight": 1.0}


@pytest.fixture(scope="module")
def lexicon():
    return load_lexicon(os.path.join(os.path.dirname(__file__), "words.dict"))


@pytest.fixture(scope="module")
def arpa(tmp_path_factory, lexicon):
    path = tmp_path_factory.mktemp("lm") / "lm.arpa"
    train_ngram(SENTENCES, 3, lexicon).save(path)
    return path


@pytest.fixture(scope="module")
def decoder(lexicon, arpa):
    return NgramDecoder(lexicon, DecoderConfig(**PLAIN), arpa)


def emissions(*frames, certainty=0.99):
    """Log-probabilities (P, C): each frame a class, or a dict {class: probability}; the rest is spread evenly."""
    rows = []
    for frame in frames:
        chosen = frame if isinstance(frame, dict) else {frame: certainty}
        rest = (1 - sum(chosen.values())) / (len(PHONEMES) - len(chosen))
        rows.append([chosen.get(index, rest) for index in range(len(PHONEMES))])
    return np.log(np.array(rows, dtype=np.float32))


def spoken(lexicon, sentence, **options):
    """Emissions of a sentence: a frame a phoneme and silence, blanks between."""
    classes = [i for word in sentence.split() for i in (*lexicon[word][0], SILENCE)]
    return emissions(BLANK, *itertools.chain.from_iterable((i, BLANK) for i in classes), **options)


def texts(decoder, log_probs):
    return [hypothesis.text for hypothesis in decoder.decode(log_probs)]


def test_clear_emissions_give_the_sentence(decoder, lexicon):
    for sentence in [*SENTENCES[:2], "hello you", "cat can need a b"]:
        assert texts(decoder, spoken(lexicon, sentence))[0] == sentence


def test_the_language_model_chooses_between_homophones(decoder, lexicon):
    assert texts(decoder, spoken(lexicon, "you sea you"))[0] == "you see you"
    assert texts(decoder, spoken(lexicon, "i no you"))[0] == "i know you"
    alone = NgramDecoder(lexicon, DecoderConfig(**PLAIN))
    assert not alone.has_lm and alone.decode(spoken(lexicon, "i no you"))[0].lm_score == 0
    assert {"i know you", "i no you"} <= set(texts(alone, spoken(lexicon, "i know you")))


def test_the_language_model_mends_what_was_misheard(decoder, lexicon):
    # "i want water" with an AH in place of the AO of "water", which is no word
    heard = spoken(lexicon, "i want water")
    place = int(np.argmax(heard[:, PHONEMES.index("AO")]))
    heard[place] = emissions({PHONEMES.index("AH"): 0.9})[0]
    assert texts(decoder, heard)[0] == "i want water"


def test_scores_are_what_they_say(decoder, lexicon, arpa):
    config = DecoderConfig(
        lm_weight=0.7, word_score=0.4, silence_score=-0.3, blank_penalty=0.5, acoustic_scale=0.8, n_best=20
    )
    log_probs = spoken(lexicon, "i see you", certainty=0.6)
    model = train_ngram(SENTENCES, 3, lexicon)
    found = NgramDecoder(lexicon, config, arpa).decode(log_probs)
    assert len(found) > 3 and found == sorted(found, key=lambda each: -each.score)
    assert len({each.text for each in found}) == len(found)
    for each in found:
        words = each.text.split()
        history = ("<s>", *words, "</s>")
        natural = sum(math.log(model.probability(history[i], history[:i])) for i in range(1, len(history)))
        assert each.lm_score == pytest.approx(natural, abs=1e-4)
        silences = (each.score - 0.8 * each.acoustic_score - 0.7 * each.lm_score - 0.4 * len(words)) / -0.3
        assert silences == pytest.approx(round(silences), abs=1e-3)
        assert round(silences) >= len(words)  # one a word, and further ones between words
    log_probs[:, BLANK] -= 0.5
    best = log_probs.max(1).sum()  # the greedy path gives the best sentence here
    assert found[0].text == "i see you" and found[0].acoustic_score == pytest.approx(best, abs=1e-4)


@pytest.mark.parametrize(
    ("change", "effect"),
    [
        ({"lm_weight": 0.0}, lambda before, after: after.acoustic_score >= before.acoustic_score),
        ({"word_score": 6.0}, lambda before, after: len(after.text.split()) > len(before.text.split())),
        ({"word_score": -9.0}, lambda before, after: len(after.text.split()) < len(before.text.split())),
        ({"silence_score": -9.0}, lambda before, after: len(after.text.split()) < len(before.text.split())),
        ({"blank_penalty": 4.0}, lambda before, after: after.text != before.text),
        ({"acoustic_scale": 3.0}, lambda before, after: after.acoustic_score > before.acoustic_score),
        ({"beam_size": 1}, lambda before, after: after.score < before.score),
        ({"beam_threshold": 0.01}, lambda before, after: after.score < before.score),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_every_setting_does_what_it_says(decoder, lexicon, change, effect):
    rng = np.random.default_rng(3)
    log_probs = rng.gumbel(size=(60, len(PHONEMES))).astype(np.float32)
    log_probs -= np.log(np.exp(log_probs).sum(1, keepdims=True))
    before = decoder.decode(log_probs)[0]
    after = decoder.with_settings(DecoderConfig(**PLAIN | change)).decode(log_probs)[0]
    assert effect(before, after), (before, after)


def test_n_best_is_the_number_of_different_sentences(decoder, lexicon):
    log_probs = spoken(lexicon, "i see you", certainty=0.6)
    for n in (1, 3, 7):
        assert len(decoder.with_settings(DecoderConfig(n_best=n)).decode(log_probs)) == n


def test_other_token_orders_ruin_it(decoder, lexicon):
    """Field case 43: the order of the classes is the phoneme table's, and no other gives the words."""
    log_probs = spoken(lexicon, "i want to see you")
    assert texts(decoder, log_probs)[0] == "i want to see you"
    silence_second = [BLANK, SILENCE, *range(1, SILENCE)]  # as some decoders of the field have it
    assert texts(decoder, log_probs[:, silence_second])[0] != "i want to see you"


def test_skipping_certain_blanks_changes_nothing(decoder, lexicon):
    """Among them doubled phonemes, which only a blank keeps apart."""
    rng = np.random.default_rng(0)
    decoder = decoder.with_settings(DecoderConfig(**PLAIN | {"lm_weight": 0.2}))
    for sentence in ("i see you", "b b b", "a a you"):
        classes = [i for word in sentence.split() for i in (*lexicon[word][0], SILENCE)]
        frames = [BLANK] * 3
        for i in classes:
            frames += [{i: 0.7}, *[{BLANK: 0.9995}] * int(rng.integers(1, 6))]
        long = emissions(*frames)
        runs = [f for i, f in enumerate(frames) if not (i and f == frames[i - 1] == {BLANK: 0.9995})]
        (first, *_), (second, *_) = decoder.decode(long), decoder.decode(emissions(*runs))
        assert first.text == second.text == sentence
        n_skipped = len(frames) - len(runs)
        assert first.acoustic_score - second.acoustic_score == pytest.approx(n_skipped * math.log(0.9995), abs=1e-3)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 12), st.integers(0, 2**32 - 1))
def test_any_emissions_give_a_sentence_of_the_lexicon(frames, seed):
    small = Lexicon({"a": [(3,)], "be": [(7, 18)]})
    decoder = NgramDecoder(small, DecoderConfig())
    draw = np.random.default_rng(seed).dirichlet(np.full(len(PHONEMES), 0.2), size=frames)
    found = decoder.decode(np.log(draw + 1e-30))
    assert found and all(set(each.text.split()) <= set(small) and math.isfinite(each.score) for each in found)


# ---- frames as they come


def chunked(log_probs, borders):
    """In pieces that end at the borders, some of them empty."""
    return np.split(log_probs, sorted(min(border, len(log_probs)) for border in borders))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    n_frames=st.integers(0, 40),
    borders=st.lists(st.integers(0, 40), max_size=8),
    scale=st.sampled_from([0.7, 1.0]),
)
def test_a_trial_in_chunks_gives_the_hypotheses_of_the_whole(decoder, seed, n_frames, borders, scale):
    """Scores to the last bit, with runs of certain blanks across the borders."""
    rng = np.random.default_rng(seed)
    probabilities = rng.dirichlet(np.full(len(PHONEMES), 0.1), size=n_frames) + 1e-6
    certain = rng.random(n_frames) < 0.5
    probabilities[certain] = 1e-6
    probabilities[certain, BLANK] = rng.uniform(0.9992, 0.9999, certain.sum())
    log_probs = np.log(probabilities).astype(np.float32)
    decoder = decoder.with_settings(DecoderConfig(**PLAIN | {"blank_penalty": 0.3, "acoustic_scale": scale}))
    stream = decoder.stream()
    for chunk in chunked(log_probs, borders):
        stream.push(chunk)
    assert stream.finish() == decoder.decode(log_probs) and stream.text == stream.finish()[0].text


def test_words_appear_once_they_have_ended(decoder, lexicon):
    stream, seen = decoder.stream(), []
    assert stream.text == ""
    for frame in spoken(lexicon, "i want water"):
        stream.push(frame[None])
        seen.append(stream.text)
    assert list(dict.fromkeys(seen)) == ["", "i", "i want", "i want water"]
    assert [text for text in seen if text == "i want water"] and stream.finish()[0].text == "i want water"


def test_streams_do_not_disturb_each_other_and_end_once(decoder, lexicon):
    first, second = decoder.stream(), decoder.stream()
    for one, two in zip(spoken(lexicon, "i see you"), spoken(lexicon, "no i do"), strict=False):
        first.push(one[None])
        second.push(two[None])
        decoder.decode(spoken(lexicon, "hello you"))
    assert first.finish()[0].text == "i see you"
    with pytest.raises(LanguageModelError, match="ended"):
        first.push(spoken(lexicon, "i"))


def test_refused_frames_leave_a_stream_as_it_was(decoder, lexicon):
    stream, log_probs = decoder.stream(), spoken(lexicon, "i see you")
    stream.push(log_probs[:5])
    with pytest.raises(LanguageModelError, match="NaN"):
        stream.push(np.full((3, len(PHONEMES)), np.nan))
    stream.push(log_probs[5:])
    assert stream.finish() == decoder.decode(log_probs)


def test_no_frames_and_only_blanks_give_an_empty_sentence(decoder):
    assert texts(decoder, np.empty((0, len(PHONEMES)))) == [""]
    assert texts(decoder, emissions(*[BLANK] * 8, certainty=0.9999))[0] == ""
    assert decoder.likeliest_word == "i"


@pytest.mark.parametrize("wrong", [np.zeros((5, 40)), np.zeros(41), np.full((3, 41), np.nan)])
def test_emissions_that_are_none_are_refused(decoder, wrong):
    with pytest.raises(LanguageModelError, match="emissions"):
        decoder.decode(wrong)


def test_seven_homophones_lose_the_least_likely():
    names = ["aa", "bb", "cc", "dd", "ee", "ff", "gg"]
    sevenfold = Lexicon({name: [(16, 6)] for name in names} | {"ff": [(16, 6), (1, 2)]})
    decoder = NgramDecoder(sevenfold, DecoderConfig(n_best=20))
    assert decoder.lost == ["gg"]  # as likely as all without a language model, and the last by the alphabet
    assert {"aa", "bb", "cc", "dd", "ee", "ff"} <= set(texts(decoder, emissions(16, 6, SILENCE)))
    assert texts(decoder, emissions(1, 2, SILENCE))[0] == "ff"


def test_what_is_lost_is_the_least_likely_by_the_language_model(tmp_path):
    names = ["aa", "bb", "cc", "dd", "ee", "ff", "gg"]
    train_ngram(["bb cc dd", "ee ff gg", "bb ee cc ff dd gg"], 2, names).save(tmp_path / "lm.arpa")
    decoder = NgramDecoder(Lexicon({name: [(16, 6)] for name in names}), DecoderConfig(), tmp_path / "lm.arpa")
    assert decoder.lost == ["aa"]


def test_perplexity_is_that_of_the_model(decoder, lexicon):
    model = train_ngram(SENTENCES, 3, lexicon)
    sentence = ("<s>", "you", "want", "water", "</s>")
    logs = [math.log(model.probability(sentence[i], sentence[:i])) for i in range(1, 5)]
    perplexity, outside = decoder.perplexity(["you want water"])
    assert perplexity == pytest.approx(math.exp(-sum(logs) / 4), rel=1e-4) and outside == 0
    assert decoder.perplexity(["you want aardvarks"])[1] == pytest.approx(1 / 3)
    with pytest.raises(LanguageModelError, match="sentences"):
        decoder.perplexity([])


def test_torchaudio_finds_the_same_sentences(lexicon, arpa, tmp_path):
    """Its ctc_decoder is the field's common way to flashlight: same lexicon, same n-gram, same settings."""
    torch = pytest.importorskip("torch")
    ctc_decoder = pytest.importorskip("torchaudio.models.decoder").ctc_decoder
    lines = [
        f"{word} {' '.join(PHONEMES[i] for i in (*pronunciation, SILENCE))}\n"
        for word in lexicon
        for pronunciation in lexicon[word]
    ]
    (tmp_path / "lexicon.txt").write_text("".join(lines) + "<unk> ZH ZH ZH\n")
    theirs = ctc_decoder(
        lexicon=str(tmp_path / "lexicon.txt"),
        tokens=list(PHONEMES),
        lm=str(arpa),
        beam_size=200,
        beam_threshold=100,
        lm_weight=math.log(10),
        blank_token=PHONEMES[BLANK],
        sil_token=PHONEMES[SILENCE],
    )
    ours = NgramDecoder(lexicon, DecoderConfig(**PLAIN, beam_size=200, beam_threshold=100), arpa)
    rng = np.random.default_rng(1)
    for _ in range(20):
        sentence = " ".join(rng.choice(sorted(lexicon), size=rng.integers(1, 5)))
        log_probs = spoken(lexicon, sentence, certainty=0.5) + rng.normal(size=(1, len(PHONEMES))) * 0.5
        log_probs = np.ascontiguousarray(log_probs, dtype=np.float32)
        (best,) = theirs(torch.from_numpy(log_probs)[None])[0]
        found = ours.decode(log_probs)[0]
        assert found.score == pytest.approx(best.score, abs=1e-3)
        assert found.text == " ".join(best.words)


# ---- several processes ----


def noisy_sentences(lexicon, n):
    rng = np.random.default_rng(5)
    sentences = [" ".join(rng.choice(sorted(lexicon), size=rng.integers(1, 6))) for _ in range(n)]
    return [spoken(lexicon, sentence, certainty=0.4) for sentence in sentences]


def test_several_processes_give_what_one_gives(decoder, lexicon):
    trials = noisy_sentences(lexicon, 12)
    other = DecoderConfig(lm_weight=0.2)
    with DecoderPool(decoder, 2) as pool:
        assert list(pool.decode(trials)) == [decoder.decode(each) for each in trials]
        assert list(pool.decode(trials, other)) == [decoder.with_settings(other).decode(each) for each in trials]
        pool.settings = other
        assert list(pool.decode(trials)) == [decoder.with_settings(other).decode(each) for each in trials]


def test_an_error_in_a_process_is_the_callers(decoder):
    with DecoderPool(decoder, 2) as pool, pytest.raises(LanguageModelError, match="NaN"):
        list(pool.decode([np.full((3, 41), np.nan)]))


def test_a_killed_process_is_said(decoder, lexicon):
    with DecoderPool(decoder, 2) as pool:
        for process in list(pool._executor._processes.values()):
            os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(LanguageModelError, match="--decoder_processes 1"):
            list(pool.decode(noisy_sentences(lexicon, 2)))


def test_no_process_outlives_the_one_that_was_killed(tmp_path):
    script = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from config import DecoderConfig; from language_model import DecoderPool, NgramDecoder\n"
        "from lexicon import Lexicon\n"
        "pool = DecoderPool(NgramDecoder(Lexicon({'a': [(3,)]}), DecoderConfig()), 2)\n"
        "print(*pool._executor._processes, flush=True); time.sleep(60)\n"
    )
    root = os.path.dirname(language_model.__file__)
    process = subprocess.Popen([sys.executable, "-c", script, root], stdout=subprocess.PIPE, text=True)
    workers = [int(number) for number in process.stdout.readline().split()]
    assert len(workers) == 2
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 10
    while any(_alive(number) for number in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _alive(number: int) -> bool:
    try:
        with open(f"/proc/{number}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


# ---- what cannot be used ----


def test_files_that_are_no_language_model_are_named(tmp_path, lexicon):
    (tmp_path / "text").write_text("i see you\n")
    (tmp_path / "empty").write_text("")
    for name in ("text", "empty", "none", "."):
        with pytest.raises(LanguageModelError, match=str(tmp_path / name)):
            NgramDecoder(lexicon, DecoderConfig(), tmp_path / name)


def test_a_model_of_capital_letters_knows_no_word(tmp_path, lexicon):
    """Field case 45."""
    path = tmp_path / "capitals.arpa"
    train_ngram([sentence.upper() for sentence in SENTENCES], 2).save(path)
    with pytest.raises(LanguageModelError, match=r"capitals.arpa: knows none of the \d+ words.*lower case"):
        NgramDecoder(lexicon, DecoderConfig(), path)


def test_missing_packages_are_said_with_what_installs_them(monkeypatch, lexicon, arpa):
    monkeypatch.setitem(sys.modules, "flashlight.lib.text.decoder.kenlm", None)
    assert not language_model.kenlm_available()
    with pytest.raises(LanguageModelError, match=r"pip install .*CMake"):
        NgramDecoder(lexicon, DecoderConfig(), arpa)
    assert texts(NgramDecoder(lexicon, DecoderConfig(**PLAIN)), spoken(lexicon, "hello you"))[0] == "hello you"
    monkeypatch.setitem(sys.modules, "flashlight.lib.text.decoder", None)
    with pytest.raises(LanguageModelError, match=r"pip install flashlight-text.*--lm none"):
        NgramDecoder(lexicon, DecoderConfig())
