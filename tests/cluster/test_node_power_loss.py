"""The machine of a Cassandra node loses power: which acknowledged writes are there afterwards.

The node's writes and syncs are recorded, those of its commit log through memory too, and the disk
is rebuilt as it was at drawn moments. ``POWER_SEED`` repeats a run.

One node with one replica: of several replicas each one keeps what this one does.
"""

import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from counter.clock import SystemClock
from counter.errors import UnavailableError
from counter.limits import SECOND
from counter.storage.cassandra import CassandraStore
from counter.storage.shared.startup_retry import StartupRetry
from counter.types import Event, Namespace
from scripts import cluster_jars
from scripts.cluster_nodes import Cluster, Shape, dies_with_us, make_temporary
from scripts.cluster_process import ServerProcess
from tests.contracts.cases import SETTINGS
from tests.support.cassandra import have_schema, opened, options_for, slice_of_now
from tests.support.cluster import TIMEOUT_S
from tests.support.needs import miss
from tests.support.power import Disk, Recorder

ADDS = 40
NAMESPACE = "power"
START_US = 60 * SECOND


class Machine:
    """A node whose writes are recorded from a clean start on."""

    def __init__(self, place: Path) -> None:
        if problem := cluster_jars.missing():
            miss(problem)
        shape = Shape(nodes=1, memcached=0, quick=True)
        self.place = place
        self.cluster = make_temporary(place / "cluster", shape)
        self.options = options_for(self.cluster)

    @property
    def folder(self) -> Path:
        return self.cluster.cassandra[0].folder

    async def begin(self) -> None:
        """Make the schema on a node, and keep what a clean stop leaves on its disk."""
        self.cluster.start()
        await have_schema(self.options)
        async with opened(self.options, retry=StartupRetry(START_US)) as store:
            (dataset,) = await store.control.datasets()
            await store.control.make_slices(dataset, slice_of_now())
            now_us = SystemClock().now_us()
            assert await store.control.create_namespace(NAMESPACE, SETTINGS, now_us)
        self.cluster.stop()
        self.folder.rename(self.place / "before")

    async def run(self, sync: str) -> tuple[Recorder, list[tuple[Event, int]]]:
        """Append events, one after the other, and kill the node. With each event comes the length
        of the record when it was acknowledged."""
        shutil.copytree(self.place / "before", self.folder)
        recorder = Recorder(self.place / sync, self.folder)
        node = self._node(sync)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in recorder.environment.items():
                patch.setenv(name, value)
            node.launch()
        node.wait_ready()
        made = []
        async with opened(self.options, retry=StartupRetry(START_US)) as store:
            namespace = await namespace_of(store)
            start_us = slice_of_now().start_us
            for number in range(ADDS):
                event = Event("c", start_us + number, number.to_bytes(16, "big"), 0, 1)
                (written,) = await store.events.append(namespace, [event])
                assert not isinstance(written, UnavailableError)
                made.append((event, recorder.length()))
            node.kill()
        shutil.rmtree(self.folder)
        return recorder, made

    async def lost(
        self, recorder: Recorder, made: list[tuple[Event, int]], draw: random.Random, how: str
    ) -> int:
        """Start the node on what is left when the last of *made* is answered; return how many of
        them it lost."""
        disk = Disk(self.folder, syncs_names_with_files=True)
        disk.hold(self.place / "before")
        for each in recorder.changes():
            if each.ends > made[-1][1]:
                break
            disk.change(each)
        disk.leave(self.folder, draw, how)
        node = self._node("periodic")
        node.start()
        try:
            async with opened(self.options, retry=StartupRetry(START_US)) as store:
                events = [event for event, _ in made]
                found = await store.events.find(await namespace_of(store), events)
                return sum(each is None for each in found)
        finally:
            node.kill()
            shutil.rmtree(self.folder)

    def _node(self, sync: str) -> ServerProcess:
        shape = replace(self.cluster.shape, commitlog_sync=sync)
        return Cluster(self.cluster.directory, shape).cassandra[0]


async def namespace_of(store: CassandraStore) -> Namespace:
    return next(each for each in await store.control.namespaces() if each.name == NAMESPACE)


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
async def test_what_each_sync_of_the_commit_log_loses(fast_dir: Path) -> None:
    """``group`` and ``batch`` lose nothing acknowledged; ``periodic`` does."""
    seed = int(os.environ.get("POWER_SEED", random.randrange(2**32)))
    print(f"POWER_SEED={seed}")
    draw = random.Random(seed)
    machine = Machine(fast_dir)
    with dies_with_us(fast_dir / "cluster"):
        await machine.begin()
        lost = {}
        for sync in ("group", "batch", "periodic"):
            recorder, made = await machine.run(sync)
            how = draw.choice(("synced", "some")) if sync != "periodic" else "synced"
            answered = draw.randint(ADDS // 2, ADDS)
            lost[sync] = await machine.lost(recorder, made[:answered], draw, how)
            print(f"{sync}, {how}: lost {lost[sync]} of {answered}")
        assert lost["group"] == lost["batch"] == 0
        assert lost["periodic"] > 0
