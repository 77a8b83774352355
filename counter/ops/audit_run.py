"""Run audits of many counters: select them, limit concurrency and rate, and summarize the
results."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from counter import limits
from counter.clock import to_rfc3339
from counter.ops.audit import Auditor, Damage, Finding, State, Verdict
from counter.ports import Clock, Store
from counter.types import Fold, Namespace

#: Counters per batch. A store in one file reads a span of events once for the whole batch.
_TOGETHER: Mapping[bool, int] = {True: 500, False: 32}
_TOGETHER_FIRST: Final = 8
#: After a batch that read more rows than this the next batch is half as large.
_ROWS_MAX: Final = 200_000
_NAMES_PER_PAGE: Final = 1_000
#: The most findings that are shown per counter.
SHOWN_MAX: Final = 5

_TOLD: Mapping[Damage, str] = {
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
    """Yield every counter of *namespace* whose name begins with *prefix*."""
    after: str | None = None
    while True:
        page = await store.counters(namespace, prefix=prefix, after=after, limit=_NAMES_PER_PAGE)
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

    def take(self, verdicts: Sequence[Verdict]) -> None:
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
            "untold": [_document(each) for each in self.waiting.values()],
            "repaired": self.repaired,
            "events_since": to_rfc3339(self.since_us) if self.since_us else None,
        }

    def lines(self) -> list[str]:
        """Return the summary as text."""
        summary = f"{self.namespace}: {self.counters:,} counters audited, {len(self.wrong):,} wrong"
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
        summary.take(verdicts)
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
    """Describe what is wrong with a counter, a line each."""
    shown = verdict.findings[:SHOWN_MAX]
    lines = [f"{verdict.counter!r}: {_sentence(each)}" for each in shown]
    if len(verdict.findings) > len(shown):
        lines.append(f"{verdict.counter!r}: and {len(verdict.findings) - len(shown):,} more")
    return lines


def _sentence(finding: Finding) -> str:
    return _TOLD[finding.damage].format(
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
