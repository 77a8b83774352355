"""Define the measured rates per second of one process, node or server.

The format is that of ``benchmarks/results.json``: a list of reports, of which the one whose
``subject`` is ``capacity`` has a figure for each rate that was measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any, Final

from counter.ops.planner import RATE_MAX_PER_S, PlanError
from counter.quantities import format_number

SUBJECT: Final = "capacity"
#: Other figures that ``scripts/capacity`` saves and no plan uses, with their units.
_OTHERS: Final[Mapping[str, str]] = {"batch_adds": "/s", "event_bytes": "B"}


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate per second and its source; *embedded*: over SQLite, not Cassandra."""

    per_s: Fraction
    source: str
    embedded: bool = False


def _measured(per_s: int, subject: str, at: str, what: str) -> Rate:
    """Measured by ./scripts/bench, on a machine of 2 cores that store, service and load shared."""
    return Rate(Fraction(per_s), f"2 cores, {at}, {subject}: {what}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The rate of each part per second.

    - ``api_adds``, ``api_gets``: single adds, and gets of cached counts, of one API process;
    - ``node_adds``: events of one Cassandra node that keeps the only copy;
    - ``node_copies``: copies of events of one node if several keep them, at a quorum;
    - ``node_rollups``: counters rolled up per node;
    - ``worker_rollups``: counters that one rollup worker rolls up;
    - ``cache_keys``: keys that one memcached looks up or stores.
    """

    api_adds: Rate
    api_gets: Rate
    node_adds: Rate
    node_copies: Rate
    node_rollups: Rate
    worker_rollups: Rate
    cache_keys: Rate


_ADDS: Final = ("cluster-adds", "2026-11-22T00:01Z")
_GETS: Final = ("cluster-gets", "2026-11-21T19:35Z")
_ROLLUPS: Final = ("cluster-rollups", "2026-11-21T19:37Z")
_QUORUM: Final = ("cluster-quorum", "2026-11-22T00:04Z")
#: The defaults: rates of a small machine, by ./scripts/bench SUBJECT.
MEASURED: Final = Rates(
    api_adds=_measured(8_010, *_ADDS, "many counters, 64 connections, the service"),
    api_gets=_measured(23_497, *_GETS, "64 connections"),
    node_adds=_measured(9_348, *_ADDS, "many counters, 256 connections, the driver alone"),
    # All three nodes and the API process shared one machine: it wrote all the copies.
    node_copies=_measured(3 * 922, *_QUORUM, "many counters, 922/s * 3 copies"),
    node_rollups=_measured(5_853, *_ROLLUPS, "two workers over one node"),
    worker_rollups=_measured(4_420, *_ROLLUPS, "one worker, one large window"),
    cache_keys=_measured(23_497, *_GETS, "64 connections: at least"),
)
RATE_NAMES: Final = tuple(each.name for each in fields(Rates))


def read_rates(text: str, source: str) -> Rates:
    """Parse *text*, the content of *source*; use the defaults for missing rates.

    Raises PlanError if the format is wrong, a rate is unknown, or there is none.
    """
    report = _report(text, source)
    when, embedded = report.get("measured_at"), report.get("store") == "sqlite"
    origin = f"{source}, {when}" if isinstance(when, str) else source
    if embedded:
        origin += ", over SQLite"
    found = {
        name: Rate(value, origin, embedded)
        for name, value in _figures(report, source).items()
        if name in RATE_NAMES
    }
    if not found:
        raise PlanError(f"{source}: no figure is there; known are: {', '.join(RATE_NAMES)}")
    return replace(MEASURED, **found)


def _figures(report: Mapping[str, Any], source: str) -> Mapping[str, Fraction]:
    """Return the value of each figure by its name."""
    figures = report.get("figures")
    if not isinstance(figures, list):
        raise PlanError(f"{source}: figures is no list")
    return dict(_figure(each, source) for each in figures)


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
    """Return the name and the value of one figure."""
    if not isinstance(figure, dict):
        raise PlanError(f"{source}: a figure is {str(figure)[:40]!r}, and no object")
    name, unit = figure.get("what"), figure.get("unit")
    value: Any = figure.get("value")
    if not isinstance(name, str) or name not in (*RATE_NAMES, *_OTHERS):
        raise PlanError(f"{source}: what is {str(name)[:40]!r}; known are: {', '.join(RATE_NAMES)}")
    wanted = _OTHERS.get(name, "/s")
    if unit != wanted:
        raise PlanError(
            f"{source}: the unit of {name} is {str(unit)[:40]!r}; it must be {wanted!r}"
        )
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    number = value if is_number else 0
    # NaN fails this comparison, too.
    if not 0 < number <= RATE_MAX_PER_S:
        raise PlanError(
            f"{source}: {name} is {str(value)[:40]}; it must be more than 0{wanted} and at most"
            f" {format_number(RATE_MAX_PER_S)}{wanted}"
        )
    return name, Fraction(number)
