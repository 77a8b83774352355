"""The routes that cancel: the body and headers of a request that added, sent to another address."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from api.http.call import JSON
from api.http.connections import ReadQueue
from api.http.models import AtomicAddBody, BatchAddBody, CancelBody
from api.http.response_models import BatchCancelAnswer, CancelAnswer
from api.http.responses import Response, cancelled_text, cancelled_texts, results_response
from api.http.routing import COUNTER, NAMESPACE, TTL, CallOf, InNamespace, keyed, route
from api.routes.items import Items, items_of, terms_from, token_of, wanted_from
from api.telemetry.request_log import LoggedWrite
from counter.api_keys import Scope
from counter.core.holds import Wanted
from counter.core.service import CounterService
from counter.errors import InvalidBodyError

_CANCELS: Final[Mapping[str, Any]] = {
    "tag": "cancels",
    "writes": True,
    "shows": "a cancel",
    "problems": (409, 410),
    "headers": (TTL,),
}


def batch(body: BatchAddBody) -> None:
    """A body whose items are read one by one."""


@dataclass(frozen=True, slots=True)
class CancelRoutes:
    """``cancel`` of a counter's tokens, of an atomic add, and of a batch."""

    service: CounterService
    batch_items_max: int
    queue: ReadQueue

    @route("POST", f"{COUNTER}/cancel", Scope.WRITE, adds=1, declares=(keyed,), **_CANCELS)
    async def cancel(
        self, call: CallOf, namespace: InNamespace, body: CancelBody
    ) -> Annotated[Response, CancelAnswer]:
        """Cancel an add, a clear or a delete: its token counts nothing from now on."""
        wanted = _wanted(body)
        terms = None if wanted else _terms(body)
        credential = call.credential(token_of(body.idempotency_token))
        call.logged["of"] = LoggedWrite(namespace, body.operation, call.counter, credential)
        if wanted is not None:
            cancelled = await self.service.cancel_hold(
                namespace, call.counter, wanted, credential, call.allowance
            )
        else:
            cancelled = await self.service.cancel(
                *(namespace, body.operation, call.counter, body.delta, credential, call.allowance),
                terms,
            )
        call.logged["results"] = (cancelled,)
        return Response.text(cancelled_text(cancelled))

    @route("POST", f"{NAMESPACE}/atomic/cancel", Scope.WRITE, declares=(keyed,), **_CANCELS)
    async def cancel_atomic_add(
        self, call: CallOf, namespace: InNamespace, body: AtomicAddBody
    ) -> Annotated[Response, CancelAnswer]:
        """Cancel an atomic add as a whole."""
        credential = call.credential(token_of(body.idempotency_token))
        items = items_of(body.items)
        call.charge(len(items))
        call.logged["of"] = LoggedWrite(namespace, "atomic", "", credential)
        cancelled = await self.service.cancel_atomic(namespace, items, credential, call.allowance)
        call.logged["results"] = (cancelled,)
        return Response.text(cancelled_text(cancelled))

    @route("POST", f"{NAMESPACE}/batch/cancel", Scope.WRITE, declares=(batch,), **_CANCELS)
    async def batch_cancel(
        self, call: CallOf, namespace: InNamespace
    ) -> Annotated[Response, BatchCancelAnswer]:
        """Cancel adds to many counters, a token each; an outcome for each item, in order."""
        call.content_type(JSON)
        reading = Items.of_json(await call.body(), self.batch_items_max)
        items = await call.read_in_turn(self.queue, reading)
        call.charge(len(items.events or items.adds))
        if one := items.only():
            call.logged["of"] = LoggedWrite(namespace, "add", one.counter, one.credential)
        outcomes = await items.cancel(self.service, namespace, call.allowance)
        call.logged["results"] = outcomes
        return results_response(cancelled_texts(outcomes))


def _terms(body: CancelBody) -> bytes | None:
    """Return the terms of an add that is to be cancelled. Raises InvalidBodyError."""
    is_add = body.operation == "add"
    if is_add != (body.delta is not None):
        needed = "give that of the add, or the operation that the token was sent with"
        wrong = f"delta is missing: {needed}"
        if not is_add:
            wrong = f"delta is {body.delta}, and a {body.operation} has none: leave it out"
        raise InvalidBodyError(wrong, field="delta")
    for name in ("amount", "expires_in"):
        if getattr(body, name) is not None:
            raise InvalidBodyError(f"only a hold has {name}: leave it out", field=name)
    terms = terms_from(body.delta or 0, body.at_least, body.at_most)
    if terms is not None and not is_add:
        raise InvalidBodyError(
            f"a {body.operation} has no bounds: leave them out", field="at_least"
        )
    return terms


def _wanted(body: CancelBody) -> Wanted | None:
    """Return the hold that is to be cancelled; None if it is none. Raises InvalidBodyError."""
    if body.operation != "hold":
        return None
    if body.delta is not None:
        raise InvalidBodyError("a hold has no delta, but an amount: leave it out", field="delta")
    for name in ("amount", "expires_in"):
        if getattr(body, name) is None:
            raise InvalidBodyError(f"{name} is missing: give that of the hold", field=name)
    return wanted_from(body.amount or 0, body.expires_in or 0, body.at_least, body.at_most)
