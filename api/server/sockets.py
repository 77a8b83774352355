"""Listening sockets, connection limits, and the check against unprotected exposure."""

from __future__ import annotations

import errno
import ipaddress
import logging
import resource
import shutil
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from counter.config.settings import Settings
from counter.errors import StartupError
from counter.limits import CONNECTIONS_SPARE, HANDSHAKES_MAX

BACKLOG: Final = 2_048
_PRIVILEGED_PORTS: Final = 1_024
#: File descriptors besides client connections: SQLite files, connections to the store and the
#: cache, pipes.
_OTHER_FILES: Final = 512
_CONNECTIONS_MIN: Final = 10
_log = logging.getLogger("counter.api")


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises StartupError that says whether host or port is wrong."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except (OSError, UnicodeError) as error:
        listener.close()
        said = getattr(error, "strerror", None) or error
        hint = _hint(error, host, port)
        raise StartupError(f"cannot listen on {host}:{port}: {said}; {hint}") from error
    return listener


def _hint(error: Exception, host: str, port: int) -> str:
    """Return how to fix *error*."""
    code = getattr(error, "errno", None)
    if not isinstance(error, socket.gaierror):
        if code == errno.EADDRINUSE:
            return f"port {port} is taken: choose another one with --port, or 0 for a free one"
        if code == errno.EACCES and 0 < port < _PRIVILEGED_PORTS:
            return f"ports below {_PRIVILEGED_PORTS} are for root: choose another one with --port"
        if code == errno.EADDRNOTAVAIL:
            return (
                f"this machine does not have the address {host}: choose one of its addresses with"
                " --host, or 0.0.0.0 for all"
            )
    return (
        f"{host!r} is not an address or name of this machine: choose one with --host, such as"
        " 127.0.0.1, or 0.0.0.0 for all"
    )


def check_exposure(settings: Settings, listeners: Sequence[socket.socket], *, keys: bool) -> None:
    """Refuse to serve beyond this machine without API *keys* and TLS. Raises StartupError."""
    open_to = [where for each in listeners if (where := _beyond_loopback(each)) is not None]
    if not open_to:
        return
    missing = []
    if not keys:
        missing.append("there is no API key, so every client may read and write all counters")
    if settings.https_cert is None and not settings.tls_in_front:
        missing.append("there is no TLS, so the network can read the keys and the counts")
    if not missing:
        return
    why = "; ".join(missing)
    if settings.insecure:
        _log.warning("listening on %s although %s (--insecure)", " and ".join(open_to), why)
        return
    ways = [
        "listen only on this machine: --host 127.0.0.1",
        "create a key first: counter key create --help" if not keys else "",
        "give --https-cert and --https-key, or --tls-in-front if a proxy terminates TLS"
        if len(missing) > int(not keys)
        else "",
    ]
    first, *others = filter(None, ways)
    raise StartupError(
        f"refusing to listen on {' and '.join(open_to)}: {why}\n"
        f"either {first}\n"
        f"or {', and '.join(others)}\n"
        "or, if only trusted clients can reach it: --insecure"
    )


def _beyond_loopback(listener: socket.socket) -> str | None:
    """Return the address of *listener*, or None if only this machine can reach it."""
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    if (mapped or address).is_loopback:
        return None
    return f"{f'[{host}]' if ':' in host else host}:{port}"


def connections_max(settings: Settings) -> int:
    """Return the connection limit, after raising the limit of open files as far as needed.

    Raises StartupError if a configured number does not fit."""
    # Some connections are accepted before the limit is checked.
    coming = BACKLOG if settings.https_cert is None else HANDSHAKES_MAX
    besides = coming + CONNECTIONS_SPARE + _OTHER_FILES
    wanted = settings.connections_max + besides
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        # The system may enforce a lower limit than the hard one.
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return settings.connections_max
    fits = max(_CONNECTIONS_MIN, soft - besides)
    why = (
        f"connections_max is {settings.connections_max}, but the process may open only {soft} files"
        f" and needs up to {besides} of them for other things"
    )
    if "connections_max" in settings.model_fields_set:
        raise StartupError(f"{why}: raise the limit (ulimit -n), or give --connections-max {fits}")
    _log.warning("%s: it accepts %d connections; raise the limit (ulimit -n)", why, fits)
    return fits


def say_where(listener: socket.socket, settings: Settings) -> None:
    """Print the URL and first commands to try."""
    host, port = listener.getsockname()[:2]
    scheme = "http" if settings.https_cert is None else "https"
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    one = f"{url}/v1/namespaces/default/counters/hello"
    curl = "curl" if settings.https_cert is None else "curl --cacert CA.pem"
    # The path has it unless a checkout or an environment that is not active serves.
    counter = "counter" if shutil.which("counter") else f"{sys.executable} -m counter"
    where = f" --url {url}" if url != "http://127.0.0.1:8080" else ""
    where += "" if settings.https_cert is None else " --tls-ca CA.pem"
    sys.stdout.write(
        f"Serving on {url}\n\nTry:\n"
        f"  {counter} add hello{where}\n"
        f"  {counter} get hello{where}\n\n"
        "Or by HTTP:\n"
        f"  {curl} --json '{{\"delta\": 1}}' -H 'Idempotency-Key: my-first-add' {one}/add\n"
        f"  {curl} {one}\n\n"
        f"In a browser: {url}/console\n"
    )
    sys.stdout.flush()
