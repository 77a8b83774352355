"""Bugs of the adapter for DynamoDB: rules of docs/architecture.md that it does not keep."""

import copy
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from counter.errors import OverloadedError, SliceMissingError, StoreUnavailableError
from counter.storage.dynamodb.control import DynamodbControl
from counter.storage.dynamodb.decisions import DynamodbDecisions
from counter.storage.dynamodb.driver import Driver, NoTableError, delete
from counter.storage.dynamodb.events import DynamodbEvents
from counter.storage.dynamodb.rollups import DynamodbRollups
from counter.types import Event, Namespace, Written
from tests.simulation.bugs import bug
from tests.simulation.mutate import Edit, Swap

_ROWS: Final = "await gather(*(self._driver.write(each) for each in rows))"
_HEAD: Final = "await self._write_head("
_DELETED: Final = """await self._driver.write_many(table, deletes=_keys(
        await self._driver.query(table, pk, row_place(0), row_place(settled_us))))
    """

_Method = Callable[..., Awaitable[Any]]


class _Lagging:
    """A client whose reads are not consistent."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        def call(**request: Any) -> Any:
            request.pop("ConsistentRead", None)
            for asked in request.get("RequestItems", {}).values():
                asked.pop("ConsistentRead", None)
            return getattr(self._client, name)(**request)

        return call


def _eventual(read: _Method) -> _Method:
    async def lagging(self: Driver, *args: Any, **named: Any) -> Any:
        behind = copy.copy(self)
        behind._client = _Lagging(self._client)
        return await read(behind, *args, **named)

    return lagging


def _sent_again(write: _Method) -> _Method:
    async def again(self: Driver, each: Any, *args: Any) -> Any:
        try:
            return await write(self, each, *args)
        except NoTableError:
            raise
        except StoreUnavailableError:
            item = each.request.get("Item", {})
            if "o" in item:
                item = {**item, "o": {"B": b"another"}}
                each = replace(each, request={**each.request, "Item": item})
            return await write(self, each, *args)

    return again


def _throttled_is_written(append: _Method) -> _Method:
    async def acknowledged(
        self: DynamodbEvents, namespace: Namespace, events: Sequence[Event]
    ) -> Any:
        answers = await append(self, namespace, events)
        return [Written.NEW if isinstance(each, OverloadedError) else each for each in answers]

    return acknowledged


def _missing_is_not_found(find: _Method) -> _Method:
    async def found(self: DynamodbEvents, namespace: Namespace, events: Sequence[Event]) -> Any:
        try:
            return await find(self, namespace, events)
        except SliceMissingError:
            return [None] * len(events)

    return found


async def _void_by_deletion(
    self: DynamodbEvents, namespace: Namespace, events: Sequence[Event]
) -> None:
    for table, key in await self._places(namespace, events):
        await self._driver.write(delete(table, key))


def _removed(delete_namespace: _Method) -> _Method:
    async def deleted(self: DynamodbControl, namespace: Namespace) -> Any:
        done = await delete_namespace(self, namespace)
        for partition in (b"namespaces", b"gone namespaces"):
            key = partition, namespace.name.encode()
            await self._driver.write(delete(self._table, key))
        return done

    return deleted


def _once(transact: _Method) -> _Method:
    """Do the writes of a transaction one by one, even after a refusal."""

    async def each_alone(self: Driver, writes: Sequence[Any], *args: Any) -> Any:
        refused = [await transact(self, [each], *args) for each in writes]
        return None if not any(refused) else [each and each[0] for each in refused]

    return each_alone


BUGS: Final = (
    bug("get-eventual", "an item is read from a replica that is behind",
        Swap(Driver, "get", of=_eventual)),
    bug("get-many-eventual", "events are looked up in a replica that is behind",
        Swap(Driver, "get_many", of=_eventual)),
    bug("query-eventual", "tails, marks and watermarks are read from a replica that is behind",
        Swap(Driver, "query", of=_eventual)),
    bug("sent-again", "a put without an answer is sent again, as another attempt",
        Swap(Driver, "write", of=_sent_again)),
    bug("cancel-overwrites", "a cancel replaces any decision by what its look-up found",
        Edit(DynamodbDecisions.cancel, "decision.over(stored)", "decision")),
    bug("cancelled-item-kept", "a decision that is cancelled does not expire",
        Edit(DynamodbDecisions._set_decision, "EXPIRES: until_us // SECOND,",
             "**({} if seen else {EXPIRES: until_us // SECOND}),")),
    bug("void-by-deletion", "an event is made void by its deletion",
        Swap(DynamodbEvents, "void", _void_by_deletion)),
    bug("namespace-item-removed", "the item of a deleted namespace is removed",
        Swap(DynamodbControl, "delete_namespace", of=_removed)),
    bug("missing-is-not-found", "an event of a missing table is not found",
        Swap(DynamodbEvents, "find", of=_missing_is_not_found)),
    bug("throttled-is-written", "an add that is throttled is acknowledged",
        Swap(DynamodbEvents, "append", of=_throttled_is_written)),
    bug("head-before-rows", "a checkpoint is written before its rows",
        Edit(DynamodbRollups._apply, _ROWS, "pass"),
        Edit(DynamodbRollups._apply, "done = [", f"{_ROWS}\n    done = [")),
    bug("rows-not-awaited", "a checkpoint is written while its rows are on their way",
        Edit(DynamodbRollups._apply, _ROWS, _ROWS.removeprefix("await "))),
    bug("settled-rows-first", "rows are deleted before the checkpoint that has settled them",
        Edit(DynamodbRollups._apply, _HEAD, _DELETED + _HEAD),
        Edit(DynamodbRollups._apply, "items = await", "return\n        items = await")),
    bug("transaction-in-parts", "the writes of a transaction are done each by itself",
        Swap(Driver, "transact", of=_once)),
)  # fmt: skip
