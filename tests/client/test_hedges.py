"""A second send of the same token, if the first response takes long."""

import asyncio
import json
import socket
import threading
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import pytest

from counter_client import (
    AsyncCounterClient,
    Attempt,
    CounterClient,
    CounterError,
    Options,
    UnknownOutcomeError,
)
from counter_client.calls import Request, Response
from counter_client.failures import UnreachableError
from counter_client.retrying import Answer, Budget, Send
from counter_client.sync import HedgingTransport
from counter_client.transport import AsyncTransport, SyncTransport
from tests.support.in_thread import Service
from tests.support.relay import Relay
from tests.support.virtual import virtually


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_hedge_answers_for_a_server_that_does_not_and_counts_once(
    kind: str, service: Service
) -> None:
    """The first base URL takes every request and answers none."""
    relay = Relay.before(service.url)
    seen: list[Attempt] = []
    options = Options(
        trust_env=False, hedge_after_s=0.02, attempt_timeout_s=30.0, on_attempt=seen.append
    )
    name = f"hedged-{uuid4()}"
    async with relay.listening():
        urls = [relay.url, service.url]
        relay.mute = True
        if kind == "sync":
            with CounterClient(urls, options=options) as threaded:
                await asyncio.to_thread(threaded.add, name, 3)
        else:
            async with AsyncCounterClient(urls, options=options) as client:
                await client.add(name, 3)
        relay.mute = False
    assert [(each.hedged, each.url, each.status) for each in seen] == [(True, service.url, 200)]
    with CounterClient(service.url, options=Options(trust_env=False)) as check:
        assert await asyncio.to_thread(lambda: check.get(name).count) == 3
        assert await asyncio.to_thread(lambda: len(list(check.events(name)))) == 1


class Timed(AsyncTransport):
    """Attempts that take as long as the test says, in virtual time. A negative status is that of a
    proxy's page."""

    def __init__(self, options: Options, seconds: list[float], statuses: list[int]) -> None:
        budget = Budget.of(options, 0.0)
        super().__init__(["http://one", "http://two"], None, options, budget)
        self.sent: list[int] = []
        self.bounds_s: list[float] = []
        self.cancelled: list[int] = []
        self._seconds = iter(seconds)
        self._statuses = iter(statuses)

    async def _once(self, send: Send, hedged: bool = False) -> Answer:
        self.sent.append(send.number)
        self.bounds_s.append(send.timeout_s)
        seconds, status = next(self._seconds), next(self._statuses)
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.cancelled.append(send.number)
            raise
        self._seen_s.append(seconds)
        body = str(send.number)
        if status >= 400:
            body = json.dumps({"code": "namespace_unknown", "retry": "never", "detail": body})
        return Response(abs(status), body.encode())


SEND = Send(Request("POST", "/", "add"), 60.0, 0)


def test_the_loser_is_cancelled() -> None:
    transport = Timed(Options(hedge_after_s=1.0), [10.0, 1.0], [200, 200])

    async def send() -> tuple[Answer, list[int]]:
        answer = await transport.send(SEND)
        # It has ended when the answer is there, not some time after.
        return answer, list(transport.cancelled)

    answer, cancelled = virtually(send())
    assert isinstance(answer, Response)
    assert (answer.body, transport.sent, cancelled) == (b"1", [0, 1], [0])
    # Both end at the same time: a call's deadline is the same with hedges.
    assert transport.bounds_s == [60.0, 59.0]


def test_a_quick_answer_is_not_hedged() -> None:
    transport = Timed(Options(hedge_after_s=1.0), [0.5], [200])
    virtually(transport.send(SEND))
    assert transport.sent == [0]


@pytest.mark.parametrize(
    ("operation", "statuses", "status", "cancelled"),
    [
        # A write is refused by one, and the other may count it.
        ("add", [200, 503], 200, []),
        ("add", [200, 404], 200, []),
        ("add", [503, 404], 503, []),
        ("add", [503, 501], 503, []),
        ("add", [200, 501], 200, []),
        ("add", [404, 404], 404, []),
        # What a proxy answers says nothing of what the service did.
        ("add", [-502, 404], 502, []),
        ("add", [-403, 404], 403, []),
        ("add", [404, -403], 403, []),
        # A definite answer about the token holds for both of them.
        ("add", [200, 409], 409, [0]),
        ("add", [200, 410], 410, [0]),
        # Nothing becomes of a read.
        ("get", [200, 404], 404, [0]),
        ("get", [200, 501], 501, [0]),
    ],
)
def test_a_refusal_of_a_hedge_does_not_end_the_first_attempt(
    operation: str, statuses: list[int], status: int, cancelled: list[int]
) -> None:
    """Regressions: the 404 of a hedge cancelled the first attempt, which counted, and was believed
    although a proxy had answered the first attempt."""

    transport = Timed(Options(hedge_after_s=1.0), [10.0, 1.0], statuses)
    send = SEND._replace(request=Request("POST", "/", operation))
    answer = virtually(transport.send(send))
    assert isinstance(answer, Response)
    assert (answer.status, transport.cancelled) == (status, cancelled)


def test_a_cancelled_call_leaves_no_attempt_running() -> None:
    async def run() -> None:
        transport = Timed(Options(hedge_after_s=1.0), [10.0, 10.0], [200, 200])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await transport.send(SEND)
        assert sorted(transport.cancelled) == [0, 1]

    virtually(run())


def test_the_delay_follows_the_response_times() -> None:
    """Not before enough were seen; then the next one after the slowest 5 of 100."""

    async def run() -> None:
        usual_s = [0.01 * number for number in range(1, 21)]
        transport = Timed(Options(hedge_after_s="p95"), [*usual_s, 0.1, 5.0, 0.01], [200] * 23)
        for _ in range(21):
            await transport.send(SEND)
        assert 1 not in transport.sent
        await transport.send(SEND)
        assert transport.sent[-2:] == [0, 1]

    virtually(run())


def test_hedges_come_out_of_the_budget_of_retries() -> None:
    async def run() -> None:
        options = Options(hedge_after_s=1.0, retries_at_once=2, retries_per_s=0)
        transport = Timed(options, [5.0] * 20, [200] * 20)
        for _ in range(6):
            await transport.send(SEND)
        assert transport.sent.count(1) == 2

    virtually(run())


def test_a_client_that_is_closed_leaves_no_thread_waiting() -> None:
    """Regression: its event loop ended with their attempts in it, and they waited for ever."""
    ended: list[Exception] = []

    def add() -> None:
        try:
            client.add("c")
        except CounterError as error:
            ended.append(error)

    threads = [threading.Thread(target=add, daemon=True) for _ in range(5)]
    with socket.create_server(("127.0.0.1", 0), backlog=50) as mute, ExitStack() as open_ones:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        client = CounterClient(url, options=Options(trust_env=False, hedge_after_s=0.01))
        for each in threads:
            each.start()
        for _ in range(2 * len(threads)):
            connection = open_ones.enter_context(mute.accept()[0])
            assert connection.recv(1)
        client.close()
        for each in threads:
            each.join(timeout=100)
    assert [type(each) for each in ended] == [UnknownOutcomeError] * 5


def test_a_call_in_flight_is_answered_before_the_client_is_closed() -> None:
    """Otherwise its thread would wait for ever for a stopped event loop."""
    sends, ended = threading.Event(), []

    class Slow(Timed):
        async def send(self, send: Send) -> Answer:
            sends.set()
            try:
                return await super().send(send)
            finally:
                for _ in range(100):
                    await asyncio.sleep(0)
                ended.append(True)

    transport = HedgingTransport(lambda: Slow(Options(hedge_after_s=1.0), [3_600.0], [200]))
    answers: list[Answer] = []
    caller = threading.Thread(target=lambda: answers.append(transport.send(SEND)), daemon=True)
    caller.start()
    sends.wait()
    transport.close()
    assert ended == [True]
    caller.join()
    assert isinstance(answers[0], UnreachableError)


def test_work_is_given_to_the_loop_under_the_lock_that_closing_takes() -> None:
    """Otherwise it may come to a loop that is stopped, and never end."""
    transport = HedgingTransport(lambda: Timed(Options(), [0.0], [200]))
    submit, held = asyncio.run_coroutine_threadsafe, []

    def noted(*arguments: Any) -> Any:
        held.append(transport._lock.locked())
        return submit(*arguments)

    with patch.object(asyncio, "run_coroutine_threadsafe", noted):
        transport.send(SEND)
        transport.close()
    assert held == [True, True]


def test_one_thread_of_a_forked_process_makes_its_pool() -> None:
    transport = SyncTransport(["http://127.0.0.1:9"], None, Options())
    make, held = transport._make_client, []
    pid, pool = transport._pool
    transport._pool = -1, pool

    def noted() -> Any:
        held.append(transport._beginning.here().locked())
        return make()

    with patch.object(transport, "_make_client", noted):
        assert transport._client() is transport._client() is not pool
    assert held == [True]
    assert transport._pool[0] == pid
    transport.close()
    pool.close()
