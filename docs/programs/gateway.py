"""A gateway that keeps a budget for each team, in cents, in front of a model that bills each call.

Before a call it holds the most that the call can cost; after it, it settles what the call has cost.
``uvicorn gateway:app`` starts it, with ``COUNTER_URL`` and ``MODEL_URL`` in the environment.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

import httpx
from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel, PositiveInt

from counter_client import (
    AsyncCounterClient,
    BoundReachedError,
    CounterError,
    HoldExpiredError,
    HoldReleasedError,
    HoldSettledError,
    Options,
    Token,
)

BUDGET = int(os.environ.get("BUDGET", "100000"))
MODEL_URL = os.environ.get("MODEL_URL", "http://127.0.0.1:9000")
#: A call of the model may take the first of these. A hold lasts much longer; after the last of
#: these its call has ended, or its gateway.
CALL_S, HOLD_S, LEFT_S = 2, 60, 6


class RefusedError(Exception):
    """There is not enough left of the budget."""


class Hold(Protocol):
    """What is held for one call. Leaving its ``async with`` releases it, unless it was settled."""

    @property
    def id(self) -> str: ...

    async def settle(self, cost: int, /) -> object: ...


class Budget(Protocol):
    """Where the budgets are kept."""

    def hold(self, team: str, call: str, most: int) -> AbstractAsyncContextManager[Hold]: ...

    async def settle_left(self, model: Model) -> None: ...


class Model:
    """The client of the model."""

    def __init__(self) -> None:
        self._http = httpx.AsyncClient(base_url=MODEL_URL)

    async def call(self, call: str, prompt: dict[str, Any]) -> int:
        """Make a call, or get the answer that it got before; return what it has cost."""
        async with asyncio.timeout(CALL_S):
            response = await self._http.post(f"/calls/{call}", json=prompt)
            return int(response.raise_for_status().json()["cost"])

    async def stop(self, hold: str) -> int:
        """Stop a call, if it still runs; return what it has cost, which is final."""
        while True:
            with suppress(httpx.HTTPError):
                response = await self._http.post(f"/holds/{hold}/stop")
                return int(response.raise_for_status().json()["cost"])


class Holds:
    """Budgets as counters of the service."""

    def __init__(self, client: AsyncCounterClient) -> None:
        self._client = client

    @asynccontextmanager
    async def hold(self, team: str, call: str, most: int) -> AsyncIterator[Hold]:
        """Hold *most*. A call that is sent again has the same key, and gets the same hold."""
        key = Token.from_key(f"{team}/{call}")
        try:
            async with self._client.hold(
                team, most, expires_in=f"{HOLD_S}s", at_most=BUDGET, token=key
            ) as hold:
                yield hold
        except BoundReachedError as error:
            raise RefusedError(error.detail) from error

    async def settle(self, team: str, hold: str, cost: int) -> bool:
        """Count what a call has cost, once; return whether its hold had ended before."""
        try:
            await self._client.settle_hold(hold, cost)
        except (HoldReleasedError, HoldExpiredError):
            await self._client.add(team, cost, token=Token.from_key(hold))
            return True
        return False

    async def settle_left(self, model: Model) -> None:
        """Settle the calls of gateways that have died. What cost nothing is left to expire."""
        left = datetime.now(UTC) + timedelta(seconds=HOLD_S - LEFT_S)
        async for team in self._client.counters():
            async for hold in self._client.holds(team):
                if hold.expires_at is None or hold.expires_at > left:
                    break
                if cost := await model.stop(hold.id):
                    await self.settle(team, hold.id, cost)


class Call(BaseModel):
    """What a client asks for: the most that it can cost, and the prompt."""

    most: PositiveInt
    prompt: dict[str, Any]


async def spend(budget: Budget, model: Model, team: str, call: str, asked: Call) -> int:
    """Make a call within the budget of *team*; return what it has cost."""
    prompt = {**asked.prompt, "team": team}
    try:
        async with budget.hold(team, call, asked.most) as hold:
            try:
                cost = await model.call(f"{team}-{call}", {**prompt, "hold": hold.id})
            except BaseException:
                # It failed, took too long, or its client is gone. It may be billed nevertheless.
                if cost := await model.stop(hold.id):
                    await hold.settle(cost)
                raise
            await hold.settle(cost)
            return cost
    except HoldSettledError:
        # The call was made before, and the answer was lost.
        return await model.call(f"{team}-{call}", {**prompt, "hold": ""})


async def unless_gone(request: Request, work: Coroutine[Any, Any, int]) -> int:
    """Return the result of *work*, which is cancelled if the client closes its connection."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.create_task(work), asyncio.create_task(gone())
    await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    working.cancel()
    watching.cancel()
    return await working


def gateway(opened: Callable[[], AbstractAsyncContextManager[Budget]]) -> FastAPI:
    """Return the application."""
    model = Model()

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[dict[str, Budget]]:
        async with opened() as budget, asyncio.TaskGroup() as tasks:
            settling = tasks.create_task(settle_left(budget, model))
            yield {"budget": budget}
            settling.cancel()

    app = FastAPI(lifespan=life)

    @app.post("/teams/{team}/calls/{call}")
    async def answer(team: str, call: str, asked: Call, request: Request) -> dict[str, int]:
        try:
            work = spend(request.state.budget, model, team, call, asked)
            return {"cost": await unless_gone(request, work)}
        except RefusedError as error:
            raise HTTPException(402, str(error)) from error
        except (httpx.HTTPError, TimeoutError) as error:
            raise HTTPException(502, "the model failed") from error
        except (HoldReleasedError, HoldExpiredError) as error:
            raise HTTPException(410, "this call has ended: send another one") from error
        except CounterError as error:
            raise HTTPException(503, "send the same call again") from error
        except asyncio.CancelledError as error:
            raise HTTPException(499, "the client is gone") from error

    return app


async def settle_left(budget: Budget, model: Model) -> None:
    """Settle, again and again, what gateways that died have left."""
    while True:
        with suppress(CounterError):
            await budget.settle_left(model)
        await asyncio.sleep(5)


@asynccontextmanager
async def holds() -> AsyncIterator[Holds]:
    """Connect to the service."""
    url = os.environ.get("COUNTER_URL", "http://127.0.0.1:8080")
    # Retries are limited, for outages, to fewer than a bad network needs.
    options = Options(retries_at_once=1e6)
    async with AsyncCounterClient(url, "budgets", options=options) as client:
        yield Holds(client)


app = gateway(holds)
