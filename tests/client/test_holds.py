"""Holds: an amount is reserved, and ends once, whatever becomes of the program and its answers."""

import asyncio
import json
import pickle
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.routes.holds import format_hold
from counter.holds import HoldId as ServiceHoldId
from counter.types import Token as ServiceToken
from counter_client import (
    AsyncCounterClient,
    BoundReachedError,
    Bounds,
    CounterClient,
    CounterError,
    HoldExpiredError,
    HoldReleasedError,
    HoldSettledError,
    HoldUnknownError,
    Options,
    Token,
    Unfinished,
    UnknownOutcomeError,
)
from counter_client.calls import Calls, Response
from counter_client.errors import (
    InvalidBodyError,
    InvalidParameterError,
    TokenCancelledError,
    TokenConflictError,
)
from counter_client.retrying import Send, attempts
from counter_client.tokens import Add, HoldId
from tests.client.callers import Caller
from tests.client.script import Script, lost, problem
from tests.support.in_thread import Service

OPTIONS = Options(trust_env=False)
CALLS = Calls("default")
TOKEN = Token(bytes.fromhex("5f3a0f0e6f0c4f7e9d3b0c5f1d2e3a4b"), 1_769_847_330_000_250)
HOLD = str(HoldId(TOKEN, "c"))
INT64 = st.integers(-(2**63), 2**63 - 1)
SETTLED = problem("hold_settled", 409, "never", applied=True, settled=7)
RELEASED = problem("hold_released", 410, "never", applied=False)
UNKNOWN = problem("hold_unknown", 404, "never")
NO_RETRIES = {"retries_at_once": 0, "retries_per_s": 0, "retries_per_call": 0}


@pytest.fixture(params=["sync", "async", "hedged"])
async def client(request: pytest.FixtureRequest, service: Service) -> AsyncIterator[Any]:
    """Each client; hedged it sends a second attempt at once, and may get two answers."""
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
    return f"held/{uuid4()}"


class Stack:
    """Enters holds of either client, and leaves them with an error or without."""

    def __init__(self, client: Any) -> None:
        self._is_async = isinstance(client.of, AsyncCounterClient)
        self._client = client
        self._async, self._sync = AsyncExitStack(), ExitStack()

    async def enter(self, *args: Any, **kwargs: Any) -> Any:
        holding = self._client.of.hold(*args, **kwargs)
        if self._is_async:
            return Caller(await self._async.enter_async_context(holding))
        return Caller(self._sync.enter_context(holding))

    async def leave(self, error: BaseException | None = None) -> None:
        how = (None, None, None) if error is None else (type(error), error, None)
        assert not await self._async.__aexit__(*how)
        assert not self._sync.__exit__(*how)


async def test_a_hold_is_settled_in_its_block(client: Any, name: str) -> None:
    for key in (None, Token.new(), Token.from_key(f"order-{uuid4()}")):
        stack, counter = Stack(client), f"{name}{key}"
        hold = await stack.enter(counter, 50, expires_in="5m", at_most=100, token=key)
        assert (hold.of.began.count, hold.of.began.held) == (0, 50)
        assert (hold.of.counter, hold.of.amount, hold.of.is_open) == (counter, 50, True)
        with pytest.raises(BoundReachedError) as caught:
            await client.add(counter, 51, at_most=100)
        assert (caught.value.count, caught.value.held, caught.value.room) == (0, 50, 50)
        until = hold.of.expires_at
        assert (await hold.extend("6m")).expires_at == hold.of.expires_at > until
        [listed] = await client.holds(counter)
        assert listed == await client.get_hold(hold.of.id)
        assert (listed.id, listed.amount, listed.state) == (hold.of.id, 50, "open")
        settled = await hold.settle(57)
        assert (settled.settled, settled.over, settled.state) == (57, True, "settled")
        assert (settled.count, settled.held) == (57, 0)
        await stack.leave()
        count = await client.get(counter, max_staleness="0s")
        assert (count.count, count.held, count.held_down) == (57, 0, 0)
        assert await client.holds(counter) == []


async def test_leaving_the_block_releases(client: Any, name: str) -> None:
    """Without an error, with one, and whatever was sent before."""
    for error in (None, ValueError("the model failed"), KeyboardInterrupt()):
        stack = Stack(client)
        hold = await stack.enter(name, -50, expires_in="5m")
        assert (await client.get(name, max_staleness="0s")).held_down == -50
        await stack.leave(error)
        assert not hasattr(error, "__notes__")
        ended = await client.get_hold(hold.of.id)
        assert (ended.state, ended.expires_at, ended.settled) == ("released", None, None)
        with pytest.raises(HoldReleasedError):
            await hold.settle(-50)
    stack = Stack(client)
    hold = await stack.enter(name, 1, expires_in="5m")
    with pytest.raises(InvalidBodyError):
        await hold.settle(-1)
    await stack.leave()
    assert (await client.get_hold(hold.of.id)).state == "released"


async def test_a_hold_that_was_ended_by_its_id_is_left_without_an_error(
    client: Any, name: str
) -> None:
    for error in (None, ValueError()):
        stack = Stack(client)
        held = [await stack.enter(name, 5, expires_in="5m") for _ in range(3)]
        await client.settle_hold(held[0].of.id, 4)
        await client.release_hold(held[1].of.id)
        await held[2].release()
        await stack.leave(error)
        assert not hasattr(error, "__notes__")
        with pytest.raises(HoldSettledError) as caught:
            await held[0].release()
        assert (caught.value.settled, caught.value.applied) == (4, True)
        assert (await held[0].settle(4)).settled == 4
        with pytest.raises(HoldSettledError):
            await client.extend_hold(held[0].of.id, "6m")


async def test_a_token_makes_one_hold(client: Any, name: str) -> None:
    wanted = {"expires_in": "5m", "at_least": 0, "at_most": 9}
    for token in (Token.new(), Token.from_key(f"order-{uuid4()}")):
        one, other = [await client.hold(name, 5, **wanted, token=token) for _ in range(2)]
        assert (one.id, one.expires_at) == (other.id, other.expires_at)
        with pytest.raises(TokenConflictError):
            await client.hold(name, 4, **wanted, token=token)
        with pytest.raises(BoundReachedError) as caught:
            await client.hold(name, 5, **wanted)
        assert (caught.value.held, caught.value.room) == (5, 4)
        await client.release_hold(one.id)
        with pytest.raises(HoldReleasedError):
            await client.hold(name, 5, **wanted, token=token)


async def test_a_hold_is_cancelled_by_its_token(client: Any, name: str) -> None:
    tokens = [Token.new() for _ in range(3)]
    hold = await client.hold(name, 5, expires_in="5m", token=tokens[0])
    with pytest.raises(TokenConflictError):
        await client.cancel_hold(name, 5, expires_in="6m", token=tokens[0])
    for was_counted, token in zip((True, False), tokens, strict=False):
        for _ in range(2):
            cancelled = await client.cancel_hold(name, 5, expires_in="5m", token=token)
            assert cancelled.was_counted is was_counted
    assert (await client.get_hold(hold.id)).state == "released"
    with pytest.raises(TokenCancelledError):
        await client.hold(name, 5, expires_in="5m", token=tokens[1])
    items = [Add(name, 5, Bounds(at_most=5))]
    unfinished = Unfinished.of("hold", "default", items, str(tokens[2]), "5m")
    assert (await client.resolve(str(unfinished))).applied is True
    [listed] = await client.holds(name)
    assert (await client.cancel_unfinished(str(unfinished))).was_counted is True
    with pytest.raises(HoldReleasedError):
        await client.resolve(unfinished)
    settle = Unfinished.of("settle", "default", [Add(name, 5)], str(tokens[2]))
    with pytest.raises(HoldReleasedError):
        await client.resolve(settle)
    assert listed.id == str(HoldId(tokens[2], name))
    with pytest.raises(InvalidParameterError, match="cannot be cancelled"):
        await client.cancel_unfinished(settle)


async def test_a_hold_that_does_not_exist_is_reported(client: Any, name: str) -> None:
    missing = str(HoldId(Token.new(), name))
    for call in (client.get_hold(missing), client.settle_hold(missing, 1)):
        with pytest.raises(HoldUnknownError) as caught:
            await call
        assert caught.value.applied is None
    for other in (HOLD[:-1], f"{HOLD}=", "", "a/b", 7, "\ud800"):
        with pytest.raises(InvalidParameterError, match="not the id of a hold"):
            await client.get_hold(other)
    for wrong in (900, None, ""):
        with pytest.raises(InvalidParameterError, match="expires_in"):
            await client.hold(name, 1, expires_in=wrong)
    with pytest.raises(InvalidBodyError, match="amount is 0"):
        await client.hold(name, 0, expires_in="5m")


async def test_open_holds_are_read_page_by_page(
    client: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("counter_client.calls.PAGE_ITEMS_MAX", 2)
    held = [await client.hold(name, 1, expires_in=f"{each}m") for each in (3, 1, 2, 4, 5)]
    in_order = sorted(held, key=lambda each: each.expires_at)
    assert [each.id for each in await client.holds(name)] == [each.id for each in in_order]


async def test_a_cancelled_task_releases_its_hold(service: Service, name: str) -> None:
    async with AsyncCounterClient(service.url, options=OPTIONS) as client:
        inside = asyncio.Event()

        async def work() -> None:
            async with client.hold(name, 50, expires_in="5m"):
                inside.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await client.get(name, max_staleness="0s")).held == 0


class Gate:
    """Sends that wait until the gate is open, in front of a client's transport."""

    def __init__(self, client: AsyncCounterClient, operation: str) -> None:
        self.arrived, self.is_open = asyncio.Event(), asyncio.Event()
        self._operation = operation
        self._send = client._transport.send
        client._transport.send = self.send  # type: ignore[method-assign]

    async def send(self, send: Send) -> Any:
        if send.request.operation == self._operation:
            self.arrived.set()
            await self.is_open.wait()
        return await self._send(send)


@pytest.mark.parametrize("operation", ["hold", "settle", "release"])
async def test_a_call_in_flight_goes_on_when_its_task_is_cancelled(
    service: Service, name: str, operation: str
) -> None:
    """A settle counts, because the cost is there; what was begun for nothing is released."""
    async with AsyncCounterClient(service.url, options=OPTIONS) as client:
        gate = Gate(client, operation)

        async def work() -> None:
            async with client.hold(name, 50, expires_in="5m") as hold:
                if operation == "settle":
                    await hold.settle(37)

        task = asyncio.create_task(work())
        await gate.arrived.wait()
        task.cancel()
        # Of a second cancel, also while the block waits for the end.
        asyncio.get_running_loop().call_soon(task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.is_open.set()
    with CounterClient(service.url, options=OPTIONS) as other:
        count = other.get(name, max_staleness="0s")
        assert (count.count, count.held) == (37 if operation == "settle" else 0, 0)


async def test_the_error_of_a_block_says_that_its_hold_may_not_be_released(
    client: Any, name: str
) -> None:
    """It is not replaced by the error of the release; without one that is raised."""
    for error in (ValueError("the model failed"), None):
        stack = Stack(client)
        hold = await stack.enter(name, 5, expires_in="5m")
        # As after a service that is gone.
        hold.of.id = str(HoldId(Token.new(), name))
        if error is None:
            with pytest.raises(HoldUnknownError):
                await stack.leave()
        else:
            await stack.leave(error)
            [note] = error.__notes__
            assert "may not be released, and then expires by itself" in note


def answer(state: str, settled: int | None = None, /, **more: Any) -> Callable[[Send], Response]:
    """The response to what leaves a hold of 5 in *state*."""

    def respond(send: Send) -> Response:
        body = json.loads(send.request.body or b"{}")
        hold = HOLD
        if "idempotency_token" in body:
            given = body["idempotency_token"]
            token: Any = Token.parse(f"{given['token']}@{given['generation_time']}")
            hold = str(HoldId(token, "c"))
        found = {"namespace": "default", "counter": "c", "hold": hold, "amount": 5, "state": state}
        at = "2026-01-31T08:30:30.000250Z"
        found |= {"expires_at" if state == "open" else "ended_at": at}
        found |= {} if settled is None else {"settled": settled}
        found |= {"count": 2**70, "held": 0, "as_of": at} | more
        return Response(200, json.dumps(found).encode())

    return respond


CASES: dict[str, tuple[Any, Any]] = {
    "hold": (CALLS.hold("c", 5, "15m", TOKEN), answer("open")),
    "settle": (CALLS.settle(HOLD, 4), answer("settled", 4)),
    "release": (CALLS.release(HOLD), answer("released")),
    "extend": (CALLS.extend(HOLD, "15m"), answer("open")),
}


@pytest.mark.parametrize("name", CASES)
def test_a_lost_answer_is_retried(name: str) -> None:
    """With the same request, also after an answer that is about another hold."""
    call, done = CASES[name]
    busy, other = problem("store_unavailable", 503, "same_token"), answer("expired", hold="AAAA")
    script = Script([lost(), busy, other, done])
    found: Any = script.run(attempts(call, script.policy()))
    assert found.id == HOLD
    assert len(script.sent) == 4
    assert len({(each.request.path, each.request.body) for each in script.sent}) == 1


@pytest.mark.parametrize("name", CASES)
def test_an_end_is_definite_whatever_came_before(name: str) -> None:
    """What the lost attempt did is known: another end won."""
    call, _ = CASES[name]
    for end, kind in ((SETTLED, HoldSettledError), (RELEASED, HoldReleasedError)):
        for before in ([], [lost()]):
            script = Script([*before, end])
            with pytest.raises(kind):
                script.run(attempts(call, script.policy()))


@pytest.mark.parametrize("name", ["hold", "settle", "release"])
def test_what_is_not_known_is_kept_to_be_resolved(name: str) -> None:
    call, done = CASES[name]
    for answers in ([lost()], [lost(), UNKNOWN]):
        script = Script([*answers, lost()])
        policy = script.policy(**(NO_RETRIES if len(answers) == 1 else {}))
        with pytest.raises(UnknownOutcomeError, match=f"whether the token's {name} is") as caught:
            script.run(attempts(call, policy))
        stored = Unfinished.parse(str(caught.value.unfinished))
        assert stored == caught.value.unfinished == pickle.loads(pickle.dumps(stored))
        again = CALLS.resolve(stored)
        assert again.request == call.request
        script = Script([done])
        assert script.run(attempts(again, script.policy())).applied is True


def test_a_void_token_of_a_hold_is_replaced() -> None:
    void = problem("token_too_old", 410, "new_token", applied=False)
    script = Script([void, lost(), answer("open")])
    call = CALLS.hold("c", 5, "15m", None, Bounds(at_most=9))
    found = script.run(attempts(call, script.policy()))
    first, _, last = (each for each in script.bodies())
    tokens = [each.pop("idempotency_token") for each in (first, last)]
    assert first == last == {"amount": 5, "at_most": 9, "expires_in": "15m"}
    assert tokens[0] != tokens[1]
    assert found.id != HOLD


@pytest.mark.parametrize(
    "change",
    [
        {"hold": str(HoldId(TOKEN.derive("other"), "c"))},
        {"hold": "AAAA"},
        {"hold": None},
        {"counter": "d"},
        {"namespace": "other"},
        {"amount": 6},
        {"state": "settled", "ended_at": "2026-01-31T08:30:30.000250Z", "settled": 3},
        {"state": "closed"},
        {"expires_at": None},
        {"over": 1},
        {"held": None},
        {"count": "5"},
        {"as_of": "soon"},
    ],
    ids=str,
)
def test_an_answer_about_another_hold_is_none(change: dict[str, Any]) -> None:
    call, done = CASES["hold"]
    script = Script([answer("open", **change), done])
    assert script.run(attempts(call, script.policy())).id == HOLD
    assert len(script.sent) == 2


def test_a_settle_with_another_amount_is_none() -> None:
    call, done = CASES["settle"]
    script = Script([answer("settled", 5), answer("released"), done])
    assert script.run(attempts(call, script.policy())).settled == 4


@given(st.binary(min_size=16, max_size=16), st.integers(0, 2**47), st.text(min_size=1, max_size=9))
def test_the_id_of_a_hold_is_that_of_the_service(nonce: bytes, time_us: int, counter: str) -> None:
    try:
        CALLS.add(counter, 1, None)
    except InvalidParameterError:
        return
    text = str(HoldId(Token(nonce, time_us), counter))
    assert text == format_hold(ServiceHoldId(counter, ServiceToken(nonce, time_us)))
    assert HoldId.parse(text) == (Token(nonce, time_us), counter)


@given(
    st.text(), INT64, st.builds(Bounds, st.none() | INT64, st.none() | INT64), st.text(min_size=1)
)
def test_an_unfinished_hold_is_parsed_from_its_text(
    counter: str, amount: int, bounds: Bounds, expires_in: str
) -> None:
    adds = [Add(counter, amount, bounds)]
    unfinished = Unfinished.of("hold", "default", adds, "key:k", expires_in)
    assert Unfinished.parse(str(unfinished)) == unfinished
    assert unfinished.adds == adds


@pytest.mark.parametrize(
    "change",
    [
        {"operation": "hold"},
        {"operation": "hold", "expires_in": 7},
        {"expires_in": "15m"},
        {"operation": "settle", "token_text": "key:k"},
        {"operation": "release", "items": []},
        {"operation": "extend"},
    ],
    ids=str,
)
def test_other_unfinished_holds_are_refused(change: dict[str, Any]) -> None:
    text = json.dumps(
        json.loads(str(Unfinished("add", "default", (("c", 1),), str(TOKEN)))) | change
    )
    with pytest.raises(InvalidParameterError, match="not an Unfinished"):
        Unfinished.parse(text)


def test_an_expired_hold_is_an_error_of_its_own() -> None:
    call, _ = CASES["settle"]
    script = Script([problem("hold_expired", 410, "never", applied=False)])
    with pytest.raises(HoldExpiredError) as caught:
        script.run(attempts(call, script.policy()))
    assert (caught.value.applied, caught.value.retry) == (False, "never")
    bare = problem("hold_settled", 409, "never", applied=True, settled="7")
    with pytest.raises(HoldSettledError) as settled:
        call.result(bare)
    assert settled.value.settled is None


@pytest.mark.parametrize(("end", "operations"), [(lost(), []), (UNKNOWN, ["release"])], ids=str)
def test_a_settle_that_may_count_is_not_released(end: Any, operations: list[str]) -> None:
    """The release could win, and the cost would be lost."""
    script = Script([answer("open"), end, answer("released")])

    class Scripted(CounterClient):
        def _call(self, call: Any) -> Any:
            return script.run(attempts(call, script.policy(**NO_RETRIES)))

    with Scripted("http://127.0.0.1:9", options=OPTIONS) as client:
        with (
            pytest.raises(CounterError) as caught,
            client.hold("c", 5, expires_in="15m", token=TOKEN) as hold,
        ):
            hold.settle(4)
        assert isinstance(caught.value, UnknownOutcomeError) is not bool(operations)
    sent = [each.request.operation for each in script.sent]
    assert sent == ["hold", "settle", *operations]
