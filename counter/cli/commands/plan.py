"""Run ``counter plan ...``: parse the needs and show the plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from itertools import groupby, islice
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

from cyclopts import Parameter

from counter import limits
from counter.cli.terminal import Json, exit_on_error, flag, print_out
from counter.config.namespace_rules import Clients
from counter.durations import format_duration, parse_iso_duration
from counter.errors import StartupError
from counter.ops import planner
from counter.ops.cluster_planner import ClusterNeed, Step, cluster_warnings, plan_cluster
from counter.ops.measured_rates import MEASURED, Rates, read_rates
from counter.quantities import (
    format_bytes,
    format_number,
    format_share,
    parse_count,
    parse_rate,
    parse_share,
    parse_size,
)
from counter.types import CounterType, Dataset, NamespaceSettings, PayloadCheck

UNLIMITED: Final = "unlimited"

_Value = TypeVar("_Value")
_Choice = TypeVar("_Choice", CounterType, PayloadCheck)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DedupFlags:
    """Durations are written like 10s or PT10S, rates like 80/s, shares like 20%."""

    rate: Annotated[str, flag("Tokens that come: 80/s")]
    caller: Annotated[str, flag("How long a caller may wait before it sends")] = "0s"
    retry: Annotated[str, flag("How long it may go on to send again")] = "0s"
    network: Annotated[str, flag("How long a message may be under way")] = "0s"
    clock: Annotated[str, flag("How far two clocks may be apart")] = "0s"
    ttl: Annotated[str | None, flag("How long tokens are kept [the sum of these four]")] = None
    margin: Annotated[str, flag("How many more there may be at times")] = "0%"
    duplicates: Annotated[str, flag("Repetitions, as a share of the rate")] = "0%"
    incident: Annotated[str, flag("How long a time of many repetitions lasts")] = "0s"
    record_size: Annotated[str, flag("What a token takes where it is kept")] = "200B"
    bits: Annotated[str, flag("How many random bits a token has")] = str(planner.TOKEN_BITS)
    json: Json = False


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class StorageFlags:
    """Durations are written like 7d or P7D."""

    retention: Annotated[str, flag("How long events are kept, or unlimited")] = "7d"
    read_interval: Annotated[str, flag("The span of time that a read covers")] = "PT24H"
    events_per_day: Annotated[str, flag("Events of the one counter")]
    event_size: Annotated[str, flag("What an event takes on disk")] = "64B"
    accept_limit: Annotated[
        str | None, flag("How old an event may be that is written [10m; 0s if unlimited]")
    ] = None
    json: Json = False


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ClusterFlags:
    """The load; the settings of its namespaces; the behavior of its clients."""

    adds: Annotated[str, flag("Single adds, at the busiest: 75000/s")]
    counters: Annotated[str, flag("Counters in use: 1e6")]
    gets: Annotated[str, flag("Gets of cached counts")] = "0/s"
    rates: Annotated[str | None, flag("A file of measured rates [a small machine's]")] = None
    load: Annotated[str, flag("How much of its rate each part may be used at")] = "70%"

    retention: Annotated[str, flag("How long events are kept")] = "7d"
    slice: Annotated[str | None, flag("The span of one event table [by retention]")] = None
    time_bucket: Annotated[str | None, flag("The span of a partition [1h, or the slice]")] = None
    event_buckets: Annotated[str, flag("Partitions that share a time bucket")] = "1"
    replication: Annotated[str, flag("Copies of the data")] = "3"
    write_timeout: Annotated[str, flag("How long a write may take")] = "2s"
    clock_skew_max: Annotated[str, flag("How far a process's clock may be off")] = "500ms"
    event_size: Annotated[str, flag("What an event takes on disk, a copy")] = "64B"
    row_size: Annotated[str, flag("What a rolled-up window takes on disk, a copy")] = "64B"
    disk: Annotated[str, flag("The disk of a Cassandra node")] = "1TB"
    disk_use: Annotated[str, flag("How much of it may be filled")] = "50%"
    memory: Annotated[str, flag("The memory of a memcached")] = "1GiB"

    counter_type: Annotated[str, flag("ACCURATE, EVENTUAL or BEST_EFFORT")] = "EVENTUAL"
    rollup_window: Annotated[str, flag("How finely time is cut")] = "10s"
    accept_limit: Annotated[str, flag("How old a token may be before it is resolved")] = "5s"
    future_limit: Annotated[str | None, flag("How far ahead a token may be [5s]")] = None
    shards: Annotated[str, flag("Parts that workers share")] = "16"
    payload_check: Annotated[str, flag("off, guard or strict")] = "guard"
    key_ttl: Annotated[str | None, flag("How long an arbitrary key is remembered [1d]")] = None
    lease_time: Annotated[str, flag("How long a silent worker keeps its shards")] = "10s"

    retry: Annotated[str | None, flag("How long clients go on to send an add again")] = None
    client_clock: Annotated[str | None, flag("How far clients' clocks may be off")] = None
    max_staleness: Annotated[str | None, flag("How old a count may be by default")] = None
    hottest: Annotated[str | None, flag("Adds of the busiest counter: 100/s")] = None
    json: Json = False


def dedup(flags: DedupFlags) -> None:
    """Print how many tokens must be kept, for how long, and their size."""
    with exit_on_error():
        need = _planned(lambda: _dedup_need(flags))
        plan = _planned(lambda: planner.plan_dedup(need))
        warnings = planner.dedup_warnings(need)
        if flags.json:
            print_out(_json({**asdict(plan), "warnings": warnings}), warnings)
        else:
            print_out(_lines(_dedup_steps(need, plan)), warnings)


def storage(flags: StorageFlags) -> None:
    """Print how the events of one counter should be split into tables, intervals and buckets."""
    with exit_on_error():
        need = _planned(lambda: _storage_need(flags))
        plan = _planned(lambda: planner.plan_storage(need))
        body = asdict(plan)
        shown = (
            _json(body) if flags.json else _lines(Step(k, "", f"{v:,}") for k, v in body.items())
        )
        print_out(shown, planner.storage_warnings(need, plan))


def cluster(flags: ClusterFlags) -> None:
    """Print how many Cassandra nodes, memcached servers, API and worker processes are needed,
    and why."""
    with exit_on_error():
        need, clients, lease_time_us = _planned(lambda: _cluster_need(flags))
        rates = MEASURED if flags.rates is None else _planned(lambda: _rates(str(flags.rates)))
        plan = _planned(lambda: plan_cluster(need, rates))
        warnings = cluster_warnings(need, plan, clients, rates, lease_time_us=lease_time_us)
        used = {each.name: getattr(rates, each.name) for each in fields(Rates)}
        if flags.json:
            told_rates = {
                name: {"per_second": float(rate.per_s), "source": rate.source}
                for name, rate in used.items()
            }
            body = {**asdict(plan), "rates": told_rates, "warnings": warnings}
            print_out(_json(body), warnings)
            return
        measured = (
            Step(k, f"({v.source})", f"{format_number(v.per_s)}/s") for k, v in used.items()
        )
        parts = "\n\n".join(_sections(plan.steps))
        print_out(f"{parts}\n\nRates of one\n{_lines(measured, '', indent=2)}", warnings)


class _Texts:
    """Parses texts, and reports all that are invalid at once."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def read(self, name: str, text: str, parse: Callable[[str], _Value], instead: _Value) -> _Value:
        """Return the result of *parse*; if it fails, record the problem and return *instead*."""
        try:
            return parse(text)
        except ValueError as error:
            self.problems.append(f"--{name.replace('_', '-')}: {error}")
            return instead

    def duration(self, name: str, text: str) -> int:
        return self.read(name, text, parse_iso_duration, 0)

    def rate(self, name: str, text: str) -> Fraction:
        return self.read(name, text, parse_rate, Fraction(0))

    def share(self, name: str, text: str) -> Fraction:
        return self.read(name, text, parse_share, Fraction(0))

    def size(self, name: str, text: str) -> int:
        return self.read(name, text, parse_size, 0)

    def count(self, name: str, text: str) -> int:
        return self.read(name, text, parse_count, 0)

    def one_of(self, name: str, text: str, instead: _Choice) -> _Choice:
        kind = type(instead)

        def parse(given: str) -> _Choice:
            if given not in list(kind):
                raise ValueError(f"{given[:40]!r} is none of {', '.join(kind)}")
            return kind(given)

        return self.read(name, text, parse, instead)

    def check(self) -> None:
        """Raises StartupError with every problem."""
        if self.problems:
            raise StartupError("\n".join(self.problems))


def _planned(make: Callable[[], _Value]) -> _Value:
    """Return the result of *make*. Raises StartupError if there is no plan."""
    try:
        return make()
    except planner.PlanError as error:
        raise StartupError(str(error)) from error


def _dedup_need(flags: DedupFlags) -> planner.DedupNeed:
    texts = _Texts()
    need = planner.DedupNeed(
        rate_per_s=texts.rate("rate", flags.rate),
        caller_us=texts.duration("caller", flags.caller),
        retry_us=texts.duration("retry", flags.retry),
        network_us=texts.duration("network", flags.network),
        clock_us=texts.duration("clock", flags.clock),
        ttl_us=None if flags.ttl is None else texts.duration("ttl", flags.ttl),
        margin=texts.share("margin", flags.margin),
        duplicates=texts.share("duplicates", flags.duplicates),
        incident_us=texts.duration("incident", flags.incident),
        record_bytes=texts.size("record_size", flags.record_size),
        bits=texts.count("bits", flags.bits),
    )
    texts.check()
    return need


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


def _storage_need(flags: StorageFlags) -> planner.StorageNeed:
    texts = _Texts()
    kept, limit = flags.retention, flags.accept_limit
    need = planner.StorageNeed(
        retention_us=None if kept == UNLIMITED else texts.duration("retention", kept),
        read_interval_us=texts.duration("read_interval", flags.read_interval),
        events_per_day=Fraction(texts.count("events_per_day", flags.events_per_day)),
        event_bytes=texts.size("event_size", flags.event_size),
        accept_limit_us=None if limit is None else texts.duration("accept_limit", limit),
    )
    texts.check()
    return need


def _cluster_need(flags: ClusterFlags) -> tuple[ClusterNeed, Clients, int]:
    """Return the needs, the clients' behavior, and the lease time in microseconds."""
    texts = _Texts()
    event_bytes = texts.size("event_size", flags.event_size)
    dataset = _dataset(flags, texts)
    need = ClusterNeed(
        adds_per_s=texts.rate("adds", flags.adds),
        gets_per_s=texts.rate("gets", flags.gets),
        counters=texts.count("counters", flags.counters),
        dataset=dataset,
        settings=_settings(flags, dataset, texts),
        replication=texts.count("replication", flags.replication),
        event_bytes=event_bytes,
        row_bytes=texts.size("row_size", flags.row_size),
        disk_bytes=texts.size("disk", flags.disk),
        disk_use=texts.share("disk_use", flags.disk_use),
        memory_bytes=texts.size("memory", flags.memory),
        load=texts.share("load", flags.load),
    )
    clients = Clients(
        retry_us=_maybe(texts.duration, "retry", flags.retry),
        clock_us=_maybe(texts.duration, "client_clock", flags.client_clock),
        max_staleness_us=_maybe(texts.duration, "max_staleness", flags.max_staleness),
        hottest_per_s=_maybe(texts.rate, "hottest", flags.hottest),
        event_bytes=event_bytes,
    )
    lease_time_us = texts.duration("lease_time", flags.lease_time)
    texts.check()
    return need, clients, lease_time_us


def _maybe(read: Callable[[str, str], _Value], name: str, text: str | None) -> _Value | None:
    return None if text is None else read(name, text)


def _dataset(flags: ClusterFlags, texts: _Texts) -> Dataset:
    retention_us = texts.duration("retention", flags.retention)
    slice_us = _maybe(texts.duration, "slice", flags.slice)
    texts.check()
    if slice_us is None:
        if retention_us < planner.RETENTION_SLICED_MIN_US:
            raise StartupError(
                f"retention is {format_duration(retention_us)}; a slice is chosen from 6h on:"
                " give --slice"
            )
        slice_us = planner.slice_for(retention_us)
    bucket_us = _maybe(texts.duration, "time_bucket", flags.time_bucket)
    if bucket_us is None:
        bucket_us = slice_us if slice_us % limits.HOUR else limits.HOUR
    return Dataset(
        id=0,
        name="default",
        retention_us=retention_us,
        slice_us=slice_us,
        time_bucket_us=bucket_us,
        event_buckets=texts.count("event_buckets", flags.event_buckets),
        write_timeout_us=texts.duration("write_timeout", flags.write_timeout),
        clock_skew_max_us=texts.duration("clock_skew_max", flags.clock_skew_max),
    )


def _settings(flags: ClusterFlags, dataset: Dataset, texts: _Texts) -> NamespaceSettings:
    future_us = _maybe(texts.duration, "future_limit", flags.future_limit)
    key_ttl_us = _maybe(texts.duration, "key_ttl", flags.key_ttl)
    if future_us is None:
        future_us = max(5 * limits.SECOND, 2 * dataset.clock_skew_max_us)
    if key_ttl_us is None:
        key_ttl_us = min(limits.DAY, dataset.retention_us // 2)
    return NamespaceSettings(
        counter_type=texts.one_of("counter_type", flags.counter_type, CounterType.EVENTUAL),
        dataset=dataset.name,
        accept_limit_us=texts.duration("accept_limit", flags.accept_limit),
        future_limit_us=future_us,
        rollup_window_us=texts.duration("rollup_window", flags.rollup_window),
        shards=texts.count("shards", flags.shards),
        payload_check=texts.one_of("payload_check", flags.payload_check, PayloadCheck.GUARD),
        key_ttl_us=key_ttl_us,
        cache_ttl_us=10 * limits.SECOND,
    )


def _rates(name: str) -> Rates:
    try:
        return read_rates(Path(name).read_text(encoding="utf-8"), name)
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"--rates: {name!r} cannot be read: {error}") from error


def _json(body: Mapping[str, Any]) -> str:
    return json.dumps(body)


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
