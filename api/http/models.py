"""Bodies, as pydantic models: strict, unknown fields refused, every field with its bound."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import cache
from types import NoneType
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NotRequired,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)
from urllib.parse import parse_qsl
from zoneinfo import ZoneInfo

import msgspec
import pydantic_core
from msgspec import Raw
from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    with_config,
)
from pydantic.json_schema import SkipJsonSchema
from typing_extensions import TypedDict, is_typeddict

from api.http.calendar import CALENDAR, start_of_day
from api.http.problems import body_error, said, shown
from counter import limits
from counter.clock import parse_rfc3339, to_rfc3339
from counter.errors import InvalidBodyError, InvalidParameterError
from counter.quantities import check_counter_name, format_duration, parse_duration
from counter.security.key_admin import LABEL_CHARS_MAX, NAMESPACES_MAX, RATE_MAX
from counter.types import CounterType, PayloadCheck


def _duration(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("a duration is a text like 5s, 250ms or 7d")
    return parse_duration(value)


def _instant(value: Any) -> int:
    """Return an instant of a span: what is outside of all events' times is moved to their edge."""
    if not isinstance(value, str):
        raise ValueError("a time is a text like 2026-01-31T08:15:30Z")
    return max(0, min(parse_rfc3339(value), limits.TIME_MAX_US))


CounterName = Annotated[
    str,
    AfterValidator(check_counter_name),
    Field(description="The counter: 1 to 256 Unicode characters, without controls."),
]
#: Without the format, generated clients in Java read 32 bits.
Int64 = Annotated[int, Field(json_schema_extra={"format": "int64"})]
Delta = Annotated[
    Int64,
    Field(
        ge=limits.INT64_MIN,
        le=limits.INT64_MAX,
        examples=[1],
        description="How much to add; less than 0 takes away.",
    ),
]
#: Null is accepted and is not in the schema, which stays small. A union with SkipJsonSchema[None]
#: would add its branches to the field's name in errors.
_Bound = Annotated[
    Annotated[int, Field(ge=limits.INT64_MIN, le=limits.INT64_MAX)] | None,
    WithJsonSchema(
        {
            "type": "integer",
            "format": "int64",
            "minimum": limits.INT64_MIN,
            "maximum": limits.INT64_MAX,
        }
    ),
]
AtLeast = Annotated[
    _Bound, Field(description="Refuse the add if it would take the count below this.")
]
AtMost = Annotated[
    _Bound, Field(description="Refuse the add if it would take the count above this.")
]
DurationText = Annotated[
    int,
    BeforeValidator(_duration, json_schema_input_type=str),
    Field(json_schema_extra={"type": "string", "examples": ["5s"]}),
]


_DURATION_TEXT: Final = WithJsonSchema({"type": "string", "pattern": "^([0-9]+(us|ms|s|m|h|d))+$"})
_TIME_SCHEMA: Final[Mapping[str, str]] = {"type": "string", "format": "date-time"}
_TIME_TEXT: Final = WithJsonSchema(dict(_TIME_SCHEMA))
InstantText = Annotated[int, BeforeValidator(_instant), _TIME_TEXT]
#: Microseconds, which responses have as text.
DurationOut = Annotated[int, PlainSerializer(format_duration, str), _DURATION_TEXT]
TimeOut = Annotated[int, PlainSerializer(to_rfc3339, str), _TIME_TEXT]

TOKEN_EXAMPLE: Final[Mapping[str, str]] = {
    "token": "5f3a0f0e-6f0c-4f7e-9d3b-0c5f1d2e3a4b",
    "generation_time": "2026-01-31T08:15:30.000250Z",
}
_ADD_EXAMPLE: Final[Mapping[str, Any]] = {"delta": 1, "idempotency_token": TOKEN_EXAMPLE}

_STRICT = ConfigDict(strict=True, extra="forbid")


def example(value: Mapping[str, Any]) -> ConfigDict:
    """The configuration of a model that looks like *value*."""
    return ConfigDict(json_schema_extra={"examples": [dict(value)]})


class Body(BaseModel):
    model_config = ConfigDict(**_STRICT, frozen=True)


_Body = TypeVar("_Body", bound=Body)
_Query = TypeVar("_Query", bound="QueryModel")
_LIMIT_DIGITS_MAX: Final = 9
_OFFSET_PLUS: Final = re.compile(r" (?=\d\d:\d\d\Z)")


@with_config(_STRICT)
class TokenBody(TypedDict):
    """An idempotency token: make one per logical add, and send it again with every retry."""

    # What a batch holds many of is a dictionary: a model's instance takes twice as long to make.
    # What the texts must look like is checked where they are read, in api.routes.items.token_of:
    # patterns here would cost more than the rest of an add's validation.
    token: Annotated[
        str,
        Field(
            max_length=36,
            description="A nonce of 128 bits: a UUID, or 32 hexadecimal digits.",
            examples=[TOKEN_EXAMPLE["token"]],
        ),
    ]
    generation_time: Annotated[
        str,
        Field(
            max_length=40,
            description="When the token was made: RFC 3339 with an offset. Digits after the sixth"
            " of a second are cut off.",
            examples=[TOKEN_EXAMPLE["generation_time"]],
            json_schema_extra={"format": "date-time"},
        ),
    ]


class AddBody(Body):
    model_config = example(_ADD_EXAMPLE)

    delta: Delta
    at_least: AtLeast = None
    at_most: AtMost = None
    idempotency_token: TokenBody | None = None


class ClearBody(Body):
    model_config = example({"idempotency_token": TOKEN_EXAMPLE})

    idempotency_token: TokenBody | None = None


Amount = Annotated[Int64, Field(ge=limits.INT64_MIN, le=limits.INT64_MAX, examples=[50])]


class HoldBody(Body):
    model_config = example(
        {"amount": 50, "expires_in": "15m", "at_most": 1_000, "idempotency_token": TOKEN_EXAMPLE}
    )

    amount: Amount = Field(
        description="How much to reserve; not 0. A negative one reserves room above `at_least`."
    )
    expires_in: DurationText = Field(
        description="For how long: at least 1s, at most a tenth of retention."
    )
    at_least: AtLeast = None
    at_most: AtMost = None
    idempotency_token: TokenBody | None = None


class SettleBody(Body):
    model_config = example({"amount": 37})

    amount: Amount = Field(description="What counts: 0, or with the sign of the hold.")


class ExtendBody(Body):
    model_config = example({"expires_in": "15m"})

    expires_in: DurationText = Field(description="For how long from now.")


class CancelBody(Body):
    model_config = example(_ADD_EXAMPLE)

    operation: Literal["add", "clear", "delete", "hold"] = Field(
        default="add", description="What the token was sent with."
    )
    delta: Delta | None = Field(default=None, description="That of the add.")
    amount: Amount | None = Field(default=None, description="That of the hold.")
    expires_in: DurationText | None = Field(default=None, description="That of the hold.")
    at_least: AtLeast = None
    at_most: AtMost = None
    idempotency_token: TokenBody | None = None


@with_config(_STRICT)
class BatchAddItem(TypedDict):
    counter: CounterName
    delta: Delta
    at_least: NotRequired[AtLeast]
    at_most: NotRequired[AtMost]
    idempotency_token: NotRequired[TokenBody | None]


class BatchAddBody(Body):
    model_config = example({"items": [{"counter": "views", **_ADD_EXAMPLE}]})

    # At the first bad item each is looked at by itself.
    items: Annotated[list[BatchAddItem], FailFast()] = Field(
        description="The adds, a token each: at most `batch_items_max` of them."
    )


class AtomicItem(Body):
    counter: CounterName
    delta: Delta
    at_least: AtLeast = None
    at_most: AtMost = None


class AtomicAddBody(Body):
    model_config = example(
        {"idempotency_token": TOKEN_EXAMPLE, "items": [{"counter": "views", "delta": 1}]}
    )

    idempotency_token: TokenBody | None = None
    items: list[AtomicItem] = Field(
        min_length=1,
        max_length=limits.ATOMIC_ITEMS_MAX,
        description="The adds: all of them are counted, or none.",
    )


class BatchGetBody(Body):
    model_config = example({"counters": ["views"], "max_staleness": "0s"})

    counters: Annotated[list[str], FailFast()] = Field(
        description="The names, at most `batch_items_max` of them."
    )
    max_staleness: DurationText | None = Field(
        default=None, description="How stale the counts may be; without it as the namespace has it."
    )


class RecountBody(Body):
    model_config = example({"from": "2026-01-31T00:00:00Z", "to": "2026-02-01T00:00:00Z"})

    from_: InstantText | None = Field(
        default=None, alias="from", description="The first instant; all there is without it."
    )
    to: InstantText | None = Field(default=None, description="The instant after the last one.")


class TokensBody(Body):
    model_config = example({"count": 1})

    count: int = Field(default=1, ge=1, le=limits.BATCH_ITEMS_MAX, description="How many.")


def _without_default(schema: dict[str, Any]) -> None:
    """Leave the default out of *schema*: generators write none for a union."""
    schema.pop("default", None)


class EventRuleBody(Body):
    """What CloudEvents of a type add to which counter."""

    type: str = Field(
        max_length=limits.EVENT_ATTRIBUTE_CHARS_MAX,
        description="The type of events, or the start of types and `*`.",
    )
    counter: str = Field(
        max_length=limits.EVENT_ATTRIBUTE_CHARS_MAX,
        description="The counter; `{type}`, `{source}`, `{subject}`, `{extensions.tenant}` and"
        " paths such as `{data.order.kind}` are filled in.",
    )
    delta: Int64 | str = Field(
        default=1,
        description="How much to add: an integer, 1 without it, or its path: `data.quantity`.",
        json_schema_extra=_without_default,
    )


_AttributeText = Annotated[str, Field(min_length=1, max_length=limits.EVENT_ATTRIBUTE_CHARS_MAX)]


class CloudEventBody(BaseModel):
    """A CloudEvent in JSON. Rules can read its extension attributes."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "examples": [
                {
                    "specversion": "1.0",
                    "id": "4711",
                    "source": "/shop",
                    "type": "order.paid",
                    "subject": "17",
                    "data": {"quantity": 2},
                }
            ]
        },
    )

    specversion: Literal["1.0"]
    id: _AttributeText = Field(description="Identifies the event, together with its source.")
    source: _AttributeText
    type: _AttributeText = Field(description="What the rules of the namespace are for.")
    subject: _AttributeText | None = None
    time: AwareDatetime | None = Field(
        default=None, description="When it happened. It has no effect on counts."
    )
    datacontenttype: str | None = None
    dataschema: str | None = None
    data: Any = None
    data_base64: str | None = None


class BoundsBody(Body):
    """What every add of a namespace keeps."""

    at_least: AtLeast = None
    at_most: AtMost = None


class NamespaceBody(Body):
    """A namespace's settings. What an update leaves out stays as it is."""

    model_config = example({"counter_type": "EVENTUAL"})

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
    event_rules: list[EventRuleBody] | None = Field(
        default=None,
        max_length=limits.EVENT_RULES_MAX,
        description="What CloudEvents add; all rules that match an event apply.",
    )
    bounds: BoundsBody | None = Field(
        default=None, description="Bounds that every add keeps; `{}` for none."
    )


class KeyLimits(Body):
    """Rates per second, for each process; 0 for any number. What is left out is as in the settings,
    or as that of the key that creates this one."""

    requests_per_s: float | None = Field(default=None, ge=0, le=RATE_MAX)
    adds_per_s: float | None = Field(default=None, ge=0, le=RATE_MAX)
    reservations_per_s: float | None = Field(default=None, ge=0, le=RATE_MAX)
    resolutions_per_s: float | None = Field(default=None, ge=0, le=RATE_MAX)


class KeyBody(Body):
    """What a new key allows: no more than the key that creates it."""

    model_config = example({"namespaces": ["team-*"], "scope": "write", "expires": "90d"})

    namespaces: list[str] = Field(
        min_length=1,
        max_length=NAMESPACES_MAX,
        description="Names, beginnings of names and a `*`, or `*` for all.",
    )
    scope: Literal["read", "write", "admin"] = Field(
        "read", description="Each allows what those before it do."
    )
    label: str = Field("", max_length=LABEL_CHARS_MAX, description="For people.")
    expires: DurationText | None = Field(
        default=None, description="How long it is valid; as long as the key that creates it."
    )
    limits: KeyLimits = Field(default_factory=KeyLimits, description="What it may do in a second.")


class QueryModel(BaseModel):
    """The parameters of a query: each at most once, and no others."""

    model_config = ConfigDict(frozen=True)


def _parameter(read: Callable[[str], Any], form: str = "{name}: {error}") -> BeforeValidator:
    """Have a parameter's text read by *read*. What it says is wrong becomes a problem."""

    def read_or_raise(text: str, info: ValidationInfo) -> Any:
        name = (info.field_name or "").rstrip("_")
        try:
            return read(text)
        except (ValueError, OverflowError) as error:
            detail = form.format(name=name, text=text[:40], error=error)
            raise InvalidParameterError(detail, field=name) from error

    return BeforeValidator(read_or_raise)


def _count(most: int) -> BeforeValidator:
    """Have a number from 1 to *most* be read."""

    def read(text: str) -> int:
        plain = text.isascii() and text.isdigit() and len(text) <= _LIMIT_DIGITS_MAX
        if not (plain and 1 <= int(text) <= most):
            raise ValueError(most)
        return int(text)

    return _parameter(read, "{name} is {text!r}; it must be from 1 to {error}")


def _moment(text: str) -> int | str:
    if text == "today":
        return text
    # The plus sign of an offset arrives as a space if it was not percent-encoded.
    return _instant(_OFFSET_PLUS.sub("+", text))


def _span(text: str) -> int:
    span_us = parse_duration(text)
    if not limits.SECOND <= span_us <= limits.MINUTE:
        raise ValueError("it must be from 1s to 1m")
    # Of whole seconds, so that requests can share a response.
    return span_us - span_us % limits.SECOND


_Duration = Annotated[int, _parameter(parse_duration), _DURATION_TEXT]
_Moment = Annotated[
    int | Literal["today"],
    _parameter(_moment, "{name} is {text!r}, not an RFC 3339 time with an offset: {error}"),
    WithJsonSchema({"anyOf": [dict(_TIME_SCHEMA), {"type": "string", "enum": ["today"]}]}),
]
#: Names of the tz database; no file of the machine's own, such as localtime.
_ZONE_NAME: Final = re.compile(r"[A-Z][A-Za-z0-9_+-]*(?:/[A-Za-z0-9+-][A-Za-z0-9_+-]*){0,2}")
_ZONE_CHARS_MAX: Final = 64


def _zone(text: str) -> ZoneInfo:
    if len(text) > _ZONE_CHARS_MAX or not _ZONE_NAME.fullmatch(text):
        raise ValueError(text)
    try:
        return ZoneInfo(text)
    except (KeyError, OSError) as error:
        raise ValueError(text) from error


_Zone = Annotated[
    ZoneInfo,
    _parameter(_zone, "tz is {text!r}, not a time zone such as Europe/Berlin"),
    WithJsonSchema({"type": "string"}),
]


def _step(text: str) -> int | str:
    return text if text in CALENDAR else parse_duration(text)


_Step = Annotated[
    int | str,
    _parameter(_step, "step: {error}; or it is day, week or month"),
    WithJsonSchema({"type": "string"}),
]


class NoQuery(QueryModel):
    """A query without parameters."""


class PageQuery(QueryModel):
    """A list that comes in pages."""

    limit: Annotated[int, _count(limits.PAGE_ITEMS_MAX)] = Field(
        limits.PAGE_ITEMS_DEFAULT, ge=1, le=limits.PAGE_ITEMS_MAX, description="Items a page."
    )
    page: str | SkipJsonSchema[None] = Field(None, description="The next_page of the page before.")


class PrefixQuery(QueryModel):
    prefix: str | SkipJsonSchema[None] = Field(None, description="Only names that start with it.")


class HoldsQuery(PageQuery):
    """A page of the open holds of a counter."""

    counter: str = Field(description="The counter.")


class SearchQuery(PageQuery):
    q: str = Field(
        min_length=1,
        max_length=limits.COUNTER_NAME_CHARS_MAX,
        description="What the names contain, in upper or lower case.",
    )


def _flag(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError
    return text == "true"


_Flag = Annotated[bool, _parameter(_flag, "{name} is {text!r}, neither true nor false")]


class CountersOrder(StrEnum):
    NAME = "name"
    COUNT_DOWN = "-count"


class CountersQuery(PageQuery, PrefixQuery):
    """A page of the counters of a namespace."""

    counts: _Flag = Field(False, description="With their counts.")
    sum: _Flag = Field(False, description="With the sum of all counters that have the prefix.")
    order: Annotated[
        CountersOrder, _parameter(CountersOrder, "{name} is {text!r}, neither name nor -count")
    ] = Field(
        CountersOrder.NAME,
        description="`-count`: the largest first, with counts, of at most"
        f" {limits.COUNTERS_TOGETHER_MAX} counters.",
    )
    max_staleness: _Duration | SkipJsonSchema[None] = Field(
        None, description="How stale the counts may be; without it as the namespace has it."
    )


class SpanQuery(QueryModel):
    """A part of a counter's past."""

    from_: _Moment | SkipJsonSchema[None] = Field(
        None,
        alias="from",
        description="The first instant, RFC 3339 with an offset; or `today`, when the day began.",
    )
    to: _Moment | SkipJsonSchema[None] = Field(None, description="The instant after the last one.")
    tz: _Zone | SkipJsonSchema[None] = Field(
        None, description="The time zone of days: Europe/Berlin, UTC. UTC without it."
    )

    @property
    def zone(self) -> ZoneInfo:
        """The time zone of days."""
        return self.tz or ZoneInfo("UTC")

    def span(self, now_us: int, *, has_calendar: bool = False) -> tuple[int | None, int | None]:
        """Return the two instants; None for one that was not given. Raises InvalidParameterError
        if a time zone has no effect."""
        if self.tz is not None and not has_calendar and "today" not in (self.from_, self.to):
            raise InvalidParameterError(
                f"tz is {self.tz.key}, and there is no `today`, nor a step of days, weeks or"
                " months: leave it out",
                field="tz",
            )

        def instant(moment: int | Literal["today"] | None) -> int | None:
            return start_of_day(now_us, self.zone) if moment == "today" else moment

        return instant(self.from_), instant(self.to)


class CountQuery(SpanQuery):
    """The count now, or its change in a span of time."""

    max_staleness: _Duration | SkipJsonSchema[None] = Field(
        None, description="How stale the count may be: 0s for accurate, 5s, 1h."
    )


class EventsQuery(SpanQuery, PageQuery):
    """A page of a counter's events."""


class HistoryQuery(SpanQuery):
    step: _Step | SkipJsonSchema[None] = Field(
        None,
        description="A multiple of the rollup window, or `day`, `week` or `month` in the time zone"
        " `tz`; about 60 points without it.",
    )


class BusiestQuery(QueryModel):
    limit: Annotated[int, _count(limits.BUSIEST_MAX)] = Field(
        10, ge=1, le=limits.BUSIEST_MAX, description="At most so many counters."
    )
    span: Annotated[int, _parameter(_span, "{name} is {text!r}: {error}"), _DURATION_TEXT] = Field(
        default_factory=lambda: 10 * limits.SECOND,
        description="How long a time, in whole seconds, at most 1m; 10s without it.",
    )


@cache
def _empty(model: type[QueryModel]) -> Any:
    return model()


def read_query(model: type[_Query], query_string: bytes) -> _Query:
    """Return *query_string* as *model*. Raises InvalidParameterError."""
    try:
        if not query_string:
            empty: _Query = _empty(model)
            return empty
        return model.model_validate(_parameters(model, query_string))
    except ValidationError as error:
        (first, *_) = error.errors(include_url=False)
        name = str(first["loc"][0])
        given = "" if first["type"] == "missing" else f" is {first['input'][:40]!r}"
        detail = f"query parameter {name}{given}: {said(first)}"
        raise InvalidParameterError(detail, field=name) from error


def _parameters(model: type[QueryModel], query_string: bytes) -> Mapping[str, str]:
    names = [each.alias or name for name, each in model.model_fields.items()]
    found: dict[str, str] = {}
    for name, value in parse_qsl(query_string.decode("utf-8", "replace"), keep_blank_values=True):
        if name not in names:
            raise InvalidParameterError(
                f"query parameter {name[:80]!r} is not known here; known are:"
                f" {', '.join(names) or 'none'}",
                field=name[:80],
            )
        if name in found:
            raise InvalidParameterError(f"query parameter {name!r} is given twice", field=name)
        found[name] = value
    return found


_UNKNOWN: Final = "Object contains unknown field `"
_read_list: Final = msgspec.json.Decoder(list[Raw]).decode


def read_body(model: type[_Body], body: bytes) -> _Body:
    """Return the JSON text *body* as *model*. Raises InvalidBodyError."""
    check_size(model, body)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise body_error(error) from error


def check_size(hint: Any, text: bytes, at: str = "") -> None:
    """Raise InvalidBodyError if pydantic would work for long to explain what is wrong with *text*.

    pydantic makes an error of every unknown field and Python objects of every wrong value, so a
    body of 1 MiB could block the event loop for a second. Values with more than
    ``FIELDS_EXPLAINED_MAX`` colons or ``VALUE_EXPLAINED_BYTES_MAX`` bytes are looked at here, and
    the first unknown field or oversized value ends it. *hint* is the type that *text* should have
    and *at* the path to it.
    """
    few = text.count(b":") <= limits.FIELDS_EXPLAINED_MAX
    if few and len(text) <= limits.VALUE_EXPLAINED_BYTES_MAX:
        return
    is_list = get_origin(hint) is list and text[:1] == b"["
    if is_list and get_args(hint) != (str,):
        for index, item in enumerate(_read_list(text)[: limits.BATCH_ITEMS_MAX]):
            check_size(get_args(hint)[0], bytes(item), f"{at}{index}.")
    elif is_typeddict(hint) or (isinstance(hint, type) and issubclass(hint, Body)):
        _check_fields(hint, text, at)
    elif not is_list and len(text) > limits.VALUE_EXPLAINED_BYTES_MAX:
        message = f"a value of at most {limits.VALUE_EXPLAINED_BYTES_MAX} bytes is expected"
        raise _refusal(at, message, f"a value of {len(text)} bytes")


def _check_fields(model: type, text: bytes, at: str) -> None:
    names, read = _fields(model)
    try:
        found = read(text)
    except msgspec.ValidationError as error:
        message = str(error)
        if message.startswith(_UNKNOWN):
            name = message.removeprefix(_UNKNOWN).removesuffix("`")
            raise _refusal(f"{at}{shown(name)}.", "Extra inputs are not permitted", None) from error
        raise _refusal(at, "Input should be an object", f"a value of {len(text)} bytes") from error
    except ValueError:
        # It is not JSON for msgspec, or a name in it is not UTF-8.
        try:
            value = pydantic_core.from_json(text)
        except ValueError:
            # It is not JSON, and pydantic says so in one error.
            return
        # Only pydantic takes NaN and Infinity for JSON.
        _check_fields(model, pydantic_core.to_json(value, inf_nan_mode="null"), at)
        return
    except RecursionError:
        # It is nested more deeply than pydantic reads.
        return
    for attribute, (name, hint) in names.items():
        check_size(hint, bytes(getattr(found, attribute)), f"{at}{name}.")


@cache
def _fields(model: type) -> tuple[dict[str, tuple[str, Any]], Callable[[bytes], Any]]:
    """Name and type of each field of *model* by attribute, and a decoder that finds the fields."""
    known = getattr(model, "model_fields", {})
    names: dict[str, tuple[str, Any]] = {}
    for attribute, hint in get_type_hints(model).items():
        if attribute in ("model_config", "model_fields"):
            continue
        alias = known[attribute].alias if attribute in known else None
        wanted = [each for each in get_args(hint) if each is not NoneType]
        is_optional = NoneType in get_args(hint)
        names[attribute] = (alias or attribute, wanted[0] if is_optional else hint)
    shape = msgspec.defstruct(
        model.__name__,
        [(attribute, Raw, Raw()) for attribute in names],
        rename={attribute: name for attribute, (name, _) in names.items()},
        forbid_unknown_fields=True,
    )
    return names, msgspec.json.Decoder(shape).decode


def _refusal(at: str, message: str, value: str | None) -> InvalidBodyError:
    field = at.removesuffix(".") or "body"
    seen = "" if value is None else f" (it is {value})"
    return InvalidBodyError(
        f"{field}: {message}{seen}; the body is too large to say what else is wrong",
        errors=[{"field": field, "message": message, "value": value}],
    )
