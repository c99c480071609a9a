"""ngram.py: probabilities that sum to one, Kneser-Ney by hand, and the ARPA file as KenLM reads it."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ngram
from ngram import BEGIN, END, HIGHEST_ORDER, UNKNOWN, UNKNOWN_LOG10, train_ngram

TEXT = ["a b", "a b", "a c"]
word = st.sampled_from("abcd")
small_text = st.lists(st.lists(word, min_size=1, max_size=5).map(" ".join), min_size=1, max_size=6)


def total(model, history):
    return math.fsum(model.probability(word, history) for word in [*model.vocabulary, END])


@given(
    small_text,
    st.integers(1, HIGHEST_ORDER),
    st.lists(st.sampled_from(["a", "b", "e", BEGIN, END, UNKNOWN, "zebra"]), max_size=6).map(tuple),
    st.none() | st.dictionaries(st.sampled_from("abe"), st.sampled_from([0.0, 1e-300, 0.1, 7, 1e308])),
    st.sampled_from([0.0, 0.6, 0.999]),
)
def test_after_any_history_the_probabilities_are_positive_and_sum_to_one(text, order, history, frequencies, weight):
    model = train_ngram(text, order, ["e", "f"], frequencies, weight)
    histories = {ngram[:-1] for ngrams in model.probabilities for ngram in ngrams} | {history}
    assert all(model.probability(word, history) > 0 for word in [*model.vocabulary, END])
    assert all(total(model, each) == pytest.approx(1, abs=1e-12) for each in histories)
    assert model.probability("zebra", history) == model.probability(BEGIN, history) == 0


def test_unigrams_by_hand():
    """Counts a 3, b 2, c 1, </s> 3: once 1, twice 1, thrice 2, four times 0 (taken as 1).

    base = 1 / (1 + 2); D1 = 1 - 2/3 = 1/3; D2 = 2 - 3/3 · 2 = 0, at least 0.05; D3 = 3 - 4/3 · 1/2 = 7/3.
    """
    model = train_ngram(TEXT, 1, ["d"])
    spare = (1 / 3 + 0.05 + 2 * 7 / 3) / 9
    rest = [1 / (1 + 4e-6 * rank) for rank in range(5)]  # a, b, c, d, </s>
    expected = {
        "a": (3 - 7 / 3) / 9 + spare * rest[0] / sum(rest),
        "b": (2 - 0.05) / 9 + spare * rest[1] / sum(rest),
        "c": (1 - 1 / 3) / 9 + spare * rest[2] / sum(rest),
        "d": spare * rest[3] / sum(rest),
        END: (3 - 7 / 3) / 9 + spare * rest[4] / sum(rest),
    }
    assert {word: model.probability(word) for word in expected} == pytest.approx(expected)
    assert model.probability("a", ("b", "c")) == model.probability("a")


def test_bigrams_by_hand():
    """Bigrams <s> a 3, a b 2, b </s> 2, a c 1, c </s> 1: once 2, twice 2, thrice 1, four times 0 (taken as 1).

    base = 2 / (2 + 4) = 1/3; D1 = 1 - 2/3 · 2/2 = 1/3; D2 = 2 - 1 · 1/2 = 3/2; D3 = 3 - 4/3 · 1 = 5/3.
    Below, a word counts by the different words before it: a 1, b 1, c 1, </s> 2: once 3, twice 1, no more.
    base = 3 / (3 + 2) = 3/5; D1 = 1 - 6/5 · 1/3 = 3/5; D2 = 2 - 9/5 · 1 = 1/5.
    """
    model = train_ngram(TEXT, 2)
    rest = [1 / (1 + 4e-6 * rank) for rank in range(4)]  # a, b, c, </s>
    spare = (3 * 3 / 5 + 1 / 5) / 5
    unigram = {word: (2 / 5) / 5 + spare * rest[i] / sum(rest) for i, word in enumerate("abc")}
    unigram[END] = (9 / 5) / 5 + spare * rest[3] / sum(rest)
    assert {word: model.probability(word) for word in unigram} == pytest.approx(unigram)

    spare_of_a = (3 / 2 + 1 / 3) / 3
    assert model.probability("b", ("a",)) == pytest.approx((2 - 3 / 2) / 3 + spare_of_a * unigram["b"])
    assert model.probability("c", ("a",)) == pytest.approx((1 - 1 / 3) / 3 + spare_of_a * unigram["c"])
    assert model.probability(END, ("a",)) == pytest.approx(spare_of_a * unigram[END])
    assert model.probability("a", (BEGIN,)) == pytest.approx((3 - 5 / 3) / 3 + (5 / 3) / 3 * unigram["a"])
    assert model.probability("c", ("b",)) == pytest.approx((3 / 2) / 2 * unigram["c"])
    assert model.probability("c", (END,)) == pytest.approx(unigram["c"])


def test_a_word_after_many_others_is_likelier_below_than_a_word_that_is_only_frequent():
    text = ["san francisco"] * 6 + ["my glasses", "new glasses", "old glasses"]
    model = train_ngram(text, 2)
    assert model.probability("glasses") > model.probability("francisco")
    assert train_ngram(text, 1).probability("glasses") < train_ngram(text, 1).probability("francisco")


def test_a_higher_order_sees_further():
    text = ["a b c", "a b c", "d b a", "d b a"]
    second, third = train_ngram(text, 2), train_ngram(text, 3)
    assert second.probability("c", ("a", "b")) == second.probability("c", ("d", "b"))
    assert third.probability("c", ("a", "b")) > third.probability("c", ("d", "b"))
    assert third.probability("c", (BEGIN, "a", "b")) == third.probability("c", ("a", "b"))


def test_frequencies_change_the_unigrams_by_their_weight():
    """1 word in 3 is the end of a sentence, and is in the frequencies' share too."""
    plain = train_ngram(TEXT, 2, ["d", "e"])
    mixed = train_ngram(TEXT, 2, ["d", "e"], {"d": 30, "a": 10, "zebra": 1e9}, 0.25)
    background = {"a": 2 / 3 * 0.25, "b": 0, "c": 0, "d": 2 / 3 * 0.75, "e": 0, END: 1 / 3}
    assert {word: mixed.probability(word) for word in background} == pytest.approx(
        {word: 0.75 * plain.probability(word) + 0.25 * share for word, share in background.items()}
    )
    assert "zebra" not in mixed.vocabulary
    for unused in ({}, {"zebra": 3}, {"a": 0}):
        assert train_ngram(TEXT, 2, ["d", "e"], unused, 0.25).probabilities == plain.probabilities
    assert train_ngram(TEXT, 2, ["d", "e"], {"d": 1}, 0.0).probabilities == plain.probabilities


def test_frequencies_too_large_to_add_count_as_others():
    huge, small = ({"a": 1e308 * n, "d": 1.5e308 * n, "c": 1e308 * n} for n in (1, 1e-300))
    huge, small = (train_ngram(TEXT, 1, ["d"], each) for each in (huge, small))
    assert huge.probabilities[0] == pytest.approx(small.probabilities[0])


def test_unseen_words_are_ranked_by_length_and_alphabet():
    model = train_ngram(TEXT, 2, ["too", "two", "to"])
    assert model.probability("to") > model.probability("too") > model.probability("two")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 2), "the text holds no word"),
        ((["", "  "], 2, ["a"]), "the text holds no word"),
        ((TEXT, 0), "the order must be from 1 to 6, not 0"),
        ((TEXT, 7), "the order must be from 1 to 6, not 7"),
        ((TEXT, 2, [], {"a": 1}, 1.0), "from 0 to below 1, not 1.0"),
        ((TEXT, 2, [], {"a": 1}, math.nan), "from 0 to below 1, not nan"),
        ((TEXT, 2, [], {"a": -1}), "the frequency of 'a' is -1: it must be 0 or more"),
        ((TEXT, 2, [], {"a": math.inf}), "the frequency of 'a' is inf"),
        ((["a <unk> </s>", "b"], 2), "</s>, <unk> among the words: the model sets them itself"),
        ((TEXT, 2, ["<s>", "d"]), "<s> among the words: the model sets them itself"),
        ((TEXT, 2, ["new york"]), "'new york' in the vocabulary is not one word"),
        ((TEXT, 2, [""]), "'' in the vocabulary is not one word"),
    ],
)
def test_what_makes_no_model_is_told(arguments, message):
    with pytest.raises(ValueError, match="no language model can be made") as error:
        train_ngram(*arguments)
    assert message in str(error.value)


def test_all_that_is_wrong_is_told_at_once():
    with pytest.raises(ValueError) as error:
        train_ngram(iter(()), -1, iter([BEGIN]), {"a": -2}, 3)
    assert len(str(error.value).splitlines()) == 6


# ---- the ARPA file


def kenlm_scores(path, words, sentences):
    """Logarithms to the base of 10 of each word and of the end of each sentence, by flashlight's KenLM."""
    kenlm = pytest.importorskip("flashlight.lib.text.decoder.kenlm")
    from flashlight.lib.text.dictionary import Dictionary

    dictionary = Dictionary([*words, UNKNOWN])
    model = kenlm.KenLM(str(path), dictionary)
    for sentence in sentences:
        state, scores = model.start(False), []
        for each in sentence.split():
            state, score = model.score(state, dictionary.get_index(each if dictionary.contains(each) else UNKNOWN))
            scores.append(score)
        yield [*scores, model.finish(state)[1]]


def expected_scores(model, sentence):
    history = (BEGIN,)
    for each in [*sentence.split(), END]:
        if each == END or each in model.vocabulary:
            yield math.log10(model.probability(each, history))
        else:
            suffixes = [history[-n:] for n in range(1, min(len(history), model.order - 1) + 1)]
            weights = [model.backoff[len(suffix) - 1].get(suffix, 1.0) for suffix in suffixes]
            yield UNKNOWN_LOG10 + math.log10(math.prod(weights))
        history += (each,)


@settings(max_examples=20, deadline=None)
@given(
    small_text,
    st.lists(st.lists(st.sampled_from(["a", "b", "c", "d", "e", "zebra"]), max_size=6).map(" ".join), min_size=1),
    st.sampled_from([1, 2, 5, HIGHEST_ORDER]),
)
def test_kenlm_reads_the_same_probabilities(tmp_path_factory, text, sentences, order):
    """Orders above any sentence's length too, and a 1-gram, for which KenLM wants bigrams: none."""
    path = tmp_path_factory.mktemp("arpa") / "lm.arpa"
    model = train_ngram(text, order, ["e"], {"e": 2, "a": 1})
    model.save(path)
    for sentence, scores in zip(sentences, kenlm_scores(path, sorted(model.vocabulary), sentences), strict=True):
        assert scores == pytest.approx(list(expected_scores(model, sentence)), abs=1e-4)


def test_the_file_states_its_counts_and_never_predicts_the_beginning():
    lines = train_ngram(["a b"], 2).to_arpa().splitlines()
    assert lines[:6] == ["\\data\\", "ngram 1=5", "ngram 2=3", "", "\\1-grams:", "-10.0\t<unk>"]
    assert lines[6].startswith("-99\t<s>\t-") and lines[-1] == "\\end\\"
    assert [line.split("\t")[1] for line in lines if "\t" in line][2:] == [END, "a", "b", "<s> a", "a b", "b </s>"]


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "lm.arpa"
    path.write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        ngram.train_ngram(TEXT, 2).save(path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
