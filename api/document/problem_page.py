"""The page at ``/problems``: what a problem's ``type`` leads to, a section for each code."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final, NamedTuple

from api.http.problems import problem_of, problem_types
from counter.errors import CounterError, TokenTooOldError

_STYLE: Final = (
    ":root{color-scheme:light dark;--line:light-dark(#dfe3e8,#313840);"
    "--panel:light-dark(#f6f7f9,#1d2126);--link:light-dark(#1659c7,#8ab4f8)}"
    "body{max-width:46rem;margin:0 auto;padding:1.5rem 1rem 4rem}"
    "body{font:1rem/1.5 system-ui,sans-serif}"
    "h1,h2{line-height:1.25}h2{margin:0 0 .5rem;font-size:1.25rem}a{color:var(--link)}"
    "code,pre{font:.875em/1.5 ui-monospace,monospace;overflow-wrap:anywhere}"
    "pre{background:var(--panel);padding:.75rem;border-radius:6px;white-space:pre-wrap}"
    "section{border-top:1px solid var(--line);padding:1.25rem 0 .5rem}"
    "section:target{border-left:4px solid var(--link);padding-left:1rem}"
    "ul{columns:14rem;padding-left:1.25rem}p{margin:.5rem 0}"
)
_DIGEST: Final = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
#: Nothing but the page's own style shapes it, and nothing at all runs.
POLICY: Final = (
    f"default-src 'none'; style-src 'sha256-{_DIGEST}'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'"
)


def shapes(kind: type[CounterError]) -> Sequence[CounterError]:
    """The problems that *kind* makes, each with the explanation's example of what is wrong: one,
    or two where ``applied`` is not always the same."""
    told = EXPLAINED[kind.code]
    if issubclass(kind, TokenTooOldError):
        past = "the token is 691200 s old; what became of tokens is known for 604732 s"
        return kind(told.detail, applied=False), kind(past, applied=None)
    error = kind(told.detail, **told.fields)
    error.retry_after_us = None if told.wait_s is None else told.wait_s * 1_000_000
    return (error,)


def example_text(error: CounterError) -> str:
    """The problem document of *error*, for reading."""
    return json.dumps(problem_of(error), ensure_ascii=False, indent=2)


def problems_page() -> bytes:
    """The page: by itself, in both colours, with the anchors that problems name."""
    kinds = problem_types()
    listed = "".join(f'<li><a href="#{each.code}">{each.code}</a></li>' for each in kinds)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Problems</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{_STYLE}</style><main><h1>Problems</h1>"
        "<p>Every answer of this service that is not a success has a <code>code</code>, and says"
        " what to do: <code>applied</code> says whether the token's add is counted"
        " (<code>null</code>: not known from this answer), <code>retry</code> whether to send the"
        ' same token again, a new one, or nothing. The routes are in <a href="docs">the'
        ' reference</a>; <a href="console#/lab">the retry lab</a> shows some of these live.</p>'
        f"<ul>{listed}</ul>{''.join(map(_section, kinds))}</main></html>"
    ).encode()


def _section(kind: type[CounterError]) -> str:
    told = EXPLAINED[kind.code]
    told_of = " or ".join(
        f"applied: {json.dumps(each.applied)}, retry: {each.retry}" for each in shapes(kind)
    )
    return (
        f'<section id="{kind.code}"><h2><code>{kind.code}</code> {kind.status}</h2>'
        f"<p>{escape(kind.title)}.</p><p><strong>When:</strong> {_marked(told.when)}.</p>"
        f"<p><strong>What to do:</strong> {_marked(told.do)}.</p><p>{_marked(told.more)}</p>"
        f"<p><code>{told_of}</code></p><pre>{escape(example_text(shapes(kind)[0]))}</pre></section>"
    )


def _marked(text: str) -> str:
    """*text* in HTML, with text in backticks as code."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", escape(text))


class Explained(NamedTuple):
    """The explanation of one code."""

    #: When it occurs, and what to do then, in half a sentence each: docs/http.md has the same.
    when: str
    do: str
    #: Further explanation.
    more: str
    #: The ``detail`` of the example, and the members that its document has besides.
    detail: str
    fields: Mapping[str, Any] = {}
    #: The seconds that the example says to wait.
    wait_s: int | None = None


_NEVER_WROTE: Final = (
    "Nothing was written. An earlier, well-formed attempt with the same token may have been"
    " counted, so `applied` is null."
)

EXPLAINED: Final[Mapping[str, Explained]] = {
    "bad_request": Explained(
        "the request is not HTTP",
        "send HTTP/1.1",
        "The connection is closed afterwards. Usually a client speaks TLS to a port without it,"
        f" or a program that is not an HTTP client connected to the port. {_NEVER_WROTE}",
        "Invalid method encountered Send HTTP/1.1.",
    ),
    "invalid_body": Explained(
        "the body is not JSON, or a field is missing, unknown, or out of its bounds",
        "fix what `errors` names",
        "`errors` has each wrong field with its value and the bound that it breaks, at most ten"
        f' of them. Deltas are JSON integers: `1.0` and `"1"` are not. {_NEVER_WROTE}',
        "delta: Input should be a valid integer (it is 1.5)",
        {
            "errors": [
                {"field": "delta", "message": "Input should be a valid integer", "value": "1.5"}
            ]
        },
    ),
    "invalid_parameter": Explained(
        "the same in the path, the query, a header, or a setting",
        "fix what `field` names",
        "Names of counters are percent-encoded in the path, `/` as `%2F`; durations are text"
        f" with a unit, such as `5s`; an unknown query parameter is rejected too. {_NEVER_WROTE}",
        "max_staleness: '5' is not a duration; write it like 5s, 250ms, 1h30m or 7d",
        {"field": "max_staleness"},
    ),
    "token_missing": Explained(
        "no token, in a namespace that keeps events",
        "make one, and send it with every attempt",
        "Without a token a retry could not be distinguished from a second add. Put one in the"
        " body as `idempotency_token`, or send the header `Idempotency-Key`, for example an"
        " order number. The SDK does it by itself.",
        "namespace 'default' is ACCURATE: give an idempotency_token in the body or an"
        " Idempotency-Key header",
    ),
    "token_ambiguous": Explained(
        "a token in the body and an `Idempotency-Key`",
        "leave one out",
        "Two tokens identify two adds, so it is unknown which one is meant. Look for a proxy or"
        " a library that adds the header by itself.",
        "the body has an idempotency_token and there is an Idempotency-Key header; give one of"
        " them",
    ),
    "not_supported": Explained(
        "a `BEST_EFFORT` namespace keeps no events",
        "use another namespace",
        "Events, history, recounts and atomic adds need the event log, which such a namespace"
        " does not have. The counter type cannot be changed: create an `EVENTUAL` or `ACCURATE`"
        " namespace, and count there.",
        "the event log needs events; namespace 'rough' is BEST_EFFORT, which keeps none: use an"
        " EVENTUAL or ACCURATE namespace",
    ),
    "token_in_future": Explained(
        "the token's time is further ahead than `future_limit`",
        "wait; set the client's clock right, or use keys",
        "If it were stored, such an add would win over every later one, so it is rejected. The"
        " clock of the machine that made the token is fast. After the wait the same token is"
        " accepted. To fix the cause, set that clock by NTP, or use the service's clock: send an"
        " `Idempotency-Key`, or call `POST /v1/tokens`.",
        "generation_time is 62.004 s ahead of this server's clock; at most 5 s are allowed",
        wait_s=58,
    ),
    "key_missing": Explained(
        "the service requires an API key, and none came",
        "send `Authorization: Bearer <key>`",
        "Since the first key was created, every request to `/v1` and to `/metrics` needs one."
        " `counter key create` creates one, on the machine of the service. Nothing was done.",
        "this service asks for an API key: send Authorization: Bearer <key>; counter key create"
        " makes one",
    ),
    "key_invalid": Explained(
        "the key is mistyped, expired or revoked",
        "send one that is valid: `counter key list`",
        "A new key is known to every process within about a second. A key is shown once, when"
        " it is created: if it is lost, create another one with `counter key rotate`. Nothing"
        " was done.",
        "the Authorization header holds no key that is valid now: it may be mistyped, expired or"
        " revoked; send Authorization: Bearer <key>",
    ),
    "scope_insufficient": Explained(
        "the key's scope is less than the route requires",
        "use a key of that scope",
        "`read` reads, `write` also adds and clears, `admin` also creates, changes and deletes"
        " namespaces. The reference of the API names the scope of each route. Nothing was done.",
        "key 0a1b2c3d has the scope read, and this takes write",
        {"scope": "write"},
    ),
    "origin_refused": Explained(
        "no API keys exist, and the request came from a foreign web page or under a foreign name",
        "use `localhost` or a name of `hosts`; list the page in `cors_origins`; or create a key",
        "Without keys, any page in a browser on this machine could send requests here. So"
        " writes from foreign origins are rejected, and `Host` must be `localhost`, a loopback"
        " address or a name of `hosts`. Nothing was done.",
        "Host is 'evil.example': without API keys only localhost, loopback addresses and the names"
        " in hosts are answered; set hosts, create a key, or give --insecure",
    ),
    "quota_exceeded": Explained(
        "the limit of the key's namespaces, or of all shards, is reached",
        "delete a namespace, or raise `namespaces_max` or `shards_max`",
        "Every namespace costs memory and every shard costs rollup work, with or without"
        " events. A key's quota counts all namespaces that the key covers, whichever key created"
        " them. Nothing was done.",
        "the key 0a1b2c3d is for 1000 namespaces already, and namespaces_max is 1000: delete one,"
        " or have namespaces_max raised",
        {"limit": "namespaces_max", "count": 1000, "bound": 1000},
    ),
    "not_found": Explained(
        "there is nothing at this path",
        "see the routes in the reference, or at `/docs` of the service",
        "Most begin with `/v1/namespaces`. A name with a slash in it must be percent-encoded:"
        " `a/b` is `a%2Fb`.",
        "there is nothing at '/v1/namespace/default'",
    ),
    "namespace_unknown": Explained(
        "there is no such namespace",
        "create it",
        "`PUT /v1/namespaces/{name}` creates one, with a key of the scope `admin` if keys are"
        " required. A namespace that a key does not cover is unknown to it: check the key's own"
        " namespaces, too.",
        "there is no namespace 'videos'; create it with PUT /v1/namespaces/{name}",
    ),
    "method_not_allowed": Explained(
        "the path is right and the method is not",
        "use what `Allow` names",
        "Adds are POST, reads are GET; HEAD works where GET does.",
        "the method GET is not supported here; use POST",
        {"allow": ["POST"]},
    ),
    "request_timeout": Explained(
        "the request did not arrive completely in time",
        "send it again",
        "A request has `request_timeout` (10 s) to arrive. Causes are a slow network, a stuck"
        " client, or a body that is shorter than its `Content-Length`. The connection is closed.",
        "the request did not arrive whole within 10 s",
    ),
    "token_conflict": Explained(
        "the token was first used with another payload, which remains",
        "find out why; it is a bug in the client, or a used key",
        "One token identifies one add: it was first used with another delta, or for a clear, or"
        " with other items. A retry must send the same request; another add needs another token."
        " If your keys are your own ids, check whether one id is used for two things: `order-7`"
        " and `order-7:refund`.",
        "the token was first used with another payload on counter 'views'; what it was first used"
        " for stands",
    ),
    "namespace_immutable": Explained(
        "the setting is fixed when a namespace is created",
        "create another namespace",
        "The counter type, the dataset, the rollup window and the shards determine what is"
        " stored. Leave the setting out of the update, or create another namespace with it and"
        " count there from now on.",
        "shards is 1 for the life of namespace 'videos'; it cannot become 2",
        {"field": "shards"},
    ),
    "token_too_old": Explained(
        "a late token that was not counted, and never will be",
        "send with a new token, if the add is still wanted",
        "With `applied` false it is certain and permanent: this token's add is not counted and"
        " never will be, so an add with a new token is safe. With `applied` null the token is"
        " older than the retention (`retention`, 7 days): its outcome is no longer known, and a"
        " new token may count a second time. If this comes at the first attempt, the clock that"
        " made the token is slow: set it by NTP, or use keys.",
        "the token was not applied in time and never will be; if the add is still wanted, send it"
        " with a new token",
    ),
    "precondition_failed": Explained(
        "`If-Match` or `If-None-Match` does not hold",
        "read the namespace again",
        "The namespace was changed after you read it, or it exists already. Read it, check"
        " whether your change still makes sense, and send it with the new `ETag`.",
        'If-Match: "v1", but namespace \'videos\' is at "v2"; read it again',
    ),
    "body_too_large": Explained(
        "the body has more bytes than `--body-bytes-max`",
        "send smaller batches",
        f"The default is 1 MiB. {_NEVER_WROTE}",
        "the body has at least 1048577 bytes; at most 1048576 are allowed",
    ),
    "unsupported_media_type": Explained(
        "the route does not accept this `Content-Type`",
        "send `application/json`",
        "`curl --json` sends it; `curl -d` alone does not. Batches of adds may be"
        " `application/x-ndjson` too.",
        "Content-Type is application/x-www-form-urlencoded; send application/json",
    ),
    "uri_too_long": Explained(
        "the path and query have more than 8 KiB",
        "ask for less, or send it in a body",
        "`POST /v1/namespaces/{namespace}/batch/get` reads many counters whose names are in its"
        " body.",
        "the path and query have 9001 bytes; at most 8192 are allowed",
    ),
    "rate_limited": Explained(
        "the rate of the key, or of the namespace, is exceeded; nothing was done",
        "send it again after `retry_after` seconds",
        "`limit` names the rate: requests, adds, sends with an arbitrary key (`reservations`),"
        " or late tokens (`resolutions`); the fields `RateLimit` and `RateLimit-Policy` of the"
        " answer give its value. Send batches instead of single adds, or raise the limit of the"
        " key, of the namespace, or of the service.",
        "key 0a1b2c3d may have 2 requests a second of this process; send the same again in 0.5 s",
        {"limit": "requests", "rate": 2.0},
        wait_s=1,
    ),
    "head_too_large": Explained(
        "the request line and headers have more than 64 KiB, or there are more than 100 headers",
        "send fewer headers",
        "Cookies of another service on the same host are the usual reason.",
        "the head of the request has at least 65537 bytes; at most 65536 are allowed",
    ),
    "transfer_coding_unsupported": Explained(
        "the `Transfer-Encoding` is not `chunked` alone",
        "send the body with a `Content-Length`, or chunked and not compressed",
        "The body was not read, and the connection is closed.",
        "Transfer-Encoding is 'gzip, chunked'; send chunked alone, or a Content-Length",
    ),
    "internal_error": Explained(
        "a bug in the service",
        "send it again; see the service's log",
        "The log has its trace under the request id that the answer has in `X-Request-Id`. The"
        " add may be counted or not: a retry with the same token returns which.",
        "the service met a fault of its own; see its log",
    ),
    "token_pending": Explained(
        "a late token, and an earlier attempt may be in flight",
        "send it again after `retry_after` seconds",
        "The token is older than `accept_limit` (5 s), so it is not written any more, but its"
        " rollup window is still open. When that closes there is a permanent answer: counted, or"
        " never to be.",
        "the token is past its accept limit, and a write of it that was admitted in time may still"
        " be in flight; ask again with the same token",
        wait_s=2,
    ),
    "overloaded": Explained(
        "too many requests are pending; nothing was done",
        "send it again after `retry_after` seconds",
        "An add that could not be answered in time is rejected before any work. It does no"
        " harm, but shows that there are more adds than this machine can handle: merge them in"
        " the SDK's buffer, send batches, or add processes. Another process may accept it now.",
        "an add would wait 0.612 s behind 3941 others; it may wait 0.5 s. Nothing was done: send"
        " the same again later, or to another process",
        wait_s=1,
    ),
    "store_unavailable": Explained(
        "the disk is full, read-only or damaged, or busy; or too few nodes of Cassandra answer",
        "send it again; see `detail`",
        "`/readyz` of the service says what is wrong and since when. Acknowledged counts are"
        " safe; when the store is back, a retry with the same token returns whether this add is"
        " counted.",
        "Cassandra: 1 of the 2 replicas that the consistency level needs are alive; see `nodetool"
        " status`",
        wait_s=1,
    ),
    "cache_unavailable": Explained(
        "the cache cannot be reached, and only it holds `BEST_EFFORT` counters",
        "send it again; there it may count twice",
        "Event-sourced counters continue without the cache, only slower: this error occurs only"
        " in `BEST_EFFORT` namespaces, where no token makes a retry safe. `/readyz` says what is"
        " wrong.",
        "memcached at cache-1:11211: no answer within 0.1 s",
        wait_s=1,
    ),
    "clock_skew": Explained(
        "this server's clock is not known to be within `clock_skew_max` of the store's; or,"
        " over SQLite, it was set: it rejects writes, and creates, changes or deletes no"
        " namespace",
        "send it again after `retry_after` seconds: another server may accept it",
        "Writes of a process with a wrong clock could be lost to a rollup. Its `/readyz` is 503"
        " meanwhile, so that a load balancer uses other processes. Set the server's clock by"
        " NTP.",
        "this server's clock is 2.1s ahead of the store's, give or take 3ms, and clock_skew_max is"
        " 500ms: set it right (NTP), and restart the process if it was ahead; nothing is written"
        " here",
        wait_s=1,
    ),
    "write_timeout": Explained(
        "the store took longer than `write_timeout`",
        "send it again",
        "The write may have landed, or may land later. A retry with the same token returns"
        " which, and counts the add if it has not landed; a new token could count it twice.",
        "the store took longer than 1 s; ask again with the same token",
        wait_s=1,
    ),
    "slice_missing": Explained(
        "there is no table for the token's time (yet)",
        "send it again after `retry_after` seconds",
        "Tables are made two slices ahead. If the error persists, no process makes them: over"
        " Cassandra, check that a rollup worker runs.",
        "no time slice holds the instant 1769847330000250 µs; slices are made ahead by the"
        " maintenance task, and dropped after retention",
        wait_s=1,
    ),
    "unavailable": Explained(
        "the store changed repeatedly during a read; or the namespace was just deleted and"
        " created again",
        "send it again",
        "It passes by itself.",
        "the counter is being settled again and again",
        wait_s=1,
    ),
}
