"""Adds that come in one turn of the event loop: one call writes all, and each gets its outcome.

A task for each add costs more than the add. Here a turn's adds share one, and each sender is called
back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from counter.core.admission import Load
from counter.errors import CounterError
from counter.types import Event, Namespace, Written

#: Called with what became of an add: an outcome, or why there is none.
Done = Callable[[Written | CounterError], None]
#: Writes the events of one namespace; an outcome, or an error, for each.
Write = Callable[[Namespace, Sequence[Event]], Awaitable[Sequence[Written | CounterError]]]

_log = logging.getLogger("counter.turns")


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
            outcomes = [_unexpected(error)] * len(turn.events)
        finally:
            self._load.leave(len(turn.events))
        for done, outcome in zip(turn.dones, outcomes, strict=True):
            try:
                done(outcome)
            except Exception:
                # One that cannot be told must not keep the others waiting.
                _log.exception("the outcome of an add could not be told")


def _unexpected(error: Exception) -> CounterError:
    """What to answer for an *error* that no code expects."""
    _log.error("a write of adds failed unexpectedly", exc_info=error)
    fault = CounterError("the service met a fault of its own; see its log")
    fault.__cause__ = error
    return fault
