"""Holds on a bad network: those of the small service, and the programs that use them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from counter_client import AsyncCounterClient, CounterError, UnknownOutcomeError
from counter_client.errors import HoldExpiredError, HoldReleasedError
from counter_client.tokens import HoldId, Token, parse_rfc3339, to_rfc3339

if TYPE_CHECKING:
    from tests.properties.client_world import Service, World

_SECOND: Final = 1_000_000
_STATES: Final = {"settle": "settled", "release": "released"}
#: The status of the error of an end, and whether the hold counts something then.
_ENDED: Final = {"settled": (409, True), "released": (410, False), "expired": (410, False)}


class BodyFailedError(Exception):
    """The block of a hold failed."""


class Holds:
    """The holds of the service, exactly: each ends once. What an open one reserves is in a counter
    of its own, and its token is like any other."""

    def __init__(self, service: Service) -> None:
        self._service = service
        #: The amount of each, and when it expires.
        self._begun: dict[str, tuple[int, int]] = {}
        self._ends: dict[str, tuple[str, int]] = {}

    def begin(self, counter: str, body: Any) -> tuple[int, Any]:
        """Return status and body of the response."""
        text, amount = body["idempotency_token"], body["amount"]
        status, found = self._service.one(text, {f"{counter} is held": amount})
        if status != 200:
            return status, found
        token = Token(UUID(text["token"]).bytes, parse_rfc3339(text["generation_time"]))
        hold = str(HoldId(token, counter))
        lasts_us = int(body["expires_in"].removesuffix("s")) * _SECOND
        self._begun.setdefault(hold, (amount, self._service.now_us + lasts_us))
        return self._answer(hold, ("open", 0))

    def end(self, hold: str, verb: str, body: Any) -> tuple[int, Any]:
        """Return status and body of the response to a settle or a release."""
        wanted = _STATES[verb], body.get("amount", 0)
        if self._service.happens("write timed out"):
            self._service.seen["end timed out"] += 1
            # It lands now, later, or never.
            if self._service.happens("write timed out"):
                self._end(hold, wanted)
            elif self._service.happens("write timed out"):
                self._service.later(self._end, hold, wanted)
            return 503, _problem("write_timeout", "same_token", None)
        self._end(hold, wanted)
        return self._answer(hold, wanted)

    def _end(self, hold: str, wanted: tuple[str, int]) -> None:
        _, expires_us = self._begun[hold]
        if hold in self._ends:
            return
        self._ends[hold] = ("expired", 0) if self._service.now_us >= expires_us else wanted
        state, settled = self._ends[hold]
        self._service.seen[f"hold {state}"] += 1
        self._service.counts[HoldId.parse(hold).counter] += settled

    def _answer(self, hold: str, wanted: tuple[str, int]) -> tuple[int, Any]:
        amount, expires_us = self._begun[hold]
        if wanted[0] == "open" and self._service.now_us >= expires_us:
            self._end(hold, wanted)
        state, settled = found = self._ends.get(hold, ("open", 0))
        if found != wanted:
            status, applied = _ENDED[state]
            return status, _problem(f"hold_{state}", "never", applied)
        now = to_rfc3339(self._service.now_us)
        body = {
            **dict.fromkeys(("count", "held"), 0),
            "namespace": "default",
            "counter": HoldId.parse(hold).counter,
            "hold": hold,
            "amount": amount,
            "state": state,
            "as_of": now,
        }
        if state == "open":
            return 201, {**body, "expires_at": to_rfc3339(expires_us)}
        return 200, {**body, "ended_at": now, "settled": settled}


def _problem(code: str, retry: str, applied: bool | None) -> dict[str, Any]:
    return {"code": code, "retry": retry, "applied": applied, "detail": code}


async def use(world: World, client: AsyncCounterClient, name: str) -> None:
    """Settle a hold, leave it, fail in its block, or be cancelled; and judge the result."""
    draw, add = world.draw, world.new(name)
    assert add is not None
    lasts, works_s = draw.choice(("1s", "60s")), draw.choice((0.0, 0.3, 5.0))
    ending = draw.choice(("settle", "settle", "settle", "leave", "fail"))
    # Of a program that is killed nothing else is known.
    add.reported = "unknown"
    is_settling = False
    try:
        async with (
            asyncio.timeout(draw.choice((0.2, 3.0, 100.0))),
            client.hold(name, add.delta, expires_in=lasts) as hold,
        ):
            await asyncio.sleep(works_s)
            if ending == "fail":
                raise BodyFailedError
            if ending == "settle":
                is_settling = True
                await hold.settle(add.delta)
    except (UnknownOutcomeError, TimeoutError) as error:
        world.seen[f"hold {type(error).__name__}"] += 1
        add.reported = "unknown" if is_settling else "never"
    except (BodyFailedError, HoldExpiredError, HoldReleasedError):
        add.reported = "never"
    except CounterError as error:
        world.seen[f"hold refused {type(error).__name__}"] += 1
        add.reported = "never"
    else:
        if is_settling:
            world.counted([add], "the settle returned")
        else:
            add.reported = "never"
