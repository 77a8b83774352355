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
