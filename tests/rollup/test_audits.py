"""Audits in the background: every counter has its turn, and mismatches are tallied."""

import asyncio
import logging
from typing import Any

import pytest
from prometheus_client.core import Metric

from counter.config.settings import Settings
from counter.core.namespaces import Namespaces
from counter.errors import StoreUnavailableError
from counter.limits import SECOND
from counter.types import CounterType, CounterUpdate, Namespace
from rollup.audits import Audits, audit_families, audits_of
from tests.rollup.world import CLOSING, Process, World
from tests.support.waiting import eventually


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two looks follow each other without a pause: nothing changes between them."""
    monkeypatch.setattr("counter.ops.audit.PAUSE_US", 0)


def tallied(audits: Audits) -> dict[str, float]:
    found: list[Metric] = list(audit_families(audits.tally))
    return {each.name.removeprefix("counter_audit_"): each.samples[0].value for each in found}


class Scene:
    """Counters that were rolled up, and audits of them that never wait."""

    def __init__(self) -> None:
        self.world = World()
        self.process: Process = self.world.process()
        self.namespaces = Namespaces(self.world.store, self.world.clock)
        self.audits = Audits(
            self.world.store,
            self.world.clock,
            self.namespaces,
            interval_us=0,
            counters_per_s=1_000_000,
        )

    async def begin(self, counters: int) -> Namespace:
        namespace = await self.world.begin(shards=1)
        await self.world.create("likes", counter_type=CounterType.BEST_EFFORT)
        await self.world.add_many(counters)
        self.world.clock.advance(2 * CLOSING)
        await self.process.worker.tick()
        await self.namespaces.refresh()
        return namespace

    async def damage(self, namespace: Namespace, counter: str) -> None:
        (head,) = await self.world.store.rollups.heads(namespace, [counter])
        assert head is not None
        wrong = head.checkpoint._replace(count=-1)
        update = CounterUpdate(counter, (), wrong)
        await self.world.store.rollups.apply(namespace, [update], through_us=wrong.time_us)


async def test_mismatches_are_tallied_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """With the numbers and the fix; afterwards the last round logs that all is right."""
    scene = Scene()
    namespace = await scene.begin(5)
    await scene.damage(namespace, "c3")
    with caplog.at_level(logging.ERROR, "counter.audit"):
        await scene.audits.round()
    assert "'c3': the count as of " in caplog.text
    assert "is -1, its events make 3" in caplog.text
    assert "--repair" in caplog.text
    found = tallied(scene.audits)
    assert (found["counters"], found["mismatches"], found["mismatches_standing"]) == (5, 1, 1)
    assert found["finished_timestamp_seconds"] == scene.world.clock.now_us() / SECOND
    (head,) = await scene.world.store.rollups.heads(namespace, ["c3"])
    assert head is not None
    right = CounterUpdate("c3", (), head.checkpoint._replace(count=3))
    await scene.world.store.rollups.apply(namespace, [right], through_us=head.checkpoint.time_us)
    await scene.audits.round()
    found = tallied(scene.audits)
    assert (found["mismatches"], found["mismatches_standing"], found["rounds"]) == (1, 0, 2)


async def test_every_counter_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round continues the one before, and restarts after the last counter."""
    monkeypatch.setattr("rollup.audits._COUNTERS_MAX", 4)
    monkeypatch.setattr("rollup.audits._SHARE_MIN", 4)
    scene = Scene()
    namespace = await scene.begin(10)
    await scene.damage(namespace, "c9")
    wrong = [sum(len(each.wrong) for each in await scene.audits.round()) for _ in range(6)]
    assert wrong == [0, 0, 1, 0, 1, 0]
    assert scene.audits.tally.checked == 24


async def test_a_failure_is_tallied_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Neither an expected nor an unexpected one; during another worker's turn nothing is done."""
    scene = Scene()
    await scene.begin(1)
    failures: list[Exception] = [StoreUnavailableError("the store is away"), ValueError("what?")]
    original = scene.audits.round
    stop = asyncio.Event()

    async def failing() -> object:
        if failures:
            raise failures.pop(0)
        stop.set()
        return await original()

    scene.audits.round = failing  # type: ignore[method-assign, assignment]
    turns = iter([False, True, True, True])
    with caplog.at_level(logging.WARNING, "counter.audit"):
        await scene.audits.run(stop, lambda: next(turns))
    assert tallied(scene.audits)["failures"] == 2
    assert "the store is away" in caplog.text
    assert "what?" in caplog.text


@pytest.mark.parametrize(("interval", "are_there"), [("0s", False), ("1h", True)])
def test_audits_run_at_an_interval(interval: Any, are_there: bool) -> None:
    scene = Scene()
    settings = Settings(audit_interval=interval)
    made = audits_of(settings, scene.world.store, scene.world.clock, scene.namespaces)
    assert (made is not None) == are_there


async def test_a_worker_audits_beside_its_rollup_and_ends_with_it() -> None:
    """However long its audit would go on."""
    scene = Scene()
    await scene.begin(3)
    worker, stop = scene.process.worker, asyncio.Event()
    worker.audits = scene.audits
    await scene.process.namespaces.refresh()
    running = asyncio.create_task(worker.run(stop))

    await eventually(lambda: scene.audits.tally.rounds > 1, "two rounds are ended")
    stop.set()
    await asyncio.wait_for(running, 30)
    assert scene.audits.tally.mismatches == 0


async def test_an_audit_rests_until_the_end_of_the_process() -> None:
    """Unless the rest is over before."""
    scene = Scene()
    resting = asyncio.create_task(scene.audits._rest(3_600.0))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not resting.done()
    scene.audits._stop.set()
    await resting
