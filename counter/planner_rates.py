"""What one process, node or server takes a second: measured, and where.

The format is that of ``benchmarks/results.json``: a list of reports, of which the one whose
``subject`` is ``capacity`` holds a figure for each rate that was measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any, Final

from counter.planner import RATE_MAX_PER_S, PlanError
from counter.quantities import format_number

SUBJECT: Final = "capacity"
#: Where the defaults were measured: store, service and load shared one machine of 2 cores.
_MACHINE: Final = "2 cores, 2026-11-21"


@dataclass(frozen=True, slots=True)
class Rate:
    """So many a second, and where that was measured."""

    per_s: Fraction
    source: str


def _measured(per_s: int, source: str) -> Rate:
    return Rate(Fraction(per_s), f"{_MACHINE}: {source}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What each part takes a second.

    - ``api_adds``, ``api_gets``: single adds, and gets of cached counts, of one API process;
    - ``node_adds``: events that one Cassandra node takes that keeps the only copy;
    - ``node_copies``: copies of events that one takes where several keep them, at a quorum;
    - ``node_rollups``: counters rolled up that one node takes;
    - ``worker_rollups``: counters that one rollup worker rolls up;
    - ``cache_keys``: keys that one memcached looks up or notes.
    """

    api_adds: Rate
    api_gets: Rate
    node_adds: Rate
    node_copies: Rate
    node_rollups: Rate
    worker_rollups: Rate
    cache_keys: Rate


#: What holds where nothing else was measured: a small machine's, by ./scripts/bench SUBJECT.
MEASURED: Final = Rates(
    api_adds=_measured(4_437, "cluster-adds, many counters, 64 connections: the service"),
    api_gets=_measured(23_497, "cluster-gets, 64 connections"),
    node_adds=_measured(9_818, "cluster-adds, many counters, 256 connections: the driver alone"),
    node_copies=_measured(2_697, "cluster-quorum, many counters: 899/s, in 3 copies"),
    node_rollups=_measured(5_853, "cluster-rollups, two workers over one node"),
    worker_rollups=_measured(4_420, "cluster-rollups, one worker, one large window"),
    cache_keys=_measured(23_497, "cluster-gets, 64 connections: at least"),
)
RATE_NAMES: Final = tuple(each.name for each in fields(Rates))


def read_rates(text: str, source: str) -> Rates:
    """The rates that *text*, the content of *source*, holds; the defaults for the others.

    Raises PlanError where it is not of the format, names a rate that is not known, or holds none.
    """
    report = _report(text, source)
    when = report.get("measured_at")
    told = f"{source}, {when}" if isinstance(when, str) else source
    found: dict[str, Rate] = {}
    figures = report.get("figures")
    if not isinstance(figures, list):
        raise PlanError(f"{source}: figures is no list")
    for figure in figures:
        name, per_s = _figure(figure, source)
        found[name] = Rate(per_s, told)
    if not found:
        raise PlanError(f"{source}: no figure is there; known are: {', '.join(RATE_NAMES)}")
    return replace(MEASURED, **found)


def _report(text: str, source: str) -> Mapping[str, Any]:
    try:
        reports = json.loads(text)
    except ValueError as error:
        raise PlanError(f"{source}: it is not JSON: {error}") from error
    if isinstance(reports, list):
        for each in reports:
            if isinstance(each, dict) and each.get("subject") == SUBJECT:
                return each
    raise PlanError(f"{source}: it is no list of reports with one whose subject is {SUBJECT!r}")


def _figure(figure: Any, source: str) -> tuple[str, Fraction]:
    """The name and the value of one figure."""
    if not isinstance(figure, dict):
        raise PlanError(f"{source}: a figure is {str(figure)[:40]!r}, and no object")
    name, unit = figure.get("what"), figure.get("unit")
    value: Any = figure.get("value")
    if name not in RATE_NAMES:
        raise PlanError(f"{source}: what is {str(name)[:40]!r}; known are: {', '.join(RATE_NAMES)}")
    if unit != "/s":
        raise PlanError(f"{source}: the unit of {name} is {str(unit)[:40]!r}; it must be '/s'")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    number = value if is_number else 0
    # Not a number is within no bounds.
    if not 0 < number <= RATE_MAX_PER_S:
        raise PlanError(
            f"{source}: {name} is {str(value)[:40]}; it must be more than 0/s and at most"
            f" {format_number(RATE_MAX_PER_S)}/s"
        )
    return name, Fraction(number)
