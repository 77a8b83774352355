"""Namespaces, datasets, slices and numbers: one table that all processes agree on.

A namespace is one item under its name; what must agree changes by one conditional write of its
version. What was deleted leaves another item, for ever, so that a creation from before, which lands
late, is refused. Until no process can acknowledge an add to it any more, no namespace of its name
is created.
"""

from __future__ import annotations

import json
import os
from asyncio import gather
from collections.abc import Sequence
from dataclasses import asdict, replace
from email.utils import parsedate_to_datetime
from functools import partial
from itertools import product
from typing import Any, Final

from counter.errors import StoreUnavailableError, invariant
from counter.limits import MINUTE, SECOND
from counter.storage.dynamodb.driver import (
    LOW,
    NEW,
    SORT_KEY_BYTES_MAX,
    Driver,
    Item,
    Key,
    Refused,
    check,
    delete,
    put,
    update,
)
from counter.storage.dynamodb.layout import (
    ALONE,
    ATOMIC,
    COUNTS,
    DROPPED,
    MARKS,
    NAMES,
    WATERMARKS,
    number,
    partition,
    slices_partition,
    to_text,
)
from counter.storage.dynamodb.session import DynamodbSession, control_table
from counter.storage.shared.directory import DatasetState
from counter.types import (
    ClockReading,
    Dataset,
    Era,
    Namespace,
    NamespaceSettings,
    Slice,
    TokenBlock,
)
from counter.windows import first_watermark

_NAMESPACES: Final = b"namespaces"
#: The latest deleted namespace of each name, for ever.
_GONE: Final = b"gone namespaces"
#: Deleted namespaces whose data is not deleted yet, by id.
_DEPARTED: Final = b"departed"
_TOKENS: Final = b"tokens"
_IDS: Final = b"namespace ids"
DATASET_IDS: Final = b"dataset ids"
_IS: Final = "i = :i AND v = :v"
#: How long after it read the slices a process creates a table. If it were longer than retention,
#: another process could have made the slice and dropped it meanwhile.
_MAKING_US: Final = MINUTE
#: Names that one call of ``purge`` deletes, with the counts of their counters.
_PURGED_MAX: Final = 100
#: At most this many numbers are issued between a backup and its restore.
_TOKENS_JUMP: Final = 1 << 40
_IDS_JUMP: Final = 1_000_000


class DynamodbControl:
    """:class:`counter.ports.ControlPlane`."""

    def __init__(self, session: DynamodbSession) -> None:
        self._session = session
        self._driver, self._table = session.driver, session.control

    async def datasets(self) -> Sequence[Dataset]:
        await self._session.load()
        return [state.dataset for _, state in sorted(self._session.states.items())]

    async def read_clock(self) -> ClockReading:
        """Return the offset by the ``Date`` header of an answer, which was made within a second of
        that, and within the round trip."""
        clock = self._session.clock
        before_us = clock.now_us()
        date = parsedate_to_datetime(await self._driver.date(self._table))
        after_us = clock.now_us()
        least_us = int(date.timestamp()) * SECOND - after_us
        width_us = SECOND + after_us - before_us
        return ClockReading(least_us + width_us // 2, width_us // 2 + 1)

    # Namespaces.

    async def namespaces(self) -> Sequence[Namespace]:
        before = set(self._session.known)
        items = await self._driver.query(self._table, _NAMESPACES)
        found = [await self._namespace_of(item) for item in items]
        self._session.note_namespaces(before, [each.id for each in found])
        return sorted(found, key=lambda each: each.name)

    async def create_namespace(
        self, name: str, settings: NamespaceSettings, now_us: int
    ) -> Namespace | None:
        await self._session.load()
        dataset = self._session.dataset_named(settings.dataset)
        key, gone_key = (_NAMESPACES, name.encode()), (_GONE, name.encode())
        if await self._driver.get(self._table, key):
            return None
        gone, unchanged = await self._driver.get(self._table, gone_key), NEW
        if gone:
            deleted, unchanged = await self._namespace_of(gone), "i = :i"
            self._session.check_settled(name, deleted.id, deleted.dataset)
            # What deleted it may have stopped before it did so.
            await self._delete_watermarks(deleted)
        block = await take(self._driver, _IDS, 1)
        eras = (Era(0, settings.accept_limit_us),)
        namespace = Namespace(block.first, name, settings, eras, dataset, now_us, version=1)
        # Before any process can know the namespace: one without watermarks counts as deleted.
        table, pk = self._session.data(dataset), partition(namespace, WATERMARKS)
        through_us = first_watermark(dataset, settings, now_us)
        shards = range(settings.shards)
        puts = ({"pk": pk, "sk": number(shard), "t": through_us} for shard in shards)
        await self._driver.write_many(table, puts)
        # One from before a deletion, which lands late, finds that the deleted one is another.
        values = {"i": gone["i"]} if gone else {}
        refused = await self._driver.transact(
            [
                put(self._table, _namespace_item(namespace, _NAMESPACES), NEW),
                check(self._table, gone_key, unchanged, **values),
            ]
        )
        if refused is not None:
            await self._driver.write_many(table, deletes=[(pk, number(shard)) for shard in shards])
            return None
        self._session.known.add(namespace.id)
        return namespace

    async def update_namespace(self, namespace: Namespace, updated: Namespace) -> bool:
        item = _namespace_item(updated, _NAMESPACES)
        write = put(self._table, item, _IS, i=namespace.id, v=namespace.version)
        answer = await self._driver.write(write)
        # A proxy may have sent it twice.
        return not isinstance(answer, Refused) or answer.item == item

    async def delete_namespace(self, namespace: Namespace) -> bool:
        key = _NAMESPACES, namespace.name.encode()
        departed = {**_namespace_item(namespace, _DEPARTED), "sk": number(namespace.id)}
        refused = await self._driver.transact(
            [
                delete(self._table, key, _IS, i=namespace.id, v=namespace.version),
                put(self._table, _namespace_item(namespace, _GONE)),
                # Its data is deleted by and by.
                put(self._table, departed),
            ]
        )
        if refused is not None:
            return False
        self._session.note_deleted(namespace)
        await self._delete_watermarks(namespace)
        return True

    async def _delete_watermarks(self, namespace: Namespace) -> None:
        """Make the namespace one without watermarks, which counts as deleted."""
        await self._delete_partition(namespace, partition(namespace, WATERMARKS))

    async def _delete_partition(self, namespace: Namespace, pk: bytes) -> None:
        table = self._session.data(namespace.dataset)
        items = await self._driver.query(table, pk)
        await self._driver.write_many(table, deletes=[(pk, item["sk"]) for item in items])

    async def counters(
        self, namespace: Namespace, *, prefix: str, after: str | None, limit: int
    ) -> Sequence[str]:
        self._session.check_exists(namespace)
        first, last = prefix.encode(), (after or "").encode()
        # A sort key has at most as many bytes as the longest name, and no byte of a name is 0xff.
        low, high = max(first, last) or LOW, (first + b"\xff")[:SORT_KEY_BYTES_MAX]
        query = partial(
            self._driver.query,
            self._session.data(namespace.dataset),
            low=low,
            high=high,
            limit=limit,
            keep=lambda item: item["l"] and item["sk"] != last,
        )
        buckets = range(namespace.settings.shards)
        pages = await gather(*(query(partition(namespace, NAMES, each)) for each in buckets))
        return sorted(item["sk"].decode() for items in pages for item in items)[:limit]

    # Slices.

    async def slices(self, dataset: Dataset) -> Sequence[Slice]:
        return list((await self._session.reload_slices(dataset)).slices)

    async def make_slices(self, dataset: Dataset, *slices: Slice) -> None:
        clock = self._session.clock
        began_us = clock.boottime_us()
        state = await self._session.reload_slices(dataset)
        known, dropped_us = {each.start_us for each in state.slices}, state.dropped_before_us
        for each in slices:
            if each.start_us in known or each.end_us <= dropped_us:
                continue
            if clock.boottime_us() - began_us > _MAKING_US:
                raise StoreUnavailableError(
                    f"making slices of dataset {dataset.name!r} took too long"
                )
            table = self._session.events(dataset, each.start_us)
            await self._driver.create_table(table)
            await self._record_slice(dataset, each, table)
        await self._session.reload_slices(dataset)

    async def _record_slice(self, dataset: Dataset, each: Slice, table: str) -> None:
        """Record a slice whose table is made, unless another process has dropped it meanwhile."""
        pk = slices_partition(dataset)
        item = {"pk": pk, "sk": number(each.start_us), "document": to_text(asdict(each))}
        refused = await self._driver.transact(
            [
                check(self._table, (pk, DROPPED), "t < :e", e=each.end_us),
                put(self._table, item, NEW),
            ]
        )
        if refused is not None and refused[0] is not None:
            await self._driver.drop_table(table)

    async def retire_slice(self, dataset: Dataset, start_us: int, now_us: int) -> None:
        key: Key = slices_partition(dataset), number(start_us)
        stored = await self._driver.get(self._table, key)
        if not stored or _slice_from(stored).retired_at_us is not None:
            return
        text = to_text(asdict(replace(_slice_from(stored), retired_at_us=now_us)))
        change, condition = "SET document = :d", "document = :o"
        # If it is refused, another process was first.
        await self._driver.write(
            update(self._table, key, change, condition, d=text, o=stored["document"])
        )
        await self._session.reload_slices(dataset)

    async def drop_slice(self, dataset: Dataset, start_us: int) -> bool:
        state = await self._session.reload_slices(dataset)
        if start_us >= state.dropped_before_us:
            earliest = bool(state.slices) and state.slices[0].start_us == start_us
            invariant(earliest, f"slices drop in order; {start_us} is not the earliest")
            # It only moves forward: another process may have moved it as far, or farther.
            key, end_us = (slices_partition(dataset), DROPPED), state.slices[0].end_us
            await self._driver.write(update(self._table, key, "SET t = :e", "t < :e", e=end_us))
            state = await self._session.reload_slices(dataset)
        await self._sweep(state)
        return True

    async def _sweep(self, state: DatasetState) -> None:
        """Drop every table that ``dropped_before`` has passed, and then its item: what did so
        before may have stopped in between, and another process may have made a table again."""
        dataset, dropped_us = state.dataset, state.dropped_before_us
        first = self._session.events(dataset, 0)[:-1]
        for table in await self._driver.tables():
            start = table.removeprefix(first)
            if start.isdecimal() and int(start) + dataset.slice_us <= dropped_us:
                await self._driver.drop_table(table)
        pk = slices_partition(dataset)
        items = await self._driver.query(self._table, pk, DROPPED + b"\x00")
        passed = [(pk, each["sk"]) for each in items if _slice_from(each).end_us <= dropped_us]
        await self._driver.write_many(self._table, deletes=passed)

    async def dropped_before(self, dataset: Dataset) -> int:
        item = await self._driver.get(self._table, (slices_partition(dataset), DROPPED))
        return int(item.get("t", 0))

    # Numbers, and what is left to delete.

    async def lease_tokens(self, count: int, now_us: int) -> TokenBlock:
        return await take(self._driver, _TOKENS, count, now_us)

    async def begin_new_life(self, now_us: int) -> None:
        """After a restore, skip the numbers that were issued after the backup, and token times
        before *now_us*."""
        await take(self._driver, _TOKENS, _TOKENS_JUMP, now_us)
        for name in (_IDS, DATASET_IDS):
            await take(self._driver, name, _IDS_JUMP)

    async def purge(self, now_us: int) -> bool:
        """Delete the data of deleted namespaces. Decisions and keys expire by themselves, and
        events go with their slices."""
        for item in await self._driver.query(self._table, _DEPARTED):
            namespace = await self._namespace_of(item)
            if self._session.settles_in(namespace.id, namespace.dataset) > 0:
                continue
            await self._delete_watermarks(namespace)
            table = self._session.data(namespace.dataset)
            for bucket, kind in product(range(namespace.settings.shards), (NAMES, MARKS, ATOMIC)):
                pk = partition(namespace, kind, bucket)
                items = await self._driver.query(table, pk, limit=_PURGED_MAX)
                for name in (each["sk"] for each in items if kind == NAMES):
                    await self._delete_partition(namespace, partition(namespace, COUNTS, name))
                await self._driver.write_many(table, deletes=[(pk, each["sk"]) for each in items])
                if items:
                    return True
            await self._driver.write_many(self._table, deletes=[(_DEPARTED, item["sk"])])
            return True
        return False

    async def _namespace_of(self, item: Item) -> Namespace:
        if item["s"] not in self._session.states:
            await self._session.load()
        dataset = self._session.states[item["s"]].dataset
        document: dict[str, Any] = json.loads(item["document"])
        announced = Namespace.announced_in(document)
        eras = tuple(Era(*era) for era in document.pop("eras"))
        created_at_us = document.pop("created_at_us")
        settings = NamespaceSettings.from_document(document)
        return Namespace(
            *(item["i"], item["name"], settings, eras, dataset, created_at_us, item["v"]),
            announced_eras=announced,
        )


async def begin_numbers(driver: Driver) -> None:
    """Let all numbers begin at 1, unless they have begun."""
    issuer, table = os.urandom(8), control_table(driver.options.prefix)
    for name in (_TOKENS, _IDS, DATASET_IDS):
        item = {"pk": name, "sk": ALONE, "n": 1, "t": 0, "o": issuer}
        await driver.write(put(table, item, NEW))


async def take(driver: Driver, name: bytes, count: int, now_us: int = 0) -> TokenBlock:
    """Take *count* numbers; return the first, and *now_us* or the latest time taken if that is
    later. Numbers whose answer is lost are never used."""
    table, key = control_table(driver.options.prefix), (name, ALONE)
    later = update(table, key, "SET t = :t ADD n :n", "t <= :t", n=count, t=now_us)
    answer = await driver.write(later)
    if isinstance(answer, Refused):
        more = update(table, key, "ADD n :n", "attribute_exists(pk)", n=count)
        answer = await driver.write(more)
    if isinstance(answer, Refused):
        raise StoreUnavailableError(
            "DynamoDB: the schema is made by half: run `counter schema apply`"
        )
    return TokenBlock(answer["o"], answer["n"] - count, answer["t"])


def _namespace_item(namespace: Namespace, pk: bytes) -> Item:
    created_at_us = namespace.created_at_us
    document = namespace.document() | {"eras": namespace.eras, "created_at_us": created_at_us}
    return {
        "pk": pk,
        "sk": namespace.name.encode(),
        "name": namespace.name,
        "i": namespace.id,
        "v": namespace.version,
        "s": namespace.dataset.id,
        "document": to_text(document),
    }


def _slice_from(item: Item) -> Slice:
    return Slice(**json.loads(item["document"]))
