"""Namespaces: made, read, changed under a version, and gone with all they held."""

import json
from typing import Any

import httpx
import pytest

from tests.support.app import App, every_store
from tests.support.problems import assert_problem
from tests.support.rest import Rest, fresh
from tests.support.times import DAY, MINUTE, SECOND, rfc3339


@pytest.fixture
def other(rest: Rest) -> Rest:
    return rest.within("other")


async def test_the_namespace_default_exists_from_the_start(rest: Rest, app: App) -> None:
    answer = await rest.http.get(rest.path())
    assert answer.status_code == 200
    assert answer.json()["counter_type"] == "ACCURATE"
    listing = (await rest.http.get("/v1/namespaces")).json()
    assert [each["namespace"] for each in listing["namespaces"]] == ["default"]
    assert listing["namespaces"] == [answer.json()]


async def test_a_new_one_reports_all_its_settings(other: Rest, app: App) -> None:
    answer = await other.create("EVENTUAL", rollup_window="20s", accept_limit="2500ms")
    assert answer.status_code == 201
    assert answer.headers["etag"] == '"v1"'
    assert answer.json() == {
        "namespace": "other",
        "created_at": rfc3339(app.clock.now_us()),
        "counter_type": "EVENTUAL",
        "dataset": "default",
        "accept_limit": "2500ms",
        "future_limit": "5s",
        "rollup_window": "20s",
        "shards": 1,
        "payload_check": "guard",
        "key_ttl": "1d",
        "cache_ttl": "10s",
        "requests_per_s": 0,
        "adds_per_s": 0,
    }
    again = await other.http.get(other.path())
    assert again.json() == answer.json()
    assert again.headers["etag"] == '"v1"'


async def test_a_first_put_needs_a_counter_type(other: Rest) -> None:
    answer = await other.http.put(other.path(), json={"shards": 1})
    assert_problem(answer, "invalid_body", "counter_type")


async def test_an_update_keeps_omitted_settings(other: Rest, app: App) -> None:
    created = await other.create("EVENTUAL", future_limit="7s")
    answer = await other.http.put(other.path(), json={"cache_ttl": "3s"})
    assert answer.status_code == 200
    assert answer.headers["etag"] == '"v2"'
    assert answer.json() == created.json() | {"cache_ttl": "3s"}
    for _ in range(2):
        again = await app.http.get(other.path())
        assert (again.json(), again.headers["etag"]) == (answer.json(), '"v2"')
        await app.restart()


async def test_doubtful_settings_are_reported_and_logged(
    other: Rest, caplog: pytest.LogCaptureFixture
) -> None:
    answer = await other.create("EVENTUAL", accept_limit="5m", key_ttl="1m")
    assert answer.status_code == 201
    key, window = answer.json()["warnings"]
    assert "accept_limit is 5m and key_ttl is 1m" in key
    assert "accept_limit is 5m and rollup_window is 10s" in window
    assert f"namespace 'other': {key}" in caplog.messages
    assert "warnings" not in (await other.http.get(other.path())).json()
    mended = await other.http.put(other.path(), json={"key_ttl": "5m", "accept_limit": "5s"})
    assert "warnings" not in mended.json()


@pytest.mark.parametrize(
    ("name", "value"),
    [("counter_type", "ACCURATE"), ("rollup_window", "30s"), ("shards", 2), ("dataset", "x")],
)
async def test_fixed_settings_cannot_be_changed(other: Rest, name: str, value: Any) -> None:
    created = await other.create("EVENTUAL")
    answer = await other.http.put(other.path(), json={name: value})
    assert_problem(answer, "namespace_immutable", name, str(value))
    assert (await other.http.get(other.path())).json() == created.json()


@every_store
async def test_a_version_guards_every_change(other: Rest) -> None:
    stale, current = {"if-match": '"v1"'}, {"if-match": '"v2"'}
    await other.create()
    changed = {"cache_ttl": "3s"}
    first = await other.http.put(other.path(), json=changed, headers=stale)
    assert first.status_code == 200
    for answer in (
        await other.http.put(other.path(), json={"cache_ttl": "4s"}, headers=stale),
        await other.http.delete(other.path(), headers=stale),
    ):
        problem = assert_problem(answer, "precondition_failed")
        assert "v2" in str(problem)
    assert (await other.http.get(other.path())).json() == first.json()
    assert (await other.http.delete(other.path(), headers=current)).status_code == 204


async def test_the_refusal_of_a_weak_etag_says_what_made_it_weak(other: Rest) -> None:
    await other.create()
    weak = {"if-match": 'W/"v1"'}
    refused = await other.http.put(other.path(), json={"cache_ttl": "4s"}, headers=weak)
    assert "send it without W/" in assert_problem(refused, "precondition_failed")["detail"]


@pytest.mark.parametrize(
    ("conditions", "status"),
    [
        ([("if-match", '"v1"')], 200),
        ([("if-match", '"v9", "v1"')], 200),
        ([("if-match", ',"v9",,\t"v1" ,')], 200),
        ([("if-match", '"v9"'), ("if-match", '"v1"')], 200),
        ([("if-match", '"a,b", "v1"')], 200),
        ([("if-match", '"v9"'), ("if-match", '"v8"')], 412),
        ([("if-match", '"v9,"v1""')], 400),
        ([("if-match", 'W/"v1"')], 412),
        ([("if-match", "v1")], 400),
        ([("if-match", "")], 400),
        ([("if-match", '*, "v1"')], 400),
        ([("if-match", "*")], 200),
        ([("if-none-match", '"v99"')], 200),
        ([("if-none-match", '"v8"'), ("if-none-match", '"v9"')], 200),
        ([("if-none-match", '"v1"')], 412),
        ([("if-none-match", 'W/"v1"')], 412),
        ([("if-none-match", '"v8"'), ("if-none-match", '"v1"')], 412),
        ([("if-none-match", "*")], 412),
        ([("if-none-match", "v1")], 400),
        ([("if-match", '"v1"'), ("if-none-match", '"v9"')], 200),
        ([("if-match", '"v1"'), ("if-none-match", '"v1"')], 412),
    ],
    ids=str,
)
async def test_a_change_is_made_if_its_conditions_hold(
    other: Rest, conditions: list[tuple[str, str]], status: int
) -> None:
    await other.create()
    sent = httpx.Headers(conditions)
    changed = await other.http.put(other.path(), json={"cache_ttl": "3s"}, headers=sent)
    assert changed.status_code == status
    assert (changed.headers.get("etag") == '"v2"') is (status == 200)
    # A change makes another version, to which they may not apply.
    if status != 200:
        assert (await other.http.delete(other.path(), headers=sent)).status_code == status
        assert (await other.http.get(other.path())).headers["etag"] == '"v1"'


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("if-none-match", "*", 201),
        ("if-none-match", '"v1"', 201),
        ("if-none-match", "v1", 400),
        ("if-match", "*", 412),
    ],
)
async def test_a_namespace_is_created_if_its_conditions_hold(
    other: Rest, name: str, value: str, status: int
) -> None:
    body = {"counter_type": "EVENTUAL"}
    answer = await other.http.put(other.path(), json=body, headers={name: value})
    assert answer.status_code == status
    if status != 201:
        code = "invalid_parameter" if status == 400 else "precondition_failed"
        assert_problem(answer, code, *(["If-None-Match"] if status == 400 else []))


async def test_a_namespace_that_did_not_change_is_not_sent_again(other: Rest) -> None:
    await other.create()
    for tags, status in (('"v1"', 304), ('W/"v1", "v0"', 304), ("*", 304), ('"v0"', 200)):
        answer = await other.http.get(other.path(), headers={"if-none-match": tags})
        assert (answer.status_code, answer.headers["etag"]) == (status, '"v1"')
        assert bool(answer.content) is (status == 200)


async def test_a_deleted_one_is_gone_and_its_name_free(other: Rest, app: App, storage: str) -> None:
    await other.create()
    token = fresh(app.clock.now_us())
    await other.add("c", 1, token)
    assert (await other.http.delete(other.path())).status_code == 204
    for answer in (await other.get("c"), await other.add("c", 1, token)):
        assert_problem(answer, "namespace_unknown")
    assert (await other.http.delete(other.path())).status_code == 404
    if storage == "dynamodb":
        # Another process might not know yet that it is deleted.
        answer = await other.create()
        assert_problem(answer, "unavailable")
        app.clock.advance(MINUTE)
        token = fresh(app.clock.now_us())
    assert (await other.create()).status_code == 201
    assert await other.count("c") == 0
    assert await other.names() == []
    assert (await other.add("c", 2, token)).json()["replayed"] is False
    await app.roll_up()
    assert await other.count("c") == 2


@every_store
async def test_a_deleted_one_stays_deleted_after_a_restart(app: App) -> None:
    other = app.rest.within("other")
    await other.create()
    await other.http.delete(other.path())
    await app.restart()
    assert (await app.http.get(other.path())).status_code == 404


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("counter_type", "BEST"),
        ("counter_type", 1),
        ("dataset", "nowhere"),
        ("accept_limit", "2h"),
        ("accept_limit", 5),
        ("accept_limit", "5"),
        ("accept_limit", "-5s"),
        ("rollup_window", "1ms"),
        ("rollup_window", "7s"),
        ("rollup_window", "2h"),
        ("shards", 0),
        ("shards", 1_025),
        ("shards", 1.0),
        ("shards", True),
        ("payload_check", "maybe"),
        ("key_ttl", "1s"),
        ("colour", "red"),
    ],
    ids=repr,
)
async def test_a_setting_out_of_bounds_is_named(other: Rest, name: str, value: Any) -> None:
    answer = await other.http.put(other.path(), json={"counter_type": "ACCURATE", name: value})
    shown = value if isinstance(value, str) else json.dumps(value)
    assert_problem(answer, "invalid_body", name, shown)
    assert (await other.http.get(other.path())).status_code == 404


async def test_windows_must_be_few_enough_to_keep(other: Rest) -> None:
    """7 d of 1 s windows are 604,800 rows a counter: the bound is 100,000."""
    answer = await other.create(rollup_window="1s")
    assert_problem(answer, "invalid_body", "rollup_window", "100000")


@every_store
async def test_a_longer_accept_limit_holds_from_the_next_slice(other: Rest, app: App) -> None:
    """The closing rule of slices that are made already must not move under their windows."""
    await other.create(accept_limit="5s")
    answer = await other.http.put(other.path(), json={"accept_limit": "1m"})
    assert answer.json()["accept_limit"] == "1m"
    await other.add("c", 1, fresh(app.clock.now_us()))
    late = fresh(app.clock.now_us())
    app.clock.advance(30 * SECOND)
    assert (await other.add("c", 1, late)).status_code == 410
    for _ in range(4):
        await app.roll_up_after(DAY)
    late = fresh(app.clock.now_us())
    await app.roll_up_after(30 * SECOND)
    assert (await other.add("c", 1, late)).status_code == 200
    assert await other.count("c") == 2
    await app.roll_up_after(2 * MINUTE)
    assert await other.count("c", "1h") == 2
