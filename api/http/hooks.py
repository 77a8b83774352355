"""Interfaces of logs, traces and metrics that observe requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from api.http.call import Call, Response

#: Called with the response of a request, or with None if its client disconnected.
Ended = Callable[[Response | None], None]


class Observer(Protocol):
    """Observe requests to ``/v1``, in the task that answers them."""

    #: Whether it must see every request; otherwise those on the fast lane are not observed.
    wants_all: bool

    def began(self, call: Call) -> Ended | None:
        """Called before a request is answered. Returns a function to call at its end."""
        ...


class RequestTally(Protocol):
    """Count answers."""

    def answered(self, route: str, status: int, took_s: float) -> None:
        """Count a request to *route* (a template such as "GET /v1/...") with *status*, answered
        *took_s* after it began to arrive. On the hot path: it must cost almost nothing."""
        ...


class NoTally:
    """Count nothing."""

    def answered(self, route: str, status: int, took_s: float) -> None:
        """Count nothing."""
