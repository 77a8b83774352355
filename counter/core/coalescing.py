"""Adds that come in one turn of the event loop: written by one call, and answered together.

A task for each add costs more than the add. Here a turn's adds share one, and who sent them is
called back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from counter.core.admission import Load
from counter.core.results import TALLIED, count_failure
from counter.errors import CounterError, NamespaceUnknownError, SliceMissingError
from counter.ports import Told
from counter.types import Event, Namespace, Written

#: Told what became of an add: an outcome, or why there is none.
Done = Callable[[Written | CounterError], None]
#: Writes the events of one namespace; an outcome, or an error, for each.
Write = Callable[[Namespace, Sequence[Event]], Awaitable[Sequence[Written | CounterError]]]

_log = logging.getLogger("counter.turns")


def telling(done: Done, tally: dict[str, int]) -> Told:
    """Tells *done* what it can make use of, and counts what was taken in *tally*."""

    def told(outcome: Written | BaseException) -> None:
        if isinstance(outcome, Written):
            if outcome is not Written.LATE and outcome is not Written.CONFLICT:
                tally[TALLIED[outcome]] += 1
            done(outcome)
        elif isinstance(outcome, SliceMissingError | NamespaceUnknownError):
            # Nothing is written; whoever looks closer knows what to say.
            done(Written.LATE)
        else:
            error = outcome if isinstance(outcome, CounterError) else _fault(outcome)
            count_failure(tally, error)
            done(error)

    return told


def _fault(error: BaseException) -> CounterError:
    """What to say of an *error* that nobody foresaw."""
    _log.error("adds were written in a way that should not fail", exc_info=error)
    fault = CounterError("the service met a fault of its own; see its log")
    fault.__cause__ = error
    return fault


class _Turn:
    __slots__ = ("dones", "events", "namespace")

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.events: list[Event] = []
        self.dones: list[Done] = []


class Turns:
    """Gathers adds until the loop comes to the next turn."""

    def __init__(self, write: Write, load: Load) -> None:
        self._write = write
        self._load = load
        #: Those that still gather, one for each namespace and version of its settings.
        self._gathering: dict[int, _Turn] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, namespace: Namespace, event: Event, done: Done) -> None:
        """Have *event* written with the rest of its turn; then call *done*. Raises OverloadedError
        before any work."""
        self._load.admit(1)
        key = id(namespace)
        turn = self._gathering.get(key)
        if turn is None:
            if not self._gathering:
                self._load.turn_began()
            turn = self._gathering[key] = _Turn(namespace)
            task = asyncio.get_running_loop().create_task(self._flush(key))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        turn.events.append(event)
        turn.dones.append(done)

    async def _flush(self, key: int) -> None:
        turn = self._gathering.pop(key)
        self._load.turn_over()
        try:
            outcomes = await self._write(turn.namespace, turn.events)
        except Exception as error:
            outcomes = [_fault(error)] * len(turn.events)
        finally:
            self._load.leave(len(turn.events))
        for done, outcome in zip(turn.dones, outcomes, strict=True):
            try:
                done(outcome)
            except Exception:
                # One that cannot be told must not keep the others waiting.
                _log.exception("the outcome of an add could not be told")
