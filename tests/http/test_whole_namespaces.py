"""Lists by count and scrapes read a whole namespace: by pieces, in turns, and for a price."""

import asyncio
from typing import Any
from unittest.mock import patch

import httpx
import pytest

from counter import limits
from counter.api_keys import Scope
from counter.core.read import CountReader
from counter.errors import StoreUnavailableError
from tests.http.test_counts_as_metrics import PATH, counts_in
from tests.support.app import App
from tests.support.keys import hand_out
from tests.support.rest import Rest, fresh, item
from tests.support.waiting import eventually

LIST = "/v1/namespaces/default/counters?order=-count"
NAMES = [f"c{number}" for number in range(9)]


@pytest.fixture
def storage() -> str:
    """Nothing here depends on the store."""
    return "memory"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, most in (
        ("METRICS_PIECE_COUNTERS", 2),
        ("BATCH_ITEMS_MAX", 2),
        ("PAGE_ITEMS_MAX", 2),
    ):
        monkeypatch.setattr(limits, name, most)


async def fill(rest: Rest, app: App) -> None:
    token = fresh(app.clock.now_us())
    for place, name in enumerate(NAMES):
        await rest.batch_add([item(name, place % 4, token)])


class SlowReader:
    """A client of a scrape, by ASGI: each piece waits until it is let go."""

    def __init__(self, app: App, headers: dict[str, str]) -> None:
        self.text = ""
        self.sent = 0
        self.let_go = asyncio.Semaphore(0)
        scope = {
            "type": "http",
            "method": "GET",
            "path": PATH,
            "raw_path": PATH.encode(),
            "query_string": b"",
            "headers": [(name.lower().encode(), v.encode()) for name, v in headers.items()],
        }
        self.task = asyncio.ensure_future(app.application(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def _send(self, message: Any) -> None:
        self.sent += 1
        await self.let_go.acquire()
        self.text += message.get("body", b"").decode()

    async def read(self) -> str:
        """Read on to the end."""
        for _ in range(100):
            self.let_go.release()
        await self.task
        return self.text


async def test_a_client_that_reads_slowly_holds_one_piece_and_no_turn(app: App, rest: Rest) -> None:
    """Regression: each held the whole text, and all waited for each other's reads."""
    await fill(rest, app)
    reads: list[int] = []
    stored = CountReader.rolled_up

    async def counted(reader: CountReader, namespace: Any, counters: Any) -> Any:
        reads.append(len(counters))
        return await stored(reader, namespace, counters)

    with patch.object(CountReader, "rolled_up", counted):
        slow = [SlowReader(app, {}) for _ in range(10)]
        for each in slow:
            # The head of the response, that of the exposition, and the first piece.
            each.let_go.release()
            each.let_go.release()
        await eventually(lambda: _all(each.sent == 3 for each in slow), "a piece waits")
        assert reads == [2] * 10
        assert set(counts_in((await rest.http.get(PATH)).text)) == set(NAMES)
    texts = [await each.read() for each in slow]
    assert {frozenset(counts_in(text)) for text in texts} == {frozenset(NAMES)}
    assert all(text.endswith("\n# EOF\n") for text in texts)


async def _all(found: Any) -> bool:
    return all(found)


async def test_a_key_that_is_revoked_ends_a_scrape_that_is_not_whole(app: App, rest: Rest) -> None:
    await fill(rest, app)
    slow = SlowReader(app, await hand_out(app, Scope.READ))
    await eventually(lambda: _all([slow.sent]), "it begins")
    [key] = await app.store.keys.api_keys()
    with patch.object(app.application.keys, "find", lambda _: None):
        assert not (await slow.read()).endswith("# EOF\n")
    assert counts_in(slow.text) == {}
    assert key.revoked_at_us is None


async def test_a_store_that_fails_ends_a_scrape_that_is_not_whole(app: App, rest: Rest) -> None:
    await fill(rest, app)
    with patch.object(CountReader, "rolled_up", side_effect=StoreUnavailableError("gone")):
        answer = await rest.http.get(PATH)
    assert answer.status_code == 200
    assert "# EOF" not in answer.text


@pytest.mark.parametrize("path", [LIST, PATH])
async def test_a_namespace_is_read_by_one_request_at_a_time(
    path: str, app: App, rest: Rest
) -> None:
    """Regression: 100 lists held the counts of 10,000 counters each."""
    await fill(rest, app)
    busy, most = 0, 0
    heads = app.store.rollups.heads

    async def watched(*args: Any) -> Any:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        await asyncio.sleep(0)
        busy -= 1
        return await heads(*args)

    with patch.object(app.store.rollups, "heads", watched):
        answers = await asyncio.gather(*(rest.http.get(path) for _ in range(20)))
    assert {each.status_code for each in answers} == {200}
    assert most == 1


async def test_a_list_by_count_is_the_same_however_it_is_read(app: App, rest: Rest) -> None:
    """Only as many counts as are shown are kept between two batches."""
    await fill(rest, app)
    ordered = sorted(NAMES, key=lambda name: (-(int(name[1:]) % 4), name))
    path, seen = f"{LIST}&max_staleness=0s&limit=2", []
    page = ""
    while page is not None:
        body = (await rest.http.get(path + page)).json()
        seen += body["counters"]
        page = body["next_page"] and f"&page={body['next_page']}"
    assert seen == ordered


@pytest.mark.parametrize("path", [LIST, PATH])
async def test_bulk_reads_count_towards_the_rate_of_requests(
    path: str, app: App, rest: Rest
) -> None:
    """Regression: a list of 10,000 counters took as much as one of a counter."""
    await fill(rest, app)
    authorizer = app.application.pipeline.authorizer
    authorizer._now_s = lambda: app.clock.boottime_us() / limits.SECOND
    key = await hand_out(app, Scope.READ, requests_per_s=5.0)

    async def ask(target: str) -> httpx.Response:
        return await rest.http.get(target, headers=key)

    # Five pages of two counters: five requests, the whole second's.
    assert (await ask(path)).status_code == 200
    assert (await ask(f"{LIST}&prefix=c1")).json().get("code") == "rate_limited"
    app.clock.advance(limits.SECOND)
    # One page: one request.
    one = path + ("&" if "?" in path else "?") + "prefix=c1"
    assert [(await ask(one)).status_code for _ in range(6)] == [200] * 5 + [429]
