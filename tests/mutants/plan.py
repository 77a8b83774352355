"""Which modules faults are drawn from, by area, how many of each operator, and which tests run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Final

from tests.mutants.operators import Mutant, mutants_of
from tests.support.store_folders import is_here

OPERATORS: Final = (
    "comparison", "boundary", "await", "swap", "lock", "stamp", "consistency", "cache",
    "durability", "step",
)  # fmt: skip
#: Faults of each operator in each area, if its modules have so many.
QUOTA: Final = 5
#: Faults of any operator in each module, if it has so many.
MODULE_QUOTA: Final = 3
_CLIENT: Final = "clients/python/counter_client"
_STORAGE: Final = "counter/storage"

AREAS: Final[Mapping[str, tuple[str, ...]]] = {
    "core": (
        *(f"counter/core/{name}.py" for name in (
            "adds", "clock_guard", "namespaces", "read", "resolve", "service", "write",
        )),
        *(f"counter/{name}.py" for name in (
            "api_keys", "bounds", "clock", "holds", "tokens", "types", "windows",
        )),
        "counter/config/event_rules.py", "counter/config/namespace_rules.py",
    ),
    "sqlite": tuple(f"{_STORAGE}/sqlite/{name}.py" for name in (
        "bounds", "control", "database", "decisions", "event_rows", "events", "live", "page_sums",
        "rollups", "schema", "window_rollup", "window_rows",
    )),
    "memory": tuple(f"{_STORAGE}/memory/{name}.py" for name in (
        "control", "events", "rollups", "store", "tables",
    )),
    "postgresql": (
        f"{_STORAGE}/postgresql/functions.sql",
        *(f"{_STORAGE}/postgresql/{name}.py" for name in (
            "control", "database", "decisions", "events", "fence", "rollups", "schema", "store",
        )),
    ),
    "cassandra": tuple(f"{_STORAGE}/cassandra/{name}.py" for name in (
        "control", "control_keyspace", "decisions", "event_reads", "events", "rollups", "session",
        "slices", "store", "tables",
    )),
    "dynamodb": tuple(f"{_STORAGE}/dynamodb/{name}.py" for name in (
        "control", "decisions", "driver", "events", "layout", "rollups", "session", "store",
    )),
    "caches": (
        f"{_STORAGE}/memcached/commands.py",
        *(f"{_STORAGE}/redis/{name}.py" for name in ("cache", "connection")),
        *(f"{_STORAGE}/shared/{name}.py" for name in (
            "batching", "bridge", "cache_entries", "cache_lane", "memory_cache", "remote_cache",
        )),
    ),
    "rollup": tuple(f"rollup/{name}.py" for name in (
        "atomics", "audits", "batches", "leases", "limiter", "maintenance", "partitions", "roller",
        "worker",
    )),
    "streams": ("api/routes/add_stream.py",),
    "client": tuple(f"{_CLIENT}/{name}.py" for name in (
        "aio", "buffer", "calls", "delivery", "failures", "retrying", "spool", "sync", "transport",
    )),
}  # fmt: skip

#: The quota of modules of which more are drawn: faults that were planted there by hand survived.
MORE: Final[Mapping[str, int]] = {
    "counter/core/service.py": 8, f"{_STORAGE}/sqlite/rollups.py": 12,
    f"{_STORAGE}/postgresql/functions.sql": 11, f"{_STORAGE}/postgresql/rollups.py": 8,
    f"{_STORAGE}/dynamodb/rollups.py": 8, f"{_STORAGE}/redis/connection.py": 5,
}  # fmt: skip

#: Areas that the simulation runs.
SIMULATED: Final = ("core", "cassandra", "dynamodb", "rollup", "caches")

_SIMULATION: Final = "tests/simulation/test_"
#: Tests that may kill a fault. Not those that read sources, start many servers or take minutes.
TESTS: Final = (
    "tests/unit", "tests/contracts/test_memory.py", "tests/contracts/test_sqlite.py",
    "tests/contracts/test_inline.py", "tests/contracts/test_remote_caches.py",
    *(f"{_SIMULATION}{name}.py" for name in (
        "contracts", "dynamodb", "dynamodb_rules", "leftovers", "marks", "partitions", "rebirth",
        "replicas", "tails",
    )),
    "tests/rollup", "tests/postgresql", "tests/client", "tests/properties",
    *(f"tests/http/test_{name}.py" for name in (
        "add_stream", "atomic", "cloud_events", "deleting", "faults", "keys", "namespaces",
        "payload_check", "tokens",
    )),
    "tests/evidence", "tests/cluster/test_cache_faults.py", "tests/cluster/test_cache_shared.py",
    "tests/cluster/test_memcached_races.py", "tests/cluster/test_redis_faults.py",
    "tests/crash/test_power_loss.py", "tests/crash/test_directory.py", "tests/crash/test_backup.py",
)  # fmt: skip
LEFT_OUT: Final = (
    "tests/unit/test_schedule.py", "tests/cluster/test_rollup_process.py",
    "tests/rollup/test_rivals.py",
    "tests/postgresql/test_failover.py", "tests/postgresql/test_damage.py",
    "tests/client/test_kills.py", "tests/client/test_strangers.py",
    "tests/client/test_documents.py", "tests/client/test_processes.py",
    "tests/properties/test_planner.py", "tests/evidence/test_document.py",
)  # fmt: skip


def installed_areas() -> Mapping[str, tuple[str, ...]]:
    """Return the areas without those of a store that is not installed."""
    return {area: paths for area, paths in AREAS.items() if is_here(paths[0])}


def all_mutants(root: Path) -> Mapping[str, tuple[str, Mutant]]:
    """Return each possible fault and its area, by id."""
    return {
        mutant.id: (area, mutant)
        for area, paths in installed_areas().items()
        for path in paths
        for mutant in mutants_of(root, path)
    }


def drawn(possible: Mapping[str, tuple[str, Mutant]], keep: Mapping[str, str]) -> list[str]:
    """Return the ids of the faults to try: those to *keep*, and others up to the quotas.

    *keep* has what is known, by id: what does not start is not counted. The order is that of the
    ids, which are hashes, from one module after the other; then from one operator after the other.
    """
    chosen = [
        key for key, verdict in keep.items() if key in possible and verdict != "does not start"
    ]
    groups: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for key in sorted(possible.keys() - keep.keys()):
        mutant = possible[key][1]
        groups[mutant.path, mutant.operator].append(key)
    for area, paths in installed_areas().items():
        for operator in OPERATORS:
            kept = [
                possible[key][0] == area and possible[key][1].operator == operator for key in chosen
            ]
            chosen += _by_turns([groups[path, operator] for path in paths], QUOTA - sum(kept))
    for path in chain.from_iterable(installed_areas().values()):
        kept = [possible[key][1].path == path for key in chosen]
        number = MORE.get(path, MODULE_QUOTA) - sum(kept)
        chosen += _by_turns([groups[path, operator] for operator in OPERATORS], number)
    return chosen


def _by_turns(groups: Sequence[list[str]], number: int) -> list[str]:
    """Take *number* ids out of the *groups*, one from each in turn."""
    taken: list[str] = []
    while len(taken) < number and any(groups):
        for keys in groups:
            if keys and len(taken) < number:
                taken.append(keys.pop(0))
    return taken
