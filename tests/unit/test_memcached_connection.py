"""Many commands at once over one connection, and a line for each, however the lines arrive."""

import socket
import threading
from collections.abc import Sequence

import pytest
from pymemcache.exceptions import (
    MemcacheServerError,
    MemcacheUnexpectedCloseError,
    MemcacheUnknownError,
)

from counter.storage.memcached.connection import NO_NUMBER, MemcachedConnection

COMMANDS = [b"incr a 1\r\n", b"incr b 1\r\n", b"incr c 1\r\n"]


def answered(*parts: bytes) -> Sequence[bytes]:
    """The results of COMMANDS if memcached answers in *parts*, and then closes."""
    ours, theirs = socket.socketpair()
    connection = MemcachedConnection("127.0.0.1", 1, 10.0)
    connection._client.sock = ours

    def serve() -> None:
        with theirs:
            asked = b""
            while asked.count(b"\r\n") < len(COMMANDS):
                asked += theirs.recv(1_000)
            for part in parts:
                theirs.sendall(part)

    server = threading.Thread(target=serve)
    server.start()
    try:
        return connection.pipeline(COMMANDS)
    finally:
        connection.close()
        server.join()


def test_lines_may_come_in_any_parts() -> None:
    whole = b"5\r\nNOT_FOUND\r\n-1\r\n"
    expected = [b"5", b"NOT_FOUND", b"-1"]
    assert answered(whole) == expected
    assert answered(*(bytes([each]) for each in whole)) == expected


def test_a_value_that_is_not_a_number_is_a_response() -> None:
    assert answered(b"5\r\n", NO_NUMBER, b"\r\n6\r\n") == [b"5", NO_NUMBER, b"6"]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"5\r\nSERVER_ERROR out of memory\r\n6\r\n", MemcacheServerError),
        (b"5\r\n6\r\n7", MemcacheUnexpectedCloseError),
        (b"5\r\n6\r\n7\r\n8\r\n", MemcacheUnknownError),
        (b"5\r\n6\r\n7\r\n8", MemcacheUnknownError),
    ],
    ids=["error", "closed", "too-many", "too-much"],
)
def test_unexpected_responses_are_errors(answer: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        answered(answer)
