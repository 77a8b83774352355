"""The driver alone: the rows that the service would write, from one process, without the service.

    python -m benchmarks.driver_alone --contact-point 127.0.0.1:9042 --keyspace bench ...

So many adds are under way at a time. Each leaves its counter's mark and name, unless this process
knows that they stand, and then writes its event. Marks and names that come together go out
together, a batch for each partition, as the service sends them; an event goes alone.
"""

from __future__ import annotations

import gc
import json
import secrets
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from random import random
from typing import Annotated, Any, Final

from cassandra import ConsistencyLevel
from cassandra.query import BatchStatement, BatchType
from cyclopts import App, Parameter

from counter.clock import SystemClock
from counter.partitions import event_bucket_of, shard_of, slice_start
from counter.storage.cassandra.driver import new_cluster
from counter.storage.cassandra.options import CassandraOptions
from counter.storage.cassandra.tables import events_table, keyspace_of
from counter.windows import window_of

#: Two years.
_MARK: Final = (
    "INSERT INTO {keyspace}.dirty (namespace, shard, window_start, counter, recount)"
    " VALUES (?, ?, ?, ?, 0) USING TTL 63072000 AND TIMESTAMP ?"
)
_NAME: Final = (
    "INSERT INTO {keyspace}.names (namespace, bucket, counter) VALUES (?, ?, ?) USING TIMESTAMP ?"
)
_EVENT: Final = (
    "INSERT INTO {keyspace}.{table} (namespace, counter, time_bucket, event_bucket, event_time,"
    " event_id, item, delta) VALUES (?, ?, ?, ?, ?, ?, 0, 1) USING TIMESTAMP ?"
)
#: The interpreter's settings, as the service has them.
_SWITCH_INTERVAL_S: Final = 0.0005
_GC_THRESHOLD: Final = 50_000
_STOP_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Where the rows go, and how counters are chosen: each a new one where *counters* is 0."""

    namespace: int
    shards: int
    window_us: int
    slice_us: int
    time_bucket_us: int
    event_buckets: int
    counters: int
    prefix: str
    concurrency: int


@dataclass(slots=True)
class _Add:
    """One add under way; *left* rows must stand before its event is written."""

    counter: str
    time_us: int
    nonce: bytes
    began_s: float
    left: int = 0


@dataclass(frozen=True, slots=True)
class _Before:
    """Rows of one partition that stand before the events of *adds*; *known* once they do."""

    adds: list[_Add]
    known: list[tuple[Any, ...]]


class DriverAlone:
    """A closed loop over one session of the driver."""

    def __init__(self, session: Any, keyspace: str, plan: Plan) -> None:
        self._session = session
        self._plan = plan
        self._clock = SystemClock()
        self._keyspace = keyspace
        self._mark = self._prepare(_MARK)
        self._name = self._prepare(_NAME)
        now_us = self._clock.now_us()
        starts = [slice_start(now_us + ahead, plan.slice_us) for ahead in (0, plan.slice_us)]
        self._event = {start_us: self._prepare(_EVENT, start_us) for start_us in starts}
        self._known: set[tuple[Any, ...]] = set()
        self._done: SimpleQueue[Any] = SimpleQueue()
        self._latest_us = 0
        self._run_id = secrets.token_bytes(8)
        self._under_way = 0
        self.begun = 0
        self.acknowledged = 0
        self.latencies_s: list[float] = []

    def run(self, seconds: float) -> None:
        """Keep the loop full for *seconds*, then wait for what is under way."""
        end_s = time.perf_counter() + seconds
        self._begin(self._plan.concurrency)
        while self._under_way:
            for each in self._finished():
                if isinstance(each, Exception):
                    raise each
                if isinstance(each, _Before):
                    self._known.update(each.known)
                    self._send_events(each.adds)
                else:
                    self._under_way -= 1
                    self.acknowledged += 1
                    self.latencies_s.append(time.perf_counter() - each.began_s)
            if time.perf_counter() < end_s:
                self._begin(self._plan.concurrency - self._under_way)

    def _finished(self) -> Iterable[Any]:
        """What was answered since the last look, at least one."""
        found = [self._done.get(timeout=_STOP_S)]
        try:
            while True:
                found.append(self._done.get_nowait())
        except Empty:
            return found

    def _begin(self, number: int) -> None:
        """Begin so many adds, and send what must stand before their events."""
        plan, now_us = self._plan, self._clock.now_us()
        rows: dict[tuple[Any, ...], list[Any]] = {}
        befores: dict[tuple[Any, ...], _Before] = {}
        ready = []
        for _ in range(number):
            add = self._next_add()
            window_us = window_of(add.time_us, plan.window_us)
            shard = shard_of(add.counter, plan.shards)
            for partition, row, statement in (
                (("dirty", shard, window_us), (window_us, add.counter), self._mark),
                (("names", shard), (add.counter,), self._name),
            ):
                if row in self._known:
                    continue
                values = (plan.namespace, *partition[1:], add.counter, now_us)
                rows.setdefault(partition, []).append(statement.bind(values))
                before = befores.setdefault(partition, _Before([], []))
                before.adds.append(add)
                before.known.append(row)
                add.left += 1
            if not add.left:
                ready.append(add)
        for partition, statements in rows.items():
            self._send(_together(statements), befores[partition])
        for add in ready:
            self._send_event(add)

    def _next_add(self) -> _Add:
        plan = self._plan
        place = self.begun if not plan.counters else int(plan.counters ** random()) - 1
        self._latest_us = max(self._latest_us + 1, self._clock.now_us())
        nonce = self._run_id + self.begun.to_bytes(8, "big")
        self.begun += 1
        self._under_way += 1
        return _Add(f"{plan.prefix}{place:07}", self._latest_us, nonce, time.perf_counter())

    def _send_events(self, adds: list[_Add]) -> None:
        for add in adds:
            add.left -= 1
            if not add.left:
                self._send_event(add)

    def _send_event(self, add: _Add) -> None:
        plan = self._plan
        values = (
            *(plan.namespace, add.counter, window_of(add.time_us, plan.time_bucket_us)),
            *(event_bucket_of(add.nonce, plan.event_buckets), add.time_us, add.nonce, add.time_us),
        )
        statement = self._event[slice_start(add.time_us, plan.slice_us)]
        self._send(statement.bind(values), add)

    def _send(self, statement: Any, what: _Add | _Before) -> None:
        sent = self._session.execute_async(statement)
        sent.add_callbacks(lambda _: self._done.put(what), self._done.put)

    def _prepare(self, cql: str, start_us: int = 0) -> Any:
        text = cql.format(keyspace=self._keyspace, table=events_table(start_us))
        made = self._session.prepare(text)
        made.consistency_level = ConsistencyLevel.LOCAL_QUORUM
        made.is_idempotent = True
        return made


def _together(statements: list[Any]) -> Any:
    """Rows of one partition as one statement."""
    if len(statements) == 1:
        return statements[0]
    batch = BatchStatement(BatchType.UNLOGGED, consistency_level=ConsistencyLevel.LOCAL_QUORUM)
    batch.is_idempotent = True
    for statement in statements:
        batch.add(statement)
    return batch


def measure(loop: DriverAlone, seconds: float) -> dict[str, float]:
    """One measured stretch of the loop."""
    loop.latencies_s.clear()
    acknowledged = loop.acknowledged
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    loop.run(seconds)
    taken = sorted(loop.latencies_s)
    return {
        "requests": loop.acknowledged - acknowledged,
        "seconds": time.perf_counter() - begin_s,
        "cpu_s": time.process_time() - begin_cpu_s,
        "p50_ms": taken[len(taken) // 2] * 1_000,
        "p99_ms": taken[len(taken) * 99 // 100] * 1_000,
    }


def main(
    *,
    contact_point: str,
    keyspace: str,
    warm: float,
    seconds: float,
    plan: Annotated[Plan, Parameter(name="*")],
) -> None:
    """Run for *warm* seconds unmeasured, then for *seconds*; one line of results."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
    host, _, port = contact_point.rpartition(":")
    cluster = new_cluster(CassandraOptions([(host, int(port))]))
    try:
        session = cluster.connect()
        session.use_client_timestamp = False
        loop = DriverAlone(session, keyspace_of(keyspace, "default"), plan)
        loop.run(warm)
        measured = measure(loop, seconds)
    finally:
        cluster.shutdown()
    result = measured | {"sent": loop.begun, "acknowledged": loop.acknowledged}
    sys.stdout.write(f"RESULT {json.dumps(result)}\n")


if __name__ == "__main__":
    App(default_command=main, help_format="plaintext")()
