"""The routes of namespaces, and of server-issued tokens."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from api.answers import json_reply, namespace_body, namespace_reply
from api.call import Call, Reply
from api.models import NamespaceBody, TokensBody
from counter.clock import to_rfc3339
from counter.errors import InvalidBodyError, NamespaceUnknownError, PreconditionFailedError
from counter.service import CounterService
from counter.tokens import format_nonce
from counter.types import Namespace, NamespaceSettings

_DURATIONS = ("accept_limit", "future_limit", "rollup_window", "key_ttl", "cache_ttl")


class NamespaceRoutes:
    """Handlers of ``/v1/namespaces`` and ``/v1/tokens``."""

    def __init__(
        self, service: CounterService, defaults: NamespaceSettings, *, settle_s: float = 0.0
    ) -> None:
        self._service = service
        self._defaults = defaults
        self._settle_s = settle_s

    async def list(self, call: Call) -> Reply:
        """All namespaces, by name."""
        call.query()
        found = [namespace_body(each) for each in self._service.namespaces.all()]
        return json_reply({"namespaces": found})

    async def get(self, call: Call) -> Reply:
        """One namespace, with its ETag."""
        return namespace_reply(self._service.namespaces.get(call.namespace))

    async def put(self, call: Call) -> Reply:
        """Create a namespace, or change what may change of it."""
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
            return namespace_reply(await namespaces.create(call.namespace, settings), 201)
        if call.header(b"if-none-match") is not None:
            raise PreconditionFailedError(f"If-None-Match: {call.namespace!r} exists already")
        _check_match(call, standing)
        settings = replace(standing.settings, **changes)
        if settings == standing.settings:
            return namespace_reply(standing)
        return namespace_reply(await namespaces.update(standing, settings))

    async def delete(self, call: Call) -> Reply:
        """Delete a namespace with its counters, events and tokens.

        The answer waits until no process takes adds for it: one of the same name that is created
        after the answer gets all that are meant for it.
        """
        standing = self._service.namespaces.get(call.namespace)
        _check_match(call, standing)
        await self._service.namespaces.delete(standing)
        await asyncio.sleep(self._settle_s)
        return Reply(204, b"")

    async def tokens(self, call: Call) -> Reply:
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
    given = body.model_dump(exclude_unset=True)
    for name, value in given.items():
        if value is None:
            raise InvalidBodyError(f"{name} is null; leave it out instead", field=name)
    return {f"{name}_us" if name in _DURATIONS else name: value for name, value in given.items()}


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
