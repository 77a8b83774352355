"""Holds, over every store that keeps bounds: each ends exactly once, and what it reserved is free
again or counted."""

import asyncio
from collections.abc import Awaitable, Iterator
from dataclasses import replace
from itertools import count

import pytest

from counter.bounds import Bounds
from counter.core.holds import Held, Wanted, expire
from counter.core.results import Credential
from counter.errors import (
    BoundReachedError,
    CounterError,
    HoldExpiredError,
    HoldReleasedError,
    HoldSettledError,
    HoldUnknownError,
    InvalidBodyError,
    TokenCancelledError,
    TokenConflictError,
    TokenTooOldError,
)
from counter.holds import ENDED_AT_ONCE_MAX, FIRST, Hold, HoldId, nonce_of_end
from counter.limits import HOLD_LIVES_OF_RETENTION, INT64_MAX, INT64_MIN, MINUTE, SECOND
from counter.testing.cases import DATASET, StoreCases, nonce
from counter.testing.clock import FakeClock
from counter.testing.service_cases import Process, Processes
from counter.types import Namespace, Token

LASTS = MINUTE


class Holder:
    """A process that holds amounts of counter "c", and may have seen other settings last."""

    def __init__(self, process: Process, namespace: Namespace) -> None:
        self.process = process
        self.api = process.api
        self.namespace = namespace

    async def hold(
        self,
        amount: int,
        credential: Credential,
        at_least: int | None = None,
        at_most: int | None = None,
        counter: str = "c",
        lasts_us: int = LASTS,
    ) -> Held:
        await self.api.namespaces.refresh()
        wanted = Wanted(amount, lasts_us, Bounds(at_least, at_most))
        return await self.api.hold(self.namespace, counter, wanted, credential)

    async def refused(
        self,
        amount: int,
        credential: Credential,
        at_least: int | None = None,
        at_most: int | None = None,
    ) -> tuple[int, int, int]:
        """Hold what there is no room for; return the count, what is held, and the room."""
        with pytest.raises(BoundReachedError) as error:
            await self.hold(amount, credential, at_least, at_most)
        fields = error.value.fields
        return fields["count"], fields.get("held", 0), fields["room"]

    async def settle(self, hold: HoldId, amount: int) -> Held:
        await self.api.namespaces.refresh()
        return await self.api.holds.settle(self.namespace, hold, amount)

    async def release(self, hold: HoldId) -> Held:
        await self.api.namespaces.refresh()
        return await self.api.holds.release(self.namespace, hold)

    async def extend(self, hold: HoldId, lasts_us: int) -> Hold:
        await self.api.namespaces.refresh()
        return await self.api.holds.extend(self.namespace, hold, lasts_us)

    async def cancel(self, amount: int, credential: Credential) -> bool:
        """Cancel the token of a hold; return whether it was one."""
        await self.api.namespaces.refresh()
        wanted = Wanted(amount, LASTS)
        cancelled = await self.api.cancel_hold(self.namespace, "c", wanted, credential)
        return cancelled.was_counted

    async def shown(self, counter: str = "c") -> tuple[int, int, int]:
        """Return the count, and what is held upwards and downwards."""
        await self.api.namespaces.refresh()
        found = await self.api.reader.read_one(self.namespace, counter, 0)
        return (found.count, *found.held)

    async def open(self, counter: str = "c") -> list[HoldId]:
        found = await self.api.holds.open(self.namespace, counter, FIRST, 1_000)
        return [each.id for each in found]


async def failed(kind: type[CounterError], *attempts: Awaitable[object]) -> list[CounterError]:
    """Make all *attempts* at once, each of which must fail with an error of *kind*; return the
    errors."""
    outcomes = await asyncio.gather(*attempts, return_exceptions=True)
    errors = [each for each in outcomes if isinstance(each, kind)]
    assert len(errors) == len(attempts), outcomes
    return errors


class ServiceHoldCases(Processes, StoreCases):
    """A hold ends exactly once, and bounds hold with what is held."""

    @pytest.fixture
    def tokens(self, clock: FakeClock) -> Iterator[Token]:
        return (Token(nonce(number), clock.now_us()) for number in count(1))

    @pytest.fixture
    def holders(
        self, processes: tuple[Process, Process], namespace: Namespace
    ) -> tuple[Holder, Holder]:
        one, other = processes
        return Holder(one, namespace), Holder(other, namespace)

    async def test_a_hold_is_settled_once(
        self, holders: tuple[Holder, Holder], tokens: Iterator[Token], clock: FakeClock
    ) -> None:
        """With what it cost, more or less than was held; every retry gets the same, for as long as
        events are kept."""
        one, other = holders
        token = next(tokens)
        hold, shown, replayed = await one.hold(50, token)
        assert (hold.expires_us, shown.held, replayed) == (clock.now_us() + LASTS, (50, 0), False)
        assert (await other.hold(50, token))._replace(count=shown) == (hold, shown, True)
        over = (await other.hold(9, next(tokens))).hold.id
        assert await other.open() == [hold.id, over]
        assert (await other.settle(hold.id, 37)).count.count == 37
        assert (await one.settle(over, 13)).count.count == 50
        for pause_us in (0, SECOND, MINUTE, 40 * MINUTE):
            clock.advance(pause_us)
            await one.process.roll_up()
            for each in holders:
                assert await each.shown() == (50, 0, 0)
                ended = (await each.settle(hold.id, 37)).hold.end
                assert ended is not None
                assert ended.amount == 37
                for error in await failed(
                    HoldSettledError,
                    *(each.settle(hold.id, 36), each.release(hold.id)),
                    *(each.hold(50, token), each.extend(hold.id, LASTS)),
                ):
                    assert error.fields["settled"] == 37
                assert await each.open() == []

    async def test_a_released_hold_counts_nothing(
        self, holders: tuple[Holder, Holder], tokens: Iterator[Token], clock: FakeClock
    ) -> None:
        one, other = holders
        token = next(tokens)
        hold = (await one.hold(-5, token)).hold.id
        assert await other.shown() == (0, 0, -5)
        assert (await other.release(hold)).count.held == (0, 0)
        for pause_us in (0, 5 * MINUTE):
            clock.advance(pause_us)
            await other.process.roll_up()
            for each in holders:
                await each.release(hold)
                await failed(HoldReleasedError, each.settle(hold, -5), each.hold(-5, token))
                assert await each.shown() == (0, 0, 0)

    async def test_a_hold_expires(
        self, holders: tuple[Holder, Holder], tokens: Iterator[Token], clock: FakeClock
    ) -> None:
        """By whatever comes first: a settle, a release, an extension, a retry, a look at it, or a
        worker.
        That stays, also if the clock steps back."""
        one, other = holders
        held = [(await one.hold(1, next(tokens))).hold.id for _ in range(6)]
        clock.advance(LASTS)
        await failed(
            HoldExpiredError,
            *(other.settle(held[0], 1), other.release(held[1])),
            *(other.extend(held[2], LASTS), other.hold(1, held[4].token)),
        )
        assert (await other.api.holds.get(other.namespace, held[3])).end is not None
        await one.process.roll_up()
        assert await other.open() == []
        clock.advance(-SECOND)
        for hold in held:
            await failed(HoldExpiredError, one.settle(hold, 1), one.hold(1, hold.token))
        assert await one.shown() == (0, 0, 0)

    async def test_holds_and_adds_keep_bounds_together(
        self, holders: tuple[Holder, Holder], tokens: Iterator[Token], namespace: Namespace
    ) -> None:
        """`at_most` with what is held upwards, `at_least` with what is held downwards, so that no
        end of a hold passes a bound."""
        one, other = holders
        up = (await one.hold(50, next(tokens), at_most=100)).hold.id
        assert await other.refused(51, next(tokens), at_most=100) == (0, 50, 50)
        error = await other.process.refused(namespace, "c", 51, next(tokens), at_most=100)
        assert (error.fields["held"], error.fields["room"]) == (50, 50)
        await other.process.bounded(namespace, "c", 50, next(tokens), at_most=100)
        assert await one.refused(1, next(tokens), at_most=100) == (50, 50, 0)
        down = (await one.hold(-30, next(tokens), at_least=0)).hold.id
        assert await other.refused(-21, next(tokens), at_least=0) == (50, -30, 20)
        await other.process.refused(namespace, "c", -21, next(tokens), at_least=0)
        await other.process.bounded(namespace, "c", -20, next(tokens), at_least=0)
        assert await one.shown() == (30, 50, -30)
        # A step towards a bound is never refused, wherever the count is.
        await one.hold(-1, next(tokens), at_most=0)
        await one.settle(down, -30)
        await other.settle(up, 60)
        assert await other.shown() == (60, 0, -1)

    async def test_a_retry_gets_the_first_answer(
        self, holders: tuple[Holder, Holder], tokens: Iterator[Token], clock: FakeClock
    ) -> None:
        """However late, under an arbitrary key too, and whatever there is room for then."""
        one, other = holders
        refused = next(tokens)
        accepted = (await one.hold(5, "key", at_most=5, lasts_us=5 * MINUTE)).hold
        first = await other.refused(1, refused, at_most=5)
        assert await one.refused(1, "other key", at_most=5) == first
        for pause_us in (0, 10 * SECOND, MINUTE):
            clock.advance(pause_us)
            await one.process.roll_up()
            for each in holders:
                hold = (await each.hold(5, "key", at_most=5, lasts_us=5 * MINUTE)).hold
                assert hold == accepted
                assert await each.refused(1, refused, at_most=5) == first
                for amount, lasts_us in ((4, 5 * MINUTE), (5, MINUTE)):
                    with pytest.raises(TokenConflictError):
                        await each.hold(amount, accepted.id.token, at_most=5, lasts_us=lasts_us)
                with pytest.raises(TokenConflictError):
                    await each.hold(1, refused, at_most=6)
        await one.release(accepted.id)
        assert await other.refused(1, refused, at_most=5) == first

    async def test_expired_holds_make_room(
        self, holders: tuple[Holder, Holder], namespace: Namespace, clock: FakeClock
    ) -> None:
        """Those that expired first, as many as are needed, before a worker has seen them: for a
        hold and for an add, alone or atomic; never one that goes the other way."""
        one, other = holders
        held = []
        for number in range(1, 5):
            token = Token(nonce(number), clock.now_us())
            held.append((await one.hold(10, token, at_most=40)).hold.id)
            clock.advance(1)
        await one.hold(-7, Token(nonce(5), clock.now_us()))
        clock.advance(LASTS)
        assert await other.open() != []
        tokens = (Token(nonce(number), clock.now_us()) for number in count(10))
        await other.hold(15, next(tokens), at_most=40)
        assert await one.shown() == (0, 35, -7)
        await one.process.bounded(namespace, "c", 15, next(tokens), at_most=40)
        assert await one.shown() == (15, 25, -7)
        await one.process.bounded(namespace, "c", 10, next(tokens), at_most=40)
        assert await other.shown() == (25, 15, -7)
        assert await one.refused(1, next(tokens), at_most=40) == (25, 15, 0)
        for hold in held:
            with pytest.raises(HoldExpiredError):
                await other.settle(hold, 1)

    async def test_a_worker_ends_expired_holds(
        self, holders: tuple[Holder, Holder], namespace: Namespace, clock: FakeClock
    ) -> None:
        """Many in one transaction, earliest first, whichever way they go; and no others."""
        one, other = holders
        store = one.process.store
        holds = store.capabilities.holds
        assert holds is not None
        number = ENDED_AT_ONCE_MAX + 20
        for each in range(number):
            amount = -1 if each % 4 == 0 else 1
            await one.hold(amount, Token(nonce(each + 1), clock.now_us()))
        late = (await one.hold(5, Token(nonce(1_000), clock.now_us()), lasts_us=2 * LASTS)).hold
        await one.settle((await one.hold(7, Token(nonce(1_001), clock.now_us()))).hold.id, 7)
        assert await holds.expire(namespace, "c") == 0
        clock.advance(LASTS)
        assert await holds.expired(9) == [(namespace.id, "c")]
        assert await holds.expire(namespace, "c") == ENDED_AT_ONCE_MAX
        assert len(await other.open()) == 21
        assert await expire(store, clock) == (20, None)
        assert await other.open() == [late.id]
        assert await one.shown() == (7, 5, 0)
        assert await holds.expired(9) == []

    async def test_a_transaction_ends_a_bounded_number_of_holds(
        self, holders: tuple[Holder, Holder], namespace: Namespace, clock: FakeClock
    ) -> None:
        """What needs more room is answered that it is not known, and succeeds when it is sent
        again: the ends that were written stay."""
        one, other = holders
        number = ENDED_AT_ONCE_MAX + 20
        for each in range(number):
            await one.hold(1, Token(nonce(each + 1), clock.now_us()), at_most=number)
        clock.advance(LASTS)
        token = Token(nonce(1_000), clock.now_us())
        with pytest.raises(CounterError) as error:
            await other.hold(number, token, at_most=number)
        assert (error.value.status, error.value.applied) == (503, None)
        assert len(await one.open()) == number - ENDED_AT_ONCE_MAX
        await other.hold(number, token, at_most=number)
        assert await one.shown() == (0, number, 0)

    async def test_a_hold_is_extended(
        self, holders: tuple[Holder, Holder], tokens: Iterator[Token], clock: FakeClock
    ) -> None:
        """Never to an earlier time, and not past the longest life of a hold."""
        one, other = holders
        hold = (await one.hold(1, next(tokens))).hold
        began_us = hold.id.token.generation_time_us
        assert (await other.extend(hold.id, SECOND)).expires_us == hold.expires_us
        longest_us = DATASET.retention_us // HOLD_LIVES_OF_RETENTION
        clock.advance(LASTS - 1)
        assert (await other.extend(hold.id, LASTS)).expires_us == clock.now_us() + LASTS
        await one.process.roll_up()
        found = await other.extend(hold.id, longest_us)
        assert found.expires_us == began_us + longest_us
        for lasts_us in (SECOND - 1, longest_us + 1):
            with pytest.raises(InvalidBodyError):
                await one.extend(hold.id, lasts_us)
        clock.advance(longest_us - LASTS + 1)
        with pytest.raises(HoldExpiredError):
            await one.extend(hold.id, longest_us)

    async def test_a_cancel_releases_a_hold(
        self, holders: tuple[Holder, Holder], tokens: Iterator[Token], clock: FakeClock
    ) -> None:
        """Or sees to it that there never is one. One that was settled or has expired refuses it."""
        one, other = holders
        held, never, settled, expired, released = (next(tokens) for _ in range(5))
        for token in (held, settled, released):
            await one.hold(3, token)
        await one.settle(HoldId("c", settled), 2)
        await one.release(HoldId("c", released))
        for _ in range(2):
            assert await other.cancel(3, held)
            assert await other.cancel(3, released)
            assert not await other.cancel(3, never)
            with pytest.raises(HoldSettledError):
                await other.cancel(3, settled)
        await one.hold(4, expired)
        clock.advance(LASTS)
        await one.process.roll_up()
        for each in holders:
            with pytest.raises(HoldExpiredError):
                await each.cancel(4, expired)
            with pytest.raises(TokenConflictError):
                await each.cancel(5, held)
            assert await each.cancel(3, held)
            with pytest.raises(TokenCancelledError):
                await each.hold(3, never)
            with pytest.raises(HoldReleasedError):
                await each.hold(3, held)
            assert await each.shown() == (2, 0, 0)

    async def test_a_refused_hold_is_cancelled(
        self, holders: tuple[Holder, Holder], tokens: Iterator[Token]
    ) -> None:
        one, other = holders
        token = next(tokens)
        await one.refused(3, token, at_most=2)
        await other.api.namespaces.refresh()
        wanted = Wanted(3, LASTS, Bounds(at_most=2))
        cancelled = await other.api.cancel_hold(other.namespace, "c", wanted, token)
        assert not cancelled.was_counted
        with pytest.raises(TokenCancelledError):
            await one.hold(3, token, at_most=2)

    async def test_a_clear_leaves_holds_open(
        self, holders: tuple[Holder, Holder], tokens: Iterator[Token], clock: FakeClock
    ) -> None:
        """So does a delete; a settle after it counts, and the name is listed again."""
        one, other = holders
        first = (await one.hold(5, next(tokens), at_most=10)).hold.id
        second = (await one.hold(5, next(tokens), at_most=10)).hold.id
        await one.api.clear(one.namespace, "c", next(tokens))
        assert await other.refused(1, next(tokens), at_most=10) == (0, 10, 0)
        clock.advance(SECOND)
        await other.settle(first, 5)
        assert await one.shown() == (5, 5, 0)
        await one.process.delete(one.namespace, "c", Token(nonce(99), clock.now_us()))
        clock.advance(SECOND)
        await other.settle(second, 4)
        for _ in range(2):
            assert await one.shown() == (4, 0, 0)
            assert await one.process.names(one.namespace) == ["c"]
            clock.advance(MINUTE)
            await one.process.roll_up()

    async def test_what_is_held_is_no_counter_of_its_own(
        self, holders: tuple[Holder, Holder], tokens: Iterator[Token]
    ) -> None:
        one, other = holders
        for amount in (5, -5):
            await one.hold(amount, next(tokens))
            await one.hold(amount, next(tokens), counter="d")
        assert await other.process.names(other.namespace) == ["c", "d"]
        assert await other.shown("d") == (0, 5, -5)

    async def test_a_hold_that_is_not_known_may_come(
        self, holders: tuple[Holder, Holder], tokens: Iterator[Token], clock: FakeClock
    ) -> None:
        """A late one never does."""
        one, other = holders
        token, late = next(tokens), next(tokens)
        for error in await failed(
            HoldUnknownError,
            other.settle(HoldId("c", token), 1),
            other.release(HoldId("c", token)),
            other.extend(HoldId("c", token), LASTS),
            other.api.holds.get(other.namespace, HoldId("c", token)),
        ):
            assert error.applied is None
        await one.hold(1, token)
        await other.settle(HoldId("c", token), 1)
        await one.api.add(one.namespace, "d", 1, next(tokens))
        with pytest.raises(HoldUnknownError):
            await other.release(HoldId("d", next(tokens)))
        clock.advance(5 * MINUTE)
        await one.process.roll_up()
        with pytest.raises(TokenTooOldError) as too_old:
            await one.hold(1, late)
        assert too_old.value.applied is False

    async def test_a_hold_of_the_future_ends_after_it_began(
        self, holders: tuple[Holder, Holder], namespace: Namespace, clock: FakeClock
    ) -> None:
        """However far ahead its token is, and wherever the rollup is."""
        one, other = holders
        ahead_us = namespace.settings.future_limit_us
        hold = (await one.hold(2, Token(nonce(1), clock.now_us() + ahead_us))).hold.id
        ended = (await other.settle(hold, 1)).hold.end
        assert ended is not None
        assert ended.time_us >= hold.token.generation_time_us
        for _ in range(3):
            clock.advance(MINUTE)
            await one.process.roll_up()
            assert await other.shown() == (1, 0, 0)

    async def test_invalid_holds_are_refused(
        self, holders: tuple[Holder, Holder], tokens: Iterator[Token]
    ) -> None:
        one, _ = holders
        for amount, lasts_us in (
            *((0, LASTS), (INT64_MIN, LASTS)),
            *((1, SECOND - 1), (1, DATASET.retention_us)),
        ):
            with pytest.raises(InvalidBodyError):
                await one.hold(amount, next(tokens), lasts_us=lasts_us)
        least = (await one.hold(-INT64_MAX, next(tokens))).hold.id
        await one.release(least)
        hold = (await one.hold(INT64_MAX, next(tokens))).hold.id
        with pytest.raises(InvalidBodyError):
            await one.settle(hold, -1)
        await one.hold(INT64_MAX, next(tokens))
        assert await one.shown() == (0, 2 * INT64_MAX, 0)
        assert (await one.settle(hold, 0)).count.held == (INT64_MAX, 0)

    async def test_the_end_is_known_as_long_as_events_are(
        self, holders: tuple[Holder, Holder], tokens: Iterator[Token], clock: FakeClock
    ) -> None:
        """After that it is not known; whatever is purged, no answer turns."""
        one, other = holders
        hold = (await one.hold(2, next(tokens))).hold.id
        await one.settle(hold, 1)
        left = (await one.hold(1, next(tokens))).hold.id
        for _ in range(80):
            clock.advance(MINUTE)
            await one.process.roll_up()
            for each, kind in ((hold, HoldSettledError), (left, HoldExpiredError)):
                with pytest.raises((kind, TokenTooOldError)):
                    await other.release(each)
            assert await other.shown() == (1, 0, 0)
        with pytest.raises(TokenTooOldError):
            await other.release(hold)

    async def test_no_client_takes_the_place_of_an_end(
        self, holders: tuple[Holder, Holder], namespace: Namespace, clock: FakeClock
    ) -> None:
        """Its nonce can be computed, and its time foreseen: by an add, or by an atomic one."""
        one, other = holders
        ahead = Token(nonce(1), clock.now_us() + namespace.settings.future_limit_us)
        hold = HoldId("c", ahead)
        taken = Token(nonce_of_end(hold), ahead.generation_time_us)
        await one.api.add_atomic(namespace, [("c", 3), ("d", 1)], taken)
        await one.api.add(namespace, "c", 4, taken)
        await one.hold(2, ahead)
        await other.settle(hold, 1)
        for _ in range(2):
            assert await one.shown() == (8, 0, 0)
            assert (await other.settle(hold, 1)).hold.end is not None
            clock.advance(MINUTE)
            await one.process.roll_up()

    async def test_a_key_is_remembered_as_long_as_its_hold_may_live(
        self, holders: tuple[Holder, Holder], namespace: Namespace, clock: FakeClock
    ) -> None:
        """However short the namespace's own time is: a retry begins no other hold, and a cancel
        finds it."""
        one, other = holders
        settings = replace(namespace.settings, key_ttl_us=MINUTE)
        changed = await one.api.namespaces.update(namespace, settings)
        one.namespace = other.namespace = changed
        hold = (await one.hold(5, "key", lasts_us=5 * MINUTE)).hold
        clock.advance(3 * MINUTE)
        await one.process.roll_up()
        assert (await other.hold(5, "key", lasts_us=5 * MINUTE)).hold == hold
        assert await one.shown() == (0, 5, 0)
        wanted = Wanted(5, 5 * MINUTE)
        cancelled = await other.api.cancel_hold(changed, "c", wanted, "key")
        assert cancelled.was_counted
        assert await one.shown() == (0, 0, 0)
