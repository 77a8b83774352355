"""Adds with bounds: accepted or refused once, and the same for every retry."""

import json
import pickle
from collections.abc import AsyncIterator, Callable
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counter_client import (
    Added,
    AsyncCounterClient,
    BoundReachedError,
    Bounds,
    CounterClient,
    Options,
    RejectedError,
    Token,
    Unfinished,
    UnknownOutcomeError,
)
from counter_client.calls import Calls
from counter_client.delivery import Delivery
from counter_client.errors import (
    InvalidParameterError,
    NotSupportedError,
    TokenCancelledError,
    TokenConflictError,
)
from counter_client.failures import error_of_problem
from counter_client.retrying import attempts
from counter_client.tokens import Add, Items
from tests.client.callers import Caller
from tests.client.script import Script, batch, lost, problem
from tests.support.in_thread import Service

OPTIONS = Options(trust_env=False)
CALLS = Calls("default")
REACHED = problem(
    *("bound_reached", 409, "never"), applied=False, counter="c", count=8, at_most=9, room=1
)
INT64 = st.integers(-(2**63), 2**63 - 1)
BOUNDS = st.builds(Bounds, st.none() | INT64, st.none() | INT64)


@pytest.fixture(params=["sync", "async", "hedged"])
async def client(request: pytest.FixtureRequest, service: Service) -> AsyncIterator[Any]:
    """Each client; hedged it sends a second attempt at once, and may get a refusal twice."""
    if request.param == "async":
        async with AsyncCounterClient(service.url, options=OPTIONS) as client:
            yield Caller(client)
    else:
        hedge = 0.0 if request.param == "hedged" else None
        options = Options(trust_env=False, hedge_after_s=hedge)
        with CounterClient(service.url, options=options) as client:
            yield Caller(client)


@pytest.fixture
def name() -> str:
    return f"bounded/{uuid4()}"


async def test_an_add_is_refused_for_ever_and_an_accepted_one_never(client: Any, name: str) -> None:
    for first in (Token.new(), Token.from_key(f"order-{uuid4()}")):
        last, name = first.derive("last"), f"{name}+"
        await client.add(name, 8, at_most=9, token=first)
        for _ in range(2):
            with pytest.raises(BoundReachedError) as caught:
                await client.add(name, 2, at_least=0, at_most=9, token=last)
            error = caught.value
            assert (error.counter, error.count, error.room) == (name, 8, 1)
            assert (error.at_least, error.at_most) == (None, 9)
            assert (error.applied, error.retry) == (False, "never")
        assert (await client.add_and_get(name, 1, at_most=9)).count == 9
        await client.add(name, -9, at_least=0)
        with pytest.raises(BoundReachedError) as caught:
            await client.add(name, 2, at_least=0, at_most=9, token=last)
        assert caught.value.count == 8
        assert (await client.add(name, 8, at_most=9, token=first)).replayed is True
        with pytest.raises(TokenConflictError):
            await client.add(name, 8, at_most=10, token=first)
        with pytest.raises(BoundReachedError) as caught:
            await client.add_and_get(name, -1, at_least=0)
        assert (caught.value.at_least, caught.value.room) == (0, 0)


async def test_an_item_of_a_batch_that_is_refused_refuses_no_other(client: Any, name: str) -> None:
    most = Bounds(at_most=1)
    results = await client.batch([(name, 1, most), (name, 1, most), (f"{name}-2", 5)])
    assert isinstance(results[0], Added)
    assert isinstance(results[1], BoundReachedError)
    assert isinstance(results[2], Added)
    assert [x.count for x in await client.get_many([name, f"{name}-2"])] == [1, 5]


async def test_an_atomic_add_is_refused_as_a_whole(client: Any, name: str) -> None:
    token, items = Token.new(), [(f"{name}-sold", 1), (name, -1, Bounds(at_least=0))]
    for _ in range(2):
        with pytest.raises(BoundReachedError) as caught:
            await client.atomic(items, token=token)
        assert caught.value.counter == name
    await client.add(name, 1)
    await client.atomic(items, token=token.derive("again"))
    assert [x.count for x in await client.get_many([name, f"{name}-sold"])] == [0, 1]


async def test_a_cancel_has_the_bounds_of_the_add_and_gives_its_room_back(
    client: Any, name: str
) -> None:
    tokens = [Token.new() for _ in range(3)]
    await client.add(name, 1, at_most=1, token=tokens[0])
    with pytest.raises(BoundReachedError):
        await client.add(name, 1, at_most=1, token=tokens[1])
    with pytest.raises(TokenConflictError):
        await client.cancel(name, 1, token=tokens[0])
    cancelled = await client.cancel(name, 1, at_most=1, token=tokens[0])
    assert cancelled.was_counted is True
    refused = Unfinished.of("add", "default", [Add(name, 1, Bounds(at_most=1))], str(tokens[1]))
    assert (await client.cancel_unfinished(str(refused))).was_counted is False
    with pytest.raises(TokenCancelledError):
        await client.add(name, 1, at_most=1, token=tokens[1])
    items = [(name, 1, Bounds(at_most=1)), (f"{name}-2", 1)]
    await client.atomic(items, token=tokens[2])
    with pytest.raises(TokenConflictError):
        await client.cancel_atomic([(name, 1), (f"{name}-2", 1)], token=tokens[2])
    assert (await client.cancel_atomic(items, token=tokens[2])).was_counted is True


async def test_a_namespace_has_bounds_for_all_adds_and_for_the_totals_of_buffers(
    client: Any, service: Service
) -> None:
    kind = type(client.of)
    of_its_own = Caller(kind(service.url, f"bounded-{uuid4()}"[:30], options=OPTIONS))
    made = await of_its_own.create_namespace(counter_type="ACCURATE", bounds={"at_least": 0})
    assert made["bounds"] == {"at_least": 0}
    with pytest.raises(BoundReachedError, match="of the namespace"):
        await of_its_own.add("c", -1)
    buffer = Caller(of_its_own.of.buffer())
    if isinstance(of_its_own.of, AsyncCounterClient):
        await buffer.of.__aenter__()
    for delta in (3, -4):
        await buffer.add("c", delta)
    await buffer.add("d", 1)
    with pytest.raises(RejectedError) as caught:
        await buffer.close()
    [item] = caught.value.items
    assert (item.counter, item.delta, type(item.error)) == ("c", -1, BoundReachedError)
    assert (await of_its_own.change_namespace(bounds={})).get("bounds") is None
    assert (await of_its_own.add_and_get("c", -1)).count == -1
    await of_its_own.close()


async def test_the_event_log_has_bounds_and_refusals(client: Any, name: str) -> None:
    await client.add(name, 8, at_least=-1, at_most=9)
    with pytest.raises(BoundReachedError):
        await client.add(name, 2, at_most=9)
    await client.add(name, 1)
    events = await client.events(name)
    assert [(each.delta, each.at_least, each.at_most, each.refused) for each in events] == [
        (1, None, None, None),
        (0, None, 9, {"delta": 2, "count": 8, "at_most": 9}),
        (8, -1, 9, None),
    ]


async def test_a_buffer_takes_no_bounds(client: Any) -> None:
    """It merges the adds of a counter: a bound of one of them would be of all."""
    buffer: Any = client.of.buffer()
    for add in {buffer.add, getattr(buffer, "add_nowait", buffer.add)}:
        with pytest.raises(TypeError, match="at_most"):
            await add("c", 1, at_most=9)
    await Caller(buffer).close()


async def test_bounds_that_cannot_be_kept_are_refused(client: Any, service: Service) -> None:
    rough = Caller(type(client.of)(service.url, f"rough-{uuid4()}"[:30], options=OPTIONS))
    await rough.create_namespace(counter_type="BEST_EFFORT")
    with pytest.raises(NotSupportedError) as caught:
        await rough.add("c", 1, at_most=9)
    assert caught.value.retry == "never"
    [refused, added] = await rough.batch([("c", 1, Bounds(at_least=0)), ("c", 1)])
    assert isinstance(refused, NotSupportedError)
    assert isinstance(added, Added)
    await rough.close()


def refuse(call: Callable[[Script], object], *before: Any) -> Script:
    """The script of *call*, which must end with the refusal after the answers *before*."""
    script = Script([*before, REACHED])
    with pytest.raises(BoundReachedError) as caught:
        call(script)
    assert caught.value.room == 1
    return script


@pytest.mark.parametrize("before", [(), (lost(),), (problem("overloaded", 503, "same_token"),)])
@pytest.mark.parametrize(
    "call",
    [
        CALLS.add("c", 2, None, Bounds(at_most=9)),
        CALLS.add_and_get("c", 2, Token.new(), Bounds(at_most=9)),
        CALLS.atomic([("c", 2, Bounds(at_most=9))], None),
        CALLS.resolve(Unfinished.of("add", "default", [Add("c", 2)], "key:k")),
    ],
    ids=["add", "add_and_get", "atomic", "resolve"],
)
def test_a_refusal_is_definite_whatever_came_before(call: Any, before: tuple[Any, ...]) -> None:
    """No attempt under the token can have been counted: it is sent no more, and not replaced."""
    script = refuse(lambda script: script.run(attempts(call, script.policy())), *before)
    assert len({each.request.body for each in script.sent}) == 1
    assert len(script.sent) == len(before) + 1


def test_the_refusal_of_an_item_is_definite_and_its_bounds_are_sent_again() -> None:
    result = json.loads(REACHED.body)
    script = Script([lost(), batch(result, "added")])
    items: Items = [("c", 2, Bounds(0, 9)), ("d", 1)]
    delivery = Delivery.of_items(CALLS, items)
    found = script.run(delivery.until_deadline(script.policy()))
    assert isinstance(found[0], BoundReachedError)
    assert isinstance(found[1], Added)
    first, second = script.bodies()
    assert first == second
    bounds = [{name: each.get(name) for name in Bounds._fields} for each in first["items"]]
    assert bounds == [{"at_least": 0, "at_most": 9}, {"at_least": None, "at_most": None}]


def test_an_unfinished_add_keeps_its_bounds_for_its_resolve_and_its_cancel() -> None:
    script = Script([lost(), lost()])
    policy = script.policy(retries_at_once=0, retries_per_s=0, retries_per_call=0)
    bounds = Bounds(at_least=-5)
    with pytest.raises(UnknownOutcomeError) as caught:
        script.run(attempts(CALLS.add("c", -1, None, bounds), policy))
    delivery = Delivery.of_items(CALLS, [("c", -1, bounds)])
    [item] = script.run(delivery.until_deadline(policy))
    for error in (caught.value, item):
        assert isinstance(error, UnknownOutcomeError)
        stored = Unfinished.parse(str(error.unfinished))
        assert (stored, stored.bounds) == (error.unfinished, (bounds,))
        for call in (CALLS.resolve(stored), CALLS.cancel_unfinished(stored)):
            body = json.loads(call.request.body or b"")
            assert (body["delta"], body["at_least"], "at_most" in body) == (-1, -5, False)


@given(st.lists(st.builds(Add, st.text(), INT64, BOUNDS), min_size=2))
def test_bounds_are_parsed_from_the_text_of_an_unfinished_add(adds: list[Add]) -> None:
    unfinished = Unfinished.of("atomic/add", "default", adds, "key:k")
    assert Unfinished.parse(str(unfinished)) == unfinished
    assert unfinished.adds == adds


def test_an_unfinished_add_without_bounds_is_written_as_ever() -> None:
    unfinished = Unfinished("add", "default", (("c", 1),), "key:k")
    assert json.loads(str(unfinished))["items"] == [["c", 1]]
    assert set(json.loads(str(unfinished))) == {"operation", "namespace", "items", "token_text"}


@pytest.mark.parametrize("item", ['["c", 1, 9]', '["c", 1, {"most": 9}]', '["c", 1, {}, 1]'])
def test_other_bounds_of_an_unfinished_add_are_refused(item: str) -> None:
    text = str(Unfinished("add", "default", (("c", 1),), "key:k")).replace('["c", 1]', item)
    with pytest.raises(InvalidParameterError, match="not an Unfinished"):
        Unfinished.parse(text)


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        (Bounds(at_most=2**63), "at_most is 9223372036854775808"),
        (Bounds(at_least=-(2**63) - 1), "at_least is -9223372036854775809"),
        (Bounds(at_most=True), "at_most is True"),
        (Bounds(at_least=2, at_most=1), "at_least is 2, and at_most is 1: no count is both"),
    ],
)
def test_bounds_that_no_count_keeps_are_named(bounds: Bounds, said: str) -> None:
    """Before anything is sent."""
    for call in (
        lambda: CALLS.add("c", 1, None, bounds),
        lambda: CALLS.add_and_get("c", 1, None, bounds),
        lambda: CALLS.cancel("c", 1, "add", Token.new(), bounds),
        lambda: CALLS.atomic([("c", 1, bounds)], None),
        lambda: Delivery.of_items(CALLS, [("c", 1, bounds)]),
    ):
        with pytest.raises(InvalidParameterError, match=said):
            call()


@pytest.mark.parametrize("operation", ["clear", "delete"])
def test_only_an_add_has_bounds(operation: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"a {operation} has no bounds"):
        CALLS.cancel("c", 1, operation, Token.new(), Bounds(at_most=9))


def test_a_refusal_says_only_what_the_answer_says() -> None:
    bare = {"code": "bound_reached", "retry": "never", "applied": False}
    for more in ({}, {"count": "8", "at_most": True, "at_least": 1.5, "room": None, "counter": 7}):
        error = error_of_problem(bare | more)
        assert isinstance(error, BoundReachedError)
        found = (error.counter, error.count, error.at_least, error.at_most, error.room)
        assert found == (None,) * 5
    error = error_of_problem(bare | {"counter": "c", "count": 2**70, "at_least": 0, "room": 2**70})
    again = pickle.loads(pickle.dumps(error))
    assert (again.counter, again.count, again.at_least, again.room) == ("c", 2**70, 0, 2**70)
