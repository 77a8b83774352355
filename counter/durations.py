"""Convert durations such as ``5s``, ``250ms`` and ``7d`` to and from microseconds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_UNITS_US: Final[Mapping[str, int]] = {
    "d": 86_400_000_000,
    "h": 3_600_000_000,
    "m": 60_000_000,
    "s": 1_000_000,
    "ms": 1_000,
    "us": 1,
}
_PART: Final = re.compile(r"(\d{1,18})(us|ms|s|m|h|d)", re.ASCII)
#: The fixed spans of ISO 8601. Years and months have no fixed length and are rejected.
_ISO: Final = re.compile(
    r"P(?=[\dT])(?:(?P<w>\d{1,9})W)?(?:(?P<d>\d{1,9})D)?"
    r"(?:T(?=\d)(?:(?P<h>\d{1,9})H)?(?:(?P<m>\d{1,9})M)?"
    r"(?:(?P<s>\d{1,9})(?:[.,](?P<fraction>\d{1,6}))?S)?)?",
    re.ASCII,
)


def parse_duration(text: str) -> int:
    """Return the microseconds of *text*, one or more ``<integer><unit>`` of d, h, m, s, ms, us:
    ``1h30m``.

    Raises ValueError naming the text if it is not of that form.
    """
    total, position = 0, 0
    while position < len(text):
        part = _PART.match(text, position)
        if part is None:
            break
        total += int(part[1]) * _UNITS_US[part[2]]
        position = part.end()
    if position == 0 or position != len(text):
        raise ValueError(f"{text[:40]!r} is not a duration; write it like 5s, 250ms, 1h30m or 7d")
    return total


def parse_iso_duration(text: str) -> int:
    """Return the microseconds of *text* in ISO 8601 (``P7D``, ``PT1H30M``, ``PT0.5S``), or in the
    form of :func:`parse_duration`.

    Raises ValueError naming the text if it is of neither form.
    """
    if not text.startswith("P"):
        return parse_duration(text)
    found = _ISO.fullmatch(text)
    if found is None:
        raise ValueError(
            f"{text[:40]!r} is not a duration of weeks, days, hours, minutes and seconds;"
            " write it like P7D, PT24H or PT0.5S"
        )
    parts = {unit: int(number or 0) for unit, number in found.groupdict().items()}
    days_us = (7 * parts["w"] + parts["d"]) * _UNITS_US["d"]
    fraction_us = int((found["fraction"] or "").ljust(6, "0"))
    return days_us + sum(parts[unit] * _UNITS_US[unit] for unit in "hms") + fraction_us


def format_duration(duration_us: int) -> str:
    """Return the shortest text that :func:`parse_duration` reads back, in its largest unit."""
    if duration_us == 0:
        return "0s"
    for unit, size in _UNITS_US.items():
        if duration_us % size == 0:
            return f"{duration_us // size}{unit}"
    raise ValueError(f"{duration_us} is not a whole number of microseconds")


def spell_duration(duration_us: int) -> str:
    """Return text that :func:`parse_duration` reads back, in parts if it is long: ``6d23h59m``."""
    if duration_us == 0:
        return "0s"
    parts, rest_us = [], duration_us
    for unit, size in _UNITS_US.items():
        number, rest_us = divmod(rest_us, size)
        if number:
            parts.append(f"{number}{unit}")
    return "".join(parts)
