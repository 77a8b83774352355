"""The form of every refusal, checked in one place."""

from collections.abc import Mapping
from typing import Any, TypedDict

import httpx

MEMBERS = ("type", "title", "status", "detail", "code", "applied", "retry")
#: Refusals that another send of the same token could turn into a response carry the wait.
WAITS = ("token_pending", "token_in_future", "overloaded", "store_unavailable", "slice_missing")


class Malformed(TypedDict):
    """The part of a refusal that is the same for every malformed request."""

    applied: None
    retry: str


#: A malformed request wrote nothing, and is refused for ever. It says nothing of a token that it
#: names: that may have been sent in good form before.
MALFORMED: Malformed = {"applied": None, "retry": "never"}


def check_problem(problem: Mapping[str, Any]) -> None:
    """*problem* has every member, each of its kind."""
    assert [name for name in MEMBERS if name not in problem] == []
    assert isinstance(problem["type"], str)
    assert isinstance(problem["title"], str)
    assert problem["title"]
    assert isinstance(problem["detail"], str)
    assert problem["detail"]
    assert 400 <= problem["status"] < 500 or problem["status"] in (500, 501, 503)
    assert problem["code"] == problem["code"].lower()
    assert problem["applied"] in (True, False, None)
    assert problem["retry"] in ("same_token", "new_token", "never")
    if problem["retry"] == "new_token":
        assert problem["applied"] is False, "a new token is safe only where the old never counts"


def problem_of(answer: httpx.Response) -> dict[str, Any]:
    """The problem document of *answer*, its shape checked."""
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    problem: dict[str, Any] = answer.json()
    check_problem(problem)
    assert problem["status"] == answer.status_code
    if problem["code"] in WAITS:
        assert int(answer.headers["retry-after"]) >= 0, "whole seconds, RFC 9110 section 10.2.3"
    return problem


def assert_problem(
    answer: httpx.Response,
    status: int,
    code: str,
    *,
    applied: bool | None,
    retry: str,
    names: tuple[str, ...] = (),
) -> dict[str, Any]:
    """*answer* is this refusal, and its text names each of *names*: field, value and bound."""
    problem = problem_of(answer)
    got = (problem["status"], problem["code"], problem["applied"], problem["retry"])
    assert (status, code, applied, retry) == got, problem["detail"]
    text = f"{problem['detail']} {problem}"
    assert [name for name in names if name not in text] == [], problem
    return problem
