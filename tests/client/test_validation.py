"""Invalid arguments are refused before anything is sent, and named."""

from collections.abc import Callable
from datetime import date
from typing import Any
from uuid import UUID

import pytest

from counter_client import AsyncCounterClient, Attempt, ClosedError, CounterClient, Options, Token
from counter_client.buffer import Limits
from counter_client.errors import InvalidParameterError

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def client() -> CounterClient:
    return CounterClient(NOWHERE, options=Options(trust_env=False))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda client: client.add("c", True), "delta is True"),
        (lambda client: client.add("c", 1.0), r"delta is 1\.0"),
        (lambda client: client.add("c", 2**63), "delta is 9223372036854775808"),
        (lambda client: client.add(b"c", 1), "name is text, and this is b'c'"),
        (lambda client: client.get(None), "name is text, and this is None"),
        (lambda client: client.add("", 1), "has 0"),
        (lambda client: client.add("x" * 257, 1), "has 257"),
        (lambda client: client.add("a\n", 1), r"U\+000A"),
        (lambda client: client.add("a\ud800", 1), r"U\+D800"),
        (lambda client: client.add("c", token="order-1"), r"Token\.from_key"),
        (lambda client: client.add("c", token=UUID(int=7)), r"the token is UUID"),
        (lambda client: client.batch([("c", 1, 2)]), r"an item is \('c', 1, 2\)"),
        (lambda client: client.batch(7), "the items are 7"),
        (lambda client: client.atomic([]), "0 items; 1 to 100"),
        (lambda client: client.atomic([("c", 1)] * 101), "101 items; 1 to 100"),
        (lambda client: client.get_many("abc"), "give a list of names"),
        (lambda client: list(client.events("c", start="2026-01-31")), "not a datetime"),
        (
            lambda client: list(client.history("c", end=date(2026, 1, 31))),
            r"date\(2026, 1, 31\) is",
        ),
        (lambda client: list(client.history("c", step="\udcff")), "lone surrogate"),
        (lambda client: client.resolve(Token.new()), "the operation and the counter"),
        (lambda client: client.resolve("x"), "Unfinished"),
    ],
)
def test_a_call_names_the_invalid_argument(
    client: CounterClient, call: Callable[[Any], object], said: str
) -> None:
    """Regression: some were counted as something else, some ended in an AttributeError."""
    with client, pytest.raises(InvalidParameterError, match=said):
        call(client)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("127.0.0.1:8080", "must begin with http://"),
        ("ftp://x", "must begin with http://"),
        ("", "must begin with http://"),
        ("http://", "names no host"),
        ("http://127.0.0.1:99999", "port 99999"),
        (f"{NOWHERE}?a=b", "query"),
        (None, "give text"),
        ([], "no base URL"),
        ([NOWHERE, 7], "give text"),
    ],
)
@pytest.mark.parametrize("kind", [CounterClient, AsyncCounterClient])
def test_an_invalid_base_url_is_named(kind: type, url: Any, said: str) -> None:
    with pytest.raises(InvalidParameterError, match=said):
        kind(url)


def test_a_password_in_a_base_url_is_rejected_and_not_shown() -> None:
    with pytest.raises(InvalidParameterError, match="user or a password") as caught:
        CounterClient("https://me:hush@host")
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("namespace", ["", "..", "a/b", "Videos", None])
def test_an_invalid_namespace_is_named(namespace: Any) -> None:
    """Regression: by its path '..' was another route."""
    with pytest.raises(InvalidParameterError, match="namespace"):
        CounterClient(NOWHERE, namespace)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("deadline_s", "3"),
        ("deadline_s", 0),
        ("retries_per_s", -1),
        ("hedge_after_s", "p50"),
        ("deadline_s", True),
        ("deadline_s", float("nan")),
        ("attempt_timeout_s", float("inf")),
        ("backoff_max_s", None),
        ("retries_at_once", -1),
        ("hedge_after_s", True),
        ("on_attempt", "print"),
    ],
)
def test_an_invalid_option_is_named(name: str, value: Any) -> None:
    """Regression: with NaN for a deadline a call went on for ever."""
    with pytest.raises(InvalidParameterError, match=f"{name} is "):
        Options(**{name: value})


@pytest.mark.parametrize(("delay", "items"), [("1", 5), (-1.0, 5), (0.1, 1.5), (0.1, 0)])
def test_invalid_bounds_of_a_buffer_are_named(delay: Any, items: Any) -> None:
    with pytest.raises(InvalidParameterError, match="max_"):
        Limits(delay, items)


@pytest.mark.parametrize("spool", ["", 3, "/not/there/spool"])
def test_an_invalid_spool_path_is_named(client: CounterClient, spool: Any) -> None:
    """Regression: with an empty name nothing was stored, without an error."""
    with client, pytest.raises(InvalidParameterError, match="the spool"):
        client.buffer(spool=spool)


async def test_a_client_that_was_closed_makes_no_call() -> None:
    """From the next line on, by `close` or by the end of the block."""
    made: list[Attempt] = []
    options = Options(on_attempt=made.append)
    client = AsyncCounterClient(NOWHERE, options=options)
    await client.close()
    with pytest.raises(ClosedError):
        await client.get("c")
    async with AsyncCounterClient(NOWHERE, options=options) as client:
        pass
    with pytest.raises(ClosedError):
        await client.get("c")
    assert made == []
