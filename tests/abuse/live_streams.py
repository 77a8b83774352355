"""Live streams of one address, more than a process shows."""

import socket
import sys
import time

from tests.abuse.figures import report
from tests.support.bytes_on_wire import get


def attack(port: int, streams: int, seconds: float) -> None:
    """Ask for *streams*, and hold those that are begun."""
    held = []
    for _ in range(streams):
        each = socket.create_connection(("127.0.0.1", port))
        each.sendall(get("good/live"))
        held.append(each)
    begun = sum(each.recv(12) == b"HTTP/1.1 200" for each in held)
    time.sleep(seconds)
    for each in held:
        each.close()
    sys.stdout.write(f"{begun} of {streams} streams were begun\n")


if __name__ == "__main__":
    report(attack, 300, 5.0)
