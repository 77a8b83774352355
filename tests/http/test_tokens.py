"""The promise of a token: acknowledged it counts once, refused for ever it never counts."""

import uuid

import pytest

from counter.types import Token
from tests.support.app import App, every_store
from tests.support.problems import assert_problem
from tests.support.rest import Rest, derive, fresh, item, on_wire, uuid7
from tests.support.times import DAY, HOUR, MINUTE, SECOND, rfc3339

# Of the namespace default: windows of 10 s are closed 5 s (accept limit) + 1 s (write timeout)
# after their end. The clock starts at 12:00:00.25, so the first closes at 12:00:16.


async def test_an_add_returns_the_written_event(rest: Rest, app: App) -> None:
    now_us = app.clock.now_us()
    answer = await rest.add("c", 3, fresh(now_us))
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {
        "namespace": "default",
        "counter": "c",
        "delta": 3,
        "event_time": rfc3339(now_us),
        "replayed": False,
    }


async def test_a_retry_counts_once_and_says_so(rest: Rest, app: App) -> None:
    token = fresh(app.clock.now_us())
    first = await rest.add("c", 3, token)
    again = await rest.add("c", 3, token)
    assert "idempotency-replayed" not in first.headers
    assert again.json() == first.json() | {"replayed": True}
    assert again.headers["idempotency-replayed"] == "true"
    assert await rest.count("c") == 3


async def test_add_and_get_counts_the_add_it_makes(rest: Rest, app: App) -> None:
    token = fresh(app.clock.now_us())
    await rest.add("c", 3, fresh(app.clock.now_us()))
    for replayed in (False, True):
        answer = await rest.add("c", 4, token, verb="add-and-get")
        assert answer.status_code == 200
        assert answer.json()["replayed"] is replayed
        assert answer.json()["count"] == 7
        assert answer.json()["as_of"] == rfc3339(app.clock.now_us())


async def test_a_token_of_the_future_is_asked_to_come_back(rest: Rest, app: App) -> None:
    token = fresh(app.clock.now_us() + 5 * SECOND + 1)
    answer = await rest.add("c", 1, token)
    assert_problem(answer, "token_in_future", "5 s")
    assert await rest.names() == []
    app.clock.advance(int(answer.headers["retry-after"]) * SECOND)
    assert (await rest.add("c", 1, token)).json()["replayed"] is False


async def test_a_token_at_the_accept_limit_is_still_written(rest: Rest, app: App) -> None:
    token = fresh(app.clock.now_us())
    app.clock.advance(5 * SECOND)
    assert (await rest.add("c", 1, token)).json()["replayed"] is False
    assert await rest.count("c") == 1


@every_store
async def test_a_late_token_that_is_found_is_replayed(rest: Rest, app: App) -> None:
    token = fresh(app.clock.now_us())
    await rest.add("c", 1, token)
    for wait_us in (5 * SECOND + 1, 2 * MINUTE, *[DAY] * 6):
        app.clock.advance(wait_us)
        for _ in range(3):
            await app.roll_up()
        again = await rest.add("c", 1, token)
        assert again.status_code == 200, again.text
        assert again.json()["replayed"] is True
    assert await rest.count("c") == 1


async def test_a_late_token_is_pending_while_its_window_is_open(rest: Rest, app: App) -> None:
    token = fresh(app.clock.now_us())
    app.clock.advance(5 * SECOND + 1)
    answer = await rest.add("c", 1, token)
    assert_problem(answer, "token_pending")
    app.clock.advance(int(answer.headers["retry-after"]) * SECOND)
    assert_problem(await rest.add("c", 1, token), "token_too_old", applied=False)


@every_store
async def test_a_window_closes_at_its_very_instant(rest: Rest, app: App, storage: str) -> None:
    token = fresh(app.clock.now_us())
    # Over DynamoDB the tests have a write timeout that is 9 s longer.
    app.clock.advance(15_749_999 + (9 * SECOND if storage == "dynamodb" else 0))
    assert (await rest.add("c", 1, token)).status_code == 503
    app.clock.advance(1)
    assert (await rest.add("c", 1, token)).status_code == 410


@every_store
@pytest.mark.parametrize("verb", ["add", "add-and-get", "clear"])
async def test_a_void_token_is_void_for_ever(rest: Rest, app: App, verb: str) -> None:
    token = fresh(app.clock.now_us())
    app.clock.advance(MINUTE)
    for wait_us in (0, 0, MINUTE, HOUR, DAY):
        await app.roll_up_after(wait_us)
        answer = await rest.post(
            rest.path("c", verb),
            {"idempotency_token": on_wire(token)} | ({} if verb == "clear" else {"delta": 1}),
        )
        assert_problem(answer, "token_too_old", applied=False)
    await app.restart()
    assert (await app.rest.add("c", 1, token)).status_code in (409, 410)
    assert await app.rest.count("c") == 0
    assert await app.rest.events("c") == []


async def test_a_token_past_retention_is_past_knowing(rest: Rest, app: App) -> None:
    found, unknown = fresh(app.clock.now_us()), fresh(app.clock.now_us())
    await rest.add("c", 1, found)
    for _ in range(8):
        await app.roll_up_after(DAY)
    for token in (found, unknown):
        answer = await rest.add("c", 1, token)
        assert_problem(answer, "token_too_old")
    assert await rest.count("c") == 1


async def test_a_token_older_than_the_namespace_is_void_at_once(rest: Rest, app: App) -> None:
    """It cannot have been written: there was no namespace."""
    await app.roll_up_after(HOUR)
    young = rest.within("young")
    await young.create()
    answer = await young.add("c", 1, fresh(app.clock.now_us() - 5 * SECOND - 1))
    assert_problem(answer, "token_too_old", applied=False)


@every_store
@pytest.mark.parametrize("late", [False, True])
async def test_another_payload_under_a_used_token_is_a_conflict(
    rest: Rest, app: App, late: bool
) -> None:
    added, cleared = fresh(app.clock.now_us() - 1), fresh(app.clock.now_us() - 2)
    await rest.clear("c", cleared)
    await rest.add("c", 1, added)
    app.clock.advance(MINUTE if late else 0)
    for answer in (
        await rest.clear("c", added),
        await rest.add("c", 1, cleared),
        await rest.add("c", 2, added),
    ):
        assert_problem(answer, "token_conflict")
    assert await rest.count("c") == 1


@pytest.mark.parametrize("verb", ["add", "add-and-get", "clear", "atomic/add"])
async def test_a_missing_token_is_refused(rest: Rest, verb: str) -> None:
    body = {"clear": {}, "atomic/add": {"items": [{"counter": "a", "delta": 1}]}}
    path = rest.path(None if "atomic" in verb else "c", verb)
    answer = await rest.post(path, body.get(verb, {"delta": 1}))
    assert_problem(answer, "token_missing", "idempotency_token", "Idempotency-Key")
    assert await rest.names() == []


async def test_a_malformed_retry_says_nothing_of_its_token(rest: Rest, app: App) -> None:
    """The token counts, whatever nonsense names it later: no refusal may deny that."""
    token = fresh(app.clock.now_us())
    await rest.add("c", 1, token)
    for body in (
        {"delta": "1", "idempotency_token": on_wire(token)},
        {"delta": 2**63, "idempotency_token": on_wire(token)},
        {"delta": 1, "idempotency_token": on_wire(token), "note": "again"},
    ):
        assert_problem(await rest.post(rest.path("c", "add"), body), "invalid_body")
    answer = await rest.within("nowhere").add("c", 1, token)
    assert_problem(answer, "namespace_unknown")
    assert (await rest.add("c", 1, token)).json()["replayed"] is True
    assert await rest.count("c") == 1


async def test_a_token_and_a_key_together_are_refused(rest: Rest, app: App) -> None:
    answer = await rest.add("c", 1, fresh(app.clock.now_us()), key="order:1")
    assert_problem(answer, "token_ambiguous")
    assert await rest.names() == []


async def test_batches_ignore_a_key(rest: Rest, app: App) -> None:
    """Some browsers and SDKs add one to each POST by themselves."""
    headers = {"idempotency-key": '"17"'}
    items = [item("c", 1, fresh(app.clock.now_us())), {"counter": "c", "delta": 1}]
    for replayed in (False, True):
        answer = await rest.post(rest.path(verb="batch/add"), {"items": items}, headers=headers)
        added, without = answer.json()["results"]
        assert added["replayed"] is replayed
        assert without["code"] == "token_missing"
    assert await rest.count("c") == 1


async def test_a_clear_erases_events_up_to_its_time(rest: Rest, app: App) -> None:
    now_us = app.clock.now_us()
    for time_us, delta in ((now_us - 1, 1), (now_us, 10), (now_us + 1, 100)):
        await rest.add("c", delta, fresh(time_us))
    answer = await rest.clear("c", fresh(now_us))
    assert answer.status_code == 200
    assert answer.json() == {
        "namespace": "default",
        "counter": "c",
        "event_time": rfc3339(now_us),
        "replayed": False,
    }
    assert await rest.count("c") == 100
    await rest.add("c", 1_000, fresh(now_us - 2))
    assert await rest.count("c") == 100, "a later arrival of an earlier add is erased too"
    await app.roll_up_after(MINUTE)
    assert await rest.count("c") == 100
    assert await rest.count("c", "1h") == 100


async def test_a_derived_token_is_one_of_its_own(rest: Rest, app: App) -> None:
    parent = fresh(app.clock.now_us())
    for token in (parent, derive(parent, "stock"), derive(parent, "bill"), derive(parent, "bill")):
        assert (await rest.add("c", 1, token)).status_code == 200
    assert await rest.count("c") == 3


async def test_the_service_issues_tokens_that_work(rest: Rest, app: App) -> None:
    answer = await rest.post("/v1/tokens", {"count": 1_000})
    assert answer.status_code == 200
    tokens = answer.json()["tokens"]
    assert len({token["token"] for token in tokens}) == 1_000
    assert tokens == sorted(tokens, key=lambda token: str(token["generation_time"]))
    for token in tokens[:3]:
        body = {"delta": 1, "idempotency_token": token}
        assert (await rest.post(rest.path("c", "add"), body)).status_code == 200
    assert await rest.count("c") == 3


@pytest.mark.parametrize("count", [0, 1_001, -1, "1", 1.0, True])
async def test_a_number_of_tokens_out_of_bounds_is_refused(rest: Rest, count: object) -> None:
    assert_problem(await rest.post("/v1/tokens", {"count": count}), "invalid_body", "count")


async def test_a_nonce_may_be_written_as_hex_or_as_a_uuid(rest: Rest, app: App) -> None:
    nonce = uuid.uuid4()
    for text in (str(nonce), nonce.hex, str(nonce).upper()):
        token = {"token": text, "generation_time": rfc3339(app.clock.now_us())}
        answer = await rest.post(rest.path("c", "add"), {"delta": 1, "idempotency_token": token})
        assert answer.status_code == 200, answer.text
    assert await rest.count("c") == 1
    (event,) = await rest.events("c")
    assert event["event_id"] == str(nonce)


async def test_a_uuid7_key_is_the_token_it_carries(rest: Rest, app: App) -> None:
    now_us = app.clock.now_us()
    key = uuid7(now_us)
    first = await rest.add("c", 1, key=key)
    assert first.json()["event_time"] == rfc3339(now_us)
    again = await rest.add("c", 1, Token(uuid.UUID(key).bytes, now_us))
    assert again.json()["replayed"] is True
    assert await rest.count("c") == 1


async def test_a_token_is_honoured_as_long_as_each_response_says(rest: Rest, app: App) -> None:
    """A found one is replayed and a void one void; soon after that both are past knowing."""
    found, void = fresh(app.clock.now_us()), fresh(app.clock.now_us())
    answer = await rest.add("c", 1, found)
    seconds = int(answer.headers["idempotency-ttl"])
    assert 6 * DAY < seconds * SECOND < 7 * DAY
    for _ in range(seconds * SECOND // DAY):
        await app.roll_up_after(DAY)
    app.clock.advance(seconds * SECOND % DAY)
    again = await rest.add("c", 1, found)
    assert (again.status_code, again.json()["replayed"]) == (200, True)
    refused = await rest.add("c", 1, void)
    assert_problem(refused, "token_too_old", applied=False)
    assert {each.headers["idempotency-ttl"] for each in (again, refused)} == {str(seconds)}
    app.clock.advance(6 * SECOND)
    for token in (found, void):
        unknown = await rest.add("c", 1, token)
        assert_problem(unknown, "token_too_old")


async def test_a_key_is_honoured_as_long_as_each_response_says(rest: Rest, app: App) -> None:
    short = rest.within("short")
    await short.create("ACCURATE", key_ttl="1m")
    answer = await short.add("c", 1, key="order-1")
    seconds = int(answer.headers["idempotency-ttl"])
    assert seconds == 55
    app.clock.advance(seconds * SECOND)
    again = await short.add("c", 1, key="order-1")
    assert again.json()["replayed"] is True
    conflict = await short.add("c", 2, key="order-1")
    assert_problem(conflict, "token_conflict")
    assert conflict.headers["idempotency-ttl"] == "55"
    app.clock.advance(5 * SECOND)
    assert (await short.add("c", 1, key="order-1")).json()["replayed"] is False
    uuid_key = await short.add("c", 1, key=uuid7(app.clock.now_us()))
    assert int(uuid_key.headers["idempotency-ttl"]) > seconds


async def test_every_write_says_how_long_its_token_is_honoured(rest: Rest, app: App) -> None:
    """Refused ones too, and nothing else does; rough counters have no tokens."""
    token = {"idempotency_token": on_wire(fresh(app.clock.now_us()))}
    items = {"items": [{"counter": "a", "delta": 1}]}
    writes = [
        await rest.post(rest.path("c", "add"), {"delta": 1} | token),
        await rest.post(rest.path("c", "add"), {"delta": 1}),
        await rest.post(rest.path("c", "add"), {}),
        await rest.post(rest.path("c", "add-and-get"), {"delta": 1} | token),
        await rest.post(rest.path("c", "clear"), {} | token),
        await rest.post(rest.path(verb="atomic/add"), items | token),
        await rest.post(rest.path(verb="batch/add"), {"items": [items["items"][0] | token]}),
    ]
    assert [each.status_code for each in writes] == [200, 400, 400, 200, 409, 200, 200]
    assert len({each.headers["idempotency-ttl"] for each in writes}) == 1
    rough = rest.within("rough")
    await rough.create("BEST_EFFORT")
    others = [
        await rest.http.get(rest.path("c")),
        await rest.post(rest.path("c", "recount")),
        await rough.post(rough.path("c", "add"), {"delta": 1}),
    ]
    assert [each.status_code for each in others] == [200, 202, 200]
    assert not any("idempotency-ttl" in each.headers for each in others)
