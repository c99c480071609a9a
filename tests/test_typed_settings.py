"""typed_settings.py: sections of any keys, not only those of config.py."""

from dataclasses import dataclass, field

import pytest

from typed_settings import ConfigError, Count, Probability, Section, build, read_overrides, root_section


@dataclass
class Glaze(Section):
    colour: str = "white"
    coverage: Probability = 0.5


@dataclass
class Pot(Section):
    handles: int | None = None
    glaze: Glaze = field(default_factory=Glaze)


@root_section
@dataclass
class Kiln(Section):
    degrees: Count = 1200
    pot: Pot = field(default_factory=Pot)


def test_a_section_knows_its_full_name_and_the_keys_of_all_others():
    with pytest.raises(
        ConfigError, match=r"^pot\.glaze\.coverage: expected a number \(at least 0 and below 1\), found 2"
    ):
        Glaze().coverage = 2
    with pytest.raises(AttributeError, match=r"unknown key pot\.glaze\.degree; the nearest valid key is degrees"):
        _ = Glaze().degree


def test_a_section_without_a_root_names_its_own_keys():
    @dataclass
    class Shelf(Section):
        height: Count = 3

    with pytest.raises(AttributeError, match="unknown key heigth; the nearest valid key is height"):
        Shelf().heigth = 4


def test_problems_of_all_sections_are_gathered_and_leave_the_defaults():
    problems = {}
    kiln = build(Kiln, {"degrees": "hot", "pot": {"handles": 2, "glaze": {"color": "red"}}}, problems)
    assert kiln == Kiln(pot=Pot(handles=2))
    assert problems == {
        "degrees": "expected a whole number (at least 1), found the text 'hot'",
        "pot.glaze.color": "unknown key pot.glaze.color; the nearest valid key is pot.glaze.colour",
    }


def test_overrides_are_text_where_the_key_holds_text_and_yaml_elsewhere():
    problems = {}
    given = read_overrides(Kiln, ["pot.glaze.colour=#fff: 1", "degrees=1", "degrees=[2]", "pot=3"], problems)
    assert given == {"pot.glaze.colour": "#fff: 1", "degrees": [2]}
    assert problems == {"pot": "is a section; override its keys one by one, as in pot.handles=…"}
