"""The routes of namespaces, and of server-issued tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final

from fastapi import Query
from pydantic.json_schema import SkipJsonSchema

from api.http.call import Call
from api.http.models import NamespaceBody, NoQuery, TokensBody
from api.http.response_models import (
    IssuedToken,
    NamespaceAnswer,
    NamespacePutAnswer,
    NamespacesAnswer,
    TokensAnswer,
)
from api.http.responses import Response
from api.http.routing import ETAG, NAMESPACE, CallOf, InNamespace, created, matched, route
from counter.api_keys import Scope
from counter.bounds import Bounds
from counter.config.namespace_rules import (
    check_change,
    check_name,
    check_settings,
    creation_warnings,
    fitted,
)
from counter.config.settings import Settings
from counter.core.service import CounterService
from counter.errors import (
    InvalidBodyError,
    NamespaceUnknownError,
    PreconditionFailedError,
    QuotaExceededError,
)
from counter.security.audit_log import AdminLog
from counter.tokens import format_nonce
from counter.types import EventRule, Namespace, NamespaceSettings

_log = logging.getLogger("counter.namespaces")
_WEAK: Final = (
    "a weak ETag never matches If-Match (RFC 9110, 13.1.1), and a proxy that compresses responses"
    " makes ETags weak: send it without W/"
)
_DURATIONS: Final = ("accept_limit", "future_limit", "rollup_window", "key_ttl", "cache_ttl")


@dataclass(frozen=True, slots=True)
class NamespaceRoutes:
    """Handlers of ``/v1/namespaces`` and ``/v1/tokens``."""

    service: CounterService
    settings: Settings
    admin_log: AdminLog
    #: Held while a namespace is created: two at once could both pass the quota.
    creating: asyncio.Lock = field(default_factory=asyncio.Lock)

    @route("GET", "/v1/namespaces", Scope.READ, tag="namespaces", latest=True)
    async def list_namespaces(
        self, call: CallOf, query: Annotated[NoQuery, Query()]
    ) -> NamespacesAnswer:
        """All namespaces."""
        everything = self.service.namespaces.all()
        return NamespacesAnswer(
            namespaces=[_model_of(each) for each in everything if call.sees(each.name)]
        )

    @route("GET", NAMESPACE, Scope.READ, tag="namespaces", latest=True, headers=(ETAG,))
    async def get_namespace(
        self, call: CallOf, namespace: InNamespace
    ) -> Annotated[Response, NamespaceAnswer]:
        """A namespace, with its ETag."""
        if _is_unmodified(call, namespace):
            return Response(304, b"", headers=(_etag_header(namespace),))
        return _response(namespace)

    @route(
        "PUT",
        NAMESPACE,
        Scope.ADMIN,
        tag="namespaces",
        latest=True,
        declares=(matched, created),
        problems=(409, 412),
        headers=(ETAG,),
        responses={201: {"model": NamespacePutAnswer, "description": "Created"}},
    )
    async def put_namespace(
        self, call: CallOf, body: NamespaceBody
    ) -> Annotated[Response, NamespacePutAnswer]:
        """Create a namespace (201), or update its mutable settings (200)."""
        changes = _changes(body)
        namespaces = self.service.namespaces
        try:
            current = namespaces.get(call.namespace)
        except NamespaceUnknownError:
            _check_conditions(call, None)
            if "counter_type" not in changes:
                raise InvalidBodyError(
                    "counter_type: Field required to create a namespace: ACCURATE, EVENTUAL or"
                    " BEST_EFFORT",
                    field="counter_type",
                ) from None
            settings = replace(self.settings.default_namespace(), **changes)
            dataset = await namespaces.dataset(settings.dataset)
            if "key_ttl_us" not in changes:
                settings = fitted(settings, dataset)
            async with self.creating:
                self._check_quota(call, settings.shards)
                async with self._acts("namespace.create", call, None, settings):
                    check_name(call.namespace)
                    check_settings(settings, dataset)
                    created = await namespaces.create(call.namespace, settings)
            return _response(created, 201, self._warnings(created))
        _check_conditions(call, current)
        settings = replace(current.settings, **changes)
        # Bounds that are sent again, because an answer was lost, must be in force at this one.
        if settings != current.settings or "bounds" in changes:
            async with self._acts("namespace.change", call, current.settings, settings):
                check_change(current, settings)
                current = await namespaces.update(current, settings)
        return _response(current, warnings=self._warnings(current))

    def _check_quota(self, call: Call, shards: int) -> None:
        """Raise QuotaExceededError if the caller, or all namespaces together, have too much."""
        everything = self.service.namespaces.all()
        count = sum(call.sees(each.name) for each in everything)
        if count >= self.settings.namespaces_max:
            name = "a client" if call.caller is None else call.caller.name
            raise QuotaExceededError(
                f"{name} is for {count} namespaces already, and namespaces_max is"
                f" {self.settings.namespaces_max}: delete one, or have namespaces_max raised",
                limit="namespaces_max",
                count=count,
                bound=self.settings.namespaces_max,
            )
        total = sum(each.settings.shards for each in everything)
        most = self.settings.shards_max
        if total + shards > most:
            raise QuotaExceededError(
                f"the namespaces of this service have {total} shards, and with {shards} more they"
                f" would have more than shards_max, {most}: ask for fewer shards,"
                " delete a namespace, or have shards_max raised",
                limit="shards_max",
                count=total,
                bound=most,
            )

    @asynccontextmanager
    async def _acts(
        self,
        what: str,
        call: Call,
        before: NamespaceSettings | None,
        after: NamespaceSettings | None,
    ) -> AsyncIterator[None]:
        """Log the act in the block in the audit log."""
        async with self.admin_log.act(what, call.who, namespace=call.namespace) as act:
            act.changed(before, after)
            yield

    def _warnings(self, namespace: Namespace) -> tuple[str, ...]:
        """Return the contradictions within its settings; they are logged, too."""
        found = (
            *creation_warnings(namespace.settings, namespace.dataset),
            *self.settings.kind.advice(namespace.settings),
        )
        for each in found:
            _log.warning("namespace %r: %s", namespace.name, each)
        return found

    @route(
        "DELETE",
        NAMESPACE,
        Scope.ADMIN,
        tag="namespaces",
        latest=True,
        declares=(matched,),
        problems=(412,),
        status=204,
    )
    async def delete_namespace(self, call: CallOf, namespace: InNamespace) -> Response:
        """Delete a namespace with its counters, events and tokens."""
        _check_conditions(call, namespace)
        async with self._acts("namespace.delete", call, namespace.settings, None):
            await self.service.namespaces.delete(namespace)
        return Response(204, b"")

    @route("POST", "/v1/tokens", Scope.WRITE, tag="tokens")
    async def issue_tokens(
        self, call: CallOf, body: TokensBody | SkipJsonSchema[None] = None
    ) -> TokensAnswer:
        """Tokens in strict order, never issued twice."""
        issued = await self.service.issue_tokens((body or TokensBody()).count)
        return TokensAnswer(
            tokens=[
                IssuedToken(token=format_nonce(nonce), generation_time=time_us)
                for nonce, time_us in issued
            ]
        )


def _model_of(namespace: Namespace, **more: Any) -> NamespacePutAnswer:
    """A namespace as its owner set it."""
    settings = {
        key.removesuffix("_us"): each for key, each in namespace.settings.document().items()
    }
    return NamespacePutAnswer(
        namespace=namespace.name, created_at=namespace.created_at_us, **settings, **more
    )


def _response(namespace: Namespace, status: int = 200, warnings: Sequence[str] = ()) -> Response:
    """A namespace with its ETag, and *warnings* if there are any."""
    more = {"warnings": list(warnings)} if warnings else {}
    return Response.json(_model_of(namespace, **more), status, (_etag_header(namespace),))


def _etag(namespace: Namespace) -> bytes:
    return b'"v%d"' % namespace.version


def _etag_header(namespace: Namespace) -> tuple[bytes, bytes]:
    return b"etag", _etag(namespace)


def _changes(body: NamespaceBody) -> dict[str, Any]:
    """The settings that a body names, by their names inside."""
    given = body.model_dump(exclude_unset=True)
    for name, value in given.items():
        if value is None:
            none = ", or give {} to have none" if name == "bounds" else ""
            raise InvalidBodyError(f"{name} is null; leave it out to keep it{none}", field=name)
    if "event_rules" in given:
        given["event_rules"] = tuple(EventRule(**each) for each in given["event_rules"])
    if "bounds" in given:
        given["bounds"] = Bounds(**given["bounds"])
    return {f"{name}_us" if name in _DURATIONS else name: value for name, value in given.items()}


def _check_conditions(call: Call, current: Namespace | None) -> None:
    """Raise PreconditionFailedError unless If-Match and If-None-Match hold (RFC 9110, 13.1)."""
    wanted = call.tags(b"if-match")
    if wanted and current is None:
        raise PreconditionFailedError(f"If-Match: there is no namespace {call.namespace[:63]!r}")
    if wanted and current is not None and not wanted & {_etag(current), b"*"}:
        shown = b", ".join(sorted(wanted))[:80].decode("latin-1")
        is_weak = b"W/" + _etag(current) in wanted
        raise PreconditionFailedError(
            f"If-Match: {shown}, but namespace {current.name!r} is at {_etag(current).decode()}; "
            + (_WEAK if is_weak else "read it again")
        )
    if _is_unmodified(call, current):
        raise PreconditionFailedError(f"If-None-Match: {call.namespace!r} exists already")


def _is_unmodified(call: Call, current: Namespace | None) -> bool:
    """Return whether If-None-Match lists the version *current*."""
    # Weak tags are equal to strong ones here.
    known = {each.removeprefix(b"W/") for each in call.tags(b"if-none-match")}
    return current is not None and bool(known & {_etag(current), b"*"})
