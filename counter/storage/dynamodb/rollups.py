"""Marks, watermarks and counts: pending work of the rollup, its progress, and its results.

A counter's update is written item by item, in an order in which each part may be the last one. Its
conditions keep what another worker wrote later.
"""

from __future__ import annotations

import asyncio
import json
from asyncio import gather
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from counter.errors import StoreUnavailableError, UnavailableError
from counter.limits import PENDING_WRITES_MAX
from counter.storage.dynamodb.driver import (
    BATCH_WRITES_MAX,
    LOW,
    NEW,
    Item,
    Key,
    Refused,
    Write,
    each_of,
    put,
    some_at_once,
    update,
)
from counter.storage.dynamodb.layout import (
    ATOMIC,
    COUNTS,
    HEAD,
    MARKS,
    NAMES,
    PENDING,
    WATERMARKS,
    checkpoint_from,
    mark_place,
    number,
    packed,
    partition,
    pending_from,
    pending_place,
    row_from,
    row_place,
    to_text,
)
from counter.storage.dynamodb.session import DynamodbSession
from counter.storage.shared.batching import Batch, Batcher
from counter.storage.shared.directory import unknown
from counter.types import (
    AtomicMark,
    Checkpoint,
    CounterUpdate,
    DirtyMark,
    DirtyPage,
    Event,
    Head,
    Mark,
    Namespace,
    Pending,
    Span,
    WindowRow,
    atom_of,
)
from counter.windows import shard_of

#: The maximum of remembered counters whose names are listed; forgetting one is safe.
_NAMES_MAX: Final = 200_000
_ATTEMPTS_MAX: Final = 5
#: Items that are deleted at a time of those that a watermark has passed.
_DROPPED_MAX: Final = 1_000


#: A table, and the time-out of a call in microseconds.
_Lane = tuple[str, int]
_Marks = Batch[_Lane, Item, UnavailableError | None]


class DynamodbRollups:
    """:class:`counter.ports.RollupStore`."""

    def __init__(self, session: DynamodbSession) -> None:
        self._session = session
        self._driver = session.driver
        self._listed: OrderedDict[tuple[int, str], None] = OrderedDict()
        #: Marks that are written: while one call is under way, the next one gathers.
        self._putting: Batcher[_Lane, Item, UnavailableError | None] = Batcher(
            self._put_batches,
            name="DynamoDB",
            items_max=BATCH_WRITES_MAX,
            waiting_max=PENDING_WRITES_MAX,
            at_once=4,
        )
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> int:
        """The number of marks that wait for others to be written."""
        return self._putting.waiting

    async def close(self) -> None:
        """Wait until all marks are written."""
        await self._putting.close()

    async def mark(
        self, namespace: Namespace, marks: Sequence[Mark]
    ) -> Mapping[Mark, UnavailableError]:
        self._session.check_exists(namespace)
        for window_us in {mark.window_us for mark in marks}:
            await self._session.slice_of(namespace.dataset, window_us)
        unique = list(dict.fromkeys(marks))
        items = _items_of(namespace, unique)
        self._driver.tally.mark(each.recount_us for each in marks)
        times = {each.counter: each.window_us for each in marks}
        errors, unlisted = await self._write_listed(namespace, items, times)
        found = {
            each: error or unlisted.get(each.counter)
            for each, error in zip(unique, errors, strict=True)
        }
        return {each: error for each, error in found.items() if error is not None}

    async def mark_atomic(self, namespace: Namespace, mark: AtomicMark) -> None:
        self._session.check_exists(namespace)
        for time_us in {event.event_time_us for event in mark.events}:
            await self._session.slice_of(namespace.dataset, time_us)
        first, shards = mark.events[0], namespace.settings.shards
        place, atom = number(mark.window_us) + number(first.event_time_us), mark.stored_atom
        cells = {
            "sk": place + first.event_id + atom,
            "w": mark.window_us,
            "t": first.event_time_us,
            "e": first.event_id,
            "a": atom,
            "i": to_text([[e.counter, e.item_key, e.delta, e.clear] for e in mark.events]),
        }
        items = [
            {"pk": partition(namespace, ATOMIC, shard), **cells}
            for shard in {shard_of(event.counter, shards) for event in mark.events}
        ]
        self._driver.tally.marks["atomic"] += len(items)
        times = {event.counter: event.event_time_us for event in mark.events}
        errors, unlisted = await self._write_listed(namespace, items, times)
        for error in (*errors, *unlisted.values()):
            if error is not None:
                raise error

    async def _write_listed(
        self, namespace: Namespace, items: Sequence[Item], counters: Mapping[str, int]
    ) -> tuple[list[UnavailableError | None], Mapping[str, UnavailableError | None]]:
        """Put *items*, and the names of those *counters* that may not be listed yet. Return the
        error of each item, and those of names.

        *counters* has a time that is not later than the event: a delete hides only what was listed
        before it.
        """
        new = [name for name in counters if (namespace.id, name) not in self._listed]
        timeout_us = namespace.dataset.write_timeout_us
        table = self._session.data(namespace.dataset)
        names = (self._name(namespace, name, counters[name], listed=True) for name in new)
        errors, written = await gather(
            self._putting.put_all([((table, timeout_us), item) for item in items]),
            each_of(self._driver.write(each, timeout_us) for each in names),
        )
        failed = (each if isinstance(each, UnavailableError) else None for each in written)
        unlisted = dict(zip(new, failed, strict=True))
        for name, error in unlisted.items():
            if error is None:
                self._listed[namespace.id, name] = None
        while len(self._listed) > _NAMES_MAX:
            self._listed.popitem(last=False)
        return errors, unlisted

    def _put_batches(self, batches: Sequence[_Marks]) -> None:
        for batch in batches:
            task = asyncio.create_task(self._put_batch(batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _put_batch(self, batch: _Marks) -> None:
        table, timeout_us = batch.key
        # One call names no item twice.
        items = {(item["pk"], item["sk"]): item for item in batch.items}.values()
        try:
            await self._driver.write_many(table, items, timeout_us=timeout_us)
        except UnavailableError as error:
            batch.end_all(error)
        except BaseException:
            batch.end_all(StoreUnavailableError("a write of marks failed unexpectedly"))
            raise
        else:
            batch.end_all(None)

    def _name(self, namespace: Namespace, counter: str, time_us: int, *, listed: bool) -> Write:
        """Return the write that lists a name, or takes it off the list: the later of the two
        counts, and of the same instant the delete."""
        bucket = shard_of(counter, namespace.settings.shards)
        return update(
            self._session.data(namespace.dataset),
            (partition(namespace, NAMES, bucket), counter.encode()),
            "SET t = :t, l = :l",
            f"{NEW} OR t {'<' if listed else '<='} :t",
            t=time_us,
            l=listed,
        )

    async def fence(self) -> int:
        return self._session.clock.now_us()

    async def watermarks(self, namespace: Namespace) -> Sequence[int]:
        table = self._session.data(namespace.dataset)
        items = await self._driver.query(table, partition(namespace, WATERMARKS))
        if len(items) < namespace.settings.shards:
            raise unknown(namespace)
        return [item["t"] for item in items]

    async def advance(self, namespace: Namespace, shards: Sequence[int], through_us: int) -> None:
        table, pk = self._session.data(namespace.dataset), partition(namespace, WATERMARKS)
        # Those of a deleted namespace do not come back.
        writes = (
            update(table, (pk, number(shard)), "SET t = :t", "t < :t", t=through_us)
            for shard in shards
        )
        await gather(*(self._driver.write(each) for each in writes))

    async def marked(
        self, namespace: Namespace, shards: Sequence[int], span: Span
    ) -> Collection[int]:
        async def is_marked(shard: int) -> bool:
            found = (self._marks(namespace, kind, shard, span, 1) for kind in (MARKS, ATOMIC))
            return any(await gather(*found))

        answers = await gather(*(is_marked(shard) for shard in shards))
        return [shard for shard, answer in zip(shards, answers, strict=True) if answer]

    async def dirty(
        self, namespace: Namespace, shard: int, span: Span, limit: int, rest: object = None
    ) -> DirtyPage:
        low = rest if isinstance(rest, bytes) else LOW
        items = await self._marks(namespace, MARKS, shard, span, limit, low)
        marks = [DirtyMark(item["w"], item["c"], item["r"]) for item in items]
        return DirtyPage(marks, items[-1]["sk"] + b"\x00" if len(items) == limit else None)

    async def dirty_atomic(
        self, namespace: Namespace, shard: int, span: Span
    ) -> Sequence[AtomicMark]:
        items = await self._marks(namespace, ATOMIC, shard, span)
        return [_atomic_from(item) for item in items]

    async def drop_marks(self, namespace: Namespace, shard: int, through_us: int) -> None:
        table = self._session.data(namespace.dataset)
        for kind in (MARKS, ATOMIC):
            is_more = True
            while is_more:
                span = Span(0, through_us + 1)
                items = await self._marks(namespace, kind, shard, span, _DROPPED_MAX)
                await self._driver.write_many(table, deletes=_keys(items))
                is_more = len(items) == _DROPPED_MAX

    async def _marks(
        self,
        namespace: Namespace,
        kind: bytes,
        shard: int,
        span: Span,
        limit: int | None = None,
        low: bytes = LOW,
    ) -> list[Item]:
        """Return marks of the windows of *span*, from *low* on."""
        low, high = max(low, number(span.from_us)), number(span.to_us)
        table = self._session.data(namespace.dataset)
        return await self._driver.query(
            table, partition(namespace, kind, shard), low, high, limit=limit
        )

    async def heads(
        self, namespace: Namespace, counters: Sequence[str], handles: Sequence[object] | None = None
    ) -> Sequence[Head | None]:
        async def head(counter: str) -> Head | None:
            pk = partition(namespace, COUNTS, counter)
            items = await self._driver.query(table, pk, PENDING, HEAD)
            stored: Item = items.pop() if items and items[-1]["sk"] == HEAD else {}
            if not items and not stored:
                return None
            pending = tuple(pending_from(item["sk"]) for item in items)
            return Head(checkpoint_from(stored, "c"), checkpoint_from(stored, "s"), pending)

        table, unique = self._session.data(namespace.dataset), list(dict.fromkeys(counters))
        heads = dict(zip(unique, await some_at_once(map(head, unique)), strict=True))
        return [heads[each] for each in counters]

    async def rows(
        self, namespace: Namespace, counters: Sequence[str], span: Span
    ) -> Sequence[Sequence[WindowRow]]:
        unique = list(dict.fromkeys(counters))
        found = await some_at_once(self._rows(namespace, each, span) for each in unique)
        rows = dict(zip(unique, found, strict=True))
        return [rows[each] for each in counters]

    async def _rows(self, namespace: Namespace, counter: str, span: Span) -> Sequence[WindowRow]:
        """Return rows that were all there at one moment: a query reads item by item, and rows go
        when they are settled."""
        table, pk = self._session.data(namespace.dataset), partition(namespace, COUNTS, counter)

        async def settled() -> Checkpoint:
            return checkpoint_from(await self._driver.get(table, (pk, HEAD)), "s")

        before = await settled()
        for _ in range(_ATTEMPTS_MAX):
            low = row_place(max(span.from_us, before.time_us + 1))
            items = await self._driver.query(table, pk, low, row_place(span.to_us - 1))
            now = await settled()
            if now == before:
                return [row_from(item) for item in items]
            before = now
        raise UnavailableError("rows are settled again and again", retry_after_us=100_000)

    async def apply(
        self, namespace: Namespace, updates: Sequence[CounterUpdate], *, through_us: int
    ) -> None:
        await some_at_once(self._apply(namespace, each, through_us) for each in updates)

    async def _apply(self, namespace: Namespace, change: CounterUpdate, through_us: int) -> None:
        # First, because a delete that is removed is not found again.
        for each in change.pending_done:
            if each.is_delete:
                name = self._name(namespace, change.counter, each.window_us + 1, listed=True)
                await self._driver.write(name)
        table = self._session.data(namespace.dataset)
        pk = partition(namespace, COUNTS, change.counter)
        settled_us = -1 if change.settled is None else change.settled.time_us
        rows = [
            _row(table, pk, row, through_us) for row in change.rows if row.window_us > settled_us
        ]
        # The rows go first, and recounts are removed last: a worker that stops in between does the
        # same again, and no query sees a head without its rows, or without what is pending. A row
        # or a head that is refused has a later one in its place.
        await gather(*(self._driver.write(each) for each in rows))
        settled = {} if change.settled is None else {"s": change.settled}
        await self._write_head(table, pk, {"c": change.checkpoint, **settled})
        done = [(pk, pending_place(each)) for each in change.pending_done]
        await self._driver.write_many(table, deletes=done)
        if settled:
            items = await self._driver.query(table, pk, row_place(0), row_place(settled_us))
            await self._driver.write_many(table, deletes=_keys(items))

    async def _write_head(self, table: str, pk: bytes, heads: Mapping[str, Checkpoint]) -> None:
        """Write the checkpoints that are not earlier than the stored ones, at once."""
        while heads:
            answer = await self._driver.write(_head(table, pk, heads))
            if not isinstance(answer, Refused):
                return
            heads = {
                name: each
                for name, each in heads.items()
                if checkpoint_from(answer.item, name).time_us <= each.time_us
            }

    async def unlist(self, namespace: Namespace, counter: str, deleted_us: int) -> None:
        self._listed.pop((namespace.id, counter), None)
        name = self._name(namespace, counter, deleted_us, listed=False)
        await self._driver.write(name, namespace.dataset.write_timeout_us)


class DynamodbRecounts:
    """:class:`counter.ports.RecountStore`. No name is listed: it is already, or was deleted."""

    def __init__(self, session: DynamodbSession) -> None:
        self._session = session
        self._driver = session.driver

    async def write_pending(
        self, namespace: Namespace, pending: Sequence[tuple[str, Pending]]
    ) -> None:
        keys = {
            (partition(namespace, COUNTS, counter), pending_place(each))
            for counter, each in pending
        }
        table = self._session.data(namespace.dataset)
        await self._driver.write_many(table, puts=({"pk": pk, "sk": sk} for pk, sk in keys))

    async def write_marks(self, namespace: Namespace, marks: Sequence[Mark]) -> None:
        self._session.check_exists(namespace)
        self._driver.tally.mark(each.recount_us for each in marks)
        table, timeout_us = (
            self._session.data(namespace.dataset),
            namespace.dataset.write_timeout_us,
        )
        items = _items_of(namespace, dict.fromkeys(marks))
        await self._driver.write_many(table, items, timeout_us=timeout_us)


def _items_of(namespace: Namespace, marks: Iterable[Mark]) -> list[Item]:
    """Return the item of each mark."""
    shards = namespace.settings.shards
    return [
        {
            "pk": partition(namespace, MARKS, shard_of(each.counter, shards)),
            "sk": mark_place(each),
            "c": each.counter,
            "w": each.window_us,
            "r": each.recount_us,
        }
        for each in marks
    ]


def _keys(items: Sequence[Item]) -> list[Key]:
    return [(item["pk"], item["sk"]) for item in items]


def _atomic_from(item: Item) -> AtomicMark:
    time_us, nonce, (atom, sight) = item["t"], item["e"], atom_of(item["a"])
    events = (
        Event(counter, time_us, nonce, key, delta, clear=clear, atom=atom)
        for counter, key, delta, clear in json.loads(item["i"])
    )
    return AtomicMark(item["w"], tuple(events), sight)


def _row(table: str, pk: bytes, row: WindowRow, through_us: int) -> Write:
    """Return the put of a row, which does not replace one of a batch up to a later instant."""
    cells = {"c": row.cleared, "n": packed(row.total), "u": through_us}
    item = {"pk": pk, "sk": row_place(row.window_us), **cells}
    return put(table, item, f"{NEW} OR u <= :u", u=through_us)


def _head(table: str, pk: bytes, heads: Mapping[str, Checkpoint]) -> Write:
    """Return the update of a head's checkpoints, which replaces none that is later."""
    values: dict[str, int | bytes] = {f"{name}t": each.time_us for name, each in heads.items()}
    values |= {f"{name}n": packed(each.count) for name, each in heads.items()}
    change = "SET " + ", ".join(f"{name} = :{name}" for name in values)
    times = [f"{name}t" for name in heads]
    conditions = (f"(attribute_not_exists({each}) OR {each} <= :{each})" for each in times)
    return update(table, (pk, HEAD), change, " AND ".join(conditions), **values)
