"""A count as it changes: its first value, each change, and its end."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from counter.api_keys import Scope
from counter.limits import SECOND
from tests.support.app import App, running, store_that_fails
from tests.support.keys import hand_out
from tests.support.problems import assert_problem
from tests.support.rest import Rest, fresh
from tests.support.waiting import eventually

PATH = "/v1/namespaces/default/counters/c/live"


@pytest.fixture
def storage() -> str:
    """Nothing here depends on the store."""
    return "memory"


class Watcher:
    """A client of one stream, by ASGI: httpx would wait for the end of all."""

    def __init__(
        self, app: App, path: str, headers: dict[str, str], method: str, client: object
    ) -> None:
        self.text = ""
        self.status = 0
        self.gone = asyncio.Event()
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "client": client,
            "headers": [(n.lower().encode(), v.encode()) for n, v in headers.items()],
        }
        self.task = asyncio.ensure_future(app.application(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        self.text += message.get("body", b"").decode()

    @property
    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """Kind and data of all that came."""
        blocks = [each for each in self.text.split("\n\n") if each.startswith("event: ")]
        pairs = [each.removeprefix("event: ").split("\ndata: ") for each in blocks]
        return [(kind, json.loads(data)) for kind, data in pairs]

    @property
    def counts(self) -> list[int]:
        return [data["count"] for kind, data in self.events if kind == "count"]

    async def until(self, count: int) -> None:
        """Wait for so many events."""
        await eventually(lambda: len(self.events) >= count, f"{count} events of {self.text!r}")

    async def ended(self) -> None:
        """Wait for the end of the stream."""
        await asyncio.wait_for(self.task, 30)


@asynccontextmanager
async def watching(
    app: App,
    path: str = PATH,
    headers: dict[str, str] | None = None,
    method: str = "GET",
    client: object = None,
) -> AsyncIterator[Watcher]:
    app.application.live.look_s = 0.001
    watcher = Watcher(app, path, headers or {}, method, client)
    try:
        yield watcher
    finally:
        watcher.gone.set()
        await watcher.ended()


async def test_a_stream_reports_the_count_and_then_each_change(rest: Rest, app: App) -> None:
    async with watching(app) as watcher:
        for count in (1, 2):
            await watcher.until(count)
            app.clock.advance(SECOND)
            await rest.add("c", 1, fresh(app.clock.now_us()))
        await watcher.until(3)
    assert watcher.status == 200
    assert watcher.counts == [0, 1, 2]
    assert set(watcher.events[0][1]) == {"namespace", "counter", "count", "as_of", "accuracy"}


async def test_watchers_of_one_counter_share_its_reads(app: App) -> None:
    live = app.application.live
    async with watching(app) as one, watching(app) as other:
        await one.until(1)
        await other.until(1)
        assert live.streams.open == 2
        assert len(live._watches) == 1
    assert (live.streams.open, live._watches) == (0, {})


async def test_the_number_of_streams_is_bounded(rest: Rest, app: App) -> None:
    app.application.live.streams.most = 1
    async with watching(app) as watcher:
        await watcher.until(1)
        answer = await rest.http.get(PATH)
        assert_problem(answer, "overloaded", "1")
    app.application.live.stream_s = 0
    assert (await rest.http.get(PATH)).status_code == 200


@pytest.mark.parametrize("share", ["key", "address"])
async def test_neither_a_key_nor_an_address_takes_all_streams(tmp_path: Path, share: str) -> None:
    """A stream that ends frees its own place only."""
    async with running("memory", tmp_path) as app:
        live = app.application.live
        live.streams.by_key.most = 2 if share == "key" else 0
        live.streams.by_address.most = 2 if share == "address" else 0
        greedy = await hand_out(app, Scope.READ, "default")
        other = await hand_out(app, Scope.READ, "default")
        client = ("192.0.2.1", 1) if share == "address" else None
        async with watching(app, headers=greedy, client=client) as first:
            async with watching(app, headers=greedy, client=client) as second:
                await first.until(1)
                await second.until(1)
                async with watching(app, headers=greedy, client=client) as third:
                    await third.ended()
                assert third.status == 503
                assert "has 2 live streams of this process already" in third.text
                async with watching(app, headers=other, client=("192.0.2.2", 1)) as fourth:
                    await fourth.until(1)
                assert fourth.status == 200
            async with watching(app, headers=greedy, client=client) as fifth:
                await fifth.until(1)
            assert fifth.status == 200
        assert live.streams.open == 0
        assert live.streams.by_key._held == live.streams.by_address._held == {}


async def test_a_stream_ends_with_the_process(app: App) -> None:
    async with watching(app) as watcher:
        await watcher.until(1)
        app.application.drain()
        await watcher.ended()
    assert watcher.events[-1] == ("end", {})
    assert_problem(await app.http.get(PATH), "overloaded")


async def test_a_head_asks_for_no_stream(app: App) -> None:
    async with watching(app, method="HEAD") as watcher:
        await watcher.ended()
    assert (watcher.status, watcher.text) == (200, "")
    assert app.application.live.streams.open == 0


async def test_a_store_in_trouble_is_reported_and_so_is_its_end(rest: Rest, app: App) -> None:
    async with watching(app) as watcher:
        await watcher.until(1)
        with store_that_fails(app, "heads"), store_that_fails(app, "tails"):
            await watcher.until(2)
        await watcher.until(3)
    assert [kind for kind, _ in watcher.events] == ["count", "problem", "count"]
    assert watcher.events[1][1]["code"] == "store_unavailable"


async def test_a_stream_ends_with_the_namespace(rest: Rest, app: App) -> None:
    spare = rest.within("spare")
    await spare.create("ACCURATE")
    async with watching(app, spare.path("c", "live")) as watcher:
        await watcher.until(1)
        await rest.http.delete(spare.path())
        await watcher.ended()
    assert watcher.events[-1][1]["code"] == "namespace_unknown"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda _: None, "key_invalid"),
        (lambda key: replace(key, namespaces=("other",)), "namespace_unknown"),
        (lambda key: replace(key, scope=0), "namespace_unknown"),
    ],
    ids=["revoked", "other namespaces", "no scope"],
)
async def test_a_key_that_loses_its_right_ends_its_streams(
    tmp_path: Path, change: Any, code: str
) -> None:
    async with running("memory", tmp_path) as app:
        header, keys = await hand_out(app, Scope.READ, "default"), app.application.keys
        changed = change(keys.find(header["Authorization"].removeprefix("Bearer ").encode()))
        async with watching(app, headers=header) as watcher:
            await watcher.until(1)
            with patch.object(keys, "find", return_value=changed):
                await watcher.ended()
        assert watcher.events[-1][1]["code"] == code
        assert (await app.http.get(PATH)).status_code == 401


async def test_silence_is_broken_by_a_comment(tmp_path: Path) -> None:
    async with running("memory", tmp_path) as app:
        live = app.application.live
        seconds = iter(range(10**9))
        with (
            patch.object(live, "_now_s", lambda: float(next(seconds))),
            patch("api.routes.live._AGAIN_S", 1e9),
        ):
            async with watching(app) as watcher:
                await eventually(
                    lambda: watcher.text.count(": still here\n\n") >= 2, "two heartbeats"
                )
        assert len(watcher.counts) == 1
