"""The control keyspace: statements, compare-and-sets of rows, their documents, and sequences."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from cassandra import ConsistencyLevel

from counter.errors import OverloadedError, StoreUnavailableError
from counter.limits import SECOND
from counter.storage.cassandra.connection import CassandraConnection
from counter.storage.cassandra.options import Placement
from counter.types import Dataset, Era, Namespace, NamespaceSettings, Slice, TokenBlock

Row = tuple[Any, ...]

#: In the values of a compare-and-set: its ``op``, random bytes that no other one writes.
OP: Final = object()


class ControlKeyspace:
    """Rows that all processes agree on. In a template, {control} is the keyspace.

    Quorums span all data centers, so every process sees the writes of every other one.
    """

    def __init__(self, connection: CassandraConnection, keyspace: str) -> None:
        self.keyspace = keyspace
        self._connection = connection
        self._statements: dict[tuple[str, int], Any] = {}

    async def read(self, cql: str, *values: Any) -> Sequence[Row]:
        """Read rows at QUORUM, including all earlier writes and compare-and-sets."""
        statement = await self._prepared(cql, ConsistencyLevel.QUORUM)
        return await self._connection.one(statement.bind(values))

    async def settled(self, cql: str, *values: Any) -> Row | None:
        """Read a row at SERIAL, which completes compare-and-sets in progress."""
        statement = await self._prepared(cql, ConsistencyLevel.SERIAL)
        rows = await self._connection.one(statement.bind(values))
        return rows[0] if rows else None

    async def write(self, cql: str, *values: Any) -> None:
        """Run an idempotent write at QUORUM, which sets its own timestamp."""
        statement = await self._prepared(cql, ConsistencyLevel.QUORUM)
        await self._connection.one(statement.bind(values))

    async def compare(
        self,
        cql: str,
        values: Sequence[Any],
        *,
        seen_by: tuple[str, Sequence[Any]],
        mine: Any = None,
    ) -> tuple[bool, Row | None]:
        """Run a compare-and-set as :meth:`CassandraConnection.compare_and_set`. *seen_by* is the
        SERIAL read that settles it, and its values: its last column has the ``op``, or else
        *mine*."""
        op = os.urandom(16)
        values = [op if each is OP else each for each in values]
        statement = await self._prepared(cql, ConsistencyLevel.QUORUM, idempotent=False)
        settle_cql, settle_values = seen_by

        async def settle() -> Row | None:
            return await self.settled(settle_cql, *settle_values)

        return await self._connection.compare_and_set(
            statement.bind(values), settle, op if mine is None else mine
        )

    def forget_statements(self) -> None:
        """Prepare each statement again at its next use."""
        self._statements.clear()

    async def _prepared(self, cql: str, consistency: int, *, idempotent: bool = True) -> Any:
        key = (cql, consistency)
        known = self._statements.get(key)
        if known is None:
            text = cql.format(control=self.keyspace)
            known = await self._connection.prepare(text, consistency, idempotent=idempotent)
            self._statements[key] = known
        return known


def dataset_text(dataset: Dataset, placement: Placement) -> str:
    """Return the document of a dataset: all but its id and name."""
    body = {name: value for name, value in asdict(dataset).items() if name not in ("id", "name")}
    return json.dumps(body | {"placement": asdict(placement)})


def dataset_of(name: str, dataset_id: int, text: str) -> tuple[Dataset, Placement]:
    """Return the dataset and its placement."""
    body: dict[str, Any] = json.loads(text)
    placement = body.pop("placement")
    placement["replication"] = tuple((center, n) for center, n in placement["replication"])
    return Dataset(id=dataset_id, name=name, **body), Placement(**placement)


def slice_text(each: Slice) -> str:
    """Return the document of a slice: all but its start."""
    return json.dumps({name: value for name, value in asdict(each).items() if name != "start_us"})


def slice_from(start_us: int, text: str) -> Slice:
    """The slice that starts at *start_us*."""
    return Slice(start_us=start_us, **json.loads(text))


def namespace_text(namespace: Namespace, *, deleted: bool = False) -> str:
    """Return the document of a namespace: all but its name, id and version."""
    document = {
        "settings": namespace.document(),
        "eras": namespace.eras,
        "dataset": namespace.dataset.id,
        "created_at_us": namespace.created_at_us,
    }
    return json.dumps(document | {"deleted": True} if deleted else document)


def is_deleted(text: str) -> bool:
    """Return whether the document is of a deleted namespace that still reserves its name."""
    return "deleted" in json.loads(text)


def dataset_id_in(text: str) -> int:
    """The id of the dataset that a namespace's document names."""
    dataset_id: int = json.loads(text)["dataset"]
    return dataset_id


def namespace_of(row: tuple[str, int, int, str], dataset: Dataset) -> Namespace:
    """The namespace of a row: name, id, version, document."""
    name, namespace_id, version, text = row
    body = json.loads(text)
    return Namespace(
        id=namespace_id,
        name=name,
        settings=NamespaceSettings.from_document(body["settings"]),
        eras=tuple(Era(*era) for era in body["eras"]),
        dataset=dataset,
        created_at_us=body["created_at_us"],
        version=version,
        announced_eras=Namespace.announced_in(body["settings"]),
    )


TOKENS: Final = "tokens"
NAMESPACES: Final = "namespaces"
DATASETS: Final = "datasets"

_ISSUER_BYTES: Final = 8
_ATTEMPTS_MAX: Final = 40
_PAUSE_MAX_S: Final = 0.2

_BEGIN: Final = (
    "INSERT INTO {control}.sequences (name, next, time, issuer, op) VALUES (?, 1, 0, ?, ?)"
    " IF NOT EXISTS"
)
#: Every caller moves ``next``, so it shows whether another one came in between.
_TAKE: Final = (
    "UPDATE {control}.sequences SET next = ?, time = ?, op = ? WHERE name = ? IF next = ?"
)
_READ: Final = "SELECT next, time, issuer, op FROM {control}.sequences WHERE name = ?"


class Sequences:
    """Take numbers by compare-and-set. Unused numbers are gaps."""

    def __init__(self, control: ControlKeyspace) -> None:
        self._control = control
        #: The last known value: if only this process takes numbers, the first try succeeds.
        self._seen: dict[str, tuple[int, int, bytes]] = {}

    async def begin(self, name: str) -> None:
        """Create the sequence *name*, from 1."""
        issuer = os.urandom(_ISSUER_BYTES)
        await self._control.compare(_BEGIN, (name, issuer, OP), seen_by=(_READ, (name,)))

    async def take(self, name: str, count: int = 1, now_us: int = 0) -> TokenBlock:
        """Take *count* numbers above all earlier ones; return the first, and *now_us* or the latest
        time taken, if that is later."""
        for attempt in range(_ATTEMPTS_MAX):
            seen = self._seen.get(name) or await self._read(name)
            first, latest_us, issuer = seen
            time_us = max(latest_us, now_us)
            # Unknown until the outcome is known.
            self._seen.pop(name, None)
            values = (first + count, time_us, OP, name, first)
            applied, row = await self._control.compare(_TAKE, values, seen_by=(_READ, (name,)))
            if applied:
                self._seen[name] = (first + count, time_us, issuer)
                return TokenBlock(issuer, first, time_us)
            if row is not None:
                self._seen[name] = (row[0], row[1], row[2])
            await asyncio.sleep(random.uniform(0, min(_PAUSE_MAX_S, 0.01 * 2**attempt)))
        raise OverloadedError(
            f"{_ATTEMPTS_MAX} tries to take numbers of {name!r} met others who took them",
            retry_after_us=SECOND,
        )

    async def _read(self, name: str) -> tuple[int, int, bytes]:
        row = await self._control.settled(_READ, name)
        if row is None:
            raise StoreUnavailableError(
                f"there is no sequence {name!r} in keyspace {self._control.keyspace!r}:"
                " run `counter schema apply`"
            )
        return row[0], row[1], row[2]
