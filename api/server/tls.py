"""TLS of the server: a context that is rebuilt when the files change, and bounded handshakes."""

from __future__ import annotations

import asyncio
import logging
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
from api.server.listener import Listener
from counter.background import every
from counter.config.settings import Settings
from counter.config.values import read_secret
from counter.errors import StartupError, invariant
from counter.limits import FIRST_REQUEST_US, HANDSHAKES_MAX, SECOND

#: Ciphers of TLS 1.2 with forward secrecy and no known weakness; all of TLS 1.3 are such.
_CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
_LOOK_EVERY_S: Final = 5.0
_ENDS_SOON_S: Final = 7 * 86_400
#: X509_V_FLAG_NO_CHECK_TIME of OpenSSL, to read the end of an expired certificate, too.
_NO_CHECK_TIME: Final = 0x200000
_log = logging.getLogger("counter.api")

#: Identifies a file and its content.
_Stamp = tuple[int, int, int]


def server_context(settings: Settings) -> ssl.SSLContext:
    """Return a context with the files in *settings*. Raises StartupError with the cause."""
    cert, key, trusted = settings.https_cert, settings.https_key, settings.https_client_ca
    invariant(cert is not None and key is not None, "TLS needs a certificate and its key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    context.set_alpn_protocols(["http/1.1"])
    context.options |= ssl.OP_NO_RENEGOTIATION
    try:
        # Without a password OpenSSL would ask for one on the terminal.
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
    """The context of new handshakes, rebuilt when its files are renewed."""

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
        self._stamps = self._read_stamps()
        self.context = server_context(settings)
        #: When the certificate in use expires, in Unix time; 0 if unknown.
        self.ends_at_s = self._find_end_s()

    def renew(self) -> bool:
        """Load the files again if they have changed; return whether they were loaded.

        If they cannot be used, that is logged once and the previous context stays.
        """
        stamps = self._read_stamps()
        if stamps == self._stamps:
            return False
        self._stamps = stamps
        try:
            self.context = server_context(self._settings)
        except StartupError as error:
            _log.error("the certificate that was loaded before stays in use: %s", error)
            return False
        _log.info("the certificate was renewed from %s", self._settings.https_cert)
        self.ends_at_s = self._find_end_s()
        return True

    async def watch(self, stop: asyncio.Event, every_s: float = _LOOK_EVERY_S) -> None:
        """Check the files periodically until *stop* is set."""
        await every(every_s, self.renew, stop, _log, "renewing the certificate")

    def _find_end_s(self) -> float:
        """Return when the certificate ends, as a client sees it in a handshake in memory: the
        standard library reads a certificate only for a peer that verified it."""
        cert = str(self._settings.https_cert)
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        try:
            client.load_verify_locations(cert)
            server = self.context.wrap_bio(to_server, to_client, server_side=True)
            asking = client.wrap_bio(to_client, to_server)
            for side in (asking, server, asking):
                with suppress(ssl.SSLWantReadError):
                    side.do_handshake()
            shown = asking.getpeercert() or {}
            ends_at_s = float(ssl.cert_time_to_seconds(str(shown["notAfter"])))
        except (OSError, KeyError, ValueError) as error:
            _log.warning("the end of the certificate in %s is not known: %s", cert, error)
            return 0.0
        if ends_at_s - time.time() < _ENDS_SOON_S:
            when = datetime.fromtimestamp(ends_at_s, UTC).isoformat()
            _log.warning("the certificate in %s ends at %s: renew it", cert, when)
        return ends_at_s

    def _read_stamps(self) -> list[_Stamp | None]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> _Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


class TlsListener(Listener):
    """Accept connections on one listening socket, each with a handshake.

    The event loop's own server would keep one context forever, wait a minute for a handshake, and
    not count connections before its end.
    """

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        certificates: Certificates,
        handshake_timeout_us: int,
        shared: Connections,
    ) -> None:
        super().__init__(listener, protocol, shared)
        self._certificates = certificates
        self._timeout_s = handshake_timeout_us / SECOND
        #: Connections that have sent nothing yet, and handshakes in progress; both oldest first.
        self._silent: dict[asyncio.Task[None], None] = {}
        self._shaking: dict[asyncio.Task[None], None] = {}

    async def wait_closed(self) -> None:
        """Cancel all handshakes, which have no request yet, and wait for their end."""
        tasks = [*self._silent, *self._shaking]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _take(self, connection: socket.socket, address: object) -> None:
        peer = peer_of(address)
        if not self._shared.peers.acquire(peer):
            # A problem document cannot be sent before the handshake.
            connection.close()
            self._shared.count_end(FULL)
            return
        if len(self._silent) + len(self._shaking) >= HANDSHAKES_MAX:
            self._make_room()
        task = self._loop.create_task(self._shake(connection))
        self._silent[task] = None
        task.add_done_callback(partial(self._finish, connection, peer))

    def _make_room(self) -> None:
        """Drop the oldest connection that has sent nothing, or else the oldest handshake: a normal
        one is done long before it is the oldest."""
        waiting = self._silent or self._shaking
        task = next(iter(waiting))
        del waiting[task]
        task.cancel()
        self._shared.count_end(UNUSED)

    def _finish(self, connection: socket.socket, peer: str, task: asyncio.Task[None]) -> None:
        """Close a connection whose handshake failed or was cancelled."""
        known = task in self._silent or task in self._shaking
        self._silent.pop(task, None)
        self._shaking.pop(task, None)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            return
        connection.close()
        self._shared.peers.release(peer)
        if known:
            self._shared.count_end(HANDSHAKE)
        if isinstance(error, OSError | asyncio.CancelledError):
            _log.debug("a handshake failed: %s", error)
        else:
            _log.error("a handshake failed unexpectedly", exc_info=error)

    async def _shake(self, connection: socket.socket) -> None:
        """Start the protocol after the handshake. The handshake, and its memory use, begin with the
        client's first byte."""
        task = asyncio.current_task()
        invariant(task is not None, "a handshake runs in a task")
        pending = len(self._silent) + len(self._shaking)
        nearly_full = self._shared.is_nearly_full or 4 * pending >= 3 * HANDSHAKES_MAX
        first_s = (
            min(self._timeout_s, FIRST_REQUEST_US / SECOND) if nearly_full else self._timeout_s
        )
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
        """Wait until *connection* is readable."""
        came = asyncio.Event()
        self._loop.add_reader(connection, came.set)
        try:
            await came.wait()
        finally:
            self._loop.remove_reader(connection)
