"""Bounded adds over SQLite: calls that share a transaction, and transactions that fail."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from unittest.mock import patch

import pytest

from counter.bounds import refusal_in, terms_if_bounded
from counter.core.adds import event_of, events_of_atomic
from counter.core.results import Item
from counter.errors import StoreUnavailableError, UnavailableError
from counter.limits import MINUTE, SECOND
from counter.storage.sqlite import SqliteStore, bounds
from counter.testing.cases import DATASET, NOW, make_namespace, make_slices, nonce
from counter.testing.clock import FakeClock
from counter.testing.service_cases import Process
from counter.types import Decision, Event, Namespace, Outcome, Token, Written
from counter.windows import fingerprint
from tests.unit.test_sqlite_faults import Failing

NEW, REPLAYED, REACHED = Written.NEW, Written.REPLAYED, Written.BOUND_REACHED


class Desk:
    """A process over SQLite with a namespace, and adds to it."""

    def __init__(self, directory: Path) -> None:
        self.clock = FakeClock(NOW)
        self.store = SqliteStore(directory, self.clock, [DATASET])
        self.process = Process(self.store, self.clock)

    async def begin(self) -> None:
        await self.store.open()
        await make_slices(self.store)
        self.namespace: Namespace = await make_namespace(self.store, accept_limit_us=5 * SECOND)

    def add(
        self,
        number: int,
        at_most: int | None = None,
        delta: int = 1,
        after_us: int = 0,
        counter: str = "c",
    ) -> Event:
        """An add under the token of *number*."""
        token = Token(nonce(number), self.clock.now_us() + after_us)
        return event_of(counter, token, delta, terms_if_bounded(delta, None, at_most))

    def clear(self, number: int, after_us: int = 0) -> Event:
        return event_of("c", Token(nonce(number), self.clock.now_us() + after_us), None)

    def atomic(self, number: int, *items: Item) -> list[Event]:
        return events_of_atomic(items, Token(nonce(number), self.clock.now_us()))

    async def append(self, *events: Event) -> Sequence[Written | UnavailableError]:
        written: Sequence[Written | UnavailableError] = await self.store.events.append(
            self.namespace, events
        )
        return list(written)

    async def append_atomic(self, events: Sequence[Event]) -> Written:
        return await self.store.events.append_atomic(self.namespace, events)

    async def count(self, counter: str = "c") -> int:
        [count] = await self.process.counts(self.namespace, counter)
        return count

    async def decided_by(self, event: Event) -> int | None:
        """The count that refused *event*; None if it was accepted."""
        [stored] = await self.store.events.find(self.namespace, [event])
        assert stored is not None
        why = refusal_in(stored.atom)
        return None if why is None else why.count

    def fail_at_commit(self, *, after: bool) -> None:
        database = self.store.database
        database._writing = Failing(database._writing, "COMMIT", after=after)  # type: ignore[assignment]


@pytest.fixture
async def desk(fast_dir: Path) -> AsyncIterator[Desk]:
    desk = Desk(fast_dir)
    await desk.begin()
    yield desk
    await desk.store.close()


def to_c(at_most: int) -> Item:
    return Item("c", 1, terms_if_bounded(1, None, at_most))


async def test_atomic_adds_of_one_transaction_see_each_other(desk: Desk) -> None:
    """And the single adds that are written with them."""
    atomics = [desk.atomic(number, to_c(3), Item("d", 1)) for number in (1, 2, 3)]
    single = desk.add(4, at_most=3)
    calls = [desk.append(single), *map(desk.append_atomic, atomics)]
    assert await asyncio.gather(*calls) == [[NEW], NEW, NEW, REACHED]
    assert await desk.decided_by(atomics[2][0]) == 3
    assert [await desk.count(each) for each in "cd"] == [3, 2]


async def test_a_clear_of_the_same_transaction_makes_room(desk: Desk) -> None:
    """Whichever call it is in; what it erases is not refused."""
    await desk.append(desk.add(1, delta=3))
    calls = [
        desk.append(desk.clear(2, 1), desk.add(3, 0), desk.add(4, 1, after_us=2)),
        desk.append(desk.add(5, 1, after_us=2)),
        desk.append_atomic(desk.atomic(6, to_c(0))),
    ]
    assert await asyncio.gather(*calls) == [[NEW, NEW, NEW], [REACHED], NEW]
    assert await desk.count() == 1


async def test_a_cancel_of_the_same_transaction_makes_room(desk: Desk) -> None:
    """The live tail loses the cancelled add at the commit, and these must see it before."""
    cancelled = desk.add(1, at_most=1)
    await desk.append(cancelled)
    decision = Decision(Outcome.CANCELLED, fingerprint([cancelled]))
    calls = [
        desk.store.decisions.cancel(desk.namespace, [cancelled], decision),
        desk.append_atomic(desk.atomic(2, to_c(1))),
        desk.append_atomic(desk.atomic(3, to_c(1))),
    ]
    assert await asyncio.gather(*calls) == [decision, NEW, REACHED]
    assert await desk.count() == 1


async def test_a_retry_is_not_decided_again(desk: Desk) -> None:
    """It takes no room from the adds after it, and is answered by what is stored, whatever room
    there is."""
    accepted, refused = desk.add(1, at_most=2, delta=2), desk.add(2, at_most=2)
    atomic = desk.atomic(3, to_c(2))
    assert await desk.append(accepted, refused) == [NEW, REACHED]
    assert await desk.append_atomic(atomic) is REACHED
    for change, retry in ((-1, 10), (-1, 11), (5, 12)):
        await desk.append(desk.add(retry, delta=change))
        assert await desk.append(accepted, refused) == [REPLAYED, REACHED]
        assert await desk.append_atomic(atomic) is REACHED
    assert await desk.append(desk.add(20, delta=-5)) == [NEW]
    sent = accepted, desk.add(21, at_most=2), accepted
    assert await desk.append(*sent) == [REPLAYED, NEW, REPLAYED]
    assert await desk.count() == 1


async def test_a_refusal_that_is_resolved_and_cancelled_was_not_counted(desk: Desk) -> None:
    """It was written while its resolver saw nothing, and is decided as applied."""
    refused = desk.add(1, at_most=0)
    assert await desk.append(refused) == [REACHED]
    found = [fingerprint([refused])]
    decisions, given = desk.store.decisions, (desk.namespace, [refused])
    applied = Decision(Outcome.APPLIED, *found)
    assert await decisions.decide(*given, Decision(Outcome.VOID, *found)) == applied
    cancelled = Decision(Outcome.CANCELLED_VOID, *found)
    assert await decisions.cancel(*given, Decision(Outcome.CANCELLED, *found)) == cancelled
    assert await decisions.cancel(*given, Decision(Outcome.CANCELLED, *found)) == cancelled
    assert await desk.count() == 0


async def test_a_commit_that_failed_leaves_nothing_that_counts(desk: Desk) -> None:
    desk.fail_at_commit(after=False)
    with pytest.raises(StoreUnavailableError):
        await desk.append_atomic(desk.atomic(1, to_c(1)))
    assert await desk.append(desk.add(2, at_most=1), desk.add(3, at_most=1)) == [NEW, REACHED]
    assert await desk.count() == 1


async def test_a_commit_that_failed_and_landed_counts(desk: Desk) -> None:
    """And its refusals are the answers of their retries."""
    await desk.append(desk.add(1))
    desk.fail_at_commit(after=True)
    with pytest.raises(StoreUnavailableError):
        await desk.append(desk.add(2, at_most=2), desk.add(3, at_most=2))
    assert await desk.append(desk.add(4, at_most=2)) == [REACHED]
    await desk.append(desk.add(5, delta=-2))
    assert await desk.append(desk.add(2, at_most=2), desk.add(3, at_most=2)) == [REPLAYED, REACHED]
    assert await desk.count() == 0


async def test_what_a_rollup_has_summed_and_what_it_has_not_decide_together(desk: Desk) -> None:
    await desk.append(desk.add(1, delta=2))
    desk.clock.advance(MINUTE)
    await desk.process.roll_up()
    await desk.append(desk.add(2, delta=2))
    refused = desk.add(3, at_most=4)
    assert await desk.append(refused) == [REACHED]
    assert await desk.decided_by(refused) == 4


async def test_a_clear_in_the_tail_erases_what_a_rollup_has_summed(desk: Desk) -> None:
    await desk.append(desk.add(1, delta=2))
    desk.clock.advance(MINUTE)
    await desk.process.roll_up()
    await desk.append(desk.clear(2))
    adds = [desk.add(number, at_most=1, after_us=1) for number in (3, 4)]
    assert [*await desk.append(adds[0]), *await desk.append(adds[1])] == [NEW, REACHED]
    assert await desk.decided_by(adds[1]) == 1


async def test_only_a_bounded_add_reads_a_log_that_is_long(desk: Desk) -> None:
    """Other writes would wait: it is to be sent again. Those beside it are written, and so is a
    clear, whose count is read only for an add after it."""
    await desk.append(desk.add(1), desk.clear(2))
    plain, bounded, other = desk.add(3), desk.add(4, at_most=9), desk.add(5, at_most=9, counter="d")
    with patch.object(bounds, "_LOG_EVENTS_MAX", 1):
        outcomes = await asyncio.gather(
            desk.append(plain), desk.append(bounded, bounded), desk.append(other, desk.clear(6))
        )
        assert (outcomes[0], outcomes[2]) == ([NEW], [NEW, NEW])
        assert [type(each) for each in outcomes[1]] == [UnavailableError] * 2
        with pytest.raises(UnavailableError):
            await desk.append_atomic(desk.atomic(7, to_c(9)))
    assert await desk.append(plain, bounded) == [REPLAYED, NEW]


async def test_recounts_are_read_within_the_same_bound(desk: Desk) -> None:
    """A cancel asks for one; it reads the log of all counters."""
    cancelled, others = desk.add(1, at_most=2), [desk.add(n, counter="d") for n in (2, 3)]
    await desk.append(cancelled, *others)
    desk.clock.advance(MINUTE)
    await desk.process.roll_up()
    decision = Decision(Outcome.CANCELLED, fingerprint([cancelled]))
    await desk.store.decisions.cancel(desk.namespace, [cancelled], decision)
    adds = [desk.add(4, at_most=2, delta=2), desk.add(5, at_most=2, counter="d")]
    with patch.object(bounds, "_LOG_EVENTS_MAX", 1):
        first, second = await desk.append(*adds)
    assert isinstance(first, UnavailableError)
    assert second is REACHED
    with patch.object(bounds, "_LOG_EVENTS_MAX", 2):
        assert await desk.append(adds[0]) == [NEW]


async def test_an_atomic_add_without_bounds_reads_no_tail(desk: Desk) -> None:
    await desk.append(desk.add(1), desk.clear(2))
    with patch.object(bounds, "_LOG_EVENTS_MAX", 2):
        assert await desk.append_atomic(desk.atomic(3, Item("c", 1))) is NEW
