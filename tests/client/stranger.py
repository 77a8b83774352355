"""Somebody on loopback who is no counter service: answers each request with the same bytes."""

import re
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

_PIECE_BYTES = 65_536
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)


@dataclass(slots=True)
class Stranger:
    """Its response, in pieces, and the received requests."""

    pieces: Sequence[bytes]
    url: str = ""
    asked: list[bytes] = field(default_factory=list)

    def header(self, name: str) -> list[str | None]:
        """The values of a header, one for each request."""
        found = []
        for each in self.asked:
            lines = each.decode("latin-1").lower().partition("\r\n\r\n")[0].split("\r\n")
            values = [line.partition(": ")[2] for line in lines if line.startswith(f"{name}: ")]
            found.append(values[0] if values else None)
        return found


@contextmanager
def stranger(*pieces: bytes) -> Iterator[Stranger]:
    """Listen. If there are several pieces, repeat the last one until the client closes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = Stranger(pieces, f"http://127.0.0.1:{listener.getsockname()[1]}")
        threads: list[threading.Thread] = []

        def answer(connection: socket.socket) -> None:
            with connection:
                try:
                    found.asked.append(_request(connection))
                    for piece in found.pieces:
                        connection.sendall(piece)
                    while len(found.pieces) > 1:
                        connection.sendall(found.pieces[-1])
                except OSError:
                    return

        def listen() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threads.append(threading.Thread(target=answer, args=(connection,)))
                threads[-1].start()

        listening = threading.Thread(target=listen)
        listening.start()
        try:
            yield found
        finally:
            # close() alone would leave accept() waiting.
            listener.shutdown(socket.SHUT_RDWR)
            listening.join()
            for each in threads:
                each.join()


def _request(connection: socket.socket) -> bytes:
    """Read a whole request: closing with unread bytes would reset the connection."""
    received = b""
    while piece := connection.recv(_PIECE_BYTES):
        received += piece
        head, end, body = received.partition(b"\r\n\r\n")
        length = _LENGTH.search(head + b"\r\n")
        if end and len(body) >= (int(length[1]) if length else 0):
            break
    return received


def http(status: str, body: bytes, *headers: str) -> bytes:
    """A response of HTTP/1.1 that announces the end of its connection."""
    ours = (f"Content-Length: {len(body)}", "Connection: close")
    return "\r\n".join([f"HTTP/1.1 {status}", *ours, *headers, "", ""]).encode() + body
