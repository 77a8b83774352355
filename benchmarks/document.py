"""The pages of docs/ that show the results: one screen, and a page for each subject."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Final

from benchmarks.harness import ROOT
from benchmarks.results import Figure, Report, quantity, stored

DOCS: Final = ROOT / "docs"
_FRONT: Final = "benchmarks.md"
_PLOT: Final = "benchmarks/peers.svg"
_PEERS: Final = "one counter, 64 connections: "
_GETS: Final = "gets a CPU second of a hot counter"
_RETENTION: Final = "7 days"
#: What bounds the figures of a subject that miss their targets.
_REASONS: Final[Mapping[str, str]] = {
    "gets": "most random counters are in no cache, so their heads are read from SQLite",
    "growth-counters": (
        "nearly every add is the only one of its counter in its window, so each of them has a"
        " look-up of the name and a rollup of its own"
    ),
    "growth-rollup": "each checkpoint is on a page of its own",
    "overload": "reading bodies, including refused ones, takes 10 % of the event loop's time",
    "postgresql-bounded-adds": (
        "each batch sums the events of its counters since the watermark, which are thousands for a"
        " hot counter"
    ),
    "peers": "the ratio to raw ASGI depends on the processor",
}
_ROW_HEIGHT: Final = 26
_LABEL_WIDTH: Final = 270
_BAR_WIDTH: Final = 360


def write_document(docs: Path = DOCS) -> None:
    """Write the pages of the stored results, and remove those of subjects that are gone."""
    made = pages(stored())
    (docs / "benchmarks").mkdir(exist_ok=True)
    for page in (docs / "benchmarks").glob("*.md"):
        if f"benchmarks/{page.name}" not in made:
            page.unlink()
    for name, text in made.items():
        (docs / name).write_text(text, encoding="utf-8")


def pages(reports: Sequence[Report]) -> dict[str, str]:
    """The text of each file, by its path below docs/."""
    found = {_FRONT: _front(reports)}
    for report in reports:
        found[f"benchmarks/{report.subject}.md"] = _page(report)
        if report.subject == "peers":
            found[_PLOT] = _plot([x for x in report.figures if _is_rate_of_peer(x)])
    return found


def _front(reports: Sequence[Report]) -> str:
    by_subject = {each.subject: each for each in reports}
    parts = ["# Benchmarks\n"]
    if "peers" in by_subject:
        parts.append(_summary(by_subject["peers"], by_subject.get("gets")))
    parts += [
        "## Not met\n",
        "A missed target fails no test. What is missed, and what bounds it:\n",
        "| | measured | target | why |\n|---|---:|---|---|",
        *(
            f"| {figure.what}{_spread(figure)} ([{report.subject}](benchmarks/{report.subject}.md))"
            f" | {quantity(figure.value, figure.unit)} | {figure.target}"
            f" | {_REASONS.get(report.subject, 'not known')} |"
            for report in reports
            for figure in report.figures
            if not figure.meets(figure.value)
        ),
        "\n## All subjects\n",
        "A figure with a target is the median of rounds that alternate what is compared. After each"
        " round the counts are compared with the acknowledged adds. Figures per second depend on"
        " the machine; ratios and figures per CPU second depend on it less.\n",
        "| subject | measured at | targets met |\n|---|---|---|",
        *(_line(each) for each in reports),
        "\n`./scripts/bench` measures all of it and writes these pages; `./scripts/bench SUBJECT`"
        " measures one, `./scripts/bench --render` only writes the pages.\n",
    ]
    return "\n".join(parts)


def _summary(peers: Report, gets: Report | None) -> str:
    """Three sentences, three numbers and a plot."""
    rates = {each.what.removeprefix(_PEERS): each for each in peers.figures if _is_rate(each)}
    ours = rates["ours"]
    durable = {
        name: each
        for name, each in rates.items()
        if name != "ours" and "on disk before the answer" in each.note
    }
    conditions = dict(peers.conditions)
    parts = [
        f"One process answers {quantity(ours.value, '')} adds a second, each of them on disk in"
        " SQLite before its response and safe to retry."
    ]
    if durable:
        best = max(durable, key=lambda name: durable[name].value)
        parts.append(
            f" That is {quantity(ours.value / durable[best].value, '')} times the rate of the"
            f" fastest peer that also writes each add to disk ({best}), on the same machine."
        )
    parts.append(f" A retry is recognized for {_RETENTION} by default, and refused after that.\n\n")
    parts.append("| | |\n|---|---:|\n")
    parts.append(f"| durable adds a second{_spread(ours)} | {quantity(ours.value, '')} |\n")
    for each in gets.figures if gets else ():
        if each.what == _GETS:
            value = quantity(each.value, "")
            parts.append(f"| gets a second and core of the server{_spread(each)} | {value} |\n")
    parts.append(f"| a retry is recognized for | {_RETENTION} |\n\n")
    parts.append(
        f"![Adds a second, ours and each peer's, to one counter over 64 connections.]({_PLOT})\n\n"
        f"On {conditions.get('machine', 'an unknown machine')}, which the load shares, by:\n\n"
        "    ./scripts/bench peers gets\n"
    )
    return "".join(parts)


def _line(report: Report) -> str:
    bound = [each for each in report.figures if each.target]
    met = sum(each.meets(each.value) for each in bound)
    link = f"[{report.title}](benchmarks/{report.subject}.md)"
    return f"| {link} | {report.measured_at} | {f'{met} of {len(bound)}' if bound else ''} |"


def _page(report: Report) -> str:
    listed = "; ".join(f"{name}: {value}" for name, value in report.conditions)
    return "\n".join(
        [
            f"# {report.title}\n",
            f"{report.method}\n",
            f"Measured {report.measured_at} in {report.seconds:.0f} s by:\n",
            f"    {report.command}\n",
            "| | measured | target | |\n|---|---:|---|---|",
            *map(_row, report.figures),
            f"\n{listed}.\n\n[All benchmarks](../{_FRONT})\n",
        ]
    )


def _row(figure: Figure) -> str:
    value = quantity(figure.value, figure.unit)
    verdict = figure.verdict
    if not figure.meets(figure.value):
        verdict = f"**{verdict}**"
    what = f"{figure.what}{_spread(figure, figure.note)}"
    return f"| {what} | {value} | {figure.target} | {verdict} |"


def _spread(figure: Figure, note: str = "") -> str:
    """*note*, and how far the rounds lay apart."""
    notes = [note] if note else []
    if len(figure.rounds) > 1:
        low, high = min(figure.rounds), max(figure.rounds)
        notes.append(f"rounds {quantity(low, '')} to {quantity(high, '')}")
    return f"<br><small>{'; '.join(notes)}</small>" if notes else ""


def _is_rate(figure: Figure) -> bool:
    return figure.what.startswith(_PEERS) and figure.unit == "/s"


def _is_rate_of_peer(figure: Figure) -> bool:
    """Whether it is the rate of something that stores what it counts."""
    return _is_rate(figure) and "keeps nothing" not in figure.note


def _plot(figures: Sequence[Figure]) -> str:
    """A bar for each of *figures*, as SVG; the fastest takes the whole width."""
    most = max(each.value for each in figures)
    width, height = _LABEL_WIDTH + _BAR_WIDTH + 80, _ROW_HEIGHT * len(figures)
    bars: list[str] = []
    for at, each in enumerate(figures):
        name = escape(each.what.removeprefix(_PEERS))
        top, long = at * _ROW_HEIGHT, round(_BAR_WIDTH * each.value / most)
        middle = top + _ROW_HEIGHT // 2 + 4
        bars.append(
            f'<text x="{_LABEL_WIDTH - 8}" y="{middle}" text-anchor="end">{name}</text>'
            f'<rect x="{_LABEL_WIDTH}" y="{top + 4}" width="{long}" height="{_ROW_HEIGHT - 8}"/>'
            f'<text x="{_LABEL_WIDTH + long + 6}" y="{middle}">{quantity(each.value, "")}</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        f' width="{width}" height="{height}" role="img">\n<title>Adds a second</title>\n'
        "<style>text{font:13px sans-serif;fill:#24292f}rect{fill:#57606a}rect:first-of-type"
        "{fill:#0969da}@media(prefers-color-scheme:dark){text{fill:#d0d7de}rect{fill:#8b949e}"
        "rect:first-of-type{fill:#58a6ff}}</style>\n" + "\n".join(bars) + "\n</svg>\n"
    )
