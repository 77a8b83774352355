"""Log a line for each request, or for each failed one.

A line has the request, its token and its outcome. It never contains a key's secret, a body, a query
or an Idempotency-Key, which may be an order or customer number. The key's token is logged instead:
it is the same for each send of the key, and the same as in ``events``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, Literal, NamedTuple

from api.http.auth import Caller
from api.http.call import Call
from api.http.pipeline import Ended
from api.http.responses import Response
from counter.clock import to_rfc3339
from counter.core.results import Added, Cancelled, Credential
from counter.errors import CounterError, is_fault
from counter.limits import NAMESPACE_NAME_CHARS_MAX
from counter.telemetry.logs import REQUEST_ID, REQUESTS
from counter.tokens import format_nonce, nonce_of_key
from counter.types import Namespace, Token

_log = logging.getLogger(REQUESTS)
#: Failures logged individually per second; the rest is logged as a number.
_FAILURES_PER_S: Final = 10
#: The outcomes of adds, by whether they were replayed.
OUTCOMES: Final[Mapping[bool | None, str]] = {
    False: "original",
    True: "replayed",
    None: "unverified",
}
#: Rejections before any work is done, even if a retry may succeed.
_BEFORE_WORK: Final = frozenset({"overloaded", "rate_limited"})

#: Outcomes that a code determines, whatever it says of ``applied``.
_OWN_OUTCOMES: Final[Mapping[str, str]] = {
    "token_conflict": "conflict",
    "token_cancelled": "cancelled",
    "bound_reached": "bound_reached",
    "hold_settled": "hold_settled",
    "hold_released": "hold_released",
    "hold_expired": "hold_expired",
    "token_pending": "pending",
}

Which = Literal["none", "failures", "all"]


class LoggedWrite(NamedTuple):
    """What a handler reports about a write, for the log.

    *target* is the counter, empty for an atomic add.
    """

    namespace: Namespace
    operation: str
    target: str
    credential: Credential

    def fields(self) -> dict[str, Any]:
        """Return the fields for the log."""
        found = self.credential
        if found is None:
            return {}
        if isinstance(found, Token):
            nonce, time_us = found
            return {"token": format_nonce(nonce), "generation_time": to_rfc3339(time_us)}
        return {"token": format_nonce(nonce_of_key(self.namespace.id, *self[1:3], found))}


class RequestLog:
    """Log requests; see :class:`api.http.pipeline.Observer`."""

    def __init__(self, which: Which, now_s: Callable[[], float] = time.monotonic) -> None:
        self.wants_all = which == "all"
        self._failures = which != "none"
        self._now_s = now_s
        #: When the current second began, and how many failures it had.
        self._since_s = float("-inf")
        self._failures_seen = 0
        #: Failures of this second that were not logged, by code.
        self._left_out: Counter[str] = Counter()

    def begin(self, call: Call) -> Ended:
        """Set the request id for log lines meanwhile; return the function that logs its end."""
        began_s = self._now_s()
        REQUEST_ID.set(call.id.decode())

        def end(response: Response | None) -> None:
            if self.wants_all or (self._failures and response is not None and _failed(response)):
                writes = call.route is not None and call.route.writes
                line = _of_call(call) | end_of(response, writes, call.logged)
                line["took_ms"] = round((self._now_s() - began_s) * 1_000, 3)
                self._write(line)
            # Not reset by token: a cancelled task may be closed from another context.
            REQUEST_ID.set("")

        return end

    def _write(self, line: dict[str, Any]) -> None:
        status, code = line.get("status"), line.get("code")
        line = {name: value for name, value in line.items() if value not in (None, "")}
        message = f"{line['method']} {line.get('route', 'elsewhere')} {status or 'client gone'}"
        if status is None or not is_fault(status):
            _log.info("%s", message, extra={"fields": line})
        elif self.wants_all or self._may_log(str(code)):
            _log.warning("%s %s", message, code, extra={"fields": line})

    def _may_log(self, code: str) -> bool:
        """Whether to log this failure individually: a flood of failures must not flood the log."""
        now_s = self._now_s()
        if now_s - self._since_s >= 1.0:
            self._since_s, self._failures_seen = now_s, 0
        self._failures_seen += 1
        if self._failures_seen <= _FAILURES_PER_S:
            return True
        if not self._left_out:
            rest_s = self._since_s + 1.0 - now_s
            asyncio.get_running_loop().call_later(rest_s, self._log_left_out)
        self._left_out[code] += 1
        return False

    def _log_left_out(self) -> None:
        left, self._left_out = self._left_out, Counter()
        fields = {"left_out": left.total(), "by_code": dict(left)}
        _log.warning(
            "%d more requests failed within a second", left.total(), extra={"fields": fields}
        )


def _failed(response: Response) -> bool:
    return is_fault(response.status)


def _of_call(call: Call) -> dict[str, Any]:
    return {
        "request_id": call.request_id,
        "method": call.method,
        "route": None if call.route is None else call.route.path,
        "namespace": call.namespace[:NAMESPACE_NAME_CHARS_MAX],
        "counter": call.counter,
        **_key(call.caller),
    }


def end_of(response: Response | None, writes: bool, logged: dict[str, Any]) -> dict[str, Any]:
    """Return how a request ended and the outcome of its adds."""
    found: dict[str, Any] = {"status": None if response is None else response.status}
    if "hold" in logged:
        found["hold"] = logged["hold"]
    of = logged.get("of")
    if isinstance(of, LoggedWrite):
        found |= of.fields()
    problem = {} if response is None else problem_in(response)
    if problem:
        found["code"] = problem["code"]
        if writes and response is not None:
            found["outcome"] = outcome_of(problem["code"], problem["applied"], response.status)
    elif "results" in logged:
        found |= _results(logged["results"])
    elif "outcome" in logged:
        found["outcome"] = logged["outcome"]
    return found


def _key(caller: Caller | None) -> dict[str, Any]:
    return {} if caller is None or caller.key is None else {"key": caller.key.id}


def problem_in(response: Response) -> dict[str, Any]:
    """Return the problem document of *response*, or an empty dictionary."""
    if response.status < HTTPStatus.BAD_REQUEST:
        return {}
    problem: dict[str, Any] = json.loads(response.body)
    return problem


def outcome_of(code: str, applied: bool | None, status: int) -> str:
    """Return the outcome of an add that was answered with a problem."""
    if code in _OWN_OUTCOMES:
        return _OWN_OUTCOMES[code]
    if applied is False:
        return "voided"
    refused = code in _BEFORE_WORK or not is_fault(status)
    return "refused" if refused else "unknown"


def _results(results: Sequence[Added | Cancelled | CounterError]) -> dict[str, Any]:
    """Return the outcome of a request's add, or the number of adds by outcome."""
    found = Counter(
        outcome_of(each.code, each.applied, each.status)
        if isinstance(each, CounterError)
        else "cancelled"
        if isinstance(each, Cancelled)
        else OUTCOMES[each.replayed]
        for each in results
    )
    if len(results) == 1:
        return {"outcome": next(iter(found))}
    return {"outcomes": dict(found)}
