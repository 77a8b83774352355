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
    """Times are in seconds.

    Raises InvalidParameterError for a value out of its bounds.
    """

    #: What a call may take in all, its retries and pauses included.
    deadline_s: float = 30.0
    #: What one attempt may take; afterwards nobody knows what became of it.
    attempt_timeout_s: float = 5.0
    #: The pause before retry n is drawn from 0 to ``backoff_first_s`` * 2**n, and at most the max.
    backoff_first_s: float = 0.05
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
    #: Called where the attempt or the piece ended, in that thread; what they raise is logged.
    on_attempt: Callable[[Attempt], None] | None = None
    on_flush: Callable[[Flush], None] | None = None

    def __post_init__(self) -> None:
        for name in ("deadline_s", "attempt_timeout_s", "backoff_first_s", "backoff_max_s"):
            if getattr(self, name) <= 0:
                raise InvalidParameterError(f"{name} is {getattr(self, name)}; it must be over 0")
        for name in ("retries_at_once", "retries_per_s", "retries_per_call"):
            if getattr(self, name) < 0:
                raise InvalidParameterError(f"{name} is {getattr(self, name)}; 0 is the least")
        hedge = self.hedge_after_s
        if isinstance(hedge, str):
            if hedge != ADAPTIVE:
                raise InvalidParameterError(
                    f"hedge_after_s is {hedge!r}; give seconds, {ADAPTIVE!r} or None"
                )
        elif hedge is not None and hedge < 0:
            raise InvalidParameterError(f"hedge_after_s is {hedge}; 0 is the least")
