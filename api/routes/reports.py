"""The routes of a counter's past: events, history, listing, metrics; and the recount."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final
from weakref import WeakValueDictionary
from zoneinfo import ZoneInfo

from fastapi import Query
from pydantic.json_schema import SkipJsonSchema

from api.http.auth import Authorizer
from api.http.calendar import CALENDAR, Step, calendar_step, fixed_step
from api.http.call import CSV, JSON, OPENMETRICS, Call, preferred
from api.http.models import (
    CountersOrder,
    CountersQuery,
    EventsQuery,
    HistoryQuery,
    PrefixQuery,
    RecountBody,
)
from api.http.response_models import (
    CountersAnswer,
    EventAnswer,
    EventsAnswer,
    HistoryAnswer,
    HoldOfEvent,
    RecountAnswer,
    RefusedAdd,
    SumAnswer,
)
from api.http.responses import (
    Response,
    count_text,
    held_metrics,
    json_text,
    metric_text,
    metrics_head,
)
from api.http.routing import COUNTER, NAMESPACE, CallOf, InNamespace, OpenMetrics, route
from api.http.streaming import StreamResponse, stream_of
from api.routes.holds import format_hold
from api.routes.paging import CounterLists, paged, parts_of, unknown_page
from api.routes.spans import history_points
from counter import limits
from counter.api_keys import Scope
from counter.bounds import bounds_of, delta_in, delta_of_terms, kind_in, refusal_in
from counter.clock import to_rfc3339
from counter.core.read import Count
from counter.core.service import CounterService
from counter.errors import CounterError, InvalidBodyError, InvalidParameterError
from counter.holds import KINDS, hold_in
from counter.ports import Clock, Store
from counter.quantities import check_counter_name, format_duration
from counter.security.audit_log import AdminLog
from counter.tokens import format_nonce
from counter.types import Accuracy, Event, EventPage, Namespace, Span

_log = logging.getLogger("counter.api")
_CSV: Final[Mapping[str, Any]] = {
    "schema": {"type": "string"},
    "example": "time,count,delta\r\n2026-01-31T08:16:00.000000Z,1,1\r\n",
}
_METRICS: Final[Mapping[str, Any]] = {
    "schema": {"type": "string"},
    "example": 'counter_value{namespace="shop",counter="orders"} 12\n# EOF\n',
}


class LongReads:
    """Lets long reads take turns: one at a time of each namespace, and a few of all together, so
    that many reads of one namespace do not delay those of another."""

    def __init__(self, at_once: int = limits.LONG_READS_AT_ONCE) -> None:
        self._few = asyncio.Semaphore(at_once)
        self._of_namespaces: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def reading(self, namespace_id: int) -> AsyncIterator[None]:
        """Wait for the turn of a namespace, and hold it within the block."""
        lock = self._of_namespaces.setdefault(namespace_id, asyncio.Lock())
        async with lock, self._few:
            yield


@dataclass(frozen=True, slots=True)
class ReportRoutes:
    """Handlers of ``events``, ``history``, ``recount``, ``metrics`` and the listing."""

    service: CounterService
    store: Store
    clock: Clock
    admin_log: AdminLog
    authorizer: Authorizer
    long_reads: LongReads

    @property
    def lists(self) -> CounterLists:
        """All counters of a namespace, in parts."""
        return CounterLists(self.service.reader, self.store)

    @route("GET", f"{COUNTER}/events", Scope.READ, tag="history", shows="the event log")
    async def list_events(
        self, call: CallOf, namespace: InNamespace, query: Annotated[EventsQuery, Query()]
    ) -> EventsAnswer:
        """A counter's events, latest first."""
        from_us, to_us = query.span(self.clock.now_us())
        before = _event_of_page(call.counter, query.page)
        span = Span(from_us or 0, limits.TIME_MAX_US if to_us is None else to_us)
        page = EventPage(span, query.limit + 1, before)
        found = await self.store.events.scan(namespace, call.counter, page)
        events, last = paged(found, query.limit, _place)
        return EventsAnswer(events=[_event(each) for each in events], next_page=last)

    @route(
        "GET",
        f"{COUNTER}/history",
        Scope.READ,
        tag="history",
        shows="history",
        responses={200: {"content": {"text/csv": _CSV}}},
    )
    async def get_history(
        self, call: CallOf, namespace: InNamespace, query: Annotated[HistoryQuery, Query()]
    ) -> Annotated[Response, HistoryAnswer]:
        """A counter's count and delta a step, for charts; CSV with Accept: text/csv."""
        window_us = namespace.settings.rollup_window_us
        now_us = self.clock.now_us()
        from_us, to_us = query.span(now_us, has_calendar=query.step in CALENDAR)
        to_us = now_us if to_us is None else to_us
        from_us = to_us - _usual_span(query.step) if from_us is None else from_us
        step = _step(query, from_us, to_us, window_us)
        settled, rows, as_of_us = await self.service.reader.history(namespace, call.counter, to_us)
        is_csv = preferred(call.headers, (JSON, b"text/csv")) != JSON
        # In a thread: thousands of points take the event loop's time of several requests.
        body = await asyncio.to_thread(
            lambda: _history_text(
                history_points(settled, rows, from_us, min(to_us, as_of_us + 1), step),
                is_csv=is_csv,
            ).encode()
        )
        return Response(200, body, CSV if is_csv else JSON, ((b"vary", b"accept"),))

    @route("POST", f"{COUNTER}/recount", Scope.ADMIN, tag="history", writes=True, status=202)
    async def recount_counter(
        self, call: CallOf, namespace: InNamespace, body: RecountBody | SkipJsonSchema[None] = None
    ) -> Annotated[Response, RecountAnswer]:
        """Have a counter's windows counted again from its events."""
        body = body or RecountBody()
        from_us = body.from_ or 0
        until_us = limits.TIME_MAX_US if body.to is None else body.to
        if from_us >= until_us:
            raise InvalidBodyError(
                f"from {to_rfc3339(from_us)} is not before to {to_rfc3339(until_us)}", field="from"
            )
        asked = {"from": to_rfc3339(from_us), "to": to_rfc3339(until_us)}
        async with self.admin_log.act(
            "counter.recount",
            call.who,
            **{"namespace": namespace.name, "counter": call.counter, **asked},
        ) as act:
            windows = await self.service.recount(namespace, call.counter, from_us, until_us)
            act.to["windows"] = windows
        recounted = RecountAnswer(namespace=namespace.name, counter=call.counter, windows=windows)
        return Response.json(recounted, 202)

    @route("GET", f"{NAMESPACE}/counters", Scope.READ, tag="history", shows="a listing")
    async def list_counters(
        self, call: CallOf, namespace: InNamespace, query: Annotated[CountersQuery, Query()]
    ) -> Annotated[Response, CountersAnswer]:
        """Names of counters, with their counts if they are asked for."""
        by_count = query.order is CountersOrder.COUNT_DOWN
        if query.max_staleness is not None and not (query.counts or query.sum or by_count):
            raise InvalidParameterError(
                "max_staleness is of counts: add counts=true", field="max_staleness"
            )
        prefix, most = query.prefix or "", query.limit + 1
        # The name that the page begins after, and the count of that name if these are in order.
        place = (None, None) if query.page is None else _place_of_list(query.page, by_count)
        _check_prefix(prefix, place[1])
        summed = await self._sum_of(call, namespace, query) if query.sum else None
        if by_count:
            async with self.long_reads.reading(namespace.id):
                await self._charge_all(
                    call, namespace, prefix, "order", "order is -count", "order=name"
                )
                found = await self.lists.largest(
                    namespace, prefix, query.max_staleness, after=place, limit=most
                )
            counts, last = paged(found, query.limit, lambda each: [each.count, each.counter])
            return _listed(namespace, [each.counter for each in counts], counts, last, summed)
        listed = await self.store.control.counters(
            namespace, prefix=prefix, after=place[1], limit=most
        )
        names, last = paged(listed, query.limit, lambda name: [name])
        if not query.counts:
            return _listed(namespace, names, None, last, summed)
        counts = await self.service.reader.read(namespace, names, query.max_staleness)
        return _listed(namespace, names, counts, last, summed)

    async def _sum_of(self, call: Call, namespace: Namespace, query: CountersQuery) -> SumAnswer:
        """Return the sum of all counters with the prefix, each read as a get reads it."""
        prefix, reader, found = query.prefix or "", self.service.reader, list[Count]()
        as_of_us = self.clock.now_us()
        async with self.long_reads.reading(namespace.id):
            why, advice = "a sum reads all of them", "add up the counts of several prefixes"
            await self._charge_all(call, namespace, prefix, "sum", why, advice)
            async for part in self.lists.names(namespace, prefix):
                found += await reader.read(namespace, part, query.max_staleness)
        is_exact = all(each.accuracy is Accuracy.ACCURATE for each in found)
        return SumAnswer(
            count=sum(each.count for each in found),
            counters=len(found),
            as_of=min([as_of_us, *(each.as_of_us for each in found)]),
            accuracy=Accuracy.ACCURATE if is_exact else Accuracy.EVENTUAL,
        )

    @route(
        "GET",
        f"{NAMESPACE}/metrics",
        Scope.READ,
        tag="insight",
        shows="a list of counters",
        response_class=OpenMetrics,
        responses={200: {"content": {OpenMetrics.media_type: _METRICS}}},
    )
    async def get_counts_as_metrics(
        self, call: CallOf, namespace: InNamespace, query: Annotated[PrefixQuery, Query()]
    ) -> Response:
        """Rolled-up counts in OpenMetrics, for Prometheus."""
        _check_prefix(query.prefix)
        prefix, why = query.prefix or "", "metrics have no pages"
        async with self.long_reads.reading(namespace.id):
            await self._charge_all(
                call, namespace, prefix, "prefix", why, "a prefix to each scrape"
            )
            as_of_us, parts = await self.lists.rolled_up(namespace, prefix)
        head = metrics_head(namespace.name, as_of_us).encode()
        pieces = partial(self._exposition, call, namespace, head, parts)
        return StreamResponse.of(OPENMETRICS, stream_of(pieces), lambda: None)

    async def _charge_all(
        self, call: Call, namespace: Namespace, prefix: str, field: str, why: str, advice: str
    ) -> None:
        """Take from the caller's rate as many requests as pages would read all counters with
        *prefix*. Raises InvalidParameterError if there are too many."""
        number = await self.lists.count_names(namespace, prefix, field, why, advice)
        if number > limits.PAGE_ITEMS_MAX:
            call.charge_requests((number - 1) // limits.PAGE_ITEMS_MAX)

    async def _exposition(
        self,
        call: Call,
        namespace: Namespace,
        head: bytes,
        parts: AsyncGenerator[list[Count], None],
    ) -> AsyncGenerator[bytes, None]:
        """Yield an exposition in pieces, as fast as the client reads them. One that ends without
        ``# EOF`` is not whole."""
        yield head
        # Samples of one family follow each other, so those of what is held come last.
        held: list[Count] = []
        async with aclosing(parts):
            while True:
                try:
                    caller = self.authorizer.caller(call.header(b"authorization"))
                    caller.require(Scope.READ, namespace.name)
                    # A client that reads slowly holds no turn.
                    async with self.long_reads.reading(namespace.id):
                        part = await anext(parts, None)
                except CounterError as error:
                    _log.warning("an exposition of namespace %s ends: %s", namespace.name, error)
                    return
                if part is None:
                    break
                held += [each for each in part if any(each.held)]
                yield "".join(metric_text(namespace.name, each) for each in part).encode()
        yield f"{held_metrics(namespace.name, held)}# EOF\n".encode()


def _place_of_list(page: str, by_count: bool) -> tuple[int | None, str]:
    """Return the count, if the list is in order of counts, and the name of a page's last item."""
    if not by_count:
        (name,) = parts_of(page, 1)
        return None, name
    count, name = parts_of(page, 2)
    if type(count) is not int:
        raise unknown_page(page)
    return count, name


def _check_prefix(*texts: str | None) -> None:
    """Raise InvalidParameterError if no counter's name can begin with a text."""
    try:
        for text in texts:
            if text:
                check_counter_name(text)
    except ValueError as error:
        raise InvalidParameterError(f"prefix: {error}", field="prefix") from error


def _listed(
    namespace: Namespace,
    names: Sequence[str],
    counts: Sequence[Count] | None,
    page: str | None,
    summed: SumAnswer | None,
) -> Response:
    """Return a page of a list; as text, because a page has up to a thousand counts."""
    texts = "" if counts is None else ",".join(count_text(namespace.name, each) for each in counts)
    shown = "" if counts is None else f'"counts":[{texts}],'
    if summed is not None:
        shown += f'"sum":{summed.model_dump_json()},'
    page_text = "null" if page is None else json_text(page)
    named = ",".join(map(json_text, names))
    return Response.text(f'{{"counters":[{named}],{shown}"next_page":{page_text}}}')


def _history_text(points: Sequence[tuple[int, int, int]], *, is_csv: bool) -> str:
    """Return a history in CSV or JSON."""
    if is_csv:
        lines = [f"{to_rfc3339(t)},{count},{delta}\r\n" for t, count, delta in points]
        return "time,count,delta\r\n" + "".join(lines)
    texts = [
        f'{{"time":"{to_rfc3339(t)}","count":{count},"delta":{delta}}}'
        for t, count, delta in points
    ]
    return f'{{"points":[{",".join(texts)}]}}\n'


def _usual_span(step: int | str | None) -> int:
    """Return the span of a history that has no beginning."""
    return 30 * CALENDAR[step] if isinstance(step, str) else limits.HOUR


def _step(query: HistoryQuery, from_us: int, to_us: int, window_us: int) -> Step:
    if to_us <= from_us:
        raise InvalidParameterError(
            f"to {to_rfc3339(to_us)} is not after from {to_rfc3339(from_us)}", field="to"
        )
    step_us = query.step
    if step_us is None:
        least_us = max(1, (to_us - from_us) // 60)
        return fixed_step(-(-least_us // window_us) * window_us)
    if isinstance(step_us, str):
        _check_points(step_us, (to_us - from_us) // CALENDAR[step_us])
        end_of = _calendar_step(step_us, query.zone, window_us)
        end_of(from_us)
        return end_of
    text = format_duration(step_us)
    if step_us == 0 or step_us % window_us:
        raise InvalidParameterError(
            f"step is {text}; it must be a multiple of the namespace's rollup_window"
            f" {format_duration(window_us)}",
            field="step",
        )
    _check_points(text, (to_us - from_us) // step_us)
    return fixed_step(step_us)


def _calendar_step(unit: str, zone: ZoneInfo, window_us: int) -> Step:
    end_of = calendar_step(unit, zone)

    def checked(at_us: int) -> int:
        end_us = end_of(at_us)
        if end_us % window_us:
            raise InvalidParameterError(
                f"step {unit}: in {zone.key} one ends at {to_rfc3339(end_us)}, within a window of"
                f" {format_duration(window_us)}: take another tz",
                field="step",
            )
        return end_us

    return checked


def _check_points(step: str, points: int) -> None:
    if points > limits.HISTORY_POINTS_MAX:
        raise InvalidParameterError(
            f"step {step} makes {points} points; at most {limits.HISTORY_POINTS_MAX} are allowed",
            field="step",
        )


def _place(event: Event) -> list[Any]:
    return [event.event_time_us, event.item_key, event.event_id.hex()]


def _event_of_page(counter: str, page: str | None) -> Event | None:
    if page is None:
        return None
    time_us, item_key, event_id = parts_of(page, 3)
    fits = isinstance(time_us, int) and isinstance(item_key, int)
    if not fits or not 0 <= time_us <= limits.TIME_MAX_US or not 0 <= item_key <= 2**31:
        raise unknown_page(page)
    try:
        return Event(counter, time_us, bytes.fromhex(event_id), item_key, 0)
    except ValueError as error:
        raise unknown_page(page) from error


def _event(event: Event) -> EventAnswer:
    changed: dict[str, Any] = {"clear": True} if event.clear else {"delta": event.delta}
    own = bounds_of(event.atom)._asdict()
    changed |= {name: bound for name, bound in own.items() if bound is not None}
    if why := refusal_in(event.atom):
        decided: dict[str, Any] = {"count": why.count, why.name: why.bound} | (
            {"held": why.held} if why.held else {}
        )
        changed["refused"] = RefusedAdd(delta=delta_in(event.delta, event.atom), **decided)
    if kind := KINDS[kind_in(event.atom)]:
        state: Any = "begun" if kind == "hold" else kind
        amount, hold = delta_of_terms(event.atom), format_hold(hold_in(event))
        changed["hold"] = HoldOfEvent(amount=amount, state=state, hold=hold)
    return EventAnswer(
        event_time=event.event_time_us,
        event_id=format_nonce(event.event_id),
        event_item_key=event.item_key,
        **changed,
    )
