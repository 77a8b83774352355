"""Namespaces, datasets, slices and numbers: one table that all processes agree on.

A namespace is one item under its name; what must agree changes by one conditional write of its
version. The item of a deleted one stays for ever, so that a creation from before, which lands late,
finds it and is refused. Until no process can acknowledge an add to it any more, no namespace of its
name is created.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from typing import Any, Final

from counter.errors import (
    InvalidParameterError,
    StoreUnavailableError,
    UnavailableError,
    invariant,
)
from counter.limits import MINUTE, SECOND
from counter.storage.dynamodb.driver import (
    Check,
    Item,
    Key,
    Put,
    Refused,
    Update,
    together,
)
from counter.storage.dynamodb.session import (
    DATASETS,
    DROPPED,
    Session,
    retired,
    slice_from,
    slice_text,
    slices_partition,
)
from counter.storage.dynamodb.tables import (
    ALONE,
    counts_partition,
    names_partition,
    number,
    watermarks_partition,
)
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
_DEPARTED: Final = b"departed"
_TOKENS: Final = b"tokens"
_IDS: Final = b"namespace ids"
_IS: Final = "i = :i AND v = :v"
#: How long after it read the slices a process creates a table. If it were longer than retention,
#: another process could have made the slice and dropped it meanwhile.
_MAKING_US: Final = MINUTE
#: Names that one call of ``purge`` deletes, with the counts of their counters.
_PURGED_MAX: Final = 100
#: At most this many numbers are issued between a backup and its restore.
_TOKENS_JUMP: Final = 1 << 40
_IDS_JUMP: Final = 1_000_000


class Numbers:
    """Numbers that are issued once, and never again."""

    def __init__(self, session: Session) -> None:
        self._driver, self._table = session.driver, session.control

    async def take(self, name: bytes, count: int, now_us: int = 0) -> TokenBlock:
        """Take *count* numbers; return the first, and *now_us* or the latest time taken if that is
        later. Numbers whose answer is lost are never used."""
        key, values = (name, ALONE), {":n": count, ":t": now_us}
        answer = await self._driver.write(
            Update(self._table, key, "SET t = :t ADD n :n", "t <= :t", values)
        )
        if isinstance(answer, Refused):
            values = {":n": count}
            answer = await self._driver.write(
                Update(self._table, key, "ADD n :n", "attribute_exists(pk)", values)
            )
        if isinstance(answer, Refused):
            raise StoreUnavailableError(
                "DynamoDB: the schema is made by half: run `counter schema apply`"
            )
        return TokenBlock(answer["o"], answer["n"] - count, answer["t"])


class DynamodbControl:
    """:class:`counter.ports.ControlPlane`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._driver, self._table = session.driver, session.control
        self._numbers = Numbers(session)

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
        found = []
        for item in await self._driver.query(self._table, _NAMESPACES):
            dataset = await self._dataset_of(item)
            if "gone" in item:
                self._session.settles_in(item["i"], dataset)
            else:
                found.append(_namespace_from(item, dataset))
        ids = {each.id for each in found}
        self._session.gone |= before - ids
        self._session.known = (self._session.known | ids) - self._session.gone
        return sorted(found, key=lambda each: each.name)

    async def create_namespace(
        self, name: str, settings: NamespaceSettings, now_us: int
    ) -> Namespace | None:
        dataset = await self._dataset_named(settings.dataset)
        stored = await self._driver.get(self._table, (_NAMESPACES, name.encode()))
        condition, values = "attribute_not_exists(pk)", {}
        if stored is not None:
            if "gone" not in stored:
                return None
            await self._settle(stored)
            condition, values = _IS, {":i": stored["i"], ":v": stored["v"]}
        block = await self._numbers.take(_IDS, 1)
        eras = (Era(0, settings.accept_limit_us),)
        namespace = Namespace(block.first, name, settings, eras, dataset, now_us, version=1)
        # Before any process can know the namespace: one without watermarks counts as deleted.
        through_us = first_watermark(dataset, settings, now_us)
        keys = [
            (watermarks_partition(namespace), number(shard)) for shard in range(settings.shards)
        ]
        puts = [{"pk": pk, "sk": sk, "t": through_us} for pk, sk in keys]
        await self._driver.write_many(self._session.data(dataset), puts)
        answer = await self._driver.write(
            Put(self._table, _namespace_item(namespace), condition, values)
        )
        # A proxy may have sent it twice: then the stored one is this one.
        if isinstance(answer, Refused) and (answer.item or {}).get("i") != namespace.id:
            await self._driver.write_many(self._session.data(dataset), deletes=keys)
            return None
        self._session.known.add(namespace.id)
        return namespace

    async def update_namespace(self, namespace: Namespace, updated: Namespace) -> bool:
        item = _namespace_item(updated)
        values = {":i": namespace.id, ":v": namespace.version}
        put = Put(self._table, item, f"{_IS} AND attribute_not_exists(gone)", values)
        answer = await self._driver.write(put)
        return not isinstance(answer, Refused) or answer.item == item

    async def delete_namespace(self, namespace: Namespace) -> bool:
        item = _namespace_item(namespace)
        gone = {**item, "v": namespace.version + 1, "gone": True}
        values = {":i": namespace.id, ":v": namespace.version}
        refused = await self._driver.transact(
            [
                Put(self._table, gone, f"{_IS} AND attribute_not_exists(gone)", values),
                # Its data is deleted by and by.
                Put(self._table, {**item, "pk": _DEPARTED, "sk": number(namespace.id)}),
            ]
        )
        if refused is not None:
            return False
        self._session.known.discard(namespace.id)
        self._session.gone.add(namespace.id)
        self._session.settles_in(namespace.id, namespace.dataset)
        await self._take_watermarks_away(namespace)
        return True

    async def _settle(self, stored: Item) -> None:
        """Let nothing use a deleted namespace any more. Raises UnavailableError while adds to it
        may be acknowledged."""
        namespace = _namespace_from(stored, await self._dataset_of(stored))
        left_us = self._session.settles_in(namespace.id, namespace.dataset)
        if left_us > 0:
            raise UnavailableError(
                f"namespace {namespace.name!r} was deleted just now, and other servers may still"
                f" take adds for the deleted one; create it again in {left_us / SECOND:.1f} s",
                retry_after_us=left_us,
            )
        # What deleted it may have stopped before it did so.
        await self._take_watermarks_away(namespace)

    async def _take_watermarks_away(self, namespace: Namespace) -> None:
        """A namespace without watermarks is one that is deleted."""
        await self._delete_partition(namespace.dataset, watermarks_partition(namespace))

    async def _delete_partition(self, dataset: Dataset, partition: bytes) -> None:
        table = self._session.data(dataset)
        items = await self._driver.query(table, partition)
        await self._driver.write_many(table, deletes=[(item["pk"], item["sk"]) for item in items])

    async def counters(
        self, namespace: Namespace, *, prefix: str, after: str | None, limit: int
    ) -> Sequence[str]:
        self._session.check_exists(namespace)
        found = await together(
            self._names(namespace, bucket, prefix.encode(), after, limit)
            for bucket in range(namespace.settings.shards)
        )
        return sorted(name for names in found for name in names)[:limit]

    async def _names(
        self, namespace: Namespace, bucket: int, prefix: bytes, after: str | None, limit: int
    ) -> list[str]:
        """Return the first *limit* names of a part that are listed."""
        table, partition = self._session.data(namespace.dataset), names_partition(namespace, bucket)
        names: list[str] = []
        last = None if after is None else after.encode()
        if last is not None and not last.startswith(prefix):
            if last > prefix:
                return names
            last = None
        while len(names) < limit:
            items = await self._driver.query(
                table, partition, prefix=prefix, after=last, limit=limit
            )
            names += [item["sk"].decode() for item in items if item["l"]]
            if len(items) < limit:
                break
            last = items[-1]["sk"]
        return names[:limit]

    # Slices.

    async def slices(self, dataset: Dataset) -> Sequence[Slice]:
        return list((await self._session.reload(dataset)).slices)

    async def make_slices(self, dataset: Dataset, *slices: Slice) -> None:
        clock = self._session.clock
        began_us = clock.boottime_us()
        state = await self._session.reload(dataset)
        known = {each.start_us for each in state.slices}
        new = [
            each for each in slices if each.start_us not in known and each.end_us > state.dropped_us
        ]
        for each in new:
            if clock.boottime_us() - began_us > _MAKING_US:
                raise StoreUnavailableError(
                    f"making slices of dataset {dataset.name!r} took too long"
                )
            table = self._session.events(dataset, each.start_us)
            await self._driver.create_table(table)
            await self._record_slice(dataset, each, table)
        await self._session.reload(dataset)

    async def _record_slice(self, dataset: Dataset, each: Slice, table: str) -> None:
        """Record a slice whose table is made, unless another process has dropped it meanwhile."""
        partition = slices_partition(dataset)
        item = {"pk": partition, "sk": number(each.start_us), "document": slice_text(each)}
        refused = await self._driver.transact(
            [
                Check(self._table, (partition, DROPPED), "t < :e", {":e": each.end_us}),
                Put(self._table, item, "attribute_not_exists(pk)"),
            ]
        )
        if refused is not None and refused[0] is not None:
            await self._driver.drop_table(table)

    async def retire_slice(self, dataset: Dataset, start_us: int, now_us: int) -> None:
        key: Key = slices_partition(dataset), number(start_us)
        stored = await self._driver.get(self._table, key)
        if stored is None or slice_from(stored["document"]).retired_at_us is not None:
            return
        text = slice_text(retired(slice_from(stored["document"]), now_us))
        values = {":d": text, ":o": stored["document"]}
        # Where it is refused, another process was first.
        await self._driver.write(
            Update(self._table, key, "SET document = :d", "document = :o", values)
        )
        await self._session.reload(dataset)

    async def drop_slice(self, dataset: Dataset, start_us: int) -> bool:
        state = await self._session.reload(dataset)
        if start_us >= state.dropped_us:
            earliest = bool(state.slices) and state.slices[0].start_us == start_us
            invariant(earliest, f"slices drop in order; {start_us} is not the earliest")
            # It only moves forward: another process may have moved it as far, or farther.
            key = slices_partition(dataset), DROPPED
            values = {":e": state.slices[0].end_us}
            await self._driver.write(Update(self._table, key, "SET t = :e", "t < :e", values))
            state = await self._session.reload(dataset)
        await self._sweep(dataset, state.dropped_us)
        return True

    async def _sweep(self, dataset: Dataset, dropped_us: int) -> None:
        """Drop every table that ``dropped_before`` has passed, and then its item: what did so
        before may have stopped in between, and another process may have made a table again."""
        first = self._session.events(dataset, 0)[:-1]
        for table in await self._driver.tables():
            start = table.removeprefix(first)
            if start != table and int(start) + dataset.slice_us <= dropped_us:
                await self._driver.drop_table(table)
        partition = slices_partition(dataset)
        items = await self._driver.query(self._table, partition)
        passed = [
            (partition, item["sk"])
            for item in items
            if item["sk"] != DROPPED and slice_from(item["document"]).end_us <= dropped_us
        ]
        await self._driver.write_many(self._table, deletes=passed)

    async def dropped_before(self, dataset: Dataset) -> int:
        item = await self._driver.get(self._table, (slices_partition(dataset), DROPPED))
        return 0 if item is None else int(item["t"])

    # Numbers, and what is left to delete.

    async def lease_tokens(self, count: int, now_us: int) -> TokenBlock:
        return await self._numbers.take(_TOKENS, count, now_us)

    async def begin_new_life(self, now_us: int) -> None:
        """After a restore, skip the numbers that were issued after the backup, and token times
        before *now_us*."""
        await self._numbers.take(_TOKENS, _TOKENS_JUMP, now_us)
        await self._numbers.take(_IDS, _IDS_JUMP)

    async def purge(self, now_us: int) -> bool:
        """Delete the data of deleted namespaces. Marks, decisions and keys expire by themselves,
        and events go with their slices."""
        for item in await self._driver.query(self._table, _DEPARTED):
            namespace = _namespace_from(item, await self._dataset_of(item))
            if self._session.settles_in(namespace.id, namespace.dataset) > 0:
                continue
            await self._take_watermarks_away(namespace)
            table = self._session.data(namespace.dataset)
            for bucket in range(namespace.settings.shards):
                partition = names_partition(namespace, bucket)
                names = await self._driver.query(table, partition, limit=_PURGED_MAX)
                for name in names:
                    counts = counts_partition(namespace, name["sk"].decode())
                    await self._delete_partition(namespace.dataset, counts)
                await self._driver.write_many(
                    table, deletes=[(partition, name["sk"]) for name in names]
                )
                if names:
                    return True
            await self._driver.write_many(self._table, deletes=[(_DEPARTED, item["sk"])])
            return True
        return False

    async def _dataset_of(self, item: Item) -> Dataset:
        dataset_id: int = item["s"]
        if dataset_id not in self._session.states:
            await self._session.load()
        return self._session.states[dataset_id].dataset

    async def _dataset_named(self, name: str) -> Dataset:
        known = await self.datasets()
        for each in known:
            if each.name == name:
                return each
        names = ", ".join(each.name for each in known)
        raise InvalidParameterError(f"no dataset is named {name!r}; there are: {names}")


def first_items(datasets: Sequence[Dataset]) -> list[Item]:
    """Return what the control table holds at first."""
    issuer = os.urandom(8)
    numbers: list[Item] = [
        {"pk": name, "sk": ALONE, "n": 1, "t": 0, "o": issuer} for name in (_TOKENS, _IDS)
    ]
    for each in datasets:
        document = json.dumps({name: getattr(each, name) for name in each.__dataclass_fields__})
        numbers.append({"pk": DATASETS, "sk": each.name.encode(), "document": document})
        numbers.append({"pk": slices_partition(each), "sk": DROPPED, "t": 0})
    return numbers


def _namespace_item(namespace: Namespace) -> Item:
    document = {
        **namespace.document(),
        "eras": namespace.eras,
        "created_at_us": namespace.created_at_us,
    }
    return {
        "pk": _NAMESPACES,
        "sk": namespace.name.encode(),
        "name": namespace.name,
        "i": namespace.id,
        "v": namespace.version,
        "s": namespace.dataset.id,
        "document": json.dumps(document),
    }


def _namespace_from(item: Item, dataset: Dataset) -> Namespace:
    document: dict[str, Any] = json.loads(item["document"])
    announced = Namespace.announced_in(document)
    eras = tuple(Era(*era) for era in document.pop("eras"))
    created_at_us = document.pop("created_at_us")
    settings = NamespaceSettings.from_document(document)
    return Namespace(
        *(item["i"], item["name"], settings, eras, dataset, created_at_us, item["v"]),
        announced_eras=announced,
    )
