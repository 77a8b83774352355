"""A relay before DynamoDB that makes faults: it throttles, loses, holds and repeats requests."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from enum import Enum

import httpx
from aiohttp import web

_THROTTLED = '{"__type":"com.amazonaws.dynamodb.v20120810#ThrottlingException","message":"slow"}'


class Fault(Enum):
    """The fate of a request."""

    THROTTLE = "it is refused, and not done"
    LOSE = "it does not arrive, and its connection is closed"
    LOSE_ANSWER = "it is done, and its connection is closed"
    REPEAT = "it is done twice, and the second answer is passed on"
    HOLD = "it arrives when the relay lets go of it"


class Relay:
    """Passes requests on. *fault* is made of those operations that *hits* returns true for."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self.url = ""
        self.fault: Fault | None = None
        self.hits: Callable[[str], bool] = lambda operation: operation == "PutItem"
        #: How many requests had a fault.
        self.hit = 0
        #: How many requests the engine has answered.
        self.passed = 0
        self.release = asyncio.Event()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        operation = request.headers["X-Amz-Target"].partition(".")[2]
        body = await request.read()
        fault = self.fault if self.hits(operation) else None
        self.hit += fault is not None
        if fault is Fault.THROTTLE:
            return web.Response(status=400, text=_THROTTLED, content_type="application/json")
        if fault is Fault.HOLD:
            await self.release.wait()
        if fault is not Fault.LOSE:
            answer = await self._send(request, body)
            if fault is Fault.REPEAT:
                answer = await self._send(request, body)
            if fault is not Fault.LOSE_ANSWER:
                headers = {"Date": answer.headers.get("date", "")}
                kind = "application/x-amz-json-1.0"
                return web.Response(
                    status=answer.status_code,
                    body=answer.content,
                    content_type=kind,
                    headers=headers,
                )
        assert request.transport is not None
        request.transport.abort()
        raise asyncio.CancelledError

    async def _send(self, request: web.Request, body: bytes) -> httpx.Response:
        names = ("X-Amz-Target", "Authorization", "X-Amz-Date", "Content-Type")
        headers = {name: request.headers[name] for name in names}
        answer = await self._client.post(self._engine, content=body, headers=headers)
        self.passed += 1
        return answer

    @asynccontextmanager
    async def open(self) -> AsyncIterator["Relay"]:
        """Serve on a free port."""
        app = web.Application()
        app.router.add_route("*", "/", self._pass)
        # A held request goes on when its client has given up.
        runner = web.AppRunner(app, handler_cancellation=False)
        await runner.setup()
        async with httpx.AsyncClient(trust_env=False, timeout=30) as self._client:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield self
            self.release.set()
            await runner.cleanup()
