"""The decision store's contract: what was decided stays, a reserved time is one for all."""

from counter.limits import SECOND
from counter.ports import Store
from counter.testing.cases import (
    NOW,
    StoreCases,
    add,
    atomic,
    decided,
    make_namespace,
    nonce,
    write,
)
from counter.types import Decision, Event, Namespace, Outcome, Reservation

VOID = Decision(Outcome.VOID, b"\x00first\xff")
APPLIED = Decision(Outcome.APPLIED, b"second")
LATER = NOW + SECOND


class DecisionCases(StoreCases):
    """The first decision about a token is final, and everyone gets it."""

    async def test_nothing_is_decided_at_first(self, store: Store, namespace: Namespace) -> None:
        """Whether the event exists or not."""
        await write(store, namespace, add())
        assert await decided(store, namespace, [add()]) is None
        assert await decided(store, namespace, [add("never")]) is None

    async def test_the_first_decision_is_final(self, store: Store, namespace: Namespace) -> None:
        """The second resolver adopts it, its fingerprint included."""
        for first, second in ((VOID, APPLIED), (APPLIED, VOID)):
            token = [add(first.outcome.value)]
            assert await store.decisions.decide(namespace, token, first) == first
            assert await store.decisions.decide(namespace, token, second) == first
            assert await decided(store, namespace, token) == first

    async def test_a_payload_is_no_part_of_the_token(
        self, store: Store, namespace: Namespace
    ) -> None:
        """Another delta under the same token meets the same decision."""
        await store.decisions.decide(namespace, [add(delta=1)], VOID)
        assert await decided(store, namespace, [add(delta=2)]) == VOID

    async def test_every_other_token_is_undecided(self, store: Store, namespace: Namespace) -> None:
        """Another counter, time, nonce or namespace is another token."""
        await store.decisions.decide(namespace, [add()], VOID)
        others: list[Event] = [add("d"), add(at=NOW - 1), add(number=2)]
        for each in others:
            assert await decided(store, namespace, [each]) is None
        assert await decided(store, await make_namespace(store, "other"), [add()]) is None

    async def test_an_atomic_token_is_the_same_whatever_its_items(
        self, store: Store, namespace: Namespace
    ) -> None:
        """In any order, and with any counters; a single add's token is another."""
        await store.decisions.decide(namespace, atomic(("a", 1), ("b", 2)), VOID)
        for items in (atomic(("b", 2), ("a", 1)), atomic(("c", 1)), atomic(("c", 1), ("a", 5))):
            assert await decided(store, namespace, items) == VOID
            assert await store.decisions.decide(namespace, items, APPLIED) == VOID
        assert await decided(store, namespace, [add("a")]) is None
        assert await decided(store, namespace, atomic(("a", 1), at=NOW - 1)) is None


class ReservationCases(StoreCases):
    """A key without a time gets one, the same for every retry until it expires."""

    async def test_the_first_time_is_everyones(self, store: Store, namespace: Namespace) -> None:
        """A retry or hedge reads it back."""
        assert await store.decisions.reserve(namespace, nonce(1), Reservation(NOW, LATER)) == NOW
        assert (
            await store.decisions.reserve(namespace, nonce(1), Reservation(NOW + 5, LATER + 5))
            == NOW
        )
        assert (
            await store.decisions.reserve(namespace, nonce(1), Reservation(LATER - 1, LATER + 5))
            == NOW
        )

    async def test_an_expired_time_is_replaced(self, store: Store, namespace: Namespace) -> None:
        """From its expiry on, with an expiry of its own."""
        await store.decisions.reserve(namespace, nonce(1), Reservation(NOW, LATER))
        assert (
            await store.decisions.reserve(namespace, nonce(1), Reservation(LATER, LATER + SECOND))
            == LATER
        )
        assert (
            await store.decisions.reserve(
                namespace, nonce(1), Reservation(LATER + SECOND - 1, 2 * LATER)
            )
            == LATER
        )

    async def test_a_key_is_kept_for_longer_where_that_is_asked_for(
        self, store: Store, namespace: Namespace
    ) -> None:
        """By a clock that was set ahead it expired early."""
        await store.decisions.reserve(namespace, nonce(1), Reservation(NOW, LATER))
        for now_us in (LATER, LATER + SECOND - 1):
            assert (
                await store.decisions.reserve(
                    namespace, nonce(1), Reservation(now_us, 2 * LATER, kept_us=SECOND)
                )
                == NOW
            )
        now_us = LATER + SECOND
        assert (
            await store.decisions.reserve(
                namespace, nonce(1), Reservation(now_us, 2 * LATER, kept_us=SECOND)
            )
            == now_us
        )

    async def test_keys_are_their_own(self, store: Store, namespace: Namespace) -> None:
        """Another nonce or namespace knows nothing of it."""
        await store.decisions.reserve(namespace, nonce(1), Reservation(NOW, LATER))
        assert (
            await store.decisions.reserve(namespace, nonce(2), Reservation(NOW + 1, LATER))
            == NOW + 1
        )
        other = await make_namespace(store, "other")
        assert (
            await store.decisions.reserve(other, nonce(1), Reservation(NOW + 2, LATER)) == NOW + 2
        )

    async def test_one_replacement_wins(self, store: Store, namespace: Namespace) -> None:
        """It compares with the time that was seen; the loser learns the winner's."""
        await store.decisions.reserve(namespace, nonce(1), Reservation(NOW, LATER))
        assert (
            await store.decisions.reserve(
                namespace, nonce(1), Reservation(NOW + 10, LATER + 10, replaces_us=NOW)
            )
            == NOW + 10
        )
        assert (
            await store.decisions.reserve(
                namespace, nonce(1), Reservation(NOW + 20, LATER + 20, replaces_us=NOW)
            )
            == NOW + 10
        )
        assert (
            await store.decisions.reserve(namespace, nonce(1), Reservation(NOW + 30, LATER + 30))
            == NOW + 10
        )

    async def test_a_replacement_lives_its_whole_life(
        self, store: Store, namespace: Namespace
    ) -> None:
        """Its expiry is its own, not that of the time before it."""
        await store.decisions.reserve(namespace, nonce(1), Reservation(NOW, LATER))
        await store.decisions.reserve(
            namespace, nonce(1), Reservation(NOW + 10, LATER + SECOND, replaces_us=NOW)
        )
        assert (
            await store.decisions.reserve(namespace, nonce(1), Reservation(LATER + 1, 2 * LATER))
            == NOW + 10
        )
        at_expiry = LATER + SECOND
        assert (
            await store.decisions.reserve(namespace, nonce(1), Reservation(at_expiry, 2 * LATER))
            == at_expiry
        )

    async def test_a_replacement_of_nothing_reserves(
        self, store: Store, namespace: Namespace
    ) -> None:
        """The time that was seen may have been purged meanwhile."""
        assert (
            await store.decisions.reserve(
                namespace, nonce(1), Reservation(NOW + 10, LATER, replaces_us=NOW)
            )
            == NOW + 10
        )
        assert (
            await store.decisions.reserve(namespace, nonce(1), Reservation(NOW + 20, LATER))
            == NOW + 10
        )
