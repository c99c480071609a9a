"""text_rules.py: one rule for references, hypotheses and the language model's text."""

import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from text_rules import normalize

normalize("1")  # loads inflect, which takes seconds, outside any test's deadline

NORMAL = re.compile(r"(?:[a-z]+(?:'[a-z]+)*(?: [a-z]+(?:'[a-z]+)*)*)?")
anything = st.text(st.characters(exclude_categories=[]), max_size=30)  # lone surrogates too
likely = st.text(st.sampled_from("abIiSsTtHhRrDdNn01239,.:'’-–&%$€ \t\néßİŉ½²٣\u00ad\u0301\u2028"), max_size=20)

letters = st.text("abcdefghijklmnopqrstuvwxyz", min_size=1, max_size=5)
words = st.lists(letters, min_size=1, max_size=3).map("'".join)


@given(anything | likely)
def test_the_result_is_lower_case_words_one_space_apart_and_its_own_normal_form(text):
    once = normalize(text)
    assert NORMAL.fullmatch(once)
    assert normalize(once) == once


@given(st.lists(words, min_size=1, max_size=4))
def test_normal_text_is_left_as_it_is_and_case_and_spaces_make_no_difference(words):
    text = " ".join(words)
    assert normalize(text) == normalize(text.upper()) == normalize(f"\t{'  '.join(words)}\r\n") == text


@given(st.integers(0, 10**30 - 1))
def test_a_number_is_read_the_same_with_and_without_commas_unless_it_is_a_year(number):
    words = normalize(f"{number:,}")
    assert words and NORMAL.fullmatch(words)
    if not 1100 <= number <= 1999:
        assert normalize(str(number)) == words


@given(st.integers(10, 10**6), st.integers(10**3, 10**6))
def test_numbers_in_a_list_without_spaces_stay_numbers_of_their_own(first, second):
    assert normalize(f"{first},{second}") == f"{normalize(str(first))} {normalize(str(second))}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Don’t worry—it’s only 21 degrees.", "don't worry it's only twenty one degrees"),  # the docstrings' own
        ("'Tis the boys’", "tis the boys"),
        ("well-known", "well known"),
        ("3rd", "third"),
        ("1999", "nineteen ninety nine"),
        ("$2.50", "two point five zero dollars"),
        ("$5 million", "five million dollars"),
        ("10:30", "ten thirty"),
        ("1980s", "nineteen eighties"),
        ("café", "cafe"),
        ("U.S. p.m.", "us pm"),
    ],
)
def test_the_examples_of_the_documentation(text, words):
    assert normalize(text) == words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ""),
        (" \t\r\n\u2028", ""),
        ("?!... -- '' \ufeff\x00", ""),
        ("HELLO", "hello"),
        ("\ufeffhello", "hello"),
        ("a  b\tc\u00a0d\r\ne", "a b c d e"),
    ],
)
def test_case_and_spaces(text, words):
    assert normalize(text) == words


@pytest.mark.parametrize("mark", list("’‘‛ʼʹ′`´＇'"), ids=lambda mark: f"U+{ord(mark):04X}")
def test_any_apostrophe_stays_between_letters_only(mark):
    text = f"{mark}I don{mark}t know the dogs{mark} names{mark} 90{mark}s rock {mark}n{mark} roll o{mark}{mark}neill"
    assert normalize(text) == "i don't know the dogs names nineties rock n roll o neill"


@pytest.mark.parametrize("mark", list("-‐‑‒–—−_/…|·*#"), ids=lambda mark: f"U+{ord(mark):04X}")
def test_hyphens_dashes_and_other_signs_part_words(mark):
    assert normalize(f"well{mark}known {mark} x{mark}") == "well known x"


def test_a_soft_hyphen_is_no_hyphen():
    assert normalize("soft\u00adware") == "software"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Naïve CAFÉ cafe\u0301 Ångström", "naive cafe cafe angstrom"),
        ("Łódź Straße STRAẞE Æsop œuvre Øre İstanbul ırmak", "lodz strasse strasse aesop oeuvre ore istanbul irmak"),
        ("ﬁne ﬂow Ｈｉ Ⅷ", "fine flow hi viii"),
        ("привет 你好 ok", "ok"),
    ],
)
def test_accents_are_dropped_and_other_alphabets_part_words(text, words):
    assert normalize(text) == words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("U.S.A. today", "usa today"),
        ("J.R.R. Tolkien's i.e. e.g.", "jrr tolkien's ie eg"),
        ("I am.You are", "i am you are"),
        ("the end. A new one", "the end a new one"),
        ("joe.doe@mail.example.com", "joe doe at mail example com"),
        ("AT&T 50 % C++ x=y", "at and t fifty percent c plus plus x equals y"),
    ],
)
def test_abbreviations_and_signs(text, words):
    assert normalize(text) == words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0", "zero"),
        ("007", "zero zero seven"),  # a code
        ("0.5", "zero point five"),
        ("1.2.3.4", "one point two three point four"),
        ("5-6", "five six"),
        ("5kg", "five kg"),
        ("1,000,000", "one million"),
        ("2234,567", "two thousand two hundred thirty four five hundred sixty seven"),
        ("1100 1205 1999", "eleven hundred twelve oh five nineteen ninety nine"),
        ("1099 2000 2023", "one thousand ninety nine two thousand two thousand twenty three"),
        ("1,999", "one thousand nine hundred ninety nine"),
        ("1999.5", "one thousand nine hundred ninety nine point five"),
        ("٣ １２ x²", "three twelve x two"),
        ("1st 22nd 100,000th 0th", "first twenty second one hundred thousandth zeroth"),
        ("90s 1990's 1900s 2000s 5s", "nineties nineteen nineties nineteen hundreds two thousands five s"),
        ("$1 £1,000 € 2 ＄1.00", "one dollar one thousand pounds two euros one point zero zero dollars"),
        ("$1 million $2.5 billion", "one million dollars two point five billion dollars"),
        ("12:00 12:05 3:00pm 12:60", "twelve o'clock twelve oh five three o'clock pm twelve sixty"),
        ("123:45 1:2", "one hundred twenty three forty five one two"),
    ],
)  # fmt: skip
def test_numbers_are_read_out(text, words):
    assert normalize(text) == words


@pytest.mark.parametrize("digits", [31, 37, 5000])
@pytest.mark.parametrize(
    ("form", "last"), [("{}", "nine"), ("{}th", "ninth"), ("{}.9", "nine"), ("${}", "dollars"), ("9{}:00", "zero")]
)
def test_numbers_beyond_all_names_are_read_digit_by_digit(digits, form, last):
    words = normalize(form.format("9" * digits)).split()
    assert words.count("nine") >= digits - 1 and words[-1] == last


def test_one_function_serves_references_hypotheses_text_and_lexicon():
    """Field case 45: no module has rules of its own, and every one that needs them imports these."""
    root = Path(sys.modules["text_rules"].__file__).parent
    users = set()
    for path in root.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        if re.search(r"\bnormalize\(", text) and path.name != "text_rules.py":
            users.add(path.stem)
            assert "from text_rules import normalize" in text, path
    assert {"build_lm", "lexicon", "evaluate_model"} <= users


def test_decimals_of_four_characters_are_no_years():
    assert normalize("it is 18.7 degrees") == "it is eighteen point seven degrees"
    assert normalize("12.5% of 1.99") == "twelve point five percent of one point nine nine"
