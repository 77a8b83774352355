"""The characters of a counter's name are fixed: Unicode's tables change with Python's version."""

import sys
import unicodedata

import pytest

from counter import limits, quantities
from counter.quantities import check_counter_name

ALL = [chr(code) for code in range(sys.maxunicode + 1)]
REFUSED = {chr(code) for first, last in quantities.REFUSED for code in range(first, last + 1)}


def refusal_of(name: str) -> str:
    """Why *name* is refused; empty if it is taken, as it is."""
    try:
        assert check_counter_name(name) == name
    except ValueError as error:
        return str(error)
    return ""


def test_a_name_valid_in_any_python_version_stays_valid() -> None:
    """It was whatever str.isprintable() said, and joiners."""
    assert {each for each in REFUSED if each.isprintable()} == set()
    assert not REFUSED & {"\u200c", "\u200d"}
    assert {unicodedata.category(each) for each in REFUSED} <= {
        *("Cc", "Cf", "Cs", "Co", "Cn", "Zs", "Zl", "Zp")
    }


def test_each_code_point_is_a_name_or_is_listed() -> None:
    assert {each for each in ALL if refusal_of(each)} == REFUSED
    for first, last in quantities.REFUSED:
        for code in (first, last):
            assert refusal_of(f"a{chr(code)}").endswith(f"this one holds U+{code:04X}")


def test_controls_surrogates_and_line_breaks_are_listed() -> None:
    listed = ("Cc", "Cs", "Co", "Zl", "Zp")
    assert REFUSED.issuperset(x for x in ALL if unicodedata.category(x) in listed)
    assert {x for x in ALL if unicodedata.category(x) == "Zs"} - REFUSED == {" "}
    lines = "".join(ALL).splitlines(keepends=True)
    assert {line[-1] for line in lines[:-1]} <= REFUSED


@pytest.mark.parametrize(
    "name",
    [
        # New in Unicode 15, which Python 3.11 does not have; not assigned; never a character.
        *("\U0001fae8", "\u0378", "\ufdd0", "\U0001ffff"),
        # Flags: of joiners, of pairs, of tags.
        "\U0001f3f3\ufe0f\u200d\U0001f308",
        "\U0001f1eb\U0001f1f7",
        "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
        # Number signs of Arabic and Kaithi, which are formats.
        *("\u0600", "\U000110bd"),
        "\U0001f642" * limits.COUNTER_NAME_CHARS_MAX,
    ],
)
def test_unassigned_and_combining_characters_are_allowed(name: str) -> None:
    """Regression: U+1FAE8 was counted on Python 3.13 and refused on 3.11."""
    assert check_counter_name(name) == name


@pytest.mark.parametrize(
    "name", ["", "a" * 257, "a\u200bb", "\ufeffa", "a\u202eb", "\ue000", "\ud800"]
)
def test_forbidden_characters_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="a counter's name"):
        check_counter_name(name)
