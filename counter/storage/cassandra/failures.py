"""The one boundary where the driver's exceptions become the service's own."""

from __future__ import annotations

from typing import Final

import cassandra
from cassandra.cluster import NoHostAvailable
from cassandra.connection import ConnectionException
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
#: Whether a write behind one of these happened cannot be known.
_UNTOLD: Final = (cassandra.OperationTimedOut, cassandra.WriteTimeout, cassandra.WriteFailure)
_CODE_CAS_WRITE_UNKNOWN: Final = 0x1700


def untold(error: BaseException) -> bool:
    """Whether a compare-and-set that failed so may have been made, or may yet be."""
    if isinstance(error, NoHostAvailable):
        return any(untold(each) for each in error.errors.values())
    if isinstance(error, ErrorMessage):
        return error.code == _CODE_CAS_WRITE_UNKNOWN or isinstance(error, ServerError)
    return isinstance(error, (*_UNTOLD, ConnectionException))


def translated(error: BaseException) -> BaseException:
    """*error* in the service's own terms; an error that is no fault of the store stays."""
    if isinstance(error, NoHostAvailable):
        return _no_host(error)
    if isinstance(error, cassandra.InvalidRequest):
        return _invalid(error)
    if isinstance(error, _UNTOLD):
        return _made(WriteTimeoutError, f"Cassandra did not answer in time: {_text(error)}")
    if isinstance(error, cassandra.Unavailable):
        return _made(
            StoreUnavailableError,
            f"{error.alive_replicas} of the {error.required_replicas} replicas that the"
            f" consistency level needs are alive; see `nodetool status`",
        )
    if isinstance(error, OverloadedErrorMessage | IsBootstrappingErrorMessage):
        return _made(OverloadedError, f"Cassandra is overloaded: {_text(error)}")
    if isinstance(error, cassandra.DriverException | ErrorMessage | ConnectionException):
        return _made(StoreUnavailableError, f"Cassandra: {_text(error)}")
    return error


def _no_host(error: NoHostAvailable) -> UnavailableError:
    """The first cause that says more than that no host was there."""
    causes = [translated(each) for each in error.errors.values()]
    for kind in (WriteTimeoutError, OverloadedError, SliceMissingError, StoreUnavailableError):
        for cause in causes:
            if isinstance(cause, kind):
                return cause
    hosts = ", ".join(str(host) for host in error.errors) or "none known"
    return _made(StoreUnavailableError, f"no Cassandra node can be reached (tried: {hosts})")


def _invalid(error: cassandra.InvalidRequest) -> UnavailableError:
    text = _text(error)
    if "table" in text and ("does not exist" in text or "unconfigured" in text):
        return _made(SliceMissingError, f"Cassandra: {text}")
    return _made(StoreUnavailableError, f"Cassandra refuses a statement: {text}")


def _made(kind: type[UnavailableError], detail: str) -> UnavailableError:
    return kind(detail, retry_after_us=_RETRY_AFTER_US)


def _text(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
