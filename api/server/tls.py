"""TLS of the server: its context, taken anew when files change, and the way of a connection in."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

from api.http.connections import FULL, HANDSHAKE, UNUSED, Connections, peer_of
from counter.config.settings import Settings
from counter.config.values import read_secret
from counter.errors import StartupError, invariant
from counter.limits import FIRST_REQUEST_US, HANDSHAKES_MAX, SECOND

#: Of TLS 1.2 only what keeps the past secret and is not known to be weak; all of TLS 1.3 is.
_CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
_LOOK_EVERY_S: Final = 5.0
_ENDS_SOON_S: Final = 7 * 86_400
#: Connections taken in one turn of the loop: others have their turn too.
_ACCEPTS_AT_ONCE: Final = 64
#: How long nobody is let in when the process, or the machine, can open no more files.
_FULL_PAUSE_S: Final = 1.0
_log = logging.getLogger("counter.api")

#: What tells that a file is another one, or has other contents.
_Stamp = tuple[int, int, int]


def server_context(settings: Settings) -> ssl.SSLContext:
    """The context of the files in *settings*. Raises StartupError, naming what is wrong."""
    cert, key, trusted = settings.https_cert, settings.https_key, settings.https_client_ca
    invariant(cert is not None and key is not None, "TLS needs a certificate and its key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    context.set_alpn_protocols(["http/1.1"])
    context.options |= ssl.OP_NO_RENEGOTIATION
    try:
        # Without a password of ours OpenSSL would ask the terminal for one.
        context.load_cert_chain(str(cert), str(key), _password(settings))
    except (OSError, ValueError) as error:
        raise StartupError(
            f"https_cert {cert} and https_key {key} cannot be used: {_why(error)}; they must be"
            " PEM files, the certificate's chain in its file, and belong together; an encrypted"
            " key needs --https-key-password-file"
        ) from error
    if trusted is not None:
        try:
            context.load_verify_locations(str(trusted))
        except (OSError, ValueError) as error:
            raise StartupError(
                f"https_client_ca {trusted} cannot be used: {_why(error)}; it must be a PEM file"
                " with the certificates of those who sign clients' certificates"
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _password(settings: Settings) -> Callable[[], str]:
    path = settings.https_key_password_file
    return lambda: "" if path is None else read_secret(path)


def _why(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)


class Certificates:
    """The context that handshakes begin with now; files that are renewed are taken up."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._paths: list[Path] = [
            each
            for each in (
                settings.https_cert,
                settings.https_key,
                settings.https_key_password_file,
                settings.https_client_ca,
            )
            if each is not None
        ]
        self._stamps = self._look()
        self.context = server_context(settings)
        #: When what is shown ends, in Unix time; 0 where that cannot be told.
        self.ends_at_s = 0.0
        self._note_end()

    def renew(self) -> bool:
        """Take the files anew if they have changed; whether they were taken.

        Those that cannot be used are told of once, and what was loaded before stays.
        """
        stamps = self._look()
        if stamps == self._stamps:
            return False
        self._stamps = stamps
        try:
            self.context = server_context(self._settings)
        except StartupError as error:
            _log.error("the certificate that was loaded before stays in use: %s", error)
            return False
        _log.info("the certificate was renewed from %s", self._settings.https_cert)
        self._note_end()
        return True

    async def watch(self, every_s: float = _LOOK_EVERY_S) -> None:
        """Look for other files from time to time, for ever."""
        while True:
            await asyncio.sleep(every_s)
            self.renew()

    def _note_end(self) -> None:
        cert = self._settings.https_cert
        self.ends_at_s = 0.0
        if cert is None:
            return
        with suppress(OSError, ValueError):
            self.ends_at_s = ends_at_s(cert)
            left_s = self.ends_at_s - time.time()
            if left_s < _ENDS_SOON_S:
                when = datetime.fromtimestamp(self.ends_at_s, UTC).isoformat()
                _log.warning("the certificate in %s ends at %s: renew it", cert, when)

    def _look(self) -> list[_Stamp | None]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> _Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


class TlsListener:
    """Takes the connections of one listening socket, each after its handshake.

    The event loop's own server would keep one context for ever, wait a minute for a handshake, and
    count nobody who has not finished one.
    """

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        certificates: Certificates,
        handshake_timeout_us: int,
        shared: Connections,
    ) -> None:
        self._shared = shared
        self._listener = listener
        self._protocol = protocol
        self._certificates = certificates
        self._timeout_s = handshake_timeout_us / SECOND
        self._loop = asyncio.get_running_loop()
        #: Connections that have sent nothing yet, and those whose handshake is under way; both the
        #: oldest first.
        self._silent: dict[asyncio.Task[None], None] = {}
        self._shaking: dict[asyncio.Task[None], None] = {}
        self._is_open = True
        listener.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Take no more connections."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._listener)

    async def wait_closed(self) -> None:
        """Drop those that shake hands, which have no request yet, and wait until they are gone."""
        tasks = [*self._silent, *self._shaking]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _listen(self) -> None:
        if self._is_open:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._pause(error)
                return
            peer = peer_of(address)
            if not self._shared.peers.take(peer):
                # In the clear no problem can be told.
                connection.close()
                self._shared.end(FULL)
                continue
            if len(self._silent) + len(self._shaking) >= HANDSHAKES_MAX:
                self._make_room()
            connection.setblocking(False)
            task = self._loop.create_task(self._shake(connection))
            self._silent[task] = None
            task.add_done_callback(partial(self._end, connection, peer))

    def _make_room(self) -> None:
        """Drop the oldest connection that has sent nothing, or else the oldest handshake: one that
        goes well is done long before it is the oldest."""
        waiting = self._silent or self._shaking
        task = next(iter(waiting))
        del waiting[task]
        task.cancel()
        self._shared.end(UNUSED)

    def _end(self, connection: socket.socket, peer: str, task: asyncio.Task[None]) -> None:
        """Drop a client that failed its handshake, or was dropped for another one."""
        known = task in self._silent or task in self._shaking
        self._silent.pop(task, None)
        self._shaking.pop(task, None)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            return
        connection.close()
        self._shared.peers.give_back(peer)
        if known:
            self._shared.end(HANDSHAKE)
        if isinstance(error, OSError | asyncio.CancelledError):
            _log.debug("a handshake failed: %s", error)
        else:
            _log.error("a handshake failed unexpectedly", exc_info=error)

    def _pause(self, error: OSError) -> None:
        """Wait for files to be closed: to try at once would be to try for ever."""
        _log.error("no connection can be taken now: %s", error.strerror)
        self._loop.remove_reader(self._listener)
        self._loop.call_later(_FULL_PAUSE_S, self._listen)

    async def _shake(self, connection: socket.socket) -> None:
        """Have the protocol begin when the handshake is done. The handshake, and its memory, begin
        with the client's first byte."""
        task = asyncio.current_task()
        invariant(task is not None, "a handshake runs in a task")
        pending = len(self._silent) + len(self._shaking)
        crowded = self._shared.is_crowded or 4 * pending >= 3 * HANDSHAKES_MAX
        first_s = min(self._timeout_s, FIRST_REQUEST_US / SECOND) if crowded else self._timeout_s
        async with asyncio.timeout(first_s):
            await self._first_byte(connection)
        if task in self._silent:
            del self._silent[task]
            self._shaking[task] = None
        await self._loop.connect_accepted_socket(
            self._protocol,
            connection,
            ssl=self._certificates.context,
            ssl_handshake_timeout=self._timeout_s,
            ssl_shutdown_timeout=self._timeout_s,
        )

    async def _first_byte(self, connection: socket.socket) -> None:
        """Wait until something can be read from *connection*."""
        came: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(connection, _set, came)
        try:
            await came
        finally:
            self._loop.remove_reader(connection)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


_BLOCK: Final = re.compile(
    r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL | re.ASCII
)
#: Tags of DER (X.690) that are met here.
_VERSION: Final = 0xA0
_UTC_TIME: Final = 0x17
#: Two digits of a year from here on are of the last century (RFC 5280, 4.1.2.5.1).
_CENTURY: Final = 50


def ends_at_s(path: Path) -> float:
    """The end of the first certificate in the PEM file *path*, in Unix time.

    Raises OSError, and ValueError where there is none.
    """
    found = _BLOCK.search(path.read_text(encoding="ascii", errors="replace"))
    if found is None:
        raise ValueError(f"{path} holds no certificate")
    der = ssl.PEM_cert_to_DER_cert(found[0])
    try:
        return _not_after(der).timestamp()
    except IndexError as error:
        raise ValueError(f"the certificate in {path} is cut off") from error


def _not_after(der: bytes) -> datetime:
    """The second time of ``tbsCertificate.validity`` (RFC 5280, 4.1)."""
    whole, _ = _content(der, 0)
    at, _ = _content(der, whole)
    if der[at] == _VERSION:
        at = _content(der, at)[1]
    for _ in ("serialNumber", "signature", "issuer"):
        at = _content(der, at)[1]
    validity, _ = _content(der, at)
    at = _content(der, validity)[1]
    start, end = _content(der, at)
    text = der[start:end].decode("ascii")
    if der[at] == _UTC_TIME:
        text = f"{'19' if int(text[:2]) >= _CENTURY else '20'}{text}"
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)


def _content(der: bytes, at: int) -> tuple[int, int]:
    """Where the contents of the value at *at* begin and end."""
    length, start = der[at + 1], at + 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(der[at + 2 : start], "big")
    return start, start + length
