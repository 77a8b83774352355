"""Audit some counters in the background at intervals, slowly, and tally the results for a metric.

Over the rounds every counter is audited. Its checkpoint is compared with all its rows, and its rows
with the events of a span: half of the time the latest span, where a rollup bug shows first,
otherwise a random one.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.core import Metric

from counter.background import every, pause
from counter.config.settings import Settings
from counter.core.namespaces import Namespaces
from counter.errors import NamespaceUnknownError
from counter.limits import HOUR, MINUTE, SECOND
from counter.ops.audit import Auditor, Pace, Summary, Verdict, audited, described
from counter.ports import Clock, Store
from counter.telemetry.families import counter, gauge
from counter.types import CounterType, Namespace

_log = logging.getLogger("counter.audit")
#: Counters of one round, and the minimum per namespace.
_COUNTERS_MAX: Final = 1_000
_SHARE_MIN: Final = 10
_SPAN_US: Final = HOUR
#: How much of the log is read at once: requests wait for the same thread, or the same node.
_CHUNK_US: Final = MINUTE
#: The ratio of pauses to work.
_RESTS: Final = 9.0
_LINES_MAX: Final = 20


@dataclass(slots=True)
class AuditTally:
    """The results of this process's rounds since it began."""

    #: Counters that were audited, found wrong, and that could not be judged.
    checked: int = 0
    mismatches: int = 0
    unverified: int = 0
    #: Counters found wrong in the last complete round.
    standing: int = 0
    rounds: int = 0
    failures: int = 0
    #: The end of the last complete round; 0 if there is none.
    finished_at_us: int = 0


@dataclass(eq=False)
class Audits:
    """Rounds of audits, one every *interval_us*, in one process at a time."""

    store: Store
    clock: Clock
    namespaces: Namespaces
    interval_us: int
    counters_per_s: int
    tally: AuditTally = field(default_factory=AuditTally)
    #: The last audited counter of each namespace.
    _after: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._stop = asyncio.Event()
        self._pace = Pace(self.clock, self.counters_per_s, _RESTS, self._rest)
        self._auditor = Auditor(self.store, sleep=self._rest, chunk_us=_CHUNK_US)

    async def run(self, stop: asyncio.Event, is_mine: Callable[[], bool]) -> None:
        """Do rounds until *stop* is set, while *is_mine*. No failure ends them."""
        self._stop = stop

        async def work() -> None:
            if is_mine():
                try:
                    await self.round()
                except Exception:
                    self.tally.failures += 1
                    raise

        # Pause first: a process that has just started has more urgent work.
        if not await pause(stop, self.interval_us / SECOND):
            await every(self.interval_us / SECOND, work, stop, _log, "an audit")

    async def round(self) -> list[Summary]:
        """Audit the next counters of each namespace. Raises the store's errors."""
        namespaces = [
            each
            for each in self.namespaces.all()
            if each.settings.counter_type is not CounterType.BEST_EFFORT
        ]
        share = max(_SHARE_MIN, _COUNTERS_MAX // max(1, len(namespaces)))
        summaries = []
        for namespace in namespaces:
            with suppress(NamespaceUnknownError):
                summaries.append(await self._one(namespace, share))
            if self._stop.is_set():
                return summaries
        known = {each.id for each in namespaces}
        self._after = {key: name for key, name in self._after.items() if key in known}
        self.tally.rounds += 1
        self.tally.standing = sum(len(each.wrong) for each in summaries)
        self.tally.finished_at_us = self.clock.now_us()
        return summaries

    async def _one(self, namespace: Namespace, share: int) -> Summary:
        def on_batch(checked: int) -> None:
            self.tally.checked += checked

        async def look(names: Sequence[str]) -> list[Verdict]:
            if self._stop.is_set():
                return []
            from_us = self._from(namespace)
            return await self._auditor.audit(
                namespace, names, from_us=from_us, to_us=from_us + _SPAN_US
            )

        names = self._next(namespace, share)
        summary = await audited(self._auditor, namespace, names, self._pace, look, on_batch)
        self.tally.mismatches += len(summary.wrong)
        self.tally.unverified += len(summary.waiting)
        _log_wrong(summary)
        return summary

    async def _next(self, namespace: Namespace, share: int) -> AsyncIterator[str]:
        """Return the next names to audit; after the last one start again at the first."""
        after = self._after.get(namespace.id)
        page = await self.store.control.counters(namespace, prefix="", after=after, limit=share)
        if len(page) < share and after is not None:
            first = await self.store.control.counters(namespace, prefix="", after=None, limit=share)
            page = list(dict.fromkeys((*page, *first)))[:share]
        if page:
            self._after[namespace.id] = page[-1]
        for name in page:
            yield name

    def _from(self, namespace: Namespace) -> int:
        """Return the start of the next batch's span."""
        now_us = self.clock.now_us()
        if random.random() < 0.5:  # half of the time
            return now_us - _SPAN_US
        return now_us - random.randrange(namespace.dataset.retention_us)

    async def _rest(self, seconds: float) -> None:
        """Wait *seconds*, or return early on shutdown."""
        await pause(self._stop, seconds)


def _log_wrong(summary: Summary) -> None:
    """Log what is wrong."""
    lines = [text for each in summary.wrong.values() for text in described(each)]
    for text in lines[:_LINES_MAX]:
        _log.error("namespace %s: counter %s", summary.namespace, text)
    if lines:
        _log.error(
            "%d of %d counters of %s differ from their events: `counter audit --all` says"
            " which, `--repair` recounts them",
            *(len(summary.wrong), summary.counters, summary.namespace),
        )


def audits_of(
    settings: Settings, store: Store, clock: Clock, namespaces: Namespaces
) -> Audits | None:
    """Return the audits that *settings* ask for; None if there are none."""
    if not settings.audit_interval:
        return None
    return Audits(store, clock, namespaces, settings.audit_interval, settings.audit_rate)


def audit_families(tally: AuditTally) -> Iterator[Metric]:
    """Return the metric families of this process's audits."""
    yield counter("audit_counters", "Counters that were audited.", tally.checked)
    text = "Counters that did not agree with their events, at each audit that found so."
    yield counter("audit_mismatches", text, tally.mismatches)
    text = "Counters that an audit could not judge: a recount was due, or the rollup half done."
    yield counter("audit_unverified", text, tally.unverified)
    text = "Counters of the last whole round that did not agree with their events."
    yield gauge("audit_mismatches_standing", text, tally.standing)
    yield counter("audit_rounds", "Rounds of audits that were ended.", tally.rounds)
    yield counter("audit_failures", "Rounds of audits that broke off.", tally.failures)
    text = "When the last whole round ended, in seconds since 1970; 0 before the first."
    yield gauge("audit_finished_timestamp_seconds", text, tally.finished_at_us / SECOND)
