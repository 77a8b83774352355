"""Each call of a client as data: the request and the parser of its answer. No I/O."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from json.encoder import encode_basestring
from typing import Any, Final, Generic, NamedTuple, TypeVar
from urllib.parse import quote, urlencode

from counter_client import answers
from counter_client.errors import CounterError, InvalidParameterError
from counter_client.failures import (
    Unfinished,
    UnknownOutcomeError,
    error_of_answer,
    error_of_problem,
    unexpected,
)
from counter_client.tokens import (
    Credential,
    Items,
    Key,
    Moment,
    Token,
    check_delta,
    checked_items,
    checked_name,
    checked_names,
    checked_namespace,
    checked_token,
    moment_text,
    to_rfc3339,
)

T = TypeVar("T")
A = TypeVar("A")
#: Reads a body that is the answer to what was asked of each counter.
Read = Callable[[Any, Sequence[answers.Asked]], T]
#: A namespace's settings as the service writes them, including its name.
Settings = dict[str, Any]
NO_CONTENT: Final = 204
#: Bounds of the service.
ATOMIC_ITEMS_MAX: Final = 100
BATCH_ITEMS_MAX: Final = 1_000
BODY_BYTES_MAX: Final = 1024 * 1024
#: Items per page by default, and at most.
PAGE_ITEMS_MAX: Final = 1_000


class Request(NamedTuple):
    """One request, relative to a base URL."""

    method: str
    path: str
    operation: str
    body: bytes | None = None
    headers: tuple[tuple[str, str], ...] = ()


class Response(NamedTuple):
    """One response."""

    status: int
    body: bytes
    retry_after: str | None = None
    #: The target of a redirect. It is not followed: it may be another service.
    location: str | None = None
    #: ``Idempotency-TTL``: for how long a token is honoured.
    ttl_s: int | None = None


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A request and the parser of its answer."""

    request: Request
    read: Callable[[Any], T]
    unfinished: Unfinished | None = None
    #: Makes the call with another token, if the program did not choose the token.
    renewed: Callable[[Token], Call[T]] | None = field(default=None, compare=False)

    def result(self, response: Response) -> T:
        """Parse *response*. Raises the CounterError that it contains."""
        if not 200 <= response.status < 300:
            raise error_of_answer(*response[:4])
        try:
            return self.read(None if response.status == NO_CONTENT else json.loads(response.body))
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise unexpected(response.status, response.body) from error

    def with_ttl(self, ttl_s: int | None, first_us: int) -> Call[T]:
        """Return this call with what an answer says of how long its token is honoured; *first_us*
        is the time of the first attempt, from which a key is."""
        if ttl_s is None or self.unfinished is None:
            return self
        return replace(self, unfinished=self.unfinished.with_ttl(ttl_s, first_us))

    def given_up(self, error: CounterError, why: str, *, sent: bool = True) -> CounterError:
        """Return what to raise instead of a retry after *error*; *sent* is whether any attempt may
        have arrived."""
        if self.unfinished is None:
            return error
        what, then = "counted", "send it again, or resolve error.unfinished"
        if self.request.operation == "cancel":
            what, then = "cancelled", "cancel it again"
        return UnknownOutcomeError(
            f"{why}, and it is not known whether the token's {self.unfinished.operation} is"
            f" {what}: {error.detail}; {then}",
            self.unfinished,
            sent=sent,
        )


class Calls:
    """The calls in one namespace. All raise InvalidParameterError for invalid arguments."""

    def __init__(self, namespace: str) -> None:
        self.namespace = checked_namespace(namespace)
        self._base = f"/v1/namespaces/{quote(namespace, safe='')}"

    def add(self, counter: str, delta: int, token: Credential | None) -> Call[answers.Added]:
        return self._tokened("add", [(counter, delta)], token, _first(answers.added_of))

    def add_and_get(
        self, counter: str, delta: int, token: Credential | None
    ) -> Call[answers.AddedCount]:
        read = _first(answers.added_count_of)
        return self._tokened("add-and-get", [(counter, delta)], token, read)

    def clear(self, counter: str, token: Credential | None) -> Call[answers.Cleared]:
        return self._tokened("clear", [(counter, 0)], token, _first(answers.cleared_of))

    def delete(self, counter: str, token: Credential | None) -> Call[answers.Cleared]:
        return self._tokened("delete", [(counter, 0)], token, _first(answers.cleared_of))

    def atomic(self, items: Items, token: Credential | None) -> Call[list[answers.Added]]:
        found = checked_items(items, ATOMIC_ITEMS_MAX)
        return self._tokened("atomic/add", found, token, _addeds_of)

    def resolve(self, unfinished: Unfinished) -> Call[answers.Resolved]:
        """Send the same request again, to learn whether it is counted."""
        return self._again(unfinished, _resolved(_READERS[unfinished.operation]))

    def cancel(
        self, counter: str, delta: int, operation: str, token: Credential
    ) -> Call[answers.Cancelled]:
        if operation not in ("add", "clear", "delete"):
            raise InvalidParameterError(
                f"the operation is {operation!r:.80}; it must be add, clear or delete"
            )
        items = [(counter, delta if operation == "add" else 0)]
        return self._tokened(operation, items, checked_token(token), _CANCELLED, cancels=True)

    def cancel_atomic(self, items: Items, token: Credential) -> Call[answers.Cancelled]:
        found = checked_items(items, ATOMIC_ITEMS_MAX)
        return self._tokened("atomic/add", found, checked_token(token), _CANCELLED, cancels=True)

    def cancel_unfinished(self, unfinished: Unfinished) -> Call[answers.Cancelled]:
        return self._again(unfinished, _CANCELLED, cancels=True)

    def _again(self, unfinished: Unfinished, read: Read[T], *, cancels: bool = False) -> Call[T]:
        """The same request, sent again or to the address that cancels."""
        if unfinished.namespace != self.namespace:
            raise InvalidParameterError(
                f"it was sent to namespace {unfinished.namespace!r}, and this client is for"
                f" {self.namespace!r}"
            )
        operation, items = unfinished.operation, unfinished.items
        call = self._tokened(operation, items, unfinished.token, read, cancels=cancels)
        return replace(call, unfinished=unfinished)

    def get(self, counter: str, max_staleness: str | None) -> Call[answers.Count]:
        query = _query(max_staleness=max_staleness)
        return Call(
            Request("GET", self._counter(counter) + query, "get"),
            partial(answers.count_of, namespace=self.namespace, counter=counter),
        )

    def between(
        self, counter: str, start: Moment, end: Moment | None, tz: str | None
    ) -> Call[answers.Change]:
        query = _query(**{"from": moment_text(start), "to": moment_text(end), "tz": tz})
        return Call(
            Request("GET", self._counter(counter) + query, "get"),
            partial(answers.change_of, namespace=self.namespace, counter=counter),
        )

    def batch(
        self, adds: Iterable[tuple[str, int, Token]], texts: Iterable[str]
    ) -> Call[list[answers.Added | CounterError]]:
        """``batch/add`` of *adds*, whose *texts* are from :func:`item_text`."""
        body = f'{{"items":[{",".join(texts)}]}}'
        request = _post(f"{self._base}/batch/add", "batch/add", body)
        asked = [
            answers.Asked(self.namespace, counter, delta, token.generation_time_us)
            for counter, delta, token in adds
        ]
        return Call(request, lambda body: _each_of(body, asked, _added_or_error))

    def unfinished(self, counter: str, delta: int, token: Credential) -> Unfinished:
        """Return an add of a batch as an Unfinished."""
        return Unfinished("add", self.namespace, ((counter, delta),), str(token))

    def batch_get(
        self, counters: Iterable[str], max_staleness: str | None
    ) -> Call[list[answers.Count]]:
        names = checked_names(counters)
        body: dict[str, Any] = {"counters": names}
        if max_staleness is not None:
            body["max_staleness"] = max_staleness
        request = _post(f"{self._base}/batch/get", "batch/get", _json(body))

        def count(body: Any, counter: str) -> answers.Count:
            if "code" in body:
                raise error_of_problem(body)
            return answers.count_of(body, self.namespace, counter)

        return Call(request, lambda body: _each_of(body, names, count))

    def counters(self, prefix: str | None, page: str | None) -> Call[tuple[list[str], str | None]]:
        path = f"{self._base}/counters" + _query(
            prefix=prefix, limit=str(PAGE_ITEMS_MAX), page=page
        )
        return Call(
            Request("GET", path, "counters"),
            lambda body: ([_name(x) for x in _list(body, "counters")], answers.page_of(body)),
        )

    def counts(
        self,
        prefix: str | None,
        page: str | None,
        largest_first: bool,
        max_staleness: str | None,
        items: int = PAGE_ITEMS_MAX,
    ) -> Call[tuple[list[answers.Count], str | None]]:
        query = _query(
            prefix=prefix,
            counts="true",
            order="-count" if largest_first else None,
            max_staleness=max_staleness,
            limit=str(items),
            page=page,
        )
        return Call(
            Request("GET", f"{self._base}/counters{query}", "counters"),
            lambda body: (
                [answers.count_of(x, self.namespace) for x in _list(body, "counts")],
                answers.page_of(body),
            ),
        )

    def sum(self, prefix: str | None, max_staleness: str | None) -> Call[answers.Sum]:
        query = _query(prefix=prefix, sum="true", max_staleness=max_staleness, limit="1")
        return Call(Request("GET", f"{self._base}/counters{query}", "counters"), answers.sum_of)

    def busiest(self, limit: int, span: str) -> Call[answers.Busiest]:
        path = f"{self._base}/busiest" + _query(limit=str(limit), span=span)
        return Call(Request("GET", path, "busiest"), answers.busiest_of)

    def events(
        self,
        counter: str,
        start: Moment | None,
        end: Moment | None,
        page: str | None,
        items: int = PAGE_ITEMS_MAX,
    ) -> Call[tuple[list[answers.Event], str | None]]:
        query = _query(
            **{
                "from": moment_text(start),
                "to": moment_text(end),
                "limit": str(items),
                "page": page,
            }
        )
        return Call(
            Request("GET", f"{self._counter(counter)}/events{query}", "events"),
            lambda body: (
                [answers.event_of(x) for x in _list(body, "events")],
                answers.page_of(body),
            ),
        )

    def history(
        self,
        counter: str,
        start: Moment | None,
        end: Moment | None,
        step: str | None,
        tz: str | None,
    ) -> Call[list[answers.Point]]:
        span = {"from": moment_text(start), "to": moment_text(end)}
        query = _query(**span, step=step, tz=tz)
        return Call(
            Request("GET", f"{self._counter(counter)}/history{query}", "history"),
            lambda body: [answers.point_of(x) for x in _list(body, "points")],
        )

    def live(self, counter: str) -> Call[answers.Count]:
        """A counter's stream, whose every count is parsed as an answer."""
        return Call(
            Request("GET", f"{self._counter(counter)}/live", "live"),
            partial(answers.count_of, namespace=self.namespace, counter=counter),
        )

    def settings(self) -> Call[Settings]:
        return Call(Request("GET", self._base, "namespace"), self._settings_of)

    def create_namespace(self, settings: Settings) -> Call[Settings]:
        """Create a namespace; an existing one is never changed."""
        return self._put(settings, (("If-None-Match", "*"),))

    def change_namespace(self, settings: Settings) -> Call[Settings]:
        """Change an existing namespace; none is created."""
        return self._put(settings, (("If-Match", "*"),))

    def delete_namespace(self) -> Call[None]:
        return Call(Request("DELETE", self._base, "namespace"), _nothing)

    def _put(self, settings: Settings, headers: tuple[tuple[str, str], ...]) -> Call[Settings]:
        request = _post(self._base, "namespace", _json(settings), headers)
        return Call(request._replace(method="PUT"), self._settings_of)

    def _settings_of(self, body: Any) -> Settings:
        found = _settings_of(body)
        if found["namespace"] != self.namespace:
            raise ValueError("the answer is about another namespace")
        return found

    def recount(self, counter: str) -> Call[int]:
        request = _post(f"{self._counter(counter)}/recount", "recount", "{}")
        return Call(request, lambda body: answers.member(body, "windows", int))

    def _counter(self, counter: str) -> str:
        # Clients and proxies remove "." and ".." from paths if they are not escaped.
        name = quote(checked_name(counter), safe="")
        return f"{self._base}/counters/{name.replace('.', '%2E') if name in ('.', '..') else name}"

    def _tokened(
        self,
        operation: str,
        items: Sequence[tuple[str, int]],
        token: Credential | None,
        read: Read[T],
        *,
        cancels: bool = False,
    ) -> Call[T]:
        """An add, a clear or a delete under *token*, or under a new one made once for the call; or
        the cancel of one."""
        if token is None:
            call = self._tokened(operation, items, Token.new(), read)
            return replace(call, renewed=partial(self._renewed, operation, items, read))
        credential = checked_token(token)
        body: dict[str, Any] = {}
        verb = "cancel" if cancels else operation
        if operation == "atomic/add":
            path = f"{self._base}/{'atomic/cancel' if cancels else operation}"
            body["items"] = [
                {"counter": checked_name(c), "delta": check_delta(d)} for c, d in items
            ]
        else:
            [(counter, delta)] = items
            path = self._counter(counter)
            if verb != "delete":
                path = f"{path}/{verb}"
            if operation not in ("clear", "delete"):
                body["delta"] = check_delta(delta)
            elif cancels:
                body["operation"] = operation
        headers: tuple[tuple[str, str], ...] = ()
        time_us: int | None = None
        if isinstance(credential, Key):
            headers = (("Idempotency-Key", credential.text),)
        else:
            time_us = credential.generation_time_us
            body["idempotency_token"] = {
                "token": str(uuid.UUID(bytes=credential.nonce)),
                "generation_time": to_rfc3339(time_us),
            }
        request = _post(path, verb, _json(body), headers)
        if verb == "delete":
            request = request._replace(method="DELETE")
        asked = [answers.Asked(self.namespace, *each, time_us) for each in items]
        return Call(
            request,
            lambda body: read(body, asked),
            Unfinished(operation, self.namespace, tuple(items), str(credential)),
        )

    def _renewed(
        self,
        operation: str,
        items: Sequence[tuple[str, int]],
        read: Read[T],
        token: Token,
    ) -> Call[T]:
        call = self._tokened(operation, items, token, read)
        return replace(call, renewed=partial(self._renewed, operation, items, read))


def namespaces() -> Call[list[Settings]]:
    """The namespaces that the caller may see, with their settings."""
    request = Request("GET", "/v1/namespaces", "namespaces")
    return Call(request, lambda body: [_settings_of(each) for each in _list(body, "namespaces")])


def tokens(count: int) -> Call[list[Token]]:
    """1 to 1,000 tokens with the service's time."""
    request = _post("/v1/tokens", "tokens", _json({"count": count}))

    def read(body: Any) -> list[Token]:
        found = [answers.token_of(each) for each in _list(body, "tokens")]
        if len(found) != count:
            raise ValueError("tokens")
        return found

    return Call(request, read)


def item_text(counter: str, delta: int, token: tuple[bytes, int]) -> str:
    """Return one item of ``batch/add`` as JSON."""
    return (
        f'{{"counter":{encode_basestring(counter)},"delta":{delta},"idempotency_token":{{'
        f'"token":"{token[0].hex()}","generation_time":"{to_rfc3339(token[1])}"}}}}'
    )


def _post(
    path: str, operation: str, body: str, headers: tuple[tuple[str, str], ...] = ()
) -> Request:
    kind = ("Content-Type", "application/json")
    return Request("POST", path, operation, body.encode(), (kind, *headers))


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _query(**values: str | None) -> str:
    given = {name: value for name, value in values.items() if value is not None}
    try:
        return f"?{urlencode(given)}" if given else ""
    except UnicodeEncodeError as error:
        raise InvalidParameterError(
            f"{error.object!r:.80} is not valid text: it has a lone surrogate"
        ) from error


def _list(body: Any, name: str) -> list[Any]:
    return answers.member(body, name, list)


def _each_of(body: Any, asked: Sequence[A], read: Callable[[Any, A], T]) -> list[T]:
    """Read the result of each item that was asked for."""
    return [read(each, one) for each, one in zip(_list(body, "results"), asked, strict=True)]


def _first(read: Callable[[Any, answers.Asked], T]) -> Read[T]:
    """Return what reads the answer to an operation on one counter."""
    return lambda body, asked: read(body, asked[0])


def _addeds_of(body: Any, asked: Sequence[answers.Asked]) -> list[answers.Added]:
    return _each_of(body, asked, answers.added_of)


_CANCELLED: Final = _first(answers.cancelled_of)
#: What reads the answer to each operation of an Unfinished.
_READERS: Final[Mapping[str, Read[object]]] = {
    "add": _first(answers.added_of),
    "add-and-get": _first(answers.added_count_of),
    "clear": _first(answers.cleared_of),
    "delete": _first(answers.cleared_of),
    "atomic/add": _addeds_of,
}


def _resolved(read: Read[object]) -> Read[answers.Resolved]:
    def resolved(body: Any, asked: Sequence[answers.Asked]) -> answers.Resolved:
        read(body, asked)
        return answers.Resolved(applied=True)

    return resolved


def _added_or_error(body: Any, asked: answers.Asked) -> answers.Added | CounterError:
    return error_of_problem(body) if "code" in body else answers.added_of(body, asked)


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("counters")
    return value


def _settings_of(body: Any) -> Settings:
    for name in ("namespace", "counter_type"):
        answers.member(body, name, str)
    return dict(body)


def _nothing(body: object) -> None:
    if body is not None:
        raise ValueError("an answer without a body is expected")
