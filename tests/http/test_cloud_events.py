"""CloudEvents: all their forms, their rules, and each counts once."""

import asyncio
import json
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests.support.app import App, every_store
from tests.support.problems import assert_problem
from tests.support.rest import Rest
from tests.support.times import DAY, HOUR, MINUTE, SECOND

STRUCTURED = "application/cloudevents+json"
BATCH = "application/cloudevents-batch+json"
RULES: list[dict[str, Any]] = [
    {"type": "order.paid", "counter": "orders.{subject}", "delta": "data.quantity"},
    {"type": "order.*", "counter": "all", "delta": 1},
]
SHOWN = {"prefer": "return=representation"}
SHOWN_BYTES = {name: value.encode() for name, value in SHOWN.items()}
Event = dict[str, Any]


@pytest.fixture
async def rest(app: App) -> Rest:
    """The namespace ``default``, with rules."""
    await set_rules(app.rest, RULES)
    return app.rest


async def set_rules(rest: Rest, rules: list[Any]) -> httpx.Response:
    return await rest.http.put(rest.path(), json={"event_rules": rules})


def event(number: int = 1, **attributes: Any) -> Event:
    """A valid event; an attribute of ... is left out."""
    made: dict[str, Any] = {
        "specversion": "1.0",
        "id": str(number),
        "source": "/shop",
        "type": "order.paid",
        "subject": "7",
        "data": {"quantity": 2},
        **attributes,
    }
    return {name: value for name, value in made.items() if value is not ...}


WHOLE: list[Any] = [
    *((3, 3), (-3, -3), (0, 0), (2**63 - 1, 2**63 - 1), (-(2**63), -(2**63))),
    *(("3", 3), ("-3", -3), ("+3", 3), (3.0, 3), ("3.00", 3), (str(2**63 - 1), 2**63 - 1)),
]
NOT_WHOLE: list[Any] = [
    *((1.5, "'1.5'"), ("1.5", "'1.5'"), ("", "''"), ("many", "'many'"), (True, "True")),
    *((2**63, str(2**63)), (-(2**63) - 1, str(-(2**63) - 1)), (10**4000, "very large")),
    *((1e300, "'1e+300'"), ([], "[]"), ({}, "{}"), ("٣", "'٣'"), ("3" * 200, "…")),
    *((None, "missing"), (..., "missing")),
]
MALFORMED: list[Any] = [
    ({"id": ...}, "id: it is required"),
    ({"source": ...}, "source: it is required"),
    ({"type": ...}, "type: it is required"),
    ({"specversion": ...}, "specversion: it is required"),
    ({"specversion": "0.3"}, "specversion is '0.3'; it must be '1.0'"),
    ({"id": ""}, "id: Expected `str` of length >= 1"),
    ({"id": 5}, "id: Expected `str`, got `int`"),
    ({"id": None}, "id: Expected `str`, got `null`"),
    ({"source": "s" * 1025}, "source: Expected `str` of length <= 1024"),
    ({"type": "a\nb"}, "type: Expected `str` matching regex"),
    ({"subject": ""}, "subject: Expected `str` of length >= 1"),
    *(
        ({"time": each}, f"time is '{each}'; it must be an RFC 3339 time with an offset")
        for each in ("today", "2026-01-31T08:15:30", "2026-13-31T08:15:30Z", "2026-01-31T08:15:61Z")
    ),
    ({"time": 5}, "time: Expected `str | null`, got `int`"),
    ({"datacontenttype": 5}, "datacontenttype: Expected `str | null`, got `int`"),
    ({"data_base64": "AA=="}, "data_base64 and data are both given; give one of them"),
    ({"data_base64": "A", "data": ...}, "data_base64 is not Base64"),
    ({"subject": ...}, "subject is missing, and the rule of the counter 'orders.{subject}'"),
    ({"subject": "s" * 300}, "the rule 'orders.{subject}' gives the counter 'orders.sss"),
    ({"data": ...}, "data.quantity is missing"),
    ({"data": "text"}, "data.quantity is missing"),
    ({"data": ..., "data_base64": "AA=="}, "data.quantity is missing"),
]
BODIES: list[Any] = [
    *((b"", STRUCTURED, 400), (b"{", STRUCTURED, 400), (b"\xff", STRUCTURED, 400)),
    *((b"[]", STRUCTURED, 400), (b"{}", BATCH, 400)),
    *((b"[" * 9_999, BATCH, 400), (b'{"data":' + b"[" * 9_999, STRUCTURED, 400)),
    *((b"{}", "text/plain", 415), (b"{}", "application/cloudevents+avro", 415)),
    (b'{"id":' + b"1" * 9_999 + b"}", STRUCTURED, 400),
    (json.dumps([event(at) for at in range(1_001)]).encode(), BATCH, 400),
]
BAD_RULES: list[Any] = [
    *(({"type": each}, "type") for each in ("com.*.paid", "*.paid", "**", "a*b*", "a\nb")),
    *(({"type": ""}, "type"), ({"type": "t" * 1025}, "type"), ({"counter": ""}, "counter")),
    *(({"counter": f"a{each}"}, "counter") for each in ("{", "}", "{}", "{x}", "{data}")),
    *(({"counter": f"a{each}"}, "counter") for each in ("{data.}", "{{type}}", "{data..b}")),
    *(({"counter": f"a{each}"}, "counter") for each in ("{extensions}", "{extensions.a.b}")),
    *(({"counter": f"a{each}"}, "counter") for each in ("{extensions.A}", '{data."a.b".}')),
    *(({"counter": f"{{type}}{each}"}, "counter") for each in ("\n", "x" * 257)),
    *(({"delta": each}, "delta") for each in ("", "3", "quantity", "data.", "subject")),
    *(({"delta": each}, "delta") for each in (2**63, 1.5, None, True)),
    *(({"more": 1}, "more"), ({"type": ...}, "type")),
]


async def send(rest: Rest, body: Any, content_type: str | None = None) -> httpx.Response:
    kind = content_type or (BATCH if isinstance(body, list) else STRUCTURED)
    headers = {"content-type": kind, **SHOWN}
    return await rest.http.post(rest.path(verb="events"), json=body, headers=headers)


async def outcomes(rest: Rest, body: Any) -> list[str]:
    answer = await send(rest, body)
    assert answer.status_code == 200, answer.text
    return [each["outcome"] for each in answer.json()["results"]]


async def counts(rest: Rest) -> tuple[int, int]:
    return await rest.count("orders.7"), await rest.count("all")


async def test_one_event_counts_once_in_each_counter(rest: Rest) -> None:
    answer = await send(rest, event())
    assert answer.status_code == 200, answer.text
    adds = [{"counter": "orders.7", "delta": 2}, {"counter": "all", "delta": 1}]
    found = {"source": "/shop", "id": "1", "outcome": "original", "adds": adds}
    assert answer.json() == {"results": [found]}
    again = await send(rest, [event(), event(2), event(3, type="user.seen"), event()])
    assert [each["outcome"] for each in again.json()["results"]] == [
        *("replayed", "original", "ignored", "replayed")
    ]
    assert again.json()["results"][2]["adds"] == []
    assert await counts(rest) == (4, 2)


async def test_the_response_is_empty_unless_outcomes_are_requested(rest: Rest) -> None:
    """A broker such as Knative takes a body that is no CloudEvent for a failed delivery."""
    for at, (prefer, is_shown) in enumerate(
        (
            (None, False),
            ("return=minimal", False),
            ("x-return=representation", False),
            ("return=representation-of-all", False),
            ('respond-async, Return = "representation"; foo', True),
            ("return=representation", True),
        )
    ):
        for verb in ("events", "api/v1/events"):
            headers = {"content-type": STRUCTURED}
            if prefer is not None:
                headers["prefer"] = prefer
            path = rest.path(verb=verb)
            answer = await rest.http.post(path, json=event(at), headers=headers)
            assert answer.status_code == (200 if is_shown else 204), prefer
            assert bool(answer.content) is ("content-type" in answer.headers) is is_shown
            applied = answer.headers.get("preference-applied")
            assert applied == ("return=representation" if is_shown else None)
    assert await counts(rest) == (12, 6)


async def test_copies_in_one_batch_and_at_once_count_once(rest: Rest) -> None:
    answers = await asyncio.gather(*(send(rest, [event(1), event(1), event(2)]) for _ in range(5)))
    assert {each.status_code for each in answers} == {200}
    assert await counts(rest) == (4, 2)


@every_store
async def test_a_duplicate_counts_once_until_the_key_is_forgotten(rest: Rest, app: App) -> None:
    """The event's own time has no effect."""
    sent = event(time="2001-01-01T00:00:00Z")
    await send(rest, sent)
    for later_us in (6 * SECOND, MINUTE, HOUR, DAY - 2 * HOUR):
        await app.roll_up_after(later_us)
        assert await outcomes(rest, sent) == ["replayed"]
        assert await counts(rest) == (2, 1)
    await app.roll_up_after(2 * HOUR)
    assert await outcomes(rest, sent) == ["original"]
    assert await counts(rest) == (4, 2)


async def test_another_source_is_another_event(rest: Rest) -> None:
    """Lengths separate the source and the id: no two pairs have one key."""
    both = [event(source="a", id="bc"), event(source="ab", id="c")]
    assert await outcomes(rest, both) == ["original"] * 2
    assert await counts(rest) == (4, 2)


async def test_other_content_under_the_same_id_never_counts(rest: Rest, storage: str) -> None:
    await send(rest, event())
    for changed in (event(subject="8"), event(data={"quantity": 3}), event(type="order.new")):
        answer = await send(rest, [changed, event(2)])
        problem = assert_problem(answer, "token_conflict")
        assert "event '1' of '/shop'" in problem["detail"]
        assert "1 of 2 events are counted" in problem["detail"]
    if storage in ("memory", "dynamodb"):
        # Without transactions only content with a counter in common is compared.
        return
    await set_rules(rest, [{"type": "*", "counter": "other"}])
    assert_problem(await send(rest, event()), "token_conflict")
    assert await rest.count("orders.8") == await rest.count("other") == 0
    assert await counts(rest) == (4, 2)


@pytest.mark.parametrize("storage", ["sqlite", "postgresql"], indirect=True)
async def test_only_a_batch_without_a_counted_event_is_said_not_to_count(rest: Rest) -> None:
    """If events of it are refused or cancelled for ever, and others are counted or not known."""
    await rest.http.put(rest.path(), json={"bounds": {"at_most": 9}})
    counted, other, ignored = event(), event(2), event(3, type="user.seen")
    conflict = event(data={"quantity": 3})
    refused = [event(each, data={"quantity": 10}) for each in (4, 5)]
    cancelled = event(6)
    await rest.http.post(rest.path(verb="events/cancel"), json=cancelled)
    for batch, code, applied in (
        ([counted, refused[0], other], "bound_reached", None),
        ([counted, cancelled, other], "token_cancelled", None),
        ([refused[0], conflict], "bound_reached", None),
        ([cancelled, conflict], "token_cancelled", None),
        ([refused[0]], "bound_reached", False),
        ([refused[1], ignored, *refused], "bound_reached", False),
        ([cancelled, ignored], "token_cancelled", False),
    ):
        assert_problem(await send(rest, batch), code, applied=applied)
    assert await counts(rest) == (4, 2)


@pytest.mark.parametrize("storage", ["sqlite", "memory", "simulated"])
async def test_the_first_of_several_contents_of_one_id_counts(rest: Rest) -> None:
    for at in range(5):
        events = [event(at, data={"quantity": 10**each}) for each in (0, 0, 1, 2, 0)]
        problem = assert_problem(await send(rest, events), "token_conflict")
        assert "3 of 5 events are counted" in problem["detail"]
        assert await counts(rest) == (at + 1, at + 1)
        assert (await outcomes(rest, [events[0]] * 3)) == ["replayed"] * 3
    assert await outcomes(rest, [event(9)] * 3) in (
        ["original", "replayed", "replayed"],
        ["unverified", "replayed", "replayed"],
    )


async def test_whole_numbers_count_exactly(rest: Rest) -> None:
    for at, (quantity, delta) in enumerate(WHOLE):
        await send(rest, event(subject=str(at), id=str(at), data={"quantity": quantity}))
        assert await rest.count(f"orders.{at}") == delta, quantity


async def test_a_number_that_is_not_whole_is_refused(rest: Rest) -> None:
    for quantity, seen in NOT_WHOLE:
        data = {} if quantity is ... else {"quantity": quantity}
        answer = await send(rest, [event(2), event(data=data)])
        problem = assert_problem(answer, "invalid_body")
        assert problem["detail"].startswith("events.1: data.quantity is ")
        assert seen in problem["detail"], quantity
    assert await counts(rest) == (0, 0)


async def test_a_malformed_event_is_named_and_nothing_is_written(rest: Rest) -> None:
    for changes, detail in MALFORMED:
        for body, start in ((event(**changes), detail), ([event(2), event(**changes)], "events.1")):
            answer = await send(rest, body)
            problem = assert_problem(answer, "invalid_body")
            assert problem["detail"].startswith(start)
            assert detail.partition(": ")[2] in problem["detail"]
    assert await counts(rest) == (0, 0)


async def test_a_number_that_is_too_large_to_read_is_named(rest: Rest) -> None:
    body = json.dumps(event(data={"quantity": 1})).replace('": 1}', f'": {"1" * 5_000}}}')
    answer = await rest.raw(rest.path(verb="events"), body.encode(), content_type=STRUCTURED)
    problem = assert_problem(answer, "invalid_body")
    assert (problem["field"], problem["detail"]) == ("data", "data: Integer value out of range")


async def test_a_body_that_holds_no_events_is_refused(rest: Rest) -> None:
    for body, content_type, status in BODIES:
        answer = await rest.raw(rest.path(verb="events"), body, content_type=content_type)
        code = "invalid_body" if status == 400 else "unsupported_media_type"
        assert_problem(answer, code)
    assert await counts(rest) == (0, 0)


async def test_nulls_extensions_and_plain_json_are_accepted(rest: Rest) -> None:
    optional = dict.fromkeys(("time", "datacontenttype", "dataschema"))
    assert await outcomes(rest, event(1, **optional, traceparent="x", n=5)) == ["original"]
    assert await outcomes(rest, event(2, time="2026-01-31T08:15:30.123456789+02:00"))
    # A leap second.
    assert await outcomes(rest, event(2, time="2016-12-31t23:59:60z")) == ["replayed"]
    for body in (event(3), [event(4)]):
        answer = await send(rest, body, "application/json; charset=utf-8")
        assert answer.status_code == 200, answer.text
    assert await counts(rest) == (8, 4)


async def binary(rest: Rest, body: bytes = b'{"quantity": 2}', **changes: Any) -> httpx.Response:
    """An event with its attributes as headers."""
    headers = {"content-type": "application/json", **SHOWN}
    attributes = {name: value for name, value in event(**changes).items() if name != "data"}
    headers |= {f"ce-{name}": quote(value, safe="/ ") for name, value in attributes.items()}
    return await rest.http.post(rest.path(verb="events"), content=body, headers=headers)


async def test_binary_events_are_the_same_events(rest: Rest) -> None:
    for name in ("plain", "two words", "ü/🙂", 'a"b%'):
        for _ in range(2):
            assert (await binary(rest, subject=name, id=name)).status_code == 200
        assert await outcomes(rest, event(id=name, subject=name)) == ["replayed"]
        assert await rest.count(f"orders.{name}") == 2
    quoted = {"content-type": "application/json", **SHOWN, "ce-subject": '"a\\"b"', "ce-id": "q"}
    quoted |= {"ce-specversion": "1.0", "ce-source": "/shop", "ce-type": "order.paid"}
    answer = await rest.http.post(
        rest.path(verb="events"), content=b'{"quantity":2}', headers=quoted
    )
    assert answer.json()["results"][0]["adds"][0]["counter"] == 'orders.a"b'


async def test_headers_in_utf_8_are_the_same_event_as_percent_encoded_ones(rest: Rest) -> None:
    """SDKs in Go and Java send them so."""
    name = "café/🙂 5%"
    assert (await binary(rest, id=name, source=name, subject=name)).status_code == 200
    raw = {f"ce-{each}": name.encode() for each in ("id", "source", "subject")}
    given = {b"ce-specversion": b"1.0", b"ce-type": b"order.paid"}
    headers: list[tuple[bytes, bytes]] = [
        (b"content-type", b"application/json"),
        *((each.encode(), value) for each, value in {**SHOWN_BYTES, **raw}.items()),
        *given.items(),
    ]
    path = rest.path(verb="events")
    answer = await rest.http.post(path, content=b'{"quantity": 2}', headers=headers)
    assert [each["outcome"] for each in answer.json()["results"]] == ["replayed"]
    wrong = [*headers, (b"ce-more", "é".encode("latin-1"))]
    answer = await rest.http.post(path, content=b'{"quantity": 2}', headers=wrong)
    problem = assert_problem(answer, "invalid_body")
    assert (problem["field"], problem["detail"][:20]) == ("more", "ce-more is not UTF-8")


async def test_an_empty_batch_is_accepted(rest: Rest) -> None:
    assert await outcomes(rest, []) == []
    answer = await rest.raw(rest.path(verb="events"), b" [ ] ")
    assert answer.status_code == 204


async def test_data_without_a_content_type_are_json_if_they_can_be_read_so(rest: Rest) -> None:
    headers = {f"ce-{name}": value for name, value in event(type="order.new").items()}
    del headers["ce-data"]
    path = rest.path(verb="events")
    for at, body in enumerate((b"", b"\xff", b"{")):
        headers["ce-id"] = str(at)
        answer = await rest.http.post(path, content=body, headers={**headers, **SHOWN})
        assert answer.json()["results"][0]["outcome"] == "original"
    headers |= {"ce-type": "order.paid", "ce-id": "paid"}
    answer = await rest.http.post(path, content=b'{"quantity": 2}', headers=headers)
    assert answer.status_code == 204
    assert await outcomes(rest, event(id="paid")) == ["replayed"]
    assert await counts(rest) == (2, 4)


async def test_a_malformed_binary_event_is_named(rest: Rest) -> None:
    for answer, detail in (
        (await binary(rest, id=...), "ce-id: it is required"),
        (await binary(rest, specversion="2"), "ce-specversion is '2'"),
        (await binary(rest, time="now"), "ce-time is 'now'; it must be an RFC 3339 time"),
        (await binary(rest, b"{"), "body: it is not JSON"),
        (await binary(rest, b""), "data.quantity is missing"),
    ):
        problem = assert_problem(answer, "invalid_body")
        assert problem["detail"].startswith(detail)
    headers = [("content-type", "text/plain"), ("ce-id", "1"), ("ce-id", "2"), ("ce-x", "%ff")]
    for some in (headers, headers[1::2]):
        answer = await rest.http.post(rest.path(verb="events"), headers=some)
        assert_problem(answer, "invalid_body", "ce-")
    assert await counts(rest) == (0, 0)


async def test_templates_use_the_written_values(rest: Rest) -> None:
    """A number is no float on its way."""
    data = {"a": {"b": 1.50}, "big": 2**70, "on": True, "name": "x"}
    text = json.dumps(event(data=data)).replace("1.5", "1.50")
    counter = "{source}|{type}|{data.a.b}|{data.big}|{data.on}|{data.name}"
    await set_rules(rest, [{"type": "*", "counter": counter}])
    answer = await rest.http.post(
        rest.path(verb="events"), content=text, headers={"content-type": STRUCTURED, **SHOWN}
    )
    [add] = answer.json()["results"][0]["adds"]
    assert add == {"counter": f"/shop|order.paid|1.50|{2**70}|true|x", "delta": 1}


async def test_a_quoted_key_of_a_path_may_hold_dots(rest: Rest) -> None:
    """Attributes of OpenTelemetry are such keys."""
    kept = {"gen_ai.usage": {"output.tokens": "7"}, "gen_ai.model": "m", "gen_ai": {"model": "n"}}
    rule = {
        "type": "*",
        "counter": '{data."gen_ai.model"}/{data.gen_ai.model}/{data."gen_ai".model}',
        "delta": 'data."gen_ai.usage"."output.tokens"',
    }
    assert (await set_rules(rest, [rule])).status_code == 200
    assert await outcomes(rest, event(data=kept)) == ["original"]
    assert await rest.count("m/n/n") == 7
    answer = await send(rest, event(2, data={"gen_ai.model": "m"}))
    problem = assert_problem(answer, "invalid_body")
    assert problem["detail"].startswith("data.gen_ai.model is missing")


async def test_rules_read_extension_attributes_in_every_form(rest: Rest) -> None:
    rule = {"type": "*", "counter": "{extensions.tenant}/{extensions.on}", "delta": "extensions.n"}
    assert (await set_rules(rest, [rule])).status_code == 200
    given: dict[str, Any] = {"tenant": "a", "on": True, "n": 5}
    assert await outcomes(rest, event(**given)) == ["original"]
    assert await outcomes(rest, [event(**given), event(2, **given)]) == ["replayed", "original"]
    text: dict[str, Any] = {name: str(value).lower() for name, value in given.items()}
    answer = await binary(rest, **text)
    assert answer.json()["results"][0]["outcome"] == "replayed"
    assert await rest.count("a/true") == 10
    deep = event(3, **{**given, "n": "N"})
    for wrong, detail in (
        ({"n": ...}, "extensions.n is missing"),
        ({"n": 1.5}, "extensions.n is '1.5'"),
        ({"n": None}, "extensions.n is missing"),
        ({"tenant": {"a": 1}}, "extensions.tenant is {'a': 1}"),
        ({"id": 5}, "id: Expected `str`"),
    ):
        answer = await send(rest, event(3, **{**given, **wrong}))
        problem = assert_problem(answer, "invalid_body")
        assert problem["detail"].startswith(detail), problem
    for body in (b"[" * 9_999, b"1" * 9_999):
        sent = json.dumps(deep).encode().replace(b'"N"', body)
        answer = await rest.raw(rest.path(verb="events"), sent, content_type=STRUCTURED)
        assert_problem(answer, "invalid_body")
    assert await rest.count("a/true") == 10


async def test_a_namespace_without_rules_refuses_events(rest: Rest) -> None:
    other = rest.within("other")
    await other.create("ACCURATE")
    problem = assert_problem(await send(other, event()), "invalid_body")
    assert "PUT /v1/namespaces/other" in problem["detail"]
    best = rest.within("best")
    await best.create("BEST_EFFORT")
    assert_problem(await send(best, event()), "not_supported")


async def test_rules_are_settings_of_the_namespace(rest: Rest, app: App) -> None:
    shown = (await rest.http.get(rest.path())).json()
    assert shown["event_rules"] == RULES
    assert (await rest.http.put(rest.path(), json={"cache_ttl": "1s"})).json()[
        "event_rules"
    ] == RULES
    await app.restart()
    rest = app.rest
    assert (await rest.http.get(rest.path())).json()["event_rules"] == RULES
    without = (await set_rules(rest, [])).json()
    assert "event_rules" not in without
    assert without == {k: v for k, v in shown.items() if k != "event_rules"} | {"cache_ttl": "1s"}


async def test_a_bad_rule_is_refused(rest: Rest) -> None:
    for rule, field in BAD_RULES:
        made = {"type": "t", "counter": "c", "delta": 1, **rule}
        made = {name: value for name, value in made.items() if value is not ...}
        answer = await set_rules(rest, [RULES[0], made])
        problem = assert_problem(answer, "invalid_body")
        assert f"event_rules.1.{field}" in problem["detail"]
    assert (await rest.http.get(rest.path())).json()["event_rules"] == RULES


async def test_the_number_of_rules_is_bounded(rest: Rest) -> None:
    rules = [{**RULES[0], "type": "order.paid*"[: 11 - at % 2], "delta": at} for at in range(21)]
    assert (await set_rules(rest, rules[:20])).status_code == 200
    answer = await set_rules(rest, rules)
    assert_problem(answer, "invalid_body", "event_rules", "20")
    assert await outcomes(rest, event()) == ["original"]
    assert await rest.count("orders.7") == sum(range(20))


async def test_rules_may_change_places(rest: Rest) -> None:
    """Also if they add to the same counter."""
    rules = [{"type": "*", "counter": "c", "delta": delta} for delta in (2, 1)]
    await set_rules(rest, rules)
    await send(rest, event())
    await set_rules(rest, rules[::-1])
    assert await outcomes(rest, event()) == ["replayed"]
    assert await rest.count("c") == 3


async def test_two_equal_rules_are_refused(rest: Rest) -> None:
    """Each event would count twice."""
    given = {"type": "order.*", "counter": "all"}
    answer = await set_rules(rest, [*RULES, given])
    problem = assert_problem(answer, "invalid_body")
    assert problem["field"] == "event_rules.2"
    assert "event_rules.2 is equal to event_rules.1" in problem["detail"]
    assert (await set_rules(rest, [*RULES, {**given, "delta": 2}])).status_code == 200


async def test_ignored_events_are_in_the_metrics(rest: Rest) -> None:
    assert await outcomes(rest, [event(type="x"), event(type="order"), event()]) == [
        *("ignored", "ignored", "original")
    ]
    text = (await rest.http.get("/metrics")).text
    assert "counter_cloud_events_ignored_total 2.0" in text


async def test_each_event_is_an_add_of_the_rates(rest: Rest) -> None:
    await rest.http.put(rest.path(), json={"adds_per_s": 1})
    assert (await send(rest, event(type="x"))).status_code == 200
    answer = await send(rest, event(type="x"))
    assert_problem(answer, "rate_limited")
