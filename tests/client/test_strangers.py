"""Who answers is not always the service: redirects, pages, halves of answers; and proxies."""

import gzip
import json
from dataclasses import replace

import pytest

from counter_client import (
    AsyncCounterClient,
    CounterClient,
    Options,
    Token,
    UnexpectedAnswerError,
    UnknownOutcomeError,
    UnreachableError,
)
from counter_client.addresses import by_proxy
from counter_client.calls import Calls
from counter_client.failures import error_of_answer
from counter_client.transport import LiveStream
from tests.client.callers import both_fail
from tests.client.script import Script, added_body
from tests.client.stranger import http, stranger

#: One attempt, however busy the machine is.
OPTIONS = Options(trust_env=False, retries_at_once=0, retries_per_s=0)
LIVE = Calls("default").live("c")
TOKEN = Token(bytes(16), 1_769_847_330_000_250)
ADDED = json.dumps(added_body("c", 1, {"generation_time": "2026-01-31T08:15:30.000250Z"})).encode()


def test_a_redirect_is_not_followed_and_says_where_it_leads() -> None:
    """Who is there may be somebody else; and a POST that is redirected may become a GET."""
    with (
        stranger(http("301 Moved", b"", "Location: https://elsewhere/")) as other,
        CounterClient(other.url, options=OPTIONS) as client,
        pytest.raises(UnknownOutcomeError, match="redirects to 'https://elsewhere/'") as caught,
    ):
        client.add("c")
    assert isinstance(caught.value.__cause__, UnexpectedAnswerError)
    assert caught.value.__cause__.retry == "never"
    assert len(other.asked) == 1


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (http("200 OK", b"<html>welcome</html>"), "is not from a counter service"),
        (http("200 OK", b"[" * 100_000), "is not from a counter service"),
        (http("200 OK", b"[" * 50_000), "is not from a counter service"),
        (http("200 OK", ADDED)[:-9], "without sending complete message"),
        (b"SSH-2.0-OpenSSH_9.9\r\n", "does not answer"),
        (b"", "without sending a response"),
    ],
    ids=["page", "deep-and-long", "deep", "half", "other-protocol", "nothing"],
)
async def test_a_malformed_response_is_an_error_with_the_token(answer: bytes, said: str) -> None:
    """Regression: a response of many brackets was a RecursionError."""
    with stranger(answer) as other:
        for each in await both_fail(
            other.url, OPTIONS, lambda client: client.add("c", 2), UnknownOutcomeError, said
        ):
            assert isinstance(each, UnknownOutcomeError)
            assert each.unfinished.items == (("c", 2),)


def test_a_compressed_response_is_read() -> None:
    packed = http("200 OK", gzip.compress(ADDED), "Content-Encoding: gzip")
    with stranger(packed) as other, CounterClient(other.url, options=OPTIONS) as client:
        assert client.add("c", token=TOKEN).delta == 1


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
EARLY_HINT = b"HTTP/1.1 103 Early Hints\r\n\r\n"
#: 64 KiB of spaces, which are no end of a JSON document.
SPACES = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
#: 64 MiB of them, packed.
BOMB = http("200 OK", gzip.compress(b" " * 2**26), "Content-Encoding: gzip")


@pytest.mark.parametrize("pieces", [(CHUNKED, SPACES), (BOMB,)], ids=["endless", "bomb"])
@pytest.mark.parametrize(("many", "bound"), [(False, "65,536"), (True, "8,388,608")])
async def test_the_body_that_is_read_is_bounded(
    pieces: tuple[bytes, ...], many: bool, bound: str
) -> None:
    """Regression: all that came within the time of an attempt was read into memory: gigabytes."""
    said = f"more than {bound} bytes, the most that a client reads"
    with stranger(*pieces) as other:
        errors = await both_fail(
            other.url,
            OPTIONS,
            lambda client: client.get_many(["c"]) if many else client.get("c"),
            UnexpectedAnswerError,
            said,
        )
    assert {each.retry for each in errors} == {"same_token"}


def test_an_add_whose_response_is_too_large_has_an_unknown_outcome() -> None:
    with (
        stranger(CHUNKED, SPACES) as other,
        CounterClient(other.url, options=OPTIONS) as client,
        pytest.raises(UnknownOutcomeError, match="65,536 bytes") as caught,
    ):
        client.add("c", 2)
    assert caught.value.sent


async def test_a_long_refusal_is_read_by_its_beginning() -> None:
    """The status suffices, however long the page of a proxy is."""
    long = CHUNKED.replace(b"200 OK", b"404 Not Found")
    with stranger(long, SPACES) as other:
        with (
            CounterClient(other.url, options=OPTIONS) as client,
            pytest.raises(UnexpectedAnswerError, match="status 404") as caught,
        ):
            client.get("c")
        assert caught.value.retry == "never"
        async with AsyncCounterClient(other.url, options=OPTIONS) as patient:
            with pytest.raises(UnexpectedAnswerError, match="status 404"):
                await anext(patient.live("c"))


async def test_a_line_of_a_stream_is_bounded() -> None:
    """Regression: a line without an end was kept."""
    with stranger(CHUNKED, SPACES) as other:
        with (
            CounterClient(other.url, options=OPTIONS) as client,
            pytest.raises(UnexpectedAnswerError, match="65,536 bytes"),
        ):
            next(client._transport.lines(LIVE.request, 0))
        async with AsyncCounterClient(other.url, options=OPTIONS) as patient:
            with pytest.raises(UnexpectedAnswerError, match="65,536 bytes"):
                await anext(patient._transport.lines(LIVE.request, 0))


def test_an_event_of_a_stream_is_bounded() -> None:
    """Regression: an event of lines without an end was kept."""
    stream = LiveStream(LIVE, Script([]).policy())
    assert stream.line("data: " + "x" * 60_000) is None
    with pytest.raises(UnexpectedAnswerError, match="65,536 bytes"):
        stream.line("data: " + "x" * 60_000)


@pytest.mark.parametrize("data", ["[" * 30_000, '{"count":1e999}', "{}"])
def test_an_event_that_is_no_count_says_so(data: str) -> None:
    """Regression: an event of many brackets was a RecursionError."""
    stream = LiveStream(LIVE, Script([]).policy())
    stream.line("event: count")
    stream.line(f"data: {data}")
    with pytest.raises(UnexpectedAnswerError, match="is not from a counter service"):
        stream.line("")


def test_an_unknown_compression_is_an_error() -> None:
    with (
        stranger(http("200 OK", ADDED, "Content-Encoding: br")) as other,
        CounterClient(other.url, options=OPTIONS) as client,
        pytest.raises(UnexpectedAnswerError, match="content encoding 'br'"),
    ):
        client.get("c")


@pytest.mark.parametrize(
    "pieces",
    [(CHUNKED, b"1\r\n \r\n" * 1_000), (EARLY_HINT, EARLY_HINT * 1_000)],
    ids=["body", "head"],
)
def test_an_endless_response_ends_at_the_deadline_of_the_attempt(
    pieces: tuple[bytes, bytes],
) -> None:
    """Regression: each part of it came in time, so the call went on for as long as they came."""
    with (
        stranger(*pieces) as other,
        CounterClient(other.url, options=replace(OPTIONS, attempt_timeout_s=0.3)) as client,
        pytest.raises(UnreachableError, match=r"ReadTimeout|attempt"),
    ):
        client.get("c")


def test_a_write_says_how_long_its_sender_waits_for_its_turn() -> None:
    """The service rejects writes that would be late; it never rejects reads."""
    with stranger(http("200 OK", ADDED)) as other, CounterClient(other.url, options=OPTIONS) as it:
        it.add("c", token=TOKEN)
        it.clear("c", token=TOKEN)
        with pytest.raises(UnexpectedAnswerError):
            it.get("c")
    assert other.header("request-timeout")[:3] == ["2500ms", "2500ms", None]


@pytest.mark.parametrize(
    ("said", "waits_us"),
    [
        ("2", 2_000_000),
        ("Sat, 21 Nov 2026 05:14:36 GMT", 0),
        ("soon", None),
        ("-1", None),
        ("nan", None),
        ("Sat, 21 Nov 99999999999999999999 05:14:36 GMT", None),
        ("Sat, 21 Nov 2026 05:14:36 -99999999999999", None),
    ],
)
def test_retry_after_is_read_as_proxies_write_it(said: str, waits_us: int | None) -> None:
    """Regression: a year or a zone past any number ended the call with an OverflowError."""
    assert error_of_answer(503, b"<html>", said).retry_after_us == waits_us


def test_a_huge_retry_after_is_bounded() -> None:
    """Regression: it was an OverflowError."""
    text = f'{{"code":"overloaded","retry":"same_token","retry_after":1{"0" * 400}}}'
    year_us = 366 * 86_400 * 1_000_000
    assert error_of_answer(503, text.encode(), None).retry_after_us == year_us


@pytest.mark.parametrize("value", ["NaN", "-5", '"soon"', "null", "{}"])
def test_a_problem_with_an_invalid_retry_after_is_a_problem(value: str) -> None:
    """Regression: NaN ended the call with a ValueError."""
    text = f'{{"code":"overloaded","retry":"same_token","retry_after":{value}}}'
    error = error_of_answer(503, text.encode(), None)
    assert not error.retry_after_us
    assert "overloaded" in str(error)


def test_loopback_is_reached_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """HTTP_PROXY cannot reach this machine's loopback; other hosts are reached through it."""
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    proxied = replace(OPTIONS, trust_env=True)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with (
        stranger(http("200 OK", ADDED)) as here,
        CounterClient(here.url, options=proxied) as client,
    ):
        client.add("c", token=TOKEN)
    with (
        CounterClient("http://counter.invalid", options=proxied) as client,
        pytest.raises(UnreachableError, match="through the proxy from the environment"),
    ):
        client.get("c")
    assert by_proxy("http://[::1]:80") == by_proxy("https://localhost") == ""
