"""Connections that send nothing, more than a process takes."""

import resource
import socket
import sys
import time
from contextlib import suppress

from tests.abuse.figures import report


def attack(port: int, connections: int, seconds: float) -> None:
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


if __name__ == "__main__":
    if "tls" in sys.argv[1:]:
        report(attack, 1_100, 10.0, tls=True)
    else:
        report(attack, 10_100, 20.0)
