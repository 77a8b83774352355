"""Every call of both clients against a real service, over real sockets."""

import inspect
import pickle
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from counter_client import (
    Added,
    AsyncCounterClient,
    Attempt,
    ClosedError,
    CounterClient,
    CounterError,
    Key,
    Options,
    Token,
    Unfinished,
    UnreachableError,
)
from counter_client.errors import (
    InvalidBodyError,
    InvalidParameterError,
    NamespaceUnknownError,
    PreconditionFailedError,
    TokenCancelledError,
    TokenConflictError,
)
from tests.client.callers import Caller
from tests.support.in_thread import Service

OPTIONS = Options(trust_env=False)


@pytest.fixture(params=["sync", "async"])
async def client(request: pytest.FixtureRequest, service: Service) -> AsyncIterator[Any]:
    """Both clients, one after the other."""
    if request.param == "sync":
        with CounterClient(service.url, options=OPTIONS) as client:
            yield Caller(client)
    else:
        async with AsyncCounterClient(service.url, options=OPTIONS) as client:
            yield Caller(client)


@pytest.fixture
def name() -> str:
    """A counter of the test's own, with special characters of URLs and JSON in its name."""
    return f'a/b?c&d=é#"%2F\\ {uuid4()}'


async def test_an_add_is_counted_and_read(client: Any, name: str) -> None:
    added = await client.add(name, 5)
    assert (added.counter, added.delta, added.replayed) == (name, 5, False)
    both = await client.add_and_get(name, -2)
    assert (both.count, both.delta) == (3, -2)
    count = await client.get(name)
    assert (count.counter, count.count, count.accuracy) == (name, 3, "accurate")
    assert abs(datetime.now(UTC) - count.as_of) < timedelta(minutes=1)
    assert (await client.get(name, max_staleness="1h")).accuracy == "eventual"


async def test_the_same_token_or_key_counts_once(client: Any, name: str) -> None:
    for token in (Token.new(), Token.from_key(f"order-{uuid4()}")):
        before = (await client.get(name)).count
        assert [(await client.add(name, 2, token=token)).replayed for _ in range(3)] == [
            False,
            True,
            True,
        ]
        with pytest.raises(TokenConflictError) as caught:
            await client.add(name, 3, token=token)
        assert (caught.value.applied, caught.value.retry) == (None, "never")
        assert (await client.get(name)).count == before + 2


@pytest.mark.parametrize("dots", [".", ".."])
async def test_a_name_of_dots_is_a_name(client: Any, dots: str) -> None:
    before = (await client.get(dots)).count
    await client.add(dots, 1)
    assert (await client.get_many([dots]))[0].count == before + 1


async def test_many_at_once(client: Any, name: str) -> None:
    results = await client.batch([(name, 1), (name, 2), (f"{name}2", 3)])
    assert [each.delta for each in results if isinstance(each, Added)] == [1, 2, 3]
    counts = await client.get_many([name, f"{name}2"], max_staleness="0s")
    assert [each.count for each in counts] == [3, 3]


async def test_an_atomic_add_is_all_under_one_token(client: Any, name: str) -> None:
    token = Token.new()
    for _ in range(2):
        results = await client.atomic([(name, -1), (f"{name}2", 1)], token=token)
        assert [each.delta for each in results] == [-1, 1]
    assert [each.count for each in await client.get_many([name, f"{name}2"])] == [-1, 1]


async def test_a_clear_sets_to_zero(client: Any, name: str) -> None:
    await client.add(name, 7)
    assert (await client.clear(name)).counter == name
    assert (await client.get(name)).count == 0


async def test_a_deleted_counter_is_not_listed(client: Any, name: str) -> None:
    await client.add(name, 7)
    token = Token.new()
    assert (await client.delete(name, token=token)).counter == name
    assert (await client.delete(name, token=token)).replayed
    assert (await client.get(name)).count == 0
    assert name not in await client.counters(prefix=name)
    unfinished = Unfinished("delete", "default", ((name, 0),), str(token))
    assert (await client.resolve(str(unfinished))).applied
    assert (await client.delete(name, token=Token.from_key(f"gone-{uuid4()}"))).counter == name


async def test_history_and_events_are_read(client: Any, name: str) -> None:
    for _ in range(3):
        await client.add(name, 2)
    await client.clear(name)
    events = await client.events(name)
    assert [(each.delta, each.clear) for each in events] == [(0, True), *[(2, False)] * 3]
    assert await client.events(name, end=events[-1].event_time) == []
    points = await client.history(name, step="1s")
    assert all(each.count == 0 for each in points)
    assert name in await client.counters(prefix="a/b?c&d")


async def test_a_span_of_time_and_a_prefix_are_summed(client: Any, name: str) -> None:
    for number in range(3):
        await client.add(f"{name}{number}", 2)
    summed = await client.sum(name)
    assert (summed.count, summed.counters, summed.accuracy) == (6, 3, "accurate")
    assert (await client.sum(name, max_staleness="0s")).count == 6
    began = datetime(2026, 1, 1, tzinfo=UTC)
    change = await client.between(f"{name}1", began)
    assert (change.counter, change.start, change.count, change.delta) == (f"{name}1", began, 2, 2)
    today = await client.between(f"{name}1", "today", tz="Asia/Tokyo")
    assert today.start < today.end
    assert today.start.hour == 15
    with pytest.raises(InvalidParameterError, match="next to it at"):
        await client.between(f"{name}1", began, began + timedelta(microseconds=1))
    by_month = await client.history(f"{name}1", began, step="month", tz="Asia/Tokyo")
    assert len(by_month) > 1
    assert all(each.time.hour == 15 for each in by_month[:-1])


async def test_the_busiest_counters_are_found(client: Any, name: str) -> None:
    await client.add(name, 3)
    found = await client.busiest(100, span="1m")
    (busy,) = (each for each in found.counters if each.counter == name)
    assert busy.count == 3
    assert busy.adds_per_s > 0
    assert found.complete
    assert found.since < found.as_of
    assert len((await client.busiest(1)).counters) == 1


async def test_no_more_events_are_read_than_asked_for(client: Any, name: str) -> None:
    for delta in (1, 2, 3):
        await client.add(name, delta)
    assert [each.delta for each in await client.events(name, limit=2)] == [3, 2]
    assert await client.events(name, limit=0) == []


@pytest.mark.parametrize("kind", [CounterClient, AsyncCounterClient])
async def test_a_namespace_from_its_making_to_its_end(service: Service, kind: Any) -> None:
    client = Caller(kind(service.url, f"made-{uuid4().hex}", options=OPTIONS))
    made = await client.create_namespace(counter_type="EVENTUAL", cache_ttl="2s")
    assert (made["counter_type"], made["cache_ttl"]) == ("EVENTUAL", "2s")
    with pytest.raises(PreconditionFailedError):
        await client.create_namespace(counter_type="EVENTUAL")
    changed = await client.change_namespace(cache_ttl="3s")
    assert await client.namespace() == changed == {**made, "cache_ttl": "3s"}
    assert changed in await client.namespaces()
    assert made.etag != changed.etag == (await client.namespace()).etag
    with pytest.raises(PreconditionFailedError):
        await client.change_namespace(made.etag, cache_ttl="4s")
    assert (await client.change_namespace(changed.etag, cache_ttl="4s"))["cache_ttl"] == "4s"
    await client.delete_namespace()
    for call in (client.namespace, client.delete_namespace):
        with pytest.raises(NamespaceUnknownError):
            await call()
    with pytest.raises(PreconditionFailedError):
        await client.change_namespace(cache_ttl="3s")
    await client.close()


async def test_pages_are_read_to_their_end(client: Any, name: str) -> None:
    items = [(f"page-{name}-{at:04}", 1) for at in range(1_000)]
    await client.batch(items)
    await client.batch([(f"page-{name}-{at:04}", 1) for at in range(1_000, 1_005)])
    assert len(await client.counters(prefix=f"page-{name}")) == 1_005
    found = await client.counts(f"page-{name}", largest_first=True, max_staleness="0s")
    assert [(each.counter, each.count) for each in found] == [
        (f"page-{name}-{at:04}", 1) for at in range(1_005)
    ]
    some = await client.counts(f"page-{name}", limit=1_002)
    assert [each.counter for each in some] == [each.counter for each in found[:1_002]]


async def test_tokens_of_the_service(client: Any, name: str) -> None:
    first, second = await client.tokens(2)
    assert first != second
    assert (await client.add(name, 1, token=first)).replayed is False
    assert (await client.add(name, 1, token=first)).replayed is True


async def test_an_unfinished_add_is_finished_by_sending_it_again(client: Any, name: str) -> None:
    token = Token.new()
    unfinished = Unfinished("add", "default", ((name, 4),), str(token))
    assert (await client.resolve(str(unfinished))).applied is True
    assert (await client.resolve(unfinished)).applied is True
    assert (await client.add(name, 4, token=token)).replayed is True
    assert (await client.get(name)).count == 4


async def test_a_token_that_was_never_sent_and_is_old_resolves_to_not_applied(
    client: Any, name: str
) -> None:
    """It waits as long as the service says; its windows are short here."""
    token = Token(Token.new().nonce, Token.new().generation_time_us - 60_000_000)
    resolved = await client.resolve(Unfinished("add", "default", ((name, 4),), str(token)))
    assert resolved.applied is False
    assert (await client.get(name)).count == 0


async def test_what_is_cancelled_counts_nothing(client: Any, name: str) -> None:
    """Whether or not it arrived before; a retry is answered the same, and the add is refused."""
    for token in (Token.new(), Token.from_key(f"order-{uuid4()}")):
        await client.add(name, 5, token=token)
        first = await client.cancel(name, 5, token=token)
        assert first.was_counted is True
        assert await client.cancel_unfinished(unfinished_add(name, 5, token)) == first
        never = token.derive("never sent")
        assert (await client.cancel(name, token=never)).was_counted is False
        for each, delta in ((token, 5), (never, 1)):
            with pytest.raises(TokenCancelledError) as caught:
                await client.add(name, delta, token=each)
            assert (caught.value.applied, caught.value.retry) == (False, "never")
        with pytest.raises(TokenCancelledError):
            await client.resolve(unfinished_add(name, 5, token))
        with pytest.raises(TokenConflictError):
            await client.cancel(name, 6, token=token)
        assert (await client.get(name)).count == 0


def unfinished_add(counter: str, delta: int, token: Token | Key) -> str:
    return str(Unfinished("add", "default", ((counter, delta),), str(token)))


async def test_clears_deletes_and_atomic_adds_are_cancelled(client: Any, name: str) -> None:
    items = {name: 7, f"{name}2": 1}
    token = Token.new()
    for operation in ("clear", "delete"):
        await client.atomic(items, token=token.derive(operation))
        ended = Token.new()
        await client.add(name, 1)
        await getattr(client, operation)(name, token=ended)
        assert (await client.cancel(name, operation=operation, token=ended)).was_counted is True
        part = token.derive(operation)
        with pytest.raises(TokenConflictError):
            await client.cancel_atomic([(name, 7)], token=part)
        assert (await client.cancel_atomic(items, token=part)).was_counted is True
    assert [each.count for each in await client.get_many(items)] == [2, 0]


async def test_a_cancel_needs_the_token_and_an_operation(client: Any) -> None:
    for token in (None, "order-7"):
        with pytest.raises(InvalidParameterError, match="the token is"):
            await client.cancel("c", token=token)
        with pytest.raises(InvalidParameterError, match="the token is"):
            await client.cancel_atomic({"c": 1}, token=token)
    with pytest.raises(InvalidParameterError, match="add, clear or delete"):
        await client.cancel("c", operation="add-and-get", token=Token.new())


async def test_errors_are_the_services_own_kinds(client: Any, service: Service) -> None:
    with pytest.raises(InvalidParameterError):
        await client.get("c", max_staleness="soon")
    with pytest.raises(InvalidBodyError):
        await client.tokens(1_001)
    with pytest.raises(InvalidParameterError, match="time zone"):
        await client.events("c", start=datetime(2026, 1, 1))
    with CounterClient(service.url, "not-there", options=OPTIONS) as other:
        with pytest.raises(NamespaceUnknownError):
            other.add("c")
        with pytest.raises(NamespaceUnknownError):
            other.batch([("c", 1)])
        with pytest.raises(CounterError, match="not-there"):
            other.resolve(Unfinished("add", "default", (("c", 1),), str(Token.new())))


def test_an_address_without_a_service_is_unreachable() -> None:
    options = Options(trust_env=False, deadline_s=0.2, backoff_first_s=0.01)
    with (
        CounterClient("http://127.0.0.1:9", options=options) as client,
        pytest.raises(UnreachableError, match=r"127\.0\.0\.1:9"),
    ):
        client.get("c")


def test_another_address_takes_over(service: Service) -> None:
    """The retry goes to the next base URL; the hook sees both attempts."""
    seen: list[Attempt] = []
    options = Options(trust_env=False, backoff_first_s=0.01, on_attempt=seen.append)
    with CounterClient(["http://127.0.0.1:9", service.url], options=options) as client:
        client.add("two-addresses")
    assert [(each.number, each.status, each.operation) for each in seen] == [
        (0, None, "add"),
        (1, 200, "add"),
    ]
    assert seen[1].url == service.url


def test_an_address_that_is_away_costs_no_call_a_retry(service: Service) -> None:
    """Regression: each call began there, and soon the retries that all calls share were used up."""
    seen: list[Attempt] = []
    options = Options(
        trust_env=False, backoff_first_s=0.01, on_attempt=seen.append, retries_at_once=3
    )
    with CounterClient(["http://127.0.0.1:9", service.url], options=options) as client:
        for _ in range(100):
            client.add("away")
        assert client.get("away").count == 100
    assert len([each for each in seen if each.status is None]) < 10


def test_both_clients_have_the_same_calls() -> None:
    def calls(kind: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(member).parameters)
            for name, member in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_")
        }

    assert calls(CounterClient) == calls(AsyncCounterClient)


def test_threads_share_a_client(service: Service, name: str) -> None:
    with CounterClient(service.url, options=OPTIONS) as shared, ThreadPoolExecutor(8) as threads:
        list(threads.map(shared.add, [name] * 40))
        assert shared.get(name).count == 40


async def test_a_closed_client_says_so(client: Any) -> None:
    await client.close()
    await client.close()
    with pytest.raises(ClosedError):
        await client.get("c")


def test_a_hook_that_fails_stops_no_counting(
    service: Service, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> None:
        raise ValueError("a hook's fault")

    options = Options(trust_env=False, on_attempt=fail, on_flush=fail)
    with CounterClient(service.url, options=options) as hooked:
        with hooked.buffer() as buffer:
            buffer.add(name, 2)
        assert hooked.get(name).count == 2
    assert "a hook's fault" in caplog.text


def test_results_can_be_pickled(service: Service, name: str) -> None:
    with CounterClient(service.url, options=OPTIONS) as client:
        added = client.add(name)
    assert pickle.loads(pickle.dumps(added)) == added
