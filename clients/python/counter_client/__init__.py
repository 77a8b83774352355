"""The Python SDK: :class:`CounterClient` for threads, :class:`AsyncCounterClient` for event loops.

It raises the errors of :mod:`counter_client.errors`, one class for each code of the service, and a
few of its own. It has no module-level state.
"""

from counter_client.aio import AsyncCounterClient, AsyncHold, AsyncHolding
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
    HoldCount,
    HoldEvent,
    HoldState,
    Point,
    Resolved,
    Sum,
)
from counter_client.buffer import AsyncBuffer, Buffer
from counter_client.errors import (
    BoundReachedError,
    CounterError,
    HoldExpiredError,
    HoldReleasedError,
    HoldSettledError,
    HoldUnknownError,
)
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
from counter_client.sync import CounterClient, Hold
from counter_client.tokens import Bounds, Key, Token

__version__ = "0.2.0.dev0"

__all__ = [
    "Added",
    "AddedCount",
    "AsyncBuffer",
    "AsyncCounterClient",
    "AsyncHold",
    "AsyncHolding",
    "Attempt",
    "BoundReachedError",
    "Bounds",
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
    "Hold",
    "HoldCount",
    "HoldEvent",
    "HoldExpiredError",
    "HoldReleasedError",
    "HoldSettledError",
    "HoldState",
    "HoldUnknownError",
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
