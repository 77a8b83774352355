"""Numbers drawn with characters: a line of blocks, and a plot some rows high."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_EIGHTHS: Final = len(_BLOCKS) - 1


def sparkline(values: Sequence[float]) -> str:
    """A block for each of *values*, which are not below 0: the highest of them is a whole one, and
    what is above 0 is seen."""
    top = max(values, default=0)
    if top <= 0:
        return _BLOCKS[1] * len(values)
    return "".join(_BLOCKS[max(1, round(value / top * _EIGHTHS))] for value in values)


def plot(values: Sequence[int], *, rows: int, columns: int) -> list[str]:
    """*values* as bars from the least (or 0, where that is near) to the greatest, with both written
    beside them; where there are more than fit in *columns*, the last one of each part is drawn."""
    if not values:
        return []
    least, most = min(values), max(values)
    if 0 < least <= most / 2 or least == most > 0:
        least = 0
    labels = {rows - 1: f"{most:,}", 0: f"{least:,}"}
    margin = max(map(len, labels.values()))
    shown = _fitted(values, max(1, columns - margin - 2))
    span = most - least or 1
    # At least an eighth: what is drawn is there.
    heights = [max(1, (value - least) * rows * _EIGHTHS // span) for value in shown]
    return [
        f"{labels.get(row, ''):>{margin}} ┤"
        + "".join(
            _BLOCKS[max(0, min(_EIGHTHS, height - row * _EIGHTHS))] for height in heights
        ).rstrip()
        for row in reversed(range(rows))
    ]


def _fitted(values: Sequence[int], columns: int) -> Sequence[int]:
    """At most *columns* of *values*, or each of them several times where that fits."""
    if len(values) <= columns:
        times = columns // len(values)
        return [value for value in values for _ in range(times)]
    return [values[(at + 1) * len(values) // columns - 1] for at in range(columns)]
