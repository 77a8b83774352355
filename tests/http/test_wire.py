"""Odd bytes on the wire: answered truly or not at all, and no way around a check."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import pytest_asyncio

from tests.support.app import running
from tests.support.bytes_on_wire import CLOSE, JSON, LAST, get, one, post, request
from tests.support.needs import miss
from tests.support.rest import fresh
from tests.support.times import MINUTE
from tests.support.wire import Wire, problem_in, rest_of, statuses, wired

pytestmark = pytest.mark.asyncio(loop_scope="module")

ADD = f"{one()}/add"
KEY = "idempotency-key: order-1"
BODY = b'{"delta": 1}'
KEYED = post(ADD, BODY, JSON, KEY)
HEALTH = request("GET", "/healthz")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wire(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Wire]:
    """A service that waits a second for the rest of a request."""
    async with wired(tmp_path_factory.mktemp("wire"), request_timeout_us=1_000_000) as each:
        yield each


async def test_junk_behind_an_add_says_nothing_of_the_add(wire: Wire) -> None:
    """A refusal of the junk would be taken for the response to the add, which counts."""
    assert statuses(await wire.tell(KEYED + b"junk\r\n\r\n")) in ([], [200])


@pytest.mark.parametrize("junk", [b"junk\r\n\r\n", b"GET / HTTP/1.1\r\nbad header\r\n\r\n"])
@pytest.mark.parametrize(
    ("before", "status"), [(HEALTH, 200), (post(ADD, BODY, JSON), 400)], ids=["get", "add"]
)
async def test_junk_in_the_same_segment_loses_no_response(
    wire: Wire, before: bytes, status: int, junk: bytes
) -> None:
    """Whole requests before it are answered, and the connection closed."""
    for count in (1, 3):
        received = await wire.tell(before * count + junk)
        # Junk is refused by a response of its own only if none is missing before it.
        assert statuses(received)[:count] == [status] * count


@pytest.mark.parametrize("value", ["gzip, chunked", "gzip\r\ntransfer-encoding: chunked"])
async def test_no_transfer_coding_but_chunked(wire: Wire, value: str) -> None:
    sent = request("POST", ADD, JSON, KEY, f"transfer-encoding: {value}", body=b"0\r\n\r\n")
    assert problem_in(await wire.tell(sent), "transfer_coding_unsupported")["status"] == 501


async def test_a_client_is_not_asked_for_a_body_that_is_too_large(wire: Wire) -> None:
    """And its next bytes are not taken for that body."""
    expect = ("expect: 100-continue", "content-length: 9999999")
    problem_in(await wire.tell(request("POST", ADD, JSON, KEY, *expect)), "body_too_large")
    received = await wire.tell(post(ADD, BODY, JSON, KEY, expect[0], CLOSE))
    assert statuses(received) in ([100, 200], [200])


@pytest.mark.parametrize("path", ["/metrics/", "/docs/", "/healthz/", "/openapi.json/"])
async def test_the_host_header_is_never_followed(wire: Wire, path: str) -> None:
    received = await wire.tell(
        request("GET", path, CLOSE).replace(b"localhost", b"localhost:1"),
    )
    assert statuses(received) == [404]
    assert b"location:" not in received.lower()


async def test_an_encoded_prefix_leads_past_no_check(wire: Wire) -> None:
    path = "/%761/namespaces/default/counters/a%0Ab/add"
    problem_in(await wire.tell(post(path, BODY, JSON, KEY, CLOSE)), "invalid_parameter")


@pytest.mark.parametrize("length", ["content-length", "transfer-encoding"])
async def test_an_upgrade_hides_no_request_in_its_body(wire: Wire, length: str) -> None:
    """The header is ignored, and the body is the body, wherever the bytes are cut."""
    hidden = post(f"{one('hidden')}/add", BODY, JSON, KEY)
    upgrade = ("connection: upgrade", "upgrade: h2c")
    if length == "content-length":
        sent = post(ADD, hidden, JSON, *upgrade)
    else:
        chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(hidden), hidden)
        sent = request("POST", ADD, JSON, *upgrade, "transfer-encoding: chunked", body=chunks)
    sent += get("hidden", CLOSE)
    for cut in range(1, len(sent), 7):
        received = await wire.tell(sent[:cut], sent[cut:])
        assert statuses(received) == [400, 200]
        assert b"invalid_body" in received
        assert b'"count":0' in received


BEGUN = ("POST", ADD, JSON)
UNFINISHED = {
    "nothing": (),
    "no body": (request(*BEGUN, "content-length: 200"),),
    "half a body": (request(*BEGUN, "content-length: 200"), b'{"delta": 1,'),
    "half a body after an upgrade": (
        request(*BEGUN, "connection: upgrade", "upgrade: h2c", "content-length: 200", body=b"{"),
    ),
    "half the chunks": (request(*BEGUN, "transfer-encoding: chunked"), b'5\r\n{"del\r\n'),
    "half a chunk": (request(*BEGUN, "transfer-encoding: chunked"), b'ffff\r\n{"del'),
    "half a line": (b"POST /v1/names",),
    "half a second head": (HEALTH + request(*BEGUN)[:-2],),
    "half a second body": (HEALTH + request(*BEGUN, "content-length: 9", body=b"{"),),
}


async def test_requests_that_never_end_time_out_and_delay_no_other(wire: Wire) -> None:
    """All are sent at once, because each takes a second."""
    before = await wire.app.rest.count("c")
    waiting = asyncio.gather(*(wire.tell(*each) for each in UNFINISHED.values()))
    assert statuses(await wire.tell(get() + LAST)) == [200, 200]
    for what, received in zip(UNFINISHED, await waiting, strict=True):
        if what == "nothing" and not received:
            continue
        last = received[received.rindex(b"HTTP/1.1 ") :]
        assert b"\r\nconnection: close\r\n" in last, what
        assert problem_in(last, "request_timeout")["retry"] == "same_token"
    assert await wire.app.rest.count("c") == before


async def test_a_dripping_body_times_out_however_steadily_it_drips(wire: Wire) -> None:
    reader, writer = await wire.connect()
    writer.write(request("POST", ADD, JSON, "content-length: 1000000"))
    received = asyncio.create_task(rest_of(reader))
    async with asyncio.timeout(30):
        while not received.done():
            writer.write(b" ")
            await asyncio.wait((received,), timeout=0.02)
    writer.close()
    assert statuses(await received) in ([], [408])


@pytest.mark.parametrize(
    "sent",
    [
        b"not http at all\r\n\r\n",
        request("POST", ADD, "content-length: -5"),
        request("POST", ADD, "content-length: many"),
        request("POST", ADD, "content-length: 5", "content-length: 6"),
        request("POST", "/\x00"),
        request("GET", one("\xff")),
        request("GET", "/v1/namespaces/default/counters?prefix=\xff"),
        request(*BEGUN, "transfer-encoding: chunked", body=b"zz\r\n"),
    ],
    ids=["words", "negative", "no-number", "two-lengths", "nul", "path", "query", "no-chunk"],
)
async def test_non_http_input_gets_a_problem_and_is_closed(wire: Wire, sent: bytes) -> None:
    problem = problem_in(await wire.tell(sent), "bad_request")
    assert (problem["status"], problem["applied"], problem["retry"]) == (400, None, "never")


@pytest.mark.usefixtures("child_processes")
async def test_a_client_of_the_jdk_is_served_with_its_defaults(wire: Wire) -> None:
    """It asks for HTTP/2 in its first request, whatever that is."""
    if shutil.which("java") is None:
        miss("java is missing")
    source = Path(__file__).with_name("JdkClient.java")
    jdk = await asyncio.create_subprocess_exec(
        *("java", str(source), f"http://127.0.0.1:{wire.port}{one('jdk')}"),
        stdout=asyncio.subprocess.PIPE,
    )
    printed, _ = await jdk.communicate()
    assert printed.decode().split("\n") == [
        "POST HTTP_1_1 200 replayed=false",
        "POST HTTP_1_1 200 replayed=true",
        "GET HTTP_1_1 200 count=2",
        "DELETE HTTP_1_1 200 replayed=false",
        "",
    ]


@pytest.mark.parametrize(
    ("target", "fix"),
    [
        ("/v1/namespaces/default/counters/é", "é is %C3%A9"),
        ("/v1/namespaces/default/counters?prefix=é", "percent-encode"),
        ("/v1/namespaces/default/counters/c/add#é", "percent-encode"),
        ("é", "percent-encode"),
        ("http://é/v1/namespaces", "percent-encode"),
        ("/v1/namespaces/default/counters/a b", "a space, percent-encode it as %20"),
    ],
)
async def test_an_invalid_url_is_refused_with_the_right_encoding(
    wire: Wire, target: str, fix: str
) -> None:
    for method in ("GET", "POST"):
        line = f"{method} {target} HTTP/1.1\r\nhost: localhost\r\n\r\n"
        assert fix in problem_in(await wire.tell(line.encode()), "bad_request")["detail"]


async def test_a_pause_between_the_deadline_and_the_age_check_acknowledges_nothing(
    tmp_path: Path,
) -> None:
    """Paused there for longer than a window takes to close, the event would be in no count."""
    async with running("memory", tmp_path) as app:
        mark, sleepy, falls_asleep = app.store.separate_writes.mark, Mock(wraps=app.clock), []

        async def marks(*arguments: Any) -> Any:
            left = await mark(*arguments)
            falls_asleep.append(True)
            return left

        def slept_after(read: Callable[[], int]) -> int:
            """The reading before a minute of sleep, if it is the first one after the mark."""
            instant_us = read()
            if falls_asleep:
                falls_asleep.clear()
                app.clock.advance(MINUTE)
            return instant_us

        for name in ("now_us", "wall_us", "boottime_us"):
            setattr(sleepy, name, partial(slept_after, getattr(app.clock, name)))
        token = fresh(app.clock.now_us())
        with (
            patch.object(app.application.service._writer, "_clock", sleepy),
            patch.object(app.store.separate_writes, "mark", marks),
        ):
            answer = await app.rest.add("c", 1, token)
        # It woke too late to write anything, or to know whether the namespace was deleted.
        assert (answer.status_code, answer.json()["applied"]) == (503, None)
        # The window is closed: the token is void.
        again = await app.rest.add("c", 1, token)
        assert (again.status_code, again.json()["applied"]) == (410, False)
        assert await app.rest.count("c") == 0


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
async def test_a_client_of_http_1_0_gets_no_chunks(
    tmp_path: Path, way: dict[str, Any], method: bytes
) -> None:
    """It would take their lengths for a part of the body, which ends with the connection."""
    async with wired(tmp_path, storage="memory", **way) as wire:
        wire.app.application.live.stream_s = 0
        path = b"/v1/namespaces/default/counters/c/live"
        ask = b"%s %s HTTP/1.%d\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        old, new = [await wire.tell(ask % (method, path, minor)) for minor in (0, 1)]
        head, _, body = old.partition(b"\r\n\r\n")
        assert b"connection: close" in head
        assert b"transfer-encoding" not in head
        assert body[:12] == (b"event: count" if method == b"GET" else b"")
        assert body.endswith(b"\n\n" if method == b"GET" else b"")
        assert (b"transfer-encoding: chunked" in new) is (method == b"GET")
        # A body with a length keeps it.
        length = await wire.tell(ask % (method, b"/healthz", 0))
        assert b"content-length: 19\r\n" in length
        assert length.endswith(b'{"status":"alive"}\n' if method == b"GET" else b"\r\n\r\n")
