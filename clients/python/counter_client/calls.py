"""Each call of a client as data: the request and the parser of its answer. No I/O."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from json.encoder import encode_basestring
from typing import Any, Final, Generic, NamedTuple, TypeVar
from urllib.parse import quote, urlencode

from counter_client import answers
from counter_client.errors import (
    CounterError,
    HoldEndedError,
    HoldSettledError,
    InvalidParameterError,
)
from counter_client.failures import (
    ClosedError,
    Unfinished,
    UnknownOutcomeError,
    error_of_answer,
    error_of_problem,
    unexpected,
)
from counter_client.tokens import (
    NO_BOUNDS,
    Add,
    Bounds,
    Credential,
    HoldId,
    Items,
    Key,
    Moment,
    Token,
    check_delta,
    checked_bounds,
    checked_duration,
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
NO_CONTENT: Final = 204
#: Bounds of the service.
ATOMIC_ITEMS_MAX: Final = 100
BATCH_ITEMS_MAX: Final = 1_000
BODY_BYTES_MAX: Final = 1024 * 1024
#: Items per page by default, and at most.
PAGE_ITEMS_MAX: Final = 1_000


#: What a hold and its ends are if they succeeded; anything else is counted.
_DONE: Final[Mapping[str, str]] = {"hold": "open", "settle": "done", "release": "done"}


class Settings(dict[str, Any]):
    """A namespace's settings as the service writes them, including its name."""

    #: The version that was read, for ``change_namespace``; None in a list of namespaces.
    etag: str | None = None


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
    etag: str | None = None


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
            found = self.read(None if response.status == NO_CONTENT else json.loads(response.body))
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise unexpected(response.status, response.body) from error
        if isinstance(found, Settings):
            found.etag = response.etag
        return found

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
        what = _DONE.get(self.unfinished.operation, "counted")
        then = "send it again, or resolve error.unfinished"
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

    def add(
        self, counter: str, delta: int, token: Credential | None, bounds: Bounds = NO_BOUNDS
    ) -> Call[answers.Added]:
        return self._tokened("add", [Add(counter, delta, bounds)], token, _first(answers.added_of))

    def add_and_get(
        self, counter: str, delta: int, token: Credential | None, bounds: Bounds = NO_BOUNDS
    ) -> Call[answers.AddedCount]:
        read = _first(answers.added_count_of)
        return self._tokened("add-and-get", [Add(counter, delta, bounds)], token, read)

    def clear(self, counter: str, token: Credential | None) -> Call[answers.Cleared]:
        return self._tokened("clear", [Add(counter, 0)], token, _first(answers.cleared_of))

    def delete(self, counter: str, token: Credential | None) -> Call[answers.Cleared]:
        return self._tokened("delete", [Add(counter, 0)], token, _first(answers.cleared_of))

    def atomic(self, items: Items, token: Credential | None) -> Call[list[answers.Added]]:
        found = checked_items(items, ATOMIC_ITEMS_MAX)
        return self._tokened("atomic/add", found, token, _addeds_of)

    def resolve(self, unfinished: Unfinished) -> Call[answers.Resolved]:
        """Send the same request again, to learn whether it is counted."""
        return self._again(unfinished, _resolved(_READERS[unfinished.operation]))

    def cancel(
        self,
        counter: str,
        delta: int,
        operation: str,
        token: Credential,
        bounds: Bounds = NO_BOUNDS,
    ) -> Call[answers.Cancelled]:
        if operation not in ("add", "clear", "delete"):
            raise InvalidParameterError(
                f"the operation is {operation!r:.80}; it must be add, clear or delete"
            )
        if operation != "add" and bounds != NO_BOUNDS:
            raise InvalidParameterError(f"a {operation} has no bounds: leave them out")
        items = [Add(counter, delta if operation == "add" else 0, bounds)]
        return self._tokened(operation, items, checked_token(token), _CANCELLED, cancels=True)

    def hold(
        self,
        counter: str,
        amount: int,
        expires_in: str,
        token: Credential | None,
        bounds: Bounds = NO_BOUNDS,
    ) -> Call[answers.HoldCount]:
        return self._tokened(
            *("hold", [Add(counter, amount, bounds)], token, _first(_BEGUN)),
            expires_in=checked_duration(expires_in),
        )

    def settle(self, hold: str, amount: int) -> Call[answers.HoldCount]:
        return self._end(HoldId.parse(hold), "settle", amount, _first(_SETTLED))

    def release(self, hold: str) -> Call[answers.HoldCount]:
        return self._end(HoldId.parse(hold), "release", 0, _first(_RELEASED))

    def _end(self, hold: HoldId, verb: str, amount: int, read: Read[T]) -> Call[T]:
        body = {"amount": check_delta(amount, "amount")} if verb == "settle" else {}
        token, counter = hold
        asked = answers.Asked(
            self.namespace, counter, amount, token.generation_time_us, hold=str(hold)
        )
        return Call(
            _post(f"{self._base}/holds/{hold}/{verb}", verb, _json(body)),
            lambda body: read(body, [asked]),
            Unfinished.of(verb, self.namespace, [Add(counter, amount)], str(token)),
        )

    def extend(self, hold: str, expires_in: str) -> Call[answers.HoldState]:
        call = self.get_hold(hold)
        body = _json({"expires_in": checked_duration(expires_in)})
        request = _post(call.request.path, "extend", body)._replace(method="PATCH")
        return replace(call, request=request)

    def get_hold(self, hold: str) -> Call[answers.HoldState]:
        path = f"{self._base}/holds/{HoldId.parse(hold)}"
        read = partial(answers.hold_of, namespace=self.namespace, hold=hold)
        return Call(Request("GET", path, "get-hold"), read)

    def holds(
        self, counter: str, page: str | None
    ) -> Call[tuple[list[answers.HoldState], str | None]]:
        query = _query(counter=checked_name(counter), limit=str(PAGE_ITEMS_MAX), page=page)
        return Call(
            Request("GET", f"{self._base}/holds{query}", "holds"),
            lambda body: (
                [answers.hold_of(x, self.namespace) for x in _list(body, "holds")],
                answers.page_of(body),
            ),
        )

    def cancel_hold(
        self,
        counter: str,
        amount: int,
        expires_in: str,
        token: Credential,
        bounds: Bounds = NO_BOUNDS,
    ) -> Call[answers.Cancelled]:
        return self._tokened(
            *("hold", [Add(counter, amount, bounds)], checked_token(token), _CANCELLED),
            cancels=True,
            expires_in=checked_duration(expires_in),
        )

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
        operation, items, token = unfinished.operation, unfinished.adds, unfinished.token
        if operation not in ("settle", "release"):
            call = self._tokened(
                *(operation, items, token, read),
                cancels=cancels,
                expires_in=unfinished.expires_in,
            )
        elif cancels or not isinstance(token, Token):
            raise InvalidParameterError(
                f"a {operation} cannot be cancelled: correct what was settled with an add"
            )
        else:
            hold = HoldId(token, checked_name(items[0].counter))
            call = self._end(hold, operation, items[0].delta, read)
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

    def unfinished(
        self, counter: str, delta: int, token: Credential, bounds: Bounds = NO_BOUNDS
    ) -> Unfinished:
        """Return an add of a batch as an Unfinished."""
        return Unfinished.of("add", self.namespace, [Add(counter, delta, bounds)], str(token))

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

    def create_namespace(self, settings: Mapping[str, Any]) -> Call[Settings]:
        """Create a namespace; an existing one is never changed."""
        return self._put(settings, (("If-None-Match", "*"),))

    def change_namespace(
        self, settings: Mapping[str, Any], etag: str | None = None
    ) -> Call[Settings]:
        """Change an existing namespace, at the version *etag* unless it is None; none is
        created."""
        return self._put(settings, (("If-Match", etag or "*"),))

    def delete_namespace(self) -> Call[None]:
        return Call(Request("DELETE", self._base, "namespace"), _nothing)

    def _put(
        self, settings: Mapping[str, Any], headers: tuple[tuple[str, str], ...]
    ) -> Call[Settings]:
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
        items: Sequence[Add],
        token: Credential | None,
        read: Read[T],
        *,
        cancels: bool = False,
        expires_in: str | None = None,
    ) -> Call[T]:
        """An add, a clear, a delete or a hold under *token*, or under a new one made once for the
        call; or the cancel of one."""
        if token is None:
            return self._renewed(operation, items, read, expires_in, Token.new())
        credential = checked_token(token)
        body: dict[str, Any] = {}
        verb = "cancel" if cancels else operation
        if operation == "atomic/add":
            path = f"{self._base}/{'atomic/cancel' if cancels else operation}"
            body["items"] = [{"counter": checked_name(x.counter), **_amounts(x)} for x in items]
        else:
            path = self._counter(items[0].counter)
            if verb != "delete":
                path = f"{path}/{'holds' if verb == 'hold' else verb}"
            if operation == "hold":
                body |= {**_amounts(items[0], "amount"), "expires_in": expires_in}
            elif operation not in ("clear", "delete"):
                body |= _amounts(items[0])
            if cancels and operation in ("clear", "delete", "hold"):
                body["operation"] = operation
        headers: tuple[tuple[str, str], ...] = ()
        time_us: int | None = None
        hold: str | None = None
        if isinstance(credential, Key):
            headers = (("Idempotency-Key", credential.text),)
        else:
            time_us = credential.generation_time_us
            if operation == "hold" and time_us >= 0:
                hold = str(HoldId(credential, items[0].counter))
            body["idempotency_token"] = {
                "token": str(uuid.UUID(bytes=credential.nonce)),
                "generation_time": to_rfc3339(time_us),
            }
        request = _post(path, verb, _json(body), headers)
        if verb == "delete":
            request = request._replace(method="DELETE")
        asked = [answers.Asked(self.namespace, x.counter, x.delta, time_us, hold) for x in items]
        return Call(
            request,
            lambda body: read(body, asked),
            Unfinished.of(operation, self.namespace, items, str(credential), expires_in),
        )

    def _renewed(
        self,
        operation: str,
        items: Sequence[Add],
        read: Read[T],
        expires_in: str | None,
        token: Token,
    ) -> Call[T]:
        call = self._tokened(operation, items, token, read, expires_in=expires_in)
        return replace(call, renewed=partial(self._renewed, operation, items, read, expires_in))


#: A hold that has ended, whatever ended it.
ENDED: Final = (HoldSettledError, HoldEndedError)


class Held:
    """An open hold, as its holder knows it; without I/O."""

    def __init__(self, began: answers.HoldCount) -> None:
        #: The hold and its counter right after it began.
        self.began = began
        self.id = began.id
        self.counter = began.counter
        self.amount = began.amount
        self.expires_at = began.expires_at
        #: Whether leaving the block releases it: not if it has ended, or may be settled.
        self.is_open = True

    @contextmanager
    def settling(self) -> Iterator[None]:
        """Settle in the block. If it is not known whether that succeeded, a release could win, and
        the cost would be lost: then the hold is left to a later settle, or to its expiry."""
        self.is_open = False
        try:
            yield
        except CounterError as error:
            is_refused = not isinstance(error, (UnknownOutcomeError, ClosedError, *ENDED))
            self.is_open = is_refused
            raise

    @contextmanager
    def releasing(self) -> Iterator[None]:
        """Release in the block."""
        try:
            yield
        except ENDED:
            self.is_open = False
            raise
        self.is_open = False

    def note(self, error: CounterError) -> str:
        """Return what to add to the error of a block whose hold was not released."""
        return (
            f"the hold {self.id} of {self.amount} may not be released, and then expires by itself:"
            f" {error.detail}"
        )


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


def item_text(
    counter: str, delta: int, token: tuple[bytes, int], bounds: Bounds = NO_BOUNDS
) -> str:
    """Return one item of ``batch/add`` as JSON."""
    more = "".join(f',"{name}":{bound}' for name, bound in bounds.members().items())
    return (
        f'{{"counter":{encode_basestring(counter)},"delta":{delta}{more},"idempotency_token":{{'
        f'"token":"{token[0].hex()}","generation_time":"{to_rfc3339(token[1])}"}}}}'
    )


def _amounts(add: Add, name: str = "delta") -> dict[str, Any]:
    """Return the delta, which is called *name*, and the bounds of *add* as members of a body."""
    return {name: check_delta(add.delta, name), **checked_bounds(add.bounds).members()}


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
_BEGUN: Final = partial(answers.hold_count_of, state="open")
_SETTLED: Final = partial(answers.hold_count_of, state="settled")
_RELEASED: Final = partial(answers.hold_count_of, state="released")
#: What reads the answer to each operation of an Unfinished.
_READERS: Final[Mapping[str, Read[object]]] = {
    "add": _first(answers.added_of),
    "add-and-get": _first(answers.added_count_of),
    "clear": _first(answers.cleared_of),
    "delete": _first(answers.cleared_of),
    "atomic/add": _addeds_of,
    "hold": _first(_BEGUN),
    "settle": _first(_SETTLED),
    "release": _first(_RELEASED),
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
    return Settings(body)


def _nothing(body: object) -> None:
    if body is not None:
        raise ValueError("an answer without a body is expected")
