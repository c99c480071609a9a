"""Settings as typed dataclasses: values converted to their types, YAML and overrides read, problems told in words.

Nothing here knows which keys there are: config.py states them, in dataclasses that are Sections.
"""

import contextlib
import copy
import difflib
import functools
import math
import numbers
import os
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, get_args, get_origin

import yaml


class ConfigError(ValueError):
    """A configuration that cannot be used; the message lists every problem, one a line."""


class _Mismatch(ValueError):
    """A value that does not have its key's type."""


@dataclass(frozen=True)
class Range:
    """Limits of a number, stated in its type."""

    least: float = -math.inf
    above: float = -math.inf
    below: float = math.inf

    def holds(self, number: float) -> bool:
        return number >= self.least and self.above < number < self.below

    def __str__(self) -> str:
        limits = (("at least", self.least), ("above", self.above), ("below", self.below))
        return " and ".join(f"{words} {limit}" for words, limit in limits if math.isfinite(limit))


Count = Annotated[int, Range(least=1)]
CountOrZero = Annotated[int, Range(least=0)]
Positive = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(least=0)]
Probability = Annotated[float, Range(least=0, below=1)]


class Section:
    """A group of keys: a dataclass whose keys can also be read and written as items."""

    _section: ClassVar[str] = ""  # the dotted name, empty for the root; `root_section` sets both
    _all_keys: ClassVar[Sequence[str]] = ()  # every dotted key of the root

    def __setattr__(self, key: str, value: Any) -> None:
        hint = _hints(type(self)).get(key)
        if hint is None:
            raise AttributeError(_unknown(type(self), key))
        if not is_dataclass(hint):
            try:
                value = _convert(value, hint)
            except _Mismatch as mismatch:
                raise ConfigError(f"{_join(self._section, key)}: {mismatch}") from None
        elif not isinstance(value, hint):
            problems: dict[str, str] = {}
            value = build(hint, value, problems)
            raise_problems(problems)
        object.__setattr__(self, key, value)

    def __getattr__(self, key: str) -> Any:  # called only where there is no such attribute
        if key.startswith("__"):  # Python's own, as __setstate__ of each copy: milliseconds for a name nobody reads
            raise AttributeError(key)
        raise AttributeError(_unknown(type(self), key))

    def __getitem__(self, key: str) -> Any:
        if key not in self:
            raise KeyError(_unknown(type(self), key))
        return getattr(self, key)

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self:
            raise KeyError(_unknown(type(self), key))
        setattr(self, key, value)

    def __contains__(self, key: object) -> bool:
        return key in _hints(type(self))

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def keys(self) -> list[str]:
        return list(_hints(type(self)))

    def get(self, key: str, default: Any = None) -> Any:
        return getattr(self, key) if key in self else default

    def copy(self) -> Self:
        """A copy that shares nothing with this section."""
        return copy.deepcopy(self)

    def to_dict(self) -> dict[str, Any]:
        """A copy as a plain dict that holds only str, int, float, bool, None, list and dict."""
        return {key: plain(self[key]) for key in self.keys()}


def root_section(cls: type) -> type:
    """Decorator of the dataclass that holds all others: tells each section its dotted name and all keys there are.

    Messages need both. A section class has one place under the root.
    """
    all_keys: list[str] = []

    def place(section: type, name: str) -> None:
        section._section, section._all_keys = name, all_keys
        for key, hint in _hints(section).items():
            all_keys.append(_join(name, key))
            if is_dataclass(hint):
                place(hint, all_keys[-1])

    place(cls, "")
    return cls


# ---- reading


class _Loader(yaml.SafeLoader):
    """YAML that remembers keys given twice in a mapping (YAML itself lets the last one win)."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.duplicates: dict[str, str] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        lines: dict[str, int] = {}
        for key_node, _ in node.value:
            key, line = key_node.value, key_node.start_mark.line + 1
            if isinstance(key, str) and key != "<<":
                if key in lines:
                    self.duplicates[f"line {line}"] = f"{key} is given twice, first in line {lines[key]}"
                lines.setdefault(key, line)
        return super().construct_mapping(node, deep)


def _read_yaml(text: str) -> tuple[Any, dict[str, str]]:
    """The document, and the keys given twice (line → message)."""
    loader = _Loader(text)
    return loader.get_single_data(), loader.duplicates


def read_yaml_file(path: str) -> tuple[Any, dict[str, str]]:
    """The document in a file, and the keys given twice (line → message)."""
    try:
        with open(path, encoding="utf-8") as file:
            return _read_yaml(file.read())
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the configuration file: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: the configuration file is not UTF-8 text: {error}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none, as 2023-02-30
        raise ConfigError(f"{path}: not valid YAML: {error}") from None


def read_overrides(root: type, overrides: Sequence[str], problems: dict[str, str]) -> dict[str, Any]:
    """Dotted key → value of `key=value` texts, later ones win; what is wrong is added to problems."""
    given = {}
    for override in [overrides] if isinstance(overrides, str) else overrides:
        key, equals, text = (part.strip() for part in override.partition("="))
        try:
            if not equals:
                raise _Mismatch("an override is written key=value")
            given[key] = _override_value(root, key, text)
        except _Mismatch as mismatch:
            problems[key] = str(mismatch)
    return given


def _override_value(root: type, key: str, text: str) -> Any:
    """The value of an override: text where the key holds text, YAML elsewhere."""
    hint: Any = root
    for part in key.split("."):
        hint = _hints(hint).get(part) if is_dataclass(hint) else None
    if hint is None:
        raise _Mismatch(_unknown(root, key))
    if is_dataclass(hint):
        raise _Mismatch(f"is a section; override its keys one by one, as in {key}.{next(iter(_hints(hint)))}=…")
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    members = get_args(hint) if get_origin(hint) is types.UnionType else (hint,)
    if str in members and not quoted:  # a path may hold anything: `a: b`, `#1`, 123
        nothing = type(None) in members and text in ("", "~", "null", "none", "None")
        return None if nothing else text
    try:
        value, duplicates = _read_yaml(text)
    except yaml.YAMLError:
        raise _Mismatch(f"the value is not valid YAML: {text!r}") from None
    if duplicates:
        raise _Mismatch(", ".join(duplicates.values()))
    return value


# ---- values to types


def build(cls: type, data: Any, problems: dict[str, str]) -> Any:
    """A section from a mapping or section; what is wrong is added to problems and gets its default."""
    data = {} if data is None else data
    if not isinstance(data, Mapping | Section):
        problems[cls._section or "the configuration"] = f"expected a section of keys, found {describe_value(data)}"
        data = {}
    values, hints = {}, _hints(cls)
    for key in data.keys():  # noqa: SIM118 (a Section is no Mapping)
        full, hint = _join(cls._section, str(key)), hints.get(key)
        if hint is None:
            problems[full] = _unknown(cls, key)
        elif is_dataclass(hint):
            values[key] = build(hint, data[key], problems)
        else:
            try:
                values[key] = _convert(data[key], hint)
            except _Mismatch as mismatch:
                problems[full] = str(mismatch)
    return cls(**values)


def _convert(value: Any, hint: Any) -> Any:
    """The value as the hint's type, plain Python; raises _Mismatch with what was expected and found."""
    if hasattr(value, "tolist"):  # numpy's scalars and arrays, tensors
        value = value.tolist()
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        with contextlib.suppress(_Mismatch):
            number = _convert(value, arguments[0])
            if arguments[1].holds(number):
                return number
    elif origin is types.UnionType:
        if type(None) in arguments and (value is None or value == "None"):  # YAML reads None as a text
            return None
        members = [member for member in arguments if member is not type(None)]
        if len(members) == 1:
            return _convert(value, members[0])
        for member in members:
            with contextlib.suppress(_Mismatch):
                return _convert(value, member)
    elif origin is Literal:
        for choice in arguments:
            if value == choice and type(value) is type(choice):
                return choice
    elif origin is list and isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_convert_entry(n, item, arguments[0]) for n, item in enumerate(value, 1)]
    elif origin is dict and isinstance(value, Mapping):
        result = {}
        for key, item in value.items():
            number = arguments[0] is int and isinstance(key, str) and key.isdecimal()
            key = _convert_entry(key, int(key) if number else key, arguments[0])
            result[key] = _convert_entry(key, item, arguments[1])
        return result
    elif hint is str and isinstance(value, str | os.PathLike):
        return os.fspath(value)
    elif hint is bool and isinstance(value, bool):
        return value
    elif hint in (int, float) and not isinstance(value, bool):
        exponent = isinstance(value, str) and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+", value)
        number = float(value) if exponent else value  # YAML 1.1 reads 1e-3 as a text
        if isinstance(number, numbers.Integral):
            return hint(number)
        if isinstance(number, numbers.Real) and math.isfinite(number) and (hint is float or number == int(number)):
            return hint(number)
    raise _Mismatch(f"expected {_describe_type(hint)}, found {describe_value(value)}")


def _convert_entry(name: object, value: Any, hint: Any) -> Any:
    try:
        return _convert(value, hint)
    except _Mismatch as mismatch:
        raise _Mismatch(f"entry {name}: {mismatch}") from None


# ---- words for messages


def raise_problems(problems: dict[str, str], source: str | None = None) -> None:
    """Raise a ConfigError with all problems, if there are any."""
    if problems:
        number = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        lines = "".join(f"\n  {key}: {message}" for key, message in problems.items())
        raise ConfigError(f"{number} in the configuration{f' {source}' if source else ''}:{lines}")


def _unknown(cls: type, key: object) -> str:
    """Words for an unknown key of a section, with the nearest valid one: alike in name, section, or both."""
    key = _join(cls._section, str(key))
    section, _, leaf = key.rpartition(".")

    def likeness(candidate: str) -> float:
        its_section, _, its_leaf = candidate.rpartition(".")
        names = difflib.SequenceMatcher(None, leaf.lower(), its_leaf.lower()).ratio()
        whole = difflib.SequenceMatcher(None, key.lower(), candidate.lower()).ratio()
        return names + whole + 0.15 * (section == its_section)

    return f"unknown key {key}; the nearest valid key is {max(cls._all_keys or _hints(cls), key=likeness)}"


def _describe_type(hint: Any) -> str:
    """`a whole number (at least 1)` for Annotated[int, Range(least=1)], and so on."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return f"{_describe_type(arguments[0])} ({arguments[1]})"
    if origin is types.UnionType:
        return " or ".join(_describe_type(member) for member in arguments)
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin is list:
        return f"a list (each entry {_describe_type(arguments[0])})"
    if origin is dict:
        return f"a mapping of {_describe_type(arguments[0])} to {_describe_type(arguments[1])}"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}[hint]


def describe_value(value: Any) -> str:
    if value is None:
        return "null (nothing)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the text {shortened(value)}"
    if isinstance(value, numbers.Number):
        return str(value)
    kind = {dict: "a section", list: "a list", tuple: "a list"}.get(type(value), f"a {type(value).__name__}")
    return f"{kind}: {shortened(value)}"


def shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


# ---- keys and nested mappings


def _join(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """Key → type of a section."""
    return {entry.name: entry.type for entry in fields(cls)}


def look_up(data: Any, key: str, default: Any = None) -> Any:
    """The value of a dotted key in nested dicts, the default where it is absent."""
    for part in key.split("."):
        if not isinstance(data, dict) or part not in data:
            return default
        data = data[part]
    return data


def put(data: dict, key: str, value: Any) -> None:
    """Set a dotted key in nested dicts; a section that is no mapping is left as it is, to be refused."""
    *sections, leaf = key.split(".")
    for section in sections:
        if data.get(section) is None:
            data[section] = {}
        data = data[section]
        if not isinstance(data, dict):
            return
    data[leaf] = value


def remove_unknown(cls: type, data: dict) -> list[str]:
    """Remove from nested dicts the keys that a section does not know; returns their dotted names."""
    removed = []
    for key in list(data):
        hint = _hints(cls).get(key)
        if hint is None:
            removed.append(_join(cls._section, str(key)))
            del data[key]
        elif is_dataclass(hint) and isinstance(data[key], dict):
            removed += remove_unknown(hint, data[key])
    return removed


def plain(value: Any) -> Any:
    """A copy in dicts and lists."""
    if isinstance(value, Section):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(item) for item in value]
    return value
