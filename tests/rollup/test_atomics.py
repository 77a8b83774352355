"""Atomic adds that something went wrong with: the worker settles them before it sums."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from counter.core.resolve import Resolver
from counter.errors import StoreUnavailableError, TokenPendingError, TokenTooOldError
from counter.limits import MINUTE, SECOND, TIME_MAX_US
from counter.types import AtomicMark, Decision, Event, Namespace, Outcome, Sight, Span, Token
from counter.windows import fingerprint, window_of
from tests.rollup.world import CLOSING, DATASET, WINDOW, World, begun
from tests.support.parts import failing

ITEMS = [("a", 1), ("b", 2)]


async def leave_half(world: World, namespace: Namespace) -> None:
    """Have the API's process die when one item of an atomic add has landed."""
    works = world.store.events.append

    async def lands_half(of: Namespace, events: Sequence[Event]) -> Any:
        await works(of, events[:1])
        raise StoreUnavailableError("a planted fault")

    with (
        patch.object(world.store.events, "append_atomic", lands_half),
        pytest.raises(StoreUnavailableError),
    ):
        await world.api.add_atomic(namespace, ITEMS, world.token())


async def give_up(
    world: World, namespace: Namespace, token: Token
) -> Callable[[], Awaitable[object]]:
    """Have the write of an atomic add be given up; it lands when what is returned is called."""
    works = world.store.events.append_atomic
    written: list[Sequence[Event]] = []

    async def lands_late(_: Namespace, items: Sequence[Event]) -> Any:
        written.append(items)
        raise StoreUnavailableError("a planted fault")

    with (
        patch.object(world.store.events, "append_atomic", lands_late),
        pytest.raises(StoreUnavailableError),
    ):
        await world.api.add_atomic(namespace, ITEMS, token)
    return lambda: works(namespace, written[0])


async def marks_of(world: World, namespace: Namespace) -> Sequence[AtomicMark]:
    found: Sequence[AtomicMark] = await world.store.separate_writes.dirty_atomic(
        namespace, 0, Span.after(0, TIME_MAX_US)
    )
    return found


async def decide_void(world: World, namespace: Namespace) -> AtomicMark:
    """Have a whole atomic add be decided as void; return its mark."""
    await world.api.add_atomic(namespace, ITEMS, world.token())
    (mark,) = await marks_of(world, namespace)
    void = Decision(Outcome.VOID, fingerprint(mark.events))
    await world.store.decisions.decide(namespace, mark.events, void)
    return mark


@contextmanager
def crash_when_half_is_hidden(world: World) -> Iterator[None]:
    void = world.store.separate_writes.void

    async def hides_half(of: Namespace, items: Sequence[Event]) -> None:
        await void(of, items[:1])
        raise StoreUnavailableError("a planted fault")

    with (
        patch.object(world.store.separate_writes, "void", hides_half),
        pytest.raises(StoreUnavailableError),
    ):
        yield


async def test_halves_are_made_whole_by_whichever_worker_has_the_shard() -> None:
    """The mark lies in the shard of each item."""
    world, namespace = await begun()
    for _ in range(3):
        await leave_half(world, namespace)
    a, b = await world.shared("a", "b")
    for _ in range(2):
        world.clock.advance(CLOSING)
        await world.turns(a, b)
        for each in (a, b):
            await each.worker.tick()
    assert await world.rolled_up(namespace) == {"a": 3, "b": 6}


async def test_the_findings_of_one_shard_serve_the_other_shards_of_a_worker() -> None:
    """Each shard has the same mark: sixteen of them must not look sixteen times."""
    world, namespace = await begun()
    items = [(f"c{number}", 1) for number in range(50)]
    for _ in range(5):
        await world.api.add_atomic(namespace, items, world.token())
    a = world.process()
    world.clock.advance(CLOSING)
    with patch.object(
        world.store.decisions, "decided", wraps=world.store.decisions.decided
    ) as looks:
        await a.worker.tick()
    assert looks.await_count == 5
    assert await world.rolled_up(namespace) == {name: 5 for name, _ in items}


async def test_an_atomic_add_that_a_shard_failed_to_settle_is_settled_by_another() -> None:
    """Those that waited for it fail with it, and do it again."""
    world, namespace = await begun()
    await leave_half(world, namespace)
    a = world.process()
    error = StoreUnavailableError("a planted fault")
    with failing(world.store, "decided", error), pytest.raises(StoreUnavailableError):
        await world.roll_up(a)
    await a.worker.tick()
    await world.roll_up(a)
    assert await world.rolled_up(namespace) == {"a": 1, "b": 2}


async def test_an_atomic_add_in_a_dropped_slice_holds_nothing_up() -> None:
    """Its window is settled and its events are gone: a suspended server may leave a mark so
    late."""
    world, namespace = await begun(shards=1)
    a = world.process()
    old_us = world.clock.now_us()
    events = tuple(
        Event(name, old_us, b"n" * 16, 1, delta, atom=b"all of it") for name, delta in ITEMS
    )
    world.clock.advance(DATASET.retention_us + 2 * DATASET.slice_us)
    mark = AtomicMark(window_of(world.clock.now_us() + MINUTE, WINDOW), events)
    await world.store.separate_writes.mark_atomic(namespace, mark)
    for _ in range(12):
        await world.roll_up(a, after_us=2 * SECOND)
    assert await world.store.control.dropped_before(DATASET) > old_us
    assert min(await world.store.rollups.watermarks(namespace)) < mark.window_us
    world.clock.advance(2 * MINUTE)
    await world.add("c", 7)
    await world.roll_up(a)
    assert (await world.rolled_up(namespace))["c"] == 7
    assert a.worker.trouble is None


async def test_an_atomic_add_in_flight_delays_only_its_window() -> None:
    """A worker's clock may say that the window is closed before its resolver's does."""
    world, namespace = await begun(shards=1)
    await world.add("early", 1)
    world.clock.advance(2 * WINDOW)
    await leave_half(world, namespace)
    window_us = window_of(world.clock.now_us(), WINDOW)
    world.clock.advance(2 * WINDOW)
    await world.add("late", 1)
    world.clock.advance(CLOSING)
    a = world.process()
    pending = TokenPendingError("a planted doubt")
    with patch.object(Resolver, "resolve", side_effect=pending):
        with pytest.raises(TokenPendingError):
            await a.worker.tick()
        assert await world.rolled_up(namespace) == {"early": 1}
        assert list(await world.store.rollups.watermarks(namespace)) == [window_us - 1]
        assert a.worker.trouble == "a planted doubt"
    await world.roll_up(a, times=2)
    assert await world.rolled_up(namespace) == {"early": 1, "a": 1, "b": 2, "late": 1}
    assert a.worker.trouble is None


async def test_a_decision_that_a_crash_left_half_done_is_done_by_the_worker() -> None:
    """All items are found, and void was decided: the decision is carried out."""
    world, namespace = await begun(shards=1)
    mark = await decide_void(world, namespace)
    a = world.process()
    await world.roll_up(a, times=2)
    assert list(await world.store.events.find(namespace, mark.events)) == [None, None]
    assert set((await world.rolled_up(namespace)).values()) == {0}


async def test_a_decision_that_is_found_is_marked_before_it_is_carried_out() -> None:
    """Regression: another worker passes the mark, having looked before there was a decision, and
    the one that finds it dies half way."""
    world, namespace = await begun(shards=1)
    await world.api.add_atomic(namespace, ITEMS, world.token())
    (mark,) = await marks_of(world, namespace)
    a, b = world.process(), world.process()
    world.clock.advance(CLOSING)
    passes = await b.held_in("sums")
    void = Decision(Outcome.VOID, fingerprint(mark.events))
    await world.store.decisions.decide(namespace, mark.events, void)
    with crash_when_half_is_hidden(world):
        await a.worker.tick()
    b.road.open.set()
    await passes
    await world.roll_up(b, times=3)
    assert await world.counts(namespace, "a", "b") == [0, 0]
    assert await world.rolled_up(namespace) == {"a": 0, "b": 0}


@pytest.mark.parametrize("seen", [False, True])
async def test_a_mark_of_a_decision_is_none_of_its_cancel(seen: bool) -> None:
    """Regression: the cancel's process and the worker that finds it die half way, and the other
    worker passes the mark, having looked before. Whether the first one has looked before as well
    makes no difference: what it decides shows it the cancel."""
    world, namespace = await begun(shards=1)
    await world.api.add_atomic(namespace, ITEMS, world.token())
    (mark,) = await marks_of(world, namespace)
    payload = fingerprint(mark.events)
    await world.store.decisions.decide(namespace, mark.events, Decision(Outcome.APPLIED, payload))
    await world.store.separate_writes.mark_atomic(namespace, mark._replace(sight=Sight.DECISION))
    a, b = world.process(), world.process()
    world.clock.advance(CLOSING)
    passes = await b.held_in("sums")
    dies = None if seen else await a.held_in("decide")
    cancelled = Decision(Outcome.CANCELLED, payload)
    await world.store.decisions.cancel(namespace, mark.events, cancelled)
    with crash_when_half_is_hidden(world):
        if dies is None:
            await a.worker.tick()
        else:
            a.road.open.set()
            await dies
    b.road.open.set()
    await passes
    await world.roll_up(b, times=3)
    assert await world.counts(namespace, "a", "b") == [0, 0]
    assert await world.rolled_up(namespace) == {"a": 0, "b": 0}


async def test_a_mark_of_a_decision_leaves_no_further_one() -> None:
    """Else there would be one in each pass until retention ends."""
    world, namespace = await begun(shards=1)
    mark = await decide_void(world, namespace)
    a = world.process()
    separate = world.store.separate_writes
    with patch.object(separate, "mark_atomic", wraps=separate.mark_atomic) as marks:
        await world.roll_up(a, times=6)
    left = [each.args[1] for each in marks.await_args_list]
    (window_us,) = {each.window_us for each in left}
    assert left == [
        AtomicMark(window_us, mark.events, each) for each in (Sight.NOTHING, Sight.DECISION)
    ]
    assert window_us > mark.window_us
    assert list(await marks_of(world, namespace)) == []
    assert set((await world.rolled_up(namespace)).values()) == {0}


async def test_a_mark_of_a_decision_is_in_a_window_that_was_open() -> None:
    """Another worker may have passed one that landed late without having seen it."""
    world, namespace = await begun(shards=1)
    await decide_void(world, namespace)
    a = world.process()
    separate = world.store.separate_writes
    left: list[AtomicMark] = []

    async def lands_late(of: Namespace, each: AtomicMark) -> None:
        if not left:
            world.clock.advance(CLOSING)
        left.append(each)
        await works(of, each)

    works = separate.mark_atomic
    with patch.object(separate, "mark_atomic", lands_late):
        await world.roll_up(a, times=6)
    late, first, second, *_ = left
    # The late one is found too, and leaves two more.
    assert [each.sight for each in left] == [0, *[0, 1] * 2]
    assert late.window_us < first.window_us == second.window_us
    assert list(await marks_of(world, namespace)) == []
    assert set((await world.rolled_up(namespace)).values()) == {0}


async def test_a_resolver_that_pauses_before_it_decides_leaves_no_half() -> None:
    """Another worker may pass the mark meanwhile; after a crash of the resolver one looks again."""
    world, namespace = await begun(shards=1)
    a, token = world.process(), world.token()
    decide = world.store.decisions.decide
    land = await give_up(world, namespace, token)
    ticks: list[asyncio.Task[int]] = []

    async def pauses_first(*arguments: Any) -> Decision:
        if not ticks:
            await land()
            world.clock.advance(CLOSING)
            ticks.append(await a.held_in("sums"))
        return await decide(*arguments)

    world.clock.advance(CLOSING)
    pausing = patch.object(world.store.decisions, "decide", pauses_first)
    with pausing, crash_when_half_is_hidden(world):
        await world.api.add_atomic(namespace, ITEMS, token)
    a.road.open.set()
    await asyncio.gather(*ticks)
    await world.roll_up(a, times=3)
    assert await world.counts(namespace, "a", "b") == [0, 0]
    assert await world.rolled_up(namespace) == {"a": 0, "b": 0}


async def test_a_worker_that_pauses_before_it_decides_leaves_no_half() -> None:
    """Another worker may pass the mark; if the first crashes while hiding, a worker looks again."""
    world, namespace = await begun(shards=1)
    a, b = world.process(), world.process()
    land = await give_up(world, namespace, world.token())
    world.clock.advance(CLOSING)
    dies = await a.held_in("decide")
    await land()
    await b.worker.tick()
    assert await world.rolled_up(namespace) == {"a": 1, "b": 2}
    a.road.open.set()
    with crash_when_half_is_hidden(world):
        await dies
    await world.roll_up(b, times=3)
    assert await world.counts(namespace, "a", "b") == [0, 0]
    assert await world.rolled_up(namespace) == {"a": 0, "b": 0}


async def test_an_atomic_add_of_which_nothing_is_found_is_decided_before_its_window_is_passed() -> (
    None
):
    """A write that was given up may still land, in part and late: it must be hidden by then."""
    world, namespace = await begun(shards=1)
    token = world.token()
    land = await give_up(world, namespace, token)
    a = world.process()
    await world.roll_up(a, times=2)
    await land()
    assert await world.counts(namespace, "a") == [0]
    with pytest.raises(TokenTooOldError) as caught:
        await world.api.add_atomic(namespace, ITEMS, token)
    assert caught.value.applied is False
