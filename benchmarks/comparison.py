"""The measured tables of docs/explanation/comparison.md, which quotes no other figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.harness import ROOT
from benchmarks.results import Figure, Report, quantity

PAGE: Final = ROOT / "docs" / "explanation" / "comparison.md"
_BEGIN: Final = "<!-- measured: written by ./scripts/bench -->\n"
_END: Final = "<!-- end of what is measured -->\n"
_HOT: Final = "one counter, 64 connections: "
_OURS: Final = f"{_HOT}ours, of "


def write(reports: Sequence[Report], page: Path = PAGE) -> None:
    """Put *reports*' figures into the page, between its two marks."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    page.write_text(f"{before}{_BEGIN}{measured(reports)}{end}{after}", encoding="utf-8")


def measured(reports: Sequence[Report]) -> str:
    """The tables of the subjects that the page speaks of, as far as they were measured."""
    tables = {"peers": _beside_peers, "cluster-quorum": _over_cassandra}
    found = [report for report in reports if report.subject in tables]
    return "".join(f"{line}\n" for report in found for line in tables[report.subject](report))


def _beside_peers(report: Report) -> Iterator[str]:
    ratios = {
        each.what.removeprefix(_OURS): each
        for each in report.figures
        if each.what.startswith(_OURS)
    }
    yield f"\nAdds a second to one counter over 64 connections. {_when(report)}\n"
    yield "| | adds a second | ours, times as many | |\n|---|---:|---:|---|"
    for each in report.figures:
        if each.what.startswith(_HOT) and not each.what.startswith(_OURS):
            yield _peer(each, ratios)


def _peer(figure: Figure, ratios: Mapping[str, Figure]) -> str:
    name = figure.what.removeprefix(_HOT)
    times = f"{ratios[name].value:.3g}" if name in ratios else ""
    note = figure.note.replace("; ", "<br>")
    return f"| {name} | {quantity(figure.value, '')} | {times} | <small>{note}</small> |"


def _over_cassandra(report: Report) -> Iterator[str]:
    yield f"\nAdds a second over three Cassandra nodes at QUORUM. {_when(report)}\n"
    yield "| | ours, times as many | |\n|---|---:|---|"
    for each in report.figures:
        yield f"| {each.what} | {each.value:.3g} | <small>{each.note}</small> |"


def _when(report: Report) -> str:
    machine = dict(report.conditions)["machine"]
    page = "../benchmarks.md#" + report.title.lower().replace(" ", "-")
    return f"Measured {report.measured_at[:10]} on {machine} ([how]({page}))."
