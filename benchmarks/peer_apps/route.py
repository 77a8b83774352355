"""The route of adds as one writes it with FastAPI: models for body and answer, a store behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol
from uuid import UUID

from fastapi import FastAPI
from pydantic import AwareDatetime, BaseModel


class Store(Protocol):
    """The store of a peer."""

    async def open(self) -> None:
        """Connect, and create its tables."""

    async def close(self) -> None:
        """Disconnect."""

    async def add(self, counter: str, token: UUID, delta: int) -> bool:
        """Count *delta* unless *token* was seen; whether it was new."""

    async def counts(self, counters: Sequence[str]) -> list[int]:
        """The count of each, 0 if there is none."""


class Nothing:
    """No store: each add is new."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    async def open(self) -> None:
        """There is nothing to connect to."""

    async def close(self) -> None:
        """There is nothing to disconnect from."""

    async def add(self, counter: str, token: UUID, delta: int) -> bool:
        """Count *delta*, whatever the token, so that it can be checked that work was done."""
        self._counts[counter] += delta
        return True

    async def counts(self, counters: Sequence[str]) -> list[int]:
        """The sum so far."""
        return [self._counts[name] for name in counters]


class Token(BaseModel):
    """The identity of an add that is sent again."""

    token: UUID
    generation_time: AwareDatetime


class AddBody(BaseModel):
    """The body of an add."""

    delta: int
    idempotency_token: Token


class Added(BaseModel):
    """The response to an add."""

    namespace: str
    counter: str
    delta: int
    event_time: AwareDatetime
    replayed: bool


class GetBody(BaseModel):
    """The body of a look at counts; *max_staleness* is ours, and all peers are exact."""

    counters: list[str]
    max_staleness: str | None = None


class Count(BaseModel):
    """The count of one counter."""

    counter: str
    count: int


class Counts(BaseModel):
    """The response to a look at counts."""

    results: list[Count]


def create_app(store: Store) -> FastAPI:
    """The application over *store*."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await store.open()
        yield
        await store.close()

    app = FastAPI(lifespan=lifespan)

    @app.post("/v1/namespaces/{namespace}/counters/{counter}/add")
    async def add(namespace: str, counter: str, body: AddBody) -> Added:
        token = body.idempotency_token
        is_new = await store.add(counter, token.token, body.delta)
        return Added(
            namespace=namespace,
            counter=counter,
            delta=body.delta,
            event_time=token.generation_time,
            replayed=not is_new,
        )

    @app.post("/v1/namespaces/{namespace}/batch/get")
    async def get(namespace: str, body: GetBody) -> Counts:
        found = await store.counts(body.counters)
        pairs = zip(body.counters, found, strict=True)
        return Counts(results=[Count(counter=name, count=count) for name, count in pairs])

    return app
