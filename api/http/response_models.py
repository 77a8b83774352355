"""Answers, as pydantic models: what the OpenAPI document says of them.

Hot answers are written as text in :mod:`api.http.responses`; tests/http/test_fuzz.py holds what is
answered to these models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema

from api.http.models import (
    TOKEN_EXAMPLE,
    BoundsBody,
    DurationOut,
    EventRuleBody,
    Int64,
    KeyLimits,
    NamespaceBody,
    TimeOut,
    example,
)
from api.http.problems import problem_types
from counter.metrics import TALLIES
from counter.types import Accuracy, CounterType, PayloadCheck

_TIME: Final = TOKEN_EXAMPLE["generation_time"]
_AS_OF: Final = "2026-01-31T08:15:30.004711Z"
_WHOSE: Final[Mapping[str, Any]] = {"namespace": "default", "counter": "views"}
_OUTCOME: Final[Mapping[str, Any]] = {"event_time": _TIME, "replayed": False}
_ADDED: Final[Mapping[str, Any]] = {**_WHOSE, "delta": 1, **_OUTCOME}
_COUNT: Final[Mapping[str, Any]] = {**_WHOSE, "count": 1, "as_of": _AS_OF, "accuracy": "accurate"}
_HOLD: Final[Mapping[str, Any]] = {
    **_WHOSE,
    "hold": "AAZJqFLO6PpfOg8ObwxPfp07DF8dLjpLdmlld3M",
    "amount": 50,
    "state": "open",
    "expires_at": "2026-01-31T08:30:30.000250Z",
}
_NAMESPACE: Final[Mapping[str, Any]] = {
    "namespace": "videos",
    "created_at": "2026-01-31T08:00:00.000000Z",
    "counter_type": "EVENTUAL",
    "dataset": "default",
    "accept_limit": "5s",
    "future_limit": "5s",
    "rollup_window": "10s",
    "shards": 1,
    "payload_check": "guard",
    "key_ttl": "1d",
    "cache_ttl": "10s",
    "requests_per_s": 0,
    "adds_per_s": 0,
}

_Uuid = Annotated[str, Field(json_schema_extra={"format": "uuid"})]
_Page = Annotated[
    str | None, Field(description="What to ask for the next page with; null if this is the last.")
]
_AtLeast0 = Annotated[int, Field(ge=0)]
_Tally = Annotated[Int64, Field(ge=0)]
#: Adds may sum up to more than one delta can be.
_OF_ANY_SIZE: Final = (
    "The count. It can exceed 64 bits, after many adds of very large deltas: read it as a big"
    " integer there."
)


class Answer(BaseModel):
    """Exactly these members."""

    # Most are built for the OpenAPI document alone: at import they would take 14 ms of each start.
    model_config = ConfigDict(extra="forbid", defer_build=True)


class Problem(BaseModel):
    """A problem (RFC 9457): `code`, `applied` and `retry` say what to do. Some codes have further
    members."""

    type: str = Field(description="Where it is explained: `/problems#<code>`.")
    title: str = Field(description="The kind of problem, for people.")
    status: int = Field(ge=400, le=599)
    detail: str = Field(description="The value, the bound and the way out.")
    code: str = Field(json_schema_extra={"enum": [each.code for each in problem_types()]})
    applied: bool | None = Field(
        description="Whether the token's add is counted; null: not known from this answer."
    )
    retry: Literal["same_token", "new_token", "never"] = Field(description="What to do next.")
    retry_after: _AtLeast0 | SkipJsonSchema[None] = Field(
        None, description="How many seconds to wait first, if waiting helps."
    )


class _Whose(Answer):
    namespace: str = Field(description="The namespace.")
    counter: str = Field(description="The counter.")


class _WithOutcome(_Whose):
    event_time: TimeOut = Field(description="The token's time, which is that of the add.")
    replayed: bool | None = Field(
        description="True if the token had already been counted; null if unknown."
    )
    retry_safe: Literal[False] | SkipJsonSchema[None] = Field(
        None, description="Always false, and only of BEST_EFFORT: a retry may count twice."
    )


class AddAnswer(_WithOutcome):
    model_config = example(_ADDED)

    delta: Int64 = Field(description="What was added.")


class AddAndGetAnswer(AddAnswer):
    model_config = example({**_ADDED, "count": 1, "as_of": _AS_OF})

    count: Int64 = Field(description=_OF_ANY_SIZE)
    as_of: TimeOut = Field(description="The instant that the count is exact as of.")


class ClearAnswer(_WithOutcome):
    model_config = example({**_WHOSE, **_OUTCOME})


class CountAnswer(_Whose):
    model_config = example(_COUNT)

    count: Int64 = Field(description=_OF_ANY_SIZE)
    as_of: TimeOut = Field(
        description=(
            "The instant that the count is exact as of. An accurate count can include later adds."
        )
    )
    accuracy: Accuracy = Field(description="How exact the count is.")
    held: Int64 | SkipJsonSchema[None] = Field(
        None,
        description="What open holds of positive amounts reserve; of an accurate count, if it is"
        " not 0.",
    )
    held_down: Int64 | SkipJsonSchema[None] = Field(
        None, description="The same of negative amounts."
    )
    retry_safe: Literal[False] | SkipJsonSchema[None] = Field(
        None, description="Always false, and only of BEST_EFFORT: a retry may count twice."
    )
    delta: Int64 | SkipJsonSchema[None] = Field(
        None, description="Of a span of time: how much the count changed from `from` to `as_of`."
    )
    from_: TimeOut | SkipJsonSchema[None] = Field(
        None, alias="from", description="The first instant of that span."
    )


class HoldAnswer(_Whose):
    model_config = example(_HOLD)

    hold: str = Field(description="Its id.")
    amount: Int64 = Field(description="What it reserves.")
    state: Literal["open", "settled", "released", "expired"] = Field(
        description="Whether it is open, or how it has ended."
    )
    expires_at: TimeOut | SkipJsonSchema[None] = Field(None, description="When it will expire.")
    ended_at: TimeOut | SkipJsonSchema[None] = Field(None, description="When it ended.")
    settled: Int64 | SkipJsonSchema[None] = Field(None, description="What was settled.")
    over: Literal[True] | SkipJsonSchema[None] = Field(
        None, description="More was settled than was held: it counts in full."
    )


class HoldAndCountAnswer(HoldAnswer):
    model_config = example({**_HOLD, "count": 0, "held": 50, "as_of": _AS_OF})

    count: Int64 = Field(description=_OF_ANY_SIZE)
    held: Int64 = Field(description="What open holds that go the same way reserve together.")
    as_of: TimeOut = Field(description="The instant that both are exact as of.")
    replayed: bool | SkipJsonSchema[None] = Field(
        None, description="Of the begin: true for a retry."
    )


class HoldsAnswer(Answer):
    model_config = example(
        {"holds": [_HOLD], "next_page": "WzE3Njk4NDczMzAwMDAyNTAsICI1ZjNhMGYwZSJd"}
    )

    holds: list[HoldAnswer] = Field(description="Open holds, those that expire first.")
    next_page: _Page


class RefusedAdd(Answer):
    delta: Int64 = Field(description="What it was to add.")
    at_least: Int64 | SkipJsonSchema[None] = Field(None, description="The bound, if it is that.")
    at_most: Int64 | SkipJsonSchema[None] = Field(None, description="The bound, if it is that.")
    count: Int64 = Field(description="The count that decided, of the counter that had no room.")
    held: Int64 | SkipJsonSchema[None] = Field(None, description="What open holds reserved then.")


class HoldOfEvent(Answer):
    amount: Int64 = Field(description="What the hold reserves, or reserved.")
    state: Literal["begun", "settled", "released", "expired"] = Field(
        description="Begun, or how the event ends it."
    )
    hold: str = Field(description="Its id.")


class EventAnswer(Answer):
    event_time: TimeOut
    event_id: _Uuid = Field(description="The token's nonce.")
    event_item_key: int = Field(
        description="0, or the place among the counter's items of an atomic add."
    )
    delta: Int64 | SkipJsonSchema[None] = Field(
        None, description="What was added; not there for a clear."
    )
    clear: Literal[True] | SkipJsonSchema[None] = Field(None, description="It is a clear.")
    at_least: Int64 | SkipJsonSchema[None] = Field(None, description="The bound of the request.")
    at_most: Int64 | SkipJsonSchema[None] = Field(None, description="The bound of the request.")
    refused: RefusedAdd | SkipJsonSchema[None] = Field(
        None, description="It was refused because of a bound, and counts 0."
    )
    hold: HoldOfEvent | SkipJsonSchema[None] = Field(
        None, description="It begins a hold, or ends one: then `delta` is what was settled."
    )


class EventsAnswer(Answer):
    model_config = example(
        {
            "events": [
                {
                    "event_time": _TIME,
                    "event_id": TOKEN_EXAMPLE["token"],
                    "event_item_key": 0,
                    "delta": 1,
                }
            ],
            "next_page": "WzE3Njk4NDczMzAwMDAyNTAsIDAsICI1ZjNhMGYwZSJd",
        }
    )

    events: list[EventAnswer]
    next_page: _Page


class PointAnswer(Answer):
    time: TimeOut = Field(description="The end of the step.")
    count: Int64 = Field(description="The count then.")
    delta: Int64 = Field(description="Its change since the step began.")


class HistoryAnswer(Answer):
    model_config = example(
        {"points": [{"time": "2026-01-31T08:16:00.000000Z", "count": 1, "delta": 1}]}
    )

    points: list[PointAnswer]


class RecountAnswer(_Whose):
    model_config = example({**_WHOSE, "windows": 3})

    windows: int = Field(description="How many are counted again.")


class SumAnswer(Answer):
    """The sum of all counters that have the prefix, on whatever page."""

    count: Int64 = Field(description=_OF_ANY_SIZE)
    counters: _AtLeast0 = Field(description="How many counters were summed.")
    as_of: TimeOut = Field(description="Every add up to then, and maybe later ones, is in it.")
    accuracy: Accuracy = Field(description="How exact the least exact of the counts is.")


class CountersAnswer(Answer):
    model_config = example({"counters": ["likes", "views"], "next_page": "WyJ2aWV3cyJd"})

    counters: list[str]
    counts: list[CountAnswer] | SkipJsonSchema[None] = Field(
        None, description="Their counts, in the same order, if they were asked for."
    )
    sum: SumAnswer | SkipJsonSchema[None] = Field(None, description="If it was asked for.")
    next_page: _Page


class CancelAnswer(Answer):
    """The same for every retry."""

    model_config = example({"cancelled": True, "was_counted": True, "event_time": _TIME})

    cancelled: Literal[True] = Field(description="The token counts nothing and never will.")
    was_counted: bool = Field(description="Whether it counted before.")
    event_time: TimeOut = Field(description="The token's time.")


class BatchCancelAnswer(Answer):
    """An outcome for each item, in order: what it would be alone, or a problem."""

    model_config = example(
        {"results": [{"cancelled": True, "was_counted": True, "event_time": _TIME}]}
    )

    results: list[CancelAnswer | Problem]


class BatchAddAnswer(Answer):
    """An outcome for each item, in order: what it would be alone, or a problem."""

    model_config = example({"results": [_ADDED]})

    results: list[AddAnswer | Problem]


class BatchGetAnswer(Answer):
    """An outcome for each counter, in order: what it would be alone, or a problem."""

    model_config = example({"results": [_COUNT]})

    results: list[CountAnswer | Problem]


class AtomicAddAnswer(Answer):
    model_config = example({"results": [_ADDED]})

    results: list[AddAnswer]


class CloudEventAdd(Answer):
    counter: str
    delta: Int64


class CloudEventOutcome(Answer):
    source: str
    id: str
    outcome: Literal["original", "replayed", "unverified", "ignored"] = Field(
        description="New; counted before; counted, but the store was not asked whether before; of"
        " a type without a rule."
    )
    adds: list[CloudEventAdd]


class CloudEventsAnswer(Answer):
    """What was counted of each event, in order."""

    model_config = example(
        {
            "results": [
                {
                    "source": "/shop",
                    "id": "4711",
                    "outcome": "original",
                    "adds": [{"counter": "orders.17", "delta": 2}],
                }
            ]
        }
    )

    results: list[CloudEventOutcome]


def _as_set(name: str) -> Any:
    """A setting, described as in the body that sets it."""
    return Field(description=NamespaceBody.model_fields[name].description)


class NamespaceAnswer(Answer):
    model_config = example(_NAMESPACE)

    namespace: str = Field(description="Its name.")
    created_at: TimeOut
    counter_type: CounterType = _as_set("counter_type")
    dataset: str = _as_set("dataset")
    accept_limit: DurationOut = _as_set("accept_limit")
    future_limit: DurationOut = _as_set("future_limit")
    rollup_window: DurationOut = _as_set("rollup_window")
    shards: int = _as_set("shards")
    payload_check: PayloadCheck = _as_set("payload_check")
    key_ttl: DurationOut = _as_set("key_ttl")
    cache_ttl: DurationOut = _as_set("cache_ttl")
    requests_per_s: int = _as_set("requests_per_s")
    adds_per_s: int = _as_set("adds_per_s")
    event_rules: list[EventRuleBody] | SkipJsonSchema[None] = Field(
        None, description="What CloudEvents add; not there without rules."
    )
    bounds: BoundsBody | SkipJsonSchema[None] = Field(
        None, description="Bounds that every add keeps; not there without any."
    )


class NamespacePutAnswer(NamespaceAnswer):
    """It also says what does not fit, if anything."""

    warnings: list[str] | SkipJsonSchema[None] = None


class NamespacesAnswer(Answer):
    model_config = example({"namespaces": [_NAMESPACE]})

    namespaces: list[NamespaceAnswer]


class ShardAnswer(Answer):
    shard: int
    watermark: TimeOut = Field(description="Up to here all events are rolled up.")
    lag_seconds: float = Field(description="How far that is behind the clock.")
    overdue_seconds: float = Field(
        ge=0, description="How much of that is more than the settings make it."
    )
    owner: str | None = Field(description="The worker whose share the shard is in.")


class ShardsAnswer(Answer):
    model_config = example(
        {
            "namespace": "default",
            "as_of": _AS_OF,
            "shards": [
                {
                    "shard": 0,
                    "watermark": "2026-01-31T08:15:09.999999Z",
                    "lag_seconds": 20.004712,
                    "overdue_seconds": 0.0,
                    "owner": "counter-1-4711-0a1b2c3d",
                }
            ],
        }
    )

    namespace: str
    as_of: TimeOut
    shards: list[ShardAnswer]


class BusyCounter(Answer):
    counter: str
    adds_per_s: float = Field(ge=0)
    count: Int64


class BusiestAnswer(Answer):
    model_config = example(
        {
            "namespace": "default",
            "since": "2026-01-31T08:15:20.000250Z",
            "as_of": _AS_OF,
            "complete": True,
            "counters": [{"counter": "views", "adds_per_s": 120.3, "count": 42}],
        }
    )

    namespace: str
    since: TimeOut
    as_of: TimeOut
    complete: bool
    counters: list[BusyCounter]


class NamespaceOverview(Answer):
    namespace: str
    counters: _AtLeast0 | None = Field(description="How many there are; null: not counted yet.")
    counters_complete: bool = Field(description="False: there are more than were counted.")
    adds_per_s: float | None = Field(
        ge=0,
        description="Counted in the last seconds, by the processes on this port; null: unknown.",
    )
    lag_seconds: float = Field(description="The largest lag of its shards.")
    overdue_seconds: float = Field(ge=0)
    shards: int
    unowned: int = Field(description="Shards that no worker rolls up now.")


class OverviewCounter(_Whose):
    count: Int64
    changed_at: TimeOut = Field(description="When its last change was rolled up.")


class RateOfAdds(Answer):
    time: TimeOut = Field(description="The end of five seconds.")
    adds_per_s: float = Field(ge=0)


class OverviewTotals(Answer):
    namespaces: int
    counters: _AtLeast0
    complete: bool = Field(description="Whether all counters are counted and sorted.")
    overdue_seconds: float = Field(ge=0, description="Of the worst shard of all.")


class OverviewAnswer(Answer):
    model_config = example(
        {
            "as_of": _AS_OF,
            "totals": {"namespaces": 1, "counters": 1, "complete": True, "overdue_seconds": 0.0},
            "namespaces": [
                {
                    "namespace": "default",
                    "counters": 1,
                    "counters_complete": True,
                    "adds_per_s": 0.2,
                    "lag_seconds": 15.2,
                    "overdue_seconds": 0.0,
                    "shards": 1,
                    "unowned": 0,
                }
            ],
            "largest": [{**_WHOSE, "count": 42, "changed_at": _TIME}],
            "latest": [{**_WHOSE, "count": 42, "changed_at": _TIME}],
            "adds": [{"time": _TIME, "adds_per_s": 0.2}],
        }
    )

    as_of: TimeOut
    totals: OverviewTotals
    namespaces: list[NamespaceOverview] = Field(
        description="A hundred at most: those whose rollup is the worst, then by name."
    )
    largest: list[OverviewCounter]
    latest: list[OverviewCounter]
    adds: list[RateOfAdds] = Field(description="Of up to fifteen minutes, earliest first.")


class FoundCounter(_Whose):
    pass


class SearchAnswer(Answer):
    model_config = example({"found": [_WHOSE], "next_page": "WyJkZWZhdWx0Iiwidmlld3MiXQ"})

    found: list[FoundCounter]
    next_page: _Page


class Outcomes(Answer):
    original: _Tally
    replayed: _Tally
    unverified: _Tally
    conflict: _Tally
    late_applied: _Tally
    voided: _Tally
    cancelled: _Tally
    bound_reached: _Tally
    best_effort: _Tally
    refused: _Tally
    unknown: _Tally


class OutcomesAnswer(Answer):
    model_config = example(
        {"as_of": _AS_OF, "outcomes": {**dict.fromkeys(TALLIES, 0), "original": 1}}
    )

    as_of: TimeOut
    outcomes: Outcomes


class IssuedToken(Answer):
    token: _Uuid
    generation_time: TimeOut


class TokensAnswer(Answer):
    model_config = example({"tokens": [TOKEN_EXAMPLE]})

    tokens: list[IssuedToken]


_KEY: Final[Mapping[str, Any]] = {
    "id": "5k2mvw6xq7ab",
    "label": "shop",
    "namespaces": ["team-*"],
    "scope": "write",
    "limits": {"adds_per_s": 1000.0},
    "created_at": _TIME,
    "state": "valid",
}
_Moment = Annotated[str | None, Field(json_schema_extra={"format": "date-time"})]


class KeyAnswer(Answer):
    """A key as lists show it, without its secret."""

    model_config = example(_KEY)

    id: str = Field(description="Its name in lists and logs: `ck_<id>_...` is the key.")
    label: str
    namespaces: list[str]
    scope: Literal["read", "write", "admin"]
    limits: KeyLimits
    created_at: _Moment
    expires_at: _Moment = None
    revoked_at: _Moment = None
    last_used: _Moment = Field(None, description="To about two minutes.")
    replaced_by: str | None = Field(None, description="The key that it was rotated to.")
    state: Literal["valid", "replaced", "expired", "revoked"]


class KeyPostAnswer(KeyAnswer):
    model_config = example({"key": "ck_5k2mvw6xq7ab_...", **_KEY})

    key: str = Field(description="The key, which no other answer shows.")


class KeysAnswer(Answer):
    model_config = example({"keys": [_KEY]})

    keys: list[KeyAnswer]


class HealthAnswer(Answer):
    model_config = example({"status": "alive"})

    status: Literal["alive"]


class ReadyAnswer(BaseModel):
    """`troubles` says what is missing and since when, if anything is."""

    model_config = example({"status": "ready", "store": "ok", "cache": "ok", "rollup": "ok"})

    status: Literal["ready", "degraded"]
    store: str
    cache: str
    rollup: str
    troubles: list[dict[str, str | None]] | SkipJsonSchema[None] = None
