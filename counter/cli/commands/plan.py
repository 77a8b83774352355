"""Run ``counter plan ...``: parse the needs and show the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from fractions import Fraction
from itertools import groupby, islice
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

from cyclopts import Parameter

from counter import limits
from counter.cli.terminal import Json, exit_on_error, flag, json_line, print_out
from counter.config.namespace_rules import Clients
from counter.durations import format_duration, parse_iso_duration
from counter.errors import StartupError
from counter.ops import planner
from counter.ops.cluster_planner import (
    MEASURED,
    POSTGRESQL_ADDS_PER_S,
    POSTGRESQL_EVENT_BYTES,
    POSTGRESQL_ROW_BYTES,
    RATE_NAMES,
    ClusterNeed,
    Rates,
    ServerNeed,
    Step,
    cluster_warnings,
    plan_cluster,
    plan_postgresql,
    postgresql_warnings,
    read_rates,
)
from counter.ops.dynamodb_planner import DynamodbNeed, plan_dynamodb
from counter.quantities import (
    format_bytes,
    format_number,
    format_share,
    parse_count,
    parse_number,
    parse_rate,
    parse_share,
    parse_size,
)
from counter.types import CounterType, Dataset, NamespaceSettings, PayloadCheck

UNLIMITED: Final = "unlimited"


def _one_of(kind: type[StrEnum]) -> Callable[[str], StrEnum]:
    """Return the parser of a member of *kind*."""

    def parse(text: str) -> StrEnum:
        if text not in list(kind):
            raise ValueError(f"{text[:40]!r} is none of {', '.join(kind)}")
        return kind(text)

    return parse


@dataclass(frozen=True, slots=True)
class _Kind:
    """How the text of a flag is parsed, and the unit of the value, which ends its name."""

    parse: Callable[[str], Any]
    unit: str = ""


#: How the value of a flag is parsed, by the word for it in the help.
_KINDS: Final[Mapping[str, _Kind]] = {
    "DURATION": _Kind(parse_iso_duration, "_us"),
    "DURATION|unlimited": _Kind(
        lambda text: None if text == UNLIMITED else parse_iso_duration(text), "_us"
    ),
    "RATE": _Kind(parse_rate, "_per_s"),
    "SIZE": _Kind(parse_size, "_bytes"),
    "SHARE": _Kind(parse_share),
    "NUMBER": _Kind(parse_count),
    "PRICE": _Kind(parse_number),
    "EVENTS": _Kind(lambda text: Fraction(parse_count(text))),
    "TYPE": _Kind(_one_of(CounterType)),
    "off|guard|strict": _Kind(_one_of(PayloadCheck)),
}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DedupFlags:
    """Durations are written like 10s or PT10S, rates like 80/s, shares like 20%."""

    rate: Annotated[str, flag("The rate of tokens: 80/s", "RATE")]
    caller: Annotated[str, flag("How long a caller may wait before it sends", "DURATION")] = "0s"
    retry: Annotated[str, flag("How long it may retry", "DURATION")] = "0s"
    network: Annotated[str, flag("How long a message may be in flight", "DURATION")] = "0s"
    clock: Annotated[str, flag("How far two clocks may be apart", "DURATION")] = "0s"
    ttl: Annotated[
        str | None, flag("How long tokens are kept [the sum of these four]", "DURATION")
    ] = None
    margin: Annotated[str, flag("The share of further tokens at peaks", "SHARE")] = "0%"
    duplicates: Annotated[str, flag("Repetitions, as a share of the rate", "SHARE")] = "0%"
    incident: Annotated[
        str, flag("How long an incident with many repetitions lasts", "DURATION")
    ] = "0s"
    record_size: Annotated[str, flag("The stored size of a token", "SIZE")] = "200B"
    bits: Annotated[str, flag("How many random bits a token has", "NUMBER")] = str(
        planner.TOKEN_BITS
    )
    json: Json = False


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class StorageFlags:
    """Durations are written like 7d or P7D."""

    retention: Annotated[str, flag("How long events are kept", "DURATION|unlimited")] = "7d"
    read_interval: Annotated[str, flag("The span of time that a read covers", "DURATION")] = "PT24H"
    events_per_day: Annotated[str, flag("Events of the one counter", "EVENTS")]
    event_size: Annotated[str, flag("The size of an event on disk", "SIZE")] = "64B"
    accept_limit: Annotated[
        str | None,
        flag("How old an event may be when it is written [10m; 0s if unlimited]", "DURATION"),
    ] = None
    json: Json = False


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ClusterFlags:
    """The load; the settings of its namespaces; the behavior of its clients."""

    adds: Annotated[str, flag("The peak rate of single adds: 75000/s", "RATE")]
    counters: Annotated[str, flag("Counters in use: 1e6", "NUMBER")]
    gets: Annotated[str, flag("Gets of cached counts", "RATE")] = "0/s"
    rates: Annotated[str | None, flag("A file of measured rates [a small machine's]", "FILE")] = (
        None
    )
    load: Annotated[str, flag("The share of its rate at which each part is used", "SHARE")] = "70%"

    retention: Annotated[str, flag("How long events are kept", "DURATION")] = "7d"
    slice: Annotated[str | None, flag("The span of one event table [by retention]", "DURATION")] = (
        None
    )
    time_bucket: Annotated[
        str | None, flag("The span of a partition [1h, or the slice]", "DURATION")
    ] = None
    event_buckets: Annotated[str, flag("Partitions that share a time bucket", "NUMBER")] = "1"
    replication: Annotated[str, flag("Copies of the data", "NUMBER")] = "3"
    write_timeout: Annotated[str, flag("How long a write may take", "DURATION")] = "2s"
    clock_skew_max: Annotated[str, flag("How far a process's clock may be off", "DURATION")] = (
        "500ms"
    )
    event_size: Annotated[str, flag("The size of an event on disk, per copy", "SIZE")] = "64B"
    row_size: Annotated[str, flag("The size of a rolled-up window on disk, per copy", "SIZE")] = (
        "64B"
    )
    disk: Annotated[str, flag("The disk of a Cassandra node", "SIZE")] = "1TB"
    disk_use: Annotated[str, flag("How much of it may be filled", "SHARE")] = "50%"
    memory: Annotated[str, flag("The memory of a memcached", "SIZE")] = "1GiB"

    counter_type: Annotated[str, flag("ACCURATE, EVENTUAL or BEST_EFFORT", "TYPE")] = "EVENTUAL"
    rollup_window: Annotated[str, flag("The length of a rollup window", "DURATION")] = "10s"
    accept_limit: Annotated[
        str, flag("How old a token may be before it is resolved", "DURATION")
    ] = "5s"
    future_limit: Annotated[str | None, flag("How far ahead a token may be [5s]", "DURATION")] = (
        None
    )
    shards: Annotated[str, flag("Shards that rollup workers share", "NUMBER")] = "16"
    payload_check: Annotated[str, flag("off, guard or strict", "off|guard|strict")] = "guard"
    key_ttl: Annotated[
        str | None, flag("How long an arbitrary key is remembered [1d]", "DURATION")
    ] = None
    lease_time: Annotated[str, flag("How long a silent worker keeps its shards", "DURATION")] = (
        "10s"
    )

    retry: Annotated[str | None, flag("How long clients retry an add", "DURATION")] = None
    client_clock: Annotated[str | None, flag("How far clients' clocks may be off", "DURATION")] = (
        None
    )
    max_staleness: Annotated[str | None, flag("How old a count may be by default", "DURATION")] = (
        None
    )
    hottest: Annotated[str | None, flag("Adds of the busiest counter: 100/s", "RATE")] = None
    json: Json = False


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PostgresqlFlags:
    """The load, and the server."""

    adds: Annotated[str, flag("The peak rate of single adds: 2000/s", "RATE")]
    counters: Annotated[str, flag("Counters in use: 1e6", "NUMBER")]
    gets: Annotated[str, flag("Gets of cached counts", "RATE")] = "0/s"
    server_adds: Annotated[
        str,
        flag("Events that one server takes [a small, busy machine's]", "RATE"),
    ] = f"{POSTGRESQL_ADDS_PER_S}/s"
    load: Annotated[str, flag("The share of its rate at which each part is used", "SHARE")] = "50%"
    retention: Annotated[str, flag("How long events are kept", "DURATION")] = "7d"
    slice: Annotated[str | None, flag("The span of one event table [by retention]", "DURATION")] = (
        None
    )
    rollup_window: Annotated[str, flag("The length of a rollup window", "DURATION")] = "10s"
    event_size: Annotated[str, flag("The size of an event with its index", "SIZE")] = (
        f"{POSTGRESQL_EVENT_BYTES}B"
    )
    row_size: Annotated[str, flag("The size of a rolled-up window", "SIZE")] = (
        f"{POSTGRESQL_ROW_BYTES}B"
    )
    disk: Annotated[str, flag("The server's disk", "SIZE")] = "1TB"
    disk_use: Annotated[str, flag("How much of it may be filled", "SHARE")] = "70%"
    connections: Annotated[str, flag("postgresql_connections of a process", "NUMBER")] = "8"
    json: Json = False


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DynamodbFlags:
    """The load; the settings of its namespaces; prices, which differ by region."""

    adds: Annotated[str, flag("The rate of single adds: 1000/s", "RATE")]
    counters: Annotated[str, flag("Counters in use: 1e6", "NUMBER")]
    dirty: Annotated[
        str | None, flag("Counters with adds in one window [as many as there can be]", "NUMBER")
    ] = None
    hottest: Annotated[
        str | None, flag("Adds of the busiest counter: 100/s [all are alike]", "RATE")
    ] = None
    gets: Annotated[str, flag("Gets of cached counts", "RATE")] = "0/s"
    uncached: Annotated[str, flag("Gets of counts that are not cached", "RATE")] = "0/s"
    accurate: Annotated[str, flag("Accurate gets", "RATE")] = "0/s"
    atomic_adds: Annotated[str, flag("Atomic adds", "RATE")] = "0/s"
    atomic_items: Annotated[str, flag("Counters of an atomic add", "NUMBER")] = "2"
    name_size: Annotated[str, flag("The size of a counter's name", "SIZE")] = "16B"

    retention: Annotated[str, flag("How long events are kept", "DURATION")] = "7d"
    slice: Annotated[str | None, flag("The span of one event table [by retention]", "DURATION")] = (
        None
    )
    event_buckets: Annotated[str, flag("Partitions of a counter's events", "NUMBER")] = "4"
    write_timeout: Annotated[str, flag("How long a write may take", "DURATION")] = "2s"
    clock_skew_max: Annotated[str, flag("How far a process's clock may be off", "DURATION")] = (
        "1500ms"
    )
    rollup_window: Annotated[str, flag("The length of a rollup window", "DURATION")] = "10s"
    accept_limit: Annotated[
        str, flag("How old a token may be before it is resolved", "DURATION")
    ] = "5s"
    shards: Annotated[str, flag("Shards that rollup workers share", "NUMBER")] = "16"

    processes: Annotated[str | None, flag("API processes [by their rates]", "NUMBER")] = None
    rates: Annotated[str | None, flag("A file of measured rates [a small machine's]", "FILE")] = (
        None
    )
    load: Annotated[str, flag("The share of its rate at which a process is used", "SHARE")] = "70%"
    write_price: Annotated[str | None, flag("Price of a million write units", "PRICE")] = None
    read_price: Annotated[str | None, flag("Price of a million read units", "PRICE")] = None
    storage_price: Annotated[str | None, flag("Price of a GB for a month", "PRICE")] = None
    json: Json = False


def dedup(flags: DedupFlags) -> None:
    """Print how many tokens must be kept, for how long, and their size."""
    with exit_on_error():
        need = planner.DedupNeed(**_values(flags))
        plan = planner.plan_dedup(need)
        warnings = planner.dedup_warnings(need)
        body = {**asdict(plan), "warnings": warnings}
        _show(_lines(_dedup_steps(need, plan)), body, warnings, json=flags.json)


def storage(flags: StorageFlags) -> None:
    """Print how the events of one counter should be split into tables, intervals and buckets."""
    with exit_on_error():
        need = planner.StorageNeed(**_values(flags))
        plan = planner.plan_storage(need)
        body = asdict(plan)
        text = _lines(Step(k, "", f"{v:,}") for k, v in body.items())
        _show(text, body, planner.storage_warnings(need, plan), json=flags.json)


def cluster(flags: ClusterFlags) -> None:
    """Print how many Cassandra nodes, memcached servers, API and worker processes are needed,
    and why."""
    with exit_on_error():
        values = _values(flags)
        need, clients = _cluster_need(values)
        rates = MEASURED if flags.rates is None else _rates(flags.rates)
        plan = plan_cluster(need, rates)
        lease_time_us = values["lease_time_us"]
        warnings = cluster_warnings(need, plan, clients, rates, lease_time_us=lease_time_us)
        used = {name: getattr(rates, name) for name in RATE_NAMES}
        shown_rates = {
            name: {"per_second": float(rate.per_s), "source": rate.source}
            for name, rate in used.items()
        }
        measured = (
            Step(k, f"({v.source})", f"{format_number(v.per_s)}/s") for k, v in used.items()
        )
        parts = "\n\n".join(_sections(plan.steps))
        text = f"{parts}\n\nRates of one\n{_lines(measured, '', indent=2)}"
        body = {**asdict(plan), "rates": shown_rates, "warnings": warnings}
        _show(text, body, warnings, json=flags.json)


def postgresql(flags: PostgresqlFlags) -> None:
    """Print whether one PostgreSQL server is enough, its disk and connections, and how many API
    processes are needed, and why."""
    with exit_on_error():
        values = _values(flags)
        values["server_per_s"] = values.pop("server_adds_per_s")
        need = ServerNeed(**values | {"slice_us": _slice_us(values)})
        plan = plan_postgresql(need)
        text = "\n\n".join(_sections(plan.steps))
        warnings = postgresql_warnings(need, plan)
        _show(text, {**asdict(plan), "warnings": warnings}, warnings, json=flags.json)


def dynamodb(flags: DynamodbFlags) -> None:
    """Print the write and read units that DynamoDB takes, by what causes them, and which of its
    limits breaks first."""
    with exit_on_error():
        values = _values(flags)
        # What DynamoDB's units do not depend on.
        others = {"time_bucket_us": None, "future_limit_us": None, "key_ttl_us": None}
        dataset = _dataset(values | others)
        settings = _settings(
            values
            | others
            | {"counter_type": CounterType.EVENTUAL, "payload_check": PayloadCheck.OFF},
            dataset,
        )
        known = DynamodbNeed.__dataclass_fields__
        own = {name: value for name, value in values.items() if name in known}
        need = DynamodbNeed(**own, dataset=dataset, settings=settings)
        plan = plan_dynamodb(need, MEASURED if flags.rates is None else _rates(flags.rates))
        _show("\n\n".join(_sections(plan.steps)), asdict(plan), plan.warnings, json=flags.json)


def _values(
    flags: DedupFlags | StorageFlags | ClusterFlags | PostgresqlFlags | DynamodbFlags,
) -> dict[str, Any]:
    """Return the values of *flags* by name and unit, such as ``caller_us``.

    Raises StartupError with every problem.
    """
    values: dict[str, Any] = {}
    problems: list[str] = []
    for name, hint in get_type_hints(type(flags), include_extras=True).items():
        text = getattr(flags, name)
        for parameter in getattr(hint, "__metadata__", ()):
            kind = _KINDS.get(parameter.metavar)
            if kind is None:
                continue
            try:
                value = None if text is None else kind.parse(text)
            except ValueError as error:
                problems.append(f"--{name.replace('_', '-')}: {error}")
            else:
                values[f"{name.removesuffix('_size')}{kind.unit}"] = value
    if problems:
        raise StartupError("\n".join(problems))
    return values


def _show(text: str, body: Mapping[str, Any], warnings: Iterable[str], *, json: bool) -> None:
    print_out(json_line(body) if json else text, warnings)


def _dedup_steps(need: planner.DedupNeed, plan: planner.DedupPlan) -> Sequence[Step]:
    rate, ttl = f"{format_number(need.rate_per_s)}/s", f"{format_number(plan.ttl_seconds)} s"
    parts = (need.caller_us, need.retry_us, need.network_us, need.clock_us)
    total = " + ".join(map(format_duration, parts))
    duplicates = f"{format_number(plan.duplicates_per_second)}/s"
    keys, size = format_number(plan.keys), format_bytes(need.record_bytes)
    bound = f"n (n - 1) / (2 * 2^{need.bits})"
    return (
        Step("T_ttl", total if need.ttl_us is None else "given", ttl),
        Step("keys", f"{format_number(1 + need.margin)} * {rate} * {ttl}", keys),
        Step("bytes held", f"{keys} * {size}", format_bytes(plan.bytes_held)),
        Step("keys a day", f"{rate} * 86,400 s", format_number(plan.keys_per_day)),
        Step(
            "bytes a day",
            f"{format_number(plan.keys_per_day)} * {size}",
            format_bytes(plan.bytes_per_day),
        ),
        Step("duplicates", f"{format_share(need.duplicates)} of {rate}", duplicates),
        Step(
            "duplicates in an incident",
            f"{duplicates} * {format_duration(need.incident_us)}",
            format_number(plan.duplicates_in_incident),
        ),
        Step("collision probability", f"{bound}, n = {keys}", f"{plan.collision_probability:.3g}"),
        Step("shards by xxh64(token)", "at most 4 MiB each", f"{plan.shards:,}"),
        Step("keys a shard", f"{keys} / {plan.shards:,}", format_number(plan.keys_per_shard)),
    )


def _cluster_need(values: Mapping[str, Any]) -> tuple[ClusterNeed, Clients]:
    """Return the needs, and the behavior of the clients."""
    dataset = _dataset(values)
    own = ("adds_per_s", "gets_per_s", "counters", "replication", "event_bytes", "row_bytes")
    more = ("disk_bytes", "disk_use", "memory_bytes", "load")
    need = ClusterNeed(
        dataset=dataset,
        settings=_settings(values, dataset),
        **{name: values[name] for name in (*own, *more)},
    )
    clients = Clients(
        retry_us=values["retry_us"],
        clock_us=values["client_clock_us"],
        max_staleness_us=values["max_staleness_us"],
        hottest_per_s=values["hottest_per_s"],
        event_bytes=values["event_bytes"],
    )
    return need, clients


def _slice_us(values: Mapping[str, Any]) -> int:
    """Return the slice that is given, or else the one for the retention."""
    retention_us, slice_us = values["retention_us"], values["slice_us"]
    if slice_us is not None:
        return int(slice_us)
    if retention_us < planner.RETENTION_SLICED_MIN_US:
        raise StartupError(
            f"retention is {format_duration(retention_us)}; a slice is chosen from 6h on:"
            " give --slice"
        )
    return planner.slice_for(retention_us)


def _dataset(values: Mapping[str, Any]) -> Dataset:
    retention_us, slice_us = values["retention_us"], _slice_us(values)
    bucket_us = values["time_bucket_us"]
    if bucket_us is None:
        bucket_us = slice_us if slice_us % limits.HOUR else limits.HOUR
    return Dataset(
        id=0,
        name="default",
        retention_us=retention_us,
        slice_us=slice_us,
        time_bucket_us=bucket_us,
        event_buckets=values["event_buckets"],
        write_timeout_us=values["write_timeout_us"],
        clock_skew_max_us=values["clock_skew_max_us"],
    )


def _settings(values: Mapping[str, Any], dataset: Dataset) -> NamespaceSettings:
    future_us, key_ttl_us = values["future_limit_us"], values["key_ttl_us"]
    if future_us is None:
        future_us = max(5 * limits.SECOND, 2 * dataset.clock_skew_max_us)
    if key_ttl_us is None:
        key_ttl_us = min(limits.DAY, dataset.retention_us // 2)
    return NamespaceSettings(
        counter_type=values["counter_type"],
        dataset=dataset.name,
        accept_limit_us=values["accept_limit_us"],
        future_limit_us=future_us,
        rollup_window_us=values["rollup_window_us"],
        shards=values["shards"],
        payload_check=values["payload_check"],
        key_ttl_us=key_ttl_us,
        cache_ttl_us=10 * limits.SECOND,
    )


def _rates(name: str) -> Rates:
    try:
        return read_rates(Path(name).read_text(encoding="utf-8-sig"), name)
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"--rates: {name!r} cannot be read: {error}") from error


def _sections(steps: Iterable[Step]) -> Iterator[str]:
    """Format the steps of each part below its name and last result, in aligned columns."""
    rows = tuple(steps)
    lines = iter(_lines(rows, indent=2).splitlines())
    for part, found in groupby(rows, key=attrgetter("part")):
        mine = tuple(found)
        yield "\n".join([f"{part}: {mine[-1].result}", *islice(lines, len(mine))])


def _lines(steps: Iterable[Step], sign: str = "= ", indent: int = 0) -> str:
    """Format the steps in columns: name, arithmetic, result."""
    rows = tuple(steps)
    name, middle = (max(len(getattr(each, of)) for each in rows) for of in ("what", "arithmetic"))
    gap = 2 if middle else 0
    return "\n".join(
        f"{'':{indent}}{row.what:<{name}}  {row.arithmetic:<{middle}}{'':{gap}}{sign}{row.result}"
        for row in rows
    )
