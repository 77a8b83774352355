"""Refusals of the service: a key's time that stays stale, and overload."""

import gc
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, patch

import pytest

from counter.core.rate_limits import Allowance
from counter.core.results import Add, Added, Keyed
from counter.core.service import CounterService
from counter.errors import (
    OverloadedError,
    RateLimitedError,
    TokenCancelledError,
    TokenConflictError,
    TokenInFutureError,
    TokenTooOldError,
)
from counter.limits import HOUR, MINUTE, TIME_MAX_US
from counter.storage.shared.memory_cache import MemoryCache
from counter.tokens import nonce_of_key
from counter.types import Checkpoint, CounterUpdate, Outcome, Reservation, Span, WindowRow
from counter.windows import window_of
from tests.rollup.world import DATASET, WINDOW, World, begun
from tests.support.parts import followed


async def test_a_key_whose_time_keeps_expiring_is_refused() -> None:
    """Each time was voided before the next was asked for: sent again, the key counts once."""
    world, namespace = await begun(shards=1)
    stale = [world.clock.now_us() + each for each in range(3)]
    world.clock.advance(MINUTE)
    with (
        patch.object(world.store.decisions, "reserve", AsyncMock(side_effect=stale)),
        pytest.raises(OverloadedError, match="expired repeatedly"),
    ):
        await world.api.add(namespace, "c", 1, "order:1")
    assert (await world.api.reader.read_one(namespace, "c", 0)).count == 0
    await world.api.add(namespace, "c", 1, "order:1")
    assert (await world.api.reader.read_one(namespace, "c", 0)).count == 1


async def test_a_key_whose_time_is_past_knowing_gets_no_new_one() -> None:
    """It may have counted: a new time could make it count twice."""
    world, namespace = await begun(shards=1)
    old_us = world.clock.now_us()
    reserve = AsyncMock(return_value=old_us)
    world.clock.advance(DATASET.retention_us)
    with (
        patch.object(world.store.decisions, "reserve", reserve),
        pytest.raises(TokenTooOldError) as caught,
    ):
        await world.api.add(namespace, "c", 1, "order:1")
    assert caught.value.applied is None
    reserve.assert_awaited_once()


async def test_a_recount_of_more_windows_than_a_batch_has_asks_for_all_of_them() -> None:
    world, namespace = await begun(shards=1)
    first_us = window_of(world.clock.now_us(), WINDOW)
    rows = tuple(WindowRow(first_us + number * WINDOW, False, 1) for number in range(7))
    last_us = rows[-1].window_us
    update = CounterUpdate("c", rows, Checkpoint(last_us, 7))
    await world.store.rollups.apply(namespace, [update], through_us=last_us)
    with patch("counter.limits.BATCH_ITEMS_MAX", 3):
        assert await world.api.recount(namespace, "c", first_us, last_us + 1) == 7
    marks, _ = await world.store.rollups.dirty(namespace, 0, Span.after(0, TIME_MAX_US), limit=99)
    assert {mark.recount_us for mark in marks} == {row.window_us for row in rows}


async def test_tokens_of_the_future_in_a_batch_share_one_refusal() -> None:
    """Regression: each had its own, in a cycle that only the collector freed."""
    world, namespace = await begun(shards=1)
    adds = [Add("c", 1, world.token(age_us=-HOUR - number)) for number in range(300)]
    gc.collect()
    gc.disable()
    try:
        outcomes = await world.api.add_many(namespace, [*adds, Add("c", 1, world.token())])
        *refused, counted = outcomes
        assert isinstance(counted, Added)
        (shared,) = set(refused)
        assert isinstance(shared, TokenInFutureError)
        assert shared.retry_after_us == HOUR + 299 - namespace.settings.future_limit_us
        assert "the latest generation_time of the batch is 3600.000 s ahead" in str(shared.detail)
        del outcomes, refused, counted, shared
        assert gc.collect() < 100
    finally:
        gc.enable()
    assert world.api.tally["refused"] == 300
    [alone] = await world.api.add_many(namespace, adds[:1])
    assert isinstance(alone, TokenInFutureError)
    assert alone.detail.startswith("generation_time is 3600.000 s ahead")


async def test_items_that_need_a_task_each_are_refused_past_a_bound() -> None:
    """A batch is one request, and may be a thousand tasks."""
    world, namespace = await begun(shards=1)
    world.api.one_by_one.most = 2
    keys = [Add("c", 1, f"key-{number}") for number in range(3)]
    refused = await world.api.add_many(namespace, keys)
    assert {type(each) for each in refused} == {OverloadedError}
    assert world.api.tally["refused"] == 3
    counted = await world.api.add_many(namespace, keys[:2])
    assert {type(each) for each in counted} == {Added}
    assert world.api.one_by_one.held == 0


async def test_a_failed_atomic_add_is_tallied_once_for_each_item() -> None:
    world, namespace = await begun(shards=1)
    token = world.token(age_us=-HOUR)
    with pytest.raises(TokenInFutureError):
        await world.api.add_atomic(namespace, [("a", 1), ("b", 1), ("b", 2)], token)
    assert world.api.tally["refused"] == 3


async def test_an_add_under_a_key_that_gets_a_new_time_has_one_outcome() -> None:
    """The token with the key's expired time is void, which is not the outcome of the add."""
    world, namespace = await begun(shards=1)
    now_us, nonce = world.clock.now_us(), nonce_of_key(namespace.id, "add", "c", "key")
    await world.store.decisions.reserve(namespace, nonce, Reservation(now_us, now_us + HOUR))
    world.clock.advance(MINUTE)
    await world.api.add(namespace, "c", 1, "key")
    assert world.api.tally["voided"] == 0
    assert sum(world.api.tally.values()) == 1


async def test_a_time_that_another_request_reserved_is_not_replaced_after_a_clock_step() -> None:
    """Regression: it seemed expired, the key got a third time, and its add was counted twice."""
    world = World()
    namespace = await world.begin(shards=1)
    now_us, nonce = world.clock.now_us(), nonce_of_key(namespace.id, "add", "c", "key")
    await world.store.decisions.reserve(namespace, nonce, Reservation(now_us, now_us + HOUR))
    world.clock.advance(MINUTE)
    resolve = world.api.resolver.resolve

    async def resolve_slowly(*given: Any, **named: Any) -> Outcome:
        outcome = await resolve(*given, **named)
        with patch.object(world.api.resolver, "resolve", resolve):
            await world.api.add(namespace, "c", 1, "key")
        world.clock.advance(namespace.settings.key_ttl_us + MINUTE)
        return outcome

    async def resolve_in_turn(*given: Any, **named: Any) -> Outcome:
        return await next(turns)(*given, **named)

    turns: Iterator[Callable[..., Awaitable[Outcome]]] = iter([resolve_slowly, resolve])
    with patch.object(world.api.resolver, "resolve", resolve_in_turn):
        await world.api.add(namespace, "c", 1, "key")
    assert (await world.api.reader.read_one(namespace, "c", 0)).count == 1


async def test_late_tokens_are_refused_past_a_bound_and_leave_room_for_others() -> None:
    world, namespace = await begun(shards=1)
    world.api.late.most = 0
    with pytest.raises(OverloadedError, match="late tokens are being resolved"):
        await world.api.add(namespace, "c", 1, world.token(age_us=HOUR))
    await world.add("c", 1)


@pytest.mark.parametrize("keyed", [False, True], ids=["batch", "keyed-lists"])
async def test_a_batch_that_is_past_the_rate_of_keys_is_charged_once_and_counts_nothing(
    keyed: bool,
) -> None:
    world, charged = World(), []
    namespace = await world.begin(shards=1)

    def reserve(count: int) -> None:
        charged.append(count)
        raise RateLimitedError("no more keys", retry_after_us=1)

    allowance = cast(Allowance, SimpleNamespace(reserve=reserve, resolve=None))
    if keyed:
        lists = [Keyed("event", f"key-{number}", [("c", 1)]) for number in range(3)]
        answers: Sequence[object] = await world.api.add_keyed(namespace, lists, allowance)
    else:
        adds = [Add("c", 1, f"key-{number}") for number in range(3)]
        answers = await world.api.add_many(namespace, adds, allowance)
    assert [type(each) for each in answers] == [RateLimitedError] * 3
    assert charged == [3]
    assert (await world.api.reader.read_one(namespace, "c", 0)).count == 0


async def test_a_cancel_that_is_refused_leaves_its_key_as_it_was() -> None:
    """Regression: the key was cancelled first, and then there was no room."""
    world, namespace = await begun(shards=1)
    most, world.api.late.most = world.api.late.most, 0
    with pytest.raises(OverloadedError):
        await world.api.cancel(namespace, "add", "c", 1, "key")
    world.api.late.most = most
    assert not (await world.api.add(namespace, "c", 1, "key")).replayed


@pytest.mark.parametrize("delta", [1, 2])
async def test_a_key_that_is_cancelled_while_a_retry_looks_for_a_new_time_gets_none(
    delta: int,
) -> None:
    """The retry has seen that its token is void. A cancel with another payload changes nothing."""
    world, namespace = await begun(shards=1)
    other = CounterService(world.store, MemoryCache(world.clock), world.clock)
    now_us, nonce = world.clock.now_us(), nonce_of_key(namespace.id, "add", "c", "order:1")
    await world.store.decisions.reserve(namespace, nonce, Reservation(now_us, now_us + HOUR))
    world.clock.advance(MINUTE)

    async def cancel() -> None:
        with nullcontext() if delta == 1 else pytest.raises(TokenConflictError):
            await other.cancel(namespace, "add", "c", delta, "order:1")

    with (
        followed(world.store, "decide", by=cancel),
        pytest.raises(TokenCancelledError) if delta == 1 else nullcontext(),
    ):
        await world.api.add(namespace, "c", 1, "order:1")
    assert await world.counts(namespace, "c") == [delta - 1]
