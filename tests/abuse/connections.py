"""Connections and streams that cost the service more than their client."""

import json
import resource
import socket
import sys
import threading
import time
from contextlib import suppress

from counter.types import Token
from tests.abuse.floods import LATE_US, together
from tests.support.bytes_on_wire import get, request
from tests.support.rest import item, new_token

_LINES = (b"x\n", b'{"counter":"c","delta":1}\n', b" \n")
_BODY_BYTES = 64 * 1024
_HEAD = b"GET / HTTP/1.1\r\nhost: localhost\r\n"
_HEAD_BYTES = 65_000


def tiny_headers(port: int, connections: int, seconds: float) -> None:
    """Send an unfinished head of many tiny headers on each of *connections*, and hold them."""
    head = _HEAD + b"a:\r\n" * ((_HEAD_BYTES - len(_HEAD)) // 4)
    sockets = []
    for _ in range(connections):
        each = socket.create_connection(("127.0.0.1", port))
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * _HEAD_BYTES)
        each.setblocking(False)
        sockets.append(each)
    left = {each: len(head) for each in sockets}
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        for each, size in list(left.items()):
            try:
                left[each] -= each.send(head[-size:])
            except BlockingIOError:
                continue
            except OSError:
                # The service has closed it.
                left[each] = 0
            if not left[each]:
                del left[each]
        time.sleep(0.01)
    for each in sockets:
        each.close()


def silent(port: int, connections: int, seconds: float) -> None:
    """Open *connections*, send nothing, and open each again that is closed."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held: list[socket.socket] = []
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        held = [each for each in held if not _is_closed(each)]
        while len(held) < connections and time.monotonic() < end_s:
            each = socket.create_connection(("127.0.0.1", port))
            each.setblocking(False)
            held.append(each)
        time.sleep(0.1)
    for each in held:
        each.close()


def _is_closed(connection: socket.socket) -> bool:
    with suppress(BlockingIOError):
        with suppress(ConnectionError):
            connection.recv(1)
        connection.close()
        return True
    return False


def live_streams(port: int, streams: int, seconds: float) -> None:
    """Ask for *streams* of live counts, and hold those that are begun."""
    held = _sent(port, [get("good/live")] * streams)
    begun = sum(each.recv(12) == b"HTTP/1.1 200" for each in held)
    time.sleep(seconds)
    for each in held:
        each.close()
    sys.stdout.write(f"{begun} of {streams} streams were begun\n")


def late_streams(port: int, streams: int, seconds: float) -> None:
    """Send 1,000 lines with late tokens on each of *streams*, and wait for their responses."""
    held = _sent(port, [_stream(_late_lines()) for _ in range(streams)])
    time.sleep(seconds)
    for each in held:
        each.close()


def _sent(port: int, requests: list[bytes]) -> list[socket.socket]:
    """A connection for each of *requests*, which are sent."""
    held = []
    for each in requests:
        held.append(socket.create_connection(("127.0.0.1", port)))
        held[-1].sendall(each)
    return held


def _late_lines() -> bytes:
    tokens = (new_token() for _ in range(1_000))
    late = [Token(each.nonce, each.generation_time_us - LATE_US) for each in tokens]
    lines = [json.dumps(item(f"c{number}", 1, token)) for number, token in enumerate(late)]
    return "".join(f"{line}\n" for line in lines).encode()


def bad_streams(port: int, streams: int, seconds: float) -> None:
    """Send malformed, tokenless or empty lines on *streams*, again and again on new connections."""
    ends_s = time.monotonic() + seconds
    together(
        [
            threading.Thread(target=_send_bad, args=(port, _LINES[number % len(_LINES)], ends_s))
            for number in range(streams)
        ]
    )


def _send_bad(port: int, line: bytes, ends_s: float) -> None:
    body = line * (_BODY_BYTES // len(line))
    while time.monotonic() < ends_s:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(_stream(body))
            while connection.recv(65_536):
                continue


def _stream(body: bytes) -> bytes:
    """A whole request that streams *body* and is its connection's last."""
    head = request(
        "POST",
        "/v1/namespaces/default/batch/add",
        "content-type: application/x-ndjson",
        "transfer-encoding: chunked",
        "connection: close",
    )
    return b"%b%x\r\n%b\r\n0\r\n\r\n" % (head, len(body), body)
