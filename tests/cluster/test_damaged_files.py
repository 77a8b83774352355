"""A bit of a file beside the data of a Cassandra table is flipped: when it is noticed, what reads
return until then, and what repairs it.

``DAMAGE_SEED`` repeats a run.
"""

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cassandra import DriverException
from cassandra.cluster import NoHostAvailable
from cassandra.concurrent import execute_concurrent_with_args

from counter.storage.cassandra.tables import PARTITION_IS, create_table, events_of
from scripts.cluster_nodes import Cluster, Shape
from scripts.cluster_nodetool import nodetool
from scripts.cluster_process import ClusterError
from tests.support.cassandra import DATASET
from tests.support.cluster import running_cluster, session_of
from tests.support.seeds import seed_of
from tests.support.sstables import PARTS, lose_all_bits, rename_a_partition

pytestmark = pytest.mark.usefixtures("minutes")


KEYSPACE = "damaged"
TABLES_PER_PART = 10
#: Keys of partitions that often differ in one bit.
KEYS = [
    (1, f"c{counter}", time * DATASET.time_bucket_us, bucket)
    for counter in range(5)
    for time in range(2)
    for bucket in range(DATASET.event_buckets)
]
ROWS_PER_KEY = 4
_INSERT = (
    f"INSERT INTO {KEYSPACE}.{{}} (namespace, counter, time_bucket, event_bucket, event_time,"
    " event_id, item, delta) VALUES (?, ?, ?, ?, ?, ?, 0, ?)"
)
_SELECT = f"SELECT event_time, event_id, delta FROM {KEYSPACE}.{{}} WHERE {PARTITION_IS}"

Rows = set[tuple[Any, ...]]


class Tables:
    """Tables of events on one node; no row of them is like another one."""

    def __init__(self, cluster: Cluster, names: Sequence[str]) -> None:
        self.cluster = cluster
        (self.node,) = cluster.cassandra
        self.names = names
        self._written: dict[tuple[str, Any], Rows] = {}

    def fill(self) -> None:
        """Write them, each to one SSTable, and stop the node."""
        with session_of(self.cluster) as session:
            session.execute(
                f"CREATE KEYSPACE {KEYSPACE} WITH replication ="
                " {'class': 'SimpleStrategy', 'replication_factor': 1}"
            )
            for name in self.names:
                session.execute(create_table(KEYSPACE, name, events_of(DATASET)))
                self._fill(session, name)
        nodetool(self.node, "flush", KEYSPACE)
        self.node.stop()

    def _fill(self, session: Any, name: str) -> None:
        rows = []
        for key in KEYS:
            for row in range(ROWS_PER_KEY):
                number = len(self._written) * ROWS_PER_KEY + row
                rows.append((*key, key[2] + row, number.to_bytes(16, "big"), number))
            self._written[name, key] = {each[4:] for each in rows[-ROWS_PER_KEY:]}
        execute_concurrent_with_args(session, session.prepare(_INSERT.format(name)), rows)

    def file(self, name: str, part: str) -> Path:
        (found,) = (self.node.folder / "data" / KEYSPACE).glob(f"{name}-*/*-{part}.db")
        return found

    def found(self, name: str) -> Counter[str]:
        """How many partitions are right, have rows missing, have foreign rows, and fail."""
        # A read of damage may have ended it.
        self.node.start()
        found: Counter[str] = Counter()
        with session_of(self.cluster) as session:
            for key in KEYS:
                try:
                    select = session.prepare(_SELECT.format(name))
                    rows = {tuple(row) for row in session.execute(select, key)}
                except (DriverException, NoHostAvailable):
                    found["error"] += 1
                    continue
                written = self._written[name, key]
                found["right" if rows == written else "wrong" if rows - written else "missing"] += 1
        return found

    def passes(self, name: str, *how: str) -> bool:
        """Whether ``nodetool verify`` finds nothing."""
        try:
            nodetool(self.node, "verify", "--force", *how, KEYSPACE, name)
        except ClusterError:
            return False
        return True


@contextmanager
def tables_on_a_node(names: Sequence[str], sstable_format: str) -> Iterator[Tables]:
    """A node that goes on without a table that it cannot open, so that many can be tried."""
    shape = Shape(
        memcached=0,
        quick=True,
        durable_schema=False,
        disk_failure_policy="ignore",
        sstable_format=sstable_format,
    )
    with running_cluster(shape) as cluster:
        tables = Tables(cluster, names)
        tables.fill()
        yield tables


def outcome_of(found: Counter[str]) -> str:
    return next(each for each in ("wrong", "missing", "error", "right") if found[each])


@pytest.mark.slow
@pytest.mark.parametrize("sstable_format", PARTS)
def test_the_effect_of_a_flipped_bit_of_each_file(sstable_format: str) -> None:
    """Damage of data is noticed; that of indexes and filters may hide rows silently."""
    draw = random.Random(seed_of("DAMAGE_SEED"))
    parts = PARTS[sstable_format]
    damaged = {f"t{n}": part for n, part in enumerate(parts * TABLES_PER_PART)}
    with tables_on_a_node([*damaged], sstable_format) as tables:
        for name, part in damaged.items():
            path = tables.file(name, part)
            body = bytearray(path.read_bytes())
            bit = draw.randrange(8 * len(body))
            body[bit // 8] ^= 1 << bit % 8
            path.write_bytes(body)
        began = tables.node.log.stat().st_size
        tables.node.start()
        log = tables.node.log.read_bytes()[began:].decode(errors="replace")
        refused = set(re.findall(rf"[Cc]orrupt sstable .*?/{KEYSPACE}/(t\d+)-", log))
        found = {
            name: "refused" if name in refused else outcome_of(tables.found(name))
            for name in damaged
        }
    outcomes = {
        part: Counter(found[name] for name in damaged if damaged[name] == part) for part in parts
    }
    for part, counted in outcomes.items():
        print(sstable_format, part, dict(counted))
    assert set(outcomes["Data"]) <= {"error", "right"}
    assert set(outcomes["Statistics"]) <= {"refused", "error", "right"}
    if sstable_format == "bti":
        assert not any(counted["wrong"] for counted in outcomes.values())


def lose_the_range(summary: bytearray) -> None:
    """Put the first key, which lies before the last one and its length, in place of the last."""
    size = len(KEYS[0][1]) + 32
    summary[-size:] = summary[-2 * size - 4 : -size - 4]


@pytest.mark.slow
def test_upgradesstables_repairs_indexes_and_filters() -> None:
    """With ``-a``, because it rewrites them from the data. ``scrub`` trusts the index."""
    damages = {
        "filter": ("Filter", lose_all_bits),
        "summary": ("Summary", lose_the_range),
        "index": ("Index", rename_a_partition),
    }
    names = [f"{part}_{way}" for part in damages for way in ("rewritten", "deleted")]
    scrubbed = "index_deleted"
    with tables_on_a_node(names, "big") as tables:
        for name in names:
            part, damage = damages[name.partition("_")[0]]
            path = tables.file(name, part)
            body = bytearray(path.read_bytes())
            damage(body)
            path.write_bytes(body)
        tables.node.start()
        found = {name: outcome_of(tables.found(name)) for name in names}
        assert set(found.values()) == {"missing", "wrong"}
        assert {name for name in names if found[name] == "wrong"} == {"index_rewritten", scrubbed}

        extended = "--extended-verify"
        assert tables.passes("filter_rewritten", extended)
        assert not tables.passes("summary_rewritten")
        assert tables.passes("index_rewritten")
        assert not tables.passes("index_rewritten", extended)

        for name in names[::2]:
            nodetool(tables.node, "upgradesstables", "-a", KEYSPACE, name)
            assert outcome_of(tables.found(name)) == "right"
            assert tables.passes(name, extended)

        nodetool(tables.node, "scrub", KEYSPACE, scrubbed)
        assert outcome_of(tables.found(scrubbed)) == "wrong"
        assert tables.passes(scrubbed, extended)

        tables.node.stop()
        tables.file("filter_deleted", "Filter").unlink()
        tables.file("summary_deleted", "Summary").unlink()
        tables.node.start()
        for name in ("filter_deleted", "summary_deleted"):
            assert outcome_of(tables.found(name)) == "right"
