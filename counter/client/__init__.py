"""The Python SDK: :class:`CounterClient` for threads, :class:`AsyncCounterClient` for event loops.

It raises the errors of :mod:`counter.errors` and a few of its own. It imports no server code and
has no module-level state.
"""

from counter.client.aio import AsyncCounterClient
from counter.client.answers import (
    Added,
    AddedCount,
    Busiest,
    Busy,
    Cleared,
    Count,
    Event,
    Point,
    Resolved,
)
from counter.client.buffer import AsyncBuffer, Buffer
from counter.client.failures import (
    BufferFullError,
    ClosedError,
    Rejected,
    RejectedError,
    SpoolBusyError,
    UnexpectedAnswerError,
    Unfinished,
    UnknownOutcomeError,
    UnreachableError,
    UnsentError,
)
from counter.client.options import Attempt, Flush, Options, Sending, Watch
from counter.client.sync import CounterClient
from counter.client.tokens import Key, Token
from counter.errors import CounterError

__all__ = [
    "Added",
    "AddedCount",
    "AsyncBuffer",
    "AsyncCounterClient",
    "Attempt",
    "Buffer",
    "BufferFullError",
    "Busiest",
    "Busy",
    "Cleared",
    "ClosedError",
    "Count",
    "CounterClient",
    "CounterError",
    "Event",
    "Flush",
    "Key",
    "Options",
    "Point",
    "Rejected",
    "RejectedError",
    "Resolved",
    "Sending",
    "SpoolBusyError",
    "Token",
    "UnexpectedAnswerError",
    "Unfinished",
    "UnknownOutcomeError",
    "UnreachableError",
    "UnsentError",
    "Watch",
]
