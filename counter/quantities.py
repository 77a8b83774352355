"""Parse and format durations, rates, sizes, shares and numbers: ``7d``, ``80/s``, ``20%``, ``1e6``;
and check the names of namespaces and counters, for the service and its clients.

Values are exact inside: integers, or fractions if a number need not be whole; a duration is in
microseconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Final

from counter import limits

#: Larger than any plan needs; the bound keeps ``1e999999999`` from filling the memory.
NUMBER_MAX: Final = 10**18

_NUMBER: Final = re.compile(r"\d{1,19}(?:\.\d{1,18})?(?:[eE]\+?\d{1,2})?", re.ASCII)
_GROUPED: Final = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d{1,18})?", re.ASCII)
_RATE: Final = re.compile(r"([^/]+)/(s|m|h|d)", re.ASCII)
_SIZE: Final = re.compile(r"([\d.,eE+]+?) ?([kKMGTP]i?B|B)?", re.ASCII)
_SECONDS: Final[Mapping[str, int]] = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_PREFIXES: Final = "kMGTP"
_DURATIONS_US: Final[Mapping[str, int]] = {
    "d": 86_400_000_000,
    "h": 3_600_000_000,
    "m": 60_000_000,
    "s": 1_000_000,
    "ms": 1_000,
    "us": 1,
}
_DURATION: Final = re.compile(r"(\d{1,18})(us|ms|s|m|h|d)", re.ASCII)
_NAMESPACE: Final = re.compile(r"[a-z][a-z0-9_-]{0,62}", re.ASCII)
#: First and last code points that no counter's name holds. The list is fixed: Unicode's tables
#: change with Python's version, and a name that was counted once must stay a name. All other code
#: points are allowed, also those that are not assigned yet. The clients have the same list.
REFUSED: Final = (
    (0x00, 0x1F),  # controls
    (0x7F, 0xA0),  # controls, and the no-break space
    (0xAD, 0xAD),  # soft hyphen
    (0x61C, 0x61C),  # mark of direction
    (0x1680, 0x1680),  # space
    (0x180E, 0x180E),  # invisible separator
    (0x2000, 0x200B),  # spaces, and the zero-width space; the joiners U+200C and U+200D are allowed
    (0x200E, 0x200F),  # marks of direction
    (0x2028, 0x202F),  # separators of lines and paragraphs, directions, narrow no-break space
    (0x205F, 0x206F),  # space, invisible operators, directions
    (0x3000, 0x3000),  # ideographic space
    (0xD800, 0xF8FF),  # surrogates, and private use
    (0xFEFF, 0xFEFF),  # byte order mark
    (0xFFF9, 0xFFFB),  # interlinear annotations
    (0xE0001, 0xE0001),  # language tag; the tags of flags, U+E0020 to U+E007F, are allowed
    (0xF0000, 0x10FFFF),  # private use
)
_REFUSED: Final = re.compile(f"[{''.join(f'{chr(one)}-{chr(two)}' for one, two in REFUSED)}]")


def parse_number(text: str) -> Fraction:
    """Return the number of *text* as ``80``, ``4.8``, ``1e6`` or ``1,000,000``.

    Raises ValueError naming the text if it is not of that form, or larger than NUMBER_MAX.
    """
    plain = text.replace(",", "") if _GROUPED.fullmatch(text) else text
    if _NUMBER.fullmatch(plain) is None:
        raise ValueError(f"{text[:40]!r} is not a number; write it like 80, 4.8, 1e6 or 1,000,000")
    number = Fraction(plain)
    if number > NUMBER_MAX:
        raise ValueError(f"{text[:40]} is too large; it must be at most 1e18")
    return number


def plural(number: int, one: str, many: str | None = None) -> str:
    """Return *number* with *one* if it is 1, else with *many*: by default *one* and an ``s``."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def parse_count(text: str) -> int:
    """Return a whole number in the form of :func:`parse_number`. Raises ValueError."""
    number = parse_number(text)
    if number.denominator != 1:
        raise ValueError(f"{text[:40]} is not a whole number")
    return int(number)


def parse_rate(text: str) -> Fraction:
    """Return the rate per second of ``80/s``, ``4.8/m``, ``1e6/d``. Raises ValueError naming the
    text."""
    found = _RATE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text[:40]!r} is not a rate; write it like 80/s, 4.8/m or 1e6/d")
    return parse_number(found[1]) / _SECONDS[found[2]]


def parse_size(text: str) -> int:
    """Return the bytes of ``200B``, ``64``, ``4MiB`` (2^20 each) or ``1TB`` (10^12). Raises
    ValueError."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text[:40]!r} is not a size; write it like 200B, 64, 4MiB or 1TB")
    unit = found[2] or "B"
    power = 0 if unit == "B" else _PREFIXES.index(unit[0].replace("K", "k")) + 1
    size = parse_number(found[1]) * (1_024 if "i" in unit else 1_000) ** power
    if size.denominator != 1 or size > NUMBER_MAX:
        raise ValueError(f"{text[:40]} is not a whole number of bytes up to 1e18")
    return int(size)


def parse_share(text: str) -> Fraction:
    """Return 1/5 for ``20%``. Raises ValueError naming the text if the percent sign is missing."""
    if not text.endswith("%"):
        raise ValueError(f"{text[:40]!r} is not a percentage; write it like 20%")
    return parse_number(text[:-1]) / 100


def format_number(value: float | Fraction) -> str:
    """Format a number with its significant digits: ``12,960``, ``4.8``, ``2.47e-31``."""
    number = float(value)
    if number != 0 and abs(number) < 0.001:
        return f"{number:.2e}"
    return f"{number:,.0f}" if abs(number) >= 1_000 or number == int(number) else f"{number:.4g}"


def format_bytes(size: float | Fraction) -> str:
    """Format bytes in the largest decimal unit that fits: ``200 B``, ``17.28 GB``."""
    value, unit = float(size), "B"
    for prefix in _PREFIXES:
        if value < 1_000:
            break
        value, unit = value / 1_000, f"{prefix}B"
    return f"{value:.4g} {unit}"


def format_share(share: float | Fraction) -> str:
    """Format a share; the inverse of :func:`parse_share`."""
    return f"{float(share * 100):.4g}%"


def parse_duration(text: str) -> int:
    """Return the microseconds of *text*, one or more ``<integer><unit>`` of d, h, m, s, ms, us:
    ``1h30m``.

    Raises ValueError naming the text if it is not of that form.
    """
    total, position = 0, 0
    while position < len(text):
        part = _DURATION.match(text, position)
        if part is None:
            break
        total += int(part[1]) * _DURATIONS_US[part[2]]
        position = part.end()
    if position == 0 or position != len(text):
        raise ValueError(f"{text[:40]!r} is not a duration; write it like 5s, 250ms, 1h30m or 7d")
    return total


def format_duration(duration_us: int) -> str:
    """Return the shortest text that :func:`parse_duration` reads back, in its largest unit."""
    if duration_us == 0:
        return "0s"
    for unit, size in _DURATIONS_US.items():
        if duration_us % size == 0:
            return f"{duration_us // size}{unit}"
    raise ValueError(f"{duration_us} is not a whole number of microseconds")


def spell_duration(duration_us: int) -> str:
    """Return text that :func:`parse_duration` reads back, in parts if it is long: ``6d23h59m``."""
    if duration_us == 0:
        return "0s"
    parts, rest_us = [], duration_us
    for unit, size in _DURATIONS_US.items():
        number, rest_us = divmod(rest_us, size)
        if number:
            parts.append(f"{number}{unit}")
    return "".join(parts)


def is_namespace_name(name: str) -> bool:
    """Return whether *name* is a valid namespace name."""
    return _NAMESPACE.fullmatch(name) is not None


def check_counter_name(name: str) -> str:
    """Return *name* if it has 1 to 256 characters, none of them in REFUSED. Raises ValueError,
    naming the fault."""
    if not 1 <= len(name) <= limits.COUNTER_NAME_CHARS_MAX:
        raise ValueError(
            f"a counter's name has 1 to {limits.COUNTER_NAME_CHARS_MAX} characters,"
            f" this one has {len(name)}"
        )
    # Most names are ASCII, for which this is faster.
    if (name.isascii() and name.isprintable()) or not (bad := _REFUSED.search(name)):
        return name
    raise ValueError(
        "a counter's name has no controls, invisible marks, characters for private use, or spaces"
        f" but U+0020; this one holds U+{ord(bad[0]):04X}"
    )
