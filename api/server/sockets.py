"""Listening sockets, connection limits, and the check against unprotected exposure."""

from __future__ import annotations

import errno
import ipaddress
import logging
import resource
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from counter.config.settings import Settings
from counter.errors import StartupError
from counter.limits import CONNECTIONS_SPARE, HANDSHAKES_MAX

_BACKLOG: Final = 2_048
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
        listener.listen(_BACKLOG)
    except (OSError, UnicodeError) as error:
        listener.close()
        said = getattr(error, "strerror", None) or error
        is_port = getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES)
        fix = "port with --port" if is_port else "address with --host"
        raise StartupError(
            f"cannot listen on {host}:{port}: {said}; choose another {fix}"
        ) from error
    return listener


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
    coming = _BACKLOG if settings.https_cert is None else HANDSHAKES_MAX
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
    """Print the URL."""
    host, port = listener.getsockname()[:2]
    scheme = "http" if settings.https_cert is None else "https"
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    sys.stdout.write(f"Serving on {url}\nIn a browser: {url}/console\n")
    sys.stdout.flush()
