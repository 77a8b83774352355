"""Where a process listens, and whether it may: beyond loopback only with keys and TLS."""

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
_PRIVILEGED_PORTS: Final = 1_024
#: What a process opens besides the connections of its clients: files of SQLite, connections to the
#: store's nodes and caches, pipes.
_OTHER_FILES: Final = 512
_CONNECTIONS_MIN: Final = 10
_log = logging.getLogger("counter.api")


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises StartupError, saying which of the two is wrong."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except (OSError, UnicodeError) as error:
        listener.close()
        said = getattr(error, "strerror", None) or error
        hint = _hint(error, host, port)
        raise StartupError(f"cannot listen on {host}:{port}: {said}; {hint}") from error
    return listener


def _hint(error: Exception, host: str, port: int) -> str:
    """What to do about it."""
    code = getattr(error, "errno", None)
    if not isinstance(error, socket.gaierror):
        if code == errno.EADDRINUSE:
            return f"port {port} is taken: choose another one with --port, or 0 for a free one"
        if code == errno.EACCES and 0 < port < _PRIVILEGED_PORTS:
            return f"ports below {_PRIVILEGED_PORTS} are for root: choose another one with --port"
        if code == errno.EADDRNOTAVAIL:
            return (
                f"this machine has no address {host}: choose one of its own with --host, or"
                " 0.0.0.0 for all"
            )
    return (
        f"{host!r} is no address or name of this machine: choose one with --host, such as"
        " 127.0.0.1, or 0.0.0.0 for all"
    )


def check_exposure(settings: Settings, listeners: Sequence[socket.socket], *, keys: bool) -> None:
    """Refuse to serve beyond this machine without API *keys* and TLS. Raises StartupError."""
    open_to = [where for each in listeners if (where := _beyond_loopback(each)) is not None]
    if not open_to:
        return
    missing = []
    if not keys:
        missing.append("there is no API key, so whoever reaches it may read and write all counters")
    if settings.https_cert is None and not settings.tls_in_front:
        missing.append("there is no TLS, so whoever is on the way can read the keys and the counts")
    if not missing:
        return
    why = "; ".join(missing)
    if settings.insecure:
        _log.warning("listening on %s although %s (--insecure)", " and ".join(open_to), why)
        return
    ways = [
        "listen on this machine alone: --host 127.0.0.1",
        "make a key first: counter key create --help" if not keys else "",
        "give --https-cert and --https-key, or --tls-in-front where a proxy speaks TLS"
        if len(missing) > int(not keys)
        else "",
    ]
    first, *others = filter(None, ways)
    raise StartupError(
        f"refusing to listen on {' and '.join(open_to)}: {why}\n"
        f"either {first}\n"
        f"or {', and '.join(others)}\n"
        "or, where nobody else can reach it, say so: --insecure"
    )


def _beyond_loopback(listener: socket.socket) -> str | None:
    """The address of *listener*; None where only this machine can reach it."""
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    if (mapped or address).is_loopback:
        return None
    return f"{f'[{host}]' if ':' in host else host}:{port}"


def connections_max(settings: Settings) -> int:
    """How many connections this process may have at once, the limit of open files raised for them
    as far as it may be. Raises StartupError where a number that was given does not fit."""
    # Some are taken before it shows that there are too many.
    coming = _BACKLOG if settings.https_cert is None else HANDSHAKES_MAX
    besides = coming + CONNECTIONS_SPARE + _OTHER_FILES
    wanted = settings.connections_max + besides
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        # A system may have a bound of its own, below what it names.
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return settings.connections_max
    fits = max(_CONNECTIONS_MIN, soft - besides)
    why = (
        f"connections_max is {settings.connections_max} and the process may open {soft} files,"
        f" {besides} of which it may need besides"
    )
    if "connections_max" in settings.model_fields_set:
        raise StartupError(f"{why}: raise the limit (ulimit -n), or give --connections-max {fits}")
    _log.warning("%s: it takes %d connections; raise the limit (ulimit -n)", why, fits)
    return fits


def say_where(listener: socket.socket, settings: Settings) -> None:
    """Tell the terminal where it is served, and what to try first."""
    host, port = listener.getsockname()[:2]
    scheme = "http" if settings.https_cert is None else "https"
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    one = f"{url}/v1/namespaces/default/counters/hello"
    curl = "curl" if settings.https_cert is None else "curl --cacert CA.pem"
    sys.stdout.write(
        f"Serving on {url}\n\nTry:\n"
        f"  {curl} --json '{{\"delta\": 1}}' -H 'Idempotency-Key: my-first-add' {one}/add\n"
        f"  {curl} {one}\n\n"
        f"In a browser: {url}/console\n"
    )
    sys.stdout.flush()
