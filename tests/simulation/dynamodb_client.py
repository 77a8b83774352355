"""The client of the SDK, and the network between it and the simulated DynamoDB."""

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping
from contextvars import copy_context
from functools import partial
from typing import Any, Final

from botocore.exceptions import ConnectionClosedError, ReadTimeoutError, WaiterError

from tests.simulation.dynamodb_server import OPERATIONS, Done, Server, error_of
from tests.simulation.loop import run_in
from tests.simulation.weather import UNMET, Met

_URL: Final = "https://dynamodb.simulated"
Meeting = Callable[[str, Mapping[str, Any]], Met]


class Client:
    """Sends requests, each once. *meet* is called with each before it is sent."""

    def __init__(self, server: Server, timeout_us: int, meet: Meeting = lambda *_: UNMET) -> None:
        self._server, self._timeout_us, self._meet = server, timeout_us, meet

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        if name not in OPERATIONS:
            raise AttributeError(name)
        return partial(self._send, name)

    def get_waiter(self, name: str) -> "_Waiter":
        """Return a waiter for a table."""
        if name != "table_exists":
            raise NotImplementedError(name)
        return _Waiter(self)

    async def _send(self, operation: str, **request: Any) -> Any:
        if operation == "transact_write_items":
            # The SDK makes one for each call.
            request.setdefault("ClientRequestToken", os.urandom(16).hex())
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def settle(result: Any) -> None:
            if answered.done():
                return
            if isinstance(result, Exception):
                answered.set_exception(result)
            else:
                answered.set_result(result)

        # In the process that asked: when it is awake, and never if it crashed.
        finish = partial(run_in, copy_context(), settle)
        met = self._meet(operation, request)
        if not met.vanishes:
            _Passage(self._server, operation, request, finish).begin(self._timeout_us, met)
        return await answered


class _Waiter:
    """Waits until a table can be used, as the SDK's does."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def wait(self, *, TableName: str, WaiterConfig: Mapping[str, int]) -> None:
        """Raise WaiterError if it takes too long."""
        for _ in range(WaiterConfig["MaxAttempts"]):
            try:
                answer = await self._client.describe_table(TableName=TableName)
            except Exception as error:
                response = getattr(error, "response", None)
                if response is None:
                    raise
                code = response["Error"]["Code"]
                if code != "ResourceNotFoundException":
                    raise WaiterError("table_exists", code, response) from error
            else:
                if answer["Table"]["TableStatus"] == "ACTIVE":
                    return
            await asyncio.sleep(WaiterConfig["Delay"])
        raise WaiterError("table_exists", "Max attempts exceeded", {})


class _Passage:
    """A request on its way, and its response: either may be lost, late or repeated."""

    def __init__(
        self, server: Server, operation: str, request: Mapping[str, Any], finish: Done
    ) -> None:
        self._server, self._operation, self._request = server, operation, request
        self._finish, self._weather = finish, server.weather
        self._loses_reply = self._fails = False

    def begin(self, timeout_us: int, met: Met) -> None:
        """Send the request, which the client gives up after *timeout_us*."""
        server, weather = self._server, self._weather
        server.statements += 1
        if not weather.is_calm or met is not UNMET:
            timed_out = ReadTimeoutError(endpoint_url=_URL)
            server.at(timeout_us, self._finish, timed_out)
            if weather.happens(weather.lost_request):
                self._lose()
                return
            self._loses_reply = met.loses or weather.happens(weather.lost_reply)
            # A compare-and-set of unknown outcome, or any write.
            chance = (
                weather.abandoned
                if "batch" in self._operation
                else max(weather.abandoned, weather.unreported)
            )
            self._fails = met.abandons or weather.happens(chance)
            if self._fails and weather.random.random() < 0.5:
                server.at(weather.delay(), self._reply, {})
                return
        delay_us = met.hold_us + weather.delay()
        if weather.happens(weather.repeated):
            # A proxy sends it twice, and passes on the response to either.
            replies = [self._reply, self._ignore]
            weather.random.shuffle(replies)
            server.at(delay_us + weather.later(), self._arrive, replies.pop())
            server.at(delay_us, self._arrive, replies.pop())
            server.reach("sent-twice")
            return
        server.at(delay_us, self._arrive, self._reply)

    def _arrive(self, reply: Done) -> None:
        self._server.execute(self._operation, self._request, reply)

    def _ignore(self, _: Any) -> None:
        """Have no one get a response."""

    def _reply(self, result: Any) -> None:
        """Send *result* back."""
        server, weather = self._server, self._weather
        if self._loses_reply:
            self._lose()
            return
        if self._fails and not isinstance(result, NotImplementedError):
            result = error_of(self._operation, "InternalServerError")
        server.at(weather.delay(), self._finish, result)

    def _lose(self) -> None:
        """Close the connection, or answer nothing."""
        if self._weather.random.random() < 0.5:
            closed = ConnectionClosedError(endpoint_url=_URL)
            self._server.at(self._weather.delay(), self._finish, closed)
