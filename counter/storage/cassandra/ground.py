"""The control keyspace: its statements, and compare-and-sets of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from cassandra import ConsistencyLevel

from counter.storage.cassandra.connection import Connection

Row = tuple[Any, ...]

#: No row has this ``op``: for a compare-and-set that leaves none.
NO_OP: Final = b""


class ControlKeyspace:
    """Rows that all processes agree on. In a template, {control} is the keyspace.

    Quorums are of all data centers together: what one process did, every other one sees.
    """

    def __init__(self, connection: Connection, keyspace: str) -> None:
        self.keyspace = keyspace
        self._connection = connection
        self._statements: dict[tuple[str, int], Any] = {}

    async def read(self, cql: str, *values: Any) -> Sequence[Row]:
        """The rows at QUORUM: all that was written, or set, before."""
        statement = await self._prepared(cql, ConsistencyLevel.QUORUM)
        return await self._connection.one(statement.bind(values))

    async def settled(self, cql: str, *values: Any) -> Row | None:
        """The row at SERIAL: what is under way is brought to its end first."""
        statement = await self._prepared(cql, ConsistencyLevel.SERIAL)
        rows = await self._connection.one(statement.bind(values))
        return rows[0] if rows else None

    async def write(self, cql: str, *values: Any) -> None:
        """An idempotent write at QUORUM. It says its own timestamp."""
        statement = await self._prepared(cql, ConsistencyLevel.QUORUM)
        await self._connection.one(statement.bind(values))

    async def compare(
        self,
        cql: str,
        values: Sequence[Any],
        *,
        seen_by: tuple[str, Sequence[Any]],
        mine: Any,
        at: int,
    ) -> tuple[bool, Row | None]:
        """A compare-and-set, as :meth:`Connection.compare_and_set` says. *seen_by* is the SERIAL
        read that settles it and its values."""
        statement = await self._prepared(cql, ConsistencyLevel.QUORUM, idempotent=False)
        settle_cql, settle_values = seen_by

        async def settle() -> Row | None:
            return await self.settled(settle_cql, *settle_values)

        return await self._connection.compare_and_set(statement.bind(values), settle, mine, at)

    def forget_statements(self) -> None:
        """Prepare each anew when it is next needed."""
        self._statements.clear()

    async def _prepared(self, cql: str, consistency: int, *, idempotent: bool = True) -> Any:
        key = (cql, consistency)
        known = self._statements.get(key)
        if known is None:
            text = cql.format(control=self.keyspace)
            known = await self._connection.prepare(text, consistency, idempotent=idempotent)
            self._statements[key] = known
        return known
