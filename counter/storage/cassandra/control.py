"""Namespaces, datasets and numbers in Cassandra.

A namespace is one row under its name. All but its id and version are one cell, a document: what
must agree changes by one compare-and-set of the version.

The row of a deleted namespace keeps its name until no process can acknowledge an add to it any
more (:func:`counter.windows.settling_time`). Only then may a namespace of the same name be created,
and its row replaces the deleted one. A row is removed only when no creation from before may land
any more: a namespace that came back would have no watermarks, and its adds would never count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from counter.errors import InvalidBodyError
from counter.limits import COUNTER_NAME_CHARS_MAX
from counter.storage.cassandra.control_keyspace import (
    DATASETS,
    NAMESPACES,
    OP,
    TOKENS,
    Row,
    Sequences,
    is_deleted,
    namespace_of,
    namespace_text,
)
from counter.storage.cassandra.options import strict_gap_of
from counter.storage.cassandra.session import CassandraSession, batch_of
from counter.storage.cassandra.slices import CassandraPurge, CassandraSlices
from counter.storage.shared.directory import Coalesced
from counter.types import Dataset, Era, Namespace, NamespaceSettings, PayloadCheck, TokenBlock
from counter.windows import first_watermark

#: Cassandra orders text by its bytes in UTF-8, and Python by code points: the same order.
_PAGE: Final = (
    "SELECT counter FROM {keyspace}.names WHERE namespace = ? AND bucket = ?"
    " AND counter %s ? AND counter < ? LIMIT ?"
)
_FROM: Final = _PAGE % ">="
_AFTER: Final = _PAGE % ">"

_LAST: Final = "\U0010ffff"
#: Greater than any name.
_END: Final = _LAST * (COUNTER_NAME_CHARS_MAX + 1)
_SURROGATES: Final = range(0xD800, 0xE000)
#: Names to read from a bucket in addition to its share, because shares are not equal.
_MORE: Final = 16


@dataclass(slots=True)
class _NameBucket:
    """One partition of names: those that were read, and whether there are more."""

    number: int
    names: list[str] = field(default_factory=list)
    has_more: bool = True


def _end_of(prefix: str) -> str:
    """Return the least text that is greater than every name with *prefix*."""
    stem = prefix.rstrip(_LAST)
    if not stem:
        return _END
    following = ord(stem[-1]) + 1
    if following in _SURROGATES:
        following = _SURROGATES.stop
    return stem[:-1] + chr(following)


_ALL: Final = "SELECT name, id, version, document FROM {control}.namespaces"
_ROW: Final = "SELECT id, version, document, op FROM {control}.namespaces WHERE name = ?"
_CREATE: Final = (
    "INSERT INTO {control}.namespaces (name, id, version, document, op) VALUES (?, ?, 1, ?, ?)"
    " IF NOT EXISTS"
)
#: Over the row of a deleted namespace.
_CREATE_OVER: Final = (
    "UPDATE {control}.namespaces SET id = ?, version = 1, document = ?, op = ? WHERE name = ?"
    " IF id = ? AND version = ?"
)
_UPDATE: Final = (
    "UPDATE {control}.namespaces SET version = ?, document = ?, op = ? WHERE name = ?"
    " IF id = ? AND version = ?"
)
_WATERMARK: Final = (
    "INSERT INTO {keyspace}.watermarks (namespace, shard, through) VALUES (?, ?, ?)"
    " USING TIMESTAMP ?"
)

#: Rows of one batch: a namespace has up to SHARDS_MAX watermarks, in one partition.
_BATCH: Final = 100
#: At most this many numbers are issued between a backup and its restore.
_TOKENS_JUMP: Final = 1 << 40
_JUMP: Final = 1_000_000


class CassandraControl:
    """See :class:`counter.ports.ControlPlane`."""

    def __init__(self, session: CassandraSession) -> None:
        self._session = session
        self.datasets, self.read_clock = session.datasets, session.read_clock
        self.dropped_before = session.dropped_before
        slices = CassandraSlices(session)
        self.slices, self.make_slices = slices.slices, slices.make_slices
        self.retire_slice, self.drop_slice = slices.retire_slice, slices.drop_slice
        self._purge = CassandraPurge(session)
        self.purge = self._purge.purge
        self._sequences = Sequences(self._session.control)
        #: (count, time, where the block goes) of each lease that waits for the next round trip.
        self._asked: list[tuple[int, int, asyncio.Future[TokenBlock]]] = []
        self._lease = Coalesced(self._lease_all)

    async def namespaces(self) -> Sequence[Namespace]:
        before = set(self._session.known)
        rows = await self._session.control.read(_ALL)
        found = []
        for row in sorted(rows):
            dataset = await self._purge.dataset_in(row[3])
            if is_deleted(row[3]):
                self._session.settles_in(row[1], dataset)
            else:
                found.append(namespace_of(row, dataset))
        self._session.note_namespaces(before, [each.id for each in found])
        return found

    async def create_namespace(
        self, name: str, settings: NamespaceSettings, now_us: int
    ) -> Namespace | None:
        await self._session.load_datasets()
        dataset = self._session.dataset_named(settings.dataset)
        self._check_strict(dataset, settings)
        row = await self._session.control.settled(_ROW, name)
        if row is not None and not is_deleted(row[2]):
            return None
        if row is not None:
            await self._settle_deleted(name, row[0], row[2])
        number = (await self._sequences.take(NAMESPACES)).first
        eras = (Era(0, settings.accept_limit_us),)
        namespace = Namespace(number, name, settings, eras, dataset, now_us, version=1)
        # Before any process can know the namespace: one without watermarks counts as deleted.
        await self._lay_watermarks(namespace)
        text = namespace_text(namespace)
        cql, values = _CREATE, [name, number, text, OP]
        if row is not None:
            cql, values = _CREATE_OVER, [number, text, OP, name, row[0], row[1]]
        applied, _ = await self._session.control.compare(cql, values, seen_by=(_ROW, (name,)))
        if not applied:
            # An attempt that timed out may land when the name is free again. So the purge takes the
            # watermarks away, when that is over.
            await self._purge.note_departure(namespace)
            return None
        self._session.known.add(number)
        return namespace

    async def update_namespace(self, namespace: Namespace, updated: Namespace) -> bool:
        if updated.settings.payload_check is not namespace.settings.payload_check:
            self._check_strict(namespace.dataset, updated.settings)
        applied, _ = await self._replace_row(namespace, updated.version, namespace_text(updated))
        return applied

    async def _replace_row(
        self, namespace: Namespace, version: int, text: str
    ) -> tuple[bool, Row | None]:
        """Replace the version and the document of *namespace* if they are still its own."""
        values = (version, text, OP, namespace.name, namespace.id, namespace.version)
        seen_by = (_ROW, (namespace.name,))
        return await self._session.control.compare(_UPDATE, values, seen_by=seen_by)

    def _check_strict(self, dataset: Dataset, settings: NamespaceSettings) -> None:
        """Raise InvalidBodyError if the data centers of *dataset* cannot keep a strict promise."""
        state = self._session.state_of(dataset)
        is_strict = settings.payload_check is PayloadCheck.STRICT
        if is_strict and state.is_spread and (gap := strict_gap_of(state.placement)):
            raise InvalidBodyError(gap, field="payload_check")

    async def delete_namespace(self, namespace: Namespace) -> bool:
        row = await self._session.control.settled(_ROW, namespace.name)
        if row is None or row[:2] != (namespace.id, namespace.version):
            return False
        # Recorded before the deletion; otherwise a crash in between would leave its data forever.
        await self._purge.note_departure(namespace)
        text = namespace_text(namespace, deleted=True)
        applied, row = await self._replace_row(namespace, namespace.version + 1, text)
        if not applied and row is not None and row[0] == namespace.id and not is_deleted(row[2]):
            return False
        self._session.note_deleted(namespace)
        await self._purge.take_watermarks_away(namespace.dataset, namespace.id)
        return True

    async def _settle_deleted(self, name: str, number: int, text: str) -> None:
        """Let nothing use the deleted namespace *number* any more. Raises UnavailableError while
        adds to it may be acknowledged."""
        dataset = await self._purge.dataset_in(text)
        self._session.check_settled(name, number, dataset)
        # What deleted it may have stopped before it did so. A process with an old copy of the
        # directory would read old counts under the name.
        await self._purge.take_watermarks_away(dataset, number)

    async def counters(
        self, namespace: Namespace, *, prefix: str, after: str | None, limit: int
    ) -> Sequence[str]:
        self._session.check_exists(namespace)
        buckets = [_NameBucket(number) for number in range(namespace.settings.shards)]
        share = min(limit, limit // len(buckets) * 2 + _MORE)
        asked = buckets
        while True:
            statements = [
                await self._names_page(namespace, each, prefix, after, share) for each in asked
            ]
            for bucket, rows in zip(
                asked, await self._session.connection.rows(statements), strict=True
            ):
                bucket.names += [name for (name,) in rows or ()]
                bucket.has_more = len(rows or ()) == share
            # Nothing is missing up to the earliest last name of a bucket with more names.
            asked = [each for each in buckets if each.has_more]
            names = sorted(name for each in buckets for name in each.names)
            if asked:
                known_to = min(each.names[-1] for each in asked)
                names = [name for name in names if name <= known_to]
            if not asked or len(names) >= limit:
                return names[:limit]

    async def _names_page(
        self, namespace: Namespace, bucket: _NameBucket, prefix: str, after: str | None, limit: int
    ) -> Any:
        last = bucket.names[-1] if bucket.names else after
        cql, first = (_FROM, prefix) if last is None or last < prefix else (_AFTER, last)
        statement = await self._session.to_read(namespace.dataset, cql)
        return statement.bind((namespace.id, bucket.number, first, _end_of(prefix), limit))

    async def lease_tokens(self, count: int, now_us: int) -> TokenBlock:
        future: asyncio.Future[TokenBlock] = asyncio.get_running_loop().create_future()
        self._asked.append((count, now_us, future))
        await self._lease()
        return future.result()

    async def begin_new_life(self, now_us: int) -> None:
        """After a restore, skip the numbers that were issued after the backup to tokens, namespaces
        or datasets, and token times before *now_us*."""
        await self._sequences.take(TOKENS, _TOKENS_JUMP, now_us)
        await self._sequences.take(NAMESPACES, _JUMP)
        await self._sequences.take(DATASETS, _JUMP)

    async def _lease_all(self) -> None:
        """Lease for all waiting callers in one compare-and-set; each gets a part, in order."""
        asked, self._asked = self._asked, []
        latest_us = max(now_us for _, now_us, _ in asked)
        total = sum(count for count, _, _ in asked)
        block = await self._sequences.take(TOKENS, total, latest_us)
        first = block.first
        for count, _, future in asked:
            if not future.done():
                future.set_result(TokenBlock(block.issuer, first, block.time_us))
            first += count

    async def _lay_watermarks(self, namespace: Namespace) -> None:
        """Watermarks, one per shard. The time is the write timestamp, so they only move forward."""
        settings = namespace.settings
        through_us = first_watermark(namespace.dataset, settings, namespace.created_at_us)
        statement = await self._session.to_write(namespace.dataset, _WATERMARK)
        rows = [
            statement.bind((namespace.id, shard, through_us, through_us))
            for shard in range(settings.shards)
        ]
        batches = [batch_of(rows[at : at + _BATCH]) for at in range(0, len(rows), _BATCH)]
        await self._session.connection.rows(batches)
