"""CloudEvents 1.0 over HTTP: structured, batched and binary; counted by the namespace's rules.

An event is identified by its source and id. Its rules produce one atomic add, so it
counts once and as a whole, however often and in whatever batches it arrives. Data are read with
decimals as text: no number is rounded on its way.
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Annotated, Any, Final
from urllib.parse import unquote

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from api.http.call import JSON, NO_CONTENT, Call
from api.http.connections import ReadQueue, Steps
from api.http.models import CloudEventBody
from api.http.problems import shown
from api.http.response_models import BatchCancelAnswer, CloudEventsAnswer
from api.http.responses import Response, cancelled_texts, results_response
from api.http.routing import NAMESPACE, TTL, CallOf, InNamespace, prefers, route
from api.telemetry.request_log import OUTCOMES, LoggedWrite
from counter.api_keys import Scope
from counter.config.event_rules import EVENT_TEXT, CloudEvent, adds_of, need_extensions, rules_of
from counter.core.results import Added, Keyed
from counter.core.service import CounterService
from counter.errors import CounterError, InvalidBodyError, TokenConflictError
from counter.limits import EVENT_ATTRIBUTE_CHARS_MAX
from counter.types import EventRule, Namespace

STRUCTURED: Final = b"application/cloudevents+json"
BATCH: Final = b"application/cloudevents-batch+json"
_PREFIX: Final = b"ce-"
_VERSION: Final = "1.0"
_SCHEMA: Final[Mapping[str, Any]] = {"$ref": "#/components/schemas/CloudEventBody"}
_BODIES: Final[Mapping[str, Any]] = {
    "requestBody": {
        "content": {
            STRUCTURED.decode(): {"schema": _SCHEMA},
            BATCH.decode(): {"schema": {"type": "array", "items": _SCHEMA}},
        }
    }
}
_REPRESENTED: Final[Mapping[int, Any]] = {
    200: {"model": CloudEventsAnswer, "description": "Done, and the outcomes were asked for"}
}
_REPRESENTATION: Final = re.compile(
    rb"""(?:^|,)\s*return\s*=\s*"?representation"?\s*(?:[,;]|$)""", re.IGNORECASE
)
#: Events of one step, each of at most 20 adds.
_STEP_EVENTS: Final = 10
#: RFC 3339, with leap seconds. An event's time is not used, so days of months are not checked.
_TIME: Final = re.compile(
    r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])[Tt ]"
    r"([01][0-9]|2[0-3]):[0-5][0-9]:([0-5][0-9]|60)(\.[0-9]+)?"
    r"([Zz]|[+-]([01][0-9]|2[0-3]):?[0-5][0-9])"
)
#: Errors of a body that is not what it should be: not JSON, not UTF-8, nested too deeply, a number
#: with thousands of digits.
_MALFORMED: Final = (msgspec.MsgspecError, ValueError, RecursionError)
_MISSING: Final = re.compile(r"Object missing required field `(\w+)`")

_Text = Annotated[
    str, Meta(min_length=1, max_length=EVENT_ATTRIBUTE_CHARS_MAX, pattern=EVENT_TEXT.pattern)
]


class _Event(Struct, gc=False):
    """An event of the JSON format, without its extension attributes."""

    id: _Text
    source: _Text
    type: _Text
    specversion: str
    subject: _Text | None = None
    time: str | None = None
    datacontenttype: str | None = None
    dataschema: str | None = None
    data: Any = UNSET
    data_base64: str | UnsetType | None = UNSET


_read_event: Final = msgspec.json.Decoder(_Event, float_hook=str).decode
_read_events: Final = msgspec.json.Decoder(list[_Event], float_hook=str).decode
_read_raw: Final = msgspec.json.Decoder(dict[str, Raw]).decode
_read_all_raw: Final = msgspec.json.Decoder(list[dict[str, Raw]]).decode
_NAMES: Final = frozenset(_Event.__struct_fields__)
_read_data: Final = msgspec.json.Decoder(float_hook=str).decode


def cloud_event(body: CloudEventBody) -> None:
    """A body that the handler reads by itself, in each form that the specification has."""


_INGESTS: Final[Mapping[str, Any]] = {
    "tag": "events",
    "writes": True,
    "shows": "a CloudEvent",
    "problems": (409,),
    "declares": (prefers, cloud_event),
    "openapi_extra": _BODIES,
    "status": NO_CONTENT,
    "responses": _REPRESENTED,
}


_CANCELS: Final[Mapping[str, Any]] = {
    "tag": "cancels",
    "writes": True,
    "shows": "a CloudEvent",
    "headers": (TTL,),
    "by_key": True,
    "declares": (cloud_event,),
    "openapi_extra": _BODIES,
}


@dataclass(frozen=True, slots=True)
class EventRoutes:
    """``/v1/namespaces/{namespace}/events``, and the path that OpenMeter's clients append."""

    service: CounterService
    batch_items_max: int
    queue: ReadQueue

    @route("POST", f"{NAMESPACE}/events", Scope.WRITE, **_INGESTS)
    async def ingest_events(self, call: CallOf, namespace: InNamespace) -> Response:
        """Count CloudEvents, each once for its source and id."""
        adds, reading = await self._read(call, namespace)
        with self.service.one_by_one.holding(adds):
            keyed = await self.queue.run(reading)
            added = await self._count(call, namespace, keyed)
            if not _wants_outcomes(call):
                # A body that is no CloudEvent is an error for Knative, for one.
                return Response(NO_CONTENT, b"")
            outcomes = await self.queue.answer(_outcomes(keyed, added))
            body = b"%s\n" % msgspec.json.encode({"results": outcomes})
            applied = (b"preference-applied", b"return=representation")
            return Response(200, body, headers=(applied,))

    @route("POST", f"{NAMESPACE}/api/v1/events", Scope.WRITE, **_INGESTS)
    async def ingest_openmeter_events(self, call: CallOf, namespace: InNamespace) -> Response:
        """The same, for clients of OpenMeter."""
        return await self.ingest_events(call, namespace)

    @route("POST", f"{NAMESPACE}/events/cancel", Scope.WRITE, **_CANCELS)
    async def cancel_events(
        self, call: CallOf, namespace: InNamespace
    ) -> Annotated[Response, BatchCancelAnswer]:
        """Cancel what CloudEvents counted, each as a whole; an outcome for each event, in order."""
        adds, reading = await self._read(call, namespace)
        with self.service.one_by_one.holding(adds):
            keyed = await self.queue.run(reading)
            counted = _counted(call, namespace, keyed)
            cancelled = iter(await self.service.cancel_keyed(namespace, counted, call.allowance))
        outcomes = [next(cancelled) if each.items else _unmatched(each) for each in keyed]
        for outcome in outcomes:
            if isinstance(outcome, TokenConflictError):
                outcome.detail += (
                    "; if event_rules have changed since the event was counted, cancel it under the"
                    " rules of then, or add the opposite amounts"
                )
        call.logged["results"] = outcomes
        return results_response(cancelled_texts(outcomes))

    async def _read(self, call: Call, namespace: Namespace) -> tuple[int, Steps[list[Keyed]]]:
        """Return the number of adds of the request's events, which are charged, and what the events
        add, to be read in steps. Raises InvalidBodyError and UnsupportedMediaTypeError."""
        rules = namespace.settings.event_rules
        if not rules:
            raise InvalidBodyError(
                f"namespace {namespace.name!r} has no event_rules, which map events to counters:"
                f" PUT /v1/namespaces/{namespace.name} with some first",
                field="event_rules",
            )
        events, is_batch = await self._events(call, need_extensions(rules))
        by_type = {kind: rules_of(rules, kind) for kind in {each.type for each in events}}
        adds = sum(max(1, len(by_type[each.type])) for each in events)
        call.charge(adds)
        return adds, _keyed(events, by_type, is_batch)

    async def _count(
        self, call: Call, namespace: Namespace, keyed: Sequence[Keyed]
    ) -> Sequence[Sequence[Added]]:
        """Return what was added of each event, nothing for an ignored one. Raises an error unless
        all of them are counted."""
        counted = _counted(call, namespace, keyed)
        outcomes = await self.service.add_keyed(namespace, counted, call.allowance)
        self.service.events_ignored += len(keyed) - len(counted)
        call.logged["results"] = [
            each
            for outcome in outcomes
            for each in (outcome if isinstance(outcome, list) else [outcome])
        ]
        added = iter(_all_added(counted, outcomes))
        return [next(added) if each.items else () for each in keyed]

    async def _events(self, call: Call, with_extensions: bool) -> tuple[Sequence[CloudEvent], bool]:
        """Return the events of a request, and whether it is a batch. Raises InvalidBodyError and
        UnsupportedMediaTypeError."""
        headers = [
            (name.removeprefix(_PREFIX).decode(), value)
            for name, value in call.headers
            if name.startswith(_PREFIX)
        ]
        given = call.header(b"content-type") or b""
        media = given.partition(b";")[0].strip().lower()
        if headers and not media.startswith(b"application/cloudevents"):
            return [_binary(headers, media, await call.body())], False
        call.content_type(STRUCTURED, BATCH, JSON)
        body = await call.body()
        # Plain JSON, as OpenMeter has it, is a list or one event.
        is_batch = media == BATCH or (media == JSON and body.lstrip()[:1] == b"[")
        try:
            found = _read_events(body) if is_batch else [_read_event(body)]
            extensions = _extensions(body, is_batch) if with_extensions else repeat({})
        except _MALFORMED as error:
            raise _malformed(error) from error
        if len(found) > self.batch_items_max:
            raise InvalidBodyError(
                f"the batch has {len(found)} events; at most {self.batch_items_max} are allowed",
                field="events",
            )
        return [
            _checked(each, more, f"events.{at}: " if is_batch else "")
            for at, (each, more) in enumerate(zip(found, extensions, strict=False))
        ], is_batch


def _wants_outcomes(call: Call) -> bool:
    return any(name == b"prefer" and _REPRESENTATION.search(value) for name, value in call.headers)


def _keyed(
    events: Sequence[CloudEvent], by_type: Mapping[str, Sequence[EventRule]], is_batch: bool
) -> Steps[list[Keyed]]:
    """Return what *events* add, by the rules of their types. Raises InvalidBodyError."""
    keyed: list[Keyed] = []
    for at, event in enumerate(events):
        try:
            items = adds_of(by_type[event.type], event)
        except InvalidBodyError as error:
            if is_batch:
                error.detail = f"events.{at}: {error.detail}"
            raise
        keyed.append(Keyed(event.source, event.id, items))
        if not len(keyed) % _STEP_EVENTS:
            yield
    return keyed


def _counted(call: Call, namespace: Namespace, keyed: Sequence[Keyed]) -> Sequence[Keyed]:
    """Return the events that a rule matches. If the request has only one event, log its token."""
    counted = [each for each in keyed if each.items]
    if len(keyed) == len(counted) == 1:
        [one] = counted
        call.logged["of"] = LoggedWrite(namespace, "event", one.scope, one.key)
    return counted


def _unmatched(event: Keyed) -> InvalidBodyError:
    """Return the error of an event to be cancelled that no rule matches."""
    return InvalidBodyError(
        f"event {shown(event.key)!r} of {shown(event.scope)!r} is of a type that no rule of the"
        " namespace matches: it counted nothing, and what it would count is not known",
        field="type",
    )


def _extensions(body: bytes, is_batch: bool) -> Sequence[Mapping[str, Any]]:
    """Return the extension attributes of each event of *body*."""
    return [
        {name: _read_data(raw) for name, raw in each.items() if name not in _NAMES}
        for each in (_read_all_raw(body) if is_batch else [_read_raw(body)])
    ]


def _checked(event: _Event, extensions: Mapping[str, Any], at: str) -> CloudEvent:
    """Return the event if its attributes fit each other. Raises InvalidBodyError."""
    if event.specversion != _VERSION:
        raise InvalidBodyError(
            f"{at}specversion is {shown(event.specversion)!r}; it must be {_VERSION!r}",
            field="specversion",
        )
    if event.time is not None and _TIME.fullmatch(event.time) is None:
        raise InvalidBodyError(
            f"{at}time is {shown(event.time)!r}; it must be an RFC 3339 time with an offset, such"
            " as 2026-01-31T08:15:30Z",
            field="time",
        )
    if isinstance(event.data_base64, str):
        if event.data is not UNSET:
            raise InvalidBodyError(
                f"{at}data_base64 and data are both given; give one of them", field="data_base64"
            )
        try:
            b64decode(event.data_base64, validate=True)
        except ValueError as error:
            raise InvalidBodyError(
                f"{at}data_base64 is not Base64: {error}", field="data_base64"
            ) from error
    data = None if event.data is UNSET else event.data
    return CloudEvent(event.id, event.source, event.type, event.subject, data, extensions)


def _binary(headers: Sequence[tuple[str, bytes]], media: bytes, body: bytes) -> CloudEvent:
    """Return the event whose attributes are in headers and whose data are the body."""
    attributes: dict[str, Any] = {}
    for name, value in headers:
        if name in attributes:
            raise InvalidBodyError(f"there are several ce-{name} headers; give one", field=name)
        try:
            attributes[name] = _unescaped(value)
        except ValueError as error:
            raise InvalidBodyError(
                f"ce-{name} is not UTF-8, as it is or percent-encoded: {error}", field=name
            ) from error
    # The body, whatever headers of these names say.
    for name in ("data", "data_base64"):
        attributes.pop(name, None)
    try:
        extensions = {name: each for name, each in attributes.items() if name not in _NAMES}
        event = _checked(msgspec.convert(attributes, _Event), extensions, "ce-")
    except _MALFORMED as error:
        raise _malformed(error, "ce-") from error
    if not body or (media and not media.endswith((b"/json", b"+json"))):
        return event
    try:
        return event._replace(data=_read_data(body))
    except _MALFORMED as error:
        if not media:
            # Without a Content-Type they may be of any kind.
            return event
        raise _malformed(error) from error


def _unescaped(value: bytes) -> str:
    """Return the text of a header. Some SDKs do not percent-encode it."""
    text = value.decode()
    if len(text) > 1 and text[0] == text[-1] == '"':
        text = re.sub(r"\\(.)", r"\1", text[1:-1])
    return unquote(text, errors="strict")


def _malformed(error: Exception, at: str = "") -> InvalidBodyError:
    """Return the error of a body that could not be read, with the attribute's name."""
    if isinstance(error, RecursionError):
        return InvalidBodyError("body: it is nested too deeply", field="body")
    if not isinstance(error, msgspec.ValidationError):
        return InvalidBodyError(f"body: it is not JSON: {error}", field="body")
    message, _, place = str(error).partition(" - at `$")
    # Keys within the data are `[...]`.
    parts = re.findall(r"\w+", place.removesuffix("`"))
    if missing := _MISSING.fullmatch(message):
        parts.append(missing[1])
        message = "it is required"
    # In a batch, the first part is the event's index.
    names = ["events"] * parts[:1][0].isdigit() + parts if parts else ["body"]
    field = ".".join(names)
    return InvalidBodyError(f"{at}{field}: {message}", field=field)


def _all_added(
    events: Sequence[Keyed], outcomes: Sequence[list[Added] | CounterError]
) -> Sequence[list[Added]]:
    """Return *outcomes*. Raises the error of an event that is not counted; one that a retry may
    mend comes first."""
    added = [each for each in outcomes if not isinstance(each, CounterError)]
    if len(added) == len(events):
        return added
    failed = [
        (each, outcome)
        for each, outcome in zip(events, outcomes, strict=True)
        if isinstance(outcome, CounterError)
    ]
    event, error = min(failed, key=lambda each: each[1].retry == "never")
    if len(failed) < len(events) or any(each.applied is not False for _, each in failed):
        # The answer is about the whole request: false would mean that no event of it counts.
        error.applied = None
    error.detail = f"event {shown(event.key)!r} of {shown(event.scope)!r}: {error.detail}"
    if len(events) > 1:
        error.detail += (
            f"; {len(events) - len(failed)} of {len(events)} events are counted:"
            " if you send the request again, they are not counted again"
        )
    raise error


def _outcomes(
    events: Sequence[Keyed], added: Sequence[Sequence[Added]]
) -> Steps[list[Mapping[str, Any]]]:
    """Return a :class:`api.http.response_models.CloudEventOutcome` for each event."""
    outcomes: list[Mapping[str, Any]] = []
    for event, each in zip(events, added, strict=True):
        outcomes.append(
            {
                "source": event.scope,
                "id": event.key,
                "outcome": OUTCOMES[each[0].replayed] if each else "ignored",
                "adds": [
                    {"counter": counter, "delta": delta} for counter, delta, *_ in event.items
                ],
            }
        )
        if not len(outcomes) % _STEP_EVENTS:
            yield
    return outcomes
