"""What load balancers and proxies need of a connection, and of health checks."""

import time
from pathlib import Path

import pytest

from tests.support.bytes_on_wire import CLOSE, request
from tests.support.wire import statuses, turns, wired

#: How long proxies keep an idle connection: HAProxy, nginx, AWS, Google.
IDLE_S = (5.0, 60.0, 350.0, 600.0)


@pytest.mark.parametrize("in_front", [True, False])
async def test_the_proxy_closes_an_idle_connection_first(in_front: bool, tmp_path: Path) -> None:
    """Else a request that it sends in that moment gets no response."""
    async with wired(tmp_path, tls_in_front=in_front) as wire:
        reader, writer = await wire.connect()
        writer.write(request("GET", "/healthz"))
        await reader.readuntil(b"\r\n\r\n")
        await turns()
        [connection] = wire.connections
        for idle_s in IDLE_S:
            connection.check(time.monotonic() + idle_s)
            assert connection.transport.is_closing() is not in_front
        connection.check(time.monotonic() + 700)
        assert connection.transport.is_closing()
        writer.close()


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
async def test_a_health_check_by_options_is_answered_as_by_get(path: str, tmp_path: Path) -> None:
    """HAProxy's default method."""
    async with wired(tmp_path) as wire:
        received = await wire.tell(request("OPTIONS", path, CLOSE))
        assert statuses(received) == [200]
        received = await wire.tell(request("OPTIONS", "/metrics", CLOSE))
        assert statuses(received) == [405]
        wire.app.application.announce_shutdown()
        expected = 503 if path == "/readyz" else 200
        assert statuses(await wire.tell(request("OPTIONS", path, CLOSE))) == [expected]
