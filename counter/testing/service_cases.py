"""What the service makes of every store: deletes, cancels, and CloudEvents that are delivered
again."""

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from itertools import count

import pytest

from counter.bounds import Bounds, terms_if_bounded
from counter.core.results import Add, Added, Cancelled, Credential, Item, Keyed
from counter.core.service import CounterService
from counter.errors import (
    BoundReachedError,
    TokenCancelledError,
    TokenConflictError,
    TokenPendingError,
    TokenTooOldError,
)
from counter.limits import MINUTE, SECOND
from counter.ports import Store
from counter.storage.shared.memory_cache import MemoryCache
from counter.testing.cases import StoreCases, make_namespace, nonce
from counter.testing.clock import FakeClock
from counter.types import Namespace, Token
from rollup.worker import RollupWorker


class Process:
    """An API process and a worker, which remember what they saw, over a store."""

    def __init__(self, store: Store, clock: FakeClock) -> None:
        cache = MemoryCache(clock)
        self.store = store
        self.clock = clock
        self.api = CounterService(store, cache, clock)
        self.worker = RollupWorker(store, cache, clock, self.api.namespaces)

    async def events(self, namespace: Namespace, *events: Keyed) -> list[bool | None]:
        """Deliver *events*; return which of them counted before."""
        await self.api.namespaces.refresh()
        replayed: list[bool | None] = []
        for outcome in await self.api.add_keyed(namespace, events):
            assert isinstance(outcome, list), outcome
            assert len({each.replayed for each in outcome}) == 1
            replayed.append(outcome[0].replayed)
        return replayed

    async def add(self, namespace: Namespace, counter: str, token: Credential) -> Added:
        await self.api.namespaces.refresh()
        return await self.api.add(namespace, counter, 1, token)

    async def bounded(
        self,
        namespace: Namespace,
        counter: str,
        delta: int,
        credential: Credential,
        at_least: int | None = None,
        at_most: int | None = None,
    ) -> Added:
        await self.api.namespaces.refresh()
        terms = terms_if_bounded(delta, at_least, at_most)
        return await self.api.add(namespace, counter, delta, credential, terms=terms)

    async def refused(
        self,
        namespace: Namespace,
        counter: str,
        delta: int,
        credential: Credential,
        at_least: int | None = None,
        at_most: int | None = None,
    ) -> BoundReachedError:
        with pytest.raises(BoundReachedError) as error:
            await self.bounded(namespace, counter, delta, credential, at_least, at_most)
        assert (error.value.applied, error.value.retry) == (False, "never")
        return error.value

    async def delete(self, namespace: Namespace, counter: str, token: Token) -> Added:
        await self.api.namespaces.refresh()
        return await self.api.delete(namespace, counter, token)

    async def cancel(
        self,
        namespace: Namespace,
        counter: str,
        credential: Credential,
        delta: int | None = 1,
        operation: str = "add",
    ) -> Cancelled:
        return await self.cancelled(
            lambda: self.api.cancel(namespace, operation, counter, delta, credential)
        )

    async def cancelled(self, cancel: Callable[[], Awaitable[Cancelled]]) -> Cancelled:
        """Return what *cancel* does, after the wait that a store without transactions needs."""
        await self.api.namespaces.refresh()
        try:
            return await cancel()
        except TokenPendingError as error:
            assert self.store.separate_writes is not None
            self.clock.advance(error.retry_after_us or 0)
        await self.api.namespaces.refresh()
        return await cancel()

    async def roll_up(self) -> None:
        """Roll up all windows that are closed, and what cancels ask for."""
        for _ in range(3):
            await self.worker._namespaces.refresh()
            await self.worker.tick()

    async def counts(self, namespace: Namespace, *counters: str) -> list[int]:
        await self.api.namespaces.refresh()
        return [each.count for each in await self.api.reader.read(namespace, counters, 0)]

    async def names(self, namespace: Namespace) -> list[str]:
        return list(await self.store.control.counters(namespace, prefix="", after=None, limit=100))


class Processes:
    """Two processes, each with what it remembers, over one store."""

    @pytest.fixture
    async def namespace(self, store: Store) -> Namespace:
        """One whose tokens are late soon."""
        return await make_namespace(store, accept_limit_us=5 * SECOND)

    @pytest.fixture
    def processes(self, store: Store, clock: FakeClock) -> tuple[Process, Process]:
        return Process(store, clock), Process(store, clock)


class ServiceCases(Processes, StoreCases):
    """What is deleted or delivered again."""

    async def test_an_event_that_is_delivered_again_after_a_delete_does_not_count_again(
        self, processes: tuple[Process, Process], namespace: Namespace, clock: FakeClock
    ) -> None:
        """By whichever process; at once, after a rollup, and when its token is late."""
        one, other = processes
        event = Keyed("/till/3", "1", [("c", 2), ("all", 1), ("c", 4)])
        second = Keyed("/till/3", "2", [("c", 8), ("all", 1)])
        assert await one.events(namespace, event) in ([False], [None])
        assert await other.events(namespace, event, event) == [True, True]
        clock.advance(SECOND)
        await other.delete(namespace, "c", Token(nonce(1), clock.now_us()))
        for pause_us in (0, SECOND, MINUTE, 5 * MINUTE):
            clock.advance(pause_us)
            await other.roll_up()
            for each in processes:
                assert await each.events(namespace, event) == [True]
                assert await each.counts(namespace, "c", "all") == [0, 1]
            assert await one.names(namespace) == ["all"]
        # One of two copies in a batch is new.
        first, again, copy = await one.events(namespace, second, event, second)
        assert again is True
        assert True in (first, copy) or None in (first, copy)
        assert await other.counts(namespace, "c", "all") == [8, 2]

    async def test_an_event_with_other_content_is_a_conflict_after_a_delete(
        self, processes: tuple[Process, Process], namespace: Namespace, clock: FakeClock
    ) -> None:
        one, other = processes
        await one.events(namespace, Keyed("/till/3", "1", [("c", 2)]))
        await other.delete(namespace, "c", Token(nonce(1), clock.now_us() + 1))
        for pause_us in (0, 5 * MINUTE):
            clock.advance(pause_us)
            await other.roll_up()
            await one.api.namespaces.refresh()
            [outcome] = await one.api.add_keyed(namespace, [Keyed("/till/3", "1", [("c", 3)])])
            assert isinstance(outcome, TokenConflictError)
            assert await one.counts(namespace, "c") == [0]
            assert await one.names(namespace) == []

    async def test_a_process_that_remembers_a_deleted_counter_counts_from_0(
        self, processes: tuple[Process, Process], namespace: Namespace, clock: FakeClock
    ) -> None:
        """It has the name, the mark and the count in memory; the rollup lists the name again."""
        one, other = processes
        for turn in range(1, 4):
            for _ in range(turn):
                clock.advance(1)
                await one.add(namespace, "c", Token(nonce(9), clock.now_us()))
            assert await one.counts(namespace, "c") == [turn]
            delete = Token(nonce(turn), clock.now_us())
            assert (await other.delete(namespace, "c", delete)).replayed in (False, None)
            assert await one.counts(namespace, "c") == [0]
            clock.advance(1)
            await one.add(namespace, "c", Token(nonce(8), clock.now_us()))
            assert (await other.delete(namespace, "c", delete)).replayed is not False
            assert await one.counts(namespace, "c") == await other.counts(namespace, "c") == [1]
            clock.advance(MINUTE)
            await other.roll_up()
            await one.roll_up()
            assert await one.names(namespace) == ["c"]
            assert (await one.api.reader.read_one(namespace, "c", MINUTE)).count == 1
            await one.delete(namespace, "c", Token(nonce(7), clock.now_us()))
            assert await other.names(namespace) == []


class ServiceCancelCases(Processes, StoreCases):
    """A token that was cancelled counts nothing, and every retry says so."""

    async def test_an_add_is_cancelled_exactly_once(
        self, processes: tuple[Process, Process], namespace: Namespace, clock: FakeClock
    ) -> None:
        """Before and after its window was rolled up; by retries at either process, too."""
        one, other = processes
        for turn, pause_us in enumerate((0, MINUTE), 1):
            await one.add(namespace, "c", Token(nonce(1), clock.now_us()))
            token = Token(nonce(2), clock.now_us())
            await one.add(namespace, "c", token)
            clock.advance(pause_us)
            await one.roll_up()
            first = await other.cancel(namespace, "c", token)
            assert first == Cancelled(token.generation_time_us, True)
            for later_us in (0, SECOND, MINUTE, 5 * MINUTE):
                clock.advance(later_us)
                for each in processes:
                    assert await each.counts(namespace, "c") == [turn]
                    assert await each.cancel(namespace, "c", token) == first
                    with pytest.raises(TokenCancelledError):
                        await each.add(namespace, "c", token)
                await one.roll_up()
            [rolled_up] = await one.api.reader.read(namespace, ["c"], MINUTE)
            assert rolled_up.count == turn

    async def test_an_add_that_never_arrived_is_cancelled(
        self, processes: tuple[Process, Process], namespace: Namespace, clock: FakeClock
    ) -> None:
        """On time, ahead of time, late, and after it was refused."""
        one, other = processes
        for number, ahead_us, pause_us in ((1, 0, 0), (2, SECOND, 0), (3, 0, MINUTE)):
            token = Token(nonce(number), clock.now_us() + ahead_us)
            clock.advance(pause_us)
            first = await one.cancel(namespace, "c", token)
            assert first == Cancelled(token.generation_time_us, False)
            for each in processes:
                with pytest.raises(TokenCancelledError):
                    await each.add(namespace, "c", token)
                assert await each.cancel(namespace, "c", token) == first
                assert await each.counts(namespace, "c") == [0]
        token = Token(nonce(4), clock.now_us())
        clock.advance(MINUTE)
        with pytest.raises(TokenTooOldError):
            await other.add(namespace, "c", token)
        assert not (await one.cancel(namespace, "c", token)).was_counted
        with pytest.raises(TokenCancelledError):
            await other.add(namespace, "c", token)

    async def test_another_payload_cancels_nothing(
        self, processes: tuple[Process, Process], namespace: Namespace, clock: FakeClock
    ) -> None:
        """Under a token, and under a key, which stays as it was."""
        one, other = processes
        for credential in (Token(nonce(1), clock.now_us()), "order-7"):
            await one.add(namespace, "c", credential)
            for pause_us in (0, MINUTE):
                clock.advance(pause_us)
                for delta in (2, None):
                    with pytest.raises(TokenConflictError):
                        await other.cancel(namespace, "c", credential, delta)
                assert (await one.add(namespace, "c", credential)).replayed in (True, None)
        assert await one.counts(namespace, "c") == [2]

    async def test_a_cancelled_key_gets_no_other_time(
        self, processes: tuple[Process, Process], namespace: Namespace, clock: FakeClock
    ) -> None:
        """Whether its add counted, was refused, or never arrived; and another operation's is
        another key."""
        one, other = processes
        await one.add(namespace, "c", "counted")
        assert (await other.cancel(namespace, "c", "counted")).was_counted
        assert not (await other.cancel(namespace, "c", "never")).was_counted
        for pause_us in (0, MINUTE, 10 * MINUTE):
            clock.advance(pause_us)
            for key, was_counted in (("counted", True), ("never", False)):
                for each in processes:
                    with pytest.raises(TokenCancelledError):
                        await each.add(namespace, "c", key)
                    cancelled = await each.cancel(namespace, "c", key)
                    assert cancelled.was_counted is was_counted
            assert await one.counts(namespace, "c") == [0]
            await one.roll_up()
        await one.add(namespace, "d", "never")
        assert await one.counts(namespace, "c", "d") == [0, 1]

    async def test_a_clear_and_a_delete_are_cancelled(
        self, processes: tuple[Process, Process], namespace: Namespace, clock: FakeClock
    ) -> None:
        """What they erased counts again, and the name is on the list again."""
        one, other = processes
        await one.add(namespace, "c", Token(nonce(1), clock.now_us()))
        clock.advance(1)
        clear, delete = Token(nonce(2), clock.now_us()), Token(nonce(3), clock.now_us() + 1)
        clock.advance(2)
        await one.api.clear(namespace, "c", clear)
        await one.delete(namespace, "c", delete)
        for each in processes:
            assert await each.counts(namespace, "c") == [0]
            assert await each.names(namespace) == []
        cancelled = await other.cancel(namespace, "c", delete, None, "delete")
        assert cancelled == Cancelled(delete.generation_time_us, True)
        assert await one.counts(namespace, "c") == [0]
        assert (await one.cancel(namespace, "c", clear, None, "clear")).was_counted
        for pause_us in (0, MINUTE, MINUTE):
            clock.advance(pause_us)
            await one.roll_up()
            for each in processes:
                assert await each.counts(namespace, "c") == [1]
                with pytest.raises(TokenCancelledError):
                    await each.delete(namespace, "c", delete)
        assert await one.names(namespace) == await other.names(namespace) == ["c"]

    async def test_a_cancelled_delete_leaves_what_an_earlier_one_did(
        self, processes: tuple[Process, Process], namespace: Namespace, clock: FakeClock
    ) -> None:
        """The count stays 0. The name is listed, because only the note of the latest delete is
        kept; a new delete hides it."""
        one, other = processes
        await one.add(namespace, "c", Token(nonce(1), clock.now_us()))
        deletes = [Token(nonce(2), clock.now_us() + 1), Token(nonce(3), clock.now_us() + 2)]
        clock.advance(3)
        for each in deletes:
            await one.delete(namespace, "c", each)
        await other.cancel(namespace, "c", deletes[1], None, "delete")
        clock.advance(MINUTE)
        await one.roll_up()
        assert await one.counts(namespace, "c") == [0]
        assert await other.names(namespace) == ["c"]
        await one.delete(namespace, "c", Token(nonce(4), clock.now_us()))
        clock.advance(MINUTE)
        await one.roll_up()
        assert await other.names(namespace) == []

    async def test_an_atomic_add_and_an_event_are_cancelled_as_a_whole(
        self, processes: tuple[Process, Process], namespace: Namespace, clock: FakeClock
    ) -> None:
        one, other = processes
        items, event = [("a", 1), ("b", 2), ("a", 4)], Keyed("/till/3", "1", [("a", 8), ("b", 16)])
        token = Token(nonce(1), clock.now_us())
        await one.api.add_atomic(namespace, items, token)
        await one.events(namespace, event)
        with pytest.raises(TokenConflictError):
            await one.cancelled(lambda: one.api.cancel_atomic(namespace, items[:2], token))
        cancelled = await one.cancelled(lambda: one.api.cancel_atomic(namespace, items, token))
        assert cancelled.was_counted
        assert await other.counts(namespace, "a", "b") == [8, 16]
        of_event = (namespace, event.items, event.key)
        cancelled = await other.cancelled(
            lambda: other.api.cancel_atomic(*of_event, operation="event", scope=event.scope)
        )
        assert cancelled.was_counted
        for pause_us in (0, MINUTE, MINUTE):
            clock.advance(pause_us)
            await other.roll_up()
            assert await one.counts(namespace, "a", "b") == [0, 0]
            with pytest.raises(TokenCancelledError):
                await one.api.add_atomic(namespace, items, token)
            [outcome] = await one.api.add_keyed(namespace, [event])
            assert isinstance(outcome, TokenCancelledError)

    async def test_a_token_is_cancelled_as_what_it_was_used_for(
        self, processes: tuple[Process, Process], namespace: Namespace, clock: FakeClock
    ) -> None:
        """An item of an atomic add is none, and neither is a single add an atomic one."""
        one, other = processes
        single, whole = (Token(nonce(number), clock.now_us()) for number in (1, 2))
        await one.add(namespace, "a", single)
        await one.api.add_atomic(namespace, [("a", 1), ("b", 2)], whole)
        for pause_us in (0, MINUTE):
            clock.advance(pause_us)
            with pytest.raises(TokenConflictError, match="atomic/cancel"):
                await other.cancel(namespace, "a", whole)
            with pytest.raises(TokenConflictError, match="a single add"):
                await other.cancelled(
                    lambda: other.api.cancel_atomic(namespace, [("a", 1)], single)
                )
        assert await one.counts(namespace, "a", "b") == [2, 2]


class ServiceBoundCases(Processes, StoreCases):
    """A bounded add is counted or refused once and for all, and no count passes its bound."""

    @pytest.fixture
    def tokens(self, clock: FakeClock) -> Iterator[Token]:
        return (Token(nonce(number), clock.now_us()) for number in count(1))

    async def test_adds_are_refused_at_the_bound(
        self, processes: tuple[Process, Process], namespace: Namespace, tokens: Iterator[Token]
    ) -> None:
        """By either process, up and down; an add towards the bound always counts."""
        one, other = processes
        await one.add(namespace, "c", next(tokens))
        await other.bounded(namespace, "c", 2, next(tokens), at_most=3)
        refused = await other.refused(namespace, "c", 1, next(tokens), at_most=3)
        assert refused.fields == {"counter": "c", "count": 3, "at_most": 3, "room": 0}
        refused = await one.refused(namespace, "c", -2, next(tokens), at_least=2)
        assert refused.fields == {"counter": "c", "count": 3, "at_least": 2, "room": 1}
        await other.bounded(namespace, "c", -1, next(tokens), at_least=2)
        await one.bounded(namespace, "c", -1, next(tokens), at_most=0)
        await other.bounded(namespace, "c", 1, next(tokens), at_least=9)
        await other.bounded(namespace, "c", 0, next(tokens), at_least=9, at_most=9)
        assert await one.counts(namespace, "c") == [2]

    async def test_a_retry_gets_the_first_answer(
        self,
        processes: tuple[Process, Process],
        namespace: Namespace,
        tokens: Iterator[Token],
        clock: FakeClock,
    ) -> None:
        """Whatever the count is then, however late, and under an arbitrary key, too."""
        one, other = processes
        await one.bounded(namespace, "c", 2, "accepted", at_most=2)
        accepted, refused = next(tokens), next(tokens)
        assert not (await one.bounded(namespace, "d", 2, accepted, at_most=2)).replayed
        first = await other.refused(namespace, "d", 1, refused, at_most=2)
        await one.refused(namespace, "c", 1, "refused", at_most=2)
        for delta, pause_us in ((-2, 0), (3, SECOND), (0, MINUTE), (0, 5 * MINUTE)):
            clock.advance(pause_us)
            await one.roll_up()
            for name in "cd":
                await one.api.add(namespace, name, delta, Token(nonce(99), clock.now_us()))
            for each in processes:
                assert (await each.bounded(namespace, "d", 2, accepted, at_most=2)).replayed
                assert (await each.bounded(namespace, "c", 2, "accepted", at_most=2)).replayed
                again = await each.refused(namespace, "d", 1, refused, at_most=2)
                assert (again.detail, again.fields) == (first.detail, first.fields)
                await each.refused(namespace, "c", 1, "refused", at_most=2)
        assert await one.counts(namespace, "c", "d") == [3, 3]

    async def test_the_bounds_belong_to_the_payload(
        self, processes: tuple[Process, Process], namespace: Namespace, clock: FakeClock
    ) -> None:
        """Of an accepted add and of a refused one, at once and late."""
        one, other = processes
        accepted, refused = (Token(nonce(number), clock.now_us()) for number in (1, 2))
        await one.bounded(namespace, "c", 1, accepted, at_most=1)
        await one.refused(namespace, "c", 1, refused, at_most=1)
        for pause_us in (0, MINUTE):
            clock.advance(pause_us)
            for token in (accepted, refused):
                for delta, bounds in ((1, {}), (2, {"at_most": 1}), (1, {"at_most": 2})):
                    with pytest.raises(TokenConflictError):
                        await other.bounded(namespace, "c", delta, token, **bounds)
                with pytest.raises(TokenConflictError):
                    await other.bounded(namespace, "c", 1, token, at_least=0, at_most=1)
        assert await one.counts(namespace, "c") == [1]

    async def test_adds_of_one_write_see_each_other(
        self, processes: tuple[Process, Process], namespace: Namespace, clock: FakeClock
    ) -> None:
        """Each in its turn; one that comes twice is decided once, and a plain one counts, too."""
        api, now_us = processes[0].api, clock.now_us()
        adds = [
            Add("c", 1, Token(nonce(n), now_us), terms_if_bounded(1, None, 5)) for n in range(9)
        ]
        plain = [Add("c", 1, Token(nonce(n), now_us)) for n in (50, 51)]
        sent = [*adds[:3], adds[1], *plain, *adds[3:], adds[8]]
        for turn in range(2):
            outcomes = await api.add_many(namespace, sent)
            counted = [isinstance(each, Added) for each in outcomes]
            assert counted == [True] * 6 + [False] * 7
            assert [each.replayed for each in outcomes if isinstance(each, Added)] == (
                [False, False, False, True, False, False] if turn == 0 else [True] * 6
            )
            assert {each.fields["count"] for each in outcomes if not isinstance(each, Added)} == {5}
            assert await processes[1].counts(namespace, "c") == [5]

    @pytest.mark.parametrize("sign", [1, -1])
    async def test_adds_of_one_write_share_the_room(
        self,
        processes: tuple[Process, Process],
        namespace: Namespace,
        tokens: Iterator[Token],
        sign: int,
    ) -> None:
        """A retry among them takes none, and is no new add."""
        terms = terms_if_bounded(sign, *((None, 4) if sign > 0 else (-4, None)))
        first, *others, last = [Add("c", sign, next(tokens), terms) for _ in range(6)]
        counted: list[bool | None] = []
        for sent in ([first], [first, *others[:2]], [*others[2:], last]):
            outcomes = await processes[0].api.add_many(namespace, sent)
            counted += [each.replayed if isinstance(each, Added) else None for each in outcomes]
        assert counted == [False, True, False, False, False, None, None]
        assert await processes[1].counts(namespace, "c") == [4 * sign]

    async def test_the_namespace_has_bounds(
        self, processes: tuple[Process, Process], namespace: Namespace, tokens: Iterator[Token]
    ) -> None:
        """From the moment when the change is answered, for every add, with or without its own. An
        add that was decided before or meanwhile keeps its answer."""
        one, other = processes
        before, refused = next(tokens), next(tokens)
        await other.api.namespaces.refresh()
        await one.api.add(namespace, "c", -1, before)
        await one.api.namespaces.refresh()
        settings = replace(namespace.settings, bounds=Bounds(at_least=0, at_most=5))
        changed = await one.api.namespaces.update(namespace, settings)
        with pytest.raises(BoundReachedError) as error:
            # This process does not know it yet.
            await other.api.add(namespace, "c", -2, refused)
        assert error.value.fields == {"counter": "c", "count": -1, "at_least": 0, "room": 0}
        assert "at_least 0 of the namespace" in error.value.detail
        assert (await one.api.add(changed, "c", -1, before)).replayed
        await one.api.add(changed, "c", 5, next(tokens))
        error_of_its_own = await one.refused(changed, "c", 2, next(tokens), at_most=4)
        assert error_of_its_own.fields["at_most"] == 4
        assert (await one.refused(changed, "c", 2, next(tokens), at_most=9)).fields["at_most"] == 5
        [outcome] = await one.api.add_many(changed, [Add("c", 2, next(tokens))])
        assert isinstance(outcome, BoundReachedError)
        with pytest.raises(BoundReachedError):
            await one.api.add_atomic(changed, [("d", 1), ("c", 2)], next(tokens))
        await one.api.namespaces.update(changed, namespace.settings)
        for each in processes:
            await each.api.namespaces.refresh()
            with pytest.raises(BoundReachedError):
                await each.api.add(namespace, "c", -2, refused)
            with pytest.raises(TokenConflictError):
                await each.api.add(namespace, "c", -3, refused)
        await other.api.add(namespace, "c", -9, next(tokens))
        assert await one.counts(namespace, "c", "d") == [-5, 0]

    async def test_an_atomic_add_is_refused_as_a_whole(
        self,
        processes: tuple[Process, Process],
        namespace: Namespace,
        tokens: Iterator[Token],
        clock: FakeClock,
    ) -> None:
        """By the sum of its items to one counter; every retry names the counter, also late."""
        one, other = processes
        await one.add(namespace, "b", next(tokens))
        room = terms_if_bounded(2, None, 4)
        refused, accepted = next(tokens), next(tokens)
        items = [Item("a", 5), Item("b", 2, room), Item("b", 2, room), Item("c", 1)]
        fewer = items[1:2] + items[3:]
        assert not (await one.api.add_atomic(namespace, fewer, accepted))[0].replayed
        for pause_us in (0, SECOND, MINUTE, 5 * MINUTE):
            clock.advance(pause_us)
            for each in processes:
                await each.api.namespaces.refresh()
                with pytest.raises(BoundReachedError) as error:
                    await each.api.add_atomic(namespace, items[::-1], refused)
                assert error.value.fields == {"counter": "b", "count": 3, "at_most": 4, "room": 1}
                assert "+4" in error.value.detail
                assert (await each.api.add_atomic(namespace, fewer, accepted))[0].replayed
                with pytest.raises(TokenConflictError):
                    await each.api.add_atomic(namespace, [("a", 5), ("b", 2), ("c", 1)], refused)
            await one.roll_up()
        assert await other.counts(namespace, "a", "b", "c") == [0, 3, 1]

    async def test_a_cancel_gives_room_back(
        self, processes: tuple[Process, Process], namespace: Namespace, clock: FakeClock
    ) -> None:
        """At once, also of an add that is rolled up; a refusal that is cancelled counted nothing,
        even if it was resolved before."""
        one, other = processes
        for number, pause_us in ((10, 0), (20, MINUTE)):
            accepted, refused, resolved, atomic = (
                Token(nonce(number + n), clock.now_us()) for n in range(4)
            )
            await one.bounded(namespace, "c", 1, accepted, at_most=1)
            await one.refused(namespace, "c", 1, refused, at_most=1)
            await one.refused(namespace, "c", 1, resolved, at_most=1)
            items = [Item("c", 1, terms_if_bounded(1, None, 1)), Item("d", 1)]
            with pytest.raises(BoundReachedError):
                await one.api.add_atomic(namespace, items, atomic)
            clock.advance(pause_us)
            await one.roll_up()
            await one.refused(namespace, "c", 1, resolved, at_most=1)
            terms = terms_if_bounded(1, None, 1)
            for token, was_counted in ((accepted, True), (refused, False), (resolved, False)):
                await other.api.namespaces.refresh()
                cancelled = await other.api.cancel(namespace, "add", "c", 1, token, terms=terms)
                assert cancelled.was_counted is was_counted
                with pytest.raises(TokenCancelledError):
                    await one.bounded(namespace, "c", 1, token, at_most=1)
            assert not (await other.api.cancel_atomic(namespace, items, atomic)).was_counted
            later = Token(nonce(number + 5), clock.now_us())
            await one.bounded(namespace, "c", 1, later, at_most=1)
            await other.api.cancel(namespace, "add", "c", 1, later, terms=terms)
            assert await one.counts(namespace, "c", "d") == [0, 0]

    async def test_a_clear_makes_room(
        self, processes: tuple[Process, Process], namespace: Namespace, clock: FakeClock
    ) -> None:
        """From its own time on, whether it is rolled up or in the tail; what a later clear has
        erased is not refused, because it changes nothing."""
        one, other = processes
        before = Token(nonce(1), clock.now_us())
        for number, pause_us in ((10, 0), (20, SECOND), (30, MINUTE), (40, SECOND)):
            clock.advance(pause_us)
            await one.roll_up()
            now_us = clock.now_us()
            await one.bounded(namespace, "c", 2, Token(nonce(number), now_us), at_most=2)
            await one.refused(namespace, "c", 1, Token(nonce(number + 1), now_us), at_most=2)
            await other.api.clear(namespace, "c", Token(nonce(number + 2), now_us + 1))
            if number == 10:
                await other.bounded(namespace, "c", 9, before, at_most=2)
            for n in (3, 4):
                token = Token(nonce(number + n), now_us + n)
                await one.bounded(namespace, "c", 1, token, at_most=2)
            token = Token(nonce(number + 5), now_us + 5)
            await other.refused(namespace, "c", 1, token, at_most=2)
            assert await one.counts(namespace, "c") == [2]
            await other.api.clear(namespace, "c", Token(nonce(number + 6), now_us + 6))
            clock.advance(7)
        assert await one.counts(namespace, "c") == [0]
