"""The event log's contract: atomic adds, and what differs with and without transactions."""

import asyncio
from dataclasses import replace

import pytest

from counter.errors import SliceMissingError
from counter.limits import ATOMIC_ITEMS_MAX
from counter.ports import Store
from counter.testing.cases import (
    FIRST_SLICE,
    NOW,
    SLICE,
    SLICES_END,
    T0,
    WINDOW,
    StoreCases,
    add,
    atomic,
    clear,
    dirty_counters,
    make_namespace,
    marks,
    separate,
    tail,
    total,
    write,
    written,
    written_atomic,
)
from counter.testing.clock import FakeClock
from counter.types import (
    OTHER_PAYLOAD,
    AtomicMark,
    Decision,
    Event,
    EventPage,
    Fold,
    Mark,
    Namespace,
    Outcome,
    PayloadCheck,
    Sight,
    Span,
    Written,
)
from counter.windows import shard_of

VOID = Decision(Outcome.VOID, b"fingerprint")


class AtomicCases(StoreCases):
    """All the items or none, one answer, and every counter among them is rolled up."""

    async def test_all_items_are_written(self, store: Store, namespace: Namespace) -> None:
        """Several counters and one counter several times; new once, REPLAYED ever after."""
        events = atomic(("a", 1), ("b", -2), ("a", 4), ("a", 4))
        assert await written_atomic(store, namespace, events) is self.new_atomic
        for _ in range(2):
            assert await written_atomic(store, namespace, events) is Written.REPLAYED
        assert list(await store.events.find(namespace, events)) == events
        assert [await total(store, namespace, name) for name in ("a", "b")] == [9, -2]

    async def test_as_many_items_as_there_may_be(self, store: Store, namespace: Namespace) -> None:
        events = atomic(*((f"c{number}", number) for number in range(ATOMIC_ITEMS_MAX)))
        assert await written_atomic(store, namespace, events) is self.new_atomic
        assert await written_atomic(store, namespace, events) is Written.REPLAYED
        assert list(await store.events.find(namespace, events)) == events

    async def test_a_conflict_writes_nothing(self, store: Store, namespace: Namespace) -> None:
        """If one item exists with another payload, none of the list is written."""
        first = atomic(("a", 1), ("b", 2))
        assert await written_atomic(store, namespace, first) is self.new_atomic
        for other in (
            atomic(("a", 1), ("b", 3)),
            atomic(("c", 9), ("b", 2)),
            atomic(("a", 1), ("b", 2), ("c", 9)),
        ):
            assert await written_atomic(store, namespace, other) is Written.CONFLICT
        assert [await total(store, namespace, name) for name in "abc"] == [1, 2, 0]
        assert list(await store.events.find(namespace, first)) == first

    async def test_of_two_sends_at_once_one_at_most_is_new(
        self, store: Store, namespace: Namespace
    ) -> None:
        """Both may look before either writes; then neither can be sure."""
        events = atomic(("a", 1), ("b", 2))
        sends = [written_atomic(store, namespace, events) for _ in range(3)]
        outcomes = await asyncio.gather(*sends)
        assert outcomes.count(Written.NEW) <= 1
        assert set(outcomes) <= {self.new_atomic, Written.REPLAYED}
        assert [await total(store, namespace, name) for name in "ab"] == [1, 2]

    async def test_a_single_add_is_no_item(self, store: Store, namespace: Namespace) -> None:
        """An add and an atomic add of one nonce and time are two tokens: scopes differ."""
        await write(store, namespace, add("a", delta=1))
        assert await written_atomic(store, namespace, atomic(("a", 10))) is self.new_atomic
        assert await total(store, namespace, "a") == 11

    async def test_items_are_listed_as_items(self, store: Store, namespace: Namespace) -> None:
        """A scan gives their keys and the fingerprint of their list."""
        events = atomic(("c", 1), ("c", 2))
        await written_atomic(store, namespace, events)
        found = await store.events.scan(
            namespace, "c", EventPage(Span(FIRST_SLICE, SLICES_END), limit=9)
        )
        assert list(found) == events

    async def test_every_shard_learns_of_it(self, store: Store) -> None:
        """Each counter among the items is dirty in its own shard."""
        namespace = await make_namespace(store, shards=3)
        names = [f"c{n}" for n in range(12)]
        await written_atomic(store, namespace, atomic(*((name, 1) for name in names)))
        for shard in range(3):
            own = {name for name in names if shard_of(name, 3) == shard}
            assert own
            assert own <= await dirty_counters(store, namespace, shard)


class ViewCases(StoreCases):
    """Where the tails of several counters are of one moment: all stores but a cluster."""

    @pytest.mark.parametrize("kind", ["alike", "cleared", "apart"])
    async def test_an_atomic_add_shows_in_all_of_its_counters_at_once(
        self, store: Store, namespace: Namespace, kind: str
    ) -> None:
        """However each tail is read: a counter with a clear in it, or one that begins elsewhere."""
        first_us = NOW - NOW % WINDOW
        after = [(name, first_us - 1) for name in "abc"]
        if kind == "cleared":
            await write(store, namespace, clear("b", NOW - 1))
        elif kind == "apart":
            after[1] = ("b", first_us - 2)

        async def move() -> None:
            for start in range(2, 402, 8):
                some = [
                    atomic(("a", -2), ("b", 1), ("c", 1), number=number)
                    for number in range(start, start + 8)
                ]
                await asyncio.gather(*(written_atomic(store, namespace, each) for each in some))
                await asyncio.sleep(0)

        moving = asyncio.create_task(move())
        seen: list[list[int]] = []
        while not moving.done():
            seen.append([fold.total for fold in await store.events.tails(namespace, after)])
            await asyncio.sleep(0)
        await moving
        assert len(seen) > 1
        assert [each for each in seen if sum(each)] == []


class NonTransactionalCases(StoreCases):
    """Marks, events, rewrites and voids are writes of their own, whatever came between."""

    async def test_a_mark_for_a_missing_slice_is_refused(
        self, store: Store, namespace: Namespace
    ) -> None:
        """Its window could never be summed; the mark of a recount goes to the present window."""
        with pytest.raises(SliceMissingError):
            await separate(store).mark(namespace, [Mark(NOW, "a"), Mark(SLICES_END, "b")])
        with pytest.raises(SliceMissingError):
            await written_atomic(store, namespace, atomic(("c", 1), at=SLICES_END))
        assert await dirty_counters(store, namespace) == set()
        recount = Mark(SLICES_END, "b", T0)
        await store.recounts.write_marks(namespace, [recount])
        assert await marks(store, namespace, through=SLICES_END) == [recount]

    async def test_an_append_asks_no_age(self, store: Store, clock: FakeClock) -> None:
        """The caller checks it, before and after the mark."""
        namespace = await make_namespace(store, accept_limit_us=WINDOW)
        clock.advance(2 * WINDOW)
        assert list(await written(store, namespace, [add()])) == [Written.NEW]

    async def test_an_atomic_mark_is_in_every_shard(self, store: Store) -> None:
        """Its whole list: a worker of any of them can finish what a crash left."""
        namespace = await make_namespace(store, shards=3)
        names = [f"c{n}" for n in range(12)]
        events = atomic(*((name, 1) for name in names), at=NOW + WINDOW + 3)
        await written_atomic(store, namespace, events)
        for shard in range(3):
            found = await separate(store).dirty_atomic(
                namespace, shard, Span.after(NOW, NOW + WINDOW)
            )
            assert list(found) == [AtomicMark(NOW + WINDOW, tuple(events))]

    async def test_a_mark_of_a_decision_is_another_mark(
        self, store: Store, namespace: Namespace
    ) -> None:
        """In one window too; and all are the same add's."""
        events = tuple(atomic(("a", 1), ("b", -2)))
        marks = {AtomicMark(NOW, events, sight) for sight in Sight}
        for each in marks:
            await separate(store).mark_atomic(namespace, each)
        found = await separate(store).dirty_atomic(namespace, 0, Span.after(T0, NOW))
        assert (set(found), len(found)) == (marks, 3)

    async def test_a_shard_without_items_has_no_mark(self, store: Store) -> None:
        """An atomic mark goes to the shards of its events' counters, no others."""
        namespace = await make_namespace(store, shards=2)
        mark = AtomicMark(NOW, tuple(atomic(("a", 1))))
        for _ in range(2):
            await separate(store).mark_atomic(namespace, mark)
        own = shard_of("a", 2)
        for shard, expected in ((own, [mark]), (1 - own, [])):
            found = await separate(store).dirty_atomic(namespace, shard, Span.after(T0, NOW))
            assert list(found) == expected

    async def test_two_lists_under_one_token_are_two_marks(
        self, store: Store, namespace: Namespace
    ) -> None:
        """Also where the second is refused: the first may be the one that was never written."""
        first, second = atomic(("a", 1), ("b", 1)), atomic(("b", 2), ("c", 2))
        assert await written_atomic(store, namespace, first) is self.new_atomic
        assert await written_atomic(store, namespace, second) is Written.CONFLICT
        found = await separate(store).dirty_atomic(namespace, 0, Span.after(T0, NOW))
        assert {mark.events for mark in found} == {tuple(first), tuple(second)}

    async def test_atomic_marks_of_a_span(self, store: Store, namespace: Namespace) -> None:
        """After the one window, through the other, earliest first; dropped with the rest."""
        starts = [NOW + n * WINDOW for n in (2, 0, 3, 1)]
        for start_us in starts:
            await written_atomic(store, namespace, atomic(("a", 1), at=start_us))

        async def found(after: int, through: int) -> list[int]:
            span = await separate(store).dirty_atomic(namespace, 0, Span.after(after, through))
            return [mark.window_us for mark in span]

        assert await found(T0, SLICES_END) == sorted(starts)
        assert await found(NOW, NOW + 2 * WINDOW) == [NOW + WINDOW, NOW + 2 * WINDOW]
        await store.rollups.drop_marks(namespace, 0, NOW + 2 * WINDOW - 1)
        assert await found(T0, SLICES_END) == [NOW + 2 * WINDOW, NOW + 3 * WINDOW]

    async def test_a_half_written_atomic_add_is_completed(
        self, store: Store, namespace: Namespace
    ) -> None:
        """By a retry, which is new where it wrote anything, or by a rewrite of the list."""
        first, second = atomic(("a", 1), ("b", 2)), atomic(("a", 10), ("b", 20), number=2)
        await written(store, namespace, [first[0], second[1]])
        assert await written_atomic(store, namespace, first) is self.new_atomic
        await separate(store).rewrite(namespace, second)
        assert list(await store.events.find(namespace, first + second)) == first + second
        assert [await total(store, namespace, name) for name in "ab"] == [11, 22]

    async def test_rewriting_changes_nothing(self, store: Store, namespace: Namespace) -> None:
        """A found event that is written again still exists once."""
        events = [add("a", T0 - SLICE, 1, delta=3), clear("b", number=2)]
        await write(store, namespace, *events)
        await separate(store).rewrite(namespace, events)
        assert list(await store.events.find(namespace, events)) == events
        assert await total(store, namespace, "a") == 3

    async def test_a_rewrite_asks_no_age(self, store: Store, clock: FakeClock) -> None:
        """What was decided to be applied is written however late."""
        namespace = await make_namespace(store, accept_limit_us=WINDOW)
        clock.advance(5 * WINDOW)
        await separate(store).rewrite(namespace, [add(delta=5)])
        assert await total(store, namespace) == 5

    @pytest.mark.parametrize("event", [add(delta=5), clear()], ids=["add", "clear"])
    async def test_a_void_hides_what_stood_and_what_lands(
        self, store: Store, namespace: Namespace, event: Event
    ) -> None:
        """An abandoned write that lands after it stays invisible, every time."""
        await write(store, namespace, event, add(at=T0, number=2, delta=1))
        await separate(store).void(namespace, [event, add("never-written")])
        for _ in range(2):
            assert list(await store.events.find(namespace, [event])) == [None]
            assert await tail(store, namespace) == Fold(False, 1)
            await written(store, namespace, [event, add("never-written")])
        assert await total(store, namespace, "never-written") == 0
        assert await written_atomic(store, namespace, [event]) is not Written.CONFLICT
        assert await tail(store, namespace) == Fold(False, 1)

    @pytest.mark.parametrize("check", [PayloadCheck.STRICT, PayloadCheck.OFF])
    @pytest.mark.parametrize(
        "events", [[add()], [clear()], atomic(("c", 1), ("d", 2))], ids=["add", "clear", "atomic"]
    )
    async def test_a_rewrite_restores_no_event_that_is_hidden(
        self, store: Store, namespace: Namespace, events: list[Event], check: PayloadCheck
    ) -> None:
        """A resolver that found the decision before it was replaced by a cancel may be slow."""
        settings = replace(namespace.settings, payload_check=check)
        namespace = replace(namespace, settings=settings)
        await written(store, namespace, events)
        await separate(store).void(namespace, events)
        for _ in range(2):
            await separate(store).rewrite(namespace, events)
            assert list(await store.events.find(namespace, events)) == [None] * len(events)
            assert await tail(store, namespace) == Fold(False, 0)

    async def test_what_cannot_be_found_cannot_be_changed(
        self, store: Store, namespace: Namespace
    ) -> None:
        """A rewrite or void of a missing slice is an error and does nothing."""
        await write(store, namespace, add())
        for missing_us in (FIRST_SLICE - SLICE, SLICES_END):
            with pytest.raises(SliceMissingError):
                await separate(store).rewrite(namespace, [add(number=2), add(at=missing_us)])
            with pytest.raises(SliceMissingError):
                await separate(store).void(namespace, [add(), add(at=missing_us)])
        assert await total(store, namespace) == 1


class TransactionalCases(StoreCases):
    """The write itself leaves the mark, checks the age and asks what was decided."""

    async def test_an_append_leaves_the_mark(self, store: Store, namespace: Namespace) -> None:
        """One for each window of each counter, whether its events are new or not."""
        events = [add("a"), add("a", NOW + 1), add("a", NOW + WINDOW), add("b")]
        await store.events.append(namespace, events)
        await store.events.append(namespace, events)
        expected = {Mark(NOW, "a"), Mark(NOW + WINDOW, "a"), Mark(NOW, "b")}
        found = await marks(store, namespace)
        assert len(found) == len(expected)
        assert set(found) == expected

    async def test_a_late_event_is_not_written(self, store: Store, clock: FakeClock) -> None:
        """At its accept limit it is, past it not; it leaves no mark and spoils no other."""
        namespace = await make_namespace(store, accept_limit_us=WINDOW)
        clock.advance(WINDOW)
        events = [add("late", NOW - 1), add("just", NOW), add("late", NOW - 1, 2), add("b", NOW)]
        outcomes = list(await store.events.append(namespace, events))
        assert outcomes == [Written.LATE, Written.NEW, Written.LATE, Written.NEW]
        assert await total(store, namespace, "late") == 0
        assert await dirty_counters(store, namespace) == {"just", "b"}

    async def test_a_late_atomic_add_is_not_written(self, store: Store, clock: FakeClock) -> None:
        """None of it."""
        namespace = await make_namespace(store, accept_limit_us=WINDOW)
        clock.advance(WINDOW + 1)
        events = atomic(("a", 1), ("b", 1))
        assert await store.events.append_atomic(namespace, events) is Written.LATE
        assert await dirty_counters(store, namespace) == set()
        assert list(await store.events.find(namespace, events)) == [None, None]

    async def test_a_token_names_one_atomic_add(self, store: Store, namespace: Namespace) -> None:
        """Another list under it is a conflict, whether the two share a counter or not."""
        other_space = await make_namespace(store, "other")
        first, second = atomic(("a", 1), ("b", 1)), atomic(("c", 1), ("d", 1))
        assert await store.events.append_atomic(namespace, first) is Written.NEW
        assert await store.events.append_atomic(namespace, second) is Written.CONFLICT
        assert await store.events.append_atomic(namespace, first) is Written.REPLAYED
        assert [await total(store, namespace, name) for name in "abcd"] == [1, 1, 0, 0]
        assert await store.events.append_atomic(other_space, second) is Written.NEW
        another = atomic(("c", 1), ("d", 1), number=2)
        assert await store.events.append_atomic(namespace, another) is Written.NEW

    async def test_a_used_token_is_not_voided(self, store: Store, namespace: Namespace) -> None:
        """Another payload under it is a conflict, whichever counters an atomic one has."""
        decide = store.decisions.decide
        await store.events.append(namespace, [add("c", delta=1), clear("d")])
        first, second = atomic(("a", 1), ("b", 1)), atomic(("b", 2), ("x", 1), number=2)
        for each in (first, second):
            assert await store.events.append_atomic(namespace, each) is Written.NEW
        others = (
            [add("c", delta=2)],
            [add("d")],
            atomic(("e", 1)),
            atomic(("x", 1), ("y", 1), number=2),
        )
        for other in others:
            assert await decide(namespace, other, VOID) == (Outcome.APPLIED, OTHER_PAYLOAD)
        assert await decide(namespace, [add("c", NOW + 1)], VOID) == VOID

    async def test_a_voided_token_is_late(self, store: Store, namespace: Namespace) -> None:
        """Even while its age would let it pass; tokens beside it are written."""
        await store.decisions.decide(namespace, [add("a")], VOID)
        await store.decisions.decide(namespace, atomic(("a", 1), ("b", 1)), VOID)
        events = [add("a"), add("b"), add("a", NOW - 1), add("a", number=2)]
        outcomes = list(await store.events.append(namespace, events))
        assert outcomes == [Written.LATE, Written.NEW, Written.NEW, Written.NEW]
        for items in (atomic(("a", 1), ("b", 1)), atomic(("c", 1))):
            assert await store.events.append_atomic(namespace, items) is Written.LATE
        assert (
            await store.events.append_atomic(namespace, atomic(("a", 1), number=2)) is Written.NEW
        )

    async def test_what_is_found_is_not_voided(self, store: Store, namespace: Namespace) -> None:
        """The decision looks again in its own transaction."""
        await write(store, namespace, add(delta=5))
        applied = Decision(Outcome.APPLIED, VOID.fingerprint)
        assert await store.decisions.decide(namespace, [add(delta=5)], VOID) == applied
        await store.events.append_atomic(namespace, atomic(("a", 1), ("b", 1)))
        assert await store.decisions.decide(namespace, atomic(("a", 1), ("b", 1)), VOID) == applied
        assert await total(store, namespace) == 5
