"""The one boundary where the driver's exceptions become the service's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import cassandra
from cassandra.cluster import NoHostAvailable
from cassandra.connection import ConnectionBusy, ConnectionException
from cassandra.pool import NoConnectionsAvailable
from cassandra.protocol import (
    ErrorMessage,
    IsBootstrappingErrorMessage,
    OverloadedErrorMessage,
    ServerError,
)

from counter.errors import (
    OverloadedError,
    SliceMissingError,
    StoreUnavailableError,
    UnavailableError,
    WriteTimeoutError,
)
from counter.limits import SECOND

_RETRY_AFTER_US: Final = SECOND
#: The time was over: the node, or a replica, may have done it or may do it yet.
_TIME_OVER: Final = (cassandra.OperationTimedOut, cassandra.WriteTimeout, cassandra.WriteFailure)
#: Nothing was done: no node took it.
_NOT_TAKEN: Final = (
    OverloadedErrorMessage,
    IsBootstrappingErrorMessage,
    NoConnectionsAvailable,
    ConnectionBusy,
)
#: Too many compare-and-sets of one row: this one's outcome is not known. The driver has no name
#: for it.
_CODE_CAS_WRITE_UNKNOWN: Final = 0x1700


def causes_of(error: BaseException) -> list[BaseException]:
    """What each node that was asked answered, where none could be had; else nothing."""
    if not isinstance(error, NoHostAvailable) or not isinstance(error.errors, dict):
        # The driver gives a list of names where it never came to ask.
        return []
    return list(error.errors.values())


def untold(error: BaseException) -> bool:
    """Whether a compare-and-set that failed so may have been made, or may yet be."""
    if isinstance(error, NoHostAvailable):
        return any(untold(each) for each in causes_of(error))
    if isinstance(error, ErrorMessage):
        return error.code == _CODE_CAS_WRITE_UNKNOWN or isinstance(error, ServerError)
    return isinstance(error, (*_TIME_OVER, ConnectionException))


def translated(error: BaseException, *, wrote: bool = True) -> BaseException:
    """*error* in the service's own terms; an error that is no fault of the store stays.

    *wrote* tells whether the statement writes: of a read it is of no interest that it may yet be
    done.
    """
    if isinstance(error, NoHostAvailable):
        return _no_host(error, wrote)
    if isinstance(error, cassandra.InvalidRequest):
        return _invalid(error)
    if isinstance(error, _TIME_OVER):
        kind = WriteTimeoutError if wrote else StoreUnavailableError
        return _made(kind, f"Cassandra did not answer in time: {_text(error)}")
    if isinstance(error, cassandra.Unavailable):
        return _too_few(error)
    if isinstance(error, _NOT_TAKEN):
        return _made(OverloadedError, f"Cassandra is overloaded: {_text(error)}")
    if isinstance(error, cassandra.DriverException | ErrorMessage | ConnectionException):
        # An unknown outcome too, of a write: neither error claims that nothing was done.
        return _made(StoreUnavailableError, f"Cassandra: {_text(error)}")
    return error


@asynccontextmanager
async def within(timeout_us: int) -> AsyncIterator[None]:
    """Give up what is in the block after *timeout_us*, with WriteTimeoutError: what was sent may
    have been done, or may be done yet."""
    try:
        async with asyncio.timeout(timeout_us / SECOND):
            yield
    except TimeoutError as error:
        raise _made(
            WriteTimeoutError, f"Cassandra took longer than {timeout_us / SECOND:g} s"
        ) from error


def _too_few(error: cassandra.Unavailable) -> UnavailableError:
    return _made(
        StoreUnavailableError,
        f"{error.alive_replicas} of the {error.required_replicas} replicas that the consistency"
        " level needs are alive; see `nodetool status`",
    )


def _no_host(error: NoHostAvailable, wrote: bool) -> UnavailableError:
    """The first cause that says more than that no host was there."""
    causes = causes_of(error)
    ours = [translated(each, wrote=wrote) for each in causes]
    for kind in (WriteTimeoutError, OverloadedError, SliceMissingError):
        for cause in ours:
            if isinstance(cause, kind):
                return cause
    for each in causes:
        # One node was there to say that too few others are.
        if isinstance(each, cassandra.Unavailable):
            return _too_few(each)
    hosts = ", ".join(str(host) for host in error.errors) or "none known"
    reasons = "; ".join(dict.fromkeys(_text(each) for each in causes))
    return _made(
        StoreUnavailableError,
        f"no Cassandra node can be asked (tried: {hosts}{': ' if reasons else ''}{reasons[:300]})",
    )


def _invalid(error: cassandra.InvalidRequest) -> UnavailableError:
    text = _text(error)
    if "table" in text and ("does not exist" in text or "unconfigured" in text):
        return _made(SliceMissingError, f"Cassandra: {text}")
    return _made(StoreUnavailableError, f"Cassandra refuses a statement: {text}")


def _made(kind: type[UnavailableError], detail: str) -> UnavailableError:
    return kind(detail, retry_after_us=_RETRY_AFTER_US)


def _text(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
