"""A response that does not fit the request is from another service."""

import json
from typing import Any

import pytest

from counter_client.calls import Call, Calls, Response, namespaces, tokens
from counter_client.failures import UnexpectedAnswerError
from counter_client.tokens import Token

CALLS = Calls("default")
TIME = "2026-01-31T08:15:30.000250Z"
COUNT = {"namespace": "default", "counter": "c", "count": 1, "as_of": TIME, "accuracy": "accurate"}
SETTINGS = {"namespace": "default", "counter_type": "ACCURATE"}
REFUSED = {"delta": 1, "count": 9, "at_most": 9}
IDS = {"event_time": TIME, "event_id": "x", "event_item_key": 0}
EVENT = {**IDS, "delta": 0, "at_least": 0, "at_most": 9, "refused": REFUSED}
OPTIONAL = ("delta", "at_least", "at_most", "refused", "counter_type")
POINT = {"time": TIME, "count": 1, "delta": 1}
BUSY = {"counter": "c", "adds_per_s": 1.5, "count": 1}
#: Calls of this client alone, with a proper response; other calls are in the vectors.
READS: dict[str, tuple[Call[Any], Any]] = {
    "get_many": (CALLS.batch_get(["c"], None), {"results": [COUNT]}),
    "counters": (CALLS.counters(None, None), {"counters": ["c"], "next_page": None}),
    "counts": (CALLS.counts(None, None, False, None), {"counts": [COUNT], "next_page": "x"}),
    "busiest": (
        CALLS.busiest(1, "10s"),
        {"since": TIME, "as_of": TIME, "complete": True, "counters": [BUSY]},
    ),
    "events": (CALLS.events("c", None, None, None), {"events": [EVENT], "next_page": None}),
    "history": (CALLS.history("c", None, None, None, None), {"points": [POINT]}),
    "cancel": (
        CALLS.cancel("c", 1, "add", Token.parse(f"{'0' * 32}@{TIME}")),
        {"cancelled": True, "was_counted": True, "event_time": TIME},
    ),
    "between": (CALLS.between("c", "today", None, None), {**COUNT, "from": TIME, "delta": 1}),
    "sum": (
        CALLS.sum("c", None),
        {"sum": {"count": 1, "counters": 1, "as_of": TIME, "accuracy": "accurate"}},
    ),
    "settings": (CALLS.settings(), SETTINGS),
    "change_namespace": (CALLS.change_namespace({}), SETTINGS),
    "create_namespace": (CALLS.create_namespace({}), SETTINGS),
    "namespaces": (namespaces(), {"namespaces": [SETTINGS]}),
    "recount": (CALLS.recount("c"), {"windows": 1}),
    "tokens": (tokens(1), {"tokens": [{"token": "0" * 32, "generation_time": TIME}]}),
}


def result(call: Call[Any], body: Any) -> Any:
    return call.result(Response(200, json.dumps(body).encode()))


@pytest.mark.parametrize("name", READS)
def test_a_valid_response_is_read(name: str) -> None:
    result(*READS[name])


@pytest.mark.parametrize("name", READS)
def test_each_member_that_is_missing_or_of_another_type_is_noticed(name: str) -> None:
    call, body = READS[name]
    for broken in [None, 1, "x", [], {}, [body], *changes(body)]:
        with pytest.raises(UnexpectedAnswerError):
            print(broken, result(call, broken))


def changes(body: Any) -> list[Any]:
    """*body* with one member, at any depth, left out or replaced."""
    found: list[Any] = []
    for name, value in body.items() if isinstance(body, dict) else enumerate(body):
        whole = dict(body) if isinstance(body, dict) else list(body)
        others = [{"other": 1}, True if value is not True else 1, [1]]
        others += changes(value) if isinstance(value, dict | list) else []
        for other in others:
            found.append(type(whole)(whole))
            found[-1][name] = other
        optional = name in OPTIONAL and "event_id" in str(body)
        if isinstance(body, dict) and not optional:
            del whole[name]
            found.append(whole)
    return found


@pytest.mark.parametrize("name", ["settings", "change_namespace", "create_namespace", "get_many"])
def test_a_response_about_another_namespace_is_noticed(name: str) -> None:
    call, body = READS[name]
    other = json.loads(json.dumps(body).replace('"default"', '"other"'))
    with pytest.raises(UnexpectedAnswerError):
        result(call, other)


def test_a_namespace_is_deleted_only_if_the_service_says_so() -> None:
    """Regression: any 2xx with JSON, or without a body, was taken for it."""
    call = CALLS.delete_namespace()
    for response in (
        Response(200, b""),
        Response(200, b"{}"),
        Response(200, b"<html>"),
        Response(202, b"1"),
    ):
        with pytest.raises(UnexpectedAnswerError):
            call.result(response)
    assert call.result(Response(204, b"")) is None
