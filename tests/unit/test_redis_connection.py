"""Many commands at once over one connection: a reply for each, from this connection."""

import select
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from hiredis import ProtocolError
from redis.connection import ConnectionPool

from counter.storage.redis.connection import RedisConnection

COMMANDS = [("MGET", "a"), ("MGET", "b")]


@contextmanager
def served(*connections: Sequence[bytes]) -> Iterator[RedisConnection]:
    """A connection to a server with a script for each of its *connections*; "" closes it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        kept: list[socket.socket] = []

        def serve() -> None:
            for parts in connections:
                try:
                    theirs, _ = listener.accept()
                except OSError:
                    return
                kept.append(theirs)
                asked = b""
                while asked.count(b"MGET") < len(COMMANDS):
                    asked += theirs.recv(1_000)
                for part in parts:
                    theirs.sendall(part)
                if not parts[-1]:
                    theirs.close()

        server = threading.Thread(target=serve)
        server.start()
        url = f"redis://127.0.0.1:{listener.getsockname()[1]}"
        pool = ConnectionPool.from_url(url, protocol=2, driver_info=None, socket_timeout=10)
        connection = RedisConnection(pool)
        try:
            yield connection
        finally:
            connection.close()
            # If a test has failed, the server still waits for a connection.
            listener.shutdown(socket.SHUT_RDWR)
            server.join()
            for each in kept:
                each.close()


def test_replies_may_come_in_any_parts() -> None:
    whole = b"*1\r\n$1\r\n5\r\n*1\r\n$-1\r\n"
    for parts in ([whole], [bytes([each]) for each in whole]):
        with served(parts) as connection:
            assert connection.exchange(COMMANDS) == [[b"5"], [None]]


def test_a_connection_that_the_server_has_closed_is_not_used() -> None:
    whole = b"*1\r\n$1\r\n5\r\n*1\r\n$-1\r\n"
    with served([whole, b""], [whole]) as connection:
        connection.exchange(COMMANDS)
        # Until its end has arrived.
        select.select([connection._socket()], [], [], 10)
        assert connection.exchange(COMMANDS) == [[b"5"], [None]]


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ([b"*1\r\n$1\r\n5\r\n*1\r\n$9\r\nhal", b""], ConnectionResetError),
        ([b"*1\r\n$1\r\n5\r\n:6\r\n:7\r\n*1\r\n$9\r\nhal"], ConnectionError),
        ([b":5\r\nHTTP/1.1 400\r\n:6\r\n"], ProtocolError),
    ],
    ids=["closed", "too-many", "no-reply"],
)
def test_nothing_of_a_connection_that_failed_is_in_the_replies_of_the_next_one(
    parts: Sequence[bytes], error: type[Exception]
) -> None:
    """The parser holds a part of a reply: the next connection must not continue it."""
    fresh = [b"*1\r\n$5\r\nother\r\n*1\r\n$4\r\nmore\r\n"]
    with served(parts, fresh) as connection:
        with pytest.raises(error):
            connection.exchange(COMMANDS)
        # As the lane does after any error.
        connection.close()
        assert connection.exchange(COMMANDS) == [[b"other"], [b"more"]]
