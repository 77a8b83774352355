"""Who looks on while requests are answered: logs, traces, tallies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from api.http.call import Call, Reply

#: Told how a request ended: with an answer, or with None where nobody waited for it any more.
Ended = Callable[[Reply | None], None]


class Observer(Protocol):
    """Sees requests to ``/v1``, in the task that answers them."""

    #: Whether it must see each of them; else the directly answered ones pass it by.
    wants_all: bool

    def began(self, call: Call) -> Ended | None:
        """A request is about to be answered. What is returned is called when it was."""
        ...


class RequestTally(Protocol):
    """Counts answers."""

    def answered(self, route: str, status: int, took_s: float) -> None:
        """A request to *route* ("GET /v1/..." with its names left open) was answered with *status*,
        *took_s* after it began to arrive. Called for each one: it must cost next to nothing."""
        ...


class NoTally:
    """Counts nothing."""

    def answered(self, route: str, status: int, took_s: float) -> None:
        """Count nothing."""
