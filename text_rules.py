"""How a sentence is written for the language model and for word errors: one rule for references, hypotheses and text.

    normalize("Don’t worry—it’s only 21 degrees.") == "don't worry it's only twenty one degrees"

Lower-case words of a to z and apostrophes within, one space between two. Without one rule for all three, a
language model does not know the words that it is asked for, and an error rate counts spelling.
"""

import functools
import re
import unicodedata

_APOSTROPHES = dict.fromkeys(map(ord, "’‘‛ʼʹ`´＇"), "'")
# Letters that Unicode does not take apart into a base letter and an accent.
_LETTERS = str.maketrans({"ß": "ss", "æ": "ae", "œ": "oe", "ø": "o", "ł": "l", "đ": "d", "ð": "d", "þ": "th", "ı": "i"})
_SIGNS = {"&": " and ", "%": " percent ", "+": " plus ", "=": " equals ", "@": " at "}
_CURRENCIES = {"$": ("dollar", "dollars"), "€": ("euro", "euros"), "£": ("pound", "pounds")}
_NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
_ALREADY_NORMAL = re.compile(r"[a-z]+(?:'[a-z]+)*(?: [a-z]+(?:'[a-z]+)*)*")


def normalize(text: str) -> str:
    """The words of a text as they are spoken: lower case, a to z and apostrophes, one space between two.

    - any apostrophe or single quote becomes ' and stays between two letters only: "'Tis the boys’" -> "tis the boys"
    - hyphens and dashes part words: "well-known" -> "well known"
    - numbers are read out: "3rd" -> "third", "1999" -> "nineteen ninety nine", "$2.50" -> "two point five zero
      dollars"; four digits from 1100 to 1999 without a comma are read as a year
    - accents are dropped ("café" -> "cafe"), & + % = @ are read out, anything else parts words; but dots within
      an abbreviation go: "U.S." -> "us", "p.m." -> "pm"

    The result is its own normal form.
    """
    if _ALREADY_NORMAL.fullmatch(text):  # nearly every word of a dictionary
        return text
    text = unicodedata.normalize("NFKD", text.translate(_APOSTROPHES)).translate(_APOSTROPHES).lower()
    text = "".join(letter for letter in text if not unicodedata.combining(letter)).translate(_LETTERS)
    text = re.sub(rf"([$€£])\s?({_NUMBER})", _amount, text)
    text = re.sub(r"(\d+(?:,\d{3})*)(st|nd|rd|th)\b", lambda match: _ordinal(match[1]), text)
    text = re.sub(r"(\d{1,2}):(\d{2})\b", _clock, text)
    text = re.sub(_NUMBER, lambda match: f" {_cardinal(match[0])} ", text)
    text = re.sub(r"\b[a-z](?:\.[a-z])+\b\.?", lambda match: match[0].replace(".", ""), text)
    text = "".join(_SIGNS.get(letter, letter) for letter in text)
    text = re.sub(r"[^a-z']+", " ", text)
    return " ".join(re.sub(r"(?<![a-z])'+|'+(?![a-z])", " ", text).split())


@functools.cache
def _engine():
    import inflect  # here: it takes seconds, and most text has its numbers in words

    return inflect.engine()


@functools.lru_cache(10_000)
def _cardinal(number: str) -> str:
    digits = number.replace(",", "")
    if "," not in number and len(digits) == 4 and "1100" <= digits <= "1999":
        century, rest = int(digits[:2]), int(digits[2:])
        end = "hundred" if rest == 0 else f"oh {_read(str(rest))}" if rest < 10 else _read(str(rest))
        return f"{_read(str(century))} {end}"
    if len(digits.split(".")[0]) > 30 or (digits[0] == "0" and digits != "0" and "." not in digits):
        return " ".join(_read(digit) for digit in digits if digit != ".")  # a code, not a quantity
    return _read(digits)


def _read(digits: str) -> str:
    return _engine().number_to_words(digits, andword="", zero="zero").replace("-", " ").replace(",", "")


def _ordinal(number: str) -> str:
    return f" {_engine().ordinal(_read(number.replace(',', '')))} "


def _amount(match: re.Match) -> str:
    one, many = _CURRENCIES[match[1]]
    return f" {_cardinal(match[2])} {one if match[2] == '1' else many} "


def _clock(match: re.Match) -> str:
    hour, minute = int(match[1]), int(match[2])
    if hour > 24 or minute > 59:
        return f" {_read(str(hour))} {_read(str(minute))} "
    end = "o'clock" if minute == 0 else f"oh {_read(str(minute))}" if minute < 10 else _read(str(minute))
    return f" {_read(str(hour))} {end} "
