"""Run ``counter audit``: parse its flags and show the results."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Final

from cyclopts import Parameter

from counter import limits
from counter.cli.commands.serve import Roller, roller_for
from counter.cli.flags import StoreFlags, ready
from counter.cli.progress import progress
from counter.cli.terminal import Json, exit_on_error, exiting, flag, print_answer, remark
from counter.config.settings import Settings
from counter.core.clock_guard import guard_of
from counter.core.namespaces import Namespaces
from counter.core.resolve import Resolver
from counter.errors import DamagedError, NamespaceUnknownError, StartupError, UnavailableError
from counter.ops.audit import (
    Auditor,
    Pace,
    State,
    Summary,
    Verdict,
    all_names,
    audited,
    each_of,
    sample_of,
)
from counter.ports import Clock, Store
from counter.quantities import format_duration, parse_duration, parse_rate, plural
from counter.security.audit_log import AdminLog, os_user
from counter.storage.shared.startup_retry import StartupRetry
from counter.types import CounterType, Namespace
from counter.windows import closes_at

#: Exit codes besides 0, and 2 if it cannot run.
EXIT_WRONG: Final = 1
EXIT_REPAIRED: Final = 3

#: How long a recount may take after it is due.
_GRACE_US: Final = limits.MINUTE
_ASK_EVERY_S: Final = 2.0
#: The most repaired counters that are named in the audit log.
_NAMED_MAX: Final = 100


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class AuditFlags:
    """Which counters to audit, how closely, how fast, and whether to repair."""

    namespace: Annotated[
        tuple[str, ...],
        flag("A namespace; again for more [all]", "NAME", alias="-n", consume_multiple=False),
    ] = ()
    counter: Annotated[
        tuple[str, ...],
        flag("A counter of the one namespace; again for more", "NAME", consume_multiple=False),
    ] = ()
    prefix: Annotated[str, flag("Only counters with this prefix", "TEXT")] = ""
    sample: Annotated[
        int, flag("A random sample of this many counters per namespace", "NUMBER")
    ] = 1_000
    all: Annotated[bool, flag("All of them; a deleted one only by --counter")] = False
    last: Annotated[
        str | None,
        flag("Compare only events of the last, say, 24h [all that are kept]", "DURATION"),
    ] = None
    rate: Annotated[str, flag("Counters per second; 0/s for any number", "RATE")] = "200/s"
    repair: Annotated[bool, flag("Recount wrong counters")] = False
    trust_settled: Annotated[
        bool,
        flag("With --repair: if a count contradicts its settled part, use the settled part"),
    ] = False
    json: Json = False


@dataclass(slots=True)
class _Audit:
    """One run of the command."""

    flags: AuditFlags
    store: Store
    clock: Clock
    namespaces: Namespaces
    auditor: Auditor
    resolver: Resolver
    #: Rolls up if there are no workers; None otherwise.
    roller: Roller | None
    from_us: int
    pace: Pace
    admin_log: AdminLog
    summaries: list[Summary] = field(default_factory=list)

    async def run(self) -> Sequence[Summary]:
        """Audit, and repair if asked; return a summary of each namespace."""
        for namespace in _chosen(self.namespaces, self.flags):
            try:
                self.summaries.append(await self._one(namespace))
            except NamespaceUnknownError:
                remark(f"{namespace.name} was deleted during the audit")
        return self.summaries

    async def _one(self, namespace: Namespace) -> Summary:
        names, total = await self._names(namespace)
        with progress(f"auditing {namespace.name}", total) as bar:
            look = partial(self._audit, namespace)
            summary = await audited(
                self.auditor, namespace, names, self.pace, look, on_batch=bar.advance
            )
        wrong = [each for each in summary.wrong.values() if each.repairs]
        if self.flags.repair and wrong:
            await self._repair(namespace, summary, wrong)
        return summary

    async def _audit(self, namespace: Namespace, names: Sequence[str]) -> list[Verdict]:
        trust = self.flags.trust_settled
        return await self.auditor.audit(namespace, names, from_us=self.from_us, trust_settled=trust)

    async def _names(self, namespace: Namespace) -> tuple[AsyncIterator[str], int | None]:
        """Return the counters to audit, and their number if it is known."""
        if self.flags.counter:
            return each_of(self.flags.counter), len(self.flags.counter)
        names = all_names(self.store, namespace, self.flags.prefix)
        if self.flags.all:
            return names, None
        chosen = await sample_of(names, self.flags.sample)
        return each_of(chosen), len(chosen)

    async def _repair(
        self, namespace: Namespace, summary: Summary, wrong: Sequence[Verdict]
    ) -> None:
        """Leave recounts, and wait until they are done: when the current window is closed."""
        names = [each.counter for each in wrong]
        async with self.admin_log.act(
            "audit.repair",
            os_user(),
            namespace=namespace.name,
            number=len(names),
            counters=names[:_NAMED_MAX],
        ):
            await self.auditor.repair(namespace, wrong, self.resolver)
        due_us = closes_at(namespace, self.clock.now_us())
        wait_us = due_us - self.clock.now_us()
        read = plural(len(wrong), "counter reads", "counters read")
        remark(
            f"{namespace.name}: {read} right from now on; recounted in"
            f" {format_duration(wait_us // limits.SECOND * limits.SECOND + limits.SECOND)}"
        )
        left = [each.counter for each in wrong]
        with progress(f"repairing {namespace.name}", len(left)) as bar:
            while left and self.clock.now_us() < due_us + _GRACE_US:
                await asyncio.sleep(min(_ASK_EVERY_S, max(0.1, wait_us / limits.SECOND)))
                if self.clock.now_us() < due_us:
                    continue
                if self.roller is not None:
                    await self.roller(namespace)
                verdicts = await self._audit(namespace, left)
                summary.count(verdicts)
                done = [each.counter for each in verdicts if each.state is State.RIGHT]
                summary.repaired += done
                left = [name for name in left if name not in done]
                bar.advance(len(done))
        if left:
            remark(f"{namespace.name}: {len(left):,} are not recounted yet: is a worker running?")


def audit(what: AuditFlags | None = None, flags: StoreFlags | None = None) -> None:
    """Compare counters with their events; see ``counter audit --help``."""
    what = what or AuditFlags()
    with exit_on_error():
        if what.counter and len(what.namespace) != 1:
            raise StartupError("--counter: give the one --namespace that the counters are in")
        if what.sample < 1:
            raise StartupError(f"--sample is {what.sample}; it must be at least 1")
        try:
            rate = float(parse_rate(what.rate))
            last_us = None if what.last is None else parse_duration(what.last)
        except ValueError as error:
            raise StartupError(str(error)) from error
        settings = ready(flags).settings
        summaries = asyncio.run(_run(what, settings, rate, last_us))
        with exiting(_exit_code(summaries)):
            print_answer(
                "\n".join(line for each in summaries for line in each.lines()),
                {"namespaces": [each.document() for each in summaries]},
                json=what.json,
            )


def _exit_code(summaries: Sequence[Summary]) -> int:
    if any(each.wrong or each.waiting for each in summaries):
        return EXIT_WRONG
    return EXIT_REPAIRED if any(each.repaired for each in summaries) else 0


async def _run(
    what: AuditFlags, settings: Settings, rate: float, last_us: int | None
) -> Sequence[Summary]:
    clock = settings.kind.clock()
    store = settings.kind.open(settings, clock, to_audit=True)
    async with AsyncExitStack() as stack:
        await _open(store, settings)
        stack.push_async_callback(store.close)
        namespaces = Namespaces(store, clock)
        await namespaces.refresh()
        guard = None
        if what.repair:
            guard = guard_of(store, clock)
            await guard.measure()
        run = _Audit(
            what,
            store,
            clock,
            namespaces,
            Auditor(store),
            Resolver(store, clock, guard),
            roller_for(store, clock, namespaces) if store.capabilities.embedded else None,
            0 if last_us is None else clock.now_us() - last_us,
            Pace(clock, rate),
            AdminLog(settings.audit_log, clock),
        )
        return await run.run()


async def _open(store: Store, settings: Settings) -> None:
    """Open *store*. Raises StartupError, with the fix if another process holds it."""
    if not settings.kind.serves_alone:
        await StartupRetry(settings.start_timeout).run(store.open)
        return
    try:
        await store.open()
    except DamagedError:
        raise
    except (StartupError, UnavailableError) as error:
        raise StartupError(
            f"{error}\na process that serves audits its counters by itself (--audit-interval), and"
            " reports it on /metrics as counter_audit_...;\nto audit all of them now beside it,"
            " audit a copy: `counter backup COPY`, `counter restore COPY --data DIR`,"
            " `counter audit --all --data DIR`;\nto repair, stop it first"
        ) from error


def _chosen(namespaces: Namespaces, flags: AuditFlags) -> list[Namespace]:
    """Return the namespaces to audit. Raises StartupError."""
    known = {each.name: each for each in namespaces.all()}
    for name in flags.namespace:
        if name not in known:
            raise StartupError(f"--namespace: there is no namespace {name!r}")
        if known[name].settings.counter_type is CounterType.BEST_EFFORT:
            raise StartupError(f"--namespace: {name!r} is BEST_EFFORT, and keeps no events")
    wanted = [known[name] for name in flags.namespace] or list(known.values())
    return [each for each in wanted if each.settings.counter_type is not CounterType.BEST_EFFORT]
