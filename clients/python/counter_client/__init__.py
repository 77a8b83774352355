"""The Python SDK: :class:`CounterClient` for threads, :class:`AsyncCounterClient` for event loops.

It raises the errors of :mod:`counter_client.errors`, one class for each code of the service, and a
few of its own. It has no module-level state.
"""

from counter_client.aio import AsyncCounterClient
from counter_client.answers import (
    Added,
    AddedCount,
    Busiest,
    Busy,
    Cancelled,
    Change,
    Cleared,
    Count,
    Event,
    Point,
    Resolved,
    Sum,
)
from counter_client.buffer import AsyncBuffer, Buffer
from counter_client.errors import CounterError
from counter_client.failures import (
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
from counter_client.options import Attempt, Flush, Options, Sending, Watch
from counter_client.sync import CounterClient
from counter_client.tokens import Key, Token

__version__ = "0.2.0.dev0"

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
    "Cancelled",
    "Change",
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
    "Sum",
    "Token",
    "UnexpectedAnswerError",
    "Unfinished",
    "UnknownOutcomeError",
    "UnreachableError",
    "UnsentError",
    "Watch",
]
