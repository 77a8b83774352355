"""Send requests again and again on a few connections, reading each answer before the next one."""

import socket
import threading
import time
from collections.abc import Sequence
from itertools import cycle


def flood(port: int, requests: Sequence[bytes], connections: int, seconds: float) -> None:
    """Send *requests* in turn on each of *connections*, for so long."""
    ends_s = time.monotonic() + seconds
    threads = [
        threading.Thread(target=_send, args=(port, requests, ends_s)) for _ in range(connections)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


def _send(port: int, requests: Sequence[bytes], ends_s: float) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for request in cycle(requests):
            if time.monotonic() >= ends_s:
                return
            connection.sendall(request)
            read_answer(connection)


def read_answer(connection: socket.socket) -> None:
    """Read one answer that has a length."""
    received = b""
    while (end := received.find(b"\r\n\r\n")) < 0:
        received += _some(connection)
    head = received[:end].lower()
    length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
    left = length - (len(received) - end - 4)
    while left > 0:
        left -= len(_some(connection))


def _some(connection: socket.socket) -> bytes:
    received = connection.recv(65_536)
    if not received:
        raise ConnectionError("the service closed the connection")
    return received
