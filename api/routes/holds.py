"""The routes of holds: an amount is reserved, and later settled, released, or expires."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from fastapi import Query

from api.http.models import ExtendBody, HoldBody, HoldsQuery, SettleBody
from api.http.response_models import HoldAndCountAnswer, HoldAnswer, HoldsAnswer
from api.http.responses import Response
from api.http.routing import COUNTER, HOLD, NAMESPACE, TTL, CallOf, InNamespace, keyed, route
from api.routes.items import token_of, wanted_from
from api.routes.paging import paged, parts_of, unknown_page
from api.telemetry.request_log import LoggedWrite
from counter.api_keys import Scope
from counter.core.holds import Held
from counter.core.service import CounterService
from counter.errors import InvalidBodyError, InvalidParameterError
from counter.holds import FIRST, Hold, HoldId, Place
from counter.limits import TIME_MAX_US
from counter.quantities import check_counter_name
from counter.types import Namespace

_CREATED: Final = 201
_ENDS: Final[Mapping[str, Any]] = {"tag": "holds", "writes": True, "problems": (409, 410)}


@dataclass(frozen=True, slots=True)
class HoldRoutes:
    """``holds`` of a counter, and what becomes of each."""

    service: CounterService

    @route(
        "POST",
        f"{COUNTER}/holds",
        Scope.WRITE,
        adds=1,
        status=_CREATED,
        headers=(TTL,),
        declares=(keyed,),
        **_ENDS,
    )
    async def hold(
        self, call: CallOf, namespace: InNamespace, body: HoldBody
    ) -> Annotated[Response, HoldAndCountAnswer]:
        """Reserve an amount of a counter until it is settled, released, or expires."""
        credential = call.credential(token_of(body.idempotency_token))
        call.logged["of"] = LoggedWrite(namespace, "hold", call.counter, credential)
        wanted = wanted_from(body.amount, body.expires_in, body.at_least, body.at_most)
        held = await self.service.hold(namespace, call.counter, wanted, credential, call.allowance)
        call.logged |= {"hold": format_hold(held.hold.id), "outcome": "begun"}
        return _response(namespace, held, _CREATED)

    @route("GET", f"{NAMESPACE}/holds", Scope.READ, tag="holds")
    async def list_holds(
        self, call: CallOf, namespace: InNamespace, query: Annotated[HoldsQuery, Query()]
    ) -> HoldsAnswer:
        """List the open holds of a counter, those that expire first."""
        try:
            counter = check_counter_name(query.counter)
        except ValueError as error:
            raise InvalidParameterError(f"counter: {error}", field="counter") from error
        after = FIRST if query.page is None else _place(query.page, counter)
        found = await self.service.holds.open(namespace, counter, after, query.limit + 1)
        shown, page = paged(
            found, query.limit, lambda each: [each.expires_us, format_hold(each.id)]
        )
        return HoldsAnswer(
            holds=[HoldAnswer(**_members(namespace, each)) for each in shown], next_page=page
        )

    @route("GET", HOLD, Scope.READ, tag="holds", problems=(409, 410))
    async def get_hold(self, call: CallOf, namespace: InNamespace) -> HoldAnswer:
        """Read a hold: open, or with its end."""
        found = await self.service.holds.get(namespace, _hold_of(call))
        return HoldAnswer(**_members(namespace, found))

    @route("PATCH", HOLD, Scope.WRITE, adds=1, **_ENDS)
    async def extend_hold(
        self, call: CallOf, namespace: InNamespace, body: ExtendBody
    ) -> HoldAnswer:
        """Let a hold expire later."""
        found = await self.service.holds.extend(namespace, _hold_of(call), body.expires_in)
        call.logged["outcome"] = "extended"
        return HoldAnswer(**_members(namespace, found))

    @route("POST", f"{HOLD}/settle", Scope.WRITE, adds=1, **_ENDS)
    async def settle_hold(
        self, call: CallOf, namespace: InNamespace, body: SettleBody
    ) -> Annotated[Response, HoldAndCountAnswer]:
        """Count what the work cost, and end the hold."""
        held = await self.service.holds.settle(namespace, _hold_of(call), body.amount)
        call.logged["outcome"] = "settled"
        return _response(namespace, held)

    @route("POST", f"{HOLD}/release", Scope.WRITE, adds=1, **_ENDS)
    async def release_hold(
        self, call: CallOf, namespace: InNamespace
    ) -> Annotated[Response, HoldAndCountAnswer]:
        """Give all of it back."""
        if (body := (await call.body()).strip()) not in (b"", b"{}"):
            begin = body[:80].decode(errors="replace")
            raise InvalidBodyError(
                f"a release has no body, and this one begins with {begin!r}: leave it out; to count"
                " an amount, settle the hold"
            )
        held = await self.service.holds.release(namespace, _hold_of(call))
        call.logged["outcome"] = "released"
        return _response(namespace, held)


def format_hold(hold: HoldId) -> str:
    """Return the id of a hold as text: letters, digits, ``-`` and ``_``."""
    return base64.urlsafe_b64encode(hold.to_bytes()).decode().rstrip("=")


def parse_hold(text: str) -> HoldId:
    """Return the hold that :func:`format_hold` returned *text* for. Raises ValueError."""
    try:
        hold = HoldId.from_bytes(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        check_counter_name(hold.counter)
        if hold.token.generation_time_us <= TIME_MAX_US and format_hold(hold) == text:
            return hold
    except ValueError:
        # The error below names the text.
        pass
    raise ValueError(
        f"{text[:80]!r} is not the id of a hold; give the one that it was answered with"
    )


def _hold_of(call: CallOf) -> HoldId:
    """Return the hold in the path. Raises InvalidParameterError."""
    try:
        found = parse_hold(call.item)
    except ValueError as error:
        raise InvalidParameterError(f"hold: {error}", field="hold") from error
    call.logged["hold"] = call.item
    return found


def _place(page: str, counter: str) -> Place:
    expires_us, text = parts_of(page, 2)
    try:
        hold = parse_hold(text)
    except ValueError as error:
        raise unknown_page(page) from error
    is_time = type(expires_us) is int and 0 <= expires_us <= TIME_MAX_US
    if not is_time or hold.counter != counter:
        raise unknown_page(page)
    nonce, time_us = hold.token
    return expires_us, time_us, nonce


def _members(namespace: Namespace, hold: Hold) -> dict[str, Any]:
    members = {
        "namespace": namespace.name,
        "counter": hold.id.counter,
        "hold": format_hold(hold.id),
        "amount": hold.amount,
        "state": "open" if hold.end is None else str(hold.end.how),
    }
    if hold.end is None:
        return members | {"expires_at": hold.expires_us}
    members["ended_at"] = hold.end.time_us
    if hold.end.how == "settled":
        members["settled"] = hold.end.amount
        if abs(hold.end.amount) > abs(hold.amount):
            members["over"] = True
    return members


def _response(namespace: Namespace, held: Held, status: int = 200) -> Response:
    hold, count, replayed = held
    up, down = count.held
    members = _members(namespace, hold) | {
        "count": count.count,
        "held": down if hold.amount < 0 else up,
        "as_of": count.as_of_us,
    }
    if replayed is not None:
        members["replayed"] = replayed
    return Response.json(HoldAndCountAnswer(**members), status)
