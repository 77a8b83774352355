"""All machines of a Cassandra cluster lose power: which acknowledged adds and decisions are there
afterwards.

Each node's writes and syncs are recorded, those of its commit log through memory too, and its disk
is rebuilt as it was at a drawn moment. ``POWER_SEED`` repeats a run.
"""

import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from counter.clock import SystemClock
from counter.errors import UnavailableError
from counter.limits import SECOND
from counter.storage.cassandra.store import CassandraStore
from counter.storage.shared.startup_retry import StartupRetry
from counter.testing.cases import SETTINGS
from counter.types import Decision, Event, Namespace, Outcome
from scripts import cluster_jars
from scripts.cluster_nodes import Cluster, Shape, dies_with_us, make_temporary
from scripts.cluster_process import ServerProcess
from tests.support.cassandra import have_schema, opened, options_for, slice_of_now
from tests.support.needs import miss
from tests.support.power import Disk, Recorder
from tests.support.seeds import seed_of

pytestmark = pytest.mark.usefixtures("minutes")


ADDS = 40
#: Each of so many adds is followed by a decision that another token never counts.
ADDS_PER_DECISION = 2
NAMESPACE = "power"
NEVER = Decision(Outcome.VOID, b"payload")
START_US = 60 * SECOND


class Answer(NamedTuple):
    """An acknowledged add or a void decision, and the length of each node's log then."""

    event: Event
    applied: bool
    lengths: Sequence[int]


class Machines:
    """Nodes with their writes recorded from a clean start on."""

    def __init__(self, place: Path, nodes: int) -> None:
        if problem := cluster_jars.missing():
            miss(problem)
        shape = Shape(nodes=nodes, memcached=0, quick=True)
        self.place = place
        self.slice = slice_of_now()
        self.cluster = make_temporary(place / "cluster", shape)
        self.options = options_for(self.cluster, replicas=nodes)

    async def begin(self) -> None:
        """Make the schema, and keep the disks of a clean stop."""
        self.cluster.start()
        await have_schema(self.options)
        async with opened(self.options, retry=StartupRetry(START_US)) as store:
            (dataset,) = await store.control.datasets()
            await store.control.make_slices(dataset, self.slice)
            now_us = SystemClock().now_us()
            assert await store.control.create_namespace(NAMESPACE, SETTINGS, now_us)
        self.cluster.stop()
        for node in self.cluster.cassandra:
            node.folder.rename(self._before(node))

    async def run(self, sync: str) -> tuple[Sequence[Recorder], Sequence[Answer]]:
        """Add and decide, one after the other, and kill the nodes."""
        cluster = self._with(sync)
        recorders = []
        for node in cluster.cassandra:
            shutil.copytree(self._before(node), node.folder)
            recorder = Recorder(self.place / f"{sync}-{node.name}", node.folder)
            recorders.append(recorder)
            with pytest.MonkeyPatch.context() as patch:
                for name, value in recorder.environment.items():
                    patch.setenv(name, value)
                node.launch()
            if len(recorders) == 1:
                node.wait_ready()
        cluster.start()
        answers = []

        def answered(event: Event, *, applied: bool) -> None:
            answers.append(Answer(event, applied, [each.length() for each in recorders]))

        def event_of(number: int) -> Event:
            time_us = self.slice.start_us + number
            return Event("c", time_us, number.to_bytes(16, "big"), 0, 1)

        async with opened(self.options, retry=StartupRetry(START_US)) as store:
            namespace = await namespace_of(store)
            for number in range(ADDS):
                event = event_of(number)
                (written,) = await store.events.append(namespace, [event])
                assert not isinstance(written, UnavailableError)
                answered(event, applied=True)
                if number % ADDS_PER_DECISION == 0:
                    other = event_of(ADDS + number)
                    decision = await store.decisions.decide(namespace, [other], NEVER)
                    assert decision == NEVER
                    answered(other, applied=False)
            for node in cluster.cassandra:
                node.kill()
        for node in cluster.cassandra:
            shutil.rmtree(node.folder)
        return recorders, answers

    async def lost(
        self,
        recorders: Sequence[Recorder],
        answers: Sequence[Answer],
        draw: random.Random,
        hows: Sequence[str],
    ) -> tuple[int, int]:
        """Start the nodes as of the last of *answers*; return the lost adds and decisions."""
        cluster = self._with("periodic")
        lengths = answers[-1].lengths
        for node, recorder, length in zip(cluster.cassandra, recorders, lengths, strict=True):
            disk = Disk(node.folder, syncs_names_with_files=True)
            disk.hold(self._before(node))
            for each in recorder.changes():
                if each.ends > length:
                    break
                disk.change(each)
            disk.leave(node.folder, draw, draw.choice(hows))
        cluster.mend()
        try:
            async with opened(self.options, retry=StartupRetry(START_US)) as store:
                namespace = await namespace_of(store)
                added = [each.event for each in answers if each.applied]
                found = await store.events.find(namespace, added)
                decided = [
                    await store.decisions.decided(namespace, [each.event])
                    for each in answers
                    if not each.applied
                ]
                assert set(decided) <= {NEVER, None}
                return found.count(None), decided.count(None)
        finally:
            for node in cluster.cassandra:
                node.kill()
            for node in cluster.cassandra:
                shutil.rmtree(node.folder)

    def _before(self, node: ServerProcess) -> Path:
        return self.place / f"before-{node.name}"

    def _with(self, sync: str) -> Cluster:
        return Cluster(self.cluster.directory, replace(self.cluster.shape, commitlog_sync=sync))


async def namespace_of(store: CassandraStore) -> Namespace:
    return next(each for each in await store.control.namespaces() if each.name == NAMESPACE)


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("nodes", [1, 3])
async def test_the_losses_of_each_commit_log_sync(fast_dir: Path, nodes: int) -> None:
    """``group`` and ``batch`` lose nothing acknowledged; ``periodic`` does, decisions too."""
    draw = random.Random(seed_of("POWER_SEED"))
    machines = Machines(fast_dir, nodes)
    with dies_with_us(fast_dir / "cluster"):
        await machines.begin()
        for sync in ("group", "batch", "periodic"):
            recorders, answers = await machines.run(sync)
            answers = answers[: draw.randint(len(answers) // 2, len(answers))]
            hows = ("synced",) if sync == "periodic" else ("synced", "some")
            adds, decisions = await machines.lost(recorders, answers, draw, hows)
            given = sum(each.applied for each in answers)
            print(
                f"{nodes} nodes, {sync}: lost {adds} of {given} adds,"
                f" {decisions} of {len(answers) - given} decisions"
            )
            if sync == "periodic":
                assert adds > 0
                assert decisions > 0
            else:
                assert (adds, decisions) == (0, 0)
