"""Marks, watermarks and counts: pending work of the rollup, its progress, and its results.

A counter's update is one transaction. Its conditions keep what another worker wrote later; what
they refuse is left out, and the rest is tried again.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from counter.errors import UnavailableError
from counter.partitions import shard_of
from counter.storage.dynamodb.driver import (
    TRANSACTION_ITEMS_MAX,
    Delete,
    Item,
    Key,
    Put,
    Refused,
    Update,
    Write,
    each_of,
    together,
)
from counter.storage.dynamodb.session import Session, unknown
from counter.storage.dynamodb.tables import (
    HEAD,
    PENDING,
    atomic_partition,
    checkpoint_from,
    counts_partition,
    mark_place,
    marks_partition,
    name_key,
    number,
    packed,
    pending_from,
    pending_place,
    row_from,
    row_place,
    watermarks_partition,
)
from counter.types import (
    AtomicMark,
    Checkpoint,
    CounterUpdate,
    Event,
    Head,
    Mark,
    Namespace,
    Pending,
    WindowRow,
)

#: The maximum of remembered counters whose names are listed; forgetting one is safe.
_NAMES_MAX: Final = 200_000
_ATTEMPTS_MAX: Final = 5
#: Items that one call deletes of those that a watermark has passed.
_DROPPED_MAX: Final = 10_000
#: What a transaction may hold besides a head.
_BESIDE_HEAD: Final = TRANSACTION_ITEMS_MAX - 1


class DynamodbRollups:
    """:class:`counter.ports.RollupStore`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._driver = session.driver
        self._listed: OrderedDict[tuple[int, str], None] = OrderedDict()

    async def mark(
        self, namespace: Namespace, marks: Sequence[Mark]
    ) -> Mapping[Mark, UnavailableError]:
        self._session.check_exists(namespace)
        for window_us in {mark.window_us for mark in marks if mark.recount_us == 0}:
            await self._session.slice_of(namespace.dataset, window_us)
        items: dict[Key, tuple[Mark, Item]] = {}
        for each in marks:
            shard = shard_of(each.counter, namespace.settings.shards)
            key = marks_partition(namespace, shard), mark_place(each)
            cells = {"c": each.counter, "w": each.window_us, "r": each.recount_us}
            items[key] = each, {"pk": key[0], "sk": key[1], **cells}
        self._driver.tally.mark(each.recount_us for each in marks)
        # What is counted again is listed already, or deleted.
        times = {each.counter: each.window_us for each in marks if not each.recount_us}
        written, unlisted = await self._write_listed(
            namespace, [item for _, item in items.values()], times
        )
        errors = dict(zip((each for each, _ in items.values()), written, strict=True))
        return {
            each: error
            for each in marks
            if (error := errors[each] or unlisted.get(each.counter)) is not None
        }

    async def mark_atomic(self, namespace: Namespace, mark: AtomicMark) -> None:
        self._session.check_exists(namespace)
        for time_us in {event.event_time_us for event in mark.events}:
            await self._session.slice_of(namespace.dataset, time_us)
        first = mark.events[0]
        place = number(mark.window_us) + number(first.event_time_us) + first.event_id
        cells = {
            "w": mark.window_us,
            "t": first.event_time_us,
            "e": first.event_id,
            "a": first.atom or b"",
            "i": _items_text(mark.events),
        }
        shards = {shard_of(event.counter, namespace.settings.shards) for event in mark.events}
        items = [
            {"pk": atomic_partition(namespace, shard), "sk": place + (first.atom or b""), **cells}
            for shard in shards
        ]
        self._driver.tally.marks["atomic"] += len(items)
        times = {event.counter: event.event_time_us for event in mark.events}
        written, unlisted = await self._write_listed(namespace, items, times)
        for error in (*written, *unlisted.values()):
            if error is not None:
                raise error

    async def _write_listed(
        self, namespace: Namespace, items: Sequence[Item], counters: Mapping[str, int]
    ) -> tuple[list[UnavailableError | None], Mapping[str, UnavailableError]]:
        """Put *items*, and the names of those *counters* that may not be listed yet. Return the
        error of each item, and those of names.

        *counters* has a time that is not later than the event: a delete hides only what was listed
        before it.
        """
        new = [name for name in counters if (namespace.id, name) not in self._listed]
        timeout_us, table = (
            namespace.dataset.write_timeout_us,
            self._session.data(namespace.dataset),
        )
        # Each by itself: DynamoDB may do a part of a batch, and would not say which.
        written = await each_of(
            [
                *(self._driver.write(Put(table, item), timeout_us) for item in items),
                *(self._name(namespace, name, counters[name], listed=True) for name in new),
            ]
        )
        errors = [each if isinstance(each, UnavailableError) else None for each in written]
        unlisted: dict[str, UnavailableError] = {}
        for name, error in zip(new, errors[len(items) :], strict=True):
            if error is None:
                self._listed[namespace.id, name] = None
            else:
                unlisted[name] = error
        while len(self._listed) > _NAMES_MAX:
            self._listed.popitem(last=False)
        return errors[: len(items)], unlisted

    async def _name(
        self, namespace: Namespace, counter: str, time_us: int, *, listed: bool
    ) -> None:
        """List a name, or take it off the list; the later of the two counts, and of the same
        instant the delete."""
        await self._driver.write(
            Update(
                self._session.data(namespace.dataset),
                name_key(namespace, counter),
                "SET t = :t, l = :l",
                f"attribute_not_exists(pk) OR t {'<' if listed else '<='} :t",
                {":t": time_us, ":l": listed},
            ),
            namespace.dataset.write_timeout_us,
        )

    async def fence(self) -> int:
        return self._session.clock.now_us()

    async def watermarks(self, namespace: Namespace) -> Sequence[int]:
        table = self._session.data(namespace.dataset)
        items = await self._driver.query(table, watermarks_partition(namespace))
        if len(items) < namespace.settings.shards:
            raise unknown(namespace)
        return [item["t"] for item in items]

    async def advance(self, namespace: Namespace, shards: Sequence[int], through_us: int) -> None:
        # Those of a deleted namespace do not come back.
        await together(
            self._driver.write(
                Update(
                    self._session.data(namespace.dataset),
                    (watermarks_partition(namespace), number(shard)),
                    "SET t = :t",
                    "t < :t",
                    {":t": through_us},
                )
            )
            for shard in shards
        )

    async def marked(
        self, namespace: Namespace, shards: Sequence[int], *, after_us: int, through_us: int
    ) -> Collection[int]:
        table, span = self._session.data(namespace.dataset), _span(after_us, through_us)
        partitions = (marks_partition, atomic_partition)
        found = await together(
            self._driver.query(table, partition(namespace, shard), *span, limit=1)
            for shard in shards
            for partition in partitions
        )
        return [
            shard
            for at, shard in enumerate(shards)
            if any(found[len(partitions) * at : len(partitions) * (at + 1)])
        ]

    async def dirty(
        self,
        namespace: Namespace,
        shard: int,
        *,
        after_us: int,
        through_us: int,
        start: Mark | None,
        limit: int,
    ) -> Sequence[Mark]:
        low, high = _span(after_us, through_us)
        if start is not None:
            low = max(low, mark_place(start) + b"\x00")
        items = await self._driver.query(
            self._session.data(namespace.dataset),
            marks_partition(namespace, shard),
            low,
            high,
            limit=limit,
        )
        return [Mark(item["w"], item["c"], item["r"]) for item in items]

    async def dirty_atomic(
        self, namespace: Namespace, shard: int, *, after_us: int, through_us: int
    ) -> Sequence[AtomicMark]:
        items = await self._driver.query(
            self._session.data(namespace.dataset),
            atomic_partition(namespace, shard),
            *_span(after_us, through_us),
        )
        return [AtomicMark(item["w"], _items_from(item)) for item in items]

    async def drop_marks(self, namespace: Namespace, shard: int, through_us: int) -> None:
        table = self._session.data(namespace.dataset)
        for partition in (marks_partition, atomic_partition):
            items = await self._driver.query(
                table,
                partition(namespace, shard),
                b"\x00",
                _span(0, through_us)[1],
                limit=_DROPPED_MAX,
            )
            await self._driver.write_many(
                table, deletes=[(item["pk"], item["sk"]) for item in items]
            )

    async def heads(self, namespace: Namespace, counters: Sequence[str]) -> Sequence[Head | None]:
        table, unique = self._session.data(namespace.dataset), list(dict.fromkeys(counters))
        found = await together(
            self._driver.query(table, counts_partition(namespace, each), PENDING, HEAD)
            for each in unique
        )
        heads = {each: _head(items) for each, items in zip(unique, found, strict=True)}
        return [heads[each] for each in counters]

    async def rows(
        self, namespace: Namespace, counters: Sequence[str], *, after_us: int, through_us: int
    ) -> Sequence[Sequence[WindowRow]]:
        unique = list(dict.fromkeys(counters))
        found = await together(self._rows(namespace, each, after_us, through_us) for each in unique)
        rows = dict(zip(unique, found, strict=True))
        return [rows[each] for each in counters]

    async def _rows(
        self, namespace: Namespace, counter: str, after_us: int, through_us: int
    ) -> Sequence[WindowRow]:
        """Return rows that were all there at one moment: a query reads item by item, and rows go
        when they are settled."""
        table, partition = (
            self._session.data(namespace.dataset),
            counts_partition(namespace, counter),
        )
        before = await self._settled(table, partition)
        for _ in range(_ATTEMPTS_MAX):
            low = row_place(max(after_us, before.time_us) + 1)
            items = await self._driver.query(table, partition, low, row_place(through_us))
            now = await self._settled(table, partition)
            if now == before:
                return [row_from(item) for item in items]
            before = now
        raise UnavailableError("rows are settled again and again", retry_after_us=100_000)

    async def _settled(self, table: str, partition: bytes) -> Checkpoint:
        return checkpoint_from(await self._driver.get(table, (partition, HEAD)), "s")

    async def apply(
        self, namespace: Namespace, updates: Sequence[CounterUpdate], *, through_us: int
    ) -> None:
        await together(self._apply(namespace, each, through_us) for each in updates)

    async def _apply(self, namespace: Namespace, update: CounterUpdate, through_us: int) -> None:
        # First, because a delete that is removed is not found again.
        for pending in update.pending_done:
            if pending.is_delete:
                await self._name(namespace, update.counter, pending.window_us + 1, listed=True)
        table = self._session.data(namespace.dataset)
        partition = counts_partition(namespace, update.counter)
        settled_us = -1 if update.settled is None else update.settled.time_us
        rows: list[Write] = [
            _row_put(table, partition, row, through_us)
            for row in update.rows
            if row.window_us > settled_us
        ]
        # Rows that do not fit go first, and recounts that do not fit are removed last: a worker
        # that stops in between does the same again.
        while len(rows) > _BESIDE_HEAD:
            await self._transact([], rows[:TRANSACTION_ITEMS_MAX])
            rows = rows[TRANSACTION_ITEMS_MAX:]
        done = [(partition, pending_place(each)) for each in update.pending_done]
        room = _BESIDE_HEAD - len(rows)
        rows += (Delete(table, key) for key in done[:room])
        heads = [_head_update(table, partition, "c", update.checkpoint)]
        if update.settled is not None:
            heads.append(_head_update(table, partition, "s", update.settled))
        await self._transact(heads, rows)
        await self._driver.write_many(table, deletes=done[room:])
        if update.settled is not None:
            items = await self._driver.query(
                table, partition, row_place(0), row_place(update.settled.time_us)
            )
            await self._driver.write_many(
                table, deletes=[(partition, item["sk"]) for item in items]
            )

    async def _transact(self, heads: Sequence[Update], rows: Sequence[Write]) -> None:
        """Do it all at once, without what is refused because a later one is there."""
        for _ in range(_ATTEMPTS_MAX):
            whole: list[Write] = [*([_together(heads)] if heads else []), *rows]
            refused = await self._driver.transact(whole) if whole else None
            if refused is None:
                return
            if heads and isinstance(refused[0], Refused):
                heads = [each for each in heads if _is_later(each, refused[0].item)]
            answers = refused[1:] if len(whole) > len(rows) else refused
            rows = [each for each, answer in zip(rows, answers, strict=True) if answer is None]
        raise UnavailableError("counts change again and again", retry_after_us=100_000)

    async def leave_pending(
        self, namespace: Namespace, recounts: Sequence[tuple[str, Pending]]
    ) -> None:
        await self._driver.write_many(
            self._session.data(namespace.dataset),
            puts={
                (counter, pending): {
                    "pk": counts_partition(namespace, counter),
                    "sk": pending_place(pending),
                }
                for counter, pending in recounts
            }.values(),
        )

    async def unlist(self, namespace: Namespace, counter: str, deleted_us: int) -> None:
        self._listed.pop((namespace.id, counter), None)
        await self._name(namespace, counter, deleted_us, listed=False)


def _span(after_us: int, through_us: int) -> tuple[bytes, bytes]:
    """Return the sort keys of marks of windows that start in ``(after_us, through_us]``."""
    return number(after_us + 1), number(through_us + 1)


def _head(items: Sequence[Item]) -> Head | None:
    if not items:
        return None
    found = [pending_from(item["sk"]) for item in items]
    head = items[-1] if items[-1]["sk"] == HEAD else None
    pending = tuple(each for each in found if each is not None)
    return Head(checkpoint_from(head, "c"), checkpoint_from(head, "s"), pending)


def _row_put(table: str, partition: bytes, row: WindowRow, through_us: int) -> Put:
    """Return the put of a row, which does not replace one of a batch up to a later instant."""
    return Put(
        table,
        {
            "pk": partition,
            "sk": row_place(row.window_us),
            "c": row.cleared,
            "n": packed(row.total),
            "u": through_us,
        },
        "attribute_not_exists(pk) OR u <= :u",
        {":u": through_us},
    )


def _head_update(table: str, partition: bytes, name: str, checkpoint: Checkpoint) -> Update:
    """Return the update of one of the head's checkpoints, which does not replace a later one."""
    time, count = f"{name}t", f"{name}n"
    return Update(
        table,
        (partition, HEAD),
        f"{time} = :{time}, {count} = :{count}",
        f"(attribute_not_exists({time}) OR {time} <= :{time})",
        {f":{time}": checkpoint.time_us, f":{count}": packed(checkpoint.count)},
    )


def _together(heads: Sequence[Update]) -> Update:
    """Return one update of a head."""
    first = heads[0]
    return Update(
        first.table,
        first.key,
        "SET " + ", ".join(each.change for each in heads),
        " AND ".join(each.condition for each in heads),
        {name: value for each in heads for name, value in each.values.items()},
    )


def _is_later(update: Update, stored: Item | None) -> bool:
    """Return whether the checkpoint of *update* may replace the *stored* one."""
    name = next(each for each in update.values if each.endswith("t"))
    return bool((stored or {}).get(name[1:], update.values[name]) <= update.values[name])


def _items_text(events: Sequence[Event]) -> str:
    return json.dumps([[each.counter, each.item_key, each.delta, each.clear] for each in events])


def _items_from(item: Item) -> tuple[Event, ...]:
    return tuple(
        Event(counter, item["t"], item["e"], key, delta, clear=clear, atom=item["a"] or None)
        for counter, key, delta, clear in json.loads(item["i"])
    )
