"""A process dies between every two steps of whatever it does; what is left is finished by others.

Each test does the same work once for each step it has, and dies there.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from counter.errors import TokenPendingError
from counter.limits import MINUTE, SECOND
from counter.storage.sqlite.live import LiveTail
from counter.storage.sqlite.rollups import SqliteRollups
from tests.evidence.mortal import STEPS_MAX, DeathError, Place, Process, until_answered
from tests.simulation.bugs import all_bugs
from tests.simulation.mutate import Edit, planted
from tests.support.app import bounds_of_a_few

Work = Callable[[Process], Awaitable[Any]]
Prepare = Callable[[Place], Awaitable[Work]]
Check = Callable[[Place, Work], Awaitable[None]]
#: Beyond its accept limit of 3 s, in a window that is closed.
LATE = 20 * SECOND


@pytest.fixture(params=["sqlite", "memory"])
def storage(request: pytest.FixtureRequest) -> str:
    """A store with transactions, and one without."""
    return str(request.param)


@asynccontextmanager
async def opened(storage: str, directory: Path) -> AsyncIterator[Place]:
    place = Place(storage, directory)
    await place.open()
    yield place
    await place.close()


async def dies_everywhere(storage: str, directory: Path, prepare: Prepare, check: Check) -> None:
    """Kill a process at each step of a work, and *check* how the next ones finish it."""
    for dies_at in range(1, STEPS_MAX):
        (where := directory / str(dies_at)).mkdir()
        async with opened(storage, where) as place:
            work = await prepare(place)
            died = False
            try:
                await work(await place.process(dies_at))
            except DeathError:
                died = True
            await check(place, work)
        if not died:
            assert dies_at > 2, "a work that never asks the store has no steps to die between"
            return
    raise AssertionError(f"the work has more than {STEPS_MAX} steps")


def finishes(times: int = 1, **counts: int) -> Check:
    """Another process does the work so often; then the counts are these."""

    async def check(place: Place, work: Work) -> None:
        other = await place.process()
        for _ in range(times):
            await work(other)
        await place.close_windows(other)
        assert await other.counts(*counts) == [*counts.values()]

    return check


async def test_an_add(storage: str, fast_dir: Path) -> None:
    """Sent again, it counts once, wherever the first server died."""

    async def prepare(place: Place) -> Work:
        token = place.token()
        return lambda process: process.add("c", 7, token)

    await dies_everywhere(storage, fast_dir, prepare, finishes(c=7))


async def test_an_add_that_is_asked_about_only_later(storage: str, fast_dir: Path) -> None:
    """The content of its window when it is closed decides, for ever."""

    async def prepare(place: Place) -> Work:
        token = place.token()
        return lambda process: process.add("c", 7, token)

    async def check(place: Place, work: Work) -> None:
        other = await place.process()
        await place.close_windows(other)
        counted = await other.counts("c")
        applied = await until_answered(place, lambda: work(other))
        assert counted == [7 * applied]
        await place.close_windows(other)
        assert await other.counts("c") == [7 * applied]
        assert await until_answered(place, lambda: work(other)) == applied

    await dies_everywhere(storage, fast_dir, prepare, check)


async def test_a_clear(storage: str, fast_dir: Path) -> None:
    async def prepare(place: Place) -> Work:
        first = await place.process()
        await first.add("c", 7, place.token(SECOND))
        token = place.token()
        await first.add("c", 1, place.token(-SECOND))
        return lambda process: process.clear("c", token)

    await dies_everywhere(storage, fast_dir, prepare, finishes(c=1))


@pytest.mark.parametrize("late", [False, True], ids=["retried", "late"])
@pytest.mark.parametrize("rolled_up", [False, True], ids=["in the log", "rolled up"])
async def test_a_delete(storage: str, fast_dir: Path, rolled_up: bool, late: bool) -> None:
    """Resent, it ends: the name is gone and the count is 0, or nothing was deleted."""

    async def prepare(place: Place) -> Work:
        first = await place.process()
        for name in ("c", "d"):
            await first.add(name, 7, place.token())
        if rolled_up:
            await place.close_windows(first)
        place.clock.advance(1)
        token = place.token()
        return lambda process: process.delete("c", token)

    async def check(place: Place, work: Work) -> None:
        other = await place.process()
        if late:
            await place.close_windows(other)
            assert (await other.counts("c"))[0] in (0, 7)
        applied = await until_answered(place, lambda: work(other))
        assert applied or late
        left = 0 if applied else 7
        for _ in range(2):
            assert await other.names() == (["d"] if applied else ["c", "d"])
            await place.close_windows(other)
            assert await other.counts("c", "d") == [left, 7]
        other = await place.process()
        await other.add("c", 1, place.token())
        assert await until_answered(place, lambda: work(other)) == applied
        await place.close_windows(other)
        assert await other.counts("c", "d") == [left + 1, 7]
        assert await other.names() == ["c", "d"]

    await dies_everywhere(storage, fast_dir, prepare, check)


@pytest.mark.usefixtures("postgresql")
async def test_a_delete_over_postgresql(fast_dir: Path) -> None:
    await test_a_delete("postgresql", fast_dir, rolled_up=True, late=False)


async def test_a_rollup_after_a_delete(storage: str, fast_dir: Path) -> None:
    """The worker lists the one that was written again, and no other."""

    async def prepare(place: Place) -> Work:
        first = await place.process()
        for name in ("a", "b", "c"):
            await first.add(name, 7, place.token())
        place.clock.advance(1)
        for name in ("a", "b"):
            await first.delete(name, place.token())
        place.clock.advance(1)
        await first.add("b", 1, place.token())
        place.clock.advance(LATE)
        return Process.roll_up

    async def check(place: Place, work: Work) -> None:
        other = await place.process()
        await work(other)
        await place.close_windows(other)
        assert await other.counts("a", "b", "c") == [0, 1, 7]
        assert await other.names() == ["b", "c"]

    await dies_everywhere(storage, fast_dir, prepare, check)


async def test_an_atomic_add_whose_client_does_not_return(storage: str, fast_dir: Path) -> None:
    """All of it counts or nothing, and a resolution returns which."""

    async def prepare(place: Place) -> Work:
        token = place.token()
        return lambda process: process.add_atomic([("a", 1), ("b", 2), ("a", 4)], token)

    async def check(place: Place, work: Work) -> None:
        other = await place.process()
        await place.close_windows(other)
        counted = await other.counts("a", "b")
        assert counted in ([0, 0], [5, 2])
        assert await until_answered(place, lambda: work(other)) == (counted != [0, 0])
        assert await other.counts("a", "b") == counted

    await dies_everywhere(storage, fast_dir, prepare, check)


@pytest.mark.parametrize("landed", [True, False])
@pytest.mark.parametrize("atomic", [False, True], ids=["single", "atomic"])
async def test_a_resolution(storage: str, fast_dir: Path, landed: bool, atomic: bool) -> None:
    """Every resolution after the death agrees with the events."""

    async def prepare(place: Place) -> Work:
        token = place.token()

        async def work(process: Process) -> None:
            if atomic:
                await process.add_atomic([("a", 1), ("b", 2)], token)
            else:
                await process.add("a", 1, token)

        first = await place.process()
        if landed:
            await work(first)
        place.clock.advance(LATE)
        await first.roll_up()

        async def asked(process: Process) -> None:
            assert await until_answered(place, lambda: work(process)) == landed

        return asked

    async def check(place: Place, work: Work) -> None:
        other, third = await place.process(), None
        await work(other)
        await place.close_windows(other)
        assert await other.counts("a", "b") == [int(landed), 2 * int(landed and atomic)]
        third = await place.process()
        await work(third)

    await dies_everywhere(storage, fast_dir, prepare, check)


async def test_a_reservation(storage: str, fast_dir: Path) -> None:
    """A key without a time: the first sight of it may be the last thing that a server sees."""

    async def prepare(place: Place) -> Work:
        return lambda process: process.add("c", 7, "order:1")

    await dies_everywhere(storage, fast_dir, prepare, finishes(times=2, c=7))


async def test_a_reservation_that_went_stale(storage: str, fast_dir: Path) -> None:
    """Its old time is voided before it gets a new one: wherever that ends, it counts once."""

    async def prepare(place: Place) -> Work:
        first = await place.process(dies_at=2)
        with pytest.raises(DeathError):
            await first.add("c", 7, "order:1")
        place.clock.advance(LATE)
        return lambda process: process.add("c", 7, "order:1")

    async def check(place: Place, work: Work) -> None:
        other = await place.process()
        await work(other)
        await place.close_windows(other)
        assert await other.counts("c") == [7]
        place.clock.advance(LATE)
        await work(other)
        assert await other.counts("c") == [7]

    await dies_everywhere(storage, fast_dir, prepare, check)


async def test_a_rollup(storage: str, fast_dir: Path) -> None:
    """Adds, a clear, an atomic add and a recount, in several batches of several windows."""

    async def prepare(place: Place) -> Work:
        first = await place.process()
        for round_ in range(2):
            for number in range(5):
                await first.add(f"c{number}", number + 10 * round_, place.token())
            place.clock.advance(SECOND)
        await first.clear("c4", place.token())
        await first.add_atomic([("c0", 100), ("c1", 100)], place.token())
        late = place.token()
        place.clock.advance(LATE)
        await first.roll_up()
        # Too late to count: the worker must still recount its window.
        assert not await until_answered(place, lambda: first.add("c2", 1_000, late))
        await first.service.recount(first.namespace, "c3", 0, place.clock.now_us())
        await first.add("c3", 1, place.token())
        place.clock.advance(LATE)
        return Process.roll_up

    expected = finishes(c0=110, c1=112, c2=14, c3=17, c4=0)
    await dies_everywhere(storage, fast_dir, prepare, expected)


async def test_a_rollup_of_more_than_the_tail_holds(storage: str, fast_dir: Path) -> None:
    """Dirty counters are read from the log then, with the same result."""
    with bounds_of_a_few():
        await test_a_rollup(storage, fast_dir)


async def test_a_rollup_that_settles_and_drops_slices(storage: str, fast_dir: Path) -> None:
    """Events end with their retention, and their sum stays."""

    async def prepare(place: Place) -> Work:
        first = await place.process()
        await first.add("c", 7, place.token())
        await first.add("idle", 3, place.token())
        for _ in range(7):
            place.clock.advance(10 * MINUTE)
            await first.roll_up()
        await first.add("c", 1, place.token())
        place.clock.advance(10 * MINUTE)

        async def rolls_up_twice(process: Process) -> None:
            await process.roll_up()
            await process.roll_up()

        return rolls_up_twice

    async def check(place: Place, work: Work) -> None:
        other = await place.process()
        await work(other)
        await other.add("c", 1, place.token())
        await place.close_windows(other)
        assert await other.counts("c", "idle") == [9, 3]

    await dies_everywhere(storage, fast_dir, prepare, check)


async def test_a_dead_process_writes_nothing(storage: str, fast_dir: Path) -> None:
    """The harness itself: dead at its first step, a process writes nothing."""
    async with opened(storage, fast_dir) as place:
        token = place.token()
        with pytest.raises(DeathError):
            await (await place.process(dies_at=1)).add("c", 1, token)
        other = await place.process()
        place.clock.advance(4 * SECOND)
        with pytest.raises(TokenPendingError):
            await other.add("c", 1, token)
        assert await until_answered(place, lambda: other.add("c", 1, token)) is False


@pytest.mark.parametrize(
    ("bug", "test"),
    [
        ("event-before-mark", test_an_add_that_is_asked_about_only_later),
        ("key-not-voided", test_a_reservation_that_went_stale),
        ("watermark-early", test_a_rollup),
        ("marks-dropped-early", test_a_rollup),
        ("deletes-not-undone", test_a_rollup_after_a_delete),
        ("name-outlives-delete", test_a_rollup_after_a_delete),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
async def test_a_planted_bug_is_caught(
    fast_dir: Path, bug: str, test: Callable[[str, Path], Awaitable[None]]
) -> None:
    if bug not in (known := all_bugs()):
        pytest.skip("the store over which the simulation catches it is not installed")
    with known[bug].plant(), pytest.raises(AssertionError):
        await test("memory", fast_dir)


@pytest.mark.parametrize(
    ("change", "test"),
    [
        (
            # The dirty counters of the log are forgotten: only recounts are rolled up.
            Edit(SqliteRollups._walk, "if window_us < new.from_us:", "if True:"),
            test_a_rollup,
        ),
        (
            # Shards without recounts are taken for idle.
            Edit(SqliteRollups.marked, "found = set(", "return set("),
            test_a_rollup,
        ),
        (
            # Events that the live tail lost look clean.
            Edit(LiveTail.counters, "span.windows(size_us).start < held_us", "False"),
            test_a_rollup_of_more_than_the_tail_holds,
        ),
    ],
    ids=["log-forgotten", "idle-without-recounts", "lost-tail-is-clean"],
)
async def test_a_bug_planted_in_the_log_is_caught(
    fast_dir: Path, change: Edit, test: Callable[[str, Path], Awaitable[None]]
) -> None:
    """The simulation runs over Cassandra, which has marks; these are bugs of a store without."""
    with planted((change,)), pytest.raises(AssertionError):
        await test("sqlite", fast_dir)
