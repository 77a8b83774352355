"""Bodies, as pydantic models: strict, unknown fields refused, every field with its bound."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    with_config,
)
from typing_extensions import TypedDict

from counter import limits
from counter.durations import parse_duration
from counter.names import check_counter_name
from counter.types import CounterType, PayloadCheck


def _duration(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("a duration is a text like 5s, 250ms or 7d")
    return parse_duration(value)


CounterName = Annotated[
    str,
    AfterValidator(check_counter_name),
    Field(description="The counter: 1 to 256 printable Unicode characters."),
]
Delta = Annotated[
    int,
    Field(
        ge=limits.INT64_MIN,
        le=limits.INT64_MAX,
        examples=[1],
        description="How much to add; less than 0 takes away.",
    ),
]
DurationText = Annotated[
    int,
    BeforeValidator(_duration, json_schema_input_type=str),
    Field(json_schema_extra={"type": "string", "examples": ["5s"]}),
]


_STRICT = ConfigDict(strict=True, extra="forbid")


class Body(BaseModel):
    model_config = ConfigDict(**_STRICT, frozen=True)


@with_config(_STRICT)
class TokenBody(TypedDict):
    """An idempotency token: make one per logical add, and send it again with every retry."""

    # What a batch holds many of is a dictionary: a model's instance takes twice as long to make.
    # What the texts must look like is checked where they are read, in api.counters.token_of:
    # patterns here would cost more than the rest of an add's validation.
    token: Annotated[
        str,
        Field(
            max_length=36,
            description="A nonce of 128 bits: a UUID, or 32 hexadecimal digits.",
            examples=["5f3a0f0e-6f0c-4f7e-9d3b-0c5f1d2e3a4b"],
        ),
    ]
    generation_time: Annotated[
        str,
        Field(
            max_length=40,
            description="When the token was made: RFC 3339 with an offset, up to microseconds.",
            examples=["2026-01-31T08:15:30.000250Z"],
            json_schema_extra={"format": "date-time"},
        ),
    ]


class AddBody(Body):
    delta: Delta
    idempotency_token: TokenBody | None = None


class ClearBody(Body):
    idempotency_token: TokenBody | None = None


@with_config(_STRICT)
class BatchAddItem(TypedDict):
    counter: CounterName
    delta: Delta
    idempotency_token: NotRequired[TokenBody | None]


class BatchAddBody(Body):
    # At the first bad item each is looked at by itself.
    items: Annotated[list[BatchAddItem], FailFast()] = Field(
        description="The adds, a token each: at most `batch_items_max` of them."
    )


class AtomicItem(Body):
    counter: CounterName
    delta: Delta


class AtomicAddBody(Body):
    idempotency_token: TokenBody | None = None
    items: list[AtomicItem] = Field(
        min_length=1,
        max_length=limits.ATOMIC_ITEMS_MAX,
        description="The adds: all of them are counted, or none.",
    )


class BatchGetBody(Body):
    counters: Annotated[list[str], FailFast()] = Field(
        description="The names, at most `batch_items_max` of them."
    )
    max_staleness: DurationText | None = Field(
        default=None, description="How stale the counts may be; without it as the namespace has it."
    )


class RecountBody(Body):
    from_: AwareDatetime | None = Field(
        default=None, alias="from", description="The first instant; all there is without it."
    )
    to: AwareDatetime | None = Field(default=None, description="The instant after the last one.")


class TokensBody(Body):
    count: int = Field(default=1, ge=1, le=limits.BATCH_ITEMS_MAX, description="How many.")


class ClientsBody(Body):
    """What the namespace's clients do. It is compared with the settings, and not kept."""

    retry: DurationText | None = Field(
        default=None, description="How long after its token was made an add may still be sent."
    )
    clock: DurationText | None = Field(
        default=None, description="How far a client's clock may be off."
    )
    max_staleness: DurationText | None = Field(
        default=None, description="How old a count they take by default."
    )
    hottest_per_s: int | None = Field(
        default=None, ge=0, le=10**9, description="How often the busiest counter is added to."
    )


class NamespaceBody(Body):
    """A namespace's settings. What an update leaves out stays as it is."""

    # Enumerations come as text; strict mode would refuse it outside of JSON.
    counter_type: CounterType | None = Field(
        default=None, description="How it counts; fixed, and needed to create one."
    )
    dataset: str | None = Field(
        default=None, max_length=63, description="The event tables it shares; fixed."
    )
    accept_limit: DurationText | None = Field(
        default=None, description="How old a token may be when its add arrives."
    )
    future_limit: DurationText | None = Field(
        default=None, description="How far ahead a token's time may lie."
    )
    rollup_window: DurationText | None = Field(
        default=None, description="How finely time is cut; fixed."
    )
    shards: int | None = Field(
        default=None,
        ge=1,
        le=limits.SHARDS_MAX,
        description="The parts that rollup workers share; fixed.",
    )
    payload_check: PayloadCheck | None = Field(
        default=None, description="How hard to look for two payloads under one token."
    )
    key_ttl: DurationText | None = Field(
        default=None, description="How long an arbitrary key is remembered."
    )
    cache_ttl: DurationText | None = Field(
        default=None, description="How long a rolled-up count may be served from the cache."
    )
    requests_per_s: int | None = Field(
        default=None,
        ge=0,
        le=limits.RATE_PER_S_MAX,
        description="Requests that each process takes in a second; 0 for any number.",
    )
    adds_per_s: int | None = Field(
        default=None,
        ge=0,
        le=limits.RATE_PER_S_MAX,
        description="Adds that each process takes in a second; 0 for any number.",
    )
    clients: ClientsBody | None = None
