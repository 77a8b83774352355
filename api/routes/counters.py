"""The routes of counters: add, clear, get, and their batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import pydantic_core
from fastapi import Query
from pydantic import TypeAdapter, ValidationError

from api.http.answer_models import (
    AddAndGetAnswer,
    AddAnswer,
    AtomicAddAnswer,
    BatchAddAnswer,
    BatchGetAnswer,
    ClearAnswer,
    CountAnswer,
)
from api.http.answers import (
    added_reply,
    added_text,
    added_texts,
    cleared_reply,
    count_reply,
    count_text,
)
from api.http.call import JSON, NDJSON, Call, Reply
from api.http.fast_json import read_batch
from api.http.models import (
    AddBody,
    AtomicAddBody,
    BatchAddBody,
    BatchAddItem,
    BatchGetBody,
    ClearBody,
    StalenessQuery,
    TokenBody,
    check_size,
)
from api.http.problems import body_error, problem_bytes
from api.http.routing import COUNTER, NAMESPACE, REPLAYED, CallOf, InNamespace, keyed, route
from api.telemetry.request_log import LoggedWrite
from counter.clock import to_rfc3339
from counter.core.results import Add, Added, Credential
from counter.core.service import CounterService
from counter.errors import CounterError, InvalidBodyError, InvalidParameterError
from counter.names import check_counter_name
from counter.tokens import parse_generation_time, parse_nonce
from counter.types import Namespace, Scope, Token

#: Writes under one token, which may be that of a header.
_KEYED: Final[Mapping[str, Any]] = {
    "writes": True,
    "problems": (409, 410),
    "headers": (REPLAYED,),
    "declares": (keyed,),
}
#: One item a line in, one outcome a line out.
_LINES: Final[Mapping[str, Any]] = {"content": {NDJSON.decode(): {"schema": {"type": "string"}}}}
_BATCH_ADD_ITEM: Final[TypeAdapter[BatchAddItem]] = TypeAdapter(BatchAddItem)


def batch(body: BatchAddBody) -> None:
    """A body that the handler reads by itself, because it may be lines too."""


@dataclass(frozen=True, slots=True)
class CounterRoutes:
    """``/v1/namespaces/{namespace}/counters/{counter}`` and the batches, the hottest first."""

    service: CounterService
    batch_items_max: int

    @route("POST", f"{COUNTER}/add", Scope.WRITE, tag="counters", adds=1, **_KEYED)
    async def add_to_counter(
        self, call: CallOf, namespace: InNamespace, body: AddBody
    ) -> Annotated[Reply, AddAnswer]:
        """Add to a counter, once for the token."""
        return added_reply(namespace, await self._add(call, namespace, body))

    @route("GET", COUNTER, Scope.READ, tag="counters")
    async def get_counter(
        self,
        call: CallOf,
        namespace: InNamespace,
        query: Annotated[StalenessQuery, Query()],
    ) -> Annotated[Reply, CountAnswer]:
        """Read a counter."""
        count = self.service.reader.peek(namespace, call.counter, query.max_staleness)
        if count is not None:
            return count_reply(namespace.name, count)
        count = await self.service.reader.read_one(namespace, call.counter, query.max_staleness)
        return Reply(200, count_text(namespace.name, count).encode())

    @route(
        "POST",
        f"{NAMESPACE}/batch/add",
        Scope.WRITE,
        tag="batches",
        writes=True,
        declares=(batch,),
        responses={200: _LINES},
        openapi_extra={"requestBody": _LINES},
    )
    async def batch_add(
        self, call: CallOf, namespace: InNamespace
    ) -> Annotated[Reply, BatchAddAnswer]:
        """Add to many counters, a token each; an outcome for each item, in order."""
        ndjson = call.content_type(JSON, NDJSON) == NDJSON
        if call.header(b"idempotency-key") is not None:
            raise InvalidParameterError(
                "a batch takes an idempotency_token in each item, and no Idempotency-Key header;"
                " atomic/add takes one for all its items",
                field="Idempotency-Key",
            )
        body = await call.body()
        events = None if ndjson else read_batch(body)
        if events is not None:
            self._check_items(len(events), "items")
            call.charge(len(events))
            results = call.logged["results"] = await self.service.add_events(namespace, events)
            return _results(added_texts(namespace, results))
        items = self._batch_items(body, ndjson)
        call.charge(len(items))
        adds = [item for item in items if isinstance(item, Add)]
        outcomes = await self.service.add_many(namespace, adds)
        if len(adds) < len(items):
            left = iter(outcomes)
            outcomes = [next(left) if isinstance(item, Add) else item for item in items]
        call.logged["results"] = outcomes
        texts = added_texts(namespace, outcomes)
        if ndjson:
            return Reply(200, "".join(f"{text}\n" for text in texts).encode(), NDJSON)
        return _results(texts)

    @route("POST", f"{NAMESPACE}/batch/get", Scope.READ, tag="batches")
    async def batch_get(
        self, call: CallOf, namespace: InNamespace, body: BatchGetBody
    ) -> Annotated[Reply, BatchGetAnswer]:
        """Read many counters."""
        self._check_items(len(body.counters), "counters")
        problems = {name: _name_problem(name, i) for i, name in enumerate(body.counters)}
        names = [name for name in body.counters if problems[name] is None]
        counts = iter(await self.service.reader.read(namespace, names, body.max_staleness))
        return _results(
            problems[name] or count_text(namespace.name, next(counts)) for name in body.counters
        )

    @route("POST", f"{COUNTER}/add-and-get", Scope.WRITE, tag="counters", adds=1, **_KEYED)
    async def add_to_counter_and_get(
        self, call: CallOf, namespace: InNamespace, body: AddBody
    ) -> Annotated[Reply, AddAndGetAnswer]:
        """Add, and read the count with the add in it."""
        added = await self._add(call, namespace, body)
        count = await self.service.reader.read_one(namespace, call.counter, 0)
        extra = f',"count":{count.count},"as_of":"{to_rfc3339(count.as_of_us)}"'
        return added_reply(namespace, added, extra)

    async def _add(self, call: Call, namespace: Namespace, body: AddBody) -> Added:
        credential = call.credential(token_of(body.idempotency_token))
        call.logged["of"] = LoggedWrite(namespace, "add", call.counter, credential)
        added = await self.service.add(namespace, call.counter, body.delta, credential)
        call.logged["results"] = (added,)
        return added

    @route("POST", f"{NAMESPACE}/atomic/add", Scope.WRITE, tag="batches", **_KEYED)
    async def atomic_add(
        self, call: CallOf, namespace: InNamespace, body: AtomicAddBody
    ) -> Annotated[Reply, AtomicAddAnswer]:
        """Add to many counters under one token: all of them or none."""
        credential = call.credential(token_of(body.idempotency_token))
        items = [(item.counter, item.delta) for item in body.items]
        call.charge(len(items))
        call.logged["of"] = LoggedWrite(namespace, "atomic", "", credential)
        added = call.logged["results"] = await self.service.add_atomic(namespace, items, credential)
        reply = _results(added_text(namespace, each) for each in added)
        return reply._replace(headers=added_reply(namespace, added[0]).headers)

    @route("POST", f"{COUNTER}/clear", Scope.WRITE, tag="counters", adds=1, **_KEYED)
    async def clear_counter(
        self, call: CallOf, namespace: InNamespace, body: ClearBody
    ) -> Annotated[Reply, ClearAnswer]:
        """Set a counter to 0 as of the token's time."""
        credential = call.credential(token_of(body.idempotency_token))
        call.logged["of"] = LoggedWrite(namespace, "clear", call.counter, credential)
        cleared = await self.service.clear(namespace, call.counter, credential)
        call.logged["results"] = (cleared,)
        return cleared_reply(namespace, cleared)

    def _batch_items(self, body: bytes, ndjson: bool) -> list[Add | CounterError]:
        """The items of a batch, each valid or its own problem."""
        if ndjson:
            lines = [line for line in body.split(b"\n") if line.strip()]
            self._check_items(len(lines), "items")
            return [_batch_item(line, index) for index, line in enumerate(lines)]
        check_size(BatchAddBody, body)
        try:
            # All at once first: bad items are rare.
            items = BatchAddBody.model_validate_json(body).items
        except ValidationError as error:
            raws = _raw_items(body, error)
            self._check_items(len(raws), "items")
            return [_batch_item(pydantic_core.to_json(raw), i) for i, raw in enumerate(raws)]
        self._check_items(len(items), "items")
        return [_add_of(item, index) for index, item in enumerate(items)]

    def _check_items(self, count: int, field: str) -> None:
        if not 1 <= count <= self.batch_items_max:
            raise InvalidBodyError(
                f"{field} has {count} items; 1 to {self.batch_items_max} are allowed", field=field
            )


def _results(texts: Iterable[str]) -> Reply:
    return Reply(200, f'{{"results":[{",".join(texts)}]}}'.encode())


def token_of(body: TokenBody | None) -> Token | None:
    """The token of a body. Raises InvalidBodyError, naming the field, the value and the bound."""
    if body is None:
        return None
    text = body["token"]
    try:
        nonce = parse_nonce(text)
    except ValueError as error:
        raise InvalidBodyError(
            f"idempotency_token.token is {text!r}, not a nonce of 128 bits: write it as a"
            " UUID or as 32 hexadecimal digits",
            field="idempotency_token.token",
        ) from error
    text = body["generation_time"]
    try:
        time_us = parse_generation_time(text)
    except (ValueError, OverflowError) as error:
        raise InvalidBodyError(
            f"idempotency_token.generation_time is {text!r}: {error}; write it like"
            " 2026-01-31T08:15:30.000250Z",
            field="idempotency_token.generation_time",
        ) from error
    return Token(nonce, time_us)


def _add_of(item: BatchAddItem, index: int) -> Add | CounterError:
    try:
        token: Credential = token_of(item.get("idempotency_token"))
    except CounterError as error:
        error.detail = f"items.{index}.{error.detail}"
        return error
    return Add(item["counter"], item["delta"], token)


def _raw_items(body: bytes, error: ValidationError) -> list[Any]:
    """The items of a JSON body of which some are bad; *error* if it has none."""
    wrong = error.errors(include_url=False, include_context=False, include_input=False)
    if any(each["loc"][:1] != ("items",) or len(each["loc"]) < 2 for each in wrong):
        raise body_error(error) from error
    items: list[Any] = pydantic_core.from_json(body)["items"]
    return items


def _batch_item(raw: bytes, index: int) -> Add | CounterError:
    try:
        check_size(BatchAddItem, raw, f"items.{index}.")
        item = _BATCH_ADD_ITEM.validate_json(raw)
    except InvalidBodyError as error:
        return error
    except ValidationError as error:
        return body_error(error, ("items", index))
    return _add_of(item, index)


def _name_problem(name: str, index: int) -> str | None:
    """The problem of a counter's name that is not valid, in JSON."""
    try:
        check_counter_name(name)
    except ValueError as error:
        return problem_bytes(InvalidBodyError(f"counters.{index}: {error}")).decode()
    return None
