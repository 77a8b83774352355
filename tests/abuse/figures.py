"""What an abuse costs a service process: its memory, its health check, and another client.

An attack runs against a service on loopback from a process of its own, for a bounded time, while
this one measures. Run one in full size with ``python -m tests.abuse NAME``.
"""

import asyncio
import json
import os
import re
import ssl
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.support.bytes_on_wire import JSON, LAST, get, post
from tests.support.certificates import Authority
from tests.support.rest import new_token, on_wire
from tests.support.server import Server, serving

RESIDENT_MIB_MAX = 200
HEALTHZ_MS_MAX = 250
_EVERY_S = 0.05
_PATIENCE_S = 60.0
#: Long: a token is not too old, and an add is not given up, because the machine is slow.
_WINDOWS: Mapping[str, str] = {
    "rollup_window": "10s",
    "accept_limit": "1m",
    "write_timeout": "20s",
}
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")

#: Attacks the service on a port; runs in a process of its own.
Attack = Callable[..., None]


@dataclass(slots=True)
class Figures:
    """The measurements during an attack."""

    resident_mib: list[float] = field(default_factory=list)
    healthz_ms: list[float] = field(default_factory=list)
    requests_ms: list[float] = field(default_factory=list)
    #: Health checks and requests of the well-behaved client that were not answered 200.
    failed: list[str] = field(default_factory=list)
    #: CPU time of the service while the attack ran, the watchers' requests included.
    cpu_s: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.cpu_s:.1f} s of CPU; resident memory {self.resident_mib[0]:.0f} MiB before,"
            f" {max(self.resident_mib):.0f} at most, {self.resident_mib[-1]:.0f} at the end;"
            f" /healthz p99 {p99(self.healthz_ms):.0f} ms of {len(self.healthz_ms)};"
            f" a well-behaved client's adds and gets p99 {p99(self.requests_ms):.0f} ms of"
            f" {len(self.requests_ms)}; {len(self.failed)} failed"
        )

    def check(self) -> None:
        """Assert the bounds that do not depend on the speed of the machine."""
        assert max(self.resident_mib) < RESIDENT_MIB_MAX, self
        assert not self.failed, self.failed[:5]
        assert self.requests_ms, "the well-behaved client was answered"


def p99(values: list[float]) -> float:
    """The 99th percentile of *values*; infinite if there are none."""
    return sorted(values)[int(len(values) * 0.99)] if values else float("inf")


def measure(
    attack: Attack, *args: Any, flags: Mapping[str, str] | None = None, tls: bool = False
) -> Figures:
    """Run *attack* with a port and *args*, and return its cost."""
    with tempfile.TemporaryDirectory(prefix="counter-abuse-") as place:
        return asyncio.run(_measure(attack, args, Path(place), dict(flags or {}), tls))


def report(
    attack: Attack, *args: Any, flags: Mapping[str, str] | None = None, tls: bool = False
) -> None:
    """Run *attack*, print its cost, and exit with 1 if that is above a bound."""
    figures = measure(attack, *args, flags=flags, tls=tls)
    sys.stdout.write(f"{figures}\n")
    for each in sorted(set(figures.failed))[:5]:
        sys.stdout.write(f"  failed: {each}\n")
    try:
        figures.check()
    except AssertionError as error:
        raise SystemExit(f"failed: {error}") from None
    if p99(figures.healthz_ms) >= HEALTHZ_MS_MAX:
        raise SystemExit(f"/healthz took longer than {HEALTHZ_MS_MAX} ms")


async def _measure(
    attack: Attack, args: tuple[Any, ...], place: Path, flags: dict[str, str], tls: bool
) -> Figures:
    figures, context = Figures(), None
    if tls:
        authority = Authority(place)
        own, context = authority.sign(), authority.client()
        flags |= {"https_cert": str(own.cert), "https_key": str(own.key)}
    async with serving(place / "data", place / "logs", **_WINDOWS, **flags) as server:
        port = int(server.url.rpartition(":")[2])
        client = _Client(port, context)
        figures.resident_mib.append(_resident_mib(server))
        watchers = [
            asyncio.create_task(each)
            for each in (
                _watch_memory(server, figures),
                _check_health(client, figures),
                _behave_well(client, figures),
            )
        ]
        process = get_context("spawn").Process(target=attack, args=(port, *args), daemon=True)
        before_s = _cpu_s(server)
        process.start()
        try:
            await asyncio.to_thread(process.join)
            # Waiting requests are answered, and adds of the attack are still counted.
            await asyncio.sleep(1.0)
        finally:
            for each in watchers:
                each.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
        figures.resident_mib.append(_resident_mib(server))
        figures.cpu_s = _cpu_s(server) - before_s
        assert process.exitcode == 0, f"the attack failed with {process.exitcode}"
    return figures


def _resident_mib(server: Server) -> float:
    status = Path(f"/proc/{server.process.pid}/status").read_text(encoding="ascii")
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1024


def _cpu_s(server: Server) -> float:
    status = Path(f"/proc/{server.process.pid}/stat").read_text(encoding="ascii")
    # The name of the program, in parentheses, is the second field and may hold spaces.
    fields = status.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _watch_memory(server: Server, figures: Figures) -> None:
    while True:
        figures.resident_mib.append(_resident_mib(server))
        await asyncio.sleep(_EVERY_S)


@dataclass(slots=True)
class _Client:
    """The address of a client's connection, and its TLS."""

    port: int
    tls: ssl.SSLContext | None

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("localhost", self.port, ssl=self.tls)


async def _check_health(client: _Client, figures: Figures) -> None:
    """As a load balancer does: a connection for each."""
    while True:
        await _timed(_ask(client, LAST), "/healthz", figures.healthz_ms, figures.failed)
        await asyncio.sleep(_EVERY_S)


async def _behave_well(client: _Client, figures: Figures) -> None:
    """A client that keeps a connection, and takes another one if it is closed."""
    connection = await client.connect()
    try:
        while True:
            body = json.dumps({"delta": 1, "idempotency_token": on_wire(new_token())}).encode()
            sent = post("/v1/namespaces/default/counters/good/add", body, JSON) + get("good")
            began = len(figures.failed)
            await _timed(_twice(connection, sent), "request", figures.requests_ms, figures.failed)
            if len(figures.failed) > began:
                connection[1].close()
                with suppress(OSError):
                    connection = await client.connect()
            await asyncio.sleep(_EVERY_S)
    finally:
        connection[1].close()


async def _timed(asking: Any, what: str, took_ms: list[float], failed: list[str]) -> None:
    began_s = time.monotonic()
    try:
        async with asyncio.timeout(_PATIENCE_S):
            statuses = await asking
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        failed.append(f"{what}: {type(error).__name__}: {error}")
        return
    if set(statuses) != {b"200"}:
        failed.append(f"{what}: {statuses}")
        return
    took_ms.append((time.monotonic() - began_s) * 1_000)


async def _ask(client: _Client, sent: bytes) -> list[bytes]:
    """The statuses of the responses to *sent* on a new connection."""
    reader, writer = await client.connect()
    try:
        writer.write(sent)
        return _STATUS.findall(await reader.read())
    finally:
        writer.close()


async def _twice(
    connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], sent: bytes
) -> list[bytes]:
    """The statuses of the two answers to *sent*."""
    reader, writer = connection
    writer.write(sent)
    found: list[bytes] = []
    for _ in range(2):
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        await reader.readexactly(int(length[1]) if length else 0)
        found += _STATUS.findall(head)
    return found
