"""lexicon.py: dictionary files, homophones, and the nearest words; small files, never all of CMUdict."""

import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lexicon as lexicon_module
from evaluate_model_helpers import PHONEMES, SILENCE, edit_distance, text_to_phonemes
from lexicon import DictionaryError, Lexicon, NearestWords, load_lexicon, read_dictionary
from text_rules import normalize

normalize("1")  # loads inflect, which takes seconds, outside any test's deadline

WORDS = Path(__file__).parent / "words.dict"


def classes(text):
    return tuple(text_to_phonemes(text))


@pytest.fixture
def write(tmp_path):
    """write(content, name): a file of these characters or bytes."""

    def write(content, name="words.dict"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def test_a_file_has_comments_numbered_pronunciations_and_stress_digits(write):
    path = write(
        ";;; a comment\n"
        "# another\n"
        "Hello  HH AH0 L OW1  # and one more\n"
        "\n"
        "hello(2)\tHH EH0 L OW1\n"
        "HELLO  HH AH L OW\n"
        "it's(12) IH2 T S\n"
    )
    assert read_dictionary(path) == {
        "hello": [classes("HH AH L OW"), classes("HH EH L OW"), classes("HH AH L OW")],
        "it's": [classes("IH T S")],
    }
    assert load_lexicon(path)["hello"] == (classes("HH AH L OW"), classes("HH EH L OW"))


@pytest.mark.parametrize(
    "content",
    [
        b"a AH\r\nb B IY\r\n",
        b"\xef\xbb\xbfa AH\nb B IY",
        b"a AH\rb B IY\r",
        b"a AH # \xe9t\xe9 \x85 x\nb B IY",  # an older CMUdict's encoding
        "a AH # x\u2028y\nb B IY\n".encode(),
    ],
)
def test_line_ends_byte_order_marks_and_older_encodings(write, content):
    assert read_dictionary(write(content)) == {"a": [classes("AH")], "b": [classes("B IY")]}


def test_an_accented_word_is_the_same_in_every_encoding(write):
    for encoding in ("utf-8", "latin-1"):
        assert list(load_lexicon(write("Déjà  D EY2 ZH AA1\n".encode(encoding)))) == ["deja"]


def test_extra_words_add_words_and_pronunciations(write):
    extra = write("casey  K EY1 S IY0\nhello  HH AA1 L OW0\nno  N OW\n")
    lexicon = load_lexicon(WORDS, extra)
    assert lexicon["casey"] == (classes("K EY S IY"),)
    assert lexicon["hello"] == (classes("HH AH L OW"), classes("HH EH L OW"), classes("HH AA L OW"))
    assert lexicon["no"] == (classes("N OW"),)
    assert len(lexicon) == len(load_lexicon(WORDS)) + 1


def test_extra_words_that_can_never_come_are_told(write, caplog):
    with caplog.at_level(logging.WARNING):
        lexicon = load_lexicon(WORDS, write("t-shirt  T IY SH ER T\n?  K\nmoo  M UW\n"))
    assert "moo" in lexicon and lexicon.left_out == ["t-shirt", "?"]
    assert "words.dict: 2 entries are not one word of letters a to z, and left out: t-shirt, ?" in caplog.text


def test_extra_words_stand_beside_the_words_of_cmudict(write, monkeypatch, caplog):
    monkeypatch.setattr(lexicon_module, "cmudict_entries", lambda: {"ok": [classes("OW K EY")], "a-b": [classes("B")]})
    assert list(load_lexicon(extra=write("ah AA\n"))) == ["ah", "ok"]
    assert not caplog.text


def test_all_errors_of_both_files_are_told_with_their_lines(write):
    first = write("a AH\nb BEE\nc\nhello hh ah l ow\nd(2) D SIL\nnew york N UW\n", "first.dict")
    with pytest.raises(DictionaryError) as error:
        load_lexicon(first, write("x |\n\ny\n", "second.dict"))
    for line in (
        f"{first}: cannot be used as a dictionary:",
        "line 2: 'BEE' of 'b' is none of the 39 phonemes",
        "line 3: no phonemes after 'c'",
        "line 4: 'hh' of 'hello'",
        "line 5: 'SIL' of 'd(2)'",
        "line 6: 'york' of 'new'",
        "second.dict: cannot be used as a dictionary:\nline 1: '|' of 'x'",
        "line 3: no phonemes after 'y'",
    ):
        assert line in str(error.value)


def test_of_many_errors_ten_are_told_and_the_others_counted(write):
    with pytest.raises(DictionaryError, match=r"line 10: no phonemes after 'w9'\nand 990 more$"):
        read_dictionary(write("".join(f"w{i}\n" for i in range(1000))))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no word"),
        (";;; nothing\n# at all\n\n", "holds no word"),
        ("a AH\nb B\n".encode("utf-16"), "line 1: .* none of the 39 phonemes"),
        (bytes(range(256)), "line 1: "),
        ("?  K\nt-shirt  T\n", r"no entry is a word of letters a to z, as \?, t-shirt"),
    ],
)
def test_a_file_without_a_word_is_refused(write, content, message):
    with pytest.raises(DictionaryError, match=rf"words\.dict: (cannot be used as a dictionary:\n)?{message}"):
        load_lexicon(write(content))


def test_a_missing_file_and_a_directory_are_named(tmp_path):
    with pytest.raises(DictionaryError) as error:
        load_lexicon(tmp_path / "none.dict", tmp_path)
    assert "none.dict: cannot read the dictionary: No such file" in str(error.value)
    assert f"{tmp_path}: cannot read the dictionary: Is a directory" in str(error.value)


def test_every_word_is_its_own_normal_form():
    entries = {
        "I’m": ["m"],
        "i'm": ["n", "m"],
        "'cause": ["k"],
        "10th": ["t"],
        "ice-cream": ["s"],
        "?": ["x"],
        "É": ["e"],
    }
    lexicon = Lexicon({word: [tuple(map(ord, each)) for each in sounds] for word, sounds in entries.items()})
    assert dict(lexicon) == {
        "cause": ((ord("k"),),),
        "e": ((ord("e"),),),
        "i'm": ((ord("n"),), (ord("m"),)),  # as it stands in its own normal form comes first
        "tenth": ((ord("t"),),),
    }
    assert all(normalize(word) == word for word in lexicon)
    assert "ice-cream" not in lexicon and "I’m" not in lexicon


@given(st.lists(st.text(max_size=6), max_size=5))
def test_no_entry_makes_a_word_that_text_cannot_have(entries):
    lexicon = Lexicon({entry: [(1,)] for entry in entries})
    assert all(normalize(word) == word and len(word.split()) == 1 for word in lexicon)
    assert all((normalize(entry) in lexicon) != (entry in lexicon.left_out) for entry in entries)


def test_homophones_share_a_pronunciation():
    by = load_lexicon(WORDS).by_pronunciation()
    assert by[classes("T UW")] == ["to", "too", "two"]
    assert by[classes("EY")] == ["a"]


# ---- the nearest words

pronunciations = st.lists(st.integers(1, 4), min_size=1, max_size=6).map(tuple)


@given(
    st.dictionaries(
        st.text("abc", min_size=1, max_size=3), st.lists(pronunciations, min_size=1, max_size=3), min_size=1, max_size=9
    ),
    st.lists(st.sampled_from([1, 2, 3, 4, 5, SILENCE]), max_size=12),
)
def test_each_stretch_becomes_the_word_with_the_fewest_edits_then_letters_then_by_the_alphabet(entries, ids):
    lexicon = Lexicon(entries)
    stretches, stretch = [], []
    for index in [*ids, SILENCE]:
        if index == SILENCE:
            stretches += [stretch] if stretch else []
            stretch = []
        else:
            stretch.append(index)
    expected = [
        min((edit_distance(each, stretch), len(word), word) for word in lexicon for each in lexicon[word])[-1]
        for stretch in stretches
    ]
    assert NearestWords(lexicon).sentence(ids) == " ".join(expected)


def test_a_sentence_of_the_lexicon_alone():
    nearest = NearestWords(load_lexicon(WORDS))
    assert nearest.sentence(text_to_phonemes("Y UW | K AE N | S IY |")) == "you can sea"
    assert nearest.sentence(np.array(text_to_phonemes("| | B IY | W AO T | N OW"))) == "b water no"
    assert nearest.sentence([]) == nearest.sentence([SILENCE, SILENCE]) == ""
    assert nearest.sentence([PHONEMES.index("ZH")] * 300) in load_lexicon(WORDS)
