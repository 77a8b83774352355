"""The routes of namespaces, and of server-issued tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from fractions import Fraction
from typing import Any, Final

from api.http.answer_models import (
    NamespaceAnswer,
    NamespacePutAnswer,
    NamespacesAnswer,
    TokensAnswer,
)
from api.http.answers import json_reply, namespace_body, namespace_reply
from api.http.call import Call, Reply
from api.http.models import ClientsBody, NamespaceBody, TokensBody
from api.http.routing import ETAG, NAMESPACE, CallOf, Doc, Route, created, matched
from api.routes.acts import who_of
from counter.clock import to_rfc3339
from counter.config.namespace_rules import Clients, creation_warnings
from counter.core.service import CounterService
from counter.errors import (
    InvalidBodyError,
    NamespaceUnknownError,
    PreconditionFailedError,
    QuotaExceededError,
)
from counter.limits import LEASE_TIME_US, NAMESPACES_MAX, SHARDS_TOTAL_MAX
from counter.security.audit_log import AdminLog
from counter.tokens import format_nonce
from counter.types import Namespace, NamespaceSettings, Scope

_log = logging.getLogger("counter.namespaces")
_DURATIONS: Final = ("accept_limit", "future_limit", "rollup_window", "key_ttl", "cache_ttl")


class NamespaceRoutes:
    """Handlers of ``/v1/namespaces`` and ``/v1/tokens``."""

    def __init__(
        self,
        service: CounterService,
        defaults: NamespaceSettings,
        admin_log: AdminLog,
        *,
        lease_time_us: int = LEASE_TIME_US,
        shared: bool = False,
        namespaces_max: int = NAMESPACES_MAX,
        shards_max: int = SHARDS_TOTAL_MAX,
    ) -> None:
        self._service = service
        self._defaults = defaults
        self._admin_log = admin_log
        self._lease_time_us = lease_time_us
        self._shared = shared
        self._namespaces_max = namespaces_max
        self._shards_max = shards_max
        #: Held while a namespace is created: two at once could both pass the quota.
        self._creating = asyncio.Lock()

    def routes(self) -> Sequence[Route]:
        """The routes."""
        also = {201: {"model": NamespacePutAnswer, "description": "Created"}}
        return (
            Route(
                *("GET", "/v1/namespaces", self.list, Scope.READ),
                Doc("listNamespaces", "All namespaces", "namespaces", NamespacesAnswer),
                latest=True,
            ),
            Route(
                *("GET", NAMESPACE, self.get, Scope.READ),
                Doc(
                    *("getNamespace", "A namespace, with its ETag", "namespaces"),
                    NamespaceAnswer,
                    headers=(ETAG,),
                ),
                latest=True,
            ),
            Route(
                *("PUT", NAMESPACE, self.put, Scope.ADMIN),
                Doc(
                    "putNamespace",
                    "Create a namespace (201), or change what may change of it (200)",
                    *("namespaces", NamespacePutAnswer, NamespaceBody, (matched, created)),
                    problems=(409, 412),
                    headers=(ETAG,),
                    responses=also,
                ),
                latest=True,
            ),
            Route(
                *("DELETE", NAMESPACE, self.delete, Scope.ADMIN),
                Doc(
                    "deleteNamespace",
                    "Delete a namespace with its counters, events and tokens",
                    "namespaces",
                    reads=(matched,),
                    problems=(412,),
                    status=204,
                ),
                latest=True,
            ),
            Route(
                *("POST", "/v1/tokens", self.tokens, Scope.WRITE),
                Doc(
                    *("issueTokens", "Tokens in strict order, never issued twice", "tokens"),
                    *(TokensAnswer, TokensBody),
                    body_may_be_empty=True,
                ),
            ),
        )

    async def list(self, call: CallOf) -> Reply:
        """All namespaces that there are for the caller, by name."""
        call.query()
        everything = self._service.namespaces.all()
        found = [namespace_body(each) for each in everything if call.sees(each.name)]
        return json_reply({"namespaces": found})

    async def get(self, call: CallOf) -> Reply:
        """One namespace, with its ETag."""
        return namespace_reply(self._service.namespaces.get(call.namespace))

    async def put(self, call: CallOf) -> Reply:
        """Create a namespace, or change what may change of it; and say what does not fit."""
        body = await call.json(NamespaceBody)
        changes = _changes(body)
        namespaces = self._service.namespaces
        try:
            standing = namespaces.get(call.namespace)
        except NamespaceUnknownError:
            if call.header(b"if-match") is not None:
                raise PreconditionFailedError(
                    f"If-Match: there is no namespace {call.namespace[:63]!r}"
                ) from None
            if "counter_type" not in changes:
                raise InvalidBodyError(
                    "counter_type: Field required to create a namespace: ACCURATE, EVENTUAL or"
                    " BEST_EFFORT",
                    field="counter_type",
                ) from None
            settings = replace(self._defaults, **changes)
            if "key_ttl_us" not in changes:
                settings = await namespaces.fitted(settings)
            async with self._creating:
                self._check_quota(call, settings.shards)
                async with self._acts("namespace.create", call, None, settings):
                    created = await namespaces.create(call.namespace, settings)
            return namespace_reply(created, 201, self._warnings(created, body.clients))
        if call.header(b"if-none-match") is not None:
            raise PreconditionFailedError(f"If-None-Match: {call.namespace!r} exists already")
        _check_match(call, standing)
        settings = replace(standing.settings, **changes)
        if settings != standing.settings:
            async with self._acts("namespace.change", call, standing.settings, settings):
                standing = await namespaces.update(standing, settings)
        return namespace_reply(standing, warnings=self._warnings(standing, body.clients))

    def _check_quota(self, call: Call, shards: int) -> None:
        """Raise QuotaExceededError if the caller, or all namespaces together, have too much."""
        everything = self._service.namespaces.all()
        count = sum(call.sees(each.name) for each in everything)
        if count >= self._namespaces_max:
            name = "a client" if call.caller is None else call.caller.name
            raise QuotaExceededError(
                f"{name} is for {count} namespaces already, and namespaces_max is"
                f" {self._namespaces_max}: delete one, or have namespaces_max raised",
                limit="namespaces_max",
                count=count,
                bound=self._namespaces_max,
            )
        total = sum(each.settings.shards for each in everything)
        if total + shards > self._shards_max:
            raise QuotaExceededError(
                f"the namespaces of this service have {total} shards, and with {shards} more they"
                f" would have more than shards_max, {self._shards_max}: ask for fewer shards,"
                " delete a namespace, or have shards_max raised",
                limit="shards_max",
                count=total,
                bound=self._shards_max,
            )

    @asynccontextmanager
    async def _acts(
        self,
        what: str,
        call: Call,
        before: NamespaceSettings | None,
        after: NamespaceSettings | None,
    ) -> AsyncIterator[None]:
        """Around what the audit log tells."""
        async with self._admin_log.act(what, who_of(call), namespace=call.namespace) as act:
            act.changed(before, after)
            yield

    def _warnings(self, namespace: Namespace, clients: ClientsBody | None) -> tuple[str, ...]:
        """Where its settings contradict each other, or what its clients do; logged too."""
        found = creation_warnings(
            namespace.settings,
            namespace.dataset,
            _clients(clients),
            lease_time_us=self._lease_time_us,
            shared=self._shared,
        )
        for each in found:
            _log.warning("namespace %r: %s", namespace.name, each)
        return found

    async def delete(self, call: CallOf) -> Reply:
        """Delete a namespace with its counters, events and tokens."""
        standing = self._service.namespaces.get(call.namespace)
        _check_match(call, standing)
        async with self._acts("namespace.delete", call, standing.settings, None):
            await self._service.namespaces.delete(standing)
        return Reply(204, b"")

    async def tokens(self, call: CallOf) -> Reply:
        """Tokens in strict order, never issued twice."""
        body = await call.json_or(TokensBody())
        issued = await self._service.issue_tokens(body.count)
        tokens = [
            {
                "token": format_nonce(token.nonce),
                "generation_time": to_rfc3339(token.generation_time_us),
            }
            for token in issued
        ]
        return json_reply({"tokens": tokens})


def _changes(body: NamespaceBody) -> dict[str, Any]:
    """The settings that a body names, by their names inside."""
    given = body.model_dump(exclude_unset=True, exclude={"clients"})
    for name, value in given.items():
        if value is None:
            raise InvalidBodyError(f"{name} is null; leave it out instead", field=name)
    return {f"{name}_us" if name in _DURATIONS else name: value for name, value in given.items()}


def _clients(told: ClientsBody | None) -> Clients | None:
    """What a body tells of a namespace's clients."""
    if told is None:
        return None
    hottest = told.hottest_per_s
    return Clients(
        retry_us=told.retry,
        clock_us=told.clock,
        max_staleness_us=told.max_staleness,
        hottest_per_s=None if hottest is None else Fraction(hottest),
    )


def _check_match(call: Call, standing: Namespace) -> None:
    given = call.header(b"if-match")
    if given is None:
        return
    wanted = [each.strip() for each in given.decode("latin-1").split(",")]
    etag = f'"v{standing.version}"'
    if etag not in wanted and "*" not in wanted:
        raise PreconditionFailedError(
            f"If-Match: {given[:80].decode('latin-1')}, but namespace {standing.name!r} is at"
            f" {etag}; read it again"
        )
