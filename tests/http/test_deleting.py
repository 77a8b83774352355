"""A deleted counter reads 0 and is not listed; its tokens keep their outcomes."""

from contextlib import ExitStack
from pathlib import Path

from tests.support.app import App, every_store, running, store_that_fails, store_that_stalls
from tests.support.rest import Rest, fresh
from tests.support.times import MINUTE, SECOND


async def test_a_deleted_counter_is_as_one_that_was_never_written(rest: Rest, app: App) -> None:
    for name in ("a/b", "c"):
        await rest.add(name, 3, fresh(app.clock.now_us()))
    answer = await rest.delete("a/b", fresh(app.clock.now_us() + 1))
    assert (answer.status_code, answer.json()["replayed"]) == (200, False)
    assert await rest.names() == ["c"]
    assert await rest.count("a/b") == 0
    await app.roll_up_after(MINUTE)
    assert await rest.names() == ["c"]
    assert await rest.count("a/b", "1h") == 0
    batch = await rest.batch_get(["a/b", "never"], "0s")
    assert [each["count"] for each in batch.json()["results"]] == [0, 0]


async def test_an_add_after_a_delete_counts_from_0_and_is_listed(rest: Rest, app: App) -> None:
    """At once if the store sees the name, and otherwise when the add is rolled up."""
    await rest.add("c", 3, fresh(app.clock.now_us()))
    await rest.delete("c", fresh(app.clock.now_us() + 1))
    app.clock.advance(SECOND)
    await rest.add("c", 5, fresh(app.clock.now_us()))
    assert await rest.count("c") == 5
    await app.roll_up_after(MINUTE)
    assert await rest.names() == ["c"]
    assert await rest.count("c", "1h") == 5


async def test_tokens_of_a_deleted_counter_keep_their_outcomes(rest: Rest, app: App) -> None:
    """At once, and when they are late: no retry counts again, and none lists the counter."""
    token, made_us = fresh(app.clock.now_us()), app.clock.now_us() + 1
    delete = fresh(made_us)
    await rest.add("c", 3, token)
    await rest.delete("c", delete)
    for _ in range(3):
        again = await rest.add("c", 3, token)
        assert (again.status_code, again.json()["replayed"]) == (200, True)
        assert (await rest.add("c", 4, token)).json()["code"] == "token_conflict"
        assert (await rest.delete("c", delete)).json()["replayed"] is True
        assert (await rest.count("c"), await rest.names()) == (0, [])
        await app.roll_up_after(MINUTE)
    assert [each.get("clear", False) for each in await rest.events("c")] == [True, False]
    assert (await rest.count("c", "1h"), await rest.names()) == (0, [])


@every_store
async def test_a_retried_delete_deletes_nothing_that_came_later(rest: Rest, app: App) -> None:
    delete = fresh(app.clock.now_us())
    await rest.delete("c", delete)
    app.clock.advance(MINUTE)
    await rest.add("c", 2, fresh(app.clock.now_us()))
    for _ in range(2):
        answer = await rest.delete("c", delete)
        assert (answer.status_code, answer.json()["replayed"]) == (200, True)
        assert (await rest.count("c"), await rest.names()) == (2, ["c"])
        await app.roll_up_after(MINUTE)


async def test_an_attempt_of_a_delete_that_dies_hides_nothing_that_was_rolled_up(
    fast_dir: Path,
) -> None:
    """It stalls after its search while its retry finds an add, and dies before its recount."""
    async with running("memory", fast_dir) as app:
        rest = app.rest
        delete = fresh(app.clock.now_us())

        async def the_retry_is_acknowledged() -> None:
            await rest.add("c", 2, fresh(app.clock.now_us() + 1))
            assert (await rest.delete("c", delete)).status_code == 200
            await app.roll_up_after(MINUTE)
            dies.enter_context(store_that_fails(app, "write_marks"))

        stalls = store_that_stalls(app, "write_pending", the_retry_is_acknowledged)
        with ExitStack() as dies, stalls:
            assert (await rest.delete("c", delete)).status_code == 503
        assert await rest.names() == ["c"]


async def test_an_add_of_an_earlier_time_is_erased_and_lists_nothing(rest: Rest, app: App) -> None:
    early = fresh(app.clock.now_us())
    await rest.delete("c", fresh(app.clock.now_us() + SECOND))
    assert (await rest.add("c", 7, early)).json()["replayed"] is False
    await app.roll_up_after(MINUTE)
    assert (await rest.count("c", "1h"), await rest.names()) == (0, [])


async def test_a_counter_that_is_deleted_twice_stays_deleted(rest: Rest, app: App) -> None:
    """The later delete's own event does not undo the earlier one, nor does an add between them."""
    now_us = app.clock.now_us()
    earlier, between, later = (fresh(now_us + after) for after in (1, 2, 3))
    await rest.add("c", 3, fresh(now_us))
    for delete in (earlier, later, earlier):
        assert (await rest.delete("c", delete)).status_code == 200
        assert (await rest.count("c"), await rest.names()) == (0, [])
    assert (await rest.add("c", 7, between)).json()["replayed"] is False
    for _ in range(2):
        await app.roll_up_after(MINUTE)
        assert (await rest.count("c", "1h"), await rest.names()) == (0, [])
    await rest.add("c", 5, fresh(app.clock.now_us()))
    await app.roll_up_after(MINUTE)
    assert (await rest.count("c", "1h"), await rest.names()) == (5, ["c"])


async def test_a_key_deletes_once_without_a_body(rest: Rest, app: App) -> None:
    await rest.add("c", 3, key="one")
    app.clock.advance(1)
    assert (await rest.delete("c", key="one")).json()["replayed"] is False
    assert (await rest.delete("c", key="one")).json()["replayed"] is True
    answer = await rest.delete("c")
    assert (answer.status_code, answer.json()["code"]) == (400, "token_missing")


async def test_deleting_a_best_effort_counter_removes_its_number(rest: Rest, app: App) -> None:
    rough = rest.within("rough")
    await rough.create("BEST_EFFORT")
    await rough.add("c", 3)
    assert (await rough.delete("c")).json()["retry_safe"] is False
    assert await rough.count("c") == 0
