"""Two payloads under one token, over a store that does not compare them: the promise of each
setting."""

from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import pytest

from counter.ports import Clock
from counter.storage.memory import DEFAULT_DATASET, MemoryStore
from counter.storage.memory.events import MemoryEvents
from counter.storage.memory.tables import identity_of, insert_once
from counter.storage.shared.memory_cache import MemoryCache
from counter.types import Dataset, Event, Guarded, Namespace, PayloadCheck, Written
from tests.support.app import App, running, store_that_fails
from tests.support.problems import assert_problem
from tests.support.rest import Rest, fresh, item
from tests.support.times import SECOND


class UntoldEvents(MemoryEvents):
    """Writes without reading, like Cassandra without strict checks: the last payload stays."""

    async def append(self, namespace: Namespace, events: Sequence[Event]) -> Sequence[Written]:
        if namespace.settings.payload_check is PayloadCheck.STRICT:
            return await super().append(namespace, events)
        self._overwrite(namespace, events)
        return [Written.UNVERIFIED] * len(events)

    async def append_atomic(self, namespace: Namespace, events: Sequence[Event]) -> Written:
        if namespace.settings.payload_check is PayloadCheck.STRICT:
            return await super().append_atomic(namespace, events)
        self._overwrite(namespace, events)
        return Written.UNVERIFIED

    def _overwrite(self, namespace: Namespace, events: Sequence[Event]) -> None:
        for event, partition in zip(
            events, self._tables.partitions(namespace, events), strict=True
        ):
            partition._rows[identity_of(event)] = event
            insert_once(partition._order, identity_of(event))


class UntoldStore(MemoryStore):
    def __init__(self, clock: Clock, datasets: Sequence[Dataset] = (DEFAULT_DATASET,)) -> None:
        super().__init__(clock, datasets)
        self.events = UntoldEvents(self.tables)


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[App]:
    """The service over such a store."""
    with patch("counter.storage.memory.MemoryStore", UntoldStore):
        async with running("memory", tmp_path) as app:
            yield app


@pytest.fixture
async def guarded(rest: Rest) -> Rest:
    return await namespace_of(rest, "guard")


async def namespace_of(rest: Rest, payload_check: str) -> Rest:
    """A namespace with this setting."""
    made = rest.within(payload_check)
    assert (await made.create("ACCURATE", payload_check=payload_check)).status_code == 201
    return made


@pytest.fixture
def deaf_guard() -> Iterator[None]:
    """The guard cannot be reached."""

    async def guard(
        self: MemoryCache, namespace: Namespace, events: Sequence[Event]
    ) -> Sequence[Guarded]:
        return [Guarded.UNVERIFIED] * len(events)

    with patch.object(MemoryCache, "guard", guard):
        yield


def now(app: App) -> int:
    return app.clock.now_us()


async def test_the_guard_refuses_another_payload(guarded: Rest, app: App) -> None:
    """Nothing of it is written: the first one is kept."""
    token = fresh(now(app))
    assert (await guarded.add("c", 3, token)).json()["replayed"] is None
    for answer in (await guarded.add("c", 4, token), await guarded.clear("c", token)):
        assert_problem(answer, "token_conflict")
    assert await guarded.count("c") == 3


async def test_the_guard_knows_a_retry(guarded: Rest, app: App) -> None:
    token = fresh(now(app))
    for replayed in (None, True, True):
        answer = await guarded.add("c", 3, token)
        assert answer.json()["replayed"] is replayed
        assert answer.headers.get("idempotency-replayed") == ("true" if replayed else None)
    assert await guarded.count("c") == 3


async def test_tokens_known_to_the_guard_are_still_written(guarded: Rest, app: App) -> None:
    """The first attempt was noted, and never arrived."""
    token = fresh(now(app))
    with store_that_fails(app, "append"):
        assert (await guarded.add("c", 3, token)).status_code == 503
    assert (await guarded.add("c", 3, token)).json()["replayed"] is True
    assert await guarded.count("c") == 3


@pytest.mark.usefixtures("deaf_guard")
async def test_without_the_guard_adds_go_on(guarded: Rest, app: App) -> None:
    """A retry still counts once; only it is not reported as a replay."""
    token = fresh(now(app))
    for _ in range(2):
        answer = await guarded.add("c", 3, token)
        assert answer.status_code == 200
        assert answer.json()["replayed"] is None
    answer = await guarded.atomic_add([("c", 1), ("d", 1)], fresh(now(app)))
    assert [each["replayed"] for each in answer.json()["results"]] == [None, None]
    assert await guarded.count("c") == 4


async def test_the_guard_looks_at_each_item_of_a_batch(guarded: Rest, app: App) -> None:
    """A refused one does not affect the rest; two of one token are distinguished."""
    old, new = fresh(now(app)), fresh(now(app))
    await guarded.add("a", 1, old)
    items = [item("a", 2, old), item("b", 3, new), item("b", 4, new), item("a", 1, old)]
    results = (await guarded.batch_add(items)).json()["results"]
    assert [each.get("code") for each in results] == [
        "token_conflict",
        None,
        "token_conflict",
        None,
    ]
    assert [results[1]["replayed"], results[3]["replayed"]] == [None, True]
    assert [await guarded.count(name) for name in ("a", "b")] == [1, 3]


async def test_the_guard_refuses_another_list_of_an_atomic_add(guarded: Rest, app: App) -> None:
    """All of it, whichever item differs; the same list again is a replay."""
    token = fresh(now(app))
    for replayed in (None, True):
        answer = await guarded.atomic_add([("a", 1), ("b", 2)], token)
        assert [each["replayed"] for each in answer.json()["results"]] == [replayed] * 2
    for items in ([("a", 1), ("b", 3)], [("a", 1)], [("a", 1), ("c", 2)]):
        answer = await guarded.atomic_add(items, token)
        assert_problem(answer, "token_conflict")
    await app.roll_up_after(60 * SECOND)
    assert [await guarded.count(name) for name in ("a", "b", "c")] == [1, 2, 0]


async def test_a_late_token_is_resolved_whatever_the_guard_has_seen(
    guarded: Rest, app: App
) -> None:
    """By the stored event: a conflict is found by reading."""
    token = fresh(now(app))
    await guarded.add("c", 3, token)
    await app.roll_up_after(60 * SECOND)
    assert (await guarded.add("c", 3, token)).json()["replayed"] is True
    answer = await guarded.add("c", 4, token)
    assert_problem(answer, "token_conflict")
    assert await guarded.count("c") == 3


async def test_off_detects_no_conflict(rest: Rest, app: App) -> None:
    """One token is one event, and so it counts once; which of two payloads stays is left open."""
    off = await namespace_of(rest, "off")
    token = fresh(now(app))
    for delta in (3, 3, 4):
        answer = await off.add("c", delta, token)
        assert answer.status_code == 200
        assert answer.json()["replayed"] is None
    assert await off.count("c") in (3, 4)


@pytest.mark.usefixtures("deaf_guard")
async def test_strict_asks_the_store_alone(rest: Rest, app: App) -> None:
    """Its outcomes are exact, whatever became of the guard."""
    strict = await namespace_of(rest, "strict")
    token, atomic = fresh(now(app)), fresh(now(app))
    for replayed in (False, True):
        assert (await strict.add("c", 3, token)).json()["replayed"] is replayed
        answer = await strict.atomic_add([("d", 1)], atomic)
        assert [each["replayed"] for each in answer.json()["results"]] == [replayed]
    for answer in (await strict.add("c", 4, token), await strict.atomic_add([("d", 2)], atomic)):
        assert_problem(answer, "token_conflict")
    assert [await strict.count(name) for name in ("c", "d")] == [3, 1]


async def test_a_guard_that_was_emptied_does_not_affect_what_exists(tmp_path: Path) -> None:
    """It notes the first payload after that, even a wrong one; the stored event stays."""
    async with running("memory", tmp_path) as app:
        rest = await namespace_of(app.rest, "guard")
        token = fresh(now(app))
        assert (await rest.add("c", 3, token)).status_code == 200
        app.application.service._cache._guarded.clear()
        assert_problem(await rest.add("c", 4, token), "token_conflict")
        assert (await rest.add("c", 3, token)).json()["replayed"] is True
        assert_problem(await rest.add("c", 4, token), "token_conflict")
        assert await rest.count("c") == 3
