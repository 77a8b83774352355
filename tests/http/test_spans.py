"""Sums: of a counter between two instants, of all counters with a prefix, and by calendar."""

from pathlib import Path

import pytest

from tests.support.app import App, every_store, running
from tests.support.problems import assert_problem
from tests.support.rest import Json, Rest, fresh, item
from tests.support.times import DAY, HOUR, MINUTE, SECOND, rfc3339, to_us

WINDOW = 10 * SECOND


async def span(rest: Rest, **params: str) -> Json:
    answer = await rest.http.get(rest.path("c"), params=params)
    assert answer.status_code == 200, answer.text
    found: Json = answer.json()
    return found


def bound(at_us: int) -> int:
    return at_us - at_us % WINDOW


@every_store
async def test_the_change_between_two_instants_is_what_was_added_between_them(
    rest: Rest, app: App
) -> None:
    """In windows that are rolled up and in later ones, for each pair of their ends; and until
    now."""
    began_us = bound(app.clock.now_us())
    added: list[tuple[int, int]] = []

    async def add(times: int) -> None:
        for number in range(times):
            token = fresh(app.clock.now_us())
            assert (await rest.add("c", number + 1, token)).status_code == 200
            added.append((app.clock.now_us(), number + 1))
            app.clock.advance(7 * SECOND)

    await add(4)
    await app.roll_up_after(MINUTE)
    await add(4)
    now_us = app.clock.now_us()
    # Those near the adds; the quiet minute between them has nothing to tell apart.
    ends = [
        each
        for each in range(began_us, bound(now_us) + 1, WINDOW)
        if any(abs(each - time) <= WINDOW for time, _ in added)
    ]
    for from_us in ends:
        for to_us_ in (*(each for each in ends if each > from_us), None):
            to = {} if to_us_ is None else {"to": rfc3339(to_us_)}
            found = await span(rest, **{"from": rfc3339(from_us)}, **to)
            until_us = now_us + 1 if to_us_ is None else to_us_
            assert found == {
                "namespace": rest.namespace,
                "counter": "c",
                "count": sum(delta for time, delta in added if time < until_us),
                "as_of": rfc3339(now_us if to_us_ is None else to_us_),
                "accuracy": "accurate",
                "delta": sum(delta for time, delta in added if from_us <= time < until_us),
                "from": rfc3339(from_us),
            }


async def test_a_clear_is_a_change_too(rest: Rest, app: App) -> None:
    began_us = bound(app.clock.now_us())
    await rest.add("c", 100, fresh(app.clock.now_us()))
    app.clock.advance(WINDOW)
    await rest.clear("c", fresh(app.clock.now_us()))
    app.clock.advance(SECOND)
    await rest.add("c", 5, fresh(app.clock.now_us()))
    for _ in range(2):
        found = await span(rest, **{"from": rfc3339(began_us + WINDOW)})
        assert (found["count"], found["delta"]) == (5, -95)
        await app.roll_up_after(MINUTE)


async def test_a_clear_that_is_not_rolled_up_is_between_two_instants(rest: Rest, app: App) -> None:
    """What it cleared is in no tail after it."""
    await rest.add("c", 1, fresh(app.clock.now_us()))
    await app.roll_up_after(MINUTE)
    began_us = bound(app.clock.now_us()) + WINDOW
    app.clock.advance(began_us + SECOND - app.clock.now_us())
    for change in (10, None, 5):
        token = fresh(app.clock.now_us())
        await (rest.clear("c", token) if change is None else rest.add("c", change, token))
        app.clock.advance(WINDOW)
    ends = [rfc3339(began_us + number * WINDOW) for number in range(4)]
    for _ in range(2):
        counts = [(await span(rest, to=end))["count"] for end in ends]
        assert counts == [1, 11, 0, 5]
        found = await span(rest, **{"from": ends[1], "to": ends[3]})
        assert (found["count"], found["delta"]) == (5, -6)
        await app.roll_up_after(MINUTE)


async def test_a_late_add_is_in_the_span_of_its_token(rest: Rest, app: App) -> None:
    """It changes a window that is rolled up; its recount is pending until the next rollup."""
    began_us = bound(app.clock.now_us())
    late = fresh(app.clock.now_us())
    await rest.add("c", 1, fresh(app.clock.now_us()))
    app.clock.advance(WINDOW)
    await rest.add("c", 2, fresh(app.clock.now_us()))
    await app.roll_up_after(MINUTE)
    answer = await rest.add("c", 4, late)
    assert answer.status_code == 410, answer.text
    span_of = {"from": rfc3339(began_us), "to": rfc3339(began_us + WINDOW)}
    await rest.post(rest.path("c", "recount"), {})
    for _ in range(2):
        assert (await span(rest, **span_of))["delta"] == 1
        await app.roll_up_after(MINUTE)


async def test_a_counter_that_was_never_written_changes_by_nothing(rest: Rest, app: App) -> None:
    found = await span(rest, to=rfc3339(bound(app.clock.now_us())))
    assert (found["count"], found["delta"], found.get("from")) == (0, 0, None)


async def test_a_bound_within_a_window_is_refused_with_the_nearest_ones(
    rest: Rest, app: App
) -> None:
    now_us = app.clock.now_us()
    low_us = bound(now_us) - MINUTE
    near = (rfc3339(low_us), rfc3339(low_us + WINDOW))
    for name in ("from", "to"):
        answer = await rest.http.get(rest.path("c"), params={name: rfc3339(low_us + 1)})
        assert_problem(answer, "invalid_parameter", name, "windows of 10s", *near)
    latest_us = bound(now_us) + WINDOW
    later = {"from": rfc3339(latest_us + WINDOW)}
    answer = await rest.http.get(rest.path("c"), params=later)
    assert_problem(answer, "invalid_parameter", f"next to it at {rfc3339(latest_us)}")
    # The end of the window of now: this clock may be behind the caller's.
    await rest.add("c", 2, fresh(now_us))
    found = await span(rest, to=rfc3339(latest_us))
    assert (found["count"], found["as_of"]) == (2, rfc3339(now_us))


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"from": "2026-03-01T11:00:00Z", "max_staleness": "5s"}, "max_staleness"),
        ({"from": "2026-03-01T11:00:00Z", "to": "2026-03-01T10:00:00Z"}, "is not after"),
        ({"from": "2026-03-01T11:00:00Z", "tz": "Europe/Berlin"}, "tz is Europe/Berlin"),
        ({"from": "today", "tz": "Europe/Bonn"}, "not a time zone"),
        ({"from": "today", "tz": "../../etc/passwd"}, "not a time zone"),
        ({"from": "today", "tz": "__init__/x"}, "not a time zone"),
        ({"from": "today", "tz": "America/__init__/x"}, "not a time zone"),
        ({"from": "today", "tz": "a/" * 2_000}, "not a time zone"),
        ({"from": "today", "tz": "localtime"}, "not a time zone"),
        ({"from": "tomorrow"}, "not an RFC 3339 time"),
    ],
)
async def test_a_wrong_span_is_refused(rest: Rest, params: dict[str, str], said: str) -> None:
    answer = await rest.http.get(rest.path("c"), params=params)
    assert_problem(answer, "invalid_parameter", said)


async def test_best_effort_keeps_no_past(app: App) -> None:
    loose = app.rest.within("loose")
    await loose.create("BEST_EFFORT")
    answer = await loose.http.get(loose.path("c"), params={"from": "today"})
    assert_problem(answer, "not_supported", "a span of time needs events")


async def test_what_was_dropped_is_known_as_one_sum(tmp_path: Path) -> None:
    async with running("sqlite", tmp_path, small=True) as app:
        rest, began_us = app.rest, app.clock.now_us()
        await rest.add("c", 3, fresh(began_us))
        for _ in range(4):
            await app.roll_up_after(5 * MINUTE)
        await rest.add("c", 4, fresh(app.clock.now_us()))
        await app.roll_up_after(MINUTE)
        early = {"from": rfc3339(began_us - began_us % SECOND)}
        refused = await rest.http.get(rest.path("c"), params=early)
        assert_problem(refused, "invalid_parameter", "from is")
        nearest, _ = refused.json()["detail"].rpartition("next to it at ")[2].split(" and ")
        found = await span(rest, **{"from": nearest})
        assert (found["count"], found["delta"]) == (7, 4)
        since_ever = await span(rest, to=nearest)
        assert (since_ever["count"], since_ever["delta"]) == (3, 3)


async def test_today_begins_at_midnight_of_the_time_zone(rest: Rest, app: App) -> None:
    """The clock shows 12:00 in UTC: 1:00 of the next day in Auckland."""
    await rest.add("c", 2, fresh(app.clock.now_us()))
    app.clock.advance(HOUR)
    await rest.add("c", 3, fresh(app.clock.now_us()))
    utc = await span(rest, **{"from": "today"})
    assert (utc["delta"], utc["from"]) == (5, "2026-03-01T00:00:00.000000Z")
    there = await span(rest, **{"from": "today", "tz": "Pacific/Auckland"})
    assert (there["delta"], there["from"]) == (5, "2026-03-01T11:00:00.000000Z")
    app.clock.advance(11 * HOUR)
    await rest.add("c", 4, fresh(app.clock.now_us()))
    assert (await span(rest, **{"from": "today"}))["delta"] == 4
    before = await span(rest, to="today")
    assert (before["count"], before["as_of"]) == (5, "2026-03-02T00:00:00.000000Z")


async def test_a_history_by_days_follows_the_clocks_of_its_zone(rest: Rest, app: App) -> None:
    """Clocks go forward in Berlin on 29 March 2026: that day has 23 hours."""
    app.clock.advance(27 * DAY)
    await app.roll_up()
    began_us = app.clock.now_us()
    for _ in range(12):
        assert (await rest.add("c", 1, fresh(app.clock.now_us()))).status_code == 200
        app.clock.advance(6 * HOUR)
        await app.roll_up()
    await app.roll_up_after(MINUTE)
    params = {"step": "day", "tz": "Europe/Berlin", "from": rfc3339(began_us - 12 * HOUR)}
    answer = await rest.http.get(rest.path("c", "history"), params=params)
    points = [(each["time"], each["delta"]) for each in answer.json()["points"]]
    assert points[:3] == [
        ("2026-03-28T23:00:00.000000Z", 2),
        ("2026-03-29T22:00:00.000000Z", 4),
        ("2026-03-30T22:00:00.000000Z", 4),
    ]
    assert sum(delta for _, delta in points) == 12
    weeks = await rest.http.get(rest.path("c", "history"), params={"step": "week"})
    assert [(each["time"], each["delta"]) for each in weeks.json()["points"]][-2:] == [
        ("2026-03-30T00:00:00.000000Z", 6),
        (rfc3339(bound(app.clock.now_us()) - WINDOW), 6),
    ]
    far = {"step": "month", "from": "1970-01-01T00:00:00Z"}
    assert (await rest.http.get(rest.path("c", "history"), params=far)).status_code == 200


async def test_a_day_that_begins_within_a_window_is_refused(app: App) -> None:
    rest = app.rest.within("hourly")
    assert (await rest.create("EVENTUAL", rollup_window="1h")).is_success
    await rest.add("c", 1, fresh(app.clock.now_us()))
    await app.roll_up_after(3 * DAY)
    params = {"step": "day", "tz": "Asia/Kolkata", "from": rfc3339(app.clock.now_us() - 2 * DAY)}
    answer = await rest.http.get(rest.path("c", "history"), params=params)
    assert_problem(answer, "invalid_parameter", "step day", "within a window of 1h")


@pytest.mark.parametrize("counter_type", ["ACCURATE", "EVENTUAL"])
async def test_a_sum_is_of_all_counters_with_the_prefix(
    app: App, counter_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("counter.limits.BATCH_ITEMS_MAX", 2)
    rest = app.rest.within(counter_type.lower())
    assert (await rest.create(counter_type)).is_success
    names = ("a", "views:a", "views:b", "views:c", "w")
    for name in names:
        await rest.add(name, 3, fresh(app.clock.now_us()))
    await app.roll_up_after(MINUTE)
    await rest.add("views:b", 4, fresh(app.clock.now_us()))
    path = rest.path(verb="counters")
    params = {"prefix": "views:", "sum": "true", "limit": "1"}
    found = (await rest.http.get(path, params=params)).json()
    exact = counter_type == "ACCURATE"
    assert found["counters"] == ["views:a"]
    as_of = found["sum"].pop("as_of")
    assert found["sum"] == {
        "count": 13 if exact else 9,
        "counters": 3,
        "accuracy": counter_type.lower(),
    }
    assert (to_us(as_of) == app.clock.now_us()) is exact
    now = (await rest.http.get(path, params=params | {"max_staleness": "0s"})).json()
    assert (now["sum"]["count"], now["sum"]["accuracy"]) == (13, "accurate")
    none = (await rest.http.get(path, params=params | {"prefix": "nothing"})).json()
    assert (none["sum"]["count"], none["sum"]["counters"], none["counters"]) == (0, 0, [])


async def test_a_sum_of_too_many_counters_is_refused_with_advice(
    rest: Rest, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("counter.limits.COUNTERS_TOGETHER_MAX", 2)
    now_us = app.clock.now_us()
    await rest.batch_add([item(name, 1, fresh(now_us)) for name in ("a1", "a2", "b1")])
    path = rest.path(verb="counters")
    assert (await rest.http.get(path, params={"sum": "true", "prefix": "a"})).is_success
    answer = await rest.http.get(path, params={"sum": "true"})
    assert_problem(answer, "invalid_parameter", "more than 2 counters", "longer prefix")
