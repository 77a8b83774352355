"""Gather the adds that arrive together, so that one call of the store writes them; do others at
once, each in its own task."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from counter.core.admission import Load
from counter.errors import CounterError
from counter.types import Event, Namespace, Written

#: Called with the outcome of an add, or with the error that leaves it without one.
Done = Callable[[Written | CounterError], None]
#: Writes the events of one namespace; returns an outcome, or an error, for each.
Write = Callable[[Namespace, Sequence[Event]], Awaitable[Sequence[Written | CounterError]]]

_Result = TypeVar("_Result")
_log = logging.getLogger("counter.adds")


class _Gathered:
    """Adds of one namespace that are written together."""

    __slots__ = ("dones", "events", "namespace")

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.events: list[Event] = []
        self.dones: list[Done] = []


class AddGatherer:
    """Gathers the adds that arrive in one iteration of the event loop, so that one task and one
    call write them. A task for each add would cost more than the add."""

    def __init__(self, write: Write, load: Load) -> None:
        self._write = write
        self._load = load
        #: The adds of this iteration, by the id() of their namespace: another version of its
        #: settings is another object.
        self._gathering: dict[int, _Gathered] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, namespace: Namespace, event: Event, done: Done) -> None:
        """Write *event* with the others of this iteration, then call *done*. Raises
        OverloadedError before any work."""
        key = id(namespace)
        gathered = self._gathering.get(key)
        self._load.admit(1, begins_turn=not self._gathering)
        if gathered is None:
            gathered = self._gathering[key] = _Gathered(namespace)
            task = asyncio.get_running_loop().create_task(self._flush(key))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        gathered.events.append(event)
        gathered.dones.append(done)

    async def _flush(self, key: int) -> None:
        gathered = self._gathering.pop(key)
        self._load.end_turn()
        try:
            outcomes = await self._write(gathered.namespace, gathered.events)
        except Exception as error:
            outcomes = [_unexpected(error)] * len(gathered.events)
        finally:
            self._load.finish(len(gathered.events))
        for done, outcome in zip(gathered.dones, outcomes, strict=True):
            try:
                done(outcome)
            except Exception:
                # An add whose caller fails must not block the others.
                _log.exception("the outcome of an add could not be reported")


async def at_once(
    calls: Iterable[Callable[[], Awaitable[_Result]]],
) -> list[_Result | CounterError]:
    """Make all *calls* at once, each in its own task, and return an outcome for each: one failure
    does not affect others."""

    async def outcome(call: Callable[[], Awaitable[_Result]]) -> _Result | CounterError:
        try:
            return await call()
        except CounterError as error:
            return error

    return await asyncio.gather(*map(outcome, calls))


def _unexpected(error: Exception) -> CounterError:
    """Return what to answer for an *error* that no code expects."""
    _log.error("a write of adds failed unexpectedly", exc_info=error)
    fault = CounterError("internal error; see the server log")
    fault.__cause__ = error
    return fault
