"""The decision store's contract: what was decided stays, a reserved time is one for all."""

from counter.limits import SECOND, TIME_MAX_US
from counter.ports import Store
from counter.testing.cases import (
    NOW,
    WINDOW,
    StoreCases,
    add,
    atomic,
    clear,
    make_namespace,
    nonce,
    walked,
    write,
)
from counter.types import (
    CANCELLED_KEY,
    OTHER_PAYLOAD,
    Decision,
    Event,
    Fold,
    Namespace,
    Outcome,
    Reservation,
    Span,
    Written,
)
from counter.windows import window_of

VOID = Decision(Outcome.VOID, b"\x00first\xff")
APPLIED = Decision(Outcome.APPLIED, b"second")
CANCELLED = Decision(Outcome.CANCELLED, b"a payload")
CANCELLED_VOID = Decision(Outcome.CANCELLED_VOID, b"a payload")
LATER = NOW + SECOND


class DecisionCases(StoreCases):
    """The first decision about a token is final, and everyone gets it."""

    async def test_nothing_is_decided_at_first(self, store: Store, namespace: Namespace) -> None:
        """Whether the event exists or not."""
        await write(store, namespace, add())
        assert await store.decisions.decided(namespace, [add()]) is None
        assert await store.decisions.decided(namespace, [add("never")]) is None

    async def test_the_first_decision_is_final(self, store: Store, namespace: Namespace) -> None:
        """The second resolver adopts it, its fingerprint included."""
        for first, second in ((VOID, APPLIED), (APPLIED, VOID)):
            token = [add(first.outcome.value)]
            assert await store.decisions.decide(namespace, token, first) == first
            assert await store.decisions.decide(namespace, token, second) == first
            assert await store.decisions.decided(namespace, token) == first

    async def test_a_payload_is_no_part_of_the_token(
        self, store: Store, namespace: Namespace
    ) -> None:
        """Another delta under the same token meets the same decision."""
        await store.decisions.decide(namespace, [add(delta=1)], VOID)
        assert await store.decisions.decided(namespace, [add(delta=2)]) == VOID

    async def test_every_other_token_is_undecided(self, store: Store, namespace: Namespace) -> None:
        """Another counter, time, nonce or namespace is another token."""
        await store.decisions.decide(namespace, [add()], VOID)
        others: list[Event] = [add("d"), add(at=NOW - 1), add(number=2)]
        for each in others:
            assert await store.decisions.decided(namespace, [each]) is None
        assert await store.decisions.decided(await make_namespace(store, "other"), [add()]) is None

    async def test_an_atomic_token_is_the_same_whatever_its_items(
        self, store: Store, namespace: Namespace
    ) -> None:
        """In any order, and with any counters; a single add's token is another."""
        await store.decisions.decide(namespace, atomic(("a", 1), ("b", 2)), VOID)
        for items in (atomic(("b", 2), ("a", 1)), atomic(("c", 1)), atomic(("c", 1), ("a", 5))):
            assert await store.decisions.decided(namespace, items) == VOID
            assert await store.decisions.decide(namespace, items, APPLIED) == VOID
        assert await store.decisions.decided(namespace, [add("a")]) is None
        assert await store.decisions.decided(namespace, atomic(("a", 1), at=NOW - 1)) is None


class CancelCases(StoreCases):
    """A cancel is a decision that replaces the others, and that none replaces."""

    async def test_a_token_that_was_not_decided_is_cancelled(
        self, store: Store, namespace: Namespace
    ) -> None:
        """What was decided first stays: every cancel adopts it, and so does every resolver."""
        await write(store, namespace, add("counted"))
        for counter, first in (("counted", CANCELLED), ("never", CANCELLED_VOID)):
            token = [add(counter)]
            assert await store.decisions.cancel(namespace, token, first) == first
            for again in (CANCELLED, CANCELLED_VOID):
                assert await store.decisions.cancel(namespace, token, again) == first
            for late in (VOID, APPLIED):
                assert await store.decisions.decide(namespace, token, late) == first
            assert await store.decisions.decided(namespace, token) == first

    async def test_a_cancel_replaces_a_decision(self, store: Store, namespace: Namespace) -> None:
        """Whether the token was counted, the first decision says and not the look-up."""
        await write(store, namespace, add("applied"))
        for first, then in (
            (Outcome.APPLIED, Outcome.CANCELLED),
            (Outcome.VOID, Outcome.CANCELLED_VOID),
        ):
            token = [add(first.value)]
            decision = Decision(first, CANCELLED.fingerprint)
            assert await store.decisions.decide(namespace, token, decision) == decision
            for proposed in (CANCELLED, CANCELLED_VOID):
                cancelled = await store.decisions.cancel(namespace, token, proposed)
                assert cancelled == Decision(then, CANCELLED.fingerprint)
            assert await store.decisions.decided(namespace, token) == cancelled

    async def test_another_payload_cancels_nothing(
        self, store: Store, namespace: Namespace
    ) -> None:
        """Neither a decision nor another cancel."""
        for first in (VOID, APPLIED):
            token = [add(first.outcome.value)]
            await store.decisions.decide(namespace, token, first)
            assert await store.decisions.cancel(namespace, token, CANCELLED) == first
            assert await store.decisions.decided(namespace, token) == first
        token = [add("cancelled")]
        await store.decisions.cancel(namespace, token, CANCELLED_VOID)
        other = CANCELLED._replace(fingerprint=b"another")
        assert await store.decisions.cancel(namespace, token, other) == CANCELLED_VOID

    async def test_a_decision_about_another_payload_leaves_the_token_to_its_own(
        self, store: Store, namespace: Namespace
    ) -> None:
        """Where the store finds by itself that the token is used for something else."""
        if store.separate_writes is not None:
            return
        await write(store, namespace, add())
        other = await store.decisions.decide(namespace, [add(delta=2)], VOID)
        assert other == Decision(Outcome.APPLIED, OTHER_PAYLOAD)
        assert (await store.decisions.cancel(namespace, [add(delta=2)], CANCELLED)) == other
        assert await store.decisions.cancel(namespace, [add()], CANCELLED) == CANCELLED

    async def test_a_transactional_store_removes_the_events_and_refuses_their_writes(
        self, store: Store, namespace: Namespace
    ) -> None:
        """Those of the token and no others; and nothing of it if the payload is another."""
        if store.separate_writes is not None:
            return
        items, others = atomic(("a", 1), ("b", 2)), atomic(("a", 4), ("b", 8), number=2)
        for each in (items, others):
            assert await store.events.append_atomic(namespace, each) is Written.NEW
        await write(store, namespace, add("a"), add("a", number=2, delta=16), clear("c"))
        for used in (
            [add("a", delta=5)],
            [clear("a")],
            [add("c")],
            atomic(("a", 2), ("b", 2)),
            atomic(("z", 1)),
        ):
            refused = await store.decisions.cancel(namespace, used, CANCELLED)
            assert refused.fingerprint == OTHER_PAYLOAD
        window_us = window_of(NOW, WINDOW)
        windows = [(name, window_us) for name in "abc"]
        before = await store.events.sums(namespace, windows)
        assert before == [Fold(False, 22), Fold(False, 10), Fold(True, 0)]
        for cancelled in (items, [add("a")], [clear("c")]):
            assert await store.decisions.cancel(namespace, cancelled, CANCELLED) == CANCELLED
            assert await store.events.find(namespace, cancelled) == [None] * len(cancelled)
        after = [Fold(False, 20), Fold(False, 8), Fold(False, 0)]
        assert await store.events.sums(namespace, windows) == after
        tails = await store.events.tails(namespace, [(name, window_us - 1) for name in "abc"])
        assert tails == after
        assert await store.events.append_atomic(namespace, items) is Written.LATE
        late = await store.events.append(namespace, [add("a"), clear("c"), add("d")])
        assert late == [Written.LATE, Written.LATE, Written.NEW]
        for head in await store.rollups.heads(namespace, ["a", "b", "c"]):
            assert head is not None
            assert [each.recount_us for each in head.pending] == [window_us]
        span = Span(window_us, TIME_MAX_US)
        marks = await walked(store, namespace, 0, span, limit=100)
        recounted = {each.counter for each in marks if each.recount_us == window_us}
        assert recounted == {"a", "b", "c"}

    async def test_every_other_token_is_not_cancelled(
        self, store: Store, namespace: Namespace
    ) -> None:
        await store.decisions.cancel(namespace, [add()], CANCELLED_VOID)
        for each in (add("d"), add(at=NOW - 1), add(number=2)):
            assert await store.decisions.decided(namespace, [each]) is None
            await write(store, namespace, each)

    async def test_a_cancelled_key_keeps_its_time(self, store: Store, namespace: Namespace) -> None:
        """Its time is stored as another one, so nothing that has seen its time replaces it."""
        decisions = store.decisions
        await decisions.reserve(namespace, nonce(1), Reservation(NOW, LATER))
        time_us = NOW + CANCELLED_KEY
        for seen_us in (NOW, time_us):
            cancel = Reservation(time_us, 2 * LATER, kept_us=time_us, replaces_us=seen_us)
            assert await decisions.reserve(namespace, nonce(1), cancel) == time_us
        for wanted in (
            Reservation(NOW + 1, LATER),
            Reservation(LATER + SECOND, 2 * LATER),
            Reservation(NOW + 1, LATER, kept_us=TIME_MAX_US, replaces_us=NOW),
        ):
            assert await decisions.reserve(namespace, nonce(1), wanted) == time_us
        expired = Reservation(2 * LATER, 3 * LATER)
        assert await decisions.reserve(namespace, nonce(1), expired) == 2 * LATER

    async def test_a_cancel_of_a_key_that_has_another_time_fails(
        self, store: Store, namespace: Namespace
    ) -> None:
        """Even of one that seems expired."""
        await store.decisions.reserve(namespace, nonce(1), Reservation(NOW, LATER))
        time_us = NOW + 5 + CANCELLED_KEY
        cancel = Reservation(time_us, 2 * LATER, kept_us=time_us, replaces_us=NOW + 5)
        assert await store.decisions.reserve(namespace, nonce(1), cancel) == NOW


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
