"""What the audit finds over a store: planted damage, all of it, and nothing else."""

from collections.abc import Sequence

import pytest

from counter.core.namespaces import Namespaces
from counter.core.read import CountReader
from counter.core.resolve import Resolver
from counter.errors import NamespaceUnknownError
from counter.limits import MILLISECOND, MINUTE, SECOND
from counter.ops.audit import Auditor, Damage, State, Verdict
from counter.ports import Store
from counter.storage.shared.memory_cache import MemoryCache
from counter.testing.cases import (
    DATASET,
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
    slice_at,
    written,
)
from counter.testing.clock import FakeClock
from counter.types import Checkpoint, CounterUpdate, Head, Namespace, Pending, Span, WindowRow
from rollup.worker import RollupWorker

ACCEPT = 5 * SECOND
#: What passes until a window of now is closed.
CLOSING = WINDOW + ACCEPT + DATASET.write_timeout_us + SECOND
_YEAR = 365 * 24 * 60 * MINUTE


async def at_once(_: float) -> None:
    """No waiting between two looks: the test does what is to happen meanwhile."""


class Audited:
    """A store with counters that were counted, and an audit of them."""

    def __init__(self, store: Store, clock: FakeClock, namespace: Namespace) -> None:
        self.store = store
        self.clock = clock
        self.namespace = namespace
        self.auditor = Auditor(store, sleep=at_once)
        self.namespaces = Namespaces(store, clock)
        self.worker = RollupWorker(store, MemoryCache(clock), clock, self.namespaces)
        self._numbers = iter(range(1, 2**62))

    async def add(self, counter: str, delta: int, *, clears: bool = False, age: int = 0) -> None:
        at, number = self.clock.now_us() - age, next(self._numbers)
        event = clear(counter, at, number) if clears else add(counter, at, number, delta)
        await written(self.store, self.namespace, [event])

    async def roll(self) -> None:
        """Let all that was written be closed, and roll it up."""
        self.clock.advance(CLOSING if self.namespace.eras[0][1] == ACCEPT else 34 * MINUTE)
        await self.namespaces.refresh()
        for shard in range(self.namespace.settings.shards):
            await self.worker.roll_shard(self.namespace, shard)

    async def head(self, counter: str) -> Head:
        (head,) = await self.store.rollups.heads(self.namespace, [counter])
        assert head is not None
        return head

    async def plant(
        self,
        counter: str,
        *rows: WindowRow,
        count: int | None = None,
        settled: Checkpoint | None = None,
    ) -> None:
        """Write what no rollup would."""
        standing = (await self.head(counter)).checkpoint
        wrong = standing if count is None else standing._replace(count=count)
        update = CounterUpdate(counter, rows, wrong, settled)
        # Later than any batch that reached the same instant, and earlier than those after it.
        through_us = standing.time_us + MILLISECOND
        await self.store.rollups.apply(self.namespace, [update], through_us=through_us)

    async def rows(self, counter: str) -> Sequence[WindowRow]:
        (rows,) = await self.store.rollups.rows(self.namespace, [counter], Span.after(0, 2**60))
        return rows

    async def audit(self, *counters: str, trust: bool = False) -> list[Verdict]:
        return await self.auditor.audit(self.namespace, counters, trust_settled=trust)

    async def damages(self, counter: str) -> list[tuple[Damage, int, int]]:
        """(what, stored, expected) of each finding."""
        (verdict,) = await self.audit(counter)
        assert (verdict.state is State.WRONG) == bool(verdict.findings), verdict
        return [(each.damage, each.stored.total, each.expected.total) for each in verdict.findings]

    async def repair(self, counter: str, *, trust: bool = False) -> int:
        resolver = Resolver(self.store, self.clock)
        verdicts = await self.audit(counter, trust=trust)
        return await self.auditor.repair(self.namespace, verdicts, resolver)

    async def count(self, counter: str) -> int:
        """As rolled up."""
        reader = CountReader(self.store, MemoryCache(self.clock), self.clock)
        (found,) = await reader.read(self.namespace, [counter], _YEAR)
        return found.count


async def must_come_right(audited: Audited, counter: str, count: int) -> None:
    """Once the recount's window is passed all agrees."""
    await audited.roll()
    (verdict,) = await audited.audit(counter)
    assert (verdict.state, verdict.findings) == (State.RIGHT, ())
    head = await audited.head(counter)
    assert (head.checkpoint.count, head.pending) == (count, ())
    assert await audited.count(counter) == count


class AuditCases(StoreCases):
    """Right is what is right, wrong what is wrong, and a repair makes it right."""

    @pytest.fixture
    async def audited(self, store: Store, clock: FakeClock) -> Audited:
        """Counters ``a``, ``b`` with a clear, and ``idle``, over several windows."""
        namespace = await make_namespace(store, "audited", shards=2, accept_limit_us=ACCEPT)
        audited = Audited(store, clock, namespace)
        await audited.add("idle", 50)
        await audited.add("b", 7)
        for number in range(3):
            await audited.add("a", 10**number)
            await audited.add("b", -3)
            clock.advance(WINDOW)
        await audited.add("b", 0, clears=True)
        clock.advance(SECOND)
        await audited.add("b", 4)
        await audited.roll()
        return audited

    async def test_what_was_rolled_up_is_right(self, audited: Audited) -> None:
        """Idle counters, cleared ones and ones that never were; what is not rolled up yet too."""
        await audited.add("a", 5)
        verdicts = await audited.audit("a", "b", "idle", "never", "a")
        assert [each.counter for each in verdicts] == ["a", "b", "idle", "never"]
        assert {each.state for each in verdicts} == {State.RIGHT}
        assert all(each.since_us <= FIRST_SLICE < NOW <= each.through_us for each in verdicts)

    async def test_a_wrong_row_is_found_and_put_right(self, audited: Audited) -> None:
        """The checkpoint is what it was: only history would tell wrong numbers."""
        first = (await audited.rows("a"))[0]
        await audited.plant("a", first._replace(total=99))
        assert await audited.damages("a") == [(Damage.WRONG_ROW, 99, 1)]
        assert await audited.repair("a") == 1
        await must_come_right(audited, "a", 111)

    async def test_a_lost_row_is_found_and_put_right(self, audited: Audited) -> None:
        """A new fold would lose the window."""
        first = (await audited.rows("a"))[0]
        await self.lose_row(audited.store, audited.namespace, ("a", first.window_us))
        assert await audited.damages("a") == [(Damage.MISSING_ROW, 0, 1)]
        assert await audited.repair("a") == 1
        await must_come_right(audited, "a", 111)

    async def test_a_row_without_events_is_found_and_put_right(self, audited: Audited) -> None:
        """Wherever it lies; one that says nothing is no damage."""
        empty, phantom = (WindowRow(T0 + n * WINDOW, False, 1_000 * n) for n in (0, 1))
        await audited.plant("idle", empty, phantom)
        assert await audited.damages("idle") == [(Damage.PHANTOM_ROW, 1_000, 0)]
        assert await audited.repair("idle") == 1
        await must_come_right(audited, "idle", 50)

    async def test_a_wrong_checkpoint_is_found_and_put_right(self, audited: Audited) -> None:
        """Without further adds to the counter. Readers see it right at once."""
        for counter, count in (("a", 111), ("b", 4), ("idle", 50)):
            await audited.plant(counter, count=10**20)
            found = await audited.damages(counter)
            assert found == [(Damage.WRONG_CHECKPOINT, 10**20, count)]
            assert await audited.count(counter) == 10**20
            assert await audited.repair(counter) == 1
            assert await audited.count(counter) == count
        for counter, count in (("a", 111), ("b", 4), ("idle", 50)):
            await must_come_right(audited, counter, count)

    async def test_a_row_that_is_not_in_the_checkpoint_is_found(self, audited: Audited) -> None:
        """The checkpoint is as of the watermark, so it must hold what lies before it."""
        head = await audited.head("idle")
        window_us = head.checkpoint.time_us + 1
        await audited.add("b", 1)
        await audited.roll()
        await audited.plant("idle", WindowRow(window_us, False, 3))
        kinds = [damage for damage, _, _ in await audited.damages("idle")]
        assert kinds == [Damage.PHANTOM_ROW]

    async def test_a_pending_recount_is_waited_for(self, audited: Audited) -> None:
        """Readers count the window for themselves, so nothing is wrong; afterwards all is
        reported."""
        first = (await audited.rows("a"))[0]
        await audited.plant("a", first._replace(total=99))
        left = Pending(first.window_us, audited.clock.now_us() // WINDOW * WINDOW)
        await audited.store.recounts.write_pending(audited.namespace, [("a", left)])
        (verdict,) = await audited.audit("a")
        assert verdict.state is State.RIGHT
        await audited.plant("a", count=5)
        (verdict,) = await audited.audit("a")
        assert (verdict.state, verdict.why) == (State.WAITING, "a recount of it is pending")
        await audited.add("a", 1)
        await audited.roll()
        await must_come_right(audited, "a", 112)

    async def test_a_namespace_that_is_gone_is_not_audited(self, audited: Audited) -> None:
        """It is an error, and no mismatch."""
        assert await audited.store.control.delete_namespace(audited.namespace)
        with pytest.raises(NamespaceUnknownError):
            await audited.audit("a")


class SettledAuditCases(StoreCases):
    """Settled counts have no events left: they are trusted, unless they are impossible."""

    async def test_a_contradiction_of_what_is_settled_is_not_put_right_blindly(
        self, store: Store, clock: FakeClock
    ) -> None:
        """The events that could tell which of the two is wrong are gone: somebody must say."""
        audited = await self.settled(store, clock)
        head = await audited.head("old")
        assert (head.settled.count, head.checkpoint.count) == (6, 7)
        assert (await audited.audit("old"))[0].state is State.RIGHT
        await audited.plant("old", count=8)
        assert await audited.damages("old") == [(Damage.CONTRADICTION, 8, 7)]
        assert await audited.repair("old") == 0
        assert await audited.repair("old", trust=True) == 1
        await must_come_right(audited, "old", 7)
        await audited.plant("old", settled=head.settled._replace(count=60))
        assert await audited.damages("old") == [(Damage.CONTRADICTION, 7, 61)]
        assert await audited.repair("old") == 0

    async def test_after_a_clear_what_is_settled_does_not_matter(
        self, store: Store, clock: FakeClock
    ) -> None:
        """So what contradicts it is known to be the checkpoint."""
        audited = await self.settled(store, clock, clears=True)
        await audited.plant("old", count=5)
        assert await audited.damages("old") == [(Damage.WRONG_CHECKPOINT, 5, 1)]
        assert await audited.repair("old") == 1
        await must_come_right(audited, "old", 1)

    async def test_what_is_settled_too_far_is_found(self, store: Store, clock: FakeClock) -> None:
        """Nothing past the slices that were dropped can be settled: its rows would not count."""
        audited = await self.settled(store, clock)
        head = await audited.head("old")
        await audited.plant("old", settled=Checkpoint(FIRST_SLICE + 3 * SLICE, head.settled.count))
        (verdict,) = await audited.audit("old")
        assert (verdict.state, verdict.repairs) == (State.WRONG, ())
        assert verdict.findings[0].damage is Damage.WRONG_SETTLED

    async def settled(self, store: Store, clock: FakeClock, *, clears: bool = False) -> Audited:
        """``old`` has 6 in a slice that was dropped, and 1 in one that was not."""
        audited = Audited(store, clock, await make_namespace(store, "audited"))
        await audited.add("old", 6, age=31 * MINUTE)
        (dataset,) = await store.control.datasets()
        for start_us in range(SLICES_END, SLICES_END + 8 * SLICE, SLICE):
            await store.control.make_slices(dataset, slice_at(start_us))
        await audited.roll()
        await store.control.drop_slice(dataset, FIRST_SLICE)
        if clears:
            await audited.add("old", 0, clears=True)
            clock.advance(SECOND)
        await audited.add("old", 1)
        await audited.roll()
        return audited
