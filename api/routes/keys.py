"""The routes of API keys, for holders of an admin key: list, create, revoke.

The first key is made on the machine, by ``counter key create``: it changes for ever who may use the
service, and without keys any local program could make it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from fastapi import Query

from api.http.auth import Authorizer
from api.http.call import Call
from api.http.models import KeyBody, NoQuery
from api.http.response_models import KeyAnswer, KeyPostAnswer, KeysAnswer
from api.http.responses import Response
from api.http.routing import CallOf, route
from counter.api_keys import ApiKey, Scope
from counter.errors import NotFoundError, PreconditionFailedError
from counter.ports import Clock
from counter.security.audit_log import AdminLog
from counter.security.key_admin import (
    LIMITS,
    KeyAdmin,
    Rights,
    key_document,
    reaches,
    rights_of,
)

_ID_CHARS_MAX: Final = 12


@dataclass(frozen=True, slots=True)
class KeyRoutes:
    """Handlers of ``/v1/keys``. Keys that the caller's key does not reach do not exist for it."""

    admin: KeyAdmin
    authorizer: Authorizer
    clock: Clock
    admin_log: AdminLog

    @route("GET", "/v1/keys", Scope.ADMIN, tag="keys")
    async def list_keys(self, call: CallOf, query: Annotated[NoQuery, Query()]) -> KeysAnswer:
        """All keys within the namespaces of the caller's key, never a secret."""
        holder = _key_of(call)
        keys = [] if holder is None else await self._reached(holder)
        now_us = self.clock.now_us()
        return KeysAnswer(keys=[KeyAnswer(**key_document(each, now_us)) for each in keys])

    @route("POST", "/v1/keys", Scope.ADMIN, tag="keys", status=201, problems=(412,))
    async def create_key(self, call: CallOf, body: KeyBody) -> Annotated[Response, KeyPostAnswer]:
        """Create a key that allows no more than the caller's; only this answer shows it."""
        holder = _must_hold(call)
        limits = body.limits.model_dump()
        rights = Rights(
            tuple(body.namespaces),
            Scope[body.scope.upper()],
            body.label,
            body.expires,
            **{f"{name}_per_s": limits[f"{name}_per_s"] for name in LIMITS},
        )
        async with self.admin_log.act("key.create", call.who) as act:
            issued = await self.admin.create(rights, holder, self.authorizer.rates)
            act.to |= {"key": issued.key.id}
            act.after |= rights_of(issued.key)
        shown = key_document(issued.key, issued.key.created_at_us)
        return Response.json(KeyPostAnswer(key=issued.text, **shown), 201)

    @route("DELETE", "/v1/keys/{key}", Scope.ADMIN, tag="keys", problems=(412,))
    async def revoke_key(self, call: CallOf) -> KeyAnswer:
        """Revoke a key permanently, by its id."""
        reached = {each.id for each in await self._reached(_must_hold(call))}
        if call.item not in reached:
            # A whole key may have been sent: logs must not have its secret.
            raise NotFoundError(
                f"there is no key {call.item[:_ID_CHARS_MAX]!r}; GET /v1/keys lists them by id"
            )
        async with self.admin_log.act("key.revoke", call.who) as act:
            revoked, _ = await self.admin.revoke(call.item)
            act.to |= {"key": revoked.id}
        return KeyAnswer(**key_document(revoked, self.clock.now_us()))

    async def _reached(self, holder: ApiKey) -> list[ApiKey]:
        """Return the keys within the namespaces of *holder*."""
        return [each for each in await self.admin.all() if reaches(holder, each.namespaces)]


def _key_of(call: Call) -> ApiKey | None:
    return None if call.caller is None else call.caller.key


def _must_hold(call: Call) -> ApiKey:
    """Return the caller's key. Raises PreconditionFailedError if no keys exist."""
    holder = _key_of(call)
    if holder is None:
        raise PreconditionFailedError(
            "no API keys exist, and the first one is made on the service's machine: it closes the"
            " service to all requests without a key; run counter key create --scope admin"
        )
    return holder
