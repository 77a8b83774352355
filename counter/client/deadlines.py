"""When an attempt of a thread ends, however slowly what it waits for comes.

httpx bounds each wait for some bytes, and not all of them: a server that says the head of its
answer byte by byte would keep a call for as long as it likes.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import httpcore
import httpx

#: What is written at once: between two of these the time is looked at.
_PART_BYTES: Final = 65_536


class Deadline(threading.local):
    """Until when the attempt may wait that a thread is at, by ``time.perf_counter``."""

    end_s: float | None = None

    @contextmanager
    def at(self, end_s: float) -> Iterator[None]:
        """Have what this thread waits for meanwhile end at *end_s*."""
        before, self.end_s = self.end_s, end_s
        try:
            yield
        finally:
            self.end_s = before

    def left_s(self, timeout: float | None, late: type[Exception]) -> float | None:
        """What is left of *timeout*. Raises *late* where nothing is."""
        if self.end_s is None:
            return timeout
        left_s = self.end_s - time.perf_counter()
        if left_s <= 0:
            raise late("the time of the attempt is over")
        return left_s if timeout is None else min(left_s, timeout)

    def keep(self, http: httpx.Client) -> None:
        """Have all connections of *http*, which has none yet, keep it."""
        # Only httpcore has a parameter for that, and httpx does not pass it on. Where another
        # version names it otherwise, each wait is bounded by itself, as httpx has it.
        for each in (http._transport, *http._mounts.values()):
            pool = getattr(each, "_pool", None)
            backend = getattr(pool, "_network_backend", None)
            if isinstance(backend, httpcore.NetworkBackend):
                pool._network_backend = _Backend(backend, self)  # type: ignore[union-attr]


class _Backend(httpcore.NetworkBackend):
    """Makes connections that keep a deadline."""

    def __init__(self, inner: httpcore.NetworkBackend, deadline: Deadline) -> None:
        self._inner = inner
        self._deadline = deadline

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        left_s = self._deadline.left_s(timeout, httpcore.ConnectTimeout)
        stream = self._inner.connect_tcp(host, port, left_s, local_address, socket_options)
        return _Stream(stream, self._deadline)


class _Stream(httpcore.NetworkStream):
    """A connection that keeps a deadline."""

    def __init__(self, inner: httpcore.NetworkStream, deadline: Deadline) -> None:
        self._inner = inner
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._inner.read(max_bytes, self._deadline.left_s(timeout, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        for at in range(0, len(buffer), _PART_BYTES):
            left_s = self._deadline.left_s(timeout, httpcore.WriteTimeout)
            self._inner.write(buffer[at : at + _PART_BYTES], left_s)

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        left_s = self._deadline.left_s(timeout, httpcore.ConnectTimeout)
        return _Stream(self._inner.start_tls(ssl_context, server_hostname, left_s), self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)
