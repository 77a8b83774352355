"""One connection to one memcached. It blocks, and belongs to one thread at a time."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from pymemcache.client.base import Client
from pymemcache.exceptions import MemcacheUnexpectedCloseError, MemcacheUnknownError

from counter.storage.shared.cache_lane import NotConnectedError

#: Their responses wait in the socket's buffers while the rest is sent, and must fit.
_PIPELINED_MAX: Final = 1_000
_RECEIVED_BYTES: Final = 65_536
_END: Final = b"\r\n"
#: The response to a change of a value that memcached cannot read as a number.
NO_NUMBER: Final = b"CLIENT_ERROR cannot increment or decrement non-numeric value"


class _TellingClient(Client):  # type: ignore[misc]
    """Returns NO_NUMBER as a response instead of raising it: nothing was changed, and the other
    commands of the pipeline have responses too."""

    def _raise_errors(self, line: bytes, name: bytes) -> None:
        if line != NO_NUMBER:
            super()._raise_errors(line, name)

    def exchange(self, commands: Sequence[bytes]) -> Sequence[bytes]:
        """Send all *commands* at once, and return the line of each response. It replaces
        ``_misc_cmd``, which takes as long to read a line as the rest of the command takes."""
        try:
            self.sock.sendall(b"".join(commands))
            answers = b""
            while answers.count(_END) < len(commands):
                part = self.sock.recv(_RECEIVED_BYTES)
                if not part:
                    raise MemcacheUnexpectedCloseError
                answers += part
            *lines, rest = answers.split(_END)
            if b"ERROR" in answers:
                for line in lines:
                    self._raise_errors(line, b"pipeline")
            if rest or len(lines) > len(commands):
                raise MemcacheUnknownError(f"{len(commands)} commands have more responses")
            return lines
        except Exception:
            self.close()
            raise


class MemcachedConnection:
    """A pymemcache client that can also send many commands at once and read all their responses.

    Connects when it is used. Raises NotConnectedError, OSError (``TimeoutError`` among them) and
    pymemcache's own errors; any of them closes the connection.
    """

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self._address = (host, port)
        self._client = _TellingClient(
            self._address, connect_timeout=timeout_s, timeout=timeout_s, no_delay=True
        )

    def get_many(self, keys: Iterable[bytes]) -> Mapping[bytes, bytes]:
        """Return the values of the keys that exist."""
        self._connect()
        found: Mapping[bytes, bytes] = self._client.get_many(list(keys))
        return found

    def gets_many(self, keys: Iterable[bytes]) -> Mapping[bytes, tuple[bytes, bytes]]:
        """Return the same with the version of each value, for a compare-and-set."""
        self._connect()
        found: Mapping[bytes, tuple[bytes, bytes]] = self._client.gets_many(list(keys))
        return found

    def pipeline(self, commands: Sequence[bytes]) -> Sequence[bytes]:
        """Return the response line of each command, in a round trip for up to a thousand of them.

        pymemcache's public calls wait for each response before they send the next command.
        """
        answers: list[bytes] = []
        for start in range(0, len(commands), _PIPELINED_MAX):
            self._connect()
            part = commands[start : start + _PIPELINED_MAX]
            answers += self._client.exchange(part)
        return answers

    def close(self) -> None:
        """Close the connection; the next call opens a new one."""
        self._client.close()

    def _connect(self) -> None:
        """Reconnect if the server closed the connection, as on its shutdown; otherwise a send would
        be lost silently."""
        sock = self._client.sock
        if sock is not None:
            waiting = select.poll()
            waiting.register(sock, select.POLLIN)
            if not waiting.poll(0):
                return
        self.close()
        reason: OSError | None = None
        try:
            # A name can have several addresses, as `localhost` has ::1; pymemcache tries only one.
            addresses = socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM)
        except OSError as error:
            raise NotConnectedError(str(error)) from error
        for *_, address in addresses:
            self._client.server = address[:2]
            try:
                self._client._connect()
            except OSError as error:
                reason = error
            else:
                return
        raise NotConnectedError(str(reason)) from reason
