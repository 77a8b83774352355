"""A refused connection is retried, unless ``wait_for_ready`` is off and no server answered yet."""

from collections.abc import Callable

import pytest

from counter_client import (
    AsyncCounterClient,
    Attempt,
    CounterClient,
    Options,
    UnknownOutcomeError,
    UnreachableError,
)
from tests.client.stranger import http, stranger

URL = "http://127.0.0.1:9"
COUNT = (
    b'{"namespace":"default","counter":"c","count":0,'
    b'"as_of":"2026-01-01T00:00:00.000000Z","accuracy":"accurate"}'
)


def options(note: Callable[[Attempt], None], *, wait: bool = False) -> Options:
    # Without a pause, the budget ends the retries of a call: no time-out decides.
    return Options(
        deadline_s=3_600.0,
        backoff_first_s=1e-9,
        retries_at_once=3.0,
        retries_per_s=0.0,
        retries_per_call=0.0,
        wait_for_ready=wait,
        on_attempt=note,
    )


@pytest.mark.parametrize(("wait", "expected"), [(False, 1), (True, 4)])
def test_only_a_blocking_read_is_retried(wait: bool, expected: int) -> None:
    made: list[Attempt] = []
    with (
        CounterClient(URL, options=options(made.append, wait=wait)) as client,
        pytest.raises(UnreachableError),
    ):
        client.get("c")
    assert len(made) == expected


async def test_a_read_on_an_event_loop_is_not_retried() -> None:
    made: list[Attempt] = []
    async with AsyncCounterClient(URL, options=options(made.append)) as client:
        with pytest.raises(UnreachableError):
            await client.get("c")
    assert len(made) == 1


def test_an_add_is_always_retried() -> None:
    made: list[Attempt] = []
    with (
        CounterClient(URL, options=options(made.append)) as client,
        pytest.raises(UnknownOutcomeError) as end,
    ):
        client.add("c", 1)
    assert len(made) == 4
    assert isinstance(end.value.__cause__, UnreachableError)


def test_a_read_of_a_server_that_answered_before_is_retried() -> None:
    made: list[Attempt] = []
    with stranger(http("200 OK", COUNT)) as other:
        client = CounterClient(other.url, options=options(made.append))
        assert client.get("c").count == 0
    with client, pytest.raises(UnreachableError):
        client.get("c")
    assert len(made) == 1 + 4
