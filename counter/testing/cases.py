"""What the contract suites share: the setting they play in, and short ways to say things.

A suite is a class of cases without a name that pytest collects. An adapter's test module says how
its store is made, and :func:`counter.testing.suites.add_suites` makes a class of each suite.
"""

import hashlib
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Final

import pytest

from counter.errors import UnavailableError
from counter.limits import MINUTE, SECOND
from counter.ports import SeparateWrites, Store
from counter.testing.clock import FakeClock
from counter.types import (
    AtomicMark,
    CounterType,
    Dataset,
    DirtyMark,
    Event,
    Fold,
    Mark,
    Namespace,
    NamespaceSettings,
    PayloadCheck,
    Slice,
    Span,
    Written,
)
from counter.windows import event_bucket_of, window_of

#: The start of the slice and of the window that hold the beginning of every test.
T0: Final = 1_800_000_000 * SECOND
NOW: Final = T0 + 5 * MINUTE
WINDOW: Final = 10 * SECOND
SLICE: Final = 10 * MINUTE
#: Three slices before T0's, and one ahead, are made.
FIRST_SLICE: Final = T0 - 3 * SLICE
SLICES_END: Final = T0 + 2 * SLICE

DATASET: Final = Dataset(
    id=1,
    name="default",
    retention_us=60 * MINUTE,
    slice_us=SLICE,
    time_bucket_us=2 * MINUTE,
    event_buckets=4,
    # Long: a busy machine is slow, and only tests of time-outs want a short one.
    write_timeout_us=10 * SECOND,
    clock_skew_max_us=0,
)
#: The accept limit reaches back into the first slice; STRICT, so that every outcome is exact.
SETTINGS: Final = NamespaceSettings(
    counter_type=CounterType.ACCURATE,
    dataset="default",
    accept_limit_us=33 * MINUTE,
    future_limit_us=5 * SECOND,
    rollup_window_us=WINDOW,
    shards=1,
    payload_check=PayloadCheck.STRICT,
    key_ttl_us=24 * 60 * MINUTE,
    cache_ttl_us=10 * SECOND,
)

UNUSUAL_NAMES: Final = (
    "/",
    "a/b",
    "../../etc",
    " ",
    "a",
    "A",
    "a ",
    "%",
    "_",
    "\\",
    "'; DROP TABLE events; --",
    '"quoted"',
    "$[0]",
    "null",
    "1",
    "\u00e9",
    "e\u0301",
    "\u212b",
    "ß",
    "ss",
    "İstanbul",
    "計数器",
    "עברית",
    "😀",
    "👩\u200d👩\u200d👧",
    "x" * 256,
    "😀" * 256,
)


def slice_at(start_us: int) -> Slice:
    """A slice as maintenance makes it."""
    return Slice(start_us, start_us + SLICE, DATASET.time_bucket_us, DATASET.event_buckets)


def nonce(number: int) -> bytes:
    return number.to_bytes(16, "big")


def nonces_per_bucket() -> list[bytes]:
    """One nonce for each event bucket: their events lie in different partitions."""
    numbers = count(1)
    buckets: dict[int, bytes] = {}
    while len(buckets) < DATASET.event_buckets:
        each = nonce(next(numbers))
        buckets.setdefault(event_bucket_of(each, DATASET.event_buckets), each)
    return [buckets[bucket] for bucket in range(DATASET.event_buckets)]


def add(counter: str = "c", at: int = NOW, number: int = 1, delta: int = 1) -> Event:
    return Event(counter, at, nonce(number), 0, delta)


def clear(counter: str = "c", at: int = NOW, number: int = 1) -> Event:
    return Event(counter, at, nonce(number), 0, 0, clear=True)


def atomic(*items: tuple[str, int], at: int = NOW, number: int = 1) -> list[Event]:
    """An atomic add's events, their item keys and fingerprint as the service makes them."""
    atom = hashlib.blake2b(repr(items).encode(), digest_size=16).digest()
    events: list[Event] = []
    for counter, delta in items:
        earlier = sum(event.counter == counter for event in events)
        events.append(Event(counter, at, nonce(number), 1 + earlier, delta, atom=atom))
    return events


def separate(store: Store) -> SeparateWrites:
    """The part that only a store without transactions has."""
    assert store.separate_writes is not None
    return store.separate_writes


async def written(
    store: Store, namespace: Namespace, events: Sequence[Event]
) -> Sequence[Written | UnavailableError]:
    """Append *events* as the service does: marks first where the store needs them."""
    if store.separate_writes is not None:
        windows = [Mark(window_of(each.event_time_us, WINDOW), each.counter) for each in events]
        await store.separate_writes.mark(namespace, windows)
    return await store.events.append(namespace, events)


async def written_atomic(store: Store, namespace: Namespace, events: Sequence[Event]) -> Written:
    """Append *events* as one, as the service does: its mark first where the store needs it."""
    if store.separate_writes is not None:
        window_us = window_of(events[0].event_time_us, WINDOW)
        await store.separate_writes.mark_atomic(namespace, AtomicMark(window_us, tuple(events)))
    return await store.events.append_atomic(namespace, events)


async def write(store: Store, namespace: Namespace, *events: Event) -> None:
    """Append *events*, each of which must be new."""
    assert list(await written(store, namespace, events)) == [Written.NEW] * len(events)


async def unlist(store: Store, namespace: Namespace, counter: str, deleted_us: int) -> None:
    """Take *counter*, whose delete is pending, off the list as the service does."""
    if store.separate_writes is not None:
        await store.separate_writes.unlist(namespace, counter, deleted_us)


async def total(store: Store, namespace: Namespace, counter: str = "c") -> int:
    """The sum of all that can still be found of *counter*."""
    start_us = await store.control.dropped_before(namespace.dataset) or FIRST_SLICE
    (fold,) = await store.events.tails(namespace, [(counter, start_us - 1)])
    return fold.total


async def tail(
    store: Store, namespace: Namespace, counter: str = "c", after: int = FIRST_SLICE
) -> Fold:
    (fold,) = await store.events.tails(namespace, [(counter, after)])
    return fold


async def dirtied(store: Store, namespace: Namespace, marks: Sequence[Mark]) -> None:
    """Make *marks* what a worker finds: by an event each, or by a request for a recount."""
    for each in marks:
        if each.recount_us:
            await store.recounts.write_marks(namespace, [each])
        else:
            await written(store, namespace, [add(each.counter, each.window_us)])


async def marks(
    store: Store,
    namespace: Namespace,
    shard: int = 0,
    after: int = FIRST_SLICE,
    through: int = SLICES_END,
) -> list[Mark]:
    """All dirty marks in the span, in pages of two."""
    return await walked(store, namespace, shard, Span.after(after, through), limit=2)


async def walked(
    store: Store, namespace: Namespace, shard: int, span: Span, limit: int
) -> list[Mark]:
    """All dirty marks in the span, in pages of *limit*."""
    found: list[Mark] = []
    rest: object = None
    while True:
        page, rest = await store.rollups.dirty(namespace, shard, span, limit, rest)
        assert len(page) <= limit
        await check_folds(store, namespace, page)
        found += (as_written(each) for each in page)
        if rest is None:
            return found


def as_written(mark: DirtyMark) -> Mark:
    """What was written that *mark* was read of."""
    return Mark(mark.window_us, mark.counter, mark.recount_us)


async def check_folds(store: Store, namespace: Namespace, page: Sequence[DirtyMark]) -> None:
    """A transactional store has the fold of each window together with its mark."""
    added = [each for each in page if not each.recount_us]
    if store.separate_writes is not None:
        assert {each.fold for each in page} <= {None}
        return
    assert {each.fold for each in page if each.recount_us} <= {None}
    windows = [(each.counter, each.window_us) for each in added]
    assert [each.fold for each in added] == list(await store.events.sums(namespace, windows))


async def dirty_counters(store: Store, namespace: Namespace, shard: int = 0) -> set[str]:
    """Counters that a worker would roll up, by a mark of either kind."""
    atomic_marks: Sequence[AtomicMark] = ()
    if store.separate_writes is not None:
        atomic_marks = await store.separate_writes.dirty_atomic(
            namespace, shard, Span.after(FIRST_SLICE, SLICES_END)
        )
    in_atomic = {event.counter for mark in atomic_marks for event in mark.events}
    return {mark.counter for mark in await marks(store, namespace, shard)} | in_atomic


def ordered(events: Iterable[Event]) -> list[Event]:
    """*events* in the order of a scan."""
    return sorted(events, key=lambda each: (-each.event_time_us, each.event_id, each.item_key))


class StoreCases:
    """A fresh store for each case, with the slices of the setting and one namespace.

    An adapter's test module derives one class from it, which says what its store is and does; the
    first two attributes have no default.
    """

    #: Its ``separate_writes`` are None.
    transactional: bool
    #: A call of ``events.tails`` is as of one moment: each atomic add is in all tails or in none.
    one_moment: bool
    #: It has the capability ``partition_sizes``.
    partition_sizes = False
    #: Its ``control`` has ``begin_new_life``, for a restore by tools of its own.
    new_life = False
    #: It keeps bounds.
    bounds = False
    #: The outcome of a new atomic add; UNVERIFIED in a store that cannot be sure.
    new_atomic = Written.NEW

    def new_store(self, clock: FakeClock, directory: Path) -> Store:
        """The adapter's store, not yet open and empty, with DATASET."""
        raise NotImplementedError

    async def lose_row(self, store: Store, namespace: Namespace, row: tuple[str, int]) -> None:
        """Delete the window row of (counter, window), and leave all else as it is."""
        raise NotImplementedError

    @pytest.fixture
    def clock(self) -> FakeClock:
        return FakeClock(NOW)

    @pytest.fixture
    async def store(self, clock: FakeClock, tmp_path: Path) -> AsyncIterator[Store]:
        store = self.new_store(clock, tmp_path)
        await store.open()
        await make_slices(store)
        yield store
        await store.close()

    @pytest.fixture
    async def namespace(self, store: Store) -> Namespace:
        return await make_namespace(store)


async def make_slices(store: Store) -> None:
    """Make the slices of the tests, of which the last holds now."""
    (dataset,) = await store.control.datasets()
    starts = range(FIRST_SLICE, SLICES_END, SLICE)
    await store.control.make_slices(dataset, *map(slice_at, starts))


async def updated_namespace(
    store: Store, namespace: Namespace, settings: NamespaceSettings, era_from_us: int
) -> Namespace | None:
    """The namespace with other settings; None if another version is stored."""
    updated = namespace.changed(settings, era_from_us)
    return updated if await store.control.update_namespace(namespace, updated) else None


async def make_namespace(
    store: Store,
    name: str = "tests",
    *,
    shards: int = 1,
    accept_limit_us: int = SETTINGS.accept_limit_us,
) -> Namespace:
    settings = replace(SETTINGS, shards=shards, accept_limit_us=accept_limit_us)
    namespace = await store.control.create_namespace(name, settings, NOW)
    assert namespace is not None
    return namespace
