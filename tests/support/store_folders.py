"""Which files belong to one store alone: without them, the rest is a program of the other stores.

`tests/test_tidy.py` holds that nothing else imports them (a benchmark may, when it runs), and
`tests/deploy/test_without_a_store.py` that the tests of the rest pass without them.
"""

from collections.abc import Mapping
from typing import Final

from counter.config.store_kinds import store_names

_SIMULATION: Final = "tests/simulation"
#: By store: folders, which end in "/", and the beginnings of the names of files.
STORE_FOLDERS: Final[Mapping[str, tuple[str, ...]]] = {
    "postgresql": (
        "counter/storage/postgresql/",
        "tests/postgresql/",
        "tests/support/postgresql.py",
    ),
    "cassandra": (
        "counter/storage/cassandra/",
        "tests/cluster/",
        "tests/support/cassandra",
        # It simulates the cluster, and plants bugs that only its seeds are known to find.
        *(f"{_SIMULATION}/{name}.py" for name in (
            "bugs_cache", "bugs_reading", "bugs_rollup", "bugs_store", "bugs_writing",
            "calm", "cluster", "connection", "cql", "processes", "statements", "store",
            "test_contracts", "test_directed", "test_leftovers", "test_marks", "test_partitions",
            "test_rebirth", "test_replicas", "test_simulation", "test_situations", "test_tails",
        )),
    ),
    "dynamodb": (
        "counter/storage/dynamodb/",
        "tests/dynamodb/",
        "tests/support/dynamodb.py",
        f"{_SIMULATION}/bugs_dynamodb.py",
        f"{_SIMULATION}/dynamodb_",
        f"{_SIMULATION}/test_dynamodb",
    ),
}  # fmt: skip


def is_here(path: str) -> bool:
    """Return whether the file *path*, which a document names, must exist: its store is
    installed."""
    return owner_of(path) in (None, *store_names())


def owner_of(path: str) -> str | None:
    """Return the store that the file *path* belongs to, if it is one."""
    owners = (name for name, parts in STORE_FOLDERS.items() if path.startswith(parts))
    return next(owners, None)
