"""Reads: as fresh as asked for, honest about the instant, exact at any size."""

import threading
from typing import Any

import pytest

from api.routes import reports, spans
from tests.support.app import App, every_store
from tests.support.rest import Rest, fresh, item
from tests.support.times import HOUR, MINUTE, SECOND, START_US, rfc3339, to_us

INT64_MAX = 2**63 - 1
INT64_MIN = -(2**63)


async def test_a_counter_never_written_reads_zero(rest: Rest, app: App) -> None:
    answer = await rest.get("never")
    assert answer.json() == {
        "namespace": "default",
        "counter": "never",
        "count": 0,
        "as_of": rfc3339(app.clock.now_us()),
        "accuracy": "accurate",
    }


async def test_an_accurate_read_holds_every_acknowledged_add(rest: Rest, app: App) -> None:
    for delta in range(1, 6):
        await rest.add("c", delta, fresh(app.clock.now_us()))
        assert await rest.count("c", None) == delta * (delta + 1) // 2
        await app.roll_up_after(4 * SECOND)
    assert await rest.count("c", None) == 15


@pytest.fixture
async def eventual(rest: Rest) -> Rest:
    eventual = rest.within("eventual")
    assert (await eventual.create("EVENTUAL")).status_code == 201
    return eventual


async def test_an_eventual_read_is_exact_as_of_its_instant(eventual: Rest, app: App) -> None:
    await eventual.add("c", 1, fresh(app.clock.now_us()))
    early = (await eventual.get("c")).json()
    assert (early["count"], early["accuracy"]) == (0, "eventual")
    assert to_us(early["as_of"]) < app.clock.now_us()
    added_us = app.clock.now_us()
    await app.roll_up_after(MINUTE)
    late = (await eventual.get("c")).json()
    assert (late["count"], late["accuracy"]) == (1, "eventual")
    assert added_us <= to_us(late["as_of"]) <= app.clock.now_us()


async def test_an_idle_counter_is_known_as_of_the_watermark(eventual: Rest, app: App) -> None:
    await eventual.add("idle", 1, fresh(app.clock.now_us()))
    for _ in range(10):
        app.clock.advance(10 * SECOND)
        await eventual.add("busy", 1, fresh(app.clock.now_us()))
        await app.roll_up()
    idle = (await eventual.get("idle", "30s")).json()
    assert idle["count"] == 1
    assert to_us(idle["as_of"]) >= app.clock.now_us() - 30 * SECOND


@pytest.mark.parametrize(
    ("staleness", "limit_us"),
    [("0s", 0), ("1ms", 1_000), ("17s", 17 * SECOND), ("1m", MINUTE), ("1d", 24 * HOUR)],
)
async def test_a_read_is_never_staler_than_asked(
    eventual: Rest, app: App, staleness: str, limit_us: int
) -> None:
    for step in range(12):
        await eventual.add("c", 1, fresh(app.clock.now_us()))
        answer = (await eventual.get("c", staleness)).json()
        as_of_us = to_us(answer["as_of"])
        assert app.clock.now_us() - limit_us <= as_of_us <= app.clock.now_us()
        assert answer["count"] <= step + 1
        if staleness == "0s":
            assert (answer["count"], answer["accuracy"]) == (step + 1, "accurate")
        app.clock.advance(3 * SECOND)
        if step % 3 == 0:
            await app.roll_up()


async def test_a_stale_read_of_an_accurate_namespace_may_be_cheap(rest: Rest, app: App) -> None:
    await rest.add("c", 1, fresh(app.clock.now_us()))
    await app.roll_up_after(MINUTE)
    await rest.add("c", 1, fresh(app.clock.now_us()))
    answer = (await rest.get("c", "1h")).json()
    assert (answer["count"], answer["accuracy"]) == (1, "eventual")
    assert await rest.count("c", None) == 2


async def test_an_add_of_the_near_future_is_seen_by_an_accurate_read(rest: Rest, app: App) -> None:
    """The live tail has no upper bound: an accepted event is never invisible."""
    await rest.add("c", 1, fresh(app.clock.now_us() + 5 * SECOND))
    assert await rest.count("c") == 1
    await app.roll_up_after(MINUTE)
    assert await rest.count("c", "1h") == 1


async def test_an_event_at_the_border_of_a_window_counts_in_one_of_them(
    rest: Rest, app: App
) -> None:
    """The first and the last instant of the windows around 12:00:10, live and rolled up."""
    border_us = START_US - START_US % (10 * SECOND) + 10 * SECOND
    app.clock.advance(border_us - app.clock.now_us())
    for delta, time_us in ((1, border_us - 1), (10, border_us), (100, border_us + 10 * SECOND - 1)):
        app.clock.advance(max(0, time_us - app.clock.now_us()))
        await rest.add("c", delta, fresh(time_us))
    for _ in range(12):
        assert await rest.count("c") == 111
        await app.roll_up_after(2 * SECOND)
        assert await rest.count("c", "1h") in (0, 1, 111)
    assert await rest.count("c", "1h") == 111
    assert await rest.count("c") == 111


@every_store
async def test_a_clear_erases_the_windows_before_its_own(rest: Rest, app: App) -> None:
    """Live, rolled up, recounted, and after the events are gone."""
    for delta in (1, 10, 100):
        await rest.add("c", delta, fresh(app.clock.now_us()))
        app.clock.advance(10 * SECOND)
    await rest.clear("c", fresh(app.clock.now_us()))
    for delta in (1_000, 10_000):
        app.clock.advance(10 * SECOND)
        await rest.add("c", delta, fresh(app.clock.now_us()))
    assert await rest.count("c") == 11_000
    await app.roll_up_after(MINUTE)
    assert await rest.count("c", "1h") == 11_000
    await rest.post(rest.path("c", "recount"), {})
    assert await rest.count("c") == 11_000
    await app.roll_up_after(MINUTE)
    assert await rest.count("c", "1h") == 11_000
    await app.pass_retention()
    assert await rest.count("c") == 11_000


@every_store
async def test_a_count_outlives_its_events_again_and_again(rest: Rest, app: App) -> None:
    """Each time slices go, their sums are folded into the settled count."""
    for total in (1, 2):
        await rest.add("c", 1, fresh(app.clock.now_us()))
        await app.roll_up_after(MINUTE)
        await rest.post(rest.path("c", "recount"), {})
        await app.roll_up_after(MINUTE)
        assert await rest.count("c", "1h") == total
        await app.pass_retention()
        assert await rest.count("c") == total


@pytest.mark.parametrize("delta", [0, 1, -1, INT64_MAX, INT64_MIN, 2**53 + 1, -(2**53) - 1])
async def test_every_64_bit_delta_is_kept_exactly(rest: Rest, app: App, delta: int) -> None:
    token = fresh(app.clock.now_us())
    assert (await rest.add("c", delta, token)).json()["delta"] == delta
    assert (await rest.add("c", delta, token)).json()["delta"] == delta
    assert [event["delta"] for event in await rest.events("c")] == [delta]
    assert await rest.count("c") == delta
    await app.roll_up_after(MINUTE)
    assert await rest.count("c", "1h") == delta
    assert await rest.count("c") == delta


@pytest.mark.parametrize("delta", [INT64_MAX, INT64_MIN])
@pytest.mark.parametrize("rolled_up", [False, True])
async def test_a_count_never_wraps(rest: Rest, app: App, delta: int, rolled_up: bool) -> None:
    """Seven windows of extremes sum far beyond 64 bits: live, rolled up, and past retention."""
    for _ in range(7):
        now_us = app.clock.now_us()
        await rest.batch_add([item("c", delta, fresh(now_us)) for _ in range(3)])
        await rest.atomic_add([("c", delta), ("c", delta)], fresh(now_us))
        app.clock.advance(10 * SECOND)
        if rolled_up:
            await app.roll_up()
    total = 35 * delta
    assert await rest.count("c") == total
    answer = await rest.add("c", -1, fresh(app.clock.now_us()), verb="add-and-get")
    assert answer.json()["count"] == total - 1
    results = (await rest.batch_get(["c"])).json()["results"]
    assert results[0]["count"] == total - 1
    await app.roll_up_after(MINUTE)
    assert await rest.count("c", "1h") == total - 1
    points = (await rest.http.get(rest.path("c", "history"))).json()["points"]
    assert points[-1]["count"] == total - 1
    await app.pass_retention()
    assert await rest.count("c") == total - 1
    assert await rest.count("c", "1h") == total - 1


async def test_a_count_survives_a_restart(app: App) -> None:
    await app.rest.add("c", 2, fresh(app.clock.now_us()))
    await app.roll_up_after(MINUTE)
    await app.rest.add("c", 3, fresh(app.clock.now_us()))
    await app.restart()
    assert await app.rest.count("c") == 5
    assert await app.rest.count("c", "1h") == 2


async def test_as_of_goes_back_by_no_more_than_max_staleness(rest: Rest, app: App) -> None:
    """The first read must sum the latest events, the second one finds a rolled-up count."""
    app.clock.advance(2 * MINUTE)
    await rest.add("c", 5, fresh(app.clock.now_us()))
    first = (await rest.get("c", "1m")).json()
    assert (first["count"], to_us(first["as_of"])) == (5, app.clock.now_us())
    await app.roll_up()
    app.clock.advance(SECOND)
    second = (await rest.get("c", "1m")).json()
    assert second["count"] == 0
    assert 0 < to_us(first["as_of"]) - to_us(second["as_of"]) <= MINUTE
    third = (await rest.get("c", "0s")).json()
    assert (third["count"], to_us(third["as_of"])) == (5, app.clock.now_us())


async def test_a_history_is_written_outside_of_the_event_loops_thread(
    rest: Rest, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: one of 10,000 points kept all other requests waiting."""
    threads: list[int] = []
    points = spans.history_points

    def noted(*given: Any) -> Any:
        threads.append(threading.get_ident())
        return points(*given)

    monkeypatch.setattr(reports, "history_points", noted)
    for accept in ("application/json", "text/csv"):
        answer = await rest.http.get(rest.path("c", "history"), headers={"Accept": accept})
        assert answer.status_code == 200
    assert len(threads) == 2
    assert threading.get_ident() not in threads
