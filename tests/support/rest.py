"""The REST API as a test speaks it: one method a route, the response as it came."""

import json
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import httpx

import counter_client
from counter.types import Token
from tests.support.times import rfc3339

Json = dict[str, Any]


def escaped(name: str) -> str:
    """A counter's name as one segment of a path, dots included: ``..`` would be folded away."""
    return quote(name, safe="").replace(".", "%2E")


def on_wire(token: Token) -> Json:
    """A token as a body carries it."""
    return {
        "token": str(uuid.UUID(bytes=token.nonce)),
        "generation_time": rfc3339(token.generation_time_us),
    }


def fresh(time_us: int) -> Token:
    return Token(uuid.uuid4().bytes, time_us)


def new_token() -> Token:
    """A unique token of now."""
    return fresh(time.time_ns() // 1_000)


def derive(parent: Token, label: str) -> Token:
    """The token of a step of *parent*'s work, as clients derive it."""
    return Token(*counter_client.Token(*parent).derive(label))


def uuid7(time_us: int, *, tail: int | None = None) -> str:
    """A UUIDv7 of *time_us* by RFC 9562; *tail* fixes the random bits."""
    milliseconds, rest = divmod(time_us, 1_000)
    fraction = -(-rest * 4096 // 1_000)
    random = (uuid.uuid4().int if tail is None else tail) & (2**62 - 1)
    value = milliseconds << 80 | 7 << 76 | fraction << 64 | 2 << 62 | random
    return str(uuid.UUID(int=value))


def item(counter: str, delta: int, token: Token) -> Json:
    """One item of a batch add."""
    return {"counter": counter, "delta": delta, "idempotency_token": on_wire(token)}


class Rest:
    """One namespace of a service, over whatever transport *http* has."""

    def __init__(self, http: httpx.AsyncClient, namespace: str = "default") -> None:
        self.http = http
        self.namespace = namespace

    def within(self, namespace: str) -> "Rest":
        return Rest(self.http, namespace)

    def path(self, counter: str | None = None, verb: str = "") -> str:
        """``/v1/namespaces/NS[/counters/COUNTER][/VERB]``."""
        start = f"/v1/namespaces/{self.namespace}"
        if counter is not None:
            start += f"/counters/{escaped(counter)}"
        return f"{start}/{verb}" if verb else start

    async def post(
        self, path: str, body: Any = None, *, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        return await self.http.post(path, json=body, headers=headers)

    async def raw(
        self, path: str, content: bytes, *, content_type: str | None = "application/json"
    ) -> httpx.Response:
        """A POST of exactly these bytes."""
        headers = {} if content_type is None else {"content-type": content_type}
        return await self.http.post(path, content=content, headers=headers)

    async def add(
        self,
        counter: str,
        delta: int = 1,
        token: Token | None = None,
        *,
        key: str | None = None,
        verb: str = "add",
    ) -> httpx.Response:
        body: Json = {"delta": delta}
        if token is not None:
            body["idempotency_token"] = on_wire(token)
        headers = None if key is None else {"idempotency-key": key}
        return await self.post(self.path(counter, verb), body, headers=headers)

    async def clear(
        self, counter: str, token: Token | None = None, *, key: str | None = None
    ) -> httpx.Response:
        body = {} if token is None else {"idempotency_token": on_wire(token)}
        headers = None if key is None else {"idempotency-key": key}
        return await self.post(self.path(counter, "clear"), body, headers=headers)

    async def delete(
        self, counter: str, token: Token | None = None, *, key: str | None = None
    ) -> httpx.Response:
        """Delete a counter: with a token as the body, or with a key and no body."""
        headers = {} if key is None else {"idempotency-key": key}
        body = None if token is None else {"idempotency_token": on_wire(token)}
        return await self.http.request("DELETE", self.path(counter), json=body, headers=headers)

    async def get(self, counter: str, max_staleness: str | None = None) -> httpx.Response:
        params = {} if max_staleness is None else {"max_staleness": max_staleness}
        return await self.http.get(self.path(counter), params=params)

    async def count(self, counter: str, max_staleness: str | None = "0s") -> int:
        """The count alone, by default an accurate one."""
        answer = await self.get(counter, max_staleness)
        assert answer.status_code == 200, answer.text
        count = answer.json()["count"]
        assert isinstance(count, int)
        return count

    async def batch_add(self, items: Sequence[Json]) -> httpx.Response:
        return await self.post(self.path(verb="batch/add"), {"items": items})

    async def batch_lines(self, lines: bytes) -> list[Json]:
        """The responses to a batch of adds that is written in lines."""
        kind = "application/x-ndjson"
        answer = await self.raw(self.path(verb="batch/add"), lines, content_type=kind)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith(kind)
        return [json.loads(line) for line in answer.text.splitlines()]

    async def batch_get(self, counters: Sequence[str], max_staleness: str = "0s") -> httpx.Response:
        body = {"counters": counters, "max_staleness": max_staleness}
        return await self.post(self.path(verb="batch/get"), body)

    async def cancel(
        self, counter: str, delta: int | None, token: Token, *, operation: str = "add"
    ) -> httpx.Response:
        """Cancel an add; a clear or a delete has no delta."""
        body: Json = {"operation": operation, "idempotency_token": on_wire(token)}
        if delta is not None:
            body["delta"] = delta
        return await self.post(self.path(counter, "cancel"), body)

    async def cancel_atomic(self, items: Iterable[tuple[str, int]], token: Token) -> httpx.Response:
        pairs = [{"counter": name, "delta": delta} for name, delta in items]
        body = {"items": pairs, "idempotency_token": on_wire(token)}
        return await self.post(self.path(verb="atomic/cancel"), body)

    async def atomic_add(
        self, items: Iterable[tuple[str, int]], token: Token | None, *, key: str | None = None
    ) -> httpx.Response:
        body: Json = {"items": [{"counter": name, "delta": delta} for name, delta in items]}
        if token is not None:
            body["idempotency_token"] = on_wire(token)
        headers = None if key is None else {"idempotency-key": key}
        return await self.post(self.path(verb="atomic/add"), body, headers=headers)

    async def events(self, counter: str, **params: str | int) -> list[Json]:
        """All events of *counter*, latest first, over as many pages as they take."""
        found: list[Json] = []
        query = dict(params)
        while True:
            answer = await self.http.get(self.path(counter, "events"), params=query)
            assert answer.status_code == 200, answer.text
            found += answer.json()["events"]
            if answer.json()["next_page"] is None:
                return found
            query["page"] = answer.json()["next_page"]

    async def names(self, **params: str | int) -> list[str]:
        """All counters of the namespace in the order of the listing."""
        found: list[str] = []
        query = dict(params)
        while True:
            answer = await self.http.get(self.path(verb="counters"), params=query)
            assert answer.status_code == 200, answer.text
            found += answer.json()["counters"]
            if answer.json()["next_page"] is None:
                return found
            query["page"] = answer.json()["next_page"]

    async def create(self, counter_type: str = "ACCURATE", **settings: Any) -> httpx.Response:
        """Make the namespace."""
        return await self.http.put(self.path(), json={"counter_type": counter_type, **settings})
