"""``counter schema apply``: create what is missing, change what may change, and report it.

Every step is idempotent and may run concurrently: table ids are derived from their names, rows are
inserted if they do not exist, and concurrent changes are read at SERIAL.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from counter.errors import SliceMissingError, StartupError, StoreUnavailableError, UnavailableError
from counter.limits import START_TIMEOUT_US
from counter.storage.cassandra.connection import CassandraConnection
from counter.storage.cassandra.control_keyspace import (
    DATASETS,
    NAMESPACES,
    OP,
    TOKENS,
    ControlKeyspace,
    Row,
    Sequences,
    dataset_of,
    dataset_text,
)
from counter.storage.cassandra.options import (
    CassandraOptions,
    Placement,
    gap_of,
    stray_of,
)
from counter.storage.cassandra.tables import (
    CONTROL_TABLES,
    DATASET_TABLES,
    SCHEMA_VERSION,
    Table,
    columns_of,
    create_table,
    is_keyspace,
    keyspace_of,
)
from counter.storage.shared.dataset_changes import change_of, changed_dataset
from counter.storage.shared.startup_retry import StartupRetry
from counter.types import Dataset

if TYPE_CHECKING:
    from counter.storage.cassandra.settings import CassandraSettings


_VERSION: Final = "SELECT value, op FROM {control}.meta WHERE name = 'schema'"
_FIRST_VERSION: Final = (
    "INSERT INTO {control}.meta (name, value, op) VALUES ('schema', ?, ?) IF NOT EXISTS"
)
_NEXT_VERSION: Final = (
    "UPDATE {control}.meta SET value = ?, op = ? WHERE name = 'schema' IF value = ?"
)
_DATASET: Final = "SELECT id, document, op FROM {control}.datasets WHERE name = ?"
_DATASETS: Final = "SELECT name, id, document FROM {control}.datasets"
_NEW_DATASET: Final = (
    "INSERT INTO {control}.datasets (name, id, document, op) VALUES (?, ?, ?, ?) IF NOT EXISTS"
)
_CHANGED_DATASET: Final = (
    "UPDATE {control}.datasets SET document = ?, op = ? WHERE name = ? IF document = ?"
)
_NOTHING_DROPPED: Final = (
    "UPDATE {control}.slices SET dropped_before = 0 WHERE dataset = ? IF dropped_before = null"
)
_DROPPED: Final = "SELECT DISTINCT dataset, dropped_before FROM {control}.slices WHERE dataset = ?"


async def apply_schema(settings: CassandraSettings) -> list[str]:
    """Apply the schema of *settings*; return a line for each change. Raises StartupError."""
    options = settings.options()
    connection = CassandraConnection(options)
    retry = StartupRetry(settings.start_timeout)
    await retry.run(connection.open)
    try:
        return await apply(connection, options, retry)
    finally:
        await connection.close()


async def apply(
    connection: CassandraConnection, options: CassandraOptions, retry: StartupRetry | None = None
) -> list[str]:
    """Do the same over an open connection.

    If another process does the same, a table may be visible and not usable yet, and no error
    identifies that case. So every failure is retried.
    """
    retry = retry or StartupRetry(START_TIMEOUT_US)
    applying = _Applying(connection, options)
    try:
        return await retry.run(applying.run)
    except UnavailableError as error:
        raise StartupError(f"the schema cannot be applied: {error.detail}") from error


async def check_version(connection: CassandraConnection, control: ControlKeyspace) -> None:
    """Raise StartupError with the fix unless the schema has this program's version."""
    version = await _version(connection, control)
    if version is None:
        raise StartupError(
            f"Cassandra has no keyspace {control.keyspace!r} of this service:"
            " run `counter schema apply`, or correct --keyspace"
        )
    if version < SCHEMA_VERSION:
        raise StartupError(
            f"keyspace {control.keyspace!r} has schema version {version}; this program needs"
            f" {SCHEMA_VERSION}: run `counter schema apply`"
        )


async def _version(connection: CassandraConnection, control: ControlKeyspace) -> int | None:
    """Return the schema's version, None if there is none. Raises StartupError if it is newer than
    this program's."""
    cql = (
        "SELECT table_name FROM system_schema.tables"
        f" WHERE keyspace_name = '{control.keyspace}' AND table_name = 'meta'"
    )
    if not await connection.simple(cql):
        return None
    try:
        row = await control.settled(_VERSION)
    except SliceMissingError:
        # It is being created: visible, but not usable yet.
        return None
    if row is None:
        return None
    version = int(row[0])
    if version > SCHEMA_VERSION:
        raise StartupError(
            f"keyspace {control.keyspace!r} has schema version {version}; this program knows"
            f" {SCHEMA_VERSION}: start the newer program that made it"
        )
    return version


class _Applying:
    """One run, with a line for each change, and for each setting that cannot be changed."""

    def __init__(self, connection: CassandraConnection, options: CassandraOptions) -> None:
        self._connection = connection
        self._options = options
        self._control = ControlKeyspace(connection, options.keyspace)
        self._sequences = Sequences(self._control)
        self._version: int | None = None
        self._report: list[str] = []

    async def run(self) -> list[str]:
        self._check_names()
        self._version = await _version(self._connection, self._control)
        nodes = self._connection.nodes_by_datacenter()
        replicas = {
            dataset.name: replicas_of(dataset.name, placement, nodes)
            for dataset, placement in self._options.datasets
        }
        for dataset, placement in self._options.datasets:
            # This process may run anywhere: the setting is about the others.
            check_overlap(dataset.name, placement, replicas[dataset.name], placement.datacenter)
        await self._have_keyspace(self._control.keyspace, replicas_of_all(replicas.values()))
        await self._have_tables(self._control.keyspace, CONTROL_TABLES)
        for name in (TOKENS, NAMESPACES, DATASETS):
            await self._sequences.begin(name)
        for dataset, placement in self._options.datasets:
            await self._have_keyspace(self._keyspace_of(dataset.name), replicas[dataset.name])
            await self._have_tables(self._keyspace_of(dataset.name), DATASET_TABLES)
            await self._have_dataset(dataset, placement)
        # Datasets that are not in this process's settings, too.
        for name, number, _ in await self._control.read(_DATASETS):
            await self._have_tables(self._keyspace_of(name), DATASET_TABLES)
            await self._begin_slices(number)
        # Last, so that a store that finds this version finds the whole schema.
        await self._have_version()
        return self._report or ["nothing to do: the schema is as it should be"]

    def _keyspace_of(self, dataset: str) -> str:
        return keyspace_of(self._control.keyspace, dataset)

    def _check_names(self) -> None:
        names: dict[str, str] = {}
        for dataset, _ in self._options.datasets:
            keyspace = self._keyspace_of(dataset.name)
            if not is_keyspace(keyspace):
                raise StartupError(
                    f"dataset {dataset.name!r} would lie in keyspace {keyspace!r}, whose name must"
                    " be a letter and at most 47 more of a-z, 0-9 and _: give it another name"
                )
            if keyspace in names:
                raise StartupError(
                    f"datasets {names[keyspace]!r} and {dataset.name!r} would both lie in keyspace"
                    f" {keyspace!r}: give one of them another name"
                )
            names[keyspace] = dataset.name

    async def _have_keyspace(self, keyspace: str, replicas: Replicas) -> None:
        """Create it, or change its replication to the settings'."""
        existing = await self._connection.replication(keyspace)
        replication = replication_cql(replicas)
        if existing is None:
            await self._connection.ddl(
                f"CREATE KEYSPACE IF NOT EXISTS {keyspace} WITH replication = {replication}"
            )
            self._report.append(f"created keyspace {keyspace}, replicas {replicas_text(replicas)}")
            return
        before = {name: count for name, count in existing.items() if name != "class"}
        if before != {center: str(count) for center, count in replicas.items()}:
            await self._connection.ddl(
                f"ALTER KEYSPACE {keyspace} WITH replication = {replication}"
            )
            self._report.append(
                f"keyspace {keyspace} had replicas {replicas_text(before)} and now has"
                f" {replicas_text(replicas)}: run `nodetool repair --full {keyspace}` on every"
                " node; until that is done, reads may miss what was written before"
            )

    async def _have_tables(self, keyspace: str, tables: Mapping[str, Table]) -> None:
        """Create what is missing, and add columns that an earlier version did not have."""
        cql = (
            "SELECT table_name, column_name FROM system_schema.columns"
            f" WHERE keyspace_name = '{keyspace}'"
        )
        columns = set(await self._connection.simple(cql))
        existing = {table for table, _ in columns}
        created = [name for name in tables if name not in existing]
        # Without a version, a visible table may be one that another process is creating and that is
        # not usable yet: creating it again waits for that.
        for name in tables if self._version is None else created:
            await self._connection.ddl(create_table(keyspace, name, tables[name]))
        if created:
            self._report.append(f"created tables of {keyspace}: {', '.join(created)}")
        for name in existing.intersection(tables):
            for column, kind in columns_of(tables[name]).items():
                if (name, column) not in columns:
                    await self._connection.ddl(
                        f"ALTER TABLE {keyspace}.{name} ADD IF NOT EXISTS {column} {kind}"
                    )
                    self._report.append(f"added column {column} to {keyspace}.{name}")

    async def _have_dataset(self, dataset: Dataset, placement: Placement) -> None:
        """Insert it, or change what may be changed to the settings."""
        seen_by = (_DATASET, (dataset.name,))
        row = await self._control.settled(_DATASET, dataset.name)
        if row is None:
            block = await self._sequences.take(DATASETS)
            values = (dataset.name, block.first, dataset_text(dataset, placement), OP)
            applied, row = await self._control.compare(_NEW_DATASET, values, seen_by=seen_by)
            if applied:
                self._report.append(f"created dataset {dataset.name}")
                return
        if row is not None:
            await self._change_dataset(row, dataset, placement)

    async def _change_dataset(self, row: Row, asked: Dataset, placement: Placement) -> None:
        number, text, _ = row
        existing, placed = dataset_of(asked.name, number, text)
        changed, stays = changed_dataset(existing, asked)
        self._report += stays
        if (changed, placement) == (existing, placed):
            return
        applied, _ = await self._control.compare(
            _CHANGED_DATASET,
            (dataset_text(changed, placement), OP, asked.name, text),
            seen_by=(_DATASET, (asked.name,)),
        )
        if not applied:
            self._report.append(f"dataset {asked.name} was changed by another process meanwhile")
            return
        if changed != existing:
            self._report.append(change_of(asked))
        for name in ("write_consistency", "read_consistency", "datacenter"):
            old, new = (getattr(each, name) or "any" for each in (placed, placement))
            if old != new:
                self._report.append(
                    f"dataset {asked.name}: {name} was {old} and is now {new}: stop every process,"
                    " API and rollup, before any of them starts again with it"
                )

    async def _begin_slices(self, number: int) -> None:
        """Write that nothing is dropped, because compare-and-sets of slices compare with it."""
        seen_by = (_DROPPED, (number,))
        await self._control.compare(_NOTHING_DROPPED, (number,), seen_by=seen_by, mine=0)

    async def _have_version(self) -> None:
        if self._version == SCHEMA_VERSION:
            return
        text = str(SCHEMA_VERSION)
        cql, values = _FIRST_VERSION, [text, OP]
        if self._version is not None:
            cql, values = _NEXT_VERSION, [text, OP, str(self._version)]
        applied, _ = await self._control.compare(cql, values, seen_by=(_VERSION, ()))
        if applied:
            self._report.append(f"the schema of {self._control.keyspace} has version {text}")
        else:
            # Another process was first, and must not be a newer one.
            await _version(self._connection, self._control)


#: Replicas by data center.
Replicas = Mapping[str, int]


def replicas_of(name: str, placement: Placement, nodes: Mapping[str, int]) -> Replicas:
    """Return the replicas of dataset *name* by data center, in a cluster with these *nodes*.

    Data centers are named, because Cassandra's ``replication_factor`` would mean those that exist
    when the keyspace is created, and would not change them later. Raises StartupError for a data
    center that does not exist, and UnavailableError if there are too few nodes for a quorum: others
    may be joining.
    """
    replicas: dict[str, int] = {}
    for center, count in placement.replication:
        if center and center not in nodes:
            raise StartupError(
                f"dataset {name!r} is to have {count} replicas in data center {center!r};"
                f" the cluster has {', '.join(sorted(nodes))}: correct --replication"
            )
        for each in (center,) if center else nodes:
            replicas[each] = count
    for center, count in replicas.items():
        quorum = count // 2 + 1
        if nodes[center] < quorum:
            raise StoreUnavailableError(
                f"dataset {name!r} is to have {count} replicas in data center {center!r}, which"
                f" has {nodes[center]} of the {quorum} nodes that a quorum of them needs:"
                " start more nodes, or give a smaller --replication"
            )
    return replicas


def replicas_in(replication: Mapping[str, str], nodes: Mapping[str, int]) -> Replicas:
    """Return the replicas of a keyspace by its ``replication`` in ``system_schema``.

    Strategies other than NetworkTopologyStrategy have no data centers: replicas may be in each that
    has *nodes*.
    """
    # Cassandra writes 3/1 if one of three replicas is transient.
    counts = {
        name: int(count.partition("/")[0]) for name, count in replication.items() if name != "class"
    }
    if replication["class"].endswith("NetworkTopologyStrategy"):
        return counts
    return dict.fromkeys(nodes, counts.get("replication_factor", 1))


def check_overlap(
    name: str, placement: Placement, replicas: Replicas, datacenter: str | None
) -> None:
    """Raise StartupError if a read of dataset *name* by a process in *datacenter* could miss an
    acknowledged write."""
    centers = [center for center, count in replicas.items() if count]
    problem = gap_of(name, placement, centers)
    if problem is None and len(centers) > 1:
        problem = stray_of(name, placement, datacenter)
    if problem is not None:
        raise StartupError(problem)


def replicas_of_all(parts: Iterable[Replicas]) -> Replicas:
    """Return the maximum of replicas in each data center among *parts*."""
    most: dict[str, int] = {}
    for each in parts:
        for center, count in each.items():
            most[center] = max(count, most.get(center, 0))
    return most


def replication_cql(replicas: Replicas) -> str:
    """Return the ``replication`` of a keyspace in CQL."""
    counts = "".join(f", '{center}': {count}" for center, count in sorted(replicas.items()))
    return f"{{'class': 'NetworkTopologyStrategy'{counts}}}"


def replicas_text(replicas: Mapping[str, int | str]) -> str:
    """Return it in the form of the setting."""
    return ",".join(f"{center}:{count}" for center, count in sorted(replicas.items()))
