"""The checks that the practice of idempotent services asks for; docs/guarantees.md lists them."""

import asyncio
import random
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest

from counter.errors import StoreUnavailableError
from counter.types import Token
from tests.support.app import App
from tests.support.problems import assert_problem
from tests.support.rest import Rest, derive, fresh, item
from tests.support.times import DAY, HOUR, MINUTE, SECOND

#: Duplicates at once. Fewer over memory: the queue before it is the same.
STORM = {"sqlite": 10_000, "memory": 1_000}
KEYS = 1_200
#: Less than the retention of 7 days, its last slice and the margin of a recount.
DAYS = (1, 3, 6)


async def outcomes(rest: Rest) -> dict[str, int]:
    """The outcomes of adds in the metrics."""
    text = (await rest.http.get("/metrics")).text
    found = re.findall(r'^counter_adds_total{outcome="(\w+)"} (\S+)$', text, re.MULTILINE)
    return {outcome: int(float(number)) for outcome, number in found}


async def test_a_retry_storm_counts_once(storage: str, rest: Rest, app: App) -> None:
    """So many duplicates of one token at once that most of them wait in a queue."""
    token = fresh(app.clock.now_us())
    answers = await asyncio.gather(*(rest.add("c", 7, token) for _ in range(STORM[storage])))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["event_time"] for answer in answers}) == 1
    assert await rest.count("c") == 7
    numbers = await outcomes(rest)
    assert sum(numbers.values()) == STORM[storage]
    assert numbers["conflict"] == numbers["voided"] == 0
    await app.roll_up_after(MINUTE)
    assert await rest.count("c", "1h") == 7


async def test_a_storm_of_late_duplicates_gets_one_answer(
    storage: str, rest: Rest, app: App
) -> None:
    """None of it was ever written: all get this outcome, and none is counted."""
    token = fresh(app.clock.now_us())
    app.clock.advance(MINUTE)
    number = min(STORM[storage], 1_000)
    answers = await asyncio.gather(*(rest.add("c", 7, token) for _ in range(number)))
    assert {(each.status_code, each.json()["applied"]) for each in answers} == {(410, False)}
    assert await rest.count("c") == 0


async def keys_kept(app: App, storage: str, directory: Path) -> int:
    """How many keys the store holds."""
    if storage == "memory":
        return sum(len(space.keys) for space in app.store.tables.spaces.values())
    if storage == "postgresql":
        return int(await app.store._database.value("SELECT count(*) FROM {s}.reservations"))
    with closing(sqlite3.connect(directory / "counter.db")) as connection:
        (number,) = connection.execute("SELECT count(*) FROM reservations").fetchone()
    return int(number)


# DynamoDB deletes them by its own clock: TestPurge in tests/dynamodb/test_contracts.py.
@pytest.mark.parametrize("storage", ["sqlite", "memory", "postgresql"], indirect=True)
async def test_keys_are_kept_for_their_time_and_then_forgotten(
    storage: str, rest: Rest, app: App, fast_dir: Path
) -> None:
    """However many there are: a key-store that only grows is full one day."""
    kept = rest.within("kept")
    await kept.create("ACCURATE", key_ttl="1h")
    for start in range(0, KEYS, 100):
        numbers = range(start, start + 100)
        await asyncio.gather(*(kept.add("c", 1, key=f"order:{n}") for n in numbers))
    assert await keys_kept(app, storage, fast_dir) == KEYS
    await app.roll_up_after(HOUR - MINUTE)
    again = await kept.add("c", 1, key="order:0")
    assert again.json()["replayed"] is True
    assert await keys_kept(app, storage, fast_dir) == KEYS
    app.clock.advance(2 * MINUTE)
    for _ in range(3):
        await app.roll_up()
    assert await keys_kept(app, storage, fast_dir) == 0
    assert await kept.count("c") == KEYS, "what they counted stays"


async def test_a_token_and_a_key_belong_to_their_tenant(rest: Rest, app: App) -> None:
    """The same ones in another namespace are different: they neither count nor conflict there."""
    token = fresh(app.clock.now_us())
    tenants = [rest.within(name) for name in ("one", "two")]
    for delta, tenant in enumerate(tenants, start=1):
        await tenant.create("ACCURATE")
        for credential in ({"token": token}, {"key": "order:1"}):
            for replayed in (False, True):
                answer = await tenant.add("c", delta, **credential)
                assert (answer.status_code, answer.json()["replayed"]) == (200, replayed)
        both = await tenant.atomic_add([("c", delta), ("d", delta)], token)
        assert both.status_code == 200
    assert [await tenant.count("c") for tenant in tenants] == [3, 6]
    assert [await tenant.count("d") for tenant in tenants] == [1, 2]


async def test_a_recreated_tenant_does_not_inherit_tokens(
    rest: Rest, app: App, storage: str
) -> None:
    tenant = rest.within("tenant")
    token = fresh(app.clock.now_us())
    for _ in range(2):
        await tenant.create("ACCURATE", accept_limit="5m")
        for credential in ({"token": token}, {"key": "order:1"}):
            answer = await tenant.add("c", 1, **credential)
            assert (answer.status_code, answer.json()["replayed"]) == (200, False)
        assert await tenant.count("c") == 2
        assert (await rest.http.delete(tenant.path())).status_code == 204
        if storage == "dynamodb":
            # Another process might not know yet that it is deleted.
            app.clock.advance(MINUTE)


@pytest.mark.parametrize("days", DAYS)
async def test_a_replay_after_days_gets_the_outcome(app: App, days: int) -> None:
    """The add with a lost response, and the void one: each once for ever."""
    found, lost, other = (fresh(app.clock.now_us()) for _ in range(3))
    for each in (found, other):
        assert (await app.rest.add("c", 7, each)).status_code == 200
    for _ in range(days * 4):
        await app.roll_up_after(DAY // 4)
    for _ in range(2):
        answer = await app.rest.add("c", 7, found)
        assert (answer.status_code, answer.json()["replayed"]) == (200, True)
        assert_problem(await app.rest.add("c", 7, lost), "token_too_old", applied=False)
        assert_problem(await app.rest.add("c", 8, other), "token_conflict")
        await app.restart()
    assert await app.rest.count("c") == 14


async def test_a_partly_applied_batch_is_resent_whole(rest: Rest, app: App) -> None:
    """Items that had counted are replays, the rest counts now or has an error."""
    now_us = app.clock.now_us()
    tokens = [fresh(now_us) for _ in range(6)]
    for token in tokens[:3]:
        await rest.add("c", 1, token)
    items = [item("c", 1, token) for token in tokens]
    items.append(item("c", 1, fresh(now_us + HOUR)))
    items.append(item("c", 9, tokens[0]))
    for replayed in ([True] * 3 + [False] * 3, [True] * 6):
        results = (await rest.batch_add(items)).json()["results"]
        assert [each.get("replayed") for each in results[:6]] == replayed
        assert [each.get("code") for each in results[6:]] == ["token_in_future", "token_conflict"]
        assert await rest.count("c") == 6


SAGA = ("reserve", "charge", "ship")


async def run_saga(rest: Rest, parent: Token, *, fails: str = "") -> bool:
    """Three steps, each under a token derived from the saga's; undone if one *fails*."""
    done: list[str] = []
    for step in SAGA:
        if step == fails:
            for each in reversed(done):
                undo = derive(derive(parent, each), "undo")
                assert (await rest.add(each, -1, undo)).status_code == 200
            return False
        if (await rest.add(step, 1, derive(parent, step))).status_code != 200:
            raise ConnectionError(step)
        done.append(step)
    return True


@contextmanager
def append_that_fails(app: App, number: int, *, after: bool) -> Iterator[None]:
    """Have one write fail, the *number*-th from now: before it did anything, or *after* it did."""
    works, calls = app.store.events.append, iter(range(1_000))

    async def append(*arguments: Any) -> Any:
        fails = next(calls) == number
        if fails and not after:
            raise StoreUnavailableError("a fault that a test planted")
        written = await works(*arguments)
        if fails:
            raise StoreUnavailableError("a fault that a test planted")
        return written

    with patch.object(app.store.events, "append", append):
        yield


@pytest.mark.parametrize("lands", [False, True])
@pytest.mark.parametrize("breaks_at", range(len(SAGA)))
async def test_an_interrupted_saga_resumes(
    rest: Rest, app: App, breaks_at: int, lands: bool
) -> None:
    """Restarted with nothing but its own token, it does each step once."""
    parent = fresh(app.clock.now_us())
    with (
        append_that_fails(app, breaks_at, after=lands),
        pytest.raises(ConnectionError, match=SAGA[breaks_at]),
    ):
        await run_saga(rest, parent)
    for _ in range(2):
        assert await run_saga(rest, parent)
        assert [await rest.count(step) for step in SAGA] == [1, 1, 1]


async def test_a_saga_is_undone_once(rest: Rest, app: App) -> None:
    parent = fresh(app.clock.now_us())
    for _ in range(3):
        assert not await run_saga(rest, parent, fails="ship")
    assert [await rest.count(step) for step in SAGA] == [0, 0, 0]
    assert len(await rest.events("charge")) == 2


async def test_metrics_distinguish_originals_duplicates_and_conflicts(rest: Rest, app: App) -> None:
    """Against the test's own record of a random mix, sent in a random order."""
    draw = random.Random(20_260_301)
    sent: dict[Token, int] = {}
    truth: Counter[str] = Counter()
    count = 0
    for _ in range(600):
        kinds = ["original", "original", "duplicate", "duplicate", "conflict", "late", "void"]
        kind = draw.choice(kinds)
        token = fresh(app.clock.now_us())
        if kind == "original" or not sent:
            sent[token] = draw.randrange(1, 5)
            kind, count = "original", count + sent[token]
        elif kind != "void":
            token = draw.choice(list(sent)[-20:])
        delta = sent.get(token, 1)
        if kind == "late":
            await app.roll_up_after(30 * SECOND)
        if kind == "void":
            token = fresh(app.clock.now_us() - 30 * SECOND)
        age_us = app.clock.now_us() - token.generation_time_us
        answer = await rest.add("c", delta + (kind == "conflict"), token)
        truth[outcome_of(answer, kind, age_us)] += 1
    assert await rest.count("c") == count
    numbers = Counter(await outcomes(rest))
    assert numbers["unverified"] == 0
    assert +numbers == truth
    assert len(truth) == 5
    assert min(truth.values()) >= 20


def outcome_of(answer: httpx.Response, kind: str, age_us: int) -> str:
    """The metric of an add, by its content and time; the response must agree."""
    is_late = age_us > 5 * SECOND
    if kind == "original":
        assert (answer.status_code, answer.json()["replayed"]) == (200, False)
        return "original"
    if kind == "void":
        assert (answer.status_code, answer.json()["applied"]) == (410, False)
        return "voided"
    if kind == "conflict":
        assert answer.status_code == 409
        return "conflict"
    assert (answer.status_code, answer.json()["replayed"]) == (200, True)
    return "late_applied" if is_late else "replayed"


@pytest.mark.parametrize("late_us", [0, MINUTE])
async def test_metrics_count_each_item_of_an_atomic_add(rest: Rest, app: App, late_us: int) -> None:
    """Regression: of a conflict they counted one item, and none of a late one."""
    token = fresh(app.clock.now_us())
    await rest.atomic_add([("a", 1), ("b", 1)], token)
    app.clock.advance(late_us)
    answer = await rest.atomic_add([("a", 1), ("b", 2)], token)
    assert answer.status_code == 409
    numbers = await outcomes(rest)
    assert (numbers["original"], numbers["conflict"]) == (2, 2)
