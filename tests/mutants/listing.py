"""The list of all faults that were drawn, as a file, and its summary in docs/guarantees.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Final

from tests.mutants.operators import Mutant
from tests.mutants.plan import AREAS, OPERATORS
from tests.mutants.runner import Outcome
from tests.support.levels import Level

_LIST: Final = "tests/mutants/list.tsv"
_GUARANTEES: Final = "docs/guarantees.md"
_BEGIN: Final = "<!-- the tables are written by scripts/mutants -->"
_END: Final = "<!-- end of the tables of scripts/mutants -->"
_TEXT_MAX: Final = 120


@dataclass(frozen=True, slots=True)
class Row:
    """A fault, and the test that kills it; or, if it is harmless, the reason."""

    id: str
    area: str
    operator: str
    path: str
    function: str
    change: str
    verdict: str
    seconds: str
    by: str

    @classmethod
    def of(cls, area: str, mutant: Mutant, outcome: Outcome) -> Row:
        old, new = (" ".join(each.split())[:_TEXT_MAX] for each in (mutant.old, mutant.new))
        return cls(
            mutant.id, area, mutant.operator, mutant.path, mutant.function, f"{old} -> {new}",
            outcome.verdict, f"{outcome.took_s:.1f}", outcome.by,
        )  # fmt: skip

    def survives(self, why: str) -> Row:
        return replace(self, verdict="survived", by=why)


_COLUMNS: Final = [each.name for each in fields(Row)]


def read_rows(root: Path) -> dict[str, Row]:
    path = root / _LIST
    if not path.exists():
        return {}
    _, *lines = path.read_text("utf-8").splitlines()
    rows = [Row(*line.split("\t")) for line in lines]
    return {row.id: row for row in rows}


def write_rows(root: Path, rows: Mapping[str, Row]) -> None:
    order = sorted(rows.values(), key=lambda row: (row.area, row.path, row.operator, row.id))
    lines = ["\t".join(_COLUMNS)]
    lines += ["\t".join(asdict(row).values()) for row in order]
    (root / _LIST).write_text("\n".join(lines) + "\n", "utf-8")


def write_summary(root: Path, rows: Mapping[str, Row]) -> None:
    """Write the tables into docs/guarantees.md."""
    path = root / _GUARANTEES
    before, begin, rest = path.read_text("utf-8").partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{path} lacks {_BEGIN!r} or {_END!r}")
    path.write_text(f"{before}{_BEGIN}\n\n{summary(rows)}\n{_END}{after}", "utf-8")


def summary(rows: Mapping[str, Row]) -> str:
    """Return a table of area by operator: killed, and those that are harmless or survived."""
    tally = Counter((row.area, row.operator, row.verdict) for row in rows.values())
    tally.update((row.area, "all", row.verdict) for row in rows.values())
    tally.update(("all", row.operator, row.verdict) for row in rows.values())
    tally.update(("all", "all", row.verdict) for row in rows.values())
    columns = [*OPERATORS, "all"]
    lines = _head("area", columns)
    for area in (*AREAS, "all"):
        cells = []
        for operator in columns:
            killed, harmless, survived = (
                tally[area, operator, verdict] for verdict in ("killed", "harmless", "survived")
            )
            text = f"{killed}"
            if harmless:
                text += f" + {harmless}"
            if survived:
                text += f", {survived} survived"
            cells.append(text if killed or harmless or survived else "-")
        lines.append(f"| {area} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def level_table(caught: Mapping[tuple[str, Level], int]) -> str:
    """Return a table of area by level: how many faults a test or a seed of the level catches."""
    levels = (Level.ALONE, Level.SERVED)
    lines = _head("area", levels)
    for area in AREAS:
        lines.append(f"| {area} | {' | '.join(str(caught[area, level]) for level in levels)} |")
    return "\n".join(lines) + "\n"


def _head(first: str, columns: Sequence[str]) -> list[str]:
    return [f"| {first} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
