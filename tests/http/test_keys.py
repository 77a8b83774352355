"""Any id as an Idempotency-Key: the service gives it a time, and every retry the same one."""

import asyncio

import pytest

from tests.support.app import App, every_store, store_that_fails
from tests.support.problems import assert_problem
from tests.support.rest import Rest, fresh, uuid7
from tests.support.times import DAY, HOUR, MINUTE, SECOND, rfc3339


async def test_a_key_is_given_the_time_of_its_first_sighting(rest: Rest, app: App) -> None:
    first_us = app.clock.now_us()
    first = await rest.add("c", 1, key="order:1")
    assert first.status_code == 200
    assert first.json()["event_time"] == rfc3339(first_us)
    assert first.json()["replayed"] is False
    for wait_us in (1, SECOND, MINUTE, 23 * HOUR):
        await app.roll_up_after(wait_us)
        again = await rest.add("c", 1, key="order:1")
        assert again.json() == first.json() | {"replayed": True}
    assert await rest.count("c") == 1


@every_store
async def test_hedges_of_a_key_count_once(rest: Rest) -> None:
    answers = await asyncio.gather(*(rest.add("c", 1, key="order:1") for _ in range(20)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["event_time"] for answer in answers}) == 1
    assert await rest.count("c") == 1


async def test_a_key_has_its_own_life_on_every_counter_and_operation(rest: Rest) -> None:
    for answer in (
        await rest.add("c", 1, key="order:1"),
        await rest.add("d", 1, key="order:1"),
        await rest.atomic_add([("c", 1), ("d", 1)], None, key="order:1"),
    ):
        assert answer.status_code == 200, answer.text
    assert [await rest.count(counter) for counter in ("c", "d")] == [2, 2]


@pytest.mark.parametrize(
    ("plain", "quoted"),
    [
        ("order:1", '"order:1"'),
        ('say "hi" \\o/', '"say \\"hi\\" \\\\o/"'),
        # Parameters are not part of the key.
        ("order:1", '"order:1";v=1'),
        ("order:1", '"order:1"; v'),
        ("order:1", '"order:1";v="a\\"b;,";*w=?1;x=:YQ==:'),
        # Every visible key counts once.
        *((key, key) for key in ("x", "x" * 255, "!~", "01890a5d-ac96-474b-bcce-b302099a8057")),
    ],
)
async def test_a_key_may_be_a_quoted_string(rest: Rest, plain: str, quoted: str) -> None:
    for key in (plain, quoted):
        assert (await rest.add("c", 1, key=key)).status_code == 200
    assert await rest.count("c") == 1


@pytest.mark.parametrize(
    "key",
    [
        "order:1, order:1",
        "order:1,order:1 ,order:1",
        '"order:1", "order:1"',
        '"order:1", "order:2"',
        '"order:1"x',
        '"order:1";',
        '"order:1";V=1',
        '"order:1" ;v=1',
        '"order:1";v="',
        '"order:1',
        '"or"der:1"',
        '"or\\der:1"',
        '"',
        ",",
    ],
)
async def test_an_invalid_idempotency_key_is_refused(rest: Rest, key: str) -> None:
    """A proxy joins the lines of two headers with a comma: that is no other key."""
    assert_problem(await rest.add("c", 1, key=key), "invalid_parameter", "Idempotency-Key")
    assert await rest.count("c") == 0


async def test_a_key_may_have_commas_and_one_of_equal_parts_is_quoted(rest: Rest) -> None:
    for key in ("1,2", "a, b, a", '"1,1"'):
        assert (await rest.add("c", 1, key=key)).status_code == 200
    assert await rest.count("c") == 3


@every_store
async def test_a_key_is_a_new_one_after_its_time_to_live(rest: Rest, app: App) -> None:
    await rest.add("c", 1, key="order:1")
    await app.roll_up_after(DAY + 1)
    answer = await rest.add("c", 1, key="order:1")
    assert answer.json()["replayed"] is False
    assert await rest.count("c") == 2


@pytest.mark.parametrize("wait_us", [0, 7 * SECOND, MINUTE, HOUR])
async def test_a_key_whose_add_was_never_written_counts_once_later(
    rest: Rest, app: App, wait_us: int
) -> None:
    """The reservation exists, the add does not: the key gets a new time once the old is void."""
    with store_that_fails(app, "append"):
        answer = await rest.add("c", 1, key="order:1")
        assert_problem(answer, "store_unavailable")
    reserved_us = app.clock.now_us()
    await app.roll_up_after(wait_us)
    answer = await rest.add("c", 1, key="order:1")
    if answer.status_code == 503:
        assert_problem(answer, "token_pending")
        app.clock.advance(int(answer.headers["retry-after"]) * SECOND)
        answer = await rest.add("c", 1, key="order:1")
    assert answer.status_code == 200
    assert answer.json()["replayed"] is False
    expected_us = reserved_us if wait_us == 0 else app.clock.now_us()
    assert answer.json()["event_time"] == rfc3339(expected_us)
    again = await rest.add("c", 1, key="order:1")
    assert again.json() == answer.json() | {"replayed": True}
    assert await rest.count("c") == 1
    await app.roll_up_after(MINUTE)
    assert await rest.count("c", "1h") == 1


async def test_an_old_uuid7_key_learns_how_to_be_read_as_a_plain_id(rest: Rest, app: App) -> None:
    key = uuid7(app.clock.now_us())
    await app.roll_up_after(HOUR)
    answer = await rest.add("c", 1, key=key)
    problem = assert_problem(answer, "token_too_old", applied=False)
    assert "prefix" in problem["detail"]
    assert (await rest.add("c", 1, key=f"order:{key}")).status_code == 200


async def test_a_key_clears_once(rest: Rest, app: App) -> None:
    await rest.add("c", 1, fresh(app.clock.now_us()))
    first = await rest.clear("c", key="daily:1")
    assert first.json()["event_time"] == rfc3339(app.clock.now_us())
    app.clock.advance(1)
    await rest.add("c", 2, fresh(app.clock.now_us()))
    assert (await rest.clear("c", key="daily:1")).json()["replayed"] is True
    assert await rest.count("c") == 2


@every_store
async def test_a_key_survives_a_restart(app: App) -> None:
    first = await app.rest.add("c", 1, key="order:1")
    await app.restart()
    app.clock.advance(MINUTE)
    again = await app.rest.add("c", 1, key="order:1")
    assert again.json() == first.json() | {"replayed": True}
    assert await app.rest.count("c") == 1


async def test_the_header_is_ignored_if_no_key_is_needed(rest: Rest) -> None:
    """Even a malformed one."""
    other, headers = rest.within("other"), {"idempotency-key": '"' * 300}
    for method, path, body, status in (
        ("PUT", other.path(), {"counter_type": "ACCURATE"}, 201),
        ("GET", other.path("c"), None, 200),
        ("POST", other.path("c", "recount"), {}, 202),
        ("POST", other.path(verb="batch/get"), {"counters": ["c"]}, 200),
        ("POST", "/v1/tokens", {}, 200),
        ("DELETE", other.path(), None, 204),
    ):
        answer = await rest.http.request(method, path, json=body, headers=headers)
        assert answer.status_code == status, answer.text
