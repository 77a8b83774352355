"""The audit during concurrent changes: no false alarm, and no damage missed."""

import asyncio
from dataclasses import replace
from random import Random
from unittest.mock import patch

import pytest

from counter.errors import CounterError, NamespaceUnknownError
from counter.limits import MINUTE, SECOND
from counter.ops.audit import Auditor, State, Verdict
from counter.types import CounterUpdate, Event, Mark, Namespace, Pending, WindowRow
from counter.windows import window_of
from rollup.maintenance import Maintenance
from tests.rollup.world import CLOSING, DATASET, SETTINGS, WINDOW, Process, Road, World, begun

NAMES = tuple(f"c{number}" for number in range(6))
SEEDS = 15


class Life:
    """The life of a namespace, drawn from a seed: adds, clears, rollups, recounts, drops, time."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.world = World()
        self.process = Process(self.world.store, self.world.clock, None, seed=seed)

    async def begin(self) -> Namespace:
        dataset = replace(DATASET, retention_us=20 * MINUTE)
        self.world.store.tables.states[1].dataset = dataset
        return await self.world.begin(shards=2)

    async def go_on(self, namespace: Namespace, steps: int) -> None:
        for _ in range(steps):
            await self.step(namespace)

    async def step(self, namespace: Namespace) -> None:
        world, name = self.world, self.random.choice(NAMES)
        namespace = world.api.namespaces.get(namespace.name)
        kind = self.random.randrange(12)
        try:
            if kind < 4:
                await world.add(name, self.random.randrange(-9, 10))
            elif kind == 4:
                age_us = self.random.randrange(20 * SECOND)
                await world.api.add(namespace, name, 5, world.token(age_us))
            elif kind == 5:
                await world.api.clear(namespace, name, world.token())
            elif kind == 6:
                await world.api.add_atomic(namespace, [(each, 1) for each in NAMES], world.token())
            elif kind == 7:
                await world.api.recount(namespace, name, 0, 2**60)
            elif kind == 8 and self.random.randrange(8) == 0:
                world.clock.advance(12 * MINUTE)
                await Maintenance(world.store, world.clock).run_once()
            else:
                world.clock.advance(self.random.randrange(CLOSING))
                await self.process.worker.tick()
        except CounterError:
            # Late, too old, or no slice: refused as it must be.
            await asyncio.sleep(0)

    async def settle(self) -> None:
        for _ in range(3):
            self.world.clock.advance(2 * CLOSING)
            await self.process.worker.tick()


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_concurrent_changes_are_not_reported_as_damage(seed: int) -> None:
    """Between any two steps of a look anything may happen; some of it may have to be waited for."""
    life = Life(seed)
    namespace = await life.begin()
    await life.go_on(namespace, 20)
    road = Road(life.world.store, seed).store

    async def sleep(_: float) -> None:
        for _ in range(life.random.randrange(30)):
            await asyncio.sleep(0)

    auditor = Auditor(road, sleep=sleep, chunk_us=life.random.choice((WINDOW, MINUTE, 2**40)))
    ended = asyncio.create_task(life.go_on(namespace, 60))
    while not ended.done():
        for verdict in await auditor.audit(namespace, NAMES):
            assert verdict.state is not State.WRONG, verdict
    await ended
    await life.settle()
    for verdict in await auditor.audit(namespace, NAMES):
        assert verdict.state is State.RIGHT, verdict


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_whatever_is_damaged_is_found(seed: int) -> None:
    """After any life: a damaged or lost row, or the checkpoint. The rest is right."""
    life = Life(seed)
    namespace = await life.begin()
    await life.go_on(namespace, 80)
    # None but the rollup's own doings may be left to do.
    await life.settle()
    store, random = life.world.store, life.random
    await life.world.add(NAMES[0], 3)
    life.world.clock.advance(CLOSING)
    await life.settle()
    name = random.choice([each for each in NAMES if each in store.tables.space(namespace).counts])
    counts = store.tables.space(namespace).counts[name]
    [head] = await store.rollups.heads(namespace, [name])
    assert head is not None
    assert not head.pending
    rows = [at for at in counts.rows if at >= store.tables.states[1].dropped_before_us]
    checkpoint = head.checkpoint
    kind = random.choice(("row", "lost", "checkpoint") if rows else ("checkpoint",))
    if kind == "lost":
        at_us = random.choice(rows)
        _, row = counts.rows.pop(at_us)
        if row == WindowRow(at_us, False, 0):
            kind = "nothing"
    else:
        changed: tuple[WindowRow, ...] = ()
        if kind == "row":
            row = counts.rows[random.choice(rows)][1]
            changed = (row._replace(total=row.total + random.choice((-1, 1))),)
        else:
            checkpoint = checkpoint._replace(count=checkpoint.count + random.choice((-1, 1)))
        update = CounterUpdate(name, changed, checkpoint)
        await store.rollups.apply(namespace, [update], through_us=checkpoint.time_us)
    auditor = Auditor(store, sleep=lambda _: asyncio.sleep(0))
    verdicts = await auditor.audit(namespace, NAMES, trust_settled=True)
    wrong = [each.counter for each in verdicts if each.state is not State.RIGHT]
    assert wrong == ([] if kind == "nothing" else [name]), (kind, verdicts)
    await auditor.repair(namespace, verdicts, life.world.api.resolver)
    await life.settle()
    assert {each.state for each in await auditor.audit(namespace, NAMES)} == {State.RIGHT}


async def test_a_write_that_lands_in_a_passed_window_is_reported() -> None:
    """In a store without transactions an unacknowledged one may: a recount counts it."""
    world, namespace = await begun(shards=1)
    process = world.process()
    await world.add("c", 1)
    at_us = world.clock.now_us()
    await world.roll_up(process, after_us=2 * CLOSING)
    await world.store.events.append(namespace, [Event("c", at_us, b"n" * 16, 0, 10)])
    auditor = Auditor(world.store, sleep=lambda _: asyncio.sleep(0))
    (verdict,) = await auditor.audit(namespace, ["c"])
    assert verdict.repairs == (window_of(at_us, WINDOW),)
    await auditor.repair(namespace, [verdict], world.api.resolver)
    await world.roll_up(process, after_us=2 * CLOSING)
    assert (await auditor.audit(namespace, ["c"]))[0].state is State.RIGHT
    assert await world.rolled_up(namespace) == {"c": 11}


async def test_a_rollup_that_is_half_done_is_waited_for() -> None:
    """A batch may be seen in part by one read and not by the next, before the watermark passes."""
    world, namespace = await begun(shards=1)
    process = world.process()
    await world.add("c", 1)
    window_us = window_of(world.clock.now_us(), WINDOW)
    world.clock.advance(2 * CLOSING)
    working = await process.held_in("advance")
    world.store.tables.space(namespace).counts["c"].rows.pop(window_us)
    auditor = Auditor(world.store, sleep=lambda _: asyncio.sleep(0))
    (verdict,) = await auditor.audit(namespace, ["c"])
    assert verdict.state is State.WAITING
    assert "half done" in verdict.why
    await world.store.separate_writes.mark(namespace, [Mark(window_us, "c")])
    process.road.open.set()
    await working
    (verdict,) = await auditor.audit(namespace, ["c"])
    assert verdict.state is State.WRONG


async def test_a_recount_that_no_worker_will_do_hides_nothing() -> None:
    """With a window that was passed without it: readers count its window, and nothing else."""
    world, namespace = await begun(shards=1)
    process = world.process()
    await world.add("c", 1)
    window_us = window_of(world.clock.now_us(), WINDOW)
    await world.store.recounts.write_pending(namespace, [("c", Pending(window_us, window_us))])
    await world.add("d", 1)
    await world.roll_up(process, after_us=2 * CLOSING)
    await world.store.recounts.write_pending(namespace, [("c", Pending(window_us, window_us))])
    auditor = Auditor(world.store, sleep=lambda _: asyncio.sleep(0))
    assert (await auditor.audit(namespace, ["c"]))[0].state is State.RIGHT
    head = (await world.store.rollups.heads(namespace, ["c"]))[0]
    assert head is not None
    wrong = CounterUpdate("c", (), head.checkpoint._replace(count=9))
    await world.store.rollups.apply(namespace, [wrong], through_us=head.checkpoint.time_us)
    (verdict,) = await auditor.audit(namespace, ["c"])
    assert verdict.state is State.WRONG


async def test_a_namespace_that_goes_under_the_look_is_an_error() -> None:
    """Whatever was read before it went: no damage is reported."""
    world, namespace = await begun(shards=1)
    process = world.process()
    await world.add("c", 1)
    await world.roll_up(process, after_us=2 * CLOSING)
    road = Road(world.store)
    road.hold_in = "heads"
    auditor = Auditor(road.store, sleep=lambda _: asyncio.sleep(0))
    looking = asyncio.create_task(auditor.audit(namespace, ["c"]))
    await road.held.wait()
    await world.store.control.delete_namespace(namespace)
    road.open.set()
    with pytest.raises(NamespaceUnknownError):
        await looking


def test_the_settings_of_this_world_leave_no_doubt() -> None:
    """Windows are short beside slices, so that slices are dropped while tests look on."""
    assert SETTINGS.rollup_window_us < DATASET.slice_us


async def test_a_repair_of_more_windows_than_a_batch_has_asks_for_all_of_them() -> None:
    world, namespace = await begun(shards=1)
    repairs = tuple(window_of(world.clock.now_us(), WINDOW) - at * WINDOW for at in range(7))
    verdict = Verdict("c", State.WRONG, 0, 0, repairs=repairs)
    with patch("counter.limits.BATCH_ITEMS_MAX", 3):
        assert await Auditor(world.store).repair(namespace, [verdict], world.api.resolver) == 1
    head = await world.head(namespace)
    assert {each.recount_us for each in head.pending} == {*repairs}
