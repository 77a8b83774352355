"""Run ``counter plan ...``: parse the needs and show the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Annotated, Any, Final, get_type_hints

from cyclopts import Parameter

from counter.cli.terminal import Json, exit_on_error, flag, json_line, print_out
from counter.errors import StartupError
from counter.ops import planner
from counter.quantities import (
    format_number,
    parse_count,
    parse_duration,
    parse_rate,
    parse_share,
    parse_size,
)

#: By the word for a flag's value in the help: how it is parsed, and the unit that ends its name.
_KINDS: Final[Mapping[str, tuple[Callable[[str], Any], str]]] = {
    "DURATION": (parse_duration, "_us"),
    "DURATION|unlimited": (
        lambda text: None if text == "unlimited" else parse_duration(text),
        "_us",
    ),
    "RATE": (parse_rate, "_per_s"),
    "SIZE": (parse_size, "_bytes"),
    "SHARE": (parse_share, ""),
    "NUMBER": (parse_count, ""),
    "EVENTS": (lambda text: Fraction(parse_count(text)), ""),
}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DedupFlags:
    """Durations are written like 10s, rates like 80/s, shares like 20%."""

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
    """Durations are written like 7d."""

    retention: Annotated[str, flag("How long events are kept", "DURATION|unlimited")] = "7d"
    read_interval: Annotated[str, flag("The span of time that a read covers", "DURATION")] = "1d"
    events_per_day: Annotated[str, flag("Events of the one counter", "EVENTS")]
    event_size: Annotated[str, flag("The size of an event on disk", "SIZE")] = "64B"
    accept_limit: Annotated[
        str | None,
        flag("How old an event may be when it is written [10m; 0s if unlimited]", "DURATION"),
    ] = None
    json: Json = False


def dedup(flags: DedupFlags) -> None:
    """Print how many tokens must be kept, for how long, and their size."""
    with exit_on_error():
        need = planner.DedupNeed(**_values(flags))
        plan = asdict(planner.plan_dedup(need))
        warnings = planner.dedup_warnings(need)
        print_out(json_line(plan | {"warnings": warnings}) if flags.json else _text(plan), warnings)


def storage(flags: StorageFlags) -> None:
    """Print how the events of one counter should be split into tables, intervals and buckets."""
    with exit_on_error():
        need = planner.StorageNeed(**_values(flags))
        plan = planner.plan_storage(need)
        body = asdict(plan)
        warnings = planner.storage_warnings(need, plan)
        print_out(json_line(body) if flags.json else _text(body), warnings)


def _text(plan: Mapping[str, float]) -> str:
    width = max(map(len, plan))
    return "\n".join(f"{name:<{width}}  = {format_number(each)}" for name, each in plan.items())


def _values(flags: DedupFlags | StorageFlags) -> dict[str, Any]:
    """Return the values of *flags* by name and unit, such as ``caller_us``.

    Raises StartupError with every problem.
    """
    values: dict[str, Any] = {}
    problems: list[str] = []
    for name, hint in get_type_hints(type(flags), include_extras=True).items():
        text = getattr(flags, name)
        for parameter in getattr(hint, "__metadata__", ()):
            if parameter.metavar not in _KINDS:
                continue
            parse, unit = _KINDS[parameter.metavar]
            try:
                value = None if text is None else parse(text)
            except ValueError as error:
                problems.append(f"--{name.replace('_', '-')}: {error}")
            else:
                values[f"{name.removesuffix('_size')}{unit}"] = value
    if problems:
        raise StartupError("\n".join(problems))
    return values
