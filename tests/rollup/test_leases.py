"""Slots of the rollup's work: dealt fairly, moved as workers come and go, held by one at a time."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from counter.errors import StoreUnavailableError
from counter.limits import LEASE_READ_EVERY_US, LEASE_SLOTS, LEASE_TIME_MIN_US, SECOND
from counter.storage.memory.store import MemoryLeases
from counter.testing.clock import FakeClock
from rollup.leases import MAINTENANCE, SLOTS, Leases, share_out, slot_of, worker_id
from tests.support.times import START_US
from tests.support.virtual import virtually
from tests.support.waiting import eventually

LEASE_TIME = 10 * SECOND
LOOK = LEASE_READ_EVERY_US
#: Leases run out two looks before.
HELD = LEASE_TIME - 2 * LOOK
names = st.lists(st.text("abcdef", min_size=1), min_size=1, max_size=9, unique=True)


class LoopClock:
    """The loop's own time."""

    def now_us(self) -> int:
        return START_US + self.boottime_us()

    def wall_us(self) -> int:
        return self.now_us()

    def forget_after(self, time_us: int) -> None:
        """It holds no latest reading."""

    def boottime_us(self) -> int:
        return round(asyncio.get_running_loop().time() * SECOND) + SECOND


class Crew:
    """Workers over one store, each taking its turn when the test says so."""

    def __init__(self) -> None:
        self.clock = FakeClock(START_US)
        self.store = MemoryLeases(self.clock)
        self.workers: dict[str, Leases] = {}
        self._looked_us: dict[Leases, int] = {}
        #: Workers with a late look: they had not seen the looks of the rest.
        self._late: set[Leases] = set()

    def join(self, name: str) -> Leases:
        worker = Leases(self.store, self.clock, name, lease_time_us=LEASE_TIME)
        self.workers[name] = worker
        return worker

    def die(self, name: str) -> None:
        """It says nothing more, and gives nothing back."""
        del self.workers[name]

    async def settled(self, *names: str) -> None:
        """They join, and have shared the slots out."""
        for name in names:
            self.join(name)
        await self.rounds(3)

    async def round(self) -> None:
        """Every worker that lives takes a turn, and a look's time passes."""
        for worker in list(self.workers.values()):
            await self.turn(worker)
            self.check_no_slot_is_shared()
        self.clock.advance(LOOK)

    async def turn(self, worker: Leases) -> None:
        await worker.update()
        now_us = self.clock.boottime_us()
        is_late = now_us - self._looked_us.get(worker, now_us) > LOOK
        (self._late.add if is_late else self._late.discard)(worker)
        self._looked_us[worker] = now_us

    async def rounds(self, number: int) -> None:
        for _ in range(number):
            await self.round()

    def check_no_slot_is_shared(self) -> None:
        """No two workers hold a slot, among those with looks on time."""
        due_us = self.clock.boottime_us() - LOOK
        looked_us = {each: self._looked_us.get(each, 0) for each in self.workers.values()}
        on_time = [x for x, at_us in looked_us.items() if at_us >= due_us and x not in self._late]
        held = [slot for worker in on_time for slot in worker.held()]
        assert len(held) == len(set(held)), "a slot is held by two"

    def check_shared_out(self) -> None:
        """All slots are held, each by one worker that lives, and evenly."""
        self.check_no_slot_is_shared()
        shares = [worker.held() for worker in self.workers.values()]
        assert sorted(slot for share in shares for slot in share) == sorted(SLOTS)
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 1


@given(names)
def test_shares_are_whole_disjoint_and_even(workers: list[str]) -> None:
    """Whatever the order in which the workers are known."""
    shares = share_out(SLOTS, workers)
    assert sorted(slot for share in shares.values() for slot in share) == sorted(SLOTS)
    sizes = [len(share) for share in shares.values()]
    assert max(sizes) - min(sizes) <= 1
    assert share_out(SLOTS, workers[::-1]) == shares


@given(names, st.integers(1, 2**40), st.integers(1, LEASE_SLOTS))
def test_the_shards_of_one_namespace_are_spread(
    workers: list[str], namespace_id: int, shards: int
) -> None:
    """However few: neighbours in the list of slots go to different workers."""
    shares = share_out(SLOTS, workers)
    holders = {slot: worker for worker, share in shares.items() for slot in share}
    held = [holders[slot_of(namespace_id, shard)] for shard in range(shards)]
    least, rest = divmod(shards, len(workers))
    # A run of slots has a piece of a round of dealing at each end, and at the end of the list.
    for worker in workers:
        assert held.count(worker) <= least + bool(rest) + 2


def test_a_shard_has_one_slot_and_never_the_one_of_maintenance() -> None:
    """A namespace's shards lie in as many slots as there are, if it has so many."""
    slots = [slot_of(7, shard) for shard in range(LEASE_SLOTS)]
    assert sorted(slots) == sorted(each for each in SLOTS if each != MAINTENANCE)
    assert slot_of(7, LEASE_SLOTS) == slot_of(7, 0)


def test_no_two_workers_have_the_same_name() -> None:
    """Not even two of one process."""
    assert worker_id() != worker_id()


@given(st.lists(st.tuples(st.sampled_from("jdlt"), st.integers(0, 7)), max_size=25))
# Its shares of three, of four and of five workers give one slot to and fro between two of them.
@example([("j", 0), ("j", 0), ("t", 0), ("j", 0), ("j", 0), ("t", 3), ("t", 1)])
# One that comes late to a look meets one that waited for that look.
@example([("j", 0), ("j", 0), ("j", 0), ("t", 2), ("t", 0), ("t", 0)])
def test_whichever_workers_come_and_go_the_slots_end_up_shared_out(
    steps: list[tuple[str, int]],
) -> None:
    """Join, die, leave, take a turn: soon after the last of it every slot has one holder."""

    async def play() -> None:
        crew = Crew()
        crew.join("first")
        for number, (step, which) in enumerate(steps):
            picked = sorted(crew.workers)[which % len(crew.workers)] if crew.workers else None
            if step == "j":
                crew.join(f"w{number}")
            elif picked is None:
                continue
            elif step == "d":
                crew.die(picked)
            elif step == "l":
                await crew.workers.pop(picked).leave()
            else:
                await crew.turn(crew.workers[picked])
                crew.clock.advance(LOOK // 2)
            crew.check_no_slot_is_shared()
        if not crew.workers:
            crew.join("last")
        # Who died keeps its slots for a lease's time, and is taken for alive as long.
        await crew.rounds(LEASE_TIME // LOOK + 3)
        crew.check_shared_out()

    asyncio.run(play())


async def test_a_joining_worker_has_its_part_after_three_looks() -> None:
    """It registers; by its third look every other worker has seen it."""
    crew = Crew()
    await crew.settled("a", "b")
    crew.check_shared_out()
    await crew.settled("c")
    crew.check_shared_out()


async def test_a_dead_workers_slots_are_taken_within_the_lease_time() -> None:
    """Not before its time is over: it may only be slow."""
    crew = Crew()
    await crew.settled("a", "b")
    dead = crew.workers["b"].held()
    crew.die("b")
    await crew.rounds(LEASE_TIME // LOOK - 6)
    assert not set(crew.workers["a"].held()) & set(dead)
    await crew.rounds(6)
    crew.check_shared_out()


async def test_a_worker_that_leaves_is_followed_at_the_next_look() -> None:
    """No worker waits for its leases to run out."""
    crew = Crew()
    await crew.settled("a", "b")
    leaving = crew.workers.pop("b")
    await leaving.leave()
    assert leaving.held() == []
    await crew.round()
    crew.check_shared_out()


async def test_a_lease_is_renewed_long_before_it_runs_out() -> None:
    """Three times in its time: one failure does not cost it."""
    crew = Crew()
    worker = crew.join("a")
    for _ in range(60):
        await worker.update()
        crew.clock.advance(LOOK)
        assert len(worker.held()) == len(SLOTS)


class Broken(MemoryLeases):
    """Leases with planned failures: before they do anything, or after."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.fails = ""
        self.after = False

    async def heartbeat(self, worker: str, ttl_us: int) -> None:
        await self._perhaps("heartbeat", super().heartbeat(worker, ttl_us))

    async def workers(self) -> Sequence[str]:
        live: Sequence[str] = await self._perhaps("workers", super().workers())
        return live

    async def leave(self, worker: str) -> None:
        await self._perhaps("leave", super().leave(worker))

    async def _perhaps(self, step: str, work: Any) -> Any:
        fails = self.fails in (step, "all")
        if fails and not self.after:
            work.close()
            raise StoreUnavailableError("a fault that a test planted")
        result = await work
        if fails:
            raise StoreUnavailableError("a fault that a test planted")
        return result


async def test_failing_leases_keep_only_the_held_shards() -> None:
    """For the rest of its time, and by no one's word but the worker's own clock."""
    clock = FakeClock(START_US)
    store = Broken(clock)
    worker = Leases(store, clock, "a", lease_time_us=LEASE_TIME)
    await worker.update()
    store.fails = "all"
    for _ in range(HELD // LOOK):
        assert len(worker.held()) == len(SLOTS)
        with pytest.raises(StoreUnavailableError):
            await worker.update()
        clock.advance(LOOK)
    assert worker.held() == []
    store.fails = ""
    await worker.update()
    assert len(worker.held()) == len(SLOTS)


@pytest.mark.parametrize("step", ["heartbeat", "workers", "leave"])
async def test_a_lost_response_leaves_no_slot_behind(step: str) -> None:
    """Leases that the store knows and the worker does not run out, or are renewed."""
    crew = Crew()
    store = crew.store = Broken(crew.clock)
    crew.join("b")
    await crew.rounds(1)
    crew.join("a")
    store.fails, store.after = step, True
    for _ in range(3):
        for worker in crew.workers.values():
            with suppress(StoreUnavailableError):
                await crew.turn(worker)
    await crew.workers.pop("b").leave()
    store.fails = ""
    await crew.rounds(LEASE_TIME // LOOK + 3)
    crew.check_shared_out()


async def test_a_look_is_one_write_and_one_read() -> None:
    """However many slots there are."""
    clock = FakeClock(START_US)
    kept = MemoryLeases(clock)
    worker = Leases(kept, clock, "a", lease_time_us=LEASE_TIME)
    with (
        patch.object(kept, "heartbeat", wraps=kept.heartbeat) as writes,
        patch.object(kept, "workers", wraps=kept.workers) as reads,
    ):
        for _ in range(100):
            await worker.update()
            clock.advance(LOOK)
    assert (writes.await_count, reads.await_count) == (100, 100)


class Slow(MemoryLeases):
    """Each call takes so long, as the loop's time goes."""

    def __init__(self, clock: LoopClock, takes_s: float) -> None:
        super().__init__(clock)
        self._takes_s = takes_s
        self.calls = 0

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("heartbeat", "workers", "leave", "acquire", "release"):
            return found

        async def call(*arguments: Any) -> Any:
            self.calls += 1
            await asyncio.sleep(self._takes_s)
            return await found(*arguments)

        return call


@pytest.mark.parametrize("lease_time_us", [LEASE_TIME_MIN_US, LEASE_TIME])
def test_workers_keep_their_leases_while_the_store_is_slow(lease_time_us: int) -> None:
    """Nothing runs out with the shortest lease either, and they ask the less often."""

    async def play() -> None:
        clock = LoopClock()
        store = Slow(clock, takes_s=1.2)
        crew = [Leases(store, clock, name, lease_time_us=lease_time_us) for name in "abcd"]
        stop = asyncio.Event()
        keeping = [asyncio.create_task(each.keep(stop)) for each in crew]
        await asyncio.sleep(20)
        store.calls = 0
        for _ in range(200):
            await asyncio.sleep(1)
            assert sorted(slot for each in crew for slot in each.held()) == sorted(SLOTS)
        assert sum(each.changes["lost"] for each in crew) == 0
        # Two a look: the slower the store, the fewer.
        assert store.calls < 1_000
        stop.set()
        await asyncio.gather(*keeping)

    virtually(play())


async def test_trouble_is_reported_while_it_lasts() -> None:
    """The worker goes on taking turns, and says when it is over."""
    clock = FakeClock(START_US)
    store = Broken(clock)
    store.fails = "workers"
    worker = Leases(store, clock, "a", lease_time_us=3_000)
    stop = asyncio.Event()
    keeping = asyncio.create_task(worker.keep(stop))

    await eventually(lambda: worker.trouble == "a fault that a test planted", "the error is logged")
    store.fails = ""
    await eventually(lambda: worker.trouble is None, "the trouble is over")
    stop.set()
    await keeping
    assert len(worker.held()) == len(SLOTS)


async def test_a_lease_is_lost_at_the_instant_at_which_it_runs_out() -> None:
    """A worker that was suspended knows it by its own clock: others may hold its slots by now, so
    it begins as one that joins."""
    crew = Crew()
    worker = crew.join("a")
    await crew.turn(worker)
    assert worker.held() == list(SLOTS)
    crew.clock.advance(HELD - 1)
    assert worker.held() == list(SLOTS)
    crew.clock.advance(1)
    assert worker.held() == []
    await crew.turn(worker)
    assert worker.changes["lost"] == len(SLOTS)


async def test_a_worker_that_joins_is_seen_before_it_looks() -> None:
    """Otherwise two that join at once would each see itself alone."""
    clock, steps = FakeClock(START_US), []
    store = MemoryLeases(clock)

    async def heartbeat(*_: object) -> None:
        await asyncio.sleep(0)
        steps.append("seen")

    async def workers() -> Sequence[str]:
        steps.append("looks")
        return ["a"]

    with patch.object(store, "heartbeat", heartbeat), patch.object(store, "workers", workers):
        await Leases(store, clock, "a", lease_time_us=LEASE_TIME).update()
    assert steps == ["seen", "looks"]
