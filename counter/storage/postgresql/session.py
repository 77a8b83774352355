"""A connection to the primary: it proves that it is one, and reports what a failover may lose."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import asyncpg

_T = TypeVar("_T")
#: How long a connection is used after its server last proved that it is the primary.
_PROVEN_S: Final = 1.0
_PROOF_S: Final = 2.0
#: NULL on a standby, and on a server that was made read-only. Otherwise its commit waits for the
#: synchronous standby.
_PROOF: Final = (
    "SELECT CASE pg_catalog.current_setting('transaction_read_only') WHEN 'off'"
    " THEN pg_catalog.pg_logical_emit_message(true, 'counter', '') END"
)
#: The server's function that waits for the synchronous standby. Texts of the server may be in any
#: language. None: the server does not say where a warning comes from.
_WAITS: Final = ("SyncRepWaitForLSN", None)


class NotPrimaryError(ConnectionError):
    """The server accepts no writes, or confirms none: another one may be the primary."""


class PooledConnection(asyncpg.Connection):  # type: ignore[misc]
    """A connection of the pool."""

    _proven_at_s = -math.inf

    async def run(self, work: Callable[[asyncpg.Connection], Awaitable[_T]]) -> _T:
        """Return the result of *work*, which asks a server that is the primary.

        Raises NotPrimaryError, and ConnectionError if a commit's wait for the synchronous standby
        was cancelled.
        """
        if asyncio.get_running_loop().time() - self._proven_at_s > _PROVEN_S:
            await self.prove()
        try:
            return await self._confirmed(work)
        except asyncpg.ReadOnlySQLTransactionError as error:
            raise _read_only() from error

    async def prove(self) -> None:
        """Make a durable commit. Raises NotPrimaryError if the server does not confirm it.

        A primary that boots again after a failover, or is cut off from a standby that was promoted,
        lacks what was acknowledged since.
        """
        began_s = asyncio.get_running_loop().time()
        try:
            proof = await self._confirmed(
                lambda connection: connection.fetchval(_PROOF, timeout=_PROOF_S)
            )
        except TimeoutError as error:
            raise NotPrimaryError(
                f"this server confirms no commit within {_PROOF_S:g} s: start the standby that"
                " synchronous_standby_names waits for, or keep this server off if another one was"
                " promoted"
            ) from error
        if proof is None:
            raise _read_only()
        self._proven_at_s = began_s

    async def _confirmed(self, work: Callable[[asyncpg.Connection], Awaitable[_T]]) -> _T:
        """Return the result of *work*, unless a commit's wait for the standby was cancelled.

        The server reports success then, with a warning, although a failover may lose the commit.
        """
        cancelled: list[str] = []

        def listen(_: object, message: asyncpg.PostgresLogMessage) -> None:
            is_warning = isinstance(message, asyncpg.PostgresWarning)
            if is_warning and message.as_dict().get("server_source_function") in _WAITS:
                cancelled.append(message.message)

        self.add_log_listener(listen)
        try:
            result = await work(self)
        finally:
            # The pool takes no connection back that has a listener.
            self.remove_log_listener(listen)
        if cancelled:
            raise ConnectionError(
                f"the commit may be lost in a failover, because the standby did not confirm it:"
                f" {cancelled[0]}"
            )
        return result


def _read_only() -> NotPrimaryError:
    return NotPrimaryError(
        "this server is a standby, or read-only: name all hosts in the DSN, and add"
        " target_session_attrs=read-write"
    )
