"""A malformed request is refused in words that help, and leaves nothing behind."""

import gzip
import json
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import AsyncMock

import pytest

from counter.limits import FIELDS_EXPLAINED_MAX
from tests.support.app import App
from tests.support.problems import assert_problem, problem_of
from tests.support.rest import Json, Rest, fresh, item, on_wire
from tests.support.times import HOUR, SECOND

ADD = "/v1/namespaces/default/counters/c/add"
ONE_MEBIBYTE = 1024 * 1024
AS_JSON = {"content-type": "application/json"}


@pytest.fixture
def storage() -> str:
    """Nothing here depends on the store."""
    return "memory"


@pytest.fixture(autouse=True)
async def nothing_is_written(rest: Rest, app: App) -> AsyncIterator[None]:
    """Around every test here: the one event that was there is the only one afterwards."""
    answer = await rest.add("c", 7, fresh(app.clock.now_us()))
    assert answer.status_code == 200
    before = await rest.events("c")
    yield
    assert await rest.names() == ["c"]
    assert await rest.events("c") == before
    assert await rest.count("c") == 7


@pytest.fixture
def body(app: App) -> Json:
    """A body that would be fine."""
    return {"delta": 1, "idempotency_token": on_wire(fresh(app.clock.now_us()))}


def encoded(body: Any) -> bytes:
    return json.dumps(body).encode()


def refused(answer: Any, *names: str) -> Json:
    return assert_problem(answer, 400, "invalid_body", applied=None, retry="never", names=names)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"delta": 1,}',
        b'{"delta": 01}',
        b"delta=1",
        b'{"delta": 1} {"delta": 2}',
        b'{"delta": NaN}',
        b'{"delta": Infinity}',
        b"\xff\xfe",
        b'{"delta": "\xc3\x28"}',
        b'{"delta": ' + b"9" * 5_000 + b"}",
        b"[" * 100_000,
        b'{"delta":' * 50_000,
    ],
    ids=lambda content: repr(content[:16]),
)
async def test_a_body_that_is_not_json_is_refused(rest: Rest, content: bytes) -> None:
    refused(await rest.raw(ADD, content))


def crowd(count: int = 20_000) -> bytes:
    """The members of an object with so many fields that no body knows."""
    return b",".join(b'"x%d":1' % number for number in range(count))


@pytest.mark.parametrize(
    ("verb", "start", "end", "field"),
    [
        ("counters/c/add", b'{"delta":1,', b"}", "x0"),
        ("counters/c/add", b'{"delta":NaN,', b"}", "x0"),
        ("counters/c/add", b'{"delta":1,"idempotency_token":{', b"}}", "idempotency_token.x0"),
        ("counters/c/clear", b"{", b"}", "x0"),
        ("batch/add", b'{"items":[{"counter":"c",', b"}]}", "items.0.x0"),
        ("batch/add", b'{"items":[{"counter":"c"},{', b"}]}", "items.1.x0"),
        ("batch/add", b'{"items":{', b"}}", "items"),
        ("batch/get", b'{"counters":["c"],', b"}", "x0"),
        ("atomic/add", b'{"items":[{"counter":"c",', b"}]}", "items.0.x0"),
        ("counters/c/recount", b"{", b"}", "x0"),
        ("counters/c/add", b'{"delta":{', b"}}", "delta"),
    ],
)
async def test_a_body_of_very_many_fields_is_refused_at_the_first_that_is_wrong(
    rest: Rest, verb: str, start: bytes, end: bytes, field: str
) -> None:
    """An error of pydantic for each of 131,000 fields blocked the event loop for 0.4 s to 1.6 s."""
    answer = await rest.raw(rest.path(verb=verb), start + crowd() + end)
    problem = refused(answer, field)
    assert [each["field"] for each in problem["errors"]] == [field]


async def test_a_line_of_very_many_fields_is_refused_at_the_first_that_is_wrong(rest: Rest) -> None:
    lines = b'{"counter":"c",' + crowd() + b"}\n{}\n"
    answer = await rest.raw(rest.path(verb="batch/add"), lines, content_type="application/x-ndjson")
    first, second = (json.loads(line) for line in answer.text.splitlines())
    assert [each["field"] for each in first["errors"]] == ["items.0.x0"]
    assert second["code"] == "invalid_body"


def taking_a_body(app: App) -> list[Any]:
    routes = [each for each in app.application.pipeline.routes.values() if each.method != "GET"]
    taking = [each for each in routes if each.body or each.path.endswith(("/batch/add", "/events"))]
    assert len(taking) >= 12
    return taking


@pytest.mark.parametrize("coding", ["gzip", "br", "identity, x-gzip"])
async def test_a_compressed_body_is_refused_by_every_operation_with_a_body(
    rest: Rest, app: App, coding: str
) -> None:
    rules = [{"type": "order.paid", "counter": "c"}]
    assert (await rest.http.put(rest.path(), json={"event_rules": rules})).is_success
    for route in taking_a_body(app):
        path = route.path.format(namespace="default", counter="c")
        for content_type in ("application/json", "application/x-ndjson"):
            headers = {"content-type": content_type, "content-encoding": coding}
            if content_type == "application/json" or path.endswith("batch/add"):
                answer = await app.http.request(
                    route.method, path, content=gzip.compress(b"{}"), headers=headers
                )
                problem = assert_problem(
                    *(answer, 415, "unsupported_media_type"), applied=None, retry="never"
                )
                assert problem["detail"].startswith(f"Content-Encoding is {coding}; ")
                assert answer.headers["accept-encoding"] == "identity"


async def test_a_compressed_stream_is_refused(rest: Rest) -> None:
    async def lines() -> AsyncIterator[bytes]:
        yield gzip.compress(b'{"counter": "c", "delta": 1}\n')

    headers = {"content-type": "application/x-ndjson", "content-encoding": "gzip"}
    answer = await rest.http.post(rest.path(verb="batch/add"), content=lines(), headers=headers)
    assert_problem(answer, 415, "unsupported_media_type", applied=None, retry="never")


#: Bytes that are not UTF-8: a byte that it never has, a surrogate, a part of a character, and a
#: character beyond the last one.
NOT_UTF8 = [b"\xff", b"\xed\xa0\x80", b"\xc3", b"\xf4\x90\x80\x80"]
#: A text that makes a body too large to say all that is wrong with it.
MANY_COLONS = b":" * (FIELDS_EXPLAINED_MAX + 1)


@pytest.mark.parametrize("filler", [b"", MANY_COLONS], ids=["small", "many colons"])
@pytest.mark.parametrize(
    "form",
    [
        b'{"%s":"%s"}',
        b'{"items":[{"%s":"%s"}]}',
        b'{"delta":1,"idempotency_token":{"%s":"%s"}}',
        b'{"limits":{"%s":"%s"}}',
        b'{"x%s":NaN,"y":"%s"}',
    ],
)
async def test_a_name_that_is_not_utf8_is_refused_by_every_operation_with_a_body(
    app: App, form: bytes, filler: bytes
) -> None:
    for route in taking_a_body(app):
        path = route.path.format(namespace="default", counter="c")
        for bad in NOT_UTF8:
            answer = await app.http.request(
                route.method, path, content=form % (bad, filler), headers=AS_JSON
            )
            refused(answer)


@pytest.mark.parametrize("bad", NOT_UTF8, ids=repr)
async def test_a_line_that_is_not_utf8_is_refused_alone(rest: Rest, app: App, bad: bytes) -> None:
    line = b'{"%s":"%s"}' % (bad, MANY_COLONS)
    good = encoded(item("c", 7, fresh(app.clock.now_us() - HOUR)))
    lines = b"\n".join((line, good, line))
    answer = await rest.raw(rest.path(verb="batch/add"), lines, content_type="application/x-ndjson")
    codes = [json.loads(each)["code"] for each in answer.text.splitlines()]
    assert codes == ["invalid_body", "token_too_old", "invalid_body"]


async def test_names_of_many_colons_are_read(rest: Rest) -> None:
    """The parsed fields of a body decide, not their apparent number."""
    names = [":" * 200 + str(number) for number in range(100)]
    answer = await rest.post(rest.path(verb="batch/get"), {"counters": names})
    assert [each["counter"] for each in answer.json()["results"]] == names


async def test_the_unknown_fields_of_an_ordinary_body_are_all_named(rest: Rest, body: Json) -> None:
    answer = await rest.post(ADD, body | {"dleta": 2, "toekn": 3})
    assert [each["field"] for each in refused(answer)["errors"]] == ["dleta", "toekn"]


@pytest.mark.parametrize("content", [b"[]", b"1", b"null", b'"add"', b"true"])
async def test_a_body_that_is_not_an_object_is_refused(rest: Rest, content: bytes) -> None:
    refused(await rest.raw(ADD, content))


async def test_an_unknown_field_is_named(rest: Rest, body: Json) -> None:
    refused(await rest.post(ADD, body | {"dleta": 2}), "dleta")


async def test_an_unknown_field_of_the_token_is_named(rest: Rest, body: Json) -> None:
    body["idempotency_token"]["generated_at"] = "now"
    refused(await rest.post(ADD, body), "idempotency_token", "generated_at")


@pytest.mark.parametrize("delta", [2**63, -(2**63) - 1, 10**30])
async def test_a_delta_beyond_64_bits_is_named_with_its_bound(
    rest: Rest, body: Json, delta: int
) -> None:
    bound = str(2**63 - 1) if delta > 0 else str(-(2**63))
    refused(await rest.post(ADD, body | {"delta": delta}), "delta", str(delta), bound)


@pytest.mark.parametrize("delta", [1.5, 1.0, "1", True, None, [1], {"value": 1}], ids=repr)
async def test_a_delta_that_is_not_an_integer_is_refused(
    rest: Rest, body: Json, delta: Any
) -> None:
    refused(await rest.post(ADD, body | {"delta": delta}), "delta")


@pytest.mark.parametrize("number", [b"1e0", b"1E3", b"1.0", b"-1.0e2"])
async def test_a_number_written_as_a_float_is_refused(
    rest: Rest, body: Json, number: bytes
) -> None:
    content = encoded(body | {"delta": 424242}).replace(b"424242", number)
    refused(await rest.raw(ADD, content), "delta")


@pytest.mark.parametrize(
    "time",
    [
        "2026-03-01T12:00:00",
        "2026-03-01",
        "12:00:00Z",
        "yesterday",
        "",
        "2026-13-01T12:00:00Z",
        "2026-02-30T12:00:00Z",
        "1999-12-31T23:59:59.999999Z",
        "2200-01-02T00:00:00Z",
        "9999-12-31T23:59:59Z",
        "0001-01-01T00:00:00Z",
        "0000-00-00T00:00:00Z",
        1_772_366_400,
        1_772_366_400.25,
        "1772366400",
        True,
        None,
    ],
    ids=repr,
)
async def test_a_time_that_is_naive_or_absurd_is_refused(rest: Rest, body: Json, time: Any) -> None:
    body["idempotency_token"]["generation_time"] = time
    shown = time[:19] if isinstance(time, str) else ""
    refused(await rest.post(ADD, body), "generation_time", shown)


@pytest.mark.parametrize(
    ("time", "bound"), [("1999-12-31T23:59:59Z", "2000"), ("2201-01-01T00:00:00Z", "2200")]
)
async def test_a_time_out_of_bounds_names_the_bound(
    rest: Rest, body: Json, time: str, bound: str
) -> None:
    body["idempotency_token"]["generation_time"] = time
    refused(await rest.post(ADD, body), "generation_time", bound)


@pytest.mark.parametrize(
    "nonce",
    ["", "0" * 31, "0" * 33, "g" * 32, "00000000-0000-0000-0000-00000000000", 7, None, ["0" * 32]],
    ids=repr,
)
async def test_a_nonce_of_another_size_is_refused(rest: Rest, body: Json, nonce: Any) -> None:
    body["idempotency_token"]["token"] = nonce
    refused(await rest.post(ADD, body), "idempotency_token.token")


@pytest.mark.parametrize("field", ["token", "generation_time"])
async def test_half_a_token_is_refused(rest: Rest, body: Json, field: str) -> None:
    del body["idempotency_token"][field]
    refused(await rest.post(ADD, body), f"idempotency_token.{field}")


async def test_a_body_over_the_limit_is_refused_with_the_limit(rest: Rest) -> None:
    content = b" " * (ONE_MEBIBYTE + 1)
    assert_problem(
        await rest.raw(ADD, content),
        *(413, "body_too_large"),
        applied=None,
        retry="never",
        names=(str(ONE_MEBIBYTE),),
    )


async def test_a_body_of_no_stated_length_is_cut_off_at_the_limit(rest: Rest) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * (ONE_MEBIBYTE // 16)

    headers = {"content-type": "application/json"}
    answer = await rest.http.post(ADD, content=pieces(), headers=headers)
    assert_problem(answer, 413, "body_too_large", applied=None, retry="never")


async def test_a_body_just_at_the_limit_is_read(rest: Rest, app: App) -> None:
    """It repeats the add that is there: nothing is new."""
    event = (await rest.events("c"))[0]
    token = {"token": event["event_id"], "generation_time": event["event_time"]}
    content = encoded({"delta": 7, "idempotency_token": token})
    answer = await rest.raw(ADD, content.ljust(ONE_MEBIBYTE))
    assert answer.status_code == 200
    assert answer.json()["replayed"] is True


async def test_a_batch_over_the_limit_is_refused_whole(rest: Rest, app: App) -> None:
    now_us = app.clock.now_us()
    items = [item("c", 1, fresh(now_us)) for _ in range(1_001)]
    problem = problem_of(await rest.batch_add(items))
    assert problem["status"] in (400, 413)
    assert problem["applied"] is None
    assert "items" in problem["detail"]
    assert "1000" in problem["detail"].replace(",", "")


async def test_a_batch_get_over_the_limit_is_refused_whole(rest: Rest) -> None:
    problem = problem_of(await rest.batch_get(["c"] * 1_001))
    assert problem["status"] in (400, 413)
    assert "counters" in problem["detail"]


async def test_an_unknown_namespace_is_named(rest: Rest, app: App) -> None:
    elsewhere = rest.within("elsewhere")
    for answer in (
        await elsewhere.add("c", 1, fresh(app.clock.now_us())),
        await elsewhere.get("c"),
        await elsewhere.batch_add([item("c", 1, fresh(app.clock.now_us()))]),
        await elsewhere.http.get(elsewhere.path(verb="counters")),
        await elsewhere.http.get(elsewhere.path()),
    ):
        assert_problem(
            answer, *(404, "namespace_unknown"), applied=None, retry="never", names=("elsewhere",)
        )


async def test_an_unknown_path_is_a_problem_too(rest: Rest) -> None:
    for path in ("/", "/v1", "/v2/namespaces", "/v1/namespaces/default/counters/c/subtract"):
        assert_problem(await rest.http.get(path), 404, "not_found", applied=None, retry="never")


async def test_the_printed_address_leads_to_the_documentation(rest: Rest) -> None:
    answer = await rest.http.get("/")
    assert_problem(
        answer, 404, "not_found", applied=None, retry="never", names=("/console", "/docs")
    )


@pytest.mark.parametrize(
    ("method", "verb"),
    [("PUT", "add"), ("GET", "add"), ("DELETE", "clear"), ("POST", "events"), ("PATCH", "")],
)
async def test_a_wrong_method_lists_the_right_ones(rest: Rest, method: str, verb: str) -> None:
    answer = await rest.http.request(method, rest.path("c", verb), json={})
    assert_problem(answer, 405, "method_not_allowed", applied=None, retry="never", names=(method,))
    assert answer.headers["allow"]
    assert method not in answer.headers["allow"].split(", ")


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "application/x-www-form-urlencoded", "application/xml", "multipart/form-data"],
)
async def test_a_wrong_content_type_is_named(rest: Rest, body: Json, content_type: str) -> None:
    answer = await rest.raw(ADD, encoded(body), content_type=content_type)
    assert_problem(
        answer,
        *(415, "unsupported_media_type"),
        applied=None,
        retry="never",
        names=(content_type, "application/json"),
    )


@pytest.mark.parametrize(
    ("escaped", "bound"),
    [
        ("x" * 257, "256"),
        ("%00", ""),
        ("a%0Ab", ""),
        ("%7F", ""),
        ("%FF", ""),
        ("%ED%A0%80", ""),
        ("%E2%80%A8", ""),
    ],
)
async def test_a_counter_name_out_of_bounds_is_refused(
    rest: Rest, body: Json, escaped: str, bound: str
) -> None:
    path = f"/v1/namespaces/default/counters/{escaped}"
    for answer in (await rest.post(f"{path}/add", body), await rest.http.get(path)):
        assert_problem(
            answer,
            *(400, "invalid_parameter"),
            applied=None,
            retry="never",
            names=("counter", bound),
        )


@pytest.mark.parametrize("name", ["", "x" * 257, "a\nb", 7, None])
async def test_a_counter_name_out_of_bounds_spoils_only_its_item(
    rest: Rest, app: App, name: Any
) -> None:
    bad = item("c", 1, fresh(app.clock.now_us())) | {"counter": name}
    answer = await rest.raw(rest.path(verb="batch/add"), encoded({"items": [bad]}))
    assert answer.status_code == 200, answer.text
    (problem,) = answer.json()["results"]
    assert (problem["status"], problem["applied"]) == (400, None)
    assert "counter" in problem["detail"]


@pytest.mark.parametrize("name", ["Default", "9lives", "a" * 64, "a.b", "%C3%A9", "-a", "_a"])
async def test_a_namespace_name_out_of_bounds_cannot_be_made(rest: Rest, name: str) -> None:
    answer = await rest.http.put(f"/v1/namespaces/{name}", json={"counter_type": "ACCURATE"})
    assert_problem(
        answer, 400, "invalid_parameter", applied=None, retry="never", names=("namespace",)
    )


@pytest.mark.parametrize("staleness", ["5", "-1s", "1y", "soon", "", "1.5s"])
async def test_an_invalid_staleness_is_refused(rest: Rest, staleness: str) -> None:
    assert_problem(
        await rest.get("c", staleness),
        *(400, "invalid_parameter"),
        applied=None,
        retry="never",
        names=("max_staleness", staleness),
    )


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=ten", "limit"),
        ("limit=000000001999999", "limit"),
        ("limit=1&limit=2", "limit"),
        ("size=1", "size"),
        ("limit=%FF", "limit"),
        ("page=nonsense", "page"),
        ("from=2026-03-01T12:00:00", "from"),
        ("to=late", "to"),
    ],
)
async def test_a_parameter_out_of_bounds_is_named(rest: Rest, query: str, name: str) -> None:
    answer = await rest.http.get(f"{rest.path('c', 'events')}?{query}")
    assert_problem(answer, 400, "invalid_parameter", applied=None, retry="never", names=(name,))


@pytest.mark.parametrize("key", ["", "x" * 256, "tab\there", "snow\N{SNOWMAN}", '""'])
async def test_a_key_out_of_bounds_is_refused(rest: Rest, key: str) -> None:
    headers = {b"idempotency-key": key.encode()}
    answer = await rest.http.post(ADD, json={"delta": 1}, headers=headers)
    assert_problem(
        answer, 400, "invalid_parameter", applied=None, retry="never", names=("Idempotency-Key",)
    )


async def test_two_keys_are_refused(rest: Rest) -> None:
    headers = [("idempotency-key", "one"), ("idempotency-key", "two")]
    answer = await rest.http.post(ADD, json={"delta": 1}, headers=headers)
    problem = problem_of(answer)
    assert (problem["status"], problem["applied"]) == (400, None)


async def test_a_good_body_is_taken_whatever_its_charset_parameter(rest: Rest, app: App) -> None:
    """And a time of another offset is the same instant: this repeats the add that is there."""
    (event,) = await rest.events("c")
    assert event["event_time"] == "2026-03-01T12:00:00.250000Z"
    token = {
        "token": event["event_id"].replace("-", ""),
        "generation_time": "2026-03-01T13:00:00.25+01:00",
    }
    content = encoded({"delta": 7, "idempotency_token": token})
    answer = await rest.raw(ADD, content, content_type="application/json; charset=utf-8")
    assert answer.status_code == 200
    assert answer.json()["replayed"] is True
    assert app.clock.now_us() % SECOND == 250_000


async def test_a_query_that_is_not_text_is_refused(app: App) -> None:
    """Regression: it was a fault of the service's own, behind a server that lets it through."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    path = "/v1/namespaces/default/counters/c"
    scope = {"type": "http", "method": "GET", "path": path, "headers": []}
    await app.application({**scope, "query_string": b"max_staleness=\xff"}, AsyncMock(), send)
    assert sent[0]["status"] == 400
    assert b"max_staleness" in sent[1]["body"]
