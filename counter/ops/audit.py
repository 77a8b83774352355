"""The audit: counts made anew from events, compared with what is stored. Pure over the ports.

A counter is right where each window row up to the watermark is the fold of its window's events, and
the checkpoint the fold of ``settled`` and the rows. It is read in this order: ``dropped_before``,
watermark, head, rows, events, head. Nothing that the watermark has passed changes any more but by a
recount, so what is compared is of one moment, however long it takes to read. What a recount, a
settling or a drop changes meanwhile shows in what is read last. So one look may be wrong about a
counter that something happens to: a difference is a mismatch when two looks in a row find the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, NamedTuple

from counter import limits
from counter.core.read import EMPTY_HEAD, read_partitions
from counter.core.resolve import Resolver
from counter.errors import SliceMissingError, UnavailableError
from counter.folds import fold_rows
from counter.partitions import shard_of
from counter.ports import Store
from counter.types import Fold, Head, Namespace, WindowRow
from counter.windows import window_of

_NOTHING: Final = Fold(False, 0)
_ATTEMPTS_MAX: Final = 5
LOOKS_MAX: Final = 4
PAUSE_US: Final = limits.SECOND


class Damage(StrEnum):
    """What can be wrong."""

    #: A window's row is not the fold of its events.
    WRONG_ROW = "wrong_row"
    #: Events stand in a window that has no row.
    MISSING_ROW = "missing_row"
    #: A row stands for a window that has no events.
    PHANTOM_ROW = "phantom_row"
    #: The count that is served is not that of the events.
    WRONG_CHECKPOINT = "wrong_checkpoint"
    #: The checkpoint contradicts what is settled, or rows whose events are gone or were not looked
    #: at: one of them is wrong, and nothing tells which.
    CONTRADICTION = "contradiction"
    #: What is settled reaches past the slices that were dropped.
    WRONG_SETTLED = "wrong_settled"


_ROWS: Final = (Damage.WRONG_ROW, Damage.MISSING_ROW, Damage.PHANTOM_ROW)


class State(StrEnum):
    """What an audit says of a counter."""

    RIGHT = "right"
    WRONG = "wrong"
    #: It cannot be told now: a recount is under way, or the shard's rollup stands half done.
    WAITING = "waiting"


class Finding(NamedTuple):
    """One thing that is wrong; *at_us* is the window's start, or the instant of the count."""

    damage: Damage
    at_us: int
    stored: Fold
    expected: Fold


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found of a counter. Its rows were compared with events from *since_us* on, up to
    *through_us*; *repairs* are the windows whose recount puts it right, if any does."""

    counter: str
    state: State
    since_us: int
    through_us: int
    findings: tuple[Finding, ...] = ()
    repairs: tuple[int, ...] = ()
    why: str = ""

    @property
    def signature(self) -> tuple[object, ...]:
        """What is the same in two looks at the same damage, although the counter counts on."""
        return tuple(
            (each.damage, each.expected.total - each.stored.total)
            if each.damage in (Damage.WRONG_CHECKPOINT, Damage.CONTRADICTION)
            else each
            for each in self.findings
        )


@dataclass(slots=True)
class _Part:
    """A counter's partition in one look, and what its events are found to say."""

    watermark_us: int
    head: Head
    rows: Mapping[int, WindowRow]
    #: Rows are compared with events in ``[low, high)``.
    low_us: int
    high_us: int
    #: Windows whose recount is pending, as readers see them: they sum them for themselves.
    pending: dict[int, WindowRow]
    #: The rows as they must stand.
    merged: dict[int, WindowRow]
    summed: set[int] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)

    def compare(self, window_us: int, fold: Fold) -> None:
        """Take what the events of a window say for what must stand."""
        if not self.low_us <= window_us < self.high_us:
            return
        self.summed.add(window_us)
        row = self.rows.get(window_us)
        stored = _NOTHING if row is None else Fold(row.cleared, row.total)
        if window_us in self.pending:
            self.pending[window_us] = WindowRow(window_us, fold.cleared, fold.total)
        elif stored != fold:
            damage = Damage.MISSING_ROW if row is None else Damage.WRONG_ROW
            self.findings.append(Finding(damage, window_us, stored, fold))
            self.merged[window_us] = WindowRow(window_us, fold.cleared, fold.total)

    def compare_rest(self) -> None:
        """Find the rows whose windows turned out to have no events."""
        for at_us, row in self.rows.items():
            stored = Fold(row.cleared, row.total)
            is_known = at_us in self.summed or at_us in self.pending or stored == _NOTHING
            if self.low_us <= at_us < self.high_us and not is_known:
                self.findings.append(Finding(Damage.PHANTOM_ROW, at_us, stored, _NOTHING))
                self.merged[at_us] = WindowRow(at_us, False, 0)


class Auditor:
    """Looks at counters, and has what it finds wrong counted anew if asked."""

    def __init__(
        self,
        store: Store,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        chunk_us: int | None = None,
    ) -> None:
        """Events are read *chunk_us* at a time, by default a time bucket's."""
        self._store = store
        self._sleep = sleep
        self._chunk_us = chunk_us
        #: Window rows that were read, since the beginning.
        self.rows_read = 0

    async def audit(
        self,
        namespace: Namespace,
        counters: Sequence[str],
        *,
        from_us: int = 0,
        to_us: int = limits.TIME_MAX_US,
        trust_settled: bool = False,
    ) -> list[Verdict]:
        """A verdict on each of *counters*. Rows are compared with events in ``[from, to)`` only,
        checkpoints with rows always. Where a checkpoint contradicts what is settled, its repair is
        offered only if *trust_settled*. Raises NamespaceUnknownError, UnavailableError."""
        counters = list(dict.fromkeys(counters))
        if not counters:
            return []
        size_us = namespace.settings.rollup_window_us
        span = (window_of(from_us, size_us), window_of(to_us + size_us - 1, size_us))
        verdicts = await self._look(namespace, counters, span, trust_settled)
        known = {each.counter: each for each in verdicts}
        unsure = [each.counter for each in verdicts if each.state is not State.RIGHT]
        for _ in range(LOOKS_MAX - 1):
            if not unsure:
                break
            await self._sleep(PAUSE_US / limits.SECOND)
            for each in await self._look(namespace, unsure, span, trust_settled):
                before, known[each.counter] = known[each.counter], each
                is_sure = each.state is State.WRONG and each.signature == before.signature
                if is_sure or each.state is State.RIGHT:
                    unsure.remove(each.counter)
        for name in unsure:
            why = known[name].why or "it changed from look to look"
            known[name] = replace(known[name], state=State.WAITING, why=why, repairs=())
        return [known[name] for name in counters]

    async def repair(
        self, namespace: Namespace, verdicts: Sequence[Verdict], resolver: Resolver
    ) -> int:
        """Leave recounts for what is wrong and can be put right; how many counters. Who reads them
        sees them right at once, and the worker counts them anew when its window comes."""
        wrong = [each for each in verdicts if each.state is State.WRONG and each.repairs]
        windows = [(each.counter, at_us) for each in wrong for at_us in each.repairs]
        for start in range(0, len(windows), limits.BATCH_ITEMS_MAX):
            some = windows[start : start + limits.BATCH_ITEMS_MAX]
            await resolver.leave_recounts(namespace, some, for_readers=True)
        return len(wrong)

    async def _look(
        self,
        namespace: Namespace,
        counters: Sequence[str],
        span: tuple[int, int],
        trust_settled: bool,
    ) -> list[Verdict]:
        for _ in range(_ATTEMPTS_MAX):
            try:
                return await self._look_once(namespace, counters, span, trust_settled)
            except SliceMissingError as error:
                # A slice was dropped during the look: what is left begins later.
                missing = error
        raise UnavailableError(
            f"slices vanish again and again: {missing.detail}", retry_after_us=limits.SECOND
        )

    async def _look_once(
        self,
        namespace: Namespace,
        counters: Sequence[str],
        span: tuple[int, int],
        trust_settled: bool,
    ) -> list[Verdict]:
        dropped_us = await self._store.dropped_before(namespace.dataset)
        watermarks = await self._store.watermarks(namespace)
        partitions = await read_partitions(
            self._store, namespace, counters, through_us=limits.TIME_MAX_US
        )
        self.rows_read += sum(len(rows) for _, rows in partitions)
        parts = {
            name: _part_of(namespace, head, rows, watermarks, (name, dropped_us, span))
            for name, (head, rows) in zip(counters, partitions, strict=True)
        }
        await self._compare(namespace, parts)
        heads = await self._store.heads(namespace, counters)
        # It may have moved meanwhile, and what is settled with it.
        dropped_us = await self._store.dropped_before(namespace.dataset)
        look = _Look(namespace, dropped_us, self._store.transactional, trust_settled)
        return [
            look.judge(name, part, head or EMPTY_HEAD)
            for (name, part), head in zip(parts.items(), heads, strict=True)
        ]

    async def _compare(self, namespace: Namespace, parts: Mapping[str, _Part]) -> None:
        """Read the events of all the parts, and compare the rows with them."""
        size_us = namespace.settings.rollup_window_us
        chunk_us = window_of(self._chunk_us or namespace.dataset.time_bucket_us, size_us)
        slices = await self._store.slices(namespace.dataset)
        # Nothing was written before the first slice, nor much before the namespace was made.
        at_us = min((each.start_us for each in slices), default=limits.TIME_MAX_US)
        at_us = max(at_us, _earliest(namespace), min(part.low_us for part in parts.values()))
        high_us = max(part.high_us for part in parts.values())
        while at_us < high_us:
            until_us = min(at_us + max(chunk_us, size_us), high_us)
            wanted = [
                name
                for name, part in parts.items()
                if part.low_us < until_us and at_us < part.high_us
            ]
            folds = await self._store.window_folds(namespace, wanted, from_us=at_us, to_us=until_us)
            for name, windows in zip(wanted, folds, strict=True):
                for window_us, fold in windows.items():
                    parts[name].compare(window_us, fold)
            at_us = until_us
        for part in parts.values():
            part.compare_rest()


@dataclass(frozen=True, slots=True)
class _Look:
    """What one look knows beside the counters: *dropped_us* was read last."""

    namespace: Namespace
    dropped_us: int
    transactional: bool
    trusts_settled: bool

    def judge(self, counter: str, part: _Part, after: Head) -> Verdict:
        """What this look says of a counter, whose head was *after* at its end."""
        head, findings = part.head, sorted(part.findings, key=lambda each: each.at_us)
        as_of_us = max(part.watermark_us, head.checkpoint.time_us)
        if head.settled.time_us and head.settled.time_us >= self.dropped_us:
            settled = Fold(False, head.settled.count)
            findings.append(Finding(Damage.WRONG_SETTLED, head.settled.time_us, settled, _NOTHING))
        served = head.checkpoint.count
        count = _count_of(head, part.merged, as_of_us)
        if part.pending and served == _count_of(head, part.merged | part.pending, as_of_us):
            # It holds already what the recount will find.
            count = served
        is_open = not self.transactional and head.checkpoint.time_us > part.watermark_us
        why = self._why_untold(part, after, differs=bool(findings) or served != count)
        if not why and served != count:
            if is_open and not findings:
                why = "the rollup of its shard stands half done: is a worker running?"
            elif not is_open:
                damage = Damage.WRONG_CHECKPOINT
                if served != _count_of(head, part.rows, as_of_us) and _may_be_settled(
                    part, as_of_us
                ):
                    damage = Damage.CONTRADICTION
                findings.append(Finding(damage, as_of_us, Fold(False, served), Fold(False, count)))
        state = State.WAITING if why else State.WRONG if findings else State.RIGHT
        return Verdict(
            counter,
            state,
            since_us=part.low_us,
            through_us=part.high_us - 1,
            findings=tuple(findings),
            repairs=self._repairs(part, findings),
            why=why,
        )

    def _why_untold(self, part: _Part, after: Head, *, differs: bool) -> str:
        """Why a difference need not be damage; empty where it is."""
        if not differs:
            return ""
        if after.settled.time_us != part.head.settled.time_us:
            return "it was settled meanwhile"
        size_us = self.namespace.settings.rollup_window_us
        pending = (*part.head.pending, *after.pending)
        if any(each.window_us + size_us - 1 > part.watermark_us for each in pending):
            return "a recount of it is pending"
        return ""

    def _repairs(self, part: _Part, findings: Sequence[Finding]) -> tuple[int, ...]:
        """The windows to count anew. None where that would make more of it wrong: who counts anew
        begins with what is settled, and sums whole windows."""
        size_us = self.namespace.settings.rollup_window_us
        damages = {each.damage for each in findings}
        rows = [each.at_us for each in findings if each.damage in _ROWS]
        if Damage.WRONG_SETTLED in damages or any(at_us % size_us for at_us in rows):
            return ()
        if Damage.CONTRADICTION in damages and not self.trusts_settled:
            return ()
        if findings and not rows:
            # Whichever window is counted anew, the checkpoint is folded anew with it.
            rows = [window_of(part.watermark_us, size_us)]
        return tuple(rows)


def _part_of(
    namespace: Namespace,
    head: Head,
    rows: Sequence[WindowRow],
    watermarks: Sequence[int],
    place: tuple[str, int, tuple[int, int]],
) -> _Part:
    """The part of the counter that *place* names, beside ``dropped_before`` and the span."""
    counter, dropped_us, (from_us, to_us) = place
    size_us = namespace.settings.rollup_window_us
    watermark_us = watermarks[shard_of(counter, len(watermarks))]
    # Nothing is settled at 0.
    low_us = max(dropped_us, head.settled.time_us and head.settled.time_us + 1, from_us)
    found = {row.window_us: row for row in rows}
    return _Part(
        watermark_us=watermark_us,
        head=head,
        rows=found,
        low_us=-(-low_us // size_us) * size_us,
        high_us=min(window_of(watermark_us + 1, size_us), to_us),
        pending={each.recount_us: WindowRow(each.recount_us, False, 0) for each in head.pending},
        merged=dict(found),
    )


def _count_of(head: Head, rows: Mapping[int, WindowRow], as_of_us: int) -> int:
    """The count that *rows* make, up to *as_of_us*."""
    return fold_rows(head.settled.count, (rows[at] for at in sorted(rows) if at <= as_of_us))


def _may_be_settled(part: _Part, as_of_us: int) -> bool:
    """Whether the count rests on what was compared with no events: what is settled, or rows out of
    the span. What came before a clear does not matter."""
    known = range(part.low_us, part.high_us)
    cleared = max((at for at in part.merged if at in known and part.merged[at].cleared), default=-1)
    if any(cleared < at <= as_of_us and at not in known for at in part.merged):
        return True
    return cleared < 0 and part.head.settled.time_us > 0


def _earliest(namespace: Namespace) -> int:
    """A window start that no event of *namespace* lies before."""
    reach_us = limits.ACCEPT_LIMIT_MAX_US + 2 * namespace.dataset.clock_skew_max_us
    return window_of(
        max(0, namespace.created_at_us - reach_us), namespace.settings.rollup_window_us
    )
