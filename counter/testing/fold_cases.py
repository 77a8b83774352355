"""The event log's contract: sums, tails and scans."""

import random

import pytest

from counter.errors import SliceMissingError
from counter.limits import INT64_MAX, INT64_MIN, MINUTE
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
    clear,
    make_namespace,
    nonces_per_bucket,
    ordered,
    tail,
    write,
)
from counter.types import Event, EventPage, Fold, Namespace, Span


class FoldCases(StoreCases):
    """A fold is over all the partitions of its span, exact, and a clear erases across them."""

    async def test_a_sum_is_over_its_window_alone(self, store: Store, namespace: Namespace) -> None:
        """The start is in, the end is out."""
        times = (NOW - 1, NOW, NOW + WINDOW - 1, NOW + WINDOW)
        await write(store, namespace, *(add(at=at, delta=10**n) for n, at in enumerate(times)))
        windows = [("c", NOW), ("c", NOW - WINDOW), ("c", NOW + WINDOW), ("c", NOW + 2 * WINDOW)]
        expected = [Fold(False, 110), Fold(False, 1), Fold(False, 1_000), Fold(False, 0)]
        assert list(await store.events.sums(namespace, windows)) == expected

    async def test_sums_answer_in_order(self, store: Store, namespace: Namespace) -> None:
        """Counters, windows and repetitions as they were asked, one that never was included."""
        await write(store, namespace, add("a", NOW), add("b", NOW, delta=2), add("a", T0, delta=3))
        asked = [("b", NOW), ("never", NOW), ("a", T0), ("a", NOW), ("b", NOW), ("b", T0)]
        folds = await store.events.sums(namespace, asked)
        assert [fold.total for fold in folds] == [2, 0, 3, 1, 2, 0]

    async def test_no_counter_of_many_counts_twice(
        self, store: Store, namespace: Namespace
    ) -> None:
        """More than a store may ask for by one statement."""
        names = [f"c{number}" for number in range(40)]
        await write(store, namespace, *(add(name) for name in names))
        sums = await store.events.sums(namespace, [(name, NOW) for name in names])
        tails = await store.events.tails(namespace, [(name, T0) for name in names])
        assert list(sums) == list(tails) == [Fold(False, 1)] * len(names)

    async def test_folds_cover_all_partitions(self, store: Store, namespace: Namespace) -> None:
        """Every event bucket, and in a tail every time bucket and slice, adds its part."""
        ids = nonces_per_bucket()
        times = range(FIRST_SLICE + 5 * MINUTE, SLICES_END, MINUTE)
        await write(store, namespace, *(Event("c", at, each, 0, 1) for at in times for each in ids))
        assert await tail(store, namespace) == Fold(False, len(times) * len(ids))
        (fold,) = await store.events.sums(namespace, [("c", NOW)])
        assert fold == Fold(False, len(ids))

    @pytest.mark.parametrize("delta", [INT64_MAX, INT64_MIN])
    async def test_sums_are_exact_beyond_64_bits(
        self, store: Store, namespace: Namespace, delta: int
    ) -> None:
        """Nothing wraps, within a partition or over several, and what cancels out cancels out."""
        events = [add(at=NOW, number=n, delta=delta) for n in range(20)]
        await write(store, namespace, *events, add(at=T0 - SLICE, delta=delta))
        assert list(await store.events.sums(namespace, [("c", NOW)])) == [Fold(False, 20 * delta)]
        assert await tail(store, namespace) == Fold(False, 21 * delta)
        opposite = [add(at=NOW + 1, number=n, delta=-(delta + 1)) for n in range(21)]
        await write(store, namespace, *opposite)
        assert await tail(store, namespace) == Fold(False, -21)

    async def test_window_folds_are_the_sums_of_all_windows_with_events(
        self, store: Store, namespace: Namespace
    ) -> None:
        """As sums returns them, over slices; windows without events and out of the span are left
        out, and so is a counter that never was."""
        other = await make_namespace(store, "other")
        ids = nonces_per_bucket()
        times = (T0 - SLICE, T0 - WINDOW, T0, T0 + 1, NOW, NOW + WINDOW - 1, NOW + WINDOW)
        events = [Event("c", at, each, 0, INT64_MAX) for at in times for each in ids]
        events += [clear(at=NOW + 5, number=90), add(at=NOW + 6, number=91, delta=7)]
        await write(store, namespace, *events, add("d", at=T0 + 3, delta=-3))
        await write(store, other, add(delta=1_000))
        span = (T0 - WINDOW, NOW + WINDOW)
        found = await store.events.window_folds(
            namespace, ["d", "never", "c"], Span(span[0], span[1])
        )
        windows = [T0 - WINDOW, T0, NOW]
        sums = await store.events.sums(namespace, [("c", at) for at in windows])
        assert list(found) == [{T0: Fold(False, -3)}, {}, dict(zip(windows, sums, strict=True))]

    async def test_window_folds_of_what_was_dropped_are_an_error(
        self, store: Store, namespace: Namespace
    ) -> None:
        """From the first instant that was kept on they are whole; before any slice is nothing."""
        await write(store, namespace, add(at=FIRST_SLICE + SLICE))
        ages = FIRST_SLICE - 10 * SLICE
        found = await store.events.window_folds(namespace, ["c"], Span(ages, SLICES_END))
        assert list(found) == [{FIRST_SLICE + SLICE: Fold(False, 1)}]
        await store.control.drop_slice(namespace.dataset, FIRST_SLICE)
        with pytest.raises(SliceMissingError):
            await store.events.window_folds(
                namespace, ["c"], Span(FIRST_SLICE + SLICE - WINDOW, SLICES_END)
            )
        found = await store.events.window_folds(
            namespace, ["c"], Span(FIRST_SLICE + SLICE, SLICES_END)
        )
        assert list(found) == [{FIRST_SLICE + SLICE: Fold(False, 1)}]

    async def test_a_clear_erases_across_partitions(
        self, store: Store, namespace: Namespace
    ) -> None:
        """What is at or before its time goes, in whichever partition; what is later stays."""
        for bucket, cleared_in in enumerate(nonces_per_bucket()):
            name = f"c{bucket}"
            events = [Event(name, NOW + 50, cleared_in, 0, 0, clear=True)]
            for each in nonces_per_bucket():
                deltas = {NOW: 1, NOW + 50: 10, NOW + 51: 100}
                if each == cleared_in:
                    del deltas[NOW + 50]
                events += [Event(name, at, each, 0, delta) for at, delta in deltas.items()]
            await write(store, namespace, *events)
            assert list(await store.events.sums(namespace, [(name, NOW)])) == [Fold(True, 400)]
            assert await tail(store, namespace, name) == Fold(True, 400)

    async def test_the_latest_clear_counts(self, store: Store, namespace: Namespace) -> None:
        """Of several clears, whatever order they came in."""
        events = [
            add(at=NOW + 3, number=1, delta=1),
            clear(at=NOW + 4, number=2),
            add(at=NOW + 5, number=3, delta=10),
            clear(at=NOW + 2, number=4),
            clear(at=NOW + 6, number=5),
            add(at=NOW + 7, number=6, delta=100),
        ]
        await write(store, namespace, *events)
        assert list(await store.events.sums(namespace, [("c", NOW)])) == [Fold(True, 100)]

    async def test_a_clear_erases_across_slices(self, store: Store, namespace: Namespace) -> None:
        """A tail combines the clears of all its slices; each window speaks for itself."""
        await write(
            store,
            namespace,
            add(at=T0 - SLICE, delta=1),
            clear(at=T0 - 1, number=2),
            add(at=T0, number=3, delta=10),
            add(at=T0 + SLICE, number=4, delta=100),
        )
        assert await tail(store, namespace) == Fold(True, 110)
        assert await tail(store, namespace, after=T0 - 2) == Fold(True, 110)
        assert await tail(store, namespace, after=T0 - 1) == Fold(False, 110)
        folds = await store.events.sums(
            namespace, [("c", T0 - SLICE), ("c", T0 - WINDOW), ("c", T0)]
        )
        assert list(folds) == [Fold(False, 1), Fold(True, 0), Fold(False, 10)]

    async def test_a_clear_is_its_counters_alone(self, store: Store, namespace: Namespace) -> None:
        """Neither another counter nor another namespace's counter of the same name is cleared."""
        other = await make_namespace(store, "other")
        await write(store, other, add(delta=2))
        await write(store, namespace, add(delta=1), add("d", delta=4), clear(at=NOW + 1))
        assert await tail(store, namespace) == Fold(True, 0)
        assert await tail(store, namespace, "d") == Fold(False, 4)
        assert await tail(store, other) == Fold(False, 2)

    async def test_a_clear_with_a_delta_adds_nothing(
        self, store: Store, namespace: Namespace
    ) -> None:
        """The row's delta is ignored."""
        await write(store, namespace, clear()._replace(delta=5), add(at=NOW + 1, delta=1))
        assert await tail(store, namespace) == Fold(True, 1)

    async def test_a_tail_has_no_upper_bound(self, store: Store, namespace: Namespace) -> None:
        """It begins after its instant and covers the slices made ahead."""
        times = (NOW - 1, NOW, NOW + 1, SLICES_END - 1)
        await write(store, namespace, *(add(at=at, delta=10**n) for n, at in enumerate(times)))
        assert await tail(store, namespace, after=NOW - 1) == Fold(False, 1_110)
        assert await tail(store, namespace, after=NOW) == Fold(False, 1_100)
        assert await tail(store, namespace, after=SLICES_END) == Fold(False, 0)

    async def test_a_tail_may_end_where_the_caller_knows_of_nothing_more(
        self, store: Store, namespace: Namespace
    ) -> None:
        """What lies before that instant is in it; what lies at it or later may be."""
        until_us = NOW + 3 * MINUTE
        times = (NOW, until_us - 1, until_us, SLICES_END - 1)
        await write(store, namespace, *(add(at=at, delta=10**n) for n, at in enumerate(times)))
        for after_us, least in ((NOW - 1, 11), (NOW, 10), (until_us, 0), (SLICES_END, 0)):
            (fold,) = await store.events.tails(namespace, [("c", after_us)], until_us=until_us)
            assert fold.total % 100 == least

    async def test_tails_answer_in_order(self, store: Store, namespace: Namespace) -> None:
        """Each counter from its own instant, repeated ones and one that never was included."""
        await write(store, namespace, add("a", NOW), add("a", NOW + 1, delta=2), add("b", NOW))
        asked = [("b", NOW), ("a", NOW), ("never", T0), ("a", T0), ("b", T0), ("a", NOW)]
        folds = await store.events.tails(namespace, asked)
        assert [fold.total for fold in folds] == [0, 2, 0, 3, 1, 2]

    async def test_before_the_first_slice_there_was_nothing(
        self, store: Store, namespace: Namespace
    ) -> None:
        """A new namespace's watermark may lie before any slice: its tail is all there is."""
        await write(store, namespace, add())
        assert await tail(store, namespace, after=FIRST_SLICE - 5 * SLICE) == Fold(False, 1)

    async def test_a_tail_from_what_was_dropped_is_an_error(
        self, store: Store, namespace: Namespace
    ) -> None:
        """Its sum would be short; from the first instant that was kept on it is whole."""
        await write(store, namespace, add())
        await store.control.drop_slice(namespace.dataset, FIRST_SLICE)
        with pytest.raises(SliceMissingError):
            await tail(store, namespace, after=FIRST_SLICE + SLICE - 2)
        assert await tail(store, namespace, after=FIRST_SLICE + SLICE - 1) == Fold(False, 1)


class ScanCases(StoreCases):
    """A scan goes from the latest to the earliest, in pages that neither skip nor repeat."""

    async def scanned(
        self, store: Store, namespace: Namespace, from_us: int, to_us: int, limit: int
    ) -> list[Event]:
        """The whole span, a page of *limit* at a time."""
        found: list[Event] = []
        while True:
            before = found[-1] if found else None
            page = await store.events.scan(
                namespace, "c", EventPage(Span(from_us, to_us), limit=limit, before=before)
            )
            assert len(page) <= limit
            found += page
            if len(page) < limit:
                return found

    async def filled(self, store: Store, namespace: Namespace) -> list[Event]:
        """Events of every kind over all slices, many at one instant; those of "c"."""
        times = (T0 - SLICE - 1, T0 - SLICE, T0 - 1, T0, T0, T0, NOW, T0 + SLICE)
        events = [
            add(at=at, number=10 * n + m, delta=m) for n, at in enumerate(times) for m in range(3)
        ]
        events += [clear(at=NOW, number=99), add(at=NOW, number=99)._replace(item_key=1)]
        events += [add(at=NOW, number=98)._replace(item_key=2, atom=b"atom")]
        random.Random(1).shuffle(events)
        await write(store, namespace, *events, add("d", NOW, 50), add("d", T0, 51))
        return ordered(events)

    @pytest.mark.parametrize("limit", [1, 2, 7, 27, 1_000])
    async def test_pages_neither_skip_nor_repeat(
        self, store: Store, namespace: Namespace, limit: int
    ) -> None:
        """Whatever their size, they make up all the events, in order, with all they carry."""
        events = await self.filled(store, namespace)
        assert await self.scanned(store, namespace, FIRST_SLICE, SLICES_END, limit) == events

    async def test_the_span_is_half_open(self, store: Store, namespace: Namespace) -> None:
        """From its first instant, up to but without its last."""
        events = await self.filled(store, namespace)
        for from_us, to_us in ((T0 - SLICE, T0), (T0 - 1, T0 + 1), (T0, NOW), (NOW, NOW)):
            expected = [each for each in events if from_us <= each.event_time_us < to_us]
            assert await self.scanned(store, namespace, from_us, to_us, 2) == expected

    async def test_goes_on_after_an_event_that_is_not_there(
        self, store: Store, namespace: Namespace
    ) -> None:
        """Only the identity of *before* matters, and only as a place in the order."""
        await write(store, namespace, add(at=T0), add(at=NOW, number=2), add(at=NOW, number=4))
        page = await store.events.scan(
            namespace,
            "c",
            EventPage(
                Span(FIRST_SLICE, SLICES_END), limit=10, before=add(at=NOW, number=3, delta=77)
            ),
        )
        assert list(page) == [add(at=NOW, number=4), add(at=T0)]

    async def test_a_span_may_reach_beyond_the_slices(
        self, store: Store, namespace: Namespace
    ) -> None:
        """What is still there is listed; dropped events are gone, and nothing says so."""
        await write(store, namespace, add(at=T0 - 2 * SLICE + MINUTE), add(at=T0, number=2))
        await store.control.drop_slice(namespace.dataset, FIRST_SLICE)
        await store.control.drop_slice(namespace.dataset, FIRST_SLICE + SLICE)
        found = await self.scanned(store, namespace, 0, SLICES_END + 10 * SLICE, 10)
        assert found == [add(at=T0, number=2)]

    async def test_a_counter_that_never_was_has_no_events(
        self, store: Store, namespace: Namespace
    ) -> None:
        """And that is no error."""
        assert await self.scanned(store, namespace, FIRST_SLICE, SLICES_END, 10) == []
