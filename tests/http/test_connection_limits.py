"""How many connections there may be, how long a URL, and how long a client may take nothing."""

import asyncio
import gc
import logging
import random
import resource
import socket
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import patch

import pytest
import pytest_asyncio

from api.server.protocol import HttpProtocol
from api.server.sockets import connections_max
from counter.config.settings import Settings
from counter.errors import StartupError
from counter.limits import CONNECTIONS_MAX, URL_BYTES_MAX
from tests.support.bytes_on_wire import CLOSE, JSON, LAST, add, get, post, request
from tests.support.waiting import eventually
from tests.support.wire import Wire, problem_in, rest_of, statuses, wired

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONNECTIONS = 10
SEED = 7


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wire(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Wire]:
    """One that takes ten connections."""
    async with wired(tmp_path_factory.mktemp("few"), connections_max=CONNECTIONS) as each:
        yield each


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hasty(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Wire]:
    """One that waits a second for a client to take something."""
    path = tmp_path_factory.mktemp("hasty")
    async with wired(path, socket_bytes=16_384, request_timeout_us=1_000_000) as each:
        yield each


async def gone(wire: Wire) -> None:
    await eventually(
        lambda: not wire.connections and not wire.server.shared.tasks,
        "every connection is closed, and every request ended",
    )


async def test_one_connection_too_many_is_rejected_and_closed(wire: Wire) -> None:
    """Those that are there go on; when one of them ends, there is room."""

    ends = [await wire.connect() for _ in range(CONNECTIONS)]
    for reader, writer in ends:
        writer.write(get())
        await reader.readuntil(b"\r\n\r\n")
    for _ in range(3):
        received = await wire.tell()
        assert problem_in(received, "overloaded")["applied"] is None
        assert b"connection: close" in received
        assert b"retry-after: 1" in received
    stats = wire.app.application.connections
    assert (len(stats.open), stats.most, stats.ended["full"]) == (CONNECTIONS, CONNECTIONS, 3)
    reader, writer = ends.pop()
    writer.write(LAST)
    assert statuses(await rest_of(reader)) == [200]
    writer.close()
    assert statuses(await wire.tell(get() + LAST)) == [200, 200]
    for _, writer in ends:
        writer.close()
    await gone(wire)


@pytest.mark.parametrize("target", ["/v1/namespaces?x=%s", "/v1/%s", "/%s"])
async def test_a_url_that_is_too_long_is_refused(wire: Wire, target: str) -> None:
    for spare in (0, 1):
        long = target % ("a" * (URL_BYTES_MAX - len(target) + 2 + spare))
        assert len(long) == URL_BYTES_MAX + spare
        received = await wire.tell(request("GET", long, CLOSE))
        if spare:
            assert problem_in(received, "uri_too_long")["status"] == 414
        else:
            assert statuses(received)[0] in (400, 404)


def silent(wire: Wire) -> socket.socket:
    """A client that reads nothing, and for which the machine keeps little."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    client.connect(("127.0.0.1", wire.port))
    client.setblocking(False)
    return client


@pytest.mark.parametrize(
    "sent",
    [
        request("GET", "/openapi.json") * 20,
        request("GET", "/openapi.json", CLOSE),
        get("f", "x: " + "y" * 100) * 3_000,
    ],
    ids=["large", "large-and-last", "many"],
)
async def test_a_client_that_takes_nothing_is_cut_off(
    hasty: Wire, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Other clients are answered, and requests in the queue fail quietly."""

    ended = hasty.app.application.connections.ended
    before = ended["untaken"]

    with silent(hasty) as client:
        client.send(sent)

        await eventually(
            lambda: any(each.transport.get_write_buffer_size() for each in hasty.connections),
            "an answer waits to be taken",
        )
        assert statuses(await hasty.tell(get() + LAST)) == [200, 200]
        await gone(hasty)
    assert ended["untaken"] == before + 1
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


async def test_a_client_that_takes_its_time_is_not(hasty: Wire) -> None:
    """Slower than the limit in all, and always taking something."""

    with silent(hasty) as client:
        client.send(request("GET", "/openapi.json") * 40 + LAST)
        reader, writer = await asyncio.open_connection(sock=client, limit=4_096)
        received = bytearray()
        looks = asyncio.get_running_loop()
        end_s = looks.time() + 3 * 1.0
        while looks.time() < end_s:
            received += await reader.read(16_384)
            await asyncio.sleep(0.001)
        received += await rest_of(reader)
        writer.close()
    assert statuses(bytes(received)) == [200] * 41
    await gone(hasty)


async def test_any_junk_gets_a_response_or_a_closed_connection(
    wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests with bytes changed, left out, doubled and cut: nothing breaks, nothing stays."""
    made = random.Random(SEED)
    whole = [
        add(1),
        get(),
        get("a%2Fb?max_staleness=0s"),
        post("/v1/namespaces/default/batch/add", b'{"items": []}', JSON),
        request("PUT", "/v1/namespaces/x", "content-length: 2", body=b"{}"),
        request("POST", "/v1/tokens", "transfer-encoding: chunked", body=b"3\r\nabc\r\n0\r\n\r\n"),
        request("OPTIONS", "*"),
    ]
    special = b"\r\n\0 :%/?\xff\x80\x7f{}[]\"'0123456789-\t;,"

    def mutated() -> bytes:
        sent = bytearray(b"".join(made.choices(whole, k=made.randint(1, 3))))
        for _ in range(made.randint(1, 6)):
            at = made.randrange(len(sent) + 1)
            kind = made.randrange(4)
            if kind == 0:
                sent[at : at + 1] = bytes([made.choice(special)])
            elif kind == 1:
                del sent[at : at + made.randint(1, 20)]
            elif kind == 2:
                sent[at:at] = sent[at : at + made.randint(1, 60)] * made.randint(1, 3)
            else:
                sent[at:at] = made.randbytes(made.randint(1, 8))
        return bytes(sent)

    async def tell(sent: bytes) -> bytes:
        reader, writer = await wire.connect()
        try:
            writer.write(sent)
            writer.write_eof()
            return await rest_of(reader)
        except ConnectionError:
            return b""
        finally:
            writer.close()

    for _ in range(120):
        pieces = [mutated() for _ in range(CONNECTIONS - 2)]
        answers = await asyncio.gather(*map(tell, pieces))
        for sent, received in zip(pieces, answers, strict=True):
            # 501: another transfer coding than chunked.
            found = statuses(received)
            assert all(status < 500 or status == 501 for status in found), (
                SEED,
                sent,
                received,
            )
    await gone(wire)
    gc.collect()
    # By its type: asking a proxy for its class may find a dead object.
    kept = [each for each in gc.get_objects() if issubclass(type(each), HttpProtocol)]
    assert len(kept) < CONNECTIONS
    assert statuses(await wire.tell(get() + LAST)) == [200, 200]
    # Nor does junk fill the log: it is counted.
    assert not caplog.records
    assert wire.app.application.connections.ended["malformed"] > 100


def limits(soft: int, hard: int) -> Any:
    """The process may open so many files, and be allowed as many as *hard*."""
    now = [soft, hard]

    def change(_: int, given: tuple[int, int]) -> None:
        now[:] = given

    return patch.multiple(resource, getrlimit=lambda _: tuple(now), setrlimit=change)


async def test_the_limit_of_open_files_is_raised_if_allowed() -> None:
    with limits(1_024, 1_000_000):
        assert connections_max(Settings()) == CONNECTIONS_MAX
        assert CONNECTIONS_MAX < resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2 * CONNECTIONS_MAX
    with limits(256, resource.RLIM_INFINITY):
        assert connections_max(Settings()) == CONNECTIONS_MAX
    with limits(resource.RLIM_INFINITY, resource.RLIM_INFINITY):
        assert connections_max(Settings(connections_max=1_000_000)) == 1_000_000


async def test_fewer_files_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    """If the number of connections is set, the process does not start with less."""
    with limits(1_024, 4_096):
        fits = connections_max(Settings())
        assert 1_000 < fits < 4_096
        assert f"it accepts {fits} connections; raise the limit (ulimit -n)" in caplog.text
        assert connections_max(Settings(connections_max=fits)) == fits
        with pytest.raises(StartupError, match=f"give --connections-max {fits}"):
            connections_max(Settings(connections_max=fits + 1))
