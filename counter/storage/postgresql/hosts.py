"""Connect to the first host of a DSN that accepts, with messages that name the host.

asyncpg spends the whole time-out on the first host if that is silent, as a machine that lost its
power is, and would never try the next one.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections import deque
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, parse_qsl, urlsplit

import asyncpg

from counter.errors import StartupError
from counter.storage.postgresql.session import PooledConnection

_FILES: Final = ("sslrootcert", "sslcert", "sslkey", "sslcrl")
#: What libpq knows and the driver does not, and takes for a setting of the server. Each call has a
#: bound of its own, and a connection that breaks is replaced.
_IGNORED: Final = frozenset(
    {
        *("connect_timeout", "tcp_user_timeout", "keepalives", "keepalives_idle"),
        *("keepalives_interval", "keepalives_count", "channel_binding", "gssencmode"),
        *("gssdelegation", "sslcompression", "sslsni", "load_balance_hosts"),
        *("client_encoding", "fallback_application_name"),
    }
)
#: What the service cannot give must not be ignored: the server refuses such a parameter.
_DEMANDS: Final = (("gssencmode", "require"),)
_PORT_MAX: Final = 65_535
_DEFAULT: Final = "the default host"
#: Another host, or the same one later, may do.
_TRY_NEXT: Final = (
    OSError,
    TimeoutError,
    asyncpg.CannotConnectNowError,
    asyncpg.TargetServerAttributeNotMatched,
)
#: What is wrong with the DSN, or an option of it that the server refuses.
_UNUSABLE: Final = (
    ValueError,
    asyncpg.ClientConfigurationError,
    asyncpg.UndefinedObjectError,
    asyncpg.CantChangeRuntimeParamError,
    asyncpg.InvalidParameterValueError,
)


class Hosts:
    """The hosts of *dsn*. Raises StartupError if it cannot be used; no message has the password."""

    def __init__(self, dsn: str) -> None:
        parts = _parts_of(dsn)
        login, at, places = parts.netloc.rpartition("@")
        options = _options_of(parts.query)
        for place in places.split(","):
            _check_port(place)
        for name in _FILES:
            if name in options and not Path(options[name]).is_file():
                raise StartupError(f"{name} of the DSN of PostgreSQL is no file: {options[name]}")
        #: Parameters of the DSN that have no effect, which others of PostgreSQL's clients know.
        self.ignored = sorted(
            name
            for name, value in options.items()
            if name in _IGNORED and (name, value) not in _DEMANDS
        )
        query = "&".join(
            each for each in parts.query.split("&") if each.partition("=")[0] not in self.ignored
        )
        #: Host and DSN; the one to try first is in front.
        self._hosts = deque(
            (place, parts._replace(netloc=f"{login}{at}{place}", query=query).geturl())
            for place in places.split(",")
        )

    async def connect(self, *_: object, timeout: float, **given: Any) -> PooledConnection:
        """Return a connection to the first host that accepts and proves to be the primary, after
        *timeout* seconds at most.

        The next one is tried if a host cannot be reached, is not ready, is not what
        target_session_attrs asks for, or confirms no commit; if it refuses to log in, that error is
        raised.

        A host that fails, or is silent, is tried last the next time, even if the caller did not
        wait for this.
        """
        failed: list[str] = []
        for host, dsn in tuple(self._hosts):
            share_s = timeout / len(self._hosts)
            connection: PooledConnection | None = None
            proven = False
            try:
                async with asyncio.timeout(share_s):
                    connection = await asyncpg.connect(dsn, **given)
                    await connection.prove()
                proven = True
                return connection
            except ssl.SSLCertVerificationError:
                raise
            except _TRY_NEXT as error:
                text = str(error) or f"no answer within {share_s:g} s"
                if isinstance(error, asyncpg.TargetServerAttributeNotMatched):
                    text = "this server is not what target_session_attrs of the DSN asks for"
                failed.append(f"{host or _DEFAULT}: {text}")
            except asyncpg.PostgresError as error:
                # As libpq does: a host that answers, and refuses, ends the attempt.
                error.args = (f"{host or _DEFAULT}: {error.args[0]}", *error.args[1:])
                raise
            finally:
                if connection is not None and not proven:
                    connection.terminate()
                if not proven and self._hosts[0] == (host, dsn):
                    self._hosts.rotate(-1)
        raise ConnectionError("; ".join(failed))


def refusal(error: BaseException) -> StartupError | None:
    """Return *error* with the fix if waiting does not mend it; None for others."""
    if isinstance(
        error, asyncpg.InvalidPasswordError | asyncpg.InvalidAuthorizationSpecificationError
    ):
        return StartupError(
            f"PostgreSQL refuses to log in: {error}: change user or password in the DSN, or"
            " pg_hba.conf"
        )
    if isinstance(error, asyncpg.InvalidCatalogNameError):
        return StartupError(f"PostgreSQL: {error}: create the database first")
    if isinstance(error, ssl.SSLCertVerificationError):
        return StartupError(
            f"the certificate of PostgreSQL is refused: {error.verify_message}: give the authority"
            " that signed it as sslrootcert in the DSN, and a host that the certificate names"
        )
    if isinstance(error, _UNUSABLE):
        return StartupError(f"the DSN of PostgreSQL cannot be used: {error}")
    return None


def _parts_of(dsn: str) -> SplitResult:
    """Return the parts of *dsn*. Raises StartupError without what may be a part of a password."""
    begin = re.match(r"([a-z][a-z0-9+.-]{0,19}:)//", dsn)
    if begin is None or begin[1] not in ("postgresql:", "postgres:"):
        begins = f"begins with {begin[1]!r}" if begin else "does not begin with postgresql://"
        raise StartupError(
            f"the DSN of PostgreSQL {begins}: give postgresql://user:password@host:port/database"
        )
    try:
        parts = urlsplit(dsn)
        login = parts.netloc.rpartition("@")[0]
        is_plain = not re.search(r"[][@]", login) and parts.netloc.count("@") == dsn.count("@")
    except ValueError:
        is_plain = False
    if not is_plain:
        raise StartupError(
            "the DSN of PostgreSQL cannot be read, because special characters are not escaped: in a"
            " password, write / as %2F, : as %3A, @ as %40, ? as %3F, # as %23, [ as %5B and ] as"
            " %5D, and percent-encode what is not ASCII; after the host, write @ as %40"
        ) from None
    return parts


def _options_of(query: str) -> dict[str, str]:
    """Return the parameters of a DSN; of one that is given twice the last, as the driver does."""
    try:
        return dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    except ValueError:
        raise StartupError(
            "the DSN of PostgreSQL has a parameter without a value after ?: give name=value, and"
            " write & as %26 in a value"
        ) from None


def _check_port(place: str) -> None:
    """Raise StartupError, without the value: it is a part of a password that is not escaped, if
    that has a slash."""
    port = place.rpartition("]")[2].partition(":")[2]
    if port and not (port.isascii() and port.isdigit() and 0 < int(port) <= _PORT_MAX):
        raise StartupError(
            f"a port in the DSN of PostgreSQL is not a number from 1 to {_PORT_MAX}; in a password,"
            " write / as %2F, : as %3A and @ as %40"
        )
