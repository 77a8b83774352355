"""The options of a client and the values passed to its hooks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeVar

from counter_client.errors import CounterError, InvalidParameterError

T = TypeVar("T")
_LOG: Final = logging.getLogger(__name__)
#: Hedge a request that takes longer than the 95th percentile.
ADAPTIVE: Final = "p95"
_SECONDS_MAX: Final = 31 * 86_400.0
_RETRIES_MAX: Final = 1e9


class Attempt(NamedTuple):
    """One request that ended, for metrics and traces."""

    method: str
    #: The last part of the route, such as ``add`` or ``batch/add``; fit for a label.
    operation: str
    url: str
    #: 0 for the first attempt of a call.
    number: int
    hedged: bool
    #: None if there was no answer.
    status: int | None
    seconds: float
    #: False if there was no connection, so that nothing was sent.
    sent: bool = True


class Sending(NamedTuple):
    """An attempt that is about to be sent; fields as in :class:`Attempt`."""

    method: str
    operation: str
    url: str
    number: int
    hedged: bool


def _ignore(_: Attempt | None) -> None:
    """Do nothing."""


class Watch(NamedTuple):
    """Extra headers of an attempt, and the function to call when it ends (with None if it was
    cancelled)."""

    headers: tuple[tuple[str, str], ...] = ()
    ended: Callable[[Attempt | None], None] = _ignore


class Flush(NamedTuple):
    """One piece of a buffer that ended or failed."""

    items: int
    seconds: float
    #: Items that can never be counted.
    rejected: int
    error: CounterError | None


def call_hook(hook: Callable[[T], None] | None, what: T) -> None:
    """Call a program's *hook*; log its errors instead of raising them."""
    if hook is None:
        return
    try:
        hook(what)
    except Exception:
        _LOG.exception("a hook of the counter client failed on %s", what)


@dataclass(frozen=True, slots=True)
class Options:
    """A client's deadlines, pauses, retries, hedges, TLS files and hooks. Times are in seconds.

    Raises InvalidParameterError for a value out of its bounds.
    """

    #: Limit on a whole call, including retries and pauses.
    deadline_s: float = 30.0
    #: Limit on one attempt; when it passes, the outcome is not known.
    attempt_timeout_s: float = 5.0
    #: The pause before retry n is drawn from 0 to ``backoff_first_s * 2**n``, ...
    backoff_first_s: float = 0.05
    #: ... or from 0 to this if that is less.
    backoff_max_s: float = 5.0
    #: The size of the retry budget that all calls of a client share, ...
    retries_at_once: float = 20.0
    #: ... how many retries it regains a second, ...
    retries_per_s: float = 1.0
    #: ... and with each call. The budget limits the load during an outage.
    retries_per_call: float = 0.2
    #: Send a second request, to the next base URL, if an answer takes longer; None for never.
    hedge_after_s: float | Literal["p95"] | None = None
    #: Retry a read whose connection is refused, although no server has answered this client yet.
    wait_for_ready: bool = True
    #: Whether proxies and certificates are taken from the environment.
    trust_env: bool = True
    #: A PEM file with the CA of the service's certificate; None for the usual CAs.
    tls_ca: str | None = None
    #: PEM files: the client certificate, if the service requires one, ...
    tls_cert: str | None = None
    #: ... and its key.
    tls_key: str | None = None
    #: Called before each attempt, in the thread and context of its call; :mod:`counter_client.otel`
    #: has one for traces. Its exceptions are logged.
    before_attempt: Callable[[Sending], Watch] | None = None
    #: Called after each attempt, in the same thread; its exceptions are logged.
    on_attempt: Callable[[Attempt], None] | None = None
    #: Called after each piece of a buffer; its exceptions are logged.
    on_flush: Callable[[Flush], None] | None = None

    def __post_init__(self) -> None:
        for name in ("deadline_s", "attempt_timeout_s", "backoff_first_s", "backoff_max_s"):
            if check_number(name, getattr(self, name), _SECONDS_MAX) == 0:
                raise InvalidParameterError(f"{name} is 0; it must be over 0")
        for name in ("retries_at_once", "retries_per_s", "retries_per_call"):
            check_number(name, getattr(self, name), _RETRIES_MAX)
        for name in ("before_attempt", "on_attempt", "on_flush"):
            hook = getattr(self, name)
            if hook is not None and not callable(hook):
                raise InvalidParameterError(f"{name} is {hook!r}; give a function, or None")
        if self.tls_cert is None and self.tls_key is not None:
            raise InvalidParameterError("tls_key is set and tls_cert is not: give both or neither")
        hedge = self.hedge_after_s
        if isinstance(hedge, str):
            if hedge != ADAPTIVE:
                raise InvalidParameterError(
                    f"hedge_after_s is {hedge!r}; give seconds, {ADAPTIVE!r} or None"
                )
        elif hedge is not None:
            check_number("hedge_after_s", hedge, _SECONDS_MAX)


def check_number(name: str, value: float, most: float) -> float:
    """Return *value* if it is a number from 0 to *most*. Raises InvalidParameterError."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 <= value <= most):
        raise InvalidParameterError(
            f"{name} is {value!r}; it must be a number from 0 to {most:.0f}"
        )
    return value
