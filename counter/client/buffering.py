"""Merging and bounds, shared by both buffers. An add must take a few hundred nanoseconds."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from counter import limits
from counter.client.calls import Calls
from counter.client.delivery import Backlog, Delivery
from counter.client.failures import ClosedError, Rejected, RejectedError, UnsentError
from counter.client.options import Flush, call_hook, check_number
from counter.client.retrying import Policy
from counter.client.spool import ADOPT_EVERY_S, Spool
from counter.client.tokens import checked_name
from counter.errors import InvalidParameterError

DELTA_MIN: Final = limits.INT64_MIN
DELTA_MAX: Final = limits.INT64_MAX
#: Rejected items kept until the next flush; further ones are only counted.
_REJECTED_MAX: Final = 10_000
_DELAY_MAX_S: Final = 3_600.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """How long adds may be pending, in seconds, and how many counters."""

    max_delay: float
    max_items: int

    def __post_init__(self) -> None:
        check_number("max_delay", self.max_delay, _DELAY_MAX_S)
        if type(self.max_items) is not int or self.max_items < 1:
            raise InvalidParameterError(
                f"max_items is {self.max_items!r}; it must be an integer, 1 or more"
            )


class Merging:
    """The open adds of a buffer, its backlog, and its failures.

    An add is in ``open`` first; ``take`` moves all open adds to the backlog, which sends each in
    exactly one piece. The buffer does the locking.
    """

    def __init__(self, calls: Calls, policy: Policy, bounds: Bounds, spool: Path | None) -> None:
        self.open: dict[str, int] = {}
        self.bounds = bounds
        self.backlog: Backlog | Spool = Backlog()
        self.durable = spool is not None
        #: How long to wait for adds before the backlog is checked again.
        self.adopt_every_s = None if spool is None else ADOPT_EVERY_S
        #: Counters and items in the backlog, or being moved there.
        self.held = 0
        self.closed = False
        #: The error that ended the sending, and the adds that were open then.
        self.failure: BaseException | None = None
        self.stranded: dict[str, int] = {}
        #: How often the service permanently rejected a whole piece.
        self.refusals = 0
        self.delivery: Delivery | None = None
        self.rejected: list[Rejected] = []
        #: The backlog's ``finished``, set after the rejected items are noted; a flush waits for it.
        self.finished = 0
        self._calls = calls
        self._policy = policy
        self._spool = spool
        self._pid = os.getpid()

    def begin(self) -> None:
        """Open the spool in the sending process. Raises as :class:`Spool`."""
        self._pid = os.getpid()
        if self._spool is not None:
            self.backlog = Spool(self._spool, self._calls.namespace)
            self.held = len(self.backlog)

    def check(self, counter: str) -> None:
        """Validate a counter's first add. Raises CounterError."""
        self.check_process()
        if self.closed:
            raise ClosedError("the buffer is closed; make another one")
        if self.failure is not None:
            raise ClosedError(f"the buffer cannot go on: {self.failure}") from self.failure
        checked_name(counter)

    @property
    def is_inherited(self) -> bool:
        """Whether this is a fork of the buffer's process. The adds and the spool belong to the
        parent: sent from here too, they would count twice."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Raise ClosedError in a fork of the buffer's process."""
        if self.is_inherited:
            raise ClosedError(
                "the adds in the buffer belong to the process that this one was forked from"
            )

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another counter."""
        return len(self.open) + self.held >= self.bounds.max_items

    @property
    def is_urgent(self) -> bool:
        """Whether the open adds must be sent before ``max_delay``."""
        return (len(self.open) + self.held) * 2 >= self.bounds.max_items

    def take(self) -> dict[str, int]:
        """Remove and return all open adds, including stranded ones that only a spool can save."""
        taken, self.open = self.open, {}
        stranded, self.stranded = self.stranded, {}
        for counter, delta in stranded.items():
            taken[counter] = taken.get(counter, 0) + delta
        self.held += len(taken)
        return taken

    def deliver(self) -> Delivery | None:
        """Return the delivery of the next piece, or None. May wait for a disk."""
        piece = self.backlog.seal()
        if not piece:
            return None
        self.delivery = Delivery(self._calls, piece, self.backlog.renew)
        return self.delivery

    def finish(self, begin_s: float) -> list[Rejected]:
        """Finish the piece and return its rejected items. May wait for a disk."""
        items = 0 if self.delivery is None else len(self.delivery.items)
        rejected = self.backlog.finish()
        self.delivery = None
        flush = Flush(items, self._policy.now_s() - begin_s, len(rejected), None)
        call_hook(self._policy.options.on_flush, flush)
        return rejected

    def note_trouble(self) -> None:
        """Record that an attempt at the piece failed, or some of its items did."""
        delivery = self.delivery
        if delivery is None or delivery.trouble is None:
            return
        if delivery.trouble.retry == "never":
            self.refusals += 1
        flush = Flush(len(delivery.items), 0.0, 0, delivery.trouble)
        call_hook(self._policy.options.on_flush, flush)

    def fail(self, error: BaseException) -> None:
        """Record that sending ended with *error*; further adds raise ClosedError."""
        self.failure = error
        self.stranded, self.open = self.open, {}

    def note_finished(self, rejected: list[Rejected]) -> None:
        """Record that a piece ended; keep its *rejected* items for the next flush or close."""
        self.rejected += rejected[: _REJECTED_MAX - len(self.rejected)]
        self.held = len(self.backlog)
        self.finished = self.backlog.finished

    def note_end(self) -> None:
        """Record the rejected items of the last piece, after sending has stopped."""
        self.rejected += self.backlog.refused()

    def take_rejected(self) -> tuple[Rejected, ...]:
        """Return the items rejected since the last call."""
        rejected, self.rejected = tuple(self.rejected), []
        return rejected

    def check_flushed(self, why: str | None) -> None:
        """Raise UnsentError if *why* is given and adds are left; RejectedError if items were
        rejected."""
        is_left = bool(len(self.backlog) or self.open or self.stranded)
        if why is not None and (is_left or self.failure is not None):
            raise self._unsent(why)
        if rejected := self.take_rejected():
            raise RejectedError(rejected)

    def _unsent(self, why: str) -> UnsentError:
        trouble = None if self.delivery is None else self.delivery.trouble
        open_adds = dict(self.backlog.unsent())
        for counter, delta in (*self.stranded.items(), *self.open.items()):
            open_adds[counter] = open_adds.get(counter, 0) + delta
        unfinished = tuple(
            self._calls.unfinished(each.counter, each.delta, each.token)
            for each in self.backlog.unfinished()
        )
        cause = self.failure or trouble
        reason = "" if cause is None else f": {cause}"
        error = UnsentError(
            f"{why}: {len(unfinished)} items were sent and have no answer yet,"
            f" {len(open_adds)} counters were not sent{reason}",
            unfinished,
            open_adds,
            self.take_rejected(),
        )
        error.__cause__ = cause
        return error
