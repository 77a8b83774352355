"""Bugs of consistency: too weak requests to the cluster."""

from counter.storage.cassandra import rollups, tables
from counter.storage.cassandra.session import CassandraSession
from rollup.leases import Leases
from rollup.worker import RollupWorker
from tests.simulation.bugs import bug
from tests.simulation.cluster import Cluster
from tests.simulation.mutate import Edit


def _reads_one(table: str) -> Edit:
    """Reads of *table* ask one replica."""
    return Edit(
        Cluster._read,
        "self._needed(level, home)",
        f"self._needed(1 if {table!r} in select.table else level, home)",
    )


BUGS = (
    bug("marks-from-one-replica", "marks are read from one replica", _reads_one("dirty")),
    bug("events-from-one-replica", "events are read from one replica", _reads_one("events_")),
    bug("counts-from-one-replica", "counts are read from one replica", _reads_one("counts")),
    bug(
        "written-to-one-replica",
        "a write is acknowledged by one replica",
        Edit(CassandraSession.to_write, "state.write_consistency)", "1)"),
    ),
    bug(
        "read-from-one-replica",
        "a read asks one replica, whatever the dataset says",
        Edit(CassandraSession.to_read, "state.read_consistency)", "1)"),
        Edit(CassandraSession.to_find, "start_us, level)", "start_us, 1)"),
    ),
    bug(
        "written-to-the-near-data-center",
        "a write waits for its own data center, whatever the dataset says",
        Edit(CassandraSession.to_write, "state.write_consistency)", "6)"),
    ),
    bug(
        "no-read-repair",
        "a read repairs nothing",
        Edit(Cluster._answer_read, "if self.repairs:", "if False:"),
    ),
    bug(
        "stamped-in-the-future",
        "events are written with a time that no void reaches",
        Edit(tables.insert_of, "event.event_time_us)", "event.event_time_us + 10_000_000_000)"),
    ),
    bug(
        "marks-dropped-early",
        "marks are dropped before the watermark has passed them",
        Edit(
            RollupWorker._roll_part,
            "batch = BatchTimes(",
            "await self._store.rollups.drop_marks(namespace, shard, through_us)\n"
            "    batch = BatchTimes(",
        ),
    ),
    bug(
        "marks-of-one-window",
        "only the earliest dirty window of a pass is read",
        Edit(
            rollups.CassandraRollups._windows,
            "span.windows(namespace.settings.rollup_window_us)",
            "span.windows(namespace.settings.rollup_window_us)[:-1]",
        ),
    ),
    bug(
        "no-leases",
        "no worker is ever given a lease",
        Edit(Leases.holds, "is_ours = ", "is_ours = False and "),
    ),
)
