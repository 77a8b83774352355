"""Responses and their headers; the JSON of hot routes, which is written directly; problems."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from http import HTTPStatus
from math import ceil
from typing import Final, NamedTuple

from pydantic import BaseModel

from api.http.call import JSON, NO_CONTENT, NOT_MODIFIED, Headers, Receive, Send
from api.http.problems import PROBLEM_TYPE, problem_bytes, retry_after_s
from api.http.response_models import ClearAnswer
from counter.clock import to_rfc3339
from counter.core.read import Count
from counter.core.results import Added, Cancelled
from counter.errors import CounterError, RateLimitedError
from counter.limits import SECOND
from counter.types import Accuracy, CounterType, Namespace
from counter.windows import honoured_for

_REPLAYED_HEADER: Final = (b"idempotency-replayed", b"true")
_REPLAYED_TEXT: Final[Mapping[bool | None, str]] = {True: "true", False: "false", None: "null"}
#: Of every response: a count is true only at its instant, and browsers must not guess types.
COMMON_HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
)
#: The same as lines of a head, with a place for the request id.
COMMON_LINES: Final = b"x-request-id: %s\r\n" + b"".join(
    b"%s: %s\r\n" % each for each in COMMON_HEADERS
)
#: The documentation page starts with an inline script.
_DOCS_POLICY: Final = (
    b"default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline';"
    b" img-src 'self' data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'"
)
_POLICY: Final = b"default-src 'none'; frame-ancestors 'none'; base-uri 'none'"


def page_headers(path: str) -> Headers:
    """Return what the page at *path* has besides."""
    return (
        (b"referrer-policy", b"no-referrer"),
        (b"x-frame-options", b"DENY"),
        (b"content-security-policy", _DOCS_POLICY if path == "/docs" else _POLICY),
    )


class Response(NamedTuple):
    """A response: its status, body and headers."""

    status: int
    body: bytes
    content_type: bytes = JSON
    headers: Headers = ()

    @classmethod
    def json(cls, model: BaseModel, status: int = 200, headers: Headers = ()) -> Response:
        """Return *model* in JSON, with the members that are set."""
        return Response.text(model.model_dump_json(exclude_unset=True), headers, status)

    @classmethod
    def text(cls, json: str, headers: Headers = (), status: int = 200) -> Response:
        """Return *json*, and a newline for those who read it in a terminal."""
        return Response(status, b"%s\n" % json.encode(), JSON, headers)

    @property
    def head(self) -> Headers:
        """All headers, with those that describe the body."""
        if self.status in (NO_CONTENT, NOT_MODIFIED):
            return self.headers
        length = b"%d" % len(self.body)
        return ((b"content-type", self.content_type), (b"content-length", length), *self.headers)

    def with_headers(self, *more: tuple[bytes, bytes]) -> Response:
        """Return this response with *more* headers."""
        return self._replace(headers=(*self.headers, *more))

    async def send(self, send: Send, receive: Receive, *, only_head: bool = False) -> None:
        """Send the response over ASGI."""
        await send({"type": "http.response.start", "status": self.status, "headers": [*self.head]})
        await send({"type": "http.response.body", "body": b"" if only_head else self.body})


def problem_response(error: CounterError) -> Response:
    """Return *error* as a problem document, with Retry-After if waiting helps."""
    headers = []
    seconds = retry_after_s(error)
    if seconds is not None:
        headers.append((b"retry-after", b"%d" % seconds))
    allow = error.fields.get("allow")
    if allow is not None:
        headers.append((b"allow", ", ".join(allow).encode()))
    if error.status == HTTPStatus.UNSUPPORTED_MEDIA_TYPE:
        # The only content coding of requests (RFC 9110, 15.5.16).
        headers.append((b"accept-encoding", b"identity"))
    elif error.status == HTTPStatus.UNAUTHORIZED:
        headers.append((b"www-authenticate", b'Bearer realm="counter"'))
    elif isinstance(error, RateLimitedError):
        # draft-ietf-httpapi-ratelimit-headers: what is allowed, and what is left of it.
        policy, rate = error.fields["limit"].encode(), error.fields["rate"]
        quota, window_s = (rate, 1) if rate >= 1 else (1, ceil(1 / rate))
        headers.append((b"ratelimit-policy", b'"%s";q=%d;w=%d' % (policy, quota, window_s)))
        headers.append((b"ratelimit", b'"%s";r=0;t=%d' % (policy, seconds or 1)))
    body = b"%s\n" % problem_bytes(error)
    return Response(error.status, body, PROBLEM_TYPE, tuple(headers))


def ttl_header(namespace: Namespace, *, is_key: bool) -> Headers:
    """Return the header that says how long a token is honoured, or an arbitrary key; none if the
    namespace has no tokens."""
    if namespace.settings.counter_type is CounterType.BEST_EFFORT:
        return ()
    seconds = honoured_for(namespace, is_key=is_key) // SECOND
    return ((b"idempotency-ttl", b"%d" % seconds),)


def json_text(text: str) -> str:
    """Return *text* as a JSON string."""
    if text.isalnum() and text.isascii():
        return f'"{text}"'
    if text.isascii() and text.isprintable() and '"' not in text and "\\" not in text:
        return f'"{text}"'
    return json.dumps(text, ensure_ascii=False)


def added_text(namespace: Namespace, added: Added, extra: str = "") -> str:
    """Return the response to an add in JSON; *extra* are further members, each after a comma."""
    if namespace.settings.counter_type is CounterType.BEST_EFFORT:
        extra += ',"retry_safe":false'
    return (
        f'{{"namespace":"{namespace.name}","counter":{json_text(added.counter)},'
        f'"delta":{added.delta},"event_time":"{to_rfc3339(added.event_time_us)}",'
        f'"replayed":{_REPLAYED_TEXT[added.replayed]}{extra}}}'
    )


def added_texts(namespace: Namespace, outcomes: Iterable[Added | CounterError]) -> list[str]:
    """Return the outcomes of many adds, each in JSON: :func:`added_text`, or a problem."""
    # Many items may share one error.
    problems: dict[int, str] = {}
    if namespace.settings.counter_type is CounterType.BEST_EFFORT:
        return [_outcome_text(namespace, each, problems) for each in outcomes]
    name = namespace.name
    return [
        f'{{"namespace":"{name}","counter":{json_text(each[0])},"delta":{each[1]},'
        f'"event_time":"{to_rfc3339(each[2])}","replayed":false}}'
        if isinstance(each, Added) and each[3] is False
        else _outcome_text(namespace, each, problems)
        for each in outcomes
    ]


def _outcome_text(
    namespace: Namespace, outcome: Added | CounterError, problems: dict[int, str]
) -> str:
    if isinstance(outcome, CounterError):
        text = problems.get(id(outcome))
        if text is None:
            text = problems[id(outcome)] = problem_bytes(outcome).decode()
        return text
    return added_text(namespace, outcome)


def added_response(namespace: Namespace, added: Added, extra: str = "") -> Response:
    """Return the response to an add."""
    headers = (_REPLAYED_HEADER,) if added.replayed else ()
    return Response.text(added_text(namespace, added, extra), headers)


def cleared_response(namespace: Namespace, cleared: Added) -> Response:
    """Return the response to a clear."""
    body = ClearAnswer(
        namespace=namespace.name,
        counter=cleared.counter,
        event_time=cleared.event_time_us,
        replayed=cleared.replayed,
    )
    if namespace.settings.counter_type is CounterType.BEST_EFFORT:
        body.retry_safe = False
    return Response.json(body, headers=(_REPLAYED_HEADER,) if cleared.replayed else ())


def cancelled_text(cancelled: Cancelled) -> str:
    """Return the response to a cancel, in JSON."""
    return (
        f'{{"cancelled":true,"was_counted":{_REPLAYED_TEXT[cancelled.was_counted]},'
        f'"event_time":"{to_rfc3339(cancelled.event_time_us)}"}}'
    )


def cancelled_texts(outcomes: Iterable[Cancelled | CounterError]) -> list[str]:
    """Return the outcomes of many cancels, each in JSON: :func:`cancelled_text`, or a problem."""
    return [
        cancelled_text(each) if isinstance(each, Cancelled) else problem_bytes(each).decode()
        for each in outcomes
    ]


def results_response(texts: Iterable[str]) -> Response:
    """Return the response to a batch, of the outcomes in JSON."""
    return Response.text(f'{{"results":[{",".join(texts)}]}}')


def count_text(name: str, count: Count, extra: str = "") -> str:
    """Return the response to a get in namespace *name*, in JSON, with *extra* members."""
    counter, value, as_of_us, accuracy, held = count
    if any(held):
        for member, amount in zip(("held", "held_down"), held, strict=True):
            extra += f',"{member}":{amount}' if amount else ""
    extra = ',"retry_safe":false' if accuracy is Accuracy.BEST_EFFORT else extra
    return (
        f'{{"namespace":"{name}","counter":{json_text(counter)},'
        f'"count":{value},"as_of":"{to_rfc3339(as_of_us)}",'
        f'"accuracy":"{accuracy.value}"{extra}}}'
    )


@lru_cache(maxsize=1_024)
def count_response(name: str, count: Count) -> Response:
    """Return the response to a get in namespace *name*; cached, because a hot counter's is the same
    many times."""
    return Response.text(count_text(name, count))


def metrics_head(name: str, as_of_us: int) -> str:
    """Return the beginning of the exposition of namespace *name*: the instant that its counts are
    exact for, or later ones, and the family of the counts, whose samples follow.

    No sample has a timestamp: Prometheus would not mark its series as stale when it is gone.
    """
    as_of = "counter_value_as_of_timestamp_seconds"
    return (
        f"# TYPE {as_of} gauge\n# UNIT {as_of} seconds\n"
        f"# HELP {as_of} Unix time up to which every count includes all adds.\n"
        f'{as_of}{{namespace="{name}"}} {as_of_us // SECOND}.{as_of_us % SECOND:06}\n'
        "# TYPE counter_value gauge\n# HELP counter_value Rolled-up count of a counter.\n"
    )


def metric_text(name: str, count: Count) -> str:
    """Return the sample of a count in namespace *name*."""
    return _sample("counter_value", name, count.counter, count.count)


def held_metrics(name: str, counts: Sequence[Count]) -> str:
    """Return the families of what is held beside *counts* in namespace *name*, without those that
    have no samples."""
    texts = []
    families = (("counter_held", "positive"), ("counter_held_down", "negative"))
    for place, (family, sign) in enumerate(families):
        samples = [
            _sample(family, name, each.counter, each.held[place])
            for each in counts
            if each.held[place]
        ]
        if samples:
            help_text = f"Rolled-up sum of a counter's open holds of {sign} amounts."
            texts += [f"# TYPE {family} gauge\n# HELP {family} {help_text}\n", *samples]
    return "".join(texts)


def _sample(family: str, name: str, counter: str, value: int) -> str:
    counter = counter.replace("\\", r"\\").replace('"', r"\"")
    return f'{family}{{namespace="{name}",counter="{counter}"}} {value}\n'
