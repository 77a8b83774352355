"""One connection to Redis. It blocks, and belongs to one thread at a time."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, Final

from hiredis import Reader, pack_command
from redis.connection import ConnectionPool
from redis.exceptions import RedisError

from counter.storage.shared.cache_lane import NotConnectedError

_RECEIVED_BYTES: Final = 65_536

#: The words of a command: text, bytes or integers.
Command = tuple[Any, ...]


class RedisConnection:
    """redis-py's connection, which logs in, with many commands in one round trip.

    redis-py itself takes six times as long for each reply of a pipeline as hiredis takes.

    Connects when it is used. Raises NotConnectedError, and OSError (``TimeoutError`` is one) after
    which it must be closed.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        self._redis: Any = pool.make_connection()
        self._reader = Reader()

    def exchange(self, commands: Sequence[Command]) -> Sequence[Any]:
        """Send all *commands* at once, and return the reply to each: for errors a ReplyError."""
        sock, reader = self._connected(), self._reader
        sock.sendall(b"".join([pack_command(each) for each in commands]))
        replies: list[Any] = []
        while len(replies) < len(commands):
            received = sock.recv(_RECEIVED_BYTES)
            if not received:
                raise ConnectionResetError("the server closed the connection")
            reader.feed(received)
            while (reply := reader.gets()) is not False:
                replies.append(reply)
        if len(replies) > len(commands):
            raise ConnectionError(f"{len(commands)} commands have {len(replies)} replies")
        return replies

    def close(self) -> None:
        """Close the connection; the next call opens a new one."""
        self._redis.disconnect()

    def _connected(self) -> socket.socket:
        """Return the socket of a connection that the server has not closed: what is sent to a
        closed one is lost without an error."""
        redis = self._redis
        try:
            if redis.is_connected and not redis.can_read():
                return self._socket()
        except RedisError:
            # The server closed it.
            pass
        redis.disconnect()
        try:
            redis.connect()
        except (RedisError, OSError) as error:
            raise NotConnectedError(str(error)) from error
        self._reader = Reader()
        return self._socket()

    def _socket(self) -> socket.socket:
        sock: socket.socket = self._redis._sock
        return sock
