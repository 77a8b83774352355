"""A connection that acknowledges a commit only if the server does without reservation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import asyncpg

_T = TypeVar("_T")
#: The server's function that waits for the synchronous standby. Texts of the server may be in any
#: language. None: the server does not say where a warning comes from.
_WAITS: Final = ("SyncRepWaitForLSN", None)


class Session(asyncpg.Connection):  # type: ignore[misc]
    """A connection of the pool."""

    async def run(self, work: Callable[[asyncpg.Connection], Awaitable[_T]]) -> _T:
        """Return the result of *work*.

        Raises ConnectionError if a commit's wait for the synchronous standby was cancelled: the
        server reports success, with a warning, although a failover may lose the commit.
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
