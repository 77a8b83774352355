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


CounterName = Annotated[str, AfterValidator(check_counter_name)]
Delta = Annotated[int, Field(ge=limits.INT64_MIN, le=limits.INT64_MAX, examples=[1])]
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
    items: Annotated[list[BatchAddItem], FailFast()]


class AtomicItem(Body):
    counter: CounterName
    delta: Delta


class AtomicAddBody(Body):
    idempotency_token: TokenBody | None = None
    items: list[AtomicItem] = Field(min_length=1, max_length=limits.ATOMIC_ITEMS_MAX)


class BatchGetBody(Body):
    counters: Annotated[list[str], FailFast()]
    max_staleness: DurationText | None = None


class RecountBody(Body):
    from_: AwareDatetime | None = Field(default=None, alias="from")
    to: AwareDatetime | None = None


class TokensBody(Body):
    count: int = Field(default=1, ge=1, le=limits.BATCH_ITEMS_MAX)


class NamespaceBody(Body):
    """A namespace's settings. What an update leaves out stays as it is."""

    # Enumerations come as text; strict mode would refuse it outside of JSON.
    counter_type: CounterType | None = None
    dataset: str | None = Field(default=None, max_length=63)
    accept_limit: DurationText | None = None
    future_limit: DurationText | None = None
    rollup_window: DurationText | None = None
    shards: int | None = Field(default=None, ge=1, le=limits.SHARDS_MAX)
    payload_check: PayloadCheck | None = None
    key_ttl: DurationText | None = None
    cache_ttl: DurationText | None = None
