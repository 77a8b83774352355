"""When the store fails, stalls or fills up: unknown outcomes, which the token resolves."""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from counter.errors import StoreUnavailableError
from counter.types import Token
from tests.support.app import App, running, store_that_fails, store_that_stalls
from tests.support.problems import assert_problem, problem_of
from tests.support.rest import Rest, fresh, item
from tests.support.times import MINUTE, SECOND

Send = Callable[[Rest, Token], Awaitable[Any]]
SENDS: dict[str, tuple[str, Send]] = {
    "add": ("append", lambda rest, token: rest.add("c", 1, token)),
    "clear": ("append", lambda rest, token: rest.clear("c", token)),
    "atomic": ("append_atomic", lambda rest, token: rest.atomic_add([("c", 1)], token)),
}


@pytest.mark.parametrize("lands", [False, True])
@pytest.mark.parametrize("kind", SENDS)
async def test_a_write_that_failed_is_unknown_until_it_is_sent_again(
    rest: Rest, app: App, kind: str, lands: bool
) -> None:
    method, send = SENDS[kind]
    token = fresh(app.clock.now_us())
    with store_that_fails(app, method, after=lands):
        assert_problem(await send(rest, token), "store_unavailable")
    again = await send(rest, token)
    assert again.status_code == 200
    answer = again.json()["results"][0] if kind == "atomic" else again.json()
    assert answer["replayed"] is lands
    assert len(await rest.events("c")) == 1


async def test_a_batch_that_failed_says_so_of_every_item(rest: Rest, app: App) -> None:
    now_us = app.clock.now_us()
    items = [item("c", 1, fresh(now_us)), {"counter": "c"}, item("c", 2, fresh(now_us))]
    with store_that_fails(app, "append", after=True):
        results = (await rest.batch_add(items)).json()["results"]
    assert [result["code"] for result in results] == [
        "store_unavailable",
        "invalid_body",
        "store_unavailable",
    ]
    again = (await rest.batch_add(items)).json()["results"]
    assert [result.get("replayed") for result in again] == [True, None, True]
    assert await rest.count("c") == 3


@pytest.mark.parametrize(
    ("method", "path"),
    [("heads", ""), ("heads", "?max_staleness=0s"), ("scan", "/events"), ("heads", "/history")],
)
async def test_a_read_that_failed_is_a_503(rest: Rest, app: App, method: str, path: str) -> None:
    await rest.add("c", 1, fresh(app.clock.now_us()))
    with store_that_fails(app, method):
        problem = problem_of(await rest.http.get(rest.path("c") + path))
    assert (problem["status"], problem["code"]) == (503, "store_unavailable")


@pytest.mark.usefixtures("the_worker_rolls_up")
@pytest.mark.parametrize(
    ("method", "after"),
    [
        *(("fence", False), ("dirty", False), ("heads", False)),
        *(("apply", False), ("apply", True), ("advance", False), ("advance", True)),
        *(("drop_marks", False), ("drop_marks", True)),
    ],
)
async def test_a_rollup_that_failed_is_done_by_the_next(app: App, method: str, after: bool) -> None:
    await fail_and_roll_up_again(app, method, after)


@pytest.mark.parametrize("storage", ["memory"])
async def test_a_failed_rollup_is_repeated_by_the_next(app: App) -> None:
    """Other stores sum the dirty windows."""
    await fail_and_roll_up_again(app, "sums", after=False)


async def fail_and_roll_up_again(app: App, method: str, after: bool) -> None:
    for count in (1, 2):
        await app.rest.add("c", 1, fresh(app.clock.now_us()))
        app.clock.advance(MINUTE)
        with store_that_fails(app, method, after=after), pytest.raises(Exception, match="planted"):
            await app.roll_up()
        assert await app.rest.count("c") == count
        await app.restart()
        assert await app.rest.count("c") == count
    await app.roll_up()
    answer = (await app.rest.get("c", "1h")).json()
    assert (answer["count"], answer["accuracy"]) == (2, "eventual")


async def test_a_fault_of_the_service_itself_is_a_problem_that_shows_no_secrets(
    rest: Rest, app: App
) -> None:
    async def breaks(*_: Any, **__: Any) -> None:
        raise RuntimeError("a detail of our own")

    loose = rest.within("loose")
    await loose.create("BEST_EFFORT")
    with (
        patch.object(app.store.events, "append", breaks),
        patch.object(app.store.rollups, "heads", breaks),
        patch.object(app.application.cache, "increment_many", breaks),
    ):
        answers = [
            await rest.add("c", 1, fresh(app.clock.now_us())),
            await loose.add("c", 1),
            await rest.get("c"),
        ]
    for answer in answers:
        problem = assert_problem(answer, "internal_error")
        assert "a detail of our own" not in str(problem)


@pytest.fixture
async def stallable(fast_dir: Path) -> Any:
    """A service over a store without transactions: there, a write may land at any time."""
    async with running("memory", fast_dir) as app:
        yield app


async def test_a_write_past_its_time_is_not_acknowledged_and_counts_once(stallable: App) -> None:
    app, rest = stallable, stallable.rest
    token = fresh(app.clock.now_us())

    async def a_while() -> None:
        app.clock.advance(SECOND + 1)

    with store_that_stalls(app, "append", a_while):
        answer = await rest.add("c", 1, token)
    assert_problem(answer, "write_timeout")
    assert (await rest.add("c", 1, token)).json()["replayed"] is True
    assert await rest.count("c") == 1


async def test_a_token_that_aged_while_its_mark_was_written_is_not_written(stallable: App) -> None:
    app, rest = stallable, stallable.rest
    token = fresh(app.clock.now_us())

    async def a_while() -> None:
        app.clock.advance(5 * SECOND + 1)
        # A process reads them every second.
        await app.application.service.namespaces.refresh()

    with store_that_stalls(app, "mark", a_while):
        answer = await rest.add("c", 1, token)
    assert_problem(answer, "token_pending")
    assert await rest.events("c") == []
    app.clock.advance(MINUTE)
    assert (await rest.add("c", 1, token)).status_code == 410
    assert await rest.count("c") == 0


async def test_a_write_that_lands_in_a_closed_window_counts_once_it_is_resolved(
    stallable: App,
) -> None:
    """The rollup has passed it by: only a retry speaks about it, and has the window recounted."""
    app, rest = stallable, stallable.rest
    token = fresh(app.clock.now_us())
    await rest.add("c", 10, fresh(app.clock.now_us()))

    async def the_window_closes() -> None:
        await app.roll_up_after(MINUTE)

    with store_that_stalls(app, "append", the_window_closes):
        answer = await rest.add("c", 1, token)
    assert_problem(answer, "write_timeout")
    assert (await rest.add("c", 1, token)).json()["replayed"] is True
    for _ in range(3):
        assert await rest.count("c") == 11
        await app.roll_up_after(MINUTE)
        assert await rest.count("c", "1h") == 11


async def test_an_atomic_write_that_lands_in_a_closed_window_was_voided_by_the_worker(
    stallable: App,
) -> None:
    """Half of one must never count: the worker asks, when the window closes, and decides."""
    app, rest = stallable, stallable.rest
    token = fresh(app.clock.now_us())

    async def the_window_closes() -> None:
        await app.roll_up_after(MINUTE)

    with store_that_stalls(app, "append_atomic", the_window_closes):
        answer = await rest.atomic_add([("c", 1), ("d", 1)], token)
    assert answer.status_code != 200
    for _ in range(3):
        again = await rest.atomic_add([("c", 1), ("d", 1)], token)
        assert_problem(again, "token_too_old", applied=False)
        assert [await rest.count(counter) for counter in ("c", "d")] == [0, 0]
        await app.roll_up_after(MINUTE)


async def test_half_an_atomic_add_is_made_whole_by_the_worker(stallable: App) -> None:
    """Its client never came back, and the store had landed one item of two."""
    app, rest = stallable, stallable.rest
    token = fresh(app.clock.now_us())

    async def lands_half(namespace: Any, events: Any) -> Any:
        await app.store.events.append(namespace, events[:1])
        raise StoreUnavailableError("a fault that a test planted", retry_after_us=SECOND)

    with patch.object(app.store.events, "append_atomic", lands_half):
        answer = await rest.atomic_add([("c", 1), ("d", 2)], token)
    assert_problem(answer, "store_unavailable")
    await app.roll_up_after(MINUTE)
    assert [await rest.count(counter) for counter in ("c", "d")] == [1, 2]
    assert [await rest.count(counter, "1h") for counter in ("c", "d")] == [1, 2]
    again = await rest.atomic_add([("c", 1), ("d", 2)], token)
    assert [each["replayed"] for each in again.json()["results"]] == [True, True]


@pytest.mark.parametrize("kind", ["add", "atomic"])
async def test_a_write_that_lands_after_its_token_was_voided_never_counts(
    stallable: App, kind: str
) -> None:
    app, rest = stallable, stallable.rest
    method, send = SENDS[kind]
    token = fresh(app.clock.now_us())
    await rest.add("c", 10, fresh(app.clock.now_us()))

    async def a_hedge_is_voided() -> None:
        app.clock.advance(MINUTE)
        assert (await send(rest, token)).status_code == 410

    with store_that_stalls(app, method, a_hedge_is_voided):
        answer = await send(rest, token)
    assert answer.status_code != 200
    for _ in range(3):
        assert (await send(rest, token)).status_code == 410
        assert await rest.count("c") == 10
        await app.roll_up_after(MINUTE)
        assert await rest.count("c", "1h") == 10


async def test_a_full_database_refuses_writes_loses_nothing_and_heals(fast_dir: Path) -> None:
    """A page limit of SQLite: the same fault as a full disk's."""
    async with running("sqlite", fast_dir) as app:
        rest = app.rest
        await rest.add("before", 1, fresh(app.clock.now_us()))
        with without_room(app):
            added, answer = 0, await rest.add("full", 1, fresh(app.clock.now_us()))
            while answer.status_code == 200:
                added += 1
                answer = await rest.add(f"full {added}", 1, fresh(app.clock.now_us()))
            refused = fresh(app.clock.now_us())
            for send in (
                rest.add("full", 1, refused),
                rest.atomic_add([("full", 1), ("other", 1)], fresh(app.clock.now_us())),
                rest.clear("before", fresh(app.clock.now_us() + 1)),
            ):
                problem = assert_problem(await send, "store_unavailable")
                assert "space" in problem["detail"]
            assert await rest.count("before") == 1
        assert (await rest.add("full", 1, refused)).json()["replayed"] is False
        assert await rest.count("before") == 1
        await app.restart()
        names = await app.rest.names(limit=1_000)
        results = (await app.rest.batch_get(names)).json()["results"]
        assert sum(result["count"] for result in results) == added + 2


async def test_a_write_that_is_cut_off_anywhere_leaves_nothing_half_known(fast_dir: Path) -> None:
    """Counters, marks and sums of an undone write are forgotten, or its events would be lost."""
    async with running("sqlite", fast_dir) as app:
        rest, refused, names = app.rest, 0, []
        for steps in range(1, 700, 6):
            token = fresh(app.clock.now_us())
            name, other = f"cut off {steps}", f"made instead {steps}"
            for items in ([(name, 1)], [(name, 1), (f"{name} too", 1)]):
                with cut_off_after(app, steps):
                    answer = await rest.batch_add([item(each, n, token) for each, n in items])
                results = answer.json()["results"]
                assert {result.get("status", 200) for result in results} <= {200, 503}
                refused += sum("status" in result for result in results)
            with cut_off_after(app, steps):
                answer = await rest.atomic_add([(f"{name} whole", 1)], token)
            refused += answer.status_code == 503
            names += [name, f"{name} too", f"{name} whole", other]
            await rest.add(other, 1, token)
            await rest.batch_add([item(each, 1, token) for each in (name, f"{name} too")])
            assert (await rest.atomic_add([(f"{name} whole", 1)], token)).status_code == 200
            app.clock.advance(SECOND)
        assert refused > 100, "the sweep cuts through the middle of writes"
        for staleness in ("0s", "1h"):
            results = (await rest.batch_get(names, staleness)).json()["results"]
            assert [each["counter"] for each in results if each["count"] != 1] == []
            await app.roll_up_after(MINUTE)
            await app.restart()
            rest = app.rest
        for name in names:
            assert len(await rest.events(name)) == 1


@contextmanager
def cut_off_after(app: App, steps: int) -> Iterator[None]:
    """Interrupt the writer once, after so many steps of SQLite's machine."""
    connection = app.store.database._writing
    countdown = iter(range(steps))
    connection.set_progress_handler(lambda: next(countdown, None) == steps - 1, 1)
    yield
    connection.set_progress_handler(None, 1)


@contextmanager
def without_room(app: App) -> Iterator[None]:
    """Allow the database no page more than it has."""
    connection = app.store.database._writing
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    (most,) = connection.execute("PRAGMA max_page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    yield
    connection.execute(f"PRAGMA max_page_count = {most}")
