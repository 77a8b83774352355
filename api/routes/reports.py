"""The routes that show a counter's past: events, history, listing; and have it counted anew."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from api.http.answer_models import CountersAnswer, EventsAnswer, HistoryAnswer, RecountAnswer
from api.http.answers import json_reply
from api.http.call import CSV, Reply
from api.http.models import RecountBody
from api.http.routing import (
    COUNTER,
    NAMESPACE,
    CallOf,
    Doc,
    Route,
    paged,
    prefixed,
    spanned,
    stepped,
)
from api.routes.acts import who_of
from counter import limits
from counter.clock import to_rfc3339, to_us
from counter.core.service import CounterService
from counter.durations import format_duration, parse_duration
from counter.errors import InvalidBodyError, InvalidParameterError
from counter.folds import fold_rows
from counter.names import check_counter_name
from counter.ports import Clock, Store
from counter.security.audit_log import AdminLog
from counter.tokens import format_nonce
from counter.types import Checkpoint, Event, Scope, WindowRow

_LIMIT_DIGITS_MAX: Final = 9
_CSV_EXAMPLE: Final = "time,count,delta\r\n2026-01-31T08:16:00.000000Z,1,1\r\n"


class ReportRoutes:
    """Handlers of ``events``, ``history``, ``recount`` and the listing of counters."""

    def __init__(
        self, service: CounterService, store: Store, clock: Clock, admin_log: AdminLog
    ) -> None:
        self._service = service
        self._store = store
        self._clock = clock
        self._admin_log = admin_log

    def routes(self) -> list[Route]:
        """The routes."""
        csv = {"schema": {"type": "string"}, "example": _CSV_EXAMPLE}
        return [
            Route(
                *("GET", f"{COUNTER}/events", self.events, Scope.READ),
                Doc(
                    *("listEvents", "A counter's events, latest first", "history", EventsAnswer),
                    reads=(paged, spanned),
                ),
            ),
            Route(
                *("GET", f"{COUNTER}/history", self.history, Scope.READ),
                Doc(
                    "getHistory",
                    "A counter's count and delta a step, for charts; CSV with Accept: text/csv",
                    *("history", HistoryAnswer),
                    reads=(spanned, stepped),
                    responses={200: {"content": {"text/csv": csv}}},
                ),
            ),
            Route(
                *("POST", f"{COUNTER}/recount", self.recount, Scope.ADMIN),
                Doc(
                    "recountCounter",
                    "Have a counter's windows counted again from its events",
                    *("history", RecountAnswer, RecountBody),
                    status=202,
                    body_may_be_empty=True,
                ),
                writes=True,
            ),
            Route(
                *("GET", f"{NAMESPACE}/counters", self.counters, Scope.READ),
                Doc(
                    *("listCounters", "Names of counters in code point order", "history"),
                    CountersAnswer,
                    reads=(prefixed, paged),
                ),
            ),
        ]

    async def events(self, call: CallOf) -> Reply:
        """A counter's events, latest first, a page at a time."""
        namespace = self._service.namespaces.get(call.namespace)
        self._service.require_events(namespace, "the event log")
        query = call.query("limit", "page", "from", "to")
        limit = limit_of(query)
        found = await self._store.scan(
            namespace,
            call.counter,
            from_us=_instant(query, "from", 0),
            to_us=_instant(query, "to", limits.TIME_MAX_US),
            before=_event_of_page(call.counter, query.get("page")),
            limit=limit + 1,
        )
        page = _page(_place(found[limit - 1])) if len(found) > limit else None
        return json_reply({"events": [_event(e) for e in found[:limit]], "next_page": page})

    async def history(self, call: CallOf) -> Reply:
        """A counter's count and delta a step, in JSON or CSV."""
        namespace = self._service.namespaces.get(call.namespace)
        self._service.require_events(namespace, "history")
        query = call.query("from", "to", "step")
        window_us = namespace.settings.rollup_window_us
        now_us = self._clock.now_us()
        to_us = _instant(query, "to", now_us)
        from_us = _instant(query, "from", to_us - limits.HOUR)
        step_us = _step(query, from_us, to_us, window_us)
        settled, rows, as_of_us = await self._service.reader.history(namespace, call.counter, to_us)
        points = history_points(settled, rows, from_us, min(to_us, as_of_us + 1), step_us)
        if (call.header(b"accept") or b"").startswith(b"text/csv"):
            lines = [f"{to_rfc3339(t)},{count},{delta}\r\n" for t, count, delta in points]
            return Reply(200, ("time,count,delta\r\n" + "".join(lines)).encode(), CSV)
        return json_reply(
            {
                "points": [
                    {"time": to_rfc3339(time_us), "count": count, "delta": delta}
                    for time_us, count, delta in points
                ]
            }
        )

    async def recount(self, call: CallOf) -> Reply:
        """Have a counter's windows counted anew from its events."""
        namespace = self._service.namespaces.get(call.namespace)
        body = await call.json_or(RecountBody())
        from_us = 0 if body.from_ is None else to_us(body.from_)
        until_us = limits.TIME_MAX_US if body.to is None else to_us(body.to)
        if from_us >= until_us:
            raise InvalidBodyError(
                f"from {to_rfc3339(from_us)} is not before to {to_rfc3339(until_us)}", field="from"
            )
        asked = {"from": to_rfc3339(from_us), "to": to_rfc3339(until_us)}
        async with self._admin_log.act(
            "counter.recount",
            who_of(call),
            **{"namespace": namespace.name, "counter": call.counter, **asked},
        ) as act:
            windows = await self._service.recount(namespace, call.counter, from_us, until_us)
            act.to["windows"] = windows
        answer = {"namespace": namespace.name, "counter": call.counter, "windows": windows}
        return json_reply(answer, 202)

    async def counters(self, call: CallOf) -> Reply:
        """Names of counters in code point order, a page at a time."""
        namespace = self._service.namespaces.get(call.namespace)
        self._service.require_events(namespace, "a listing")
        query = call.query("prefix", "limit", "page")
        limit = limit_of(query)
        prefix = query.get("prefix", "")
        after = None
        if "page" in query:
            (after,) = _parts(query["page"], 1)
        try:
            for text in (prefix, after):
                if text:
                    check_counter_name(text)
        except ValueError as error:
            raise InvalidParameterError(f"prefix: {error}", field="prefix") from error
        names = await self._store.counters(namespace, prefix=prefix, after=after, limit=limit + 1)
        page = _page([names[limit - 1]]) if len(names) > limit else None
        return json_reply({"counters": list(names[:limit]), "next_page": page})


def history_points(
    settled: Checkpoint, rows: Sequence[WindowRow], from_us: int, to_us: int, step_us: int
) -> list[tuple[int, int, int]]:
    """(instant, count just before it, change since the step began) for each step of [from, to).

    Steps are aligned to the epoch; the last one ends at *to_us*. What lies at or before *settled*
    is known only as one sum: it is in the first count, and in no delta.
    """
    start_us = max(from_us, settled.time_us + 1 if settled.time_us else from_us)
    count = fold_rows(settled.count, (row for row in rows if row.window_us < start_us))
    later = iter([row for row in rows if row.window_us >= start_us])
    row = next(later, None)
    points: list[tuple[int, int, int]] = []
    at_us = start_us - start_us % step_us
    while at_us < to_us:
        at_us += step_us
        before = count
        while row is not None and row.window_us < min(at_us, to_us):
            count = row.total if row.cleared else count + row.total
            row = next(later, None)
        points.append((min(at_us, to_us), count, count - before))
    return points


def _step(query: dict[str, str], from_us: int, to_us: int, window_us: int) -> int:
    if to_us <= from_us:
        raise InvalidParameterError(
            f"to {to_rfc3339(to_us)} is not after from {to_rfc3339(from_us)}", field="to"
        )
    text = query.get("step")
    if text is None:
        least_us = max(1, (to_us - from_us) // 60)
        return -(-least_us // window_us) * window_us
    try:
        step_us = parse_duration(text)
    except ValueError as error:
        raise InvalidParameterError(f"step: {error}", field="step") from error
    if step_us == 0 or step_us % window_us:
        raise InvalidParameterError(
            f"step is {text}; it must be a multiple of the namespace's rollup_window"
            f" {format_duration(window_us)}",
            field="step",
        )
    points = (to_us - from_us) // step_us
    if points > limits.HISTORY_POINTS_MAX:
        raise InvalidParameterError(
            f"step {text} makes {points} points; at most {limits.HISTORY_POINTS_MAX} are allowed",
            field="step",
        )
    return step_us


def limit_of(
    query: Mapping[str, str],
    default: int = limits.PAGE_ITEMS_DEFAULT,
    most: int = limits.PAGE_ITEMS_MAX,
) -> int:
    """How many are asked for. Raises InvalidParameterError."""
    text = query.get("limit", str(default))
    plain = text.isascii() and text.isdigit() and len(text) <= _LIMIT_DIGITS_MAX
    if not (plain and 1 <= int(text) <= most):
        raise InvalidParameterError(
            f"limit is {text[:40]!r}; it must be from 1 to {most}", field="limit"
        )
    return int(text)


def _instant(query: dict[str, str], name: str, default_us: int) -> int:
    text = query.get(name)
    if text is None:
        return default_us
    try:
        # A plus sign in a query that was not percent-encoded arrives as a space.
        moment = datetime.fromisoformat(text.replace(" ", "+"))
        if moment.tzinfo is None:
            raise ValueError("it has no offset")
        instant_us = to_us(moment)
    except (ValueError, OverflowError) as error:
        raise InvalidParameterError(
            f"{name} is {text[:40]!r}, not an RFC 3339 time with an offset: {error}", field=name
        ) from error
    return max(0, min(instant_us, limits.TIME_MAX_US))


def _page(parts: Sequence[Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(parts).encode()).decode().rstrip("=")


def _parts(page: str, count: int) -> list[Any]:
    try:
        parts = json.loads(base64.urlsafe_b64decode(page + "=" * (-len(page) % 4)))
        if not isinstance(parts, list) or len(parts) != count or not isinstance(parts[-1], str):
            raise ValueError("it has other parts")
    except (ValueError, binascii.Error, RecursionError) as error:
        raise InvalidParameterError(
            f"page {page[:40]!r} is not one that this service gave out", field="page"
        ) from error
    return parts


def _place(event: Event) -> list[Any]:
    return [event.event_time_us, event.item_key, event.event_id.hex()]


def _event_of_page(counter: str, page: str | None) -> Event | None:
    if page is None:
        return None
    time_us, item_key, event_id = _parts(page, 3)
    fits = isinstance(time_us, int) and isinstance(item_key, int)
    if not fits or not 0 <= time_us <= limits.TIME_MAX_US or not 0 <= item_key <= 2**31:
        raise InvalidParameterError(
            f"page {page[:40]!r} is not one that this service gave out", field="page"
        )
    try:
        return Event(counter, time_us, bytes.fromhex(event_id), item_key, 0)
    except ValueError as error:
        raise InvalidParameterError(
            f"page {page[:40]!r} is not one that this service gave out", field="page"
        ) from error


def _event(event: Event) -> dict[str, Any]:
    body: dict[str, Any] = {
        "event_time": to_rfc3339(event.event_time_us),
        "event_id": format_nonce(event.event_id),
        "event_item_key": event.item_key,
    }
    return body | ({"clear": True} if event.clear else {"delta": event.delta})
