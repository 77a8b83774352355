"""The rollup store's contract: marks, watermarks, checkpoints, window rows, pending recounts."""

import pytest

from api.routes.insight import busiest
from counter.limits import INT64_MAX, MINUTE, SECOND, SHARDS_MAX
from counter.ports import Store
from counter.testing.cases import (
    DATASET,
    NOW,
    SETTINGS,
    T0,
    UNUSUAL_NAMES,
    WINDOW,
    StoreCases,
    add,
    clear,
    dirtied,
    make_namespace,
    marks,
    unlist,
    walked,
    write,
    written,
)
from counter.testing.clock import FakeClock
from counter.types import (
    DELETED,
    Checkpoint,
    CounterUpdate,
    Fold,
    Head,
    Mark,
    Namespace,
    Pending,
    Span,
    WindowRow,
)
from counter.windows import first_watermark, shard_of

NOTHING = Checkpoint(0, 0)
BIG = 3 * 2**70


def end(window: int) -> int:
    """The last instant of a window counted from T0's."""
    return T0 + (window + 1) * WINDOW - 1


def row(window: int, total: int, cleared: bool = False) -> WindowRow:
    return WindowRow(T0 + window * WINDOW, cleared, total)


def update(
    *rows: WindowRow,
    through: int,
    count: int = 0,
    counter: str = "c",
    settled: Checkpoint | None = None,
    done: tuple[Pending, ...] = (),
) -> CounterUpdate:
    return CounterUpdate(counter, rows, Checkpoint(end(through), count), settled, done)


async def apply(store: Store, namespace: Namespace, *updates: CounterUpdate) -> None:
    """Apply *updates*, which all go through the same window."""
    (through_us,) = {each.checkpoint.time_us for each in updates}
    await store.rollups.apply(namespace, updates, through_us=through_us)


async def head(store: Store, namespace: Namespace, counter: str = "c") -> Head | None:
    (found,) = await store.rollups.heads(namespace, [counter])
    return found and found._replace(pending=tuple(sorted(found.pending)))


async def names(store: Store, namespace: Namespace) -> list[str]:
    return list(await store.control.counters(namespace, prefix="", after=None, limit=9))


async def rows(
    store: Store, namespace: Namespace, after: int = 0, through: int = end(1_000)
) -> list[WindowRow]:
    (found,) = await store.rollups.rows(namespace, ["c"], Span.after(after, through))
    return list(found)


class MarkCases(StoreCases):
    """Marks stand until they are dropped; pages of them neither skip nor repeat."""

    async def test_writing_makes_dirty(self, store: Store, namespace: Namespace) -> None:
        """By the event's window, not by the time of writing, once however often it is written."""
        for _ in range(2):
            await written(store, namespace, [add(at=NOW + 3), add(at=NOW + 4, number=2)])
        await written(store, namespace, [add("d", T0 - 1)])
        assert await marks(store, namespace) == [Mark(T0 - WINDOW, "d"), Mark(NOW, "c")]

    async def test_the_busiest_counters_are_those_with_the_most_events_of_a_time(
        self, store: Store, namespace: Namespace
    ) -> None:
        """As many as are asked for; those of other namespaces and other times are none of them."""
        other = await make_namespace(store, "elsewhere")
        now = namespace.created_at_us + MINUTE
        for name, events in (("a", 3), ("b", 5), ("計 '", 2), ("c", 1)):
            numbers = range(1, events + 1)
            await write(store, namespace, *(add(name, now - each, each, 9) for each in numbers))
        old = now - 10 * SECOND
        await write(store, namespace, *(add("c", old - each, 9 + each) for each in range(1, 9)))
        await write(store, other, *(add("z", now - each, each) for each in range(1, 9)))
        found = await busiest(store, namespace, now, span_us=10 * SECOND, limit=3)
        assert [(each.counter, each.events) for each in found.counters] == [
            ("b", 5),
            ("a", 3),
            ("計 '", 2),
        ]
        assert (found.from_us, found.to_us) == (now - 10 * SECOND, now)
        assert found.is_whole
        assert found.counters[0].per_s == 0.5
        assert (
            await busiest(store, namespace, now - MINUTE, span_us=SECOND, limit=3)
        ).counters == ()

    async def test_an_add_of_a_clock_that_is_ahead_is_busy_at_once(
        self, store: Store, namespace: Namespace
    ) -> None:
        now = namespace.created_at_us + MINUTE
        await write(store, namespace, add("same", now, 1), add("ahead", now + SECOND, 2))
        found = await busiest(store, namespace, now, span_us=10 * SECOND, limit=3)
        assert {each.counter: each.events for each in found.counters} == {"same": 1, "ahead": 1}
        assert found.to_us == now

    async def test_where_more_came_than_are_counted_the_latest_are(
        self, store: Store, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With its start, or that not all counters were examined."""
        for name in ("EVENTS_MAX", "_FEW", "_MANY"):
            monkeypatch.setattr(f"api.routes.insight.{name}", 4)
        monkeypatch.setattr("api.routes.insight.LOOKED_AT_MAX", 1)
        now = namespace.created_at_us + MINUTE
        ages = range(1, 7)
        for name in ("a", "b"):
            await write(store, namespace, *(add(name, now - age * SECOND, age) for age in ages))
        found = await busiest(store, namespace, now, span_us=10 * SECOND, limit=3)
        assert len(found.counters) == 1 + found.is_whole
        assert found.counters[0].per_s == pytest.approx(1.0, rel=0.4)
        assert found.is_whole is (found.from_us > now - 10 * SECOND)

    async def test_marks_that_stand_are_left(self, store: Store, namespace: Namespace) -> None:
        """The same mark again changes nothing, a recount of the same window is another."""
        some = [Mark(NOW, "c"), Mark(NOW, "c", T0), Mark(NOW, "c", T0 + WINDOW), Mark(NOW, "c")]
        for _ in range(2):
            await dirtied(store, namespace, some)
        found = await marks(store, namespace)
        assert len(found) == 3
        assert set(found) == set(some)

    async def test_a_mark_has_the_fold_of_its_window(
        self, store: Store, namespace: Namespace
    ) -> None:
        """From its latest clear on, and exact beyond 64 bits, if the store reads its marks from the
        log; ``marks`` compares each with ``sums``."""
        await write(
            store,
            namespace,
            *(add("big", NOW + number, number, INT64_MAX) for number in range(1, 4)),
            add("c", NOW, 1, 7),
            clear("c", NOW + 4, 2),
            clear("c", NOW + 2, 3),
            add("c", NOW + 4, 4, 70),
            add("c", NOW + 5, 5, -5),
            add("c", NOW + WINDOW, 6, 700),
            clear("gone", NOW + 1, 7),
        )
        assert len(await marks(store, namespace)) == 4
        folds = {
            ("big", NOW): Fold(False, 3 * INT64_MAX),
            ("c", NOW): Fold(True, -5),
            ("c", NOW + WINDOW): Fold(False, 700),
            ("gone", NOW): Fold(True, 0),
        }
        if store.separate_writes is None:
            page, _ = await store.rollups.dirty(
                namespace, 0, Span.after(NOW - 1, NOW + WINDOW), limit=9
            )
            assert {(each.counter, each.window_us): each.fold for each in page} == folds

    async def test_a_span_of_windows(self, store: Store, namespace: Namespace) -> None:
        """After the one, through the other."""
        await dirtied(store, namespace, [Mark(T0 + n * WINDOW, "c") for n in range(5)])
        found = await marks(store, namespace, after=T0, through=T0 + 3 * WINDOW)
        assert [mark.window_us for mark in found] == [T0 + n * WINDOW for n in (1, 2, 3)]
        assert await marks(store, namespace, after=end(0), through=end(0)) == []
        assert [mark.window_us for mark in await marks(store, namespace, after=end(3))] == [
            T0 + 4 * WINDOW
        ]

    @pytest.mark.parametrize("limit", [1, 3, 100])
    async def test_pages_neither_skip_nor_repeat(
        self, store: Store, namespace: Namespace, limit: int
    ) -> None:
        """Windows in order, within each all counters and recounts once; the same on every walk."""
        some = [Mark(T0 + n * WINDOW, name) for n in range(3) for name in "cba"]
        some += [Mark(T0 + WINDOW, name, T0 - n * WINDOW) for n in range(3) for name in "bé"]
        await dirtied(store, namespace, some[::-1])
        span = Span.after(T0 - 1, end(9))
        walks = [await walked(store, namespace, 0, span, limit) for _ in range(2)]
        assert walks[0] == walks[1]
        assert sorted(walks[0]) == sorted(some)
        windows = [mark.window_us for mark in walks[0]]
        assert windows == sorted(windows)

    async def test_a_mark_is_in_its_counters_shard(self, store: Store) -> None:
        """No other worker sees it, nor another namespace's."""
        namespace = await make_namespace(store, shards=4)
        other = await make_namespace(store, "other", shards=4)
        names = [f"c{n}" for n in range(20)]
        await dirtied(store, namespace, [Mark(NOW, name) for name in names])
        for shard in range(4):
            expected = {name for name in names if shard_of(name, 4) == shard}
            assert {mark.counter for mark in await marks(store, namespace, shard)} == expected
            assert await marks(store, other, shard) == []

    @pytest.mark.parametrize(
        ("asked", "after_us", "through_us", "holding"),
        [
            ([0, 1, 2, 3], T0 - 1, T0 + WINDOW, {0, 2}),
            ([2, 3], T0 - 1, T0 + WINDOW, {2}),
            ([0, 1], T0, T0 + WINDOW, set()),
            ([1, 2], T0 - 1, T0 + WINDOW - 1, set()),
            ([0, 1], T0 - 1, T0, {0}),
        ],
    )
    @pytest.mark.parametrize("recount_us", [0, T0 - WINDOW], ids=["add", "recount"])
    async def test_shards_with_marks_of_a_time(
        self,
        store: Store,
        asked: list[int],
        after_us: int,
        through_us: int,
        holding: set[int],
        recount_us: int,
    ) -> None:
        """After the one instant and through the other; or all shards that were asked for."""
        namespace = await make_namespace(store, shards=4)
        names = {shard_of(name, 4): name for name in "abcdefghijklmnop"}
        starts = {0: T0, 2: T0 + WINDOW}
        await dirtied(
            store, namespace, [Mark(at, names[each], recount_us) for each, at in starts.items()]
        )
        found = await store.rollups.marked(namespace, asked, Span.after(after_us, through_us))
        assert set(found) in (holding, set(asked))

    async def test_dropped_marks_are_forgotten(self, store: Store) -> None:
        """Through the instant, recounts too, in the one shard; later ones and new ones stand."""
        namespace = await make_namespace(store, shards=2)
        names = {shard_of(name, 2): name for name in "abcdefgh"}
        for name in names.values():
            starts = [T0 + n * WINDOW for n in range(3)]
            await dirtied(store, namespace, [Mark(each, name) for each in starts])
            await dirtied(store, namespace, [Mark(each, name, T0 - WINDOW) for each in starts])
        await store.rollups.advance(namespace, [0], end(1))
        await store.rollups.drop_marks(namespace, 0, end(1))
        found = await marks(store, namespace, 0)
        assert {mark.window_us for mark in found} == {T0 + 2 * WINDOW}
        assert len(await marks(store, namespace, 1)) == 6
        again = [Mark(T0 + WINDOW, names[0], T0 - WINDOW)]
        await store.recounts.write_marks(namespace, again)
        if store.separate_writes is not None:
            again += [Mark(T0 + WINDOW, names[0])]
            await store.separate_writes.mark(namespace, again[1:])
        assert set(again) <= set(await marks(store, namespace, 0))


class WatermarkCases(StoreCases):
    """A shard's watermark says up to where its counters' checkpoints hold everything."""

    @pytest.mark.parametrize("shards", [3, SHARDS_MAX])
    async def test_a_new_namespace_has_them_laid(self, store: Store, shards: int) -> None:
        """Each shard's, before anything that could be written."""
        namespace = await make_namespace(store, shards=shards)
        expected = first_watermark(DATASET, SETTINGS, NOW)
        assert list(await store.rollups.watermarks(namespace)) == [expected] * shards
        assert (expected + 1) % WINDOW == 0
        assert expected < NOW - SETTINGS.accept_limit_us - WINDOW

    async def test_they_only_move_forward(self, store: Store) -> None:
        """Each by itself."""
        namespace = await make_namespace(store, shards=2)
        other = await make_namespace(store, "other", shards=2)
        first = first_watermark(DATASET, SETTINGS, NOW)
        await store.rollups.advance(namespace, [1], end(3))
        assert list(await store.rollups.watermarks(namespace)) == [first, end(3)]
        await store.rollups.advance(namespace, [1], end(2))
        await store.rollups.advance(namespace, [0], end(1))
        assert list(await store.rollups.watermarks(namespace)) == [end(1), end(3)]
        await store.rollups.advance(namespace, [1, 0], end(2))
        assert list(await store.rollups.watermarks(namespace)) == [end(2), end(3)]
        assert list(await store.rollups.watermarks(other)) == [first, first]

    async def test_the_fence_is_a_clock_reading(self, store: Store, clock: FakeClock) -> None:
        """Taken when it was asked for."""
        assert await store.rollups.fence() == NOW
        clock.advance(123)
        assert await store.rollups.fence() == NOW + 123


class CountsCases(StoreCases):
    """A counter's partition only moves forward, and one update is written as a whole."""

    async def test_a_counter_never_rolled_up_has_none(
        self, store: Store, namespace: Namespace
    ) -> None:
        """Written or not."""
        await written(store, namespace, [add("written")])
        assert list(await store.rollups.heads(namespace, ["written", "never"])) == [None, None]
        found = await store.rollups.rows(namespace, ["written", "never"], Span.after(0, end(9)))
        assert [list(each) for each in found] == [[], []]

    async def test_heads_and_rows_answer_in_order(self, store: Store, namespace: Namespace) -> None:
        """Each counter with its own, repeated ones and unknown ones included."""
        updates = [
            update(row(1, n), through=1, count=10 * n, counter=name)
            for n, name in enumerate(UNUSUAL_NAMES)
        ]
        await apply(store, namespace, *updates)
        asked = [*reversed(UNUSUAL_NAMES), "never", UNUSUAL_NAMES[3]]
        heads = await store.rollups.heads(namespace, asked)
        counts = [each and each.checkpoint.count for each in heads]
        expected = [10 * n for n in reversed(range(len(UNUSUAL_NAMES)))]
        assert counts == [*expected, None, 30]
        found = await store.rollups.rows(namespace, asked, Span.after(0, end(9)))
        totals = [sum(each.total for each in some) for some in found]
        assert totals == [*(n // 10 for n in expected), 0, 3]

    async def test_rows_of_a_span(self, store: Store, namespace: Namespace) -> None:
        """After the one start, through the other, earliest first."""
        some = [row(4, 40), row(1, 10), row(3, -30, cleared=True), row(2, 0, cleared=True)]
        await apply(store, namespace, update(*some, through=4))
        assert await rows(store, namespace) == sorted(some)
        assert await rows(store, namespace, T0 + WINDOW, T0 + 3 * WINDOW) == [some[3], some[2]]
        assert await rows(store, namespace, end(1), end(2)) == [some[3]]
        assert await rows(store, namespace, end(1), end(1) + 1) == [some[3]]

    async def test_a_later_batch_goes_on(self, store: Store, namespace: Namespace) -> None:
        """Its rows replace or join those that stand, its checkpoint follows."""
        await apply(store, namespace, update(row(1, 1), row(2, 2), through=2, count=3))
        await apply(store, namespace, update(row(2, 5), row(3, 7), through=3, count=13))
        assert await rows(store, namespace) == [row(1, 1), row(2, 5), row(3, 7)]
        assert await head(store, namespace) == Head(Checkpoint(end(3), 13), NOTHING)

    async def test_a_batch_done_again_replaces(self, store: Store, namespace: Namespace) -> None:
        """Up to the same instant the rows and the checkpoint are those of the last batch."""
        await apply(store, namespace, update(row(1, 1), through=2, count=1))
        await apply(store, namespace, update(row(1, 4, cleared=True), through=2, count=4))
        assert await rows(store, namespace) == [row(1, 4, cleared=True)]
        assert await head(store, namespace) == Head(Checkpoint(end(2), 4), NOTHING)

    async def test_an_older_batch_changes_nothing(
        self, store: Store, namespace: Namespace, clock: FakeClock
    ) -> None:
        """A paused worker's checkpoint and rows do not take the place of later ones."""
        await apply(store, namespace, update(row(1, 10), row(3, 30), through=3, count=40))
        clock.advance(WINDOW)
        await apply(store, namespace, update(row(1, 1), through=2, count=1))
        assert await head(store, namespace) == Head(Checkpoint(end(3), 40), NOTHING)
        assert await rows(store, namespace) == [row(1, 10), row(3, 30)]

    async def test_counts_are_of_any_size(self, store: Store, namespace: Namespace) -> None:
        """Rows, checkpoint and settled fold come back exactly beyond 64 bits."""
        settled = Checkpoint(end(0), -BIG)
        change = update(row(1, -BIG), row(2, BIG + 1), through=2, count=BIG + 1, settled=settled)
        await apply(store, namespace, change)
        assert await rows(store, namespace) == [row(1, -BIG), row(2, BIG + 1)]
        assert await head(store, namespace) == Head(Checkpoint(end(2), BIG + 1), settled)

    async def test_settling_deletes_the_rows_it_folds(
        self, store: Store, namespace: Namespace
    ) -> None:
        """Those that start at or before it, of that counter."""
        windows = [row(n, n) for n in range(5)]
        other = update(*windows, through=4, count=10, counter="other")
        await apply(store, namespace, update(*windows, through=4, count=10), other)
        settled = Checkpoint(end(2), 3)
        await apply(store, namespace, update(through=4, count=10, settled=settled))
        assert await rows(store, namespace) == windows[3:]
        assert await head(store, namespace) == Head(Checkpoint(end(4), 10), settled)
        (left,) = await store.rollups.rows(namespace, ["other"], Span.after(0, end(9)))
        assert list(left) == windows

    async def test_settled_only_moves_forward(self, store: Store, namespace: Namespace) -> None:
        """An older fold changes nothing of it, a batch without one leaves it; old rows stay out."""
        settled = Checkpoint(end(2), 3)
        await apply(store, namespace, update(row(3, 1), through=4, count=4, settled=settled))
        older = Checkpoint(end(1), 77)
        await apply(store, namespace, update(row(2, 9), through=5, count=4, settled=older))
        await apply(store, namespace, update(row(1, 9), row(6, 1), through=6, count=5))
        assert await head(store, namespace) == Head(Checkpoint(end(6), 5), settled)
        assert await rows(store, namespace) == [row(3, 1), row(6, 1)]

    async def test_pending_recounts_are_removed_exactly(
        self, store: Store, namespace: Namespace
    ) -> None:
        """Those the batch names, of that counter, no others; leaving one twice leaves it once."""
        pending = [Pending(T0 + n * WINDOW, NOW + m * WINDOW) for n in range(2) for m in range(2)]
        recounts = [("c", each) for each in pending] + [("d", pending[0])]
        for _ in range(2):
            await store.recounts.write_pending(namespace, recounts)
        done = (pending[1], pending[2], Pending(T0 + 9 * WINDOW, NOW))
        await apply(store, namespace, update(through=1, count=1, done=done))
        left = (pending[0], pending[3])
        assert await head(store, namespace) == Head(Checkpoint(end(1), 1), NOTHING, left)
        other = await head(store, namespace, "d")
        assert other is not None
        assert other.pending == (pending[0],)

    async def test_a_pending_recount_comes_before_any_rollup(
        self, store: Store, namespace: Namespace
    ) -> None:
        """What alone is missing reads as the fold of nothing, which is true of every counter."""
        pending = Pending(T0, NOW)
        await store.recounts.write_pending(namespace, [("c", pending)])
        assert await head(store, namespace) == Head(NOTHING, NOTHING, (pending,))

    async def test_a_namespace_has_its_own(self, store: Store, namespace: Namespace) -> None:
        """Counters of one name in two namespaces are two."""
        other = await make_namespace(store, "other")
        await apply(store, namespace, update(row(1, 1), through=1, count=1))
        await store.recounts.write_pending(namespace, [("c", Pending(T0, NOW))])
        assert await head(store, other) is None
        assert await rows(store, other) == []

    async def test_a_deleted_counter_is_listed_again_with_a_later_event(
        self, store: Store, namespace: Namespace
    ) -> None:
        """And with none of its instant or earlier, however late that is written, nor by a recount
        of its window."""
        deleted_us, later_us = T0 + 5, T0 + WINDOW + 1
        delete = Pending(DELETED, deleted_us)
        await write(store, namespace, add(at=T0 + 1), add("d", T0 + 1))
        await store.recounts.write_pending(namespace, [("c", delete)])
        await unlist(store, namespace, "c", deleted_us)
        assert await names(store, namespace) == ["d"]
        late = [add(at=T0 + 1), add(at=T0 + 2, number=2), add(at=deleted_us, number=3)]
        await written(store, namespace, late)
        await store.recounts.write_marks(namespace, [Mark(NOW, "c", T0)])
        await apply(store, namespace, update(row(0, 0, cleared=True), through=0))
        assert await names(store, namespace) == ["d"]
        assert (await head(store, namespace) or Head(NOTHING, NOTHING)).pending == (delete,)
        await write(store, namespace, add(at=later_us))
        if store.separate_writes is not None:
            # This process remembers that it listed the name.
            await apply(store, namespace, update(row(1, 1), through=1, done=(delete,)))
        assert await names(store, namespace) == ["c", "d"]

    async def test_a_worker_lists_a_deleted_counter_again(
        self, store: Store, namespace: Namespace
    ) -> None:
        """A delete that is done without it leaves the later one in effect."""
        await write(store, namespace, add(at=T0), add("d", T0))
        first, second = (Pending(DELETED, T0 + after) for after in (1, 2))
        for each in (first, second):
            await store.recounts.write_pending(namespace, [("c", each), ("d", each)])
            for counter in ("c", "d"):
                await unlist(store, namespace, counter, each.window_us)
        await apply(store, namespace, update(through=0, done=(first,)))
        assert await names(store, namespace) == []
        assert (await head(store, namespace) or Head(NOTHING, NOTHING)).pending == (second,)
        await apply(store, namespace, update(through=0, done=(second,)))
        assert await names(store, namespace) == ["c"]
        assert (await head(store, namespace) or Head(NOTHING, NOTHING)).pending == ()

    @pytest.mark.parametrize("order", [1, -1], ids=["in order", "later first"])
    async def test_a_counter_that_is_deleted_twice_is_listed_by_an_event_after_both(
        self, store: Store, namespace: Namespace, order: int
    ) -> None:
        deletes = [Pending(DELETED, T0 + windows * WINDOW) for windows in (1, 3)]
        await write(store, namespace, add(at=T0))
        for each in deletes[::order]:
            await store.recounts.write_pending(namespace, [("c", each)])
            await unlist(store, namespace, "c", each.window_us)
        await write(store, namespace, add(at=T0 + 2 * WINDOW, number=2))
        assert await names(store, namespace) == []
        await write(store, namespace, add(at=T0 + 4 * WINDOW, number=3))
        if store.separate_writes is not None:
            await apply(store, namespace, update(through=0, done=tuple(deletes)))
        assert await names(store, namespace) == ["c"]

    async def test_many_counters_in_one_call(self, store: Store, namespace: Namespace) -> None:
        """Each gets its own rows and checkpoint."""
        names = [f"c{n}" for n in range(500)]
        updates = [
            update(row(1, n), row(2, cleared=True, total=-n), through=2, count=-n, counter=name)
            for n, name in enumerate(names)
        ]
        await apply(store, namespace, *updates)
        heads = await store.rollups.heads(namespace, names)
        assert [each and each.checkpoint for each in heads] == [u.checkpoint for u in updates]
        found = await store.rollups.rows(namespace, names, Span.after(0, end(9)))
        assert [tuple(each) for each in found] == [u.rows for u in updates]

    async def test_marks_of_one_namespace_say_nothing_of_another(
        self, store: Store, namespace: Namespace
    ) -> None:
        """Whichever was asked for its marks last, each batch goes to its own counters; those that
        had a mark, those that had none, and those that are new, in one."""
        other = await make_namespace(store, "other")
        for each in (namespace, other):
            await write(store, each, add("c"), add("d", number=2))
        names = ["new", "c", "d"]
        assert {mark.counter for mark in await marks(store, namespace)} == {"c", "d"}
        for each, count in ((other, 5), (namespace, 7)):
            batch = [update(row(1, count), through=1, count=count, counter=n) for n in names]
            await apply(store, each, *batch)
        for each, count in ((other, 5), (namespace, 7)):
            for wanted in (names, ["c", "d"]):
                heads = await store.rollups.heads(each, wanted)
                assert [found and found.checkpoint.count for found in heads] == [count] * len(heads)
            assert await rows(store, each) == [row(1, count)]
