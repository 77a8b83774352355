"""Compute how many parts of each kind a cluster needs, and show every step of the arithmetic.

Rates are measured: the defaults on a small machine, others come from a file in the format of
``benchmarks/results.json``: a list of reports, of which the one whose ``subject`` is ``capacity``
has a figure for each rate. Values that were not measured are assumptions, which
:class:`ClusterNeed` names and the caller can set. Pure functions, no I/O.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from math import ceil
from typing import Any, Final

from counter import limits
from counter.config.namespace_rules import EVENT_BUCKETS_MAX, Clients, contradictions
from counter.durations import format_duration
from counter.ops.planner import RATE_MAX_PER_S, PlanError, hold_duration, hold_number
from counter.quantities import NUMBER_MAX, format_bytes, format_number, format_share, plural
from counter.types import CounterType, Dataset, NamespaceSettings, PayloadCheck
from counter.windows import closing_lag

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


#: Size of an entry of memcached 1.6.18, a count or a token: its slab class has 152 bytes.
CACHE_ENTRY_BYTES: Final = 152
#: Bytes on the network without the headers of TCP, by ``ss`` over three nodes and a memcached,
#: 2026-11-23: an add by JSON with a fresh token and its answer; what its event costs between its
#: process and the nodes, and between the nodes for each further copy; a rollup; a cached token.
_ADD_BYTES: Final = 529
_EVENT_BYTES: Final = 473
_COPY_BYTES: Final = 549
_ROLLUP_BYTES: Final = 606
_CACHED_TOKEN_BYTES: Final = 87
_CACHED_COUNT_BYTES: Final = 139
_NETWORK: Final = "Network"
#: Two, so that one can be restarted while the other works.
PROCESSES_MIN: Final = 2
REPLICATION_MAX: Final = 16
_BYTES_MAX: Final = 10**18
#: A token is remembered twice as long as it may be retried: counter/storage/memcached/cache.py.
_GUARD_MARGIN: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNeed:
    """The requirements of a cluster, as one namespace that represents all.

    ``load`` is the share of its measured rate that each part may be used at; ``disk_use``, the
    share of ``disk_bytes`` that a node may fill, because compaction needs room; ``memory_bytes`` is
    the memory of one memcached; ``row_bytes`` is the size on disk of the rolled-up row of a
    counter's window, an assumption as ``event_bytes`` is.
    """

    adds_per_s: Fraction
    gets_per_s: Fraction
    counters: int
    dataset: Dataset
    settings: NamespaceSettings
    replication: int = 3
    event_bytes: int = 64
    row_bytes: int = 64
    disk_bytes: int = 10**12
    disk_use: Fraction = Fraction(1, 2)
    memory_bytes: int = 2**30
    load: Fraction = Fraction(7, 10)


@dataclass(frozen=True, slots=True)
class Step:
    """One line of the arithmetic: a name, the formula, and the result; *part* is the part of the
    cluster that it is about."""

    what: str
    arithmetic: str
    result: str
    part: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """The number of parts of each kind, and the arithmetic. Plain values, which survive JSON."""

    cassandra_nodes: int
    memcached_servers: int
    api_processes: int
    worker_processes: int
    deployments: int
    steps: tuple[Step, ...]


def plan_cluster(need: ClusterNeed, rates: Rates = MEASURED) -> ClusterPlan:
    """Compute how many of each part *need* takes, from *rates*. Raises PlanError past a bound.

    Counters rolled up per second are at most ``min(adds in a window, counters) / window``: each
    counter with adds costs one batch per window, however many adds it has. The rest is division.
    """
    _check(need)
    api = PartSum("API processes", need.load, PROCESSES_MIN)
    api.add("adds", need.adds_per_s, rates.api_adds.per_s)
    api.add("gets", need.gets_per_s, rates.api_gets.per_s)
    workers = PartSum("worker processes", need.load, PROCESSES_MIN)
    rollups_per_s = _rollups(need, workers)
    workers.add("rollups", rollups_per_s, rates.worker_rollups.per_s)
    nodes = PartSum("Cassandra nodes", need.load, need.replication)
    _nodes(need, rates, rollups_per_s, nodes)
    cache = PartSum("memcached servers", need.load, 1)
    _cache(need, rates, rollups_per_s, cache)
    api_processes, worker_processes = api.whole(), workers.whole()
    cassandra_nodes, memcached_servers = nodes.whole(), cache.whole()
    return ClusterPlan(
        cassandra_nodes=cassandra_nodes,
        memcached_servers=memcached_servers,
        api_processes=api_processes,
        worker_processes=worker_processes,
        deployments=max(1, ceil(Fraction(worker_processes, limits.LEASE_SLOTS))),
        steps=(
            *(*api.steps, *workers.steps, *nodes.steps, *cache.steps),
            *_network(need, rollups_per_s, cassandra_nodes),
        ),
    )


class PartSum:
    """The number of parts of one kind, and the steps of its computation."""

    def __init__(self, name: str, load: Fraction, least: int) -> None:
        self.steps: list[Step] = []
        self._name = name
        self._load = load
        self._least = least
        self._busy = Fraction(0)
        self._floors: list[Fraction] = []

    def show(self, what: str, arithmetic: str, result: str) -> None:
        self.steps.append(Step(what, arithmetic, result, self._name))

    def add(self, what: str, asked: Fraction, takes: Fraction) -> None:
        """Add a step: *asked* per second, if one part handles *takes*."""
        busy = asked / takes
        self._busy += busy
        self.show(
            f"busy with {what}",
            f"{format_number(asked)}/s / {format_number(takes)}/s",
            format_number(busy),
        )

    def fill(self, what: str, size: Fraction, room: Fraction, arithmetic: str) -> None:
        """Add a step: *size* bytes, if one part has *room*."""
        self._floors.append(size / room)
        self.show(f"for {what}", arithmetic, format_number(size / room))

    def whole(self) -> int:
        """Return how many are needed, at least the minimum."""
        loaded = self._busy / self._load
        needed = max(self._least, ceil(loaded), *map(ceil, self._floors))
        self.show(
            f"at {format_share(self._load)} load",
            f"{format_number(self._busy)} / {format_share(self._load)}",
            format_number(loaded),
        )
        others = "".join(f", {format_number(each)}" for each in self._floors)
        self.show(
            "needed",
            f"the largest of {format_number(loaded)}{others}, rounded up; at least {self._least}",
            f"{needed:,}",
        )
        return needed


def _rollups(need: ClusterNeed, shown: PartSum) -> Fraction:
    """Return the largest number of counters to roll up per second."""
    window = format_duration(need.settings.rollup_window_us)
    if need.settings.counter_type is CounterType.BEST_EFFORT:
        shown.show("rollups", "BEST_EFFORT keeps no events", "0/s")
        return Fraction(0)
    window_s = Fraction(need.settings.rollup_window_us, limits.SECOND)
    in_window = min(need.adds_per_s * window_s, Fraction(need.counters))
    per_s = in_window / window_s
    shown.show(
        "rollups, at most",
        f"min({format_number(need.adds_per_s)}/s * {window}, {format_number(need.counters)}"
        f" counters) / {window}",
        f"{format_number(per_s)}/s",
    )
    return per_s


def _nodes(need: ClusterNeed, rates: Rates, rollups_per_s: Fraction, nodes: PartSum) -> None:
    """Add the steps for Cassandra's writes and disk."""
    if need.settings.counter_type is CounterType.BEST_EFFORT:
        nodes.show("adds", "BEST_EFFORT counts in memcached", "0/s")
        return
    copies = need.replication
    nodes.show(
        "copies written",
        f"{format_number(need.adds_per_s)}/s * {copies}",
        f"{format_number(need.adds_per_s * copies)}/s",
    )
    takes = rates.node_adds if copies == 1 else rates.node_copies
    nodes.add("adds", need.adds_per_s * copies, takes.per_s)
    nodes.add(f"rollups, {copies} each", rollups_per_s * copies, rates.node_rollups.per_s)
    # A slice is dropped as a whole, when its youngest event reaches retention.
    kept_us = need.dataset.retention_us + need.dataset.slice_us
    kept = (
        f"({format_duration(need.dataset.retention_us)} + {format_duration(need.dataset.slice_us)})"
    )
    events = need.adds_per_s * kept_us / limits.SECOND * need.event_bytes * copies
    rows = rollups_per_s * kept_us / limits.SECOND * need.row_bytes * copies
    for what, per_s, each, size in (
        ("events", need.adds_per_s, need.event_bytes, events),
        ("window rows", rollups_per_s, need.row_bytes, rows),
    ):
        nodes.show(
            f"disk for {what}",
            f"{format_number(per_s)}/s * {kept} * {each} B * {copies}",
            format_bytes(size),
        )
    nodes.fill(
        "disk",
        events + rows,
        need.disk_bytes * need.disk_use,
        f"{format_bytes(events + rows)} /"
        f" ({format_bytes(need.disk_bytes)} * {format_share(need.disk_use)})",
    )


def _cache(need: ClusterNeed, rates: Rates, rollups_per_s: Fraction, cache: PartSum) -> None:
    """Add the steps for memcached's requests and memory."""
    counts, tokens = Fraction(need.counters), Fraction(0)
    if need.settings.counter_type is CounterType.BEST_EFFORT:
        cache.add("adds", need.adds_per_s, rates.cache_keys.per_s)
    elif need.settings.payload_check is PayloadCheck.GUARD:
        lag_us = need.settings.accept_limit_us + closing_lag(need.dataset)
        ttl_us = _GUARD_MARGIN * (need.settings.future_limit_us + lag_us)
        tokens = need.adds_per_s * ttl_us / limits.SECOND
        cache.add("tokens", need.adds_per_s, rates.cache_keys.per_s)
        cache.show(
            "tokens remembered",
            f"{format_number(need.adds_per_s)}/s * {format_duration(ttl_us)}",
            format_number(tokens),
        )
    cache.add("gets and rollups", need.gets_per_s + rollups_per_s, rates.cache_keys.per_s)
    size = (counts + tokens) * CACHE_ENTRY_BYTES
    cache.fill(
        "memory",
        size,
        Fraction(need.memory_bytes),
        f"({format_number(counts)} counts + {format_number(tokens)} tokens) *"
        f" {CACHE_ENTRY_BYTES} B / {format_bytes(need.memory_bytes)}",
    )


def _network(need: ClusterNeed, rollups_per_s: Fraction, nodes: int) -> Iterator[Step]:
    """Yield the steps for what crosses the network, in both directions together."""
    adds, copies = need.adds_per_s, need.replication - 1

    def summed(*terms: tuple[Fraction, int]) -> Fraction:
        return sum((rate * size for rate, size in terms), Fraction(0))

    def step(what: str, *terms: tuple[Fraction, int]) -> Step:
        shown = (f"{format_number(rate)}/s * {size:,} B" for rate, size in terms)
        return Step(what, " + ".join(shown), f"{format_bytes(summed(*terms))}/s", _NETWORK)

    yield step("clients", (adds, _ADD_BYTES))
    if need.settings.counter_type is CounterType.BEST_EFFORT:
        yield step("memcached", (adds, _CACHED_TOKEN_BYTES))
        return
    is_guarded = need.settings.payload_check is PayloadCheck.GUARD
    tokens = [(adds, _CACHED_TOKEN_BYTES)] if is_guarded else []
    yield step("memcached", *tokens, (rollups_per_s, _CACHED_COUNT_BYTES))
    outer = (adds, _EVENT_BYTES), (rollups_per_s, _ROLLUP_BYTES)
    inner = (adds + rollups_per_s, copies * _COPY_BYTES)
    yield step("processes and nodes", *outer)
    yield step("between nodes", inner)
    out, within = summed(*outer), summed(inner)
    yield Step(
        "a node, in and out",
        # What one node sends another receives.
        f"({format_bytes(out)}/s + 2 * {format_bytes(within)}/s) / {nodes:,}",
        f"{format_bytes((out + 2 * within) / nodes)}/s",
        _NETWORK,
    )


def _check(need: ClusterNeed) -> None:
    hold_number("adds", need.adds_per_s, 0, RATE_MAX_PER_S, "/s")
    hold_number("gets", need.gets_per_s, 0, RATE_MAX_PER_S, "/s")
    hold_number("counters", need.counters, 1, NUMBER_MAX)
    hold_number("replication", need.replication, 1, REPLICATION_MAX)
    check_storage(need.dataset, need.settings)
    for name in ("event", "row", "disk", "memory"):
        hold_number(f"{name}_size", getattr(need, f"{name}_bytes"), 1, _BYTES_MAX, " B")
    check_shares(need.load, need.disk_use)


def check_storage(dataset: Dataset, settings: NamespaceSettings) -> None:
    """Raise PlanError unless the settings of the dataset and the namespace are within bounds."""
    longest_us = limits.RETENTION_MAX_US
    hold_duration("retention", dataset.retention_us, limits.RETENTION_MIN_US, longest_us)
    hold_duration("slice", dataset.slice_us, limits.MINUTE, longest_us)
    hold_duration("time_bucket", dataset.time_bucket_us, limits.SECOND, longest_us)
    hold_number("event_buckets", dataset.event_buckets, 1, EVENT_BUCKETS_MAX)
    hold_duration("write_timeout", dataset.write_timeout_us, limits.MILLISECOND, limits.MINUTE)
    hold_duration("clock_skew_max", dataset.clock_skew_max_us, 0, limits.MINUTE)
    low_us, high_us = limits.ROLLUP_WINDOW_MIN_US, limits.ROLLUP_WINDOW_MAX_US
    hold_duration("rollup_window", settings.rollup_window_us, low_us, high_us)
    hold_number("shards", settings.shards, 1, limits.SHARDS_MAX)


def check_shares(load: Fraction, disk_use: Fraction = Fraction(1)) -> None:
    """Raise PlanError unless both are shares above 0."""
    for name, share in (("load", load), ("disk_use", disk_use)):
        if not 0 < share <= 1:
            raise PlanError(
                f"{name} is {format_share(share)}; it must be more than 0% and at most 100%"
            )


#: PostgreSQL 15 on 2 cores that were busy with other work, one process that appended 500 events at
#: a time, 2026-11-23; tests/postgresql/test_planned.py measures the sizes again.
POSTGRESQL_ADDS_PER_S: Final = 9_900
#: Bytes of an event of a 15-byte counter, with its index entries, and of a window row.
POSTGRESQL_EVENT_BYTES: Final = 270
POSTGRESQL_ROW_BYTES: Final = 122
#: Sessions for the operator, a backup and `counter` commands, beside those of the processes.
_SESSIONS_SPARE: Final = 20
#: PostgreSQL's own default of max_connections.
_SESSIONS_DEFAULT: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerNeed:
    """The requirements of a PostgreSQL server. ``load`` leaves the rest of its rate to rollups,
    reads and vacuum; ``connections`` are those of one process."""

    adds_per_s: Fraction
    gets_per_s: Fraction
    counters: int
    retention_us: int
    slice_us: int
    rollup_window_us: int
    server_per_s: Fraction
    event_bytes: int
    row_bytes: int
    disk_bytes: int
    disk_use: Fraction
    load: Fraction
    connections: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """What one PostgreSQL server needs, and the arithmetic. Plain values, which survive JSON."""

    api_processes: int
    servers: int
    max_connections: int
    steps: tuple[Step, ...]


def plan_postgresql(need: ServerNeed, rates: Rates = MEASURED) -> ServerPlan:
    """Compute what *need* takes of one server, and how many API processes, which roll up too.

    Raises PlanError past a bound. ``servers`` above 1 means that one is not enough.
    """
    _check_server(need)
    api = PartSum("API processes", need.load, PROCESSES_MIN)
    api.add("adds", need.adds_per_s, rates.api_adds.per_s)
    api.add("gets", need.gets_per_s, rates.api_gets.per_s)
    processes = api.whole()
    server = PartSum("PostgreSQL servers", need.load, 1)
    server.add("adds", need.adds_per_s, need.server_per_s)
    window_s = Fraction(need.rollup_window_us, limits.SECOND)
    rows_per_s = min(need.adds_per_s, need.counters / window_s)
    kept_s = Fraction(need.retention_us + need.slice_us, limits.SECOND)
    kept = f"({format_duration(need.retention_us)} + {format_duration(need.slice_us)})"
    total = Fraction(0)
    for what, per_s, each in (
        ("events", need.adds_per_s, need.event_bytes),
        ("window rows, at most", rows_per_s, need.row_bytes),
    ):
        size = per_s * kept_s * each
        total += size
        arithmetic = f"{format_number(per_s)}/s * {kept} * {each} B"
        server.show(f"disk for {what}", arithmetic, format_bytes(size))
    shown = f"{format_bytes(need.disk_bytes)} * {format_share(need.disk_use)}"
    room = need.disk_bytes * need.disk_use
    server.fill("disk", total, room, f"{format_bytes(total)} / ({shown})")
    servers = server.whole()
    sessions = processes * need.connections + _SESSIONS_SPARE
    step = Step(
        "max_connections",
        f"{processes:,} * {need.connections} + {_SESSIONS_SPARE}",
        f"{sessions:,}",
        "Settings",
    )
    return ServerPlan(
        api_processes=processes,
        servers=servers,
        max_connections=sessions,
        steps=(*server.steps, *api.steps, step),
    )


def postgresql_warnings(need: ServerNeed, plan: ServerPlan) -> tuple[str, ...]:
    """Return where one server, or its defaults, are not enough."""
    found: list[str] = []
    if plan.servers > 1:
        found.append(
            f"the load would take {plan.servers:,} such servers, and only one writes: plan with a"
            " larger one (--server-adds, --disk), keep events for less time, or use Cassandra,"
            " which grows with its nodes: counter plan cluster"
        )
    if plan.max_connections > _SESSIONS_DEFAULT:
        found.append(
            f"{plan.max_connections:,} connections are more than PostgreSQL's default of"
            f" {_SESSIONS_DEFAULT}: set max_connections, lower postgresql_connections, or put"
            " PgBouncer in between"
        )
    if need.server_per_s == POSTGRESQL_ADDS_PER_S:
        found.append(
            "the rates are those of a machine with 2 cores that shared them with the load; those of"
            " API processes are over Cassandra: measure your own, and give --server-adds"
        )
    return tuple(found)


def _check_server(need: ServerNeed) -> None:
    hold_number("adds", need.adds_per_s, 0, RATE_MAX_PER_S, "/s")
    hold_number("gets", need.gets_per_s, 0, RATE_MAX_PER_S, "/s")
    hold_number("server_adds", need.server_per_s, 1, RATE_MAX_PER_S, "/s")
    hold_number("counters", need.counters, 1, NUMBER_MAX)
    hold_number("connections", need.connections, 2, 1_000)
    longest_us = limits.RETENTION_MAX_US
    hold_duration("retention", need.retention_us, limits.RETENTION_MIN_US, longest_us)
    hold_duration("slice", need.slice_us, limits.MINUTE, longest_us)
    low_us, high_us = limits.ROLLUP_WINDOW_MIN_US, limits.ROLLUP_WINDOW_MAX_US
    hold_duration("rollup_window", need.rollup_window_us, low_us, high_us)
    for name in ("event", "row", "disk"):
        hold_number(f"{name}_size", getattr(need, f"{name}_bytes"), 1, _BYTES_MAX, " B")
    check_shares(need.load, need.disk_use)


def cluster_warnings(
    need: ClusterNeed,
    plan: ClusterPlan,
    clients: Clients,
    rates: Rates = MEASURED,
    *,
    lease_time_us: int = limits.LEASE_TIME_US,
) -> tuple[str, ...]:
    """Return contradictions of the settings with each other, the clients or the plan."""
    return (
        *contradictions(need.settings, need.dataset, clients, lease_time_us=lease_time_us),
        *_plan_problems(need, plan),
        *_rate_problems(rates),
    )


def _plan_problems(need: ClusterNeed, plan: ClusterPlan) -> Iterator[str]:
    workers, shards = plan.worker_processes, need.settings.shards
    if need.settings.counter_type is not CounterType.BEST_EFFORT and workers > shards:
        yield (
            f"{workers} workers share {plural(shards, 'shard')} of a namespace:"
            f" {workers - shards} of them would find nothing to do; create it with at least"
            f" {workers} shards"
        )
    if workers > limits.LEASE_SLOTS:
        fewer = fewer_rollups(need.adds_per_s, need.counters, need.settings)
        yield (
            f"{workers} workers are needed and {limits.LEASE_SLOTS} at most share the work:"
            f" {fewer}, or divide the counters among"
            f" {plural(plan.deployments, 'deployment')}, each with a cluster of its own"
        )


def fewer_rollups(adds_per_s: Fraction, counters: int, settings: NamespaceSettings) -> str:
    """Return how a counter is rolled up less often."""
    window_us = settings.rollup_window_us
    if adds_per_s * window_us >= counters * limits.SECOND:
        return "lengthen rollup_window"
    # As long as each add in a window is to another counter, a longer one saves nothing.
    longest_us = limits.ROLLUP_WINDOW_MAX_US
    if adds_per_s * longest_us <= counters * limits.SECOND:
        return "no rollup_window helps, because each add in it is to another counter"
    least_us = ceil(counters * limits.SECOND / adds_per_s)
    return f"make rollup_window longer than {format_duration(least_us)}"


def _rate_problems(rates: Rates) -> Iterator[str]:
    used = {name: getattr(rates, name) for name in MEASURED.__dataclass_fields__}
    embedded = [name for name, rate in used.items() if rate.embedded]
    if embedded:
        yield (
            f"{', '.join(embedded)} were measured over SQLite, which takes more than Cassandra"
            " does: the plan is too small; measure with ./scripts/capacity --store cassandra"
        )
    assumed = [name for name, rate in used.items() if rate == getattr(MEASURED, name)]
    if assumed:
        yield (
            f"rates of a machine with 2 cores that shared them with the load are used for"
            f" {', '.join(assumed)}: measure your own with ./scripts/capacity, and give"
            " --rates FILE"
        )
