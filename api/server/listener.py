"""Accept connections: many in a turn of the event loop."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from typing import Any, Final

from api.http.connections import Connections

#: Connections accepted in one turn of the loop: enough for a burst of reconnecting clients, and few
#: enough that other work, and other processes on the same port, get their share.
_ACCEPTS_AT_ONCE: Final = 16
#: What `accept` fails with if the process or the machine can open no more files.
_FULL: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
#: How long no connection is accepted then.
_FULL_PAUSE_S: Final = 1.0
_log = logging.getLogger("counter.api")


class Listener:
    """Accept connections on one listening socket, without TLS.

    uvloop's own server accepts one connection in a turn. Turns are long under load, so a burst of
    clients, and a health check behind them, would wait for seconds.
    """

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        shared: Connections,
    ) -> None:
        self._listener = listener
        self._protocol = protocol
        self._shared = shared
        self._loop = asyncio.get_running_loop()
        #: Tasks that start the protocols of accepted connections.
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_open = True
        listener.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Accept no more connections, and close the port unless other processes share it."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._listener)
            self._listener.close()

    async def wait_closed(self) -> None:
        """Wait until the protocol of each accepted connection is started."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _listen(self) -> None:
        if self._is_open:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        room = self._shared.most - len(self._shared.open) - len(self._tasks)
        if room <= 0 and self._tasks:
            # At the limit accept one at a time: a new connection closes one that has sent nothing,
            # so what this one has sent must be read first.
            return
        for _ in range(max(1, min(room, _ACCEPTS_AT_ONCE))):
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _FULL:
                    self._pause(error)
                    return
                # accept() also reports network errors of a single connection, which is gone.
                continue
            connection.setblocking(False)
            self._take(connection, address)

    def _pause(self, error: OSError) -> None:
        """Pause accepting until files may have been closed; retrying at once would loop."""
        _log.error("no connection can be accepted now: %s", error.strerror)
        self._loop.remove_reader(self._listener)
        self._loop.call_later(_FULL_PAUSE_S, self._listen)

    def _take(self, connection: socket.socket, _: object) -> None:
        """Start the protocol of an accepted connection."""
        task = self._loop.create_task(
            self._loop.connect_accepted_socket(self._protocol, connection)
        )
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("an accepted connection failed", exc_info=error)
