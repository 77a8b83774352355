"""Streams of lines that are no adds: malformed, without a token, or empty."""

import socket
import threading
import time

from tests.abuse.figures import report
from tests.support.bytes_on_wire import request

_LINES = (b"x\n", b'{"counter":"c","delta":1}\n', b" \n")
_BODY_BYTES = 64 * 1024


def attack(port: int, streams: int, seconds: float) -> None:
    """Send a body of such lines on each of *streams*, again and again on new connections."""
    ends_s = time.monotonic() + seconds
    threads = [
        threading.Thread(target=_send, args=(port, _LINES[number % len(_LINES)], ends_s))
        for number in range(streams)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


def _send(port: int, line: bytes, ends_s: float) -> None:
    body = line * (_BODY_BYTES // len(line))
    while time.monotonic() < ends_s:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(stream(body))
            while connection.recv(65_536):
                continue


def stream(body: bytes) -> bytes:
    """A whole request that streams *body* and is its connection's last."""
    head = request(
        "POST",
        "/v1/namespaces/default/batch/add",
        "content-type: application/x-ndjson",
        "transfer-encoding: chunked",
        "connection: close",
    )
    return b"%b%x\r\n%b\r\n0\r\n\r\n" % (head, len(body), body)


if __name__ == "__main__":
    report(attack, 50, 8.0)
