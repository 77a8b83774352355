"""Requests of a web page in a browser on this machine to a service without keys, as raw bytes."""

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from counter.api_keys import Scope
from tests.support.bytes_on_wire import CLOSE, JSON, add_body, get, one, request
from tests.support.keys import hand_out
from tests.support.wire import Wire, statuses, wired

LISTED = "https://app.example"
FOREIGN = ["https://evil.example", "null", "http://localhost:1", "http://", "x"]
LOCAL_HOSTS = [
    "localhost",
    "LocalHost",
    "localhost.",
    "localhost:80",
    "localhost.:8080",
    "127.0.0.1:8080",
    "127.8.9.1",
    "[::1]",
    "[::1]:8080",
    "[0:0:0:0:0:0:0:1]",
    "[::ffff:127.0.0.1]:1",
    "counter.example:8080",
    "COUNTER.example.",
]
FOREIGN_HOSTS = [
    "evil.example",
    "evil.example:8080",
    "localhost.evil.example",
    "evil.localhost",
    "127.0.0.1.evil.example",
    "localhost:1:2",
    "0.0.0.0",
    "10.0.0.1",
    "[::]",
    "[::2]:80",
    "[evil]",
    "",
]
ONE = one()


@pytest.fixture
async def wire(way: Any, tmp_path: Path) -> AsyncIterator[Wire]:
    async with wired(tmp_path, hosts=("counter.example",), cors_origins=(LISTED,), **way) as each:
        yield each


def sent(
    method: str, target: str, *headers: str, host: str = "localhost", body: bytes = b""
) -> bytes:
    """A request under *host*, and the last of its connection."""
    length = [f"content-length: {len(body)}"] if method != "GET" else []
    made = request(method, target, *headers, *length, CLOSE, body=body)
    return made.replace(b"host: localhost", f"host: {host}".encode(), 1)


def add_of(host: str) -> bytes:
    return sent("POST", f"{ONE}/add", JSON, host=host, body=add_body(1))


async def refused_as(wire: Wire, request: bytes) -> tuple[int, str]:
    """The status and the problem's code, if it is one."""
    answer = await wire.tell(request)
    found = re.search(rb'"code": ?"([a-z_]+)"', answer)
    return int(answer.split()[1]), found[1].decode() if found else ""


@pytest.mark.parametrize("origin", FOREIGN)
@pytest.mark.parametrize("path", [f"{ONE}/recount", "/v1/tokens", f"{ONE}/clear"])
async def test_a_foreign_page_cannot_write(wire: Wire, path: str, origin: str) -> None:
    """An empty body needs no content type, so a browser sends it without asking first."""
    shown = (f"origin: {origin}", "sec-fetch-site: cross-site")
    for headers in (shown, shown[:1], shown[1:]):
        assert await refused_as(wire, sent("POST", path, *headers)) == (403, "origin_refused")


@pytest.mark.parametrize("header", ["origin: https://evil.example", "sec-fetch-site: cross-site"])
async def test_a_foreign_page_cannot_add(wire: Wire, header: str) -> None:
    asked = sent("POST", f"{ONE}/add", JSON, header, body=add_body(1))
    assert await refused_as(wire, asked) == (403, "origin_refused")
    assert b'"count":0' in await wire.tell(sent("GET", ONE))


async def test_own_and_listed_pages_and_other_programs_may_write(wire: Wire) -> None:
    for headers in (
        (),
        ("origin: http://localhost", "sec-fetch-site: same-origin"),
        (f"origin: {LISTED}", "sec-fetch-site: cross-site"),
        ("sec-fetch-site: none",),
    ):
        assert (await refused_as(wire, sent("POST", "/v1/tokens", *headers)))[0] == 200
    asked = sent("POST", "/v1/tokens", "origin: http://[::1]:80", host="[::1]:80")
    assert (await refused_as(wire, asked))[0] == 200


async def test_a_foreign_page_can_send_reads(wire: Wire) -> None:
    asked = sent("GET", ONE, "origin: https://evil.example", "sec-fetch-site: cross-site")
    assert (await refused_as(wire, asked))[0] == 200


@pytest.mark.parametrize("host", LOCAL_HOSTS)
async def test_names_of_this_machine_and_configured_ones_are_answered(
    wire: Wire, host: str
) -> None:
    for each in (sent("GET", ONE, host=host), add_of(host)):
        assert (await refused_as(wire, each))[0] == 200


@pytest.mark.parametrize("host", FOREIGN_HOSTS)
async def test_foreign_names_are_not_answered(wire: Wire, host: str) -> None:
    """The name of a page that resolves to this machine: to its browser it is the same origin."""
    for each in (
        add_of(host),
        sent("GET", ONE, host=host),
        sent("GET", "/healthz", host=host),
        sent("GET", "/metrics", host=host),
        sent("GET", "/console", host=host),
        sent("POST", "/v1/tokens", f"origin: http://{host}", host=host),
    ):
        assert await refused_as(wire, each) == (403, "origin_refused")


@pytest.mark.parametrize("host", ["127.0.0.1@evil.example", "localhost:80@evil.example"])
async def test_a_host_with_a_user_is_malformed(wire: Wire, host: str) -> None:
    for each in (add_of(host), sent("GET", ONE, host=host), sent("GET", "/console", host=host)):
        assert await refused_as(wire, each) == (400, "bad_request")
    assert b'"count":0' in await wire.tell(sent("GET", ONE))


async def test_a_connection_that_changes_its_host_is_looked_at_again(wire: Wire) -> None:
    answers = await wire.tell(get(), get(), sent("GET", ONE, host="evil.example"))
    assert statuses(answers) == [200, 200, 403]
    for hosts in (("localhost", "evil.example"), ("evil.example", "localhost")):
        two = sent("GET", ONE, f"host: {hosts[1]}", host=hosts[0])
        assert (await refused_as(wire, two))[0] in (400, 403)


async def test_a_service_with_keys_answers_under_any_name(wire: Wire) -> None:
    header = await hand_out(wire.app, Scope.ADMIN)
    key = f"authorization: {header['Authorization']}"
    asked = sent("POST", "/v1/tokens", key, "origin: https://evil.example", host="evil.example")
    assert (await refused_as(wire, asked))[0] == 200
    assert (await refused_as(wire, sent("GET", ONE, key, host="evil.example")))[0] == 200


async def test_insecure_lifts_the_rule_about_names_alone(tmp_path: Path, way: Any) -> None:
    async with wired(tmp_path, insecure=True, **way) as wire:
        assert (await refused_as(wire, sent("GET", ONE, host="any.example")))[0] == 200
        asked = sent("POST", "/v1/tokens", "origin: https://evil.example", host="any.example")
        assert await refused_as(wire, asked) == (403, "origin_refused")
