"""A malformed request is refused in words that help, and leaves nothing behind."""

import gzip
import json
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import AsyncMock

import pytest

from counter.limits import FIELDS_EXPLAINED_MAX
from tests.support.app import App
from tests.support.problems import assert_problem
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
    return assert_problem(answer, "invalid_body", *names)


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
        *(b"[]", b"1", b"null", b'"add"', b"true"),
    ],
    ids=lambda content: repr(content[:16]),
)
async def test_a_body_that_is_no_json_object_is_refused(rest: Rest, content: bytes) -> None:
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
    first, second = await rest.batch_lines(b'{"counter":"c",' + crowd() + b"}\n{}\n")
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
        path = route.path.format(namespace="default", counter="c", hold="h")
        for content_type in ("application/json", "application/x-ndjson"):
            headers = {"content-type": content_type, "content-encoding": coding}
            if content_type == "application/json" or path.endswith("batch/add"):
                answer = await app.http.request(
                    route.method, path, content=gzip.compress(b"{}"), headers=headers
                )
                problem = assert_problem(answer, "unsupported_media_type")
                assert problem["detail"].startswith(f"Content-Encoding is {coding}; ")
                assert answer.headers["accept-encoding"] == "identity"


async def test_a_compressed_stream_is_refused(rest: Rest) -> None:
    async def lines() -> AsyncIterator[bytes]:
        yield gzip.compress(b'{"counter": "c", "delta": 1}\n')

    headers = {"content-type": "application/x-ndjson", "content-encoding": "gzip"}
    answer = await rest.http.post(rest.path(verb="batch/add"), content=lines(), headers=headers)
    assert_problem(answer, "unsupported_media_type")


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
        path = route.path.format(namespace="default", counter="c", hold="h")
        for bad in NOT_UTF8:
            answer = await app.http.request(
                route.method, path, content=form % (bad, filler), headers=AS_JSON
            )
            refused(answer)


@pytest.mark.parametrize("bad", NOT_UTF8, ids=repr)
async def test_a_line_that_is_not_utf8_is_refused_alone(rest: Rest, app: App, bad: bytes) -> None:
    line = b'{"%s":"%s"}' % (bad, MANY_COLONS)
    good = encoded(item("c", 7, fresh(app.clock.now_us() - HOUR)))
    results = await rest.batch_lines(b"\n".join((line, good, line)))
    codes = [each["code"] for each in results]
    assert codes == ["invalid_body", "token_too_old", "invalid_body"]


async def test_names_of_many_colons_are_read(rest: Rest) -> None:
    """The parsed fields of a body decide, not their apparent number."""
    names = [":" * 200 + str(number) for number in range(100)]
    answer = await rest.post(rest.path(verb="batch/get"), {"counters": names})
    assert [each["counter"] for each in answer.json()["results"]] == names


async def test_the_unknown_fields_of_an_ordinary_body_are_all_named(rest: Rest, body: Json) -> None:
    answer = await rest.post(ADD, body | {"dleta": 2, "toekn": 3})
    assert [each["field"] for each in refused(answer)["errors"]] == ["dleta", "toekn"]


#: A field of the body, a wrong value (... is none), and what the refusal names.
WRONG: list[tuple[str, Any, tuple[str, ...]]] = [
    ("dleta", 2, ("dleta",)),
    ("idempotency_token.generated_at", "now", ("idempotency_token.generated_at",)),
    ("idempotency_token.token", ..., ("idempotency_token.token",)),
    ("idempotency_token.generation_time", ..., ("idempotency_token.generation_time",)),
    *(("delta", each, ("delta", str(each), str(2**63 - 1))) for each in (2**63, 10**30)),
    ("delta", -(2**63) - 1, ("delta", str(-(2**63) - 1), str(-(2**63)))),
    *(("delta", each, ("delta",)) for each in (1.5, 1.0, "1", True, None, [1], {"value": 1})),
    *(
        ("idempotency_token.token", each, ("idempotency_token.token",))
        for each in (
            "",
            "0" * 31,
            "0" * 33,
            "g" * 32,
            "00000000-0000-0000-0000-00000000000",
            7,
            None,
        )
    ),
    ("idempotency_token.token", ["0" * 32], ("idempotency_token.token",)),
    *(
        ("idempotency_token.generation_time", each, ("generation_time", each[:19]))
        for each in (
            *("2026-03-01T12:00:00", "2026-03-01", "12:00:00Z", "yesterday", ""),
            *("2026-13-01T12:00:00Z", "2026-02-30T12:00:00Z", "1772366400"),
            *("9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z", "0000-00-00T00:00:00Z"),
        )
    ),
    *(
        ("idempotency_token.generation_time", each, ("generation_time",))
        for each in (1_772_366_400, 1_772_366_400.25, True, None)
    ),
    ("idempotency_token.generation_time", "1999-12-31T23:59:59.999999Z", ("1999", "2000")),
    ("idempotency_token.generation_time", "2200-01-02T00:00:00Z", ("2200-01-02", "2200-01-01")),
]


@pytest.mark.parametrize(("field", "value", "names"), WRONG, ids=repr)
async def test_a_wrong_field_is_named_with_its_value_and_bound(
    rest: Rest, body: Json, field: str, value: Any, names: tuple[str, ...]
) -> None:
    holder, _, name = field.rpartition(".")
    part = body[holder] if holder else body
    part[name] = value
    if value is ...:
        del part[name]
    refused(await rest.post(ADD, body), *names)


@pytest.mark.parametrize("number", [b"1e0", b"1E3", b"1.0", b"-1.0e2"])
async def test_a_number_written_as_a_float_is_refused(
    rest: Rest, body: Json, number: bytes
) -> None:
    content = encoded(body | {"delta": 424242}).replace(b"424242", number)
    refused(await rest.raw(ADD, content), "delta")


async def test_a_body_over_the_limit_is_refused_with_the_limit(rest: Rest) -> None:
    content = b" " * (ONE_MEBIBYTE + 1)
    assert_problem(await rest.raw(ADD, content), "body_too_large", str(ONE_MEBIBYTE))

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * (ONE_MEBIBYTE // 16)

    assert_problem(await rest.http.post(ADD, content=pieces(), headers=AS_JSON), "body_too_large")


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
    refused(await rest.batch_add(items), "items", "1000")
    refused(await rest.batch_get(["c"] * 1_001), "counters", "1000")


async def test_an_unknown_namespace_is_named(rest: Rest, app: App) -> None:
    elsewhere = rest.within("elsewhere")
    for answer in (
        await elsewhere.add("c", 1, fresh(app.clock.now_us())),
        await elsewhere.get("c"),
        await elsewhere.batch_add([item("c", 1, fresh(app.clock.now_us()))]),
        await elsewhere.http.get(elsewhere.path(verb="counters")),
        await elsewhere.http.get(elsewhere.path()),
    ):
        assert_problem(answer, "namespace_unknown", "elsewhere")


@pytest.mark.parametrize(
    "path", ["/v1", "/v2/namespaces", "/v1/namespaces/default/counters/c/subtract", "/"]
)
async def test_an_unknown_path_is_a_problem_too(rest: Rest, path: str) -> None:
    """The printed address leads to the documentation."""
    names = ("/console", "/docs") if path == "/" else ()
    assert_problem(await rest.http.get(path), "not_found", *names)


@pytest.mark.parametrize(
    ("method", "verb"),
    [("PUT", "add"), ("GET", "add"), ("DELETE", "clear"), ("POST", "events"), ("PATCH", "")],
)
async def test_a_wrong_method_lists_the_right_ones(rest: Rest, method: str, verb: str) -> None:
    answer = await rest.http.request(method, rest.path("c", verb), json={})
    assert_problem(answer, "method_not_allowed", method)
    assert answer.headers["allow"]
    assert method not in answer.headers["allow"].split(", ")


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "application/x-www-form-urlencoded", "application/xml", "multipart/form-data"],
)
async def test_a_wrong_content_type_is_named(rest: Rest, body: Json, content_type: str) -> None:
    answer = await rest.raw(ADD, encoded(body), content_type=content_type)
    assert_problem(answer, "unsupported_media_type", content_type, "application/json")


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
        assert_problem(answer, "invalid_parameter", "counter", bound)


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
    assert_problem(answer, "invalid_parameter", "namespace")


@pytest.mark.parametrize("staleness", ["5", "-1s", "1y", "soon", "", "1.5s"])
async def test_an_invalid_staleness_is_refused(rest: Rest, staleness: str) -> None:
    assert_problem(await rest.get("c", staleness), "invalid_parameter", "max_staleness", staleness)


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
    assert_problem(answer, "invalid_parameter", name)


@pytest.mark.parametrize("key", ["", "x" * 256, "tab\there", "snow\N{SNOWMAN}", '""'])
async def test_a_key_out_of_bounds_is_refused(rest: Rest, key: str) -> None:
    headers = {b"idempotency-key": key.encode()}
    answer = await rest.http.post(ADD, json={"delta": 1}, headers=headers)
    assert_problem(answer, "invalid_parameter", "Idempotency-Key")


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
