"""Many connections: those in use stay, and new ones get in."""

from collections.abc import AsyncIterator
from functools import partial
from operator import not_
from unittest.mock import patch

import pytest
import pytest_asyncio

from api.http.connections import Connections, peer_of
from counter.limits import FIRST_REQUEST_US, SECOND
from tests.support.bytes_on_wire import CLOSE, LAST, get, request
from tests.support.certificates import Authority, Signed
from tests.support.waiting import eventually
from tests.support.wire import Wire, problem_in, rest_of, statuses, turns, wired

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONNECTIONS = 10
FEW = 4


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wire(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Wire]:
    """One that takes ten connections."""
    async with wired(tmp_path_factory.mktemp("few"), connections_max=CONNECTIONS) as each:
        yield each


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def secure(own: Signed, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Wire]:
    """One that speaks TLS, and takes ten connections."""
    path, settings = tmp_path_factory.mktemp("secure"), own.settings
    async with wired(path, connections_max=CONNECTIONS, **settings) as each:
        yield each


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def all_closed(wire: Wire) -> AsyncIterator[None]:
    """Each test begins without connections."""
    yield
    await eventually(lambda: not wire.connections, "every connection is closed")


def shared(wire: Wire) -> Connections:
    connections: Connections = wire.app.application.connections
    return connections


async def test_connections_that_have_sent_nothing_go_first(wire: Wire) -> None:
    """The oldest of them for each new one; one that was used stays."""
    before = shared(wire).ended["unused"]

    used = await wire.connect()
    used[1].write(get())
    await used[0].readuntil(b"\r\n\r\n")
    silent = [await wire.connect() for _ in range(2 * CONNECTIONS)]
    # At the limit they are accepted one by one.
    await eventually(lambda: shared(wire).ended["unused"] == before + CONNECTIONS + 1, "closed")
    assert len(wire.connections) == CONNECTIONS
    assert await rest_of(silent[0][0]) == b""
    assert statuses(await wire.tell(get() + LAST)) == [200, 200]
    used[1].write(LAST)
    assert statuses(await rest_of(used[0])) == [200]
    for _, writer in (used, *silent):
        writer.close()


async def test_a_health_check_gets_in_when_all_are_used(wire: Wire) -> None:
    """Once on a connection; another request is refused as soon as its head is read."""

    used = [await wire.connect() for _ in range(CONNECTIONS)]
    for reader, writer in used:
        writer.write(get())
        await reader.readuntil(b"\r\n\r\n")
    for path in ("/healthz", "/readyz"):
        received = await wire.tell(request("GET", path) * 2)
        assert statuses(received) == [200]
        assert b"connection: close" in received
    for sent in (get(), request("GET", "/metrics"), request("GET", "/healthz/../v1/tokens")):
        problem_in(await wire.tell(sent), "overloaded")
    for _, writer in used:
        writer.close()


async def test_the_number_of_health_checks_is_bounded(wire: Wire) -> None:
    with patch("api.server.protocol.CONNECTIONS_SPARE", 2):
        used = [await wire.connect() for _ in range(CONNECTIONS)]
        for _, writer in used:
            writer.write(get()[:-2])
        await turns()
        spare = [await wire.connect() for _ in range(2)]
        for _, writer in spare:
            writer.write(b"GET /healthz")
        await turns()
        assert statuses(await wire.tell()) == [503]
        for _, writer in (*used, *spare):
            writer.close()


async def test_little_time_for_a_first_request_when_most_are_taken(wire: Wire) -> None:
    """One that is used has as much time as ever."""
    limit_s = FIRST_REQUEST_US / SECOND

    used = await wire.connect()
    used[1].write(get())
    await used[0].readuntil(b"\r\n\r\n")
    used[1].write(get()[:-2])
    few = [await wire.connect() for _ in range(FEW)]
    await turns()
    for each in list(wire.connections):
        each.time_out_after(limit_s + 1)
    assert len(wire.connections) == 1 + FEW
    many = [await wire.connect() for _ in range(FEW)]
    await turns()
    for each in list(wire.connections):
        each.time_out_after(limit_s)
    await turns()
    assert len(wire.connections) == 1 + 2 * FEW
    for each in list(wire.connections):
        each.time_out_after(limit_s + 1)
    for reader, writer in (*few, *many):
        assert statuses(await rest_of(reader)) == [408]
        writer.close()
    used[1].write(b"connection: close\r\n\r\n")
    assert statuses(await rest_of(used[0])) == [200]
    used[1].close()


async def test_an_address_has_no_more_than_its_share(
    wire: Wire, secure: Wire, authority: Authority
) -> None:
    """Over TLS it is counted from the first byte on."""

    for each, tls in ((wire, None), (secure, authority.client())):
        shared(each).peers.most = FEW
        ends = [await each.connect(tls) for _ in range(FEW)]
        if tls is None:
            problem = problem_in(await each.tell(), "overloaded")
            assert "connections_per_address" in problem["detail"]
        else:
            with pytest.raises(ConnectionError):
                await each.tell(tls=tls)
        for _, writer in ends:
            writer.close()

        await eventually(partial(not_, each.connections), "they are closed")
        assert statuses(await each.tell(get("c", CLOSE), tls=tls)) == [200]
        shared(each).peers.most = 0


@pytest.mark.parametrize("begun", [b"", b"\x16"], ids=["silent", "half-a-handshake"])
async def test_connections_without_a_handshake_block_no_client(
    secure: Wire, authority: Authority, begun: bytes
) -> None:
    """The oldest goes for each new one; those that have sent nothing go first."""

    with patch("api.server.tls.HANDSHAKES_MAX", FEW):
        held = [await secure.connect() for _ in range(3 * FEW)]
        for _, writer in held:
            writer.write(begun)
        for _ in range(FEW):
            sent = LAST + get()
            assert statuses(await secure.tell(sent, tls=authority.client())) == [200]
        for _, writer in held:
            writer.close()


async def test_a_client_is_an_address_or_a_network_of_ipv6() -> None:
    assert peer_of(("192.0.2.7", 1)) == peer_of(("::ffff:192.0.2.7", 2, 0, 0)) == "192.0.2.7"
    assert peer_of(("2001:db8::1", 1, 0, 0)) == peer_of(("2001:db8::2:1%eth0", 2, 0, 0))
    assert peer_of(("2001:db8::1", 1, 0, 0)) != peer_of(("2001:db8:0:1::1", 1, 0, 0))
    assert peer_of(None) == ""
