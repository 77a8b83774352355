"""The form of every refusal, checked in one place."""

from collections.abc import Mapping
from typing import Any

import httpx

_JSON = ("application/json", "application/problem+json")
MEMBERS = ("type", "title", "status", "detail", "code", "applied", "retry")
#: Refusals that another send of the same token could turn into a response carry the wait.
WAITS = ("token_pending", "token_in_future", "overloaded", "store_unavailable", "slice_missing")
#: Refusals of a token that is decided for good, and that no other token should replace.
NEVER_AGAIN = ("token_cancelled", "bound_reached", "hold_released", "hold_expired")


#: The status and the advice of each refusal that tests expect, whatever was asked for. What became
#: of the token is not known after any of them but one.
REFUSALS: dict[str, tuple[int, str]] = {
    "body_too_large": (413, "never"),
    "cache_unavailable": (503, "same_token"),
    "clock_skew": (503, "same_token"),
    "internal_error": (500, "same_token"),
    "invalid_body": (400, "never"),
    "invalid_parameter": (400, "never"),
    "key_invalid": (401, "never"),
    "method_not_allowed": (405, "never"),
    "namespace_immutable": (409, "never"),
    "namespace_unknown": (404, "never"),
    "not_found": (404, "never"),
    "not_supported": (501, "never"),
    "overloaded": (503, "same_token"),
    "precondition_failed": (412, "never"),
    "quota_exceeded": (403, "never"),
    "rate_limited": (429, "same_token"),
    "scope_insufficient": (403, "never"),
    "store_unavailable": (503, "same_token"),
    "token_ambiguous": (400, "never"),
    "token_conflict": (409, "never"),
    "token_in_future": (400, "same_token"),
    "token_missing": (400, "never"),
    "token_pending": (503, "same_token"),
    "token_too_old": (410, "never"),
    "token_cancelled": (410, "never"),
    "bound_reached": (409, "never"),
    "hold_unknown": (404, "never"),
    "hold_settled": (409, "never"),
    "hold_released": (410, "never"),
    "hold_expired": (410, "never"),
    "unavailable": (503, "same_token"),
    "unsupported_media_type": (415, "never"),
    "write_timeout": (503, "same_token"),
}


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
    answer: httpx.Response, code: str, *names: str, applied: bool | None = None
) -> dict[str, Any]:
    """*answer* is this refusal, and its text names each of *names*: field, value and bound.

    *applied* is False if the token was voided: then a new one is safe.
    """
    problem = problem_of(answer)
    status, retry = REFUSALS[code]
    if applied is False and code not in NEVER_AGAIN:
        retry = "new_token"
    got = (problem["status"], problem["code"], problem["applied"], problem["retry"])
    assert (status, code, applied, retry) == got, problem["detail"]
    text = f"{problem['detail']} {problem}"
    assert [name for name in names if name not in text] == [], problem
    return problem


async def check_end(response: httpx.Response) -> None:
    """Each answer in JSON ends with a newline: a hook for all responses of a client."""
    is_json = response.headers.get("content-type") in _JSON
    if is_json and response.request.method != "HEAD":
        assert (await response.aread()).endswith(b"}\n"), response.text
