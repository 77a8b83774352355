"""nginx and HAProxy, as deploy/proxy configures them, before two processes over PostgreSQL."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from counter.limits import ADD_STREAM_SILENCE_US, BODY_BYTES_MAX
from counter.quantities import parse_duration
from scripts.postgresql_server import PostgresqlServer
from scripts.service_process import free_ports
from tests.deploy.proxies import FILES, Proxy, proxied, shipped
from tests.support.add_stream import AddStream, line
from tests.support.documents import page
from tests.support.needs import need
from tests.support.problems import assert_problem
from tests.support.relay import Relay
from tests.support.rest import new_token
from tests.support.server import Server
from tests.support.waiting import eventually

NAMES = ("a/b", "a%2Fb", "a//b", "..", "é b", "a?b#c", "a+b;c")
#: As many adds as reach both processes, whichever way the proxy chooses.
MANY = 8
#: Long: a busy machine is slow, and a test sees a process that is leaving before it kills it.
SETTINGS = {
    "keyspace": "proxied",
    "write_timeout": "5s",
    "accept_limit": "30s",
    "rollup_window": "1s",
    "shutdown_delay": "5m",
}


@pytest.fixture(scope="module", params=FILES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pair(
    postgresql: PostgresqlServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Server]]:
    """Two processes over the same tables, which keep their ports."""
    place = tmp_path_factory.mktemp("pair")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("COUNTER_TLS_IN_FRONT", "true")
        made = need("tests.support.postgresql").settings_of_new
        flags = asyncio.run(made(postgresql, SETTINGS, patched))
        both = [
            Server(place / "data", place / str(port), {"port": str(port), **flags})
            for port in free_ports(2)
        ]
        try:
            for each in both:
                asyncio.run(each.start())
            yield both[0], both[1]
        finally:
            for each in both:
                each.clean_up()


@pytest.fixture
async def proxy(name: str, pair: tuple[Server, Server], tmp_path: Path) -> AsyncIterator[Proxy]:
    async with proxied(name, tmp_path / name, [each.url for each in pair]) as each:
        yield each


async def opened(proxy: Proxy) -> AddStream:
    """A connection to the proxy for one stream of adds."""
    reader, writer = await asyncio.open_connection("localhost", proxy.port, ssl=proxy.tls)
    return AddStream(reader, writer)


@pytest.mark.parametrize("counter", NAMES)
async def test_a_name_is_kept(proxy: Proxy, counter: str) -> None:
    async with proxy.client() as rest:
        added = await rest.add(counter, 3, new_token())
        assert (added.status_code, added.json()["counter"]) == (200, counter)
        got = await rest.get(counter, "0s")
        assert got.json()["counter"] == counter


async def test_each_line_of_a_stream_is_answered_as_it_comes(proxy: Proxy) -> None:
    """Also for longer than a batch may be, and before the stream ends."""
    stream = await opened(proxy)
    await stream.begin()
    assert await stream.status() == 200
    for number in range(5):
        now_us = time.time_ns() // 1_000
        stream.send(line(number, counter="streamed", time_us=now_us))
        await stream.is_added()
    stream.end()
    assert await stream.answers() == []
    stream.writer.close()


async def test_a_live_count_arrives_event_by_event(proxy: Proxy) -> None:
    async with (
        proxy.client() as rest,
        rest.http.stream("GET", rest.path("watched", "live")) as seen,
    ):
        assert seen.headers["content-type"].startswith("text/event-stream")
        counts = _counts(seen)
        before = await anext(counts)
        assert (await rest.add("watched", 2, new_token())).status_code == 200
        async with asyncio.timeout(100):
            while (count := await anext(counts)) == before:
                pass
        assert count == before + 2


async def _counts(seen: httpx.Response) -> AsyncIterator[int]:
    async for text in seen.aiter_lines():
        if text.startswith("data: "):
            yield json.loads(text.removeprefix("data: "))["count"]


async def test_an_etag_that_compression_made_weak_still_guards_a_change(
    proxy: Proxy, name: str, pair: tuple[Server, Server]
) -> None:
    async with proxy.client(f"guarded-{name}") as rest:
        assert (await rest.create()).status_code == 201
        got = await rest.http.get(rest.path())
        assert (got.headers["content-encoding"], got.headers["etag"]) == ("gzip", 'W/"v1"')
        given = {"if-match": got.headers["etag"]}
        changed = await rest.http.put(rest.path(), json={"cache_ttl": "3s"}, headers=given)
        assert (changed.status_code, changed.json()["cache_ttl"]) == (200, "3s")
        again = await rest.http.put(rest.path(), json={"cache_ttl": "4s"}, headers=given)
        assert_problem(again, "precondition_failed")
        known = {"if-none-match": changed.headers["etag"]}
        assert (await rest.http.get(rest.path(), headers=known)).status_code == 304
    async with pair[0].client(f"guarded-{name}") as rest:
        weak = {"if-match": 'W/"v2"'}
        refused = await rest.http.put(rest.path(), json={"cache_ttl": "4s"}, headers=weak)
        assert "send it without W/" in assert_problem(refused, "precondition_failed")["detail"]


async def test_a_body_past_the_limit_gets_the_services_problem(proxy: Proxy) -> None:
    async with proxy.client() as rest:
        body = b" " * (BODY_BYTES_MAX + 300_000)
        refused = await rest.raw(rest.path("c", "add"), body)
        detail = assert_problem(refused, "body_too_large")["detail"]
        assert str(BODY_BYTES_MAX) in detail

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(13):
                yield b" " * 100_000

        kind = {"content-type": "application/json"}
        refused = await rest.http.post(rest.path("c", "add"), content=pieces(), headers=kind)
        assert_problem(refused, "body_too_large")


async def test_a_header_that_was_sent_twice_is_refused(proxy: Proxy) -> None:
    async with proxy.client() as rest:
        twice = [("idempotency-key", "order-1"), ("idempotency-key", "order-1")]
        refused = await rest.http.post(rest.path("c", "add"), json={"delta": 1}, headers=twice)
        assert_problem(refused, "invalid_parameter")


async def test_an_add_that_the_proxy_repeats_counts_once(
    name: str, pair: tuple[Server, Server], tmp_path: Path
) -> None:
    """The first process counts it, and its answer is lost; the other one gets it again."""
    relay, counter = Relay.before(pair[0].url), f"repeated-{name}"
    async with relay.listening(), pair[0].client() as direct:
        relay.mute = True
        urls = [relay.url, pair[1].url]
        async with proxied(name, tmp_path / name, urls) as proxy, proxy.client() as rest:
            sent = [asyncio.create_task(rest.add(counter, 1, new_token())) for _ in range(MANY)]

            async def counted() -> bool:
                return await direct.count(counter) == MANY

            await eventually(counted, "each add is counted")
            relay.go_away()
            answers = await asyncio.gather(*sent)
            assert [each.status_code for each in answers] == [200] * MANY
            assert any(each.json()["replayed"] for each in answers)
            assert await rest.count(counter) == MANY


async def test_requests_go_to_the_process_that_is_ready(
    proxy: Proxy, name: str, pair: tuple[Server, Server]
) -> None:
    """HAProxy asks /readyz, and leaves out a process that is leaving; nginx finds it closed."""
    first, second = pair

    async def is_down() -> bool:
        return (await proxy.statuses())["api-1"] == "DOWN"

    async def reached() -> set[str]:
        """The processes that answered, by the first part of their ids of requests."""
        async with proxy.client() as rest:
            answers = [await rest.add("ready", 1, new_token()) for _ in range(MANY)]
        assert [each.text for each in answers if each.status_code != 200] == []
        return {each.headers["x-request-id"][:12] for each in answers}

    assert len(await reached()) == 2
    first.terminate()
    if name == "haproxy":
        await eventually(is_down, "HAProxy leaves out the process that is leaving")
        assert len(await reached()) == 1
    first.kill()
    assert len(await reached()) == 1
    await first.start()

    async def both() -> bool:
        return len(await reached()) == 2

    await eventually(both, "the process gets requests again")
    assert second.process.poll() is None


@pytest.mark.parametrize("name", FILES)
def test_the_page_has_the_file(name: str) -> None:
    assert shipped(name) in page("how-to/run-behind-a-proxy.md")


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("nginx", ("client_body_timeout", "proxy_read_timeout", "proxy_send_timeout")),
        ("haproxy", ("timeout client", "set-timeout server")),
    ],
)
def test_the_time_outs_of_a_stream_are_longer_than_its_silence(
    name: str, limits: Sequence[str]
) -> None:
    for limit in limits:
        [given] = re.findall(rf"\b{limit} (\d+s)", shipped(name))
        assert parse_duration(given) > ADD_STREAM_SILENCE_US
