"""The routes of counters: add, clear, get, and their batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final

from fastapi import Query
from pydantic.json_schema import SkipJsonSchema

from api.http.call import JSON, NDJSON, Call
from api.http.connections import ReadQueue, Steps
from api.http.models import (
    AddBody,
    AtomicAddBody,
    BatchAddBody,
    BatchGetBody,
    ClearBody,
    CountQuery,
)
from api.http.problems import ItemProblems, problem_bytes
from api.http.response_models import (
    AddAndGetAnswer,
    AddAnswer,
    AtomicAddAnswer,
    BatchAddAnswer,
    BatchGetAnswer,
    ClearAnswer,
    CountAnswer,
)
from api.http.responses import (
    Response,
    added_response,
    added_text,
    cleared_response,
    count_response,
    count_text,
    results_response,
)
from api.http.routing import COUNTER, NAMESPACE, REPLAYED, TTL, CallOf, InNamespace, keyed, route
from api.routes.add_stream import AddStreams
from api.routes.items import Items, check_number, items_of, lines_of, terms_from, texts_of, token_of
from api.routes.spans import change_between
from api.telemetry.request_log import LoggedWrite
from counter.api_keys import Scope
from counter.background import TURN_ITEMS
from counter.clock import to_rfc3339
from counter.core.read import Count
from counter.core.results import Added
from counter.core.service import CounterService
from counter.errors import CounterError, InvalidBodyError, InvalidParameterError
from counter.ports import Clock, Store
from counter.quantities import check_counter_name
from counter.types import Accuracy, Namespace

#: Writes under one token, which may be that of a header.
_KEYED: Final[Mapping[str, Any]] = {
    "writes": True,
    "problems": (409, 410),
    "headers": (REPLAYED, TTL),
    "declares": (keyed,),
}
#: One item a line in, one outcome a line out.
_LINES: Final[Mapping[str, Any]] = {"content": {NDJSON.decode(): {"schema": {"type": "string"}}}}


def batch(body: BatchAddBody) -> None:
    """A body that the handler reads by itself, because it may be lines too."""


@dataclass(frozen=True, slots=True)
class CounterRoutes:
    """``/v1/namespaces/{namespace}/counters/{counter}`` and the batches, the hottest first."""

    service: CounterService
    store: Store
    clock: Clock
    batch_items_max: int
    streams: AddStreams
    #: Reads the items of batches and makes their responses in turn.
    queue: ReadQueue

    @route("POST", f"{COUNTER}/add", Scope.WRITE, tag="counters", adds=1, **_KEYED)
    async def add_to_counter(
        self, call: CallOf, namespace: InNamespace, body: AddBody
    ) -> Annotated[Response, AddAnswer]:
        """Add to a counter, once for the token."""
        return added_response(namespace, await self._add(call, namespace, body))

    @route("GET", COUNTER, Scope.READ, tag="counters")
    async def get_counter(
        self,
        call: CallOf,
        namespace: InNamespace,
        query: Annotated[CountQuery, Query()],
    ) -> Annotated[Response, CountAnswer]:
        """Read a counter, or its change in a span of time."""
        reader = self.service.reader
        from_us, to_us = query.span(self.clock.now_us())
        if from_us is not None or to_us is not None:
            return await self._change(call, namespace, query, (from_us, to_us))
        count = reader.peek(namespace, call.counter, query.max_staleness)
        if count is not None:
            return count_response(namespace.name, count)
        count = await reader.read_one(namespace, call.counter, query.max_staleness)
        return Response.text(count_text(namespace.name, count))

    async def _change(
        self,
        call: Call,
        namespace: Namespace,
        query: CountQuery,
        span: tuple[int | None, int | None],
    ) -> Response:
        """Return the count at the end of *span*, and its change in it."""
        if query.max_staleness is not None:
            raise InvalidParameterError(
                "max_staleness is of the count now: leave it out with from and to",
                field="max_staleness",
            )
        end_us, count, change = await change_between(
            *(self.service.reader, self.store.events, self.clock.now_us()),
            *(namespace, call.counter, span),
        )
        exact = Count(call.counter, count, end_us, Accuracy.ACCURATE)
        since = "" if span[0] is None else f',"from":"{to_rfc3339(span[0])}"'
        return Response.text(count_text(namespace.name, exact, f',"delta":{change}{since}'))

    @route(
        "POST",
        f"{NAMESPACE}/batch/add",
        Scope.WRITE,
        tag="batches",
        writes=True,
        headers=(TTL,),
        declares=(batch,),
        responses={200: _LINES},
        openapi_extra={"requestBody": _LINES},
    )
    async def batch_add(
        self, call: CallOf, namespace: InNamespace
    ) -> Annotated[Response, BatchAddAnswer]:
        """Add to many counters, a token each; an outcome for each item, in order."""
        ndjson = call.content_type(JSON, NDJSON) == NDJSON
        if ndjson and call.header(b"transfer-encoding") is not None:
            call.require_plain()
            return await self.streams.open(call)
        body = await call.body()
        if ndjson:
            reading = Items.of_lines(lines_of(body, self.batch_items_max))
        else:
            reading = Items.of_json(body, self.batch_items_max)
        items = await call.read_in_turn(self.queue, reading)
        call.charge(len(items.events or items.adds))
        outcomes = call.logged["results"] = await items.add(self.service, namespace, call.allowance)
        texts = await self.queue.answer(texts_of(namespace, outcomes))
        if ndjson:
            return Response(200, "".join(f"{text}\n" for text in texts).encode(), NDJSON)
        return results_response(texts)

    @route("POST", f"{NAMESPACE}/batch/get", Scope.READ, tag="batches")
    async def batch_get(
        self, call: CallOf, namespace: InNamespace, body: BatchGetBody
    ) -> Annotated[Response, BatchGetAnswer]:
        """Read many counters."""
        check_number("counters", len(body.counters), self.batch_items_max)
        problems = await self.queue.run(_name_problems(body.counters))
        names = [name for name in body.counters if name not in problems]
        counts = iter(await self.service.reader.read(namespace, names, body.max_staleness))
        return results_response(
            problems.get(name) or count_text(namespace.name, next(counts)) for name in body.counters
        )

    @route("POST", f"{COUNTER}/add-and-get", Scope.WRITE, tag="counters", adds=1, **_KEYED)
    async def add_to_counter_and_get(
        self, call: CallOf, namespace: InNamespace, body: AddBody
    ) -> Annotated[Response, AddAndGetAnswer]:
        """Add, and read the count with the add in it."""
        added = await self._add(call, namespace, body)
        count = await self.service.reader.read_one(namespace, call.counter, 0)
        extra = f',"count":{count.count},"as_of":"{to_rfc3339(count.as_of_us)}"'
        return added_response(namespace, added, extra)

    async def _add(self, call: Call, namespace: Namespace, body: AddBody) -> Added:
        credential = call.credential(token_of(body.idempotency_token))
        call.logged["of"] = LoggedWrite(namespace, "add", call.counter, credential)
        terms = terms_from(body.delta, body.at_least, body.at_most)
        added = await self.service.add(
            namespace, call.counter, body.delta, credential, call.allowance, terms
        )
        call.logged["results"] = (added,)
        return added

    @route("POST", f"{NAMESPACE}/atomic/add", Scope.WRITE, tag="batches", **_KEYED)
    async def atomic_add(
        self, call: CallOf, namespace: InNamespace, body: AtomicAddBody
    ) -> Annotated[Response, AtomicAddAnswer]:
        """Add to many counters under one token: all of them or none."""
        credential = call.credential(token_of(body.idempotency_token))
        items = items_of(body.items)
        call.charge(len(items))
        call.logged["of"] = LoggedWrite(namespace, "atomic", "", credential)
        added = call.logged["results"] = await self.service.add_atomic(
            namespace, items, credential, call.allowance
        )
        response = results_response(added_text(namespace, each) for each in added)
        return response._replace(headers=added_response(namespace, added[0]).headers)

    @route("POST", f"{COUNTER}/clear", Scope.WRITE, tag="counters", adds=1, **_KEYED)
    async def clear_counter(
        self, call: CallOf, namespace: InNamespace, body: ClearBody
    ) -> Annotated[Response, ClearAnswer]:
        """Set a counter to 0 as of the token's time."""
        credential = call.credential(token_of(body.idempotency_token))
        call.logged["of"] = LoggedWrite(namespace, "clear", call.counter, credential)
        cleared = await self.service.clear(namespace, call.counter, credential, call.allowance)
        call.logged["results"] = (cleared,)
        return cleared_response(namespace, cleared)

    @route("DELETE", COUNTER, Scope.WRITE, tag="counters", adds=1, **_KEYED)
    async def delete_counter(
        self, call: CallOf, namespace: InNamespace, body: ClearBody | SkipJsonSchema[None] = None
    ) -> Annotated[Response, ClearAnswer]:
        """Set a counter to 0 as of the token's time, and list it no more."""
        credential = call.credential(token_of(body.idempotency_token if body else None))
        call.logged["of"] = LoggedWrite(namespace, "delete", call.counter, credential)
        deleted = await self.service.delete(namespace, call.counter, credential, call.allowance)
        call.logged["results"] = (deleted,)
        return cleared_response(namespace, deleted)


def _name_problems(names: Sequence[str]) -> Steps[Mapping[str, str]]:
    """Return the problem, in JSON, of each of *names* that is not valid."""
    problems, found = ItemProblems(), dict[str, CounterError]()
    for index, name in enumerate(names):
        if index and not index % TURN_ITEMS:
            yield
        try:
            check_counter_name(name)
        except ValueError as error:
            found[name] = problems.of(error, partial(_name_problem, index))
    texts = {each: problem_bytes(each).decode() for each in set(found.values())}
    return {name: texts[each] for name, each in found.items()}


def _name_problem(index: int, error: ValueError) -> CounterError:
    return InvalidBodyError(f"counters.{index}: {error}")
