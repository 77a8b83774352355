"""What a buffer holds: adds merged by counter, and the piece of them that is on its way."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

from counter import limits
from counter.client.delivery import Item, Renewed
from counter.client.failures import Rejected
from counter.client.tokens import Token
from counter.errors import CounterError

PIECE_ITEMS_MAX: Final = limits.BATCH_ITEMS_MAX


class Backlog:
    """Adds in memory. Each of them is in one total or in one piece, never in two.

    Not safe to share between threads.
    """

    def __init__(self) -> None:
        self._totals: dict[str, int] = {}
        self._piece: list[Item] = []
        self._piece_totals = 0
        #: How far the service's clock was ahead of this machine's, where that made tokens void.
        self._ahead_us = 0
        #: Totals that were ever begun, and those of them whose end is known: both only grow. The
        #: oldest go first, so all that began before N have ended once ``finished`` is N.
        self.begun = 0
        self.finished = 0

    def __len__(self) -> int:
        """Counters and items that wait."""
        return len(self._totals) + len(self._piece)

    def put(self, adds: dict[str, int]) -> None:
        """Merge *adds*, a dictionary that is the backlog's own from now on."""
        before = len(self._totals)
        if before:
            totals = self._totals
            for counter, delta in adds.items():
                totals[counter] = totals.get(counter, 0) + delta
        else:
            self._totals = adds
        self.begun += len(self._totals) - before

    def seal(self) -> list[Item]:
        """The piece that is on its way, else a new one of the oldest totals, each under a token of
        its own. Empty if nothing waits."""
        if self._piece:
            return self._piece
        names = list(islice(self._totals, PIECE_ITEMS_MAX))
        parts = [(name, part) for name in names for part in _parts(self._totals[name])]
        time_us = _now_us() + self._ahead_us
        nonces = os.urandom(limits.NONCE_BYTES * len(parts))
        piece = [
            Item(name, delta, Token(nonces[16 * at : 16 * at + 16], time_us), row=at + 1)
            for at, (name, delta) in enumerate(parts)
        ]
        self._save_sealed(names, piece)
        if len(names) == len(self._totals):
            # Not one by one: this is the usual case.
            self._totals = {}
        else:
            for name in names:
                del self._totals[name]
        self._piece, self._piece_totals = piece, len(names)
        return piece

    def _save_sealed(self, names: list[str], piece: list[Item]) -> None:
        """Save that *piece* takes the place of the totals of *names*. Nothing has moved if this
        raises."""

    def renew(self, renewed: Renewed) -> None:
        """Note new tokens, before they are used: those of the service have its time, and a machine
        whose clock is slow would make void ones for ever."""
        self._ahead_us = renewed[0][1].generation_time_us - _now_us()

    def finish(self) -> list[Rejected]:
        """The end of each item of the piece is known; those that are not counted."""
        rejected = self.refused()
        self._save_finished()
        self.finished += self._piece_totals
        self._piece, self._piece_totals = [], 0
        return rejected

    def _save_finished(self) -> None:
        """Save that the piece has ended. It is kept if this raises."""

    def refused(self) -> list[Rejected]:
        """Items of the piece that are known never to be counted."""
        return [
            Rejected(each.counter, each.delta, each.result)
            for each in self._piece
            if isinstance(each.result, CounterError)
        ]

    def unfinished(self) -> Sequence[Item]:
        """Items that were sent, and whose end is not known."""
        return [each for each in self._piece if each.sent and each.result is None]

    def unsent(self) -> Mapping[str, int]:
        """Totals that no request ever held, by counter."""
        found = dict(self._totals)
        for each in self._piece:
            if not each.sent:
                found[each.counter] = found.get(each.counter, 0) + each.delta
        return found

    def close(self) -> None:
        """Let go of what it is kept in."""


def _now_us() -> int:
    return time.time_ns() // 1_000


def _parts(total: int) -> Iterator[int]:
    """*total* as signed 64-bit integers."""
    while not limits.INT64_MIN <= total <= limits.INT64_MAX:
        part = limits.INT64_MAX if total > 0 else limits.INT64_MIN
        yield part
        total -= part
    yield total
