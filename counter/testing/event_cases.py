"""The event log's contract: writing and finding, one identity at a time."""

import asyncio
from dataclasses import replace

import pytest

from counter.errors import SliceMissingError
from counter.limits import INT64_MAX, INT64_MIN
from counter.ports import Store
from counter.testing.cases import (
    FIRST_SLICE,
    NOW,
    SLICE,
    SLICES_END,
    T0,
    UNUSUAL_NAMES,
    StoreCases,
    add,
    clear,
    dirty_counters,
    make_namespace,
    nonce,
    total,
    write,
    written,
)
from counter.types import (
    Decision,
    Event,
    EventPage,
    Namespace,
    Outcome,
    PayloadCheck,
    Span,
    Written,
)

NEW, REPLAYED, CONFLICT = Written.NEW, Written.REPLAYED, Written.CONFLICT


class EventCases(StoreCases):
    """Identity, collapse, conflict; every write and look-up goes to the slice of the event time."""

    async def test_a_second_write_collapses(self, store: Store, namespace: Namespace) -> None:
        """The same event is NEW once and REPLAYED ever after, and counts once."""
        for expected in (NEW, REPLAYED, REPLAYED):
            assert list(await written(store, namespace, [add(delta=7)])) == [expected]
        assert await total(store, namespace) == 7

    @pytest.mark.parametrize("other", [add(delta=2), clear()], ids=["delta", "clear"])
    async def test_another_payload_is_a_conflict(
        self, store: Store, namespace: Namespace, other: Event
    ) -> None:
        """What was first written under an identity stays."""
        await write(store, namespace, add(delta=1))
        assert list(await written(store, namespace, [other])) == [CONFLICT]
        assert list(await store.events.find(namespace, [other])) == [add(delta=1)]

    async def test_an_add_does_not_replace_a_clear(
        self, store: Store, namespace: Namespace
    ) -> None:
        """A clear conflicts with an add of 0 under its identity, too."""
        await write(store, namespace, clear())
        assert list(await written(store, namespace, [add(delta=0)])) == [CONFLICT]

    async def test_a_clear_ignores_its_delta(self, store: Store, namespace: Namespace) -> None:
        """Two clears under one identity are equal, whatever their delta."""
        await write(store, namespace, clear())
        assert list(await written(store, namespace, [clear()._replace(delta=5)])) == [REPLAYED]

    async def test_an_outcome_for_each_event_in_order(
        self, store: Store, namespace: Namespace
    ) -> None:
        """Duplicates and conflicts within one call are distinguished and affect nothing else."""
        await write(store, namespace, add("old", number=1), add("old", number=2))
        events = [
            add("a", number=3),
            add("old", number=1),
            add("a", number=3),
            add("a", number=3, delta=9),
            add("b", number=3),
            add("old", number=2, delta=9),
            add("old", number=2),
            add("old", T0 - SLICE, number=2),
            clear("b", number=4),
            clear("b", number=4),
        ]
        expected = [NEW, REPLAYED, REPLAYED, CONFLICT, NEW, CONFLICT, REPLAYED, NEW, NEW, REPLAYED]
        assert list(await written(store, namespace, events)) == expected
        assert await total(store, namespace, "a") == 1
        assert await total(store, namespace, "old") == 3

    async def test_without_a_check_of_payloads_each_event_has_an_outcome(
        self, store: Store, namespace: Namespace
    ) -> None:
        """In every store two different payloads of one call conflict."""
        settings = replace(namespace.settings, payload_check=PayloadCheck.OFF)
        events = [add("a"), add("b"), add("a"), add("a", delta=9)]
        outcomes = await written(store, replace(namespace, settings=settings), events)
        assert [each is CONFLICT for each in outcomes] == [False, False, False, True]
        assert await total(store, namespace, "a") == 1

    async def test_every_part_of_the_identity_matters(
        self, store: Store, namespace: Namespace
    ) -> None:
        """Another counter, time, nonce, item key or namespace is another event."""
        one = add()
        others = [
            one._replace(counter="d"),
            one._replace(event_time_us=NOW - 1),
            one._replace(event_id=nonce(2)),
            one._replace(event_id=bytes(16)),
            one._replace(item_key=1),
        ]
        await write(store, namespace, one, *others)
        other_namespace = await make_namespace(store, "other")
        await write(store, other_namespace, one)
        assert await total(store, namespace) == 5
        assert await total(store, other_namespace) == 1

    async def test_finds_stored_events_in_order(self, store: Store, namespace: Namespace) -> None:
        """Each look-up answers in its place, over slices and counters, None where nothing is."""
        events = [
            add("a", T0 - 2 * SLICE + 1, 1, delta=-5),
            clear("b", T0 - 1, 2),
            add("a", T0, 3, delta=0),
            add("c", T0 + SLICE, 4, delta=INT64_MIN),
        ]
        await write(store, namespace, *events)
        missing = add("never", T0, 1)
        asked = [events[3], missing, events[0], events[0], events[2], events[1]]
        asked = [event._replace(delta=1, clear=False) for event in asked]
        found = list(await store.events.find(namespace, asked))
        assert found == [events[3], None, events[0], events[0], events[2], events[1]]

    async def test_nothing_asked_nothing_answered(self, store: Store, namespace: Namespace) -> None:
        """An empty batch is answered with an empty one."""
        assert list(await store.events.append(namespace, [])) == []
        assert list(await store.events.find(namespace, [])) == []
        assert list(await store.events.sums(namespace, [])) == []
        assert list(await store.events.tails(namespace, [])) == []

    async def test_a_write_into_a_missing_slice_writes_nothing(
        self, store: Store, namespace: Namespace
    ) -> None:
        """Not even the events of the same call whose slices are there."""
        for missing_us in (SLICES_END, SLICES_END + SLICE):
            with pytest.raises(SliceMissingError):
                await store.events.append(namespace, [add("a"), add("a", missing_us)])
            with pytest.raises(SliceMissingError):
                await store.events.append_atomic(
                    namespace, [add("a", missing_us)._replace(atom=b"x")]
                )
        assert await total(store, namespace, "a") == 0
        assert await dirty_counters(store, namespace) == set()

    async def test_a_missing_slice_is_not_not_found(
        self, store: Store, namespace: Namespace
    ) -> None:
        """A read of a missing table is an error."""
        for missing_us in (FIRST_SLICE - 1, SLICES_END):
            with pytest.raises(SliceMissingError):
                await store.events.find(namespace, [add("a"), add("a", missing_us)])
            with pytest.raises(SliceMissingError):
                await store.events.sums(namespace, [("a", missing_us - missing_us % SLICE)])

    async def test_a_missing_slice_is_its_callers_alone(
        self, store: Store, namespace: Namespace
    ) -> None:
        """Writes of others that are committed together with a refused one stand."""
        other = await make_namespace(store, "other")
        outcomes = await asyncio.gather(
            written(store, namespace, [add("a")]),
            store.events.append(namespace, [add("b"), add("b", SLICES_END)]),
            written(store, namespace, [add("c")]),
            written(store, other, [add("d")]),
            return_exceptions=True,
        )
        assert isinstance(outcomes[1], SliceMissingError)
        assert [outcomes[0], outcomes[2], outcomes[3]] == [[NEW]] * 3
        totals = [await total(store, namespace, name) for name in ("a", "b", "c")]
        assert totals == [1, 0, 1]
        assert await total(store, other, "d") == 1

    async def test_concurrent_sends_of_one_event_are_new_once(
        self, store: Store, namespace: Namespace
    ) -> None:
        """Hedges and retries that meet in one commit collapse."""
        sends = [written(store, namespace, [add(delta=5)]) for _ in range(20)]
        outcomes = [each for results in await asyncio.gather(*sends) for each in results]
        assert sorted(map(str, outcomes)) == ["Written.NEW"] + ["Written.REPLAYED"] * 19
        assert await total(store, namespace) == 5

    @pytest.mark.parametrize("delta", [INT64_MIN, -1, 0, 1, INT64_MAX])
    async def test_a_delta_is_any_signed_64_bit_integer(
        self, store: Store, namespace: Namespace, delta: int
    ) -> None:
        """It comes back as it was given, and replays as itself."""
        await write(store, namespace, add(delta=delta))
        assert list(await store.events.find(namespace, [add()])) == [add(delta=delta)]
        assert list(await written(store, namespace, [add(delta=delta)])) == [REPLAYED]
        assert await total(store, namespace) == delta

    async def test_counters_have_any_name(self, store: Store, namespace: Namespace) -> None:
        """Names that look alike, or like syntax, are counters of their own."""
        events = [add(name, delta=10**n) for n, name in enumerate(UNUSUAL_NAMES[:18])]
        events += [add(name, delta=n) for n, name in enumerate(UNUSUAL_NAMES[18:])]
        await write(store, namespace, *events)
        assert list(await store.events.find(namespace, events)) == events
        folds = await store.events.tails(
            namespace, [(each.counter, FIRST_SLICE) for each in events]
        )
        assert [fold.total for fold in folds] == [each.delta for each in events]
        assert await dirty_counters(store, namespace) == set(UNUSUAL_NAMES)

    async def test_a_large_batch(self, store: Store, namespace: Namespace) -> None:
        """A thousand events in one call, some of them there already, over slices and counters."""
        times = (T0 - SLICE, T0, NOW)
        events = [add(f"c{n % 7}", times[n % 3], n, delta=n) for n in range(1_000)]
        await write(store, namespace, *events[::3])
        expected = [REPLAYED if n % 3 == 0 else NEW for n in range(1_000)]
        assert list(await written(store, namespace, events)) == expected
        assert list(await store.events.find(namespace, events)) == events
        assert sum([await total(store, namespace, f"c{n}") for n in range(7)]) == 499_500

    async def test_a_voided_identity_stays_invisible(
        self, store: Store, namespace: Namespace
    ) -> None:
        """Decided and voided, a write that lands later is seen by no read."""
        late, other = add(number=1, delta=5), add(number=2, delta=3)
        decision = Decision(Outcome.VOID, b"fingerprint")
        assert await store.decisions.decide(namespace, [late], decision) == decision
        if store.separate_writes is not None:
            await store.separate_writes.void(namespace, [late])
        await written(store, namespace, [late, other])
        assert list(await store.events.find(namespace, [late, other])) == [None, other]
        assert await total(store, namespace) == 3
        scanned = await store.events.scan(
            namespace, "c", EventPage(Span(FIRST_SLICE, SLICES_END), limit=10)
        )
        assert list(scanned) == [other]
