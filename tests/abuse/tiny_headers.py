"""Connections that send heads of many tiny headers and never finish them, without a key."""

import socket
import sys
import time

from tests.abuse.figures import report

_HEAD = b"GET / HTTP/1.1\r\nhost: localhost\r\n"
_HEAD_BYTES = 65_000


def attack(port: int, connections: int, seconds: float) -> None:
    """Open *connections*, send an unfinished head on each at once, and hold them."""
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


if __name__ == "__main__":
    report(attack, int(sys.argv[1]) if sys.argv[1:] else 2_000, 8.0)
