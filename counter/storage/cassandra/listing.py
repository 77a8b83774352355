"""Names of counters, from as many partitions as a namespace has shards, in one order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from counter.limits import COUNTER_NAME_CHARS_MAX
from counter.storage.cassandra.base import CassandraBase
from counter.types import Namespace

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
#: Beside its share of what is wanted, a bucket is asked for this much: shares are not equal.
_MORE: Final = 16


@dataclass(slots=True)
class _Bucket:
    """One partition of names: those that were read, and whether there are more."""

    number: int
    names: list[str] = field(default_factory=list)
    has_more: bool = True


class CassandraListing(CassandraBase):
    """The listing of :class:`counter.ports.ControlPlane`."""

    async def counters(
        self, namespace: Namespace, *, prefix: str, after: str | None, limit: int
    ) -> Sequence[str]:
        self._must_stand(namespace)
        buckets = [_Bucket(number) for number in range(namespace.settings.shards)]
        share = min(limit, limit // len(buckets) * 2 + _MORE)
        asked = buckets
        while True:
            statements = [
                await self._names_page(namespace, each, prefix, after, share) for each in asked
            ]
            for bucket, rows in zip(asked, await self._connection.rows(statements), strict=True):
                bucket.names += [name for (name,) in rows or ()]
                bucket.has_more = len(rows or ()) == share
            # Up to the earliest end of a bucket that goes on, nothing can be missing.
            asked = [each for each in buckets if each.has_more]
            names = sorted(name for each in buckets for name in each.names)
            if asked:
                known_to = min(each.names[-1] for each in asked)
                names = [name for name in names if name <= known_to]
            if not asked or len(names) >= limit:
                return names[:limit]

    async def _names_page(
        self, namespace: Namespace, bucket: _Bucket, prefix: str, after: str | None, limit: int
    ) -> Any:
        last = bucket.names[-1] if bucket.names else after
        cql, first = (_FROM, prefix) if last is None or last < prefix else (_AFTER, last)
        statement = await self._to_read(namespace.dataset, cql)
        return statement.bind((namespace.id, bucket.number, first, _end_of(prefix), limit))


def _end_of(prefix: str) -> str:
    """The least text that is greater than every name that starts with *prefix*."""
    stem = prefix.rstrip(_LAST)
    if not stem:
        return _END
    following = ord(stem[-1]) + 1
    if following in _SURROGATES:
        following = _SURROGATES.stop
    return stem[:-1] + chr(following)
