"""How a client behaves. Plain values: they can be pickled, compared, and shared."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeVar

from counter.errors import CounterError, InvalidParameterError

T = TypeVar("T")
_LOG: Final = logging.getLogger(__name__)
#: In place of a delay: hedge when a request takes longer than 95 of 100 did.
ADAPTIVE: Final = "p95"
_SECONDS_MAX: Final = 31 * 86_400.0
_RETRIES_MAX: Final = 1e9


class Attempt(NamedTuple):
    """One request that was sent, for metrics and traces."""

    method: str
    #: The route's last segment, such as ``add`` or ``batch/add``: few values, fit for a label.
    operation: str
    url: str
    #: 0 for the first one of a call.
    number: int
    hedged: bool
    #: None where nobody answered.
    status: int | None
    seconds: float


class Sending(NamedTuple):
    """An attempt that is about to be sent; as in :class:`Attempt`."""

    method: str
    operation: str
    url: str
    number: int
    hedged: bool


def _nobody(_: Attempt | None) -> None:
    """Is not interested."""


class Watch(NamedTuple):
    """What a program sends along with an attempt, and what is called at its end: with None where
    nobody waits for the answer any more."""

    headers: tuple[tuple[str, str], ...] = ()
    ended: Callable[[Attempt | None], None] = _nobody


class Flush(NamedTuple):
    """One piece of a buffer that got its definite answers."""

    items: int
    seconds: float
    #: What can never be counted, and why.
    rejected: int
    error: CounterError | None


def tell(hook: Callable[[T], None] | None, what: T) -> None:
    """Call a program's *hook*; that it fails is logged, and stops no counting."""
    if hook is None:
        return
    try:
        hook(what)
    except Exception:
        _LOG.exception("a hook of the counter client failed on %s", what)


@dataclass(frozen=True, slots=True)
class Options:
    """How a client behaves: deadlines, pauses, retries, hedges, TLS, hooks. Times are in seconds.

    Raises InvalidParameterError for a value out of its bounds.
    """

    #: What a call may take in all, its retries and pauses included.
    deadline_s: float = 30.0
    #: What one attempt may take; afterwards nobody knows what became of it.
    attempt_timeout_s: float = 5.0
    #: The pause before retry n is drawn from 0 to ``backoff_first_s * 2**n``, ...
    backoff_first_s: float = 0.05
    #: ... and from 0 to this where that is less.
    backoff_max_s: float = 5.0
    #: All calls of one client share so many retries at once, ...
    retries_at_once: float = 20.0
    #: ... which grow back by so many a second, ...
    retries_per_s: float = 1.0
    #: ... and by so much with each call: an outage is not answered with many times the load.
    retries_per_call: float = 0.2
    #: Send a second time, to the next base URL, when an answer takes longer; None for never.
    hedge_after_s: float | Literal["p95"] | None = None
    #: Whether proxies and certificates are taken from the environment.
    trust_env: bool = True
    #: A PEM file: who signs the service's certificate, where that is none of the usual authorities.
    tls_ca: str | None = None
    #: PEM files: this client's own certificate, where the service wants to see one, ...
    tls_cert: str | None = None
    #: ... and its key.
    tls_key: str | None = None
    #: Called before each attempt, in the thread and context of its call; :mod:`counter.client.otel`
    #: has one for traces. What it raises is logged.
    before_attempt: Callable[[Sending], Watch] | None = None
    #: Called where an attempt ended, in that thread; what it raises is logged.
    on_attempt: Callable[[Attempt], None] | None = None
    #: Called where a piece of a buffer ended, likewise.
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
    """*value*, if it is a number from 0 to *most*. Raises InvalidParameterError."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 <= value <= most):
        raise InvalidParameterError(
            f"{name} is {value!r}; it must be a number from 0 to {most:.0f}"
        )
    return value
