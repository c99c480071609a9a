"""How a sentence is written for the language model and for word errors: one rule for references, hypotheses and text.

    normalize("Don’t worry—it’s only 21 degrees.") == "don't worry it's only twenty one degrees"

Lower-case words of a to z and apostrophes within, one space between two. Without one rule for all three, a
language model does not know the words that it is asked for, and an error rate counts spelling.
"""

import functools
import re
import unicodedata

_MARKS = dict.fromkeys(map(ord, "’‘‛ʼʹ′`´＇"), "'") | {0xAD: None}  # apostrophes; a soft hyphen parts no words
# Letters that Unicode does not take apart into a base letter and an accent.
_LETTERS = str.maketrans({"ß": "ss", "æ": "ae", "œ": "oe", "ø": "o", "ł": "l", "đ": "d", "ð": "d", "þ": "th", "ı": "i"})
_SIGNS = {"&": " and ", "%": " percent ", "+": " plus ", "=": " equals ", "@": " at "}
_CURRENCIES = {"$": ("dollar", "dollars"), "€": ("euro", "euros"), "£": ("pound", "pounds")}
_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?"  # "1,000" is one, "2001,2002" are two
_LONGEST = 30  # digits of a quantity; inflect knows no words for more than 36
_ALREADY_NORMAL = re.compile(r"[a-z]+(?:'[a-z]+)*(?: [a-z]+(?:'[a-z]+)*)*")


def normalize(text: str) -> str:
    """The words of a text as they are spoken: lower case, a to z and apostrophes, one space between two.

    - any apostrophe or single quote becomes ' and stays between two letters only: "'Tis the boys’" -> "tis the boys"
    - hyphens and dashes part words: "well-known" -> "well known"
    - numbers are read out: "3rd" -> "third", "1999" -> "nineteen ninety nine", "$2.50" -> "two point five zero
      dollars", "$5 million" -> "five million dollars", "10:30" -> "ten thirty", "1980s" -> "nineteen eighties"; four
      digits from 1100 to 1999 without a comma are read as a year
    - accents are dropped ("café" -> "cafe"), & + % = @ are read out, anything else parts words; but dots within
      an abbreviation go: "U.S." -> "us", "p.m." -> "pm"

    The result is its own normal form.
    """
    if _ALREADY_NORMAL.fullmatch(text):  # nearly every word of a dictionary
        return text
    text = unicodedata.normalize("NFKD", text.translate(_MARKS)).translate(_MARKS).lower()
    text = "".join(letter for letter in text if not unicodedata.combining(letter)).translate(_LETTERS)
    text = re.sub(rf"([$€£])\s?({_NUMBER})(\s(?:hundred|thousand|(?:m|b|tr)illion)\b)?", _amount, text)
    text = re.sub(r"(?<!\d)(\d+(?:,\d{3})*)(st|nd|rd|th)\b", lambda match: _ordinal(match[1]), text)
    text = re.sub(r"(?<!\d)(\d{1,2}):(\d{2})(?!\d)", _clock, text)
    text = re.sub(r"(?<![\d.,])([2-9]0|1\d\d0|20\d0)'?s\b", _decade, text)
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
    if "," not in number and len(digits) == 4 and digits.isdigit() and "1100" <= digits <= "1999":
        century, rest = int(digits[:2]), int(digits[2:])
        end = "hundred" if rest == 0 else f"oh {_read(str(rest))}" if rest < 10 else _read(str(rest))
        return f"{_read(str(century))} {end}"
    if len(digits.split(".")[0]) > _LONGEST or (digits[0] == "0" and digits != "0" and "." not in digits):
        return _spell(digits)  # a code, not a quantity
    return _read(digits)


def _spell(digits: str) -> str:
    return " ".join(_read(digit) for digit in digits if digit != ".")


@functools.lru_cache(10_000)
def _read(digits: str) -> str:
    return _engine().number_to_words(digits, andword="", zero="zero").replace("-", " ").replace(",", "")


def _ordinal(number: str) -> str:
    digits = number.replace(",", "")
    return f" {_engine().ordinal(_spell(digits) if len(digits) > _LONGEST else _read(digits))} "


def _decade(match: re.Match) -> str:
    words = _cardinal(match[1])
    return f" {words[:-1]}ies " if words.endswith("y") else f" {words}s "


def _amount(match: re.Match) -> str:
    one, many = _CURRENCIES[match[1]]
    scale = match[3] or ""
    return f" {_cardinal(match[2])}{scale} {one if match[2] == '1' and not scale else many} "


def _clock(match: re.Match) -> str:
    hour, minute = int(match[1]), int(match[2])
    if hour > 24 or minute > 59:
        return f" {_read(str(hour))} {_read(str(minute))} "
    end = "o'clock" if minute == 0 else f"oh {_read(str(minute))}" if minute < 10 else _read(str(minute))
    return f" {_read(str(hour))} {end} "
