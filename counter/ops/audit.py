"""Recompute counts from the event log and compare them with the stored totals.

A counter is right if each window row up to the watermark is the fold of its window's events, and
the checkpoint the fold of ``settled`` and the rows. The audit reads ``dropped_before``, watermark,
head, rows, events, and the head again, in this order. Windows that the watermark has passed change
only by a recount, so the compared values are of one moment, however long reading takes. If a
recount, a settling or a drop changes them meanwhile, the last reads show it. One pass may therefore
be wrong about a counter that is changing: a difference is a mismatch only if two passes in a row
find the same one.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, NamedTuple

from counter import limits
from counter.clock import to_rfc3339
from counter.core.read import EMPTY_HEAD, read_heads_and_rows
from counter.core.resolve import Resolver
from counter.errors import SliceMissingError, UnavailableError
from counter.holds import held_name, is_held
from counter.ports import Clock, Store
from counter.quantities import plural
from counter.types import Fold, Head, Namespace, Span, WindowRow
from counter.windows import fold_rows, shard_of, window_of

_NOTHING: Final = Fold(False, 0)
_ATTEMPTS_MAX: Final = 5
LOOKS_MAX: Final = 4
PAUSE_US: Final = limits.SECOND


class Damage(StrEnum):
    """The kinds of damage that an audit finds."""

    #: A window's row is not the fold of its events.
    WRONG_ROW = "wrong_row"
    #: A window has events and no row.
    MISSING_ROW = "missing_row"
    #: A window has a row and no events.
    PHANTOM_ROW = "phantom_row"
    #: The served count is not the count of the events.
    WRONG_CHECKPOINT = "wrong_checkpoint"
    #: The checkpoint contradicts the settled count, or rows with events that are dropped or were
    #: not compared. One of them is wrong, and the audit cannot determine which.
    CONTRADICTION = "contradiction"
    #: The settled count reaches past the dropped slices.
    WRONG_SETTLED = "wrong_settled"


_ROWS: Final = (Damage.WRONG_ROW, Damage.MISSING_ROW, Damage.PHANTOM_ROW)


class State(StrEnum):
    """The result of an audit of a counter."""

    RIGHT = "right"
    WRONG = "wrong"
    #: Unknown now: a recount is pending, or the shard's rollup is incomplete.
    WAITING = "waiting"


class Difference(NamedTuple):
    """One difference; *at_us* is the window's start, or the instant of the count."""

    damage: Damage
    at_us: int
    stored: Fold
    expected: Fold


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result for one counter.

    Its rows were compared with events from *since_us* on, up to *through_us*; *repairs* are the
    windows whose recount corrects it, if any does.
    """

    counter: str
    state: State
    since_us: int
    through_us: int
    findings: tuple[Difference, ...] = ()
    repairs: tuple[int, ...] = ()
    why: str = ""

    @property
    def signature(self) -> tuple[object, ...]:
        """Return the part of the findings that two passes share, even if the counter keeps
        counting."""
        return tuple(
            (each.damage, each.expected.total - each.stored.total)
            if each.damage in (Damage.WRONG_CHECKPOINT, Damage.CONTRADICTION)
            else each
            for each in self.findings
        )


@dataclass(slots=True)
class _Part:
    """A counter's partition in one pass, and the rows that its events require."""

    watermark_us: int
    head: Head
    rows: Mapping[int, WindowRow]
    #: Rows are compared with events in ``[low, high)``.
    low_us: int
    high_us: int
    #: Windows with a pending recount, as readers compute them.
    pending: dict[int, WindowRow]
    #: The rows that are expected.
    merged: dict[int, WindowRow]
    summed: set[int] = field(default_factory=set)
    findings: list[Difference] = field(default_factory=list)

    def compare(self, window_us: int, fold: Fold) -> None:
        """Compare a window's row with the fold of its events."""
        if not self.low_us <= window_us < self.high_us:
            return
        self.summed.add(window_us)
        row = self.rows.get(window_us)
        stored = _NOTHING if row is None else Fold(row.cleared, row.total)
        if window_us in self.pending:
            self.pending[window_us] = WindowRow(window_us, fold.cleared, fold.total)
        elif stored != fold:
            damage = Damage.MISSING_ROW if row is None else Damage.WRONG_ROW
            self.findings.append(Difference(damage, window_us, stored, fold))
            self.merged[window_us] = WindowRow(window_us, fold.cleared, fold.total)

    def compare_rest(self) -> None:
        """Find the rows whose windows have no events."""
        for at_us, row in self.rows.items():
            stored = Fold(row.cleared, row.total)
            is_known = at_us in self.summed or at_us in self.pending or stored == _NOTHING
            if self.low_us <= at_us < self.high_us and not is_known:
                self.findings.append(Difference(Damage.PHANTOM_ROW, at_us, stored, _NOTHING))
                self.merged[at_us] = WindowRow(at_us, False, 0)


class Auditor:
    """Audits counters, and requests recounts of damaged ones if asked."""

    def __init__(
        self,
        store: Store,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        chunk_us: int | None = None,
    ) -> None:
        """Events are read *chunk_us* at a time, by default one time bucket."""
        self._store = store
        self._sleep = sleep
        self._chunk_us = chunk_us
        self.transactional = store.separate_writes is None
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
        """Return a verdict on each of *counters*.

        Rows are compared with events in ``[from, to)`` only, checkpoints with rows always. If a
        checkpoint contradicts the settled count, a repair is offered only with *trust_settled*.
        What is held of the counters is audited, too; there are verdicts on it, after the others, if
        it is not right. Raises NamespaceUnknownError, UnavailableError.
        """
        counters = list(dict.fromkeys(counters))
        if not counters:
            return []
        held = self._held(namespace, counters)
        size_us = namespace.settings.rollup_window_us
        span = (window_of(from_us, size_us), window_of(to_us + size_us - 1, size_us))
        verdicts = await self._pass(namespace, [*counters, *held], span, trust_settled)
        known = {each.counter: each for each in verdicts}
        unsure = [each.counter for each in verdicts if each.state is not State.RIGHT]
        for _ in range(LOOKS_MAX - 1):
            if not unsure:
                break
            await self._sleep(PAUSE_US / limits.SECOND)
            for each in await self._pass(namespace, unsure, span, trust_settled):
                before, known[each.counter] = known[each.counter], each
                is_sure = each.state is State.WRONG and each.signature == before.signature
                if is_sure or each.state is State.RIGHT:
                    unsure.remove(each.counter)
        for name in unsure:
            why = known[name].why or "it changed between two passes"
            known[name] = replace(known[name], state=State.WAITING, why=why, repairs=())
        wrong = [name for name in held if known[name].state is not State.RIGHT]
        return [known[name] for name in (*counters, *wrong)]

    def _held(self, namespace: Namespace, counters: Sequence[str]) -> list[str]:
        """Return the counters of what is held of *counters* that are not among them."""
        holds = self._store.capabilities.holds
        if holds is None or not holds.may_hold(namespace):
            return []
        names = (held_name(each, way) for each in counters if not is_held(each) for way in (1, -1))
        return [each for each in names if each not in counters]

    async def repair(
        self, namespace: Namespace, verdicts: Sequence[Verdict], resolver: Resolver
    ) -> int:
        """Leave recounts for damage that can be repaired; return the number of counters.

        Readers see the repaired count at once; the worker does the recount when its window comes.
        """
        wrong = [each for each in verdicts if each.state is State.WRONG and each.repairs]
        windows = [(each.counter, at_us) for each in wrong for at_us in each.repairs]
        for start in range(0, len(windows), limits.BATCH_ITEMS_MAX):
            some = windows[start : start + limits.BATCH_ITEMS_MAX]
            await resolver.request_recounts(namespace, some, for_readers=True)
        return len(wrong)

    async def _pass(
        self,
        namespace: Namespace,
        counters: Sequence[str],
        span: tuple[int, int],
        trust_settled: bool,
    ) -> list[Verdict]:
        for _ in range(_ATTEMPTS_MAX):
            try:
                return await self._pass_once(namespace, counters, span, trust_settled)
            except SliceMissingError as error:
                # A slice was dropped during the pass: the remaining events begin later.
                missing = error
        raise UnavailableError(
            f"slices were dropped during each attempt: {missing.detail}",
            retry_after_us=limits.SECOND,
        )

    async def _pass_once(
        self,
        namespace: Namespace,
        counters: Sequence[str],
        span: tuple[int, int],
        trust_settled: bool,
    ) -> list[Verdict]:
        dropped_us = await self._store.control.dropped_before(namespace.dataset)
        watermarks = await self._store.rollups.watermarks(namespace)
        partitions = await read_heads_and_rows(
            self._store, namespace, counters, through_us=limits.TIME_MAX_US
        )
        self.rows_read += sum(len(rows) for _, rows in partitions)
        parts = {
            name: _part_of(namespace, head, rows, watermarks, (name, dropped_us, span))
            for name, (head, rows) in zip(counters, partitions, strict=True)
        }
        await self._compare(namespace, parts)
        heads = await self._store.rollups.heads(namespace, counters)
        # It may have moved since then, and the settled count with it.
        dropped_us = await self._store.control.dropped_before(namespace.dataset)
        this = _Pass(namespace, dropped_us, self.transactional, trust_settled)
        return [
            this.judge(name, part, head or EMPTY_HEAD)
            for (name, part), head in zip(parts.items(), heads, strict=True)
        ]

    async def _compare(self, namespace: Namespace, parts: Mapping[str, _Part]) -> None:
        """Read the events of all the parts, and compare the rows with them."""
        size_us = namespace.settings.rollup_window_us
        chunk_us = window_of(self._chunk_us or namespace.dataset.time_bucket_us, size_us)
        slices = await self._store.control.slices(namespace.dataset)
        # There are no events before the first slice, nor long before the namespace's creation.
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
            folds = await self._store.events.window_folds(namespace, wanted, Span(at_us, until_us))
            for name, windows in zip(wanted, folds, strict=True):
                for window_us, fold in windows.items():
                    parts[name].compare(window_us, fold)
            at_us = until_us
        for part in parts.values():
            part.compare_rest()


@dataclass(frozen=True, slots=True)
class _Pass:
    """The shared values of one pass; *dropped_us* was read last."""

    namespace: Namespace
    dropped_us: int
    transactional: bool
    trusts_settled: bool

    def judge(self, counter: str, part: _Part, after: Head) -> Verdict:
        """Return this pass's verdict on a counter with the head *after* at the end."""
        head, findings = part.head, sorted(part.findings, key=lambda each: each.at_us)
        as_of_us = max(part.watermark_us, head.checkpoint.time_us)
        if head.settled.time_us and head.settled.time_us >= self.dropped_us:
            settled = Fold(False, head.settled.count)
            findings.append(
                Difference(Damage.WRONG_SETTLED, head.settled.time_us, settled, _NOTHING)
            )
        served = head.checkpoint.count
        count = _count_of(head, part.merged, as_of_us)
        if part.pending and served == _count_of(head, part.merged | part.pending, as_of_us):
            # The checkpoint already includes the recount's result.
            count = served
        is_open = not self.transactional and head.checkpoint.time_us > part.watermark_us
        why = self._why_waiting(part, after, differs=bool(findings) or served != count)
        if not why and served != count:
            if is_open and not findings:
                why = "the rollup of its shard is half done: is a worker running?"
            elif not is_open:
                damage = Damage.WRONG_CHECKPOINT
                if served != _count_of(head, part.rows, as_of_us) and _may_be_settled(
                    part, as_of_us
                ):
                    damage = Damage.CONTRADICTION
                findings.append(
                    Difference(damage, as_of_us, Fold(False, served), Fold(False, count))
                )
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

    def _why_waiting(self, part: _Part, after: Head, *, differs: bool) -> str:
        """Return why a difference may not be damage; empty if it is damage."""
        if not differs:
            return ""
        if after.settled.time_us != part.head.settled.time_us:
            return "it was settled meanwhile"
        size_us = self.namespace.settings.rollup_window_us
        pending = (*part.head.pending, *after.pending)
        if any(each.window_us + size_us - 1 > part.watermark_us for each in pending):
            return "a recount of it is pending"
        return ""

    def _repairs(self, part: _Part, findings: Sequence[Difference]) -> tuple[int, ...]:
        """Return the windows to recount.

        Empty if recounts would do more damage, because a recount starts from the settled count and
        sums whole windows.
        """
        size_us = self.namespace.settings.rollup_window_us
        damages = {each.damage for each in findings}
        rows = [each.at_us for each in findings if each.damage in _ROWS]
        if Damage.WRONG_SETTLED in damages or any(at_us % size_us for at_us in rows):
            return ()
        if Damage.CONTRADICTION in damages and not self.trusts_settled:
            return ()
        if findings and not rows:
            # A recount of any window folds the checkpoint again, too.
            rows = [window_of(part.watermark_us, size_us)]
        return tuple(rows)


def _part_of(
    namespace: Namespace,
    head: Head,
    rows: Sequence[WindowRow],
    watermarks: Sequence[int],
    place: tuple[str, int, tuple[int, int]],
) -> _Part:
    """Return the part of a counter, with ``dropped_before`` and the span to compare."""
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
        pending={
            each.recount_us: WindowRow(each.recount_us, False, 0)
            for each in head.pending
            if not each.is_delete
        },
        merged=dict(found),
    )


def _count_of(head: Head, rows: Mapping[int, WindowRow], as_of_us: int) -> int:
    """Return the count of *rows* up to *as_of_us*."""
    return fold_rows(head.settled.count, (rows[at] for at in sorted(rows) if at <= as_of_us))


def _may_be_settled(part: _Part, as_of_us: int) -> bool:
    """Return whether the count depends on data without compared events: the settled count, or
    rows outside the span. Data before a clear does not matter."""
    known = range(part.low_us, part.high_us)
    cleared = max((at for at in part.merged if at in known and part.merged[at].cleared), default=-1)
    if any(cleared < at <= as_of_us and at not in known for at in part.merged):
        return True
    return cleared < 0 and part.head.settled.time_us > 0


def _earliest(namespace: Namespace) -> int:
    """Return a window start that is not later than any event of *namespace*."""
    reach_us = limits.ACCEPT_LIMIT_MAX_US + 2 * namespace.dataset.clock_skew_max_us
    return window_of(
        max(0, namespace.created_at_us - reach_us), namespace.settings.rollup_window_us
    )


#: Counters per batch. A store in one file reads a span of events once for the whole batch.
_TOGETHER: Mapping[bool, int] = {True: 500, False: 32}
_TOGETHER_FIRST: Final = 8
#: After a batch that read more rows than this the next batch is half as large.
_ROWS_MAX: Final = 200_000
_NAMES_PER_PAGE: Final = 1_000
#: The most findings that are shown per counter.
SHOWN_MAX: Final = 5

_TEXTS: Mapping[Damage, str] = {
    Damage.WRONG_ROW: "the row of the window {at} says {stored}, its events make {expected}",
    Damage.MISSING_ROW: "the window {at} has no row, its events make {expected}",
    Damage.PHANTOM_ROW: "the row of the window {at} says {stored}, and there are no such events",
    Damage.WRONG_CHECKPOINT: "the count as of {at} is {stored}, its events make {expected}",
    Damage.CONTRADICTION: (
        "the count as of {at} is {stored}; {expected} follows from what is settled, or was not"
        " compared with events: one of them is wrong, and the audit cannot determine which"
    ),
    Damage.WRONG_SETTLED: (
        "what is settled reaches {at}, past the events that were dropped: restore a backup"
    ),
}


@dataclass(slots=True)
class Pace:
    """Bounds the load: *rate* counters per second (0: no bound), and a share of the time."""

    clock: Clock
    rate: float = 0.0
    #: The ratio of pauses to work.
    rests: float = 0.0
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    async def rest(self, began_us: int, counters: int) -> None:
        """Pause after a batch of *counters* that began at *began_us*."""
        took_s = (self.clock.boottime_us() - began_us) / limits.SECOND
        due_s = counters / self.rate if self.rate else 0.0
        await self.sleep(max(due_s - took_s, self.rests * took_s, 0.0))


async def all_names(store: Store, namespace: Namespace, prefix: str = "") -> AsyncIterator[str]:
    """Yield every counter of *namespace* with the *prefix*."""
    after: str | None = None
    while True:
        page = await store.control.counters(
            namespace, prefix=prefix, after=after, limit=_NAMES_PER_PAGE
        )
        for name in page:
            yield name
        if len(page) < _NAMES_PER_PAGE:
            return
        after = page[-1]


async def sample_of(names: AsyncIterator[str], count: int) -> list[str]:
    """Return a uniform sample of *count* of *names*, in order; all if there are no more."""
    kept: list[str] = []
    place = 0
    async for name in names:
        if place < count:
            kept.append(name)
        elif (chosen := random.randrange(place + 1)) < count:  # not security-relevant
            kept[chosen] = name
        place += 1
    return sorted(kept)


async def each_of(names: Sequence[str]) -> AsyncIterator[str]:
    """Yield *names*, like a listing."""
    for name in names:
        yield name


@dataclass(slots=True)
class Summary:
    """The results of an audit of one namespace."""

    namespace: str
    counters: int = 0
    wrong: dict[str, Verdict] = field(default_factory=dict)
    waiting: dict[str, Verdict] = field(default_factory=dict)
    repaired: list[str] = field(default_factory=list)
    #: Events of every counter were compared from this instant on; 0 if no counter was audited.
    since_us: int = 0

    def count(self, verdicts: Sequence[Verdict]) -> None:
        """Count *verdicts*; a later one on a counter replaces the earlier one."""
        for each in verdicts:
            self.since_us = max(self.since_us, each.since_us)
            self.wrong.pop(each.counter, None)
            self.waiting.pop(each.counter, None)
            if each.state is State.WRONG:
                self.wrong[each.counter] = each
            elif each.state is State.WAITING:
                self.waiting[each.counter] = each

    def document(self) -> dict[str, Any]:
        """Return the summary for programs."""
        return {
            "namespace": self.namespace,
            "counters": self.counters,
            "mismatches": [_document(each) for each in self.wrong.values()],
            "unverified": [_document(each) for each in self.waiting.values()],
            "repaired": self.repaired,
            "events_since": to_rfc3339(self.since_us) if self.since_us else None,
        }

    def lines(self) -> list[str]:
        """Return the summary as text."""
        audited = plural(self.counters, "counter")
        summary = f"{self.namespace}: {audited} audited, {len(self.wrong):,} wrong"
        if self.repaired:
            summary += f", {len(self.repaired):,} repaired"
        if self.waiting:
            summary += f", {len(self.waiting):,} cannot be judged now"
        lines = [summary]
        if self.since_us:
            lines.append(
                f"  compared with events since {to_rfc3339(self.since_us)} or earlier; the settled"
                " count before them is not checked"
            )
        for verdict in self.wrong.values():
            lines += [f"  {text}" for text in described(verdict)]
        for name, verdict in self.waiting.items():
            lines.append(f"  {name!r}: {verdict.why}")
        return lines


async def audited(
    auditor: Auditor,
    namespace: Namespace,
    names: AsyncIterator[str],
    pace: Pace,
    look: Callable[[Sequence[str]], Awaitable[list[Verdict]]],
    on_batch: Callable[[int], None],
) -> Summary:
    """Summarize the verdicts that *look* returns on *names*, a batch at a time; *on_batch* is
    called with the size of each."""
    summary = Summary(namespace.name)
    size, most = _TOGETHER_FIRST, _TOGETHER[auditor.transactional]
    while batch := await _next(names, size):
        began_us, rows = pace.clock.boottime_us(), auditor.rows_read
        verdicts = await look(batch)
        is_much = auditor.rows_read - rows > _ROWS_MAX
        size = max(1, size // 2) if is_much else min(most, 2 * size)
        await pace.rest(began_us, len(batch))
        summary.counters += len(verdicts)
        summary.count(verdicts)
        on_batch(len(verdicts))
    return summary


async def _next(names: AsyncIterator[str], count: int) -> list[str]:
    """Return the next *count* of *names*, fewer at the end."""
    batch: list[str] = []
    async for name in names:
        batch.append(name)
        if len(batch) == count:
            break
    return batch


def described(verdict: Verdict) -> list[str]:
    """Describe the differences of a counter, a line each."""
    shown = verdict.findings[:SHOWN_MAX]
    name = _named(verdict.counter)
    lines = [f"{name}: {_sentence(each)}" for each in shown]
    if len(verdict.findings) > len(shown):
        lines.append(f"{name}: and {len(verdict.findings) - len(shown):,} more")
    return lines


def _named(counter: str) -> str:
    """Return the name of a counter, or what is held of which one, for a person."""
    if not is_held(counter):
        return repr(counter)
    return f"what is held {'downwards' if counter[1] == '-' else 'upwards'} of {counter[2:]!r}"


def _sentence(finding: Difference) -> str:
    return _TEXTS[finding.damage].format(
        at=to_rfc3339(finding.at_us),
        stored=_fold(finding.stored),
        expected=_fold(finding.expected),
    )


def _fold(fold: Fold) -> str:
    return f"{fold.total} after a clear" if fold.cleared else str(fold.total)


def _document(verdict: Verdict) -> dict[str, Any]:
    return {
        "counter": verdict.counter,
        "state": verdict.state,
        "why": verdict.why or None,
        "repairable": bool(verdict.repairs),
        "findings": [
            {
                "damage": each.damage,
                "at": to_rfc3339(each.at_us),
                "stored": {"cleared": each.stored.cleared, "total": each.stored.total},
                "expected": {"cleared": each.expected.cleared, "total": each.expected.total},
            }
            for each in verdict.findings
        ],
    }
