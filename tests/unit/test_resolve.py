"""The steps of a resolution, each held up or failed, over a store with late writes."""

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest

from counter.core.results import Added
from counter.errors import (
    StoreUnavailableError,
    TokenConflictError,
    TokenPendingError,
    TokenTooOldError,
)
from counter.limits import TIME_MAX_US
from counter.testing.cases import walked
from counter.types import AtomicMark, Event, Head, Mark, Namespace, Pending, Span, Token
from counter.windows import closes_at, window_of
from tests.rollup.world import CLOSING, WINDOW, World, begun
from tests.support.parts import followed

ITEMS = [("a", 1), ("b", 2)]


class Late:
    """A world with a token that is late, and nothing written under it."""

    def __init__(self, world: World, namespace: Namespace, token: Token) -> None:
        self.world, self.namespace, self.token = world, namespace, token

    @property
    def event(self) -> Event:
        return Event("a", self.token.generation_time_us, self.token.nonce, 0, 1)

    @property
    def window_us(self) -> int:
        return window_of(self.token.generation_time_us, WINDOW)

    @property
    def now_us(self) -> int:
        return window_of(self.world.clock.now_us(), WINDOW)

    async def ask(self) -> Any:
        """Send the add again."""
        return await self.world.api.add(self.namespace, "a", 1, self.token)

    async def head(self) -> Head | None:
        (head,) = await self.world.store.rollups.heads(self.namespace, ["a"])
        return head

    async def marks(self) -> Sequence[Mark]:
        span = Span.after(0, TIME_MAX_US)
        return await walked(self.world.store, self.namespace, 0, span, limit=100)


@pytest.fixture
async def late() -> Late:
    world, namespace = await begun(shards=1)
    token = world.token()
    world.clock.advance(CLOSING)
    return Late(world, namespace, token)


async def test_a_window_that_closes_while_an_event_is_looked_for_was_open() -> None:
    """An event that landed in between was not looked for: the look decides nothing."""
    world, namespace = await begun(shards=1)
    late = Late(world, namespace, world.token())
    closes_us = closes_at(namespace, late.token.generation_time_us)
    world.clock.advance(closes_us - 1 - world.clock.now_us())
    with (
        followed(world.store, "find", by=lambda: world.clock.advance(1), times=9),
        pytest.raises(TokenPendingError),
    ):
        await late.ask()
    assert await world.store.decisions.decided(namespace, [late.event]) is None
    with pytest.raises(TokenTooOldError):
        await late.ask()


async def test_a_recount_is_left_for_readers_and_for_the_worker(late: Late) -> None:
    """In the window of now, which no worker has passed; of the token's window."""
    with pytest.raises(TokenTooOldError):
        await late.ask()
    head = await late.head()
    assert head is not None
    assert head.pending == (Pending(late.window_us, late.now_us),)
    assert list(await late.marks()) == [Mark(late.now_us, "a", late.window_us)]


async def test_a_recount_that_took_long_to_leave_is_left_again(late: Late) -> None:
    """The window that it was left in may be closed by now, and a worker be past it."""
    first_us = late.now_us
    with (
        followed(late.world.store, "write_marks", by=lambda: late.world.clock.advance(CLOSING)),
        pytest.raises(TokenTooOldError),
    ):
        await late.ask()
    assert late.now_us == first_us + CLOSING
    windows = [first_us, late.now_us]
    head = await late.head()
    assert head is not None
    assert sorted(head.pending) == [Pending(late.window_us, each) for each in windows]
    assert list(await late.marks()) == [Mark(each, "a", late.window_us) for each in windows]


async def test_an_atomic_add_is_marked_again_before_anything_is_decided(late: Late) -> None:
    """Its first mark may be in a passed window; after a crash a worker must find it."""
    api, store = late.world.api, late.world.store
    crash = StoreUnavailableError("a planted fault")
    with (
        patch.object(store.decisions, "decide", side_effect=crash),
        pytest.raises(StoreUnavailableError),
    ):
        await api.add_atomic(late.namespace, ITEMS, late.token)
    found = await store.separate_writes.dirty_atomic(late.namespace, 0, Span.after(0, TIME_MAX_US))
    assert [mark.window_us for mark in found] == [late.now_us]
    assert isinstance(found[0], AtomicMark)
    assert [event.counter for event in found[0].events] == ["a", "b"]


async def test_an_acknowledged_list_counts_although_another_one_has_its_token() -> None:
    """They share no counter, so the second is written; the first has the token."""
    world, namespace = await begun(shards=1)
    worker = world.process().worker
    token = world.token()
    await world.api.add_atomic(namespace, ITEMS, token)
    world.clock.advance(CLOSING)
    with pytest.raises(TokenTooOldError) as void:
        await world.api.add_atomic(namespace, [("c", 4), ("d", 8)], token)
    assert void.value.applied is False
    with pytest.raises(TokenConflictError) as conflict:
        await world.api.add_atomic(namespace, ITEMS, token)
    assert conflict.value.applied is None
    for _ in range(2):
        await worker.tick()
        world.clock.advance(CLOSING)
    assert await world.counts(namespace, "a", "b", "c", "d") == [1, 2, 0, 0]
    assert await world.rolled_up(namespace) == {"a": 1, "b": 2, "c": 0, "d": 0}


async def test_a_token_is_answered_after_its_events_are_durable() -> None:
    """The copy that was found may be the only one."""
    world, namespace = await begun(shards=1)
    late = Late(world, namespace, world.token())
    await late.ask()
    world.clock.advance(CLOSING)
    crash = StoreUnavailableError("a planted fault")
    with (
        patch.object(world.store.separate_writes, "rewrite", side_effect=crash),
        pytest.raises(StoreUnavailableError),
    ):
        await late.ask()
    assert await late.ask() == Added("a", 1, late.token.generation_time_us, True)


async def test_a_token_is_answered_after_later_writes_are_hidden(late: Late) -> None:
    crash = StoreUnavailableError("a planted fault")
    with (
        patch.object(late.world.store.separate_writes, "void", side_effect=crash),
        pytest.raises(StoreUnavailableError),
    ):
        await late.ask()
    with pytest.raises(TokenTooOldError) as answered:
        await late.ask()
    assert answered.value.applied is False


@pytest.mark.parametrize(("over_us", "times"), [(0, 1), (1, 2)])
async def test_a_recount_is_left_until_its_window_is_surely_open(
    late: Late, over_us: int, times: int
) -> None:
    """A worker passes no window before its end and the write timeout, for any accept limit."""
    store, clock = late.world.store, late.world.clock
    last_us = late.now_us + WINDOW + late.namespace.dataset.write_timeout_us
    left: list[int] = []

    def lasts() -> None:
        left.append(clock.now_us())
        if len(left) == 1:
            clock.advance(last_us + over_us - clock.now_us())

    with followed(store, "write_marks", by=lasts, times=9), pytest.raises(TokenTooOldError):
        await late.ask()
    assert len(left) == times
