"""Stopped for a while, or asleep: fixed settings stay, and the rollup catches up."""

from pathlib import Path

import pytest

from counter.limits import PAST_SLICES_PER_STEP, SLICES_AHEAD
from tests.support.app import App, every_store, running
from tests.support.rest import Rest, fresh, uuid7
from tests.support.times import DAY, HOUR, MINUTE, SECOND

#: After a long one many slices are made: a table each, but for SQLite and memory.
PAUSES = [
    *((name, each) for name in ("sqlite", "memory") for each in (SECOND, HOUR, 40 * DAY)),
    *((name, each) for name in ("postgresql", "dynamodb") for each in (MINUTE, 3 * DAY)),
]


@pytest.mark.parametrize(("storage", "pause_us"), PAUSES, indirect=["storage"])
async def test_a_service_that_was_off_counts_at_once_when_it_is_back(
    app: App, pause_us: int
) -> None:
    await app.rest.add("c", 1, fresh(app.clock.now_us()))
    await app.stop()
    app.clock.advance(pause_us)
    await app.start()
    token = fresh(app.clock.now_us())
    for replayed in (False, True):
        answer = await app.rest.add("c", 1, token)
        assert answer.status_code == 200, answer.text
        assert answer.json()["replayed"] is replayed
    assert await app.rest.count("c") == 2
    app.clock.advance(MINUTE)
    for _ in range(3):
        await app.roll_up()
    assert await app.rest.count("c") == 2
    assert await app.rest.count("c", "1h") == 2


async def test_a_start_after_a_long_stop_makes_only_the_slices_that_adds_need(
    fast_dir: Path,
) -> None:
    """The worker makes the rest. Regression: a start made all of them, a table each."""
    async with running("memory", fast_dir, retention="1d", slice="1m", rollup_window="1s") as app:
        await app.rest.add("c", 1, fresh(app.clock.now_us()))
        dataset = (await app.store.control.datasets())[0]
        before = await app.store.control.slices(dataset)
        await app.stop()
        app.clock.advance(20 * HOUR)
        await app.start()
        made = [each for each in await app.store.control.slices(dataset) if each not in before]
        assert len(made) <= SLICES_AHEAD + 3
        assert (await app.rest.add("c", 1, fresh(app.clock.now_us()))).status_code == 200
        late = fresh(app.clock.now_us() - 19 * HOUR)
        answer = await app.rest.add("c", 1, late)
        assert (answer.json()["code"], answer.json()["applied"]) == ("slice_missing", None)
        for _ in range(20 * 60 // PAST_SLICES_PER_STEP + 1):
            await app.roll_up()
        for _ in range(2):
            answer = await app.rest.add("c", 1, late)
            assert (answer.status_code, answer.json()["applied"]) == (410, False)
        assert await app.rest.count("c") == 2


@pytest.mark.parametrize(("storage", "pause_us"), PAUSES, indirect=["storage"])
async def test_a_machine_that_slept_counts_once_its_keeper_has_looked_in(
    rest: Rest, app: App, pause_us: int
) -> None:
    """Until then a missing slice is a response that can be retried, and never a loss."""
    await rest.add("c", 1, fresh(app.clock.now_us()))
    app.clock.advance(pause_us)
    token = fresh(app.clock.now_us())
    answer = await rest.add("c", 1, token)
    if answer.status_code != 200:
        assert answer.json()["code"] == "slice_missing"
        assert answer.json()["retry"] == "same_token"
    await app.roll_up()
    assert (await rest.add("c", 1, token)).status_code == 200
    assert await rest.count("c") == 2


@every_store
async def test_decisions_about_late_tokens_survive(app: App) -> None:
    found, void = fresh(app.clock.now_us()), fresh(app.clock.now_us())
    await app.rest.add("c", 1, found)
    app.clock.advance(MINUTE)
    assert (await app.rest.add("c", 1, void)).status_code == 410
    for _ in range(3):
        await app.restart()
        app.clock.advance(HOUR)
        assert (await app.rest.add("c", 1, found)).json()["replayed"] is True
        assert (await app.rest.add("c", 1, void)).status_code == 410
    assert await app.rest.count("c") == 1


@every_store
async def test_a_default_namespace_that_was_deleted_is_not_made_again(app: App) -> None:
    """It is made at the first start on an empty directory, and is its owner's from then on."""
    assert (await app.http.delete(app.rest.path())).status_code == 204
    await app.restart()
    assert (await app.rest.get("c")).status_code == 404


@every_store
async def test_server_issued_tokens_are_never_issued_again(app: App) -> None:
    seen: list[str] = []
    for _ in range(3):
        answer = await app.rest.post("/v1/tokens", {"count": 10})
        seen += [token["token"] for token in answer.json()["tokens"]]
        await app.restart()
    assert len(set(seen)) == 30


async def test_new_settings_at_a_restart_keep_existing_namespaces(fast_dir: Path) -> None:
    """The dataset's windows are fixed: a token's fate must not depend on who restarted when."""
    async with running("sqlite", fast_dir, small=True) as app:
        standing = (await app.http.get(app.rest.path())).json()
        early_us = app.clock.now_us()
        await app.rest.add("c", 1, key=uuid7(early_us))
    async with running("sqlite", fast_dir) as app:
        assert (await app.http.get(app.rest.path())).json() == standing
        app.clock.advance(8 * SECOND)
        assert (await app.rest.add("c", 1, fresh(early_us))).status_code == 410
        assert await app.rest.count("c") == 1
