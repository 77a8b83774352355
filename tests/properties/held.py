"""The machine over a store that keeps holds: each ends once, and every answer about it agrees."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, invariant, rule

from counter.bounds import Bounds, refusal
from counter.errors import StoreUnavailableError
from counter.types import Token
from tests.properties.judge import Age, age_of
from tests.properties.machine import CounterMachine
from tests.support.problems import check_problem
from tests.support.rest import Json, on_wire
from tests.support.times import MINUTE, SECOND, to_us

#: Counters with nothing but holds, and their bounds.
HELD = ("held 0", "held 1")
OWN = Bounds(-4, 4)
#: A request, and the status and the body of its response.
Work = Callable[[], Coroutine[Any, Any, tuple[int, Any]]]
#: How a hold has ended, and with which amount.
End = tuple[str, int]
_CODES = {"hold_settled": "settled", "hold_released": "released", "hold_expired": "expired"}

copies = st.integers(1, 3)
lasts = st.sampled_from([SECOND, 2 * SECOND, 10 * SECOND, MINUTE])


@dataclass(slots=True, eq=False)
class Held:
    """A hold that was asked for, and every definite answer about it."""

    token: Token
    counter: str
    amount: int
    lasts_us: int
    path: str = ""
    expires_us: int = 0
    end: End | None = None
    #: Count, what was held, and room.
    refused: tuple[int, int, int] | None = None
    is_cancelled: bool = False

    @property
    def body(self) -> Json:
        """The body of the request for it, or for its cancel."""
        own = {name: each for name, each in OWN._asdict().items() if each is not None}
        held = {"amount": self.amount, "expires_in": f"{self.lasts_us}us", **own}
        return {**held, "idempotency_token": on_wire(self.token)}

    def is_open(self, now_us: int) -> bool:
        return bool(self.path) and self.end is None and now_us < self.expires_us

    def ended(self, end: End) -> None:
        """Some answer says how it has ended."""
        assert self.path, f"{self} has ended, and never began"
        assert self.end in (None, end), f"{self} has another end: {end}"
        self.end = end


class HoldMachine(CounterMachine):
    """Holds of counters of their own, and what becomes of each, among all else."""

    holds: Bundle[Held] = Bundle("holds")

    def __init__(self) -> None:
        super().__init__()
        self.all_held: list[Held] = []

    @rule(
        target=holds,
        counter=st.sampled_from(HELD),
        amount=st.sampled_from([1, 2, 3, -1, -2]),
        lasts_us=lasts,
        copies=copies,
    )
    def hold(self, counter: str, amount: int, lasts_us: int, copies: int) -> Held:
        """A new one, hedged: it is refused exactly if there is no room."""
        self.atomics += 1
        token = Token((1_000 + self.atomics).to_bytes(16, "big"), self.now_us)
        held = Held(token, counter, amount, lasts_us)
        self.all_held.append(held)
        self.tried.add(counter)
        why = refusal(
            self._settled(counter),
            *(amount, OWN, self.judge.default),
            sum(each.amount for each in self._open(counter) if each.amount * amount > 0),
        )
        self._hold(held, copies)
        if why is None:
            assert held.path
        else:
            assert held.refused == (why.count, why.held, why.room)
        return held

    @rule(held=holds, copies=copies)
    def hold_again(self, held: Held, copies: int) -> None:
        self._hold(held, copies)

    @rule(held=holds, amount=st.integers(0, 5), settles=copies, releases=st.integers(0, 2))
    def end(self, held: Held, amount: int, settles: int, releases: int) -> None:
        """Settle it, and perhaps release it at the same time: one of them happens."""
        if held.path:
            signed = amount if held.amount > 0 else -amount
            works = [self._settling(held, signed)] * settles + [self._releasing(held)] * releases
            self._ask_for_ends(held, works)

    @rule(held=holds, releases=copies)
    def release(self, held: Held, releases: int) -> None:
        if held.path:
            self._ask_for_ends(held, [self._releasing(held)] * releases)

    @rule(held=holds, amount=st.integers(0, 5), lands=st.booleans(), settles=st.booleans())
    def end_into_a_fault(self, held: Held, amount: int, lands: bool, settles: bool) -> None:
        """The store fails before the end or after it: unknown, until it is sent again."""
        if not held.path:
            return
        signed = amount if held.amount > 0 else -amount
        work = self._settling(held, signed) if settles else self._releasing(held)
        holds = self.app.store.capabilities.holds
        ends = holds.end

        async def fails(*arguments: Any) -> None:
            if lands:
                await ends(*arguments)
            raise StoreUnavailableError("a fault that a test planted", retry_after_us=SECOND)

        # The object may have slots.
        with patch.object(type(holds), "end", lambda _, *arguments: fails(*arguments)):
            self.run(work[1]())
        self._ask_for_ends(held, [work])

    @rule(held=holds, steps=st.integers(0, 12), amount=st.integers(0, 3))
    def hang_up_an_end(self, held: Held, steps: int, amount: int) -> None:
        """The client goes away in the middle, and comes back."""
        if not held.path:
            return
        work = self._settling(held, amount if held.amount > 0 else -amount)

        async def cancelled() -> None:
            task = asyncio.create_task(work[1]())
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        self.run(cancelled())
        self._ask_for_ends(held, [work])

    @rule(held=holds, lasts_us=lasts, releases=st.integers(0, 1))
    def extend(self, held: Held, lasts_us: int, releases: int) -> None:
        """Perhaps while it is released."""
        if not held.path:
            return
        was_open, before_us = held.is_open(self.now_us), held.expires_us
        works = [self._releasing(held)] * releases
        answers = self._all_at_once([self._extending(held, lasts_us), *(x[1] for x in works)])
        latest_us = held.token.generation_time_us + self.judge.bounds.retention_us // 10
        for status, body in answers[:1]:
            if status == 200:
                assert was_open
                wanted_us = min(self.now_us + lasts_us, latest_us)
                assert to_us(body["expires_at"]) == max(before_us, wanted_us)
                held.expires_us = to_us(body["expires_at"])
        if answers[0][0] != 200 and not works:
            assert not was_open
            self._judge_ends(held, answers, [None])
        else:
            self._judge_ends(held, answers[1:], [("released", 0)] * releases)

    @rule(held=holds, cancels=copies, sends=st.integers(0, 2))
    def cancel_a_hold(self, held: Held, cancels: int, sends: int) -> None:
        """Its token is cancelled, beside retries: it is released, or there is none."""
        path = self.rest.path(held.counter, "cancel")
        body = {**held.body, "operation": "hold"}
        works: list[Work] = [lambda: self._post(path, body)] * cancels
        answers = self._all_at_once([*works, *[self._holding(held)] * sends])
        age = age_of(held.token, self.now_us, self.judge.bounds)
        # A retry that found it open came before the cancels.
        retries = answers[cancels:]
        self._judge_holds(held, [each for each in retries if each[0] == 201])
        for status, found in answers[:cancels]:
            if status == 200:
                assert found["was_counted"] is bool(held.path)
                if held.path:
                    held.ended(("released", 0))
                held.is_cancelled = True
            elif found["code"] in _CODES:
                self._judge_ends(held, [(status, found)], [None])
                assert found["code"] != "hold_released"
            else:
                assert (found["code"], found["applied"]) == ("token_too_old", None)
                assert age in (Age.EDGE, Age.FORGOTTEN)
        self._judge_holds(held, [each for each in retries if each[0] != 201])

    @invariant()
    def what_is_held_adds_up(self) -> None:
        """After every step, by the core. What has expired may be held until its end is written."""
        service = self.app.application.service
        namespace = service.namespaces.get("p")
        for name in HELD:
            shown = self.run(service.reader.read_one(namespace, name, 0))
            assert shown.count == self._settled(name)
            up, down = shown.held
            for sum_held, sign in ((up, 1), (-down, -1)):
                open_now = [x.amount * sign for x in self._open(name) if x.amount * sign > 0]
                left = [
                    x.amount * sign
                    for x in self.all_held
                    if x.counter == name and x.path and x.end is None and x.amount * sign > 0
                ]
                assert sum(open_now) <= sum_held <= sum(left)

    def _settled(self, counter: str) -> int:
        ends = [x.end for x in self.all_held if x.counter == counter and x.end is not None]
        return sum(amount for _, amount in ends)

    def _count_of(self, counter: str) -> int:
        return self._settled(counter) if counter in HELD else super()._count_of(counter)

    def _open(self, counter: str) -> Iterable[Held]:
        return [x for x in self.all_held if x.counter == counter and x.is_open(self.now_us)]

    # Requests.

    async def _post(self, path: str, body: Any = None) -> tuple[int, Any]:
        answer = await self.rest.post(path, body)
        return answer.status_code, answer.json()

    def _holding(self, held: Held) -> Work:
        return lambda: self._post(self.rest.path(held.counter, "holds"), held.body)

    def _settling(self, held: Held, amount: int) -> tuple[End, Work]:
        body = {"amount": amount}
        return ("settled", amount), lambda: self._post(f"{held.path}/settle", body)

    def _releasing(self, held: Held) -> tuple[End, Work]:
        return ("released", 0), lambda: self._post(f"{held.path}/release")

    def _extending(self, held: Held, lasts_us: int) -> Work:
        async def extend() -> tuple[int, Any]:
            body = {"expires_in": f"{lasts_us}us"}
            answer = await self.rest.http.patch(held.path, json=body)
            return answer.status_code, answer.json()

        return extend

    def _all_at_once(self, works: list[Work]) -> list[tuple[int, Any]]:
        async def gathered() -> list[tuple[int, Any]]:
            return list(await asyncio.gather(*(work() for work in works)))

        return self.run(gathered())

    def _hold(self, held: Held, copies: int) -> None:
        self._judge_holds(held, self._all_at_once([self._holding(held)] * copies))

    def _ask_for_ends(self, held: Held, works: list[tuple[End, Work]]) -> None:
        answers = self._all_at_once([work for _, work in works])
        self._judge_ends(held, answers, [end for end, _ in works])

    # Answers.

    def _judge_holds(self, held: Held, answers: list[tuple[int, Any]]) -> None:
        """Judge answers to requests that hold it, which were sent at once."""
        age = age_of(held.token, self.now_us, self.judge.bounds)
        for status, body in answers:
            if status == 201:
                assert not held.refused
                assert held.end is None
                is_new = not held.path
                held.path = self.rest.path(verb=f"holds/{body['hold']}")
                if is_new:
                    held.expires_us = self.now_us + held.lasts_us
                assert to_us(body["expires_at"]) == held.expires_us
                assert held.is_open(self.now_us)
                continue
            check_problem(body)
            answer = (body["code"], body["applied"])
            if body["code"] in _CODES and not (held.is_cancelled and not held.path):
                assert not held.is_open(self.now_us)
                self._judge_ends(held, [(status, body)], [None])
            elif answer == ("bound_reached", False):
                room = (body["count"], body.get("held", 0), body["room"])
                assert not held.path
                assert held.refused in (None, room)
                held.refused = room
            elif answer[0] == "token_cancelled":
                assert held.is_cancelled
                assert not held.path
            else:
                assert answer == ("token_too_old", None), body
                assert age in (Age.EDGE, Age.FORGOTTEN)

    def _judge_ends(
        self, held: Held, answers: list[tuple[int, Any]], wanted: list[End | None]
    ) -> None:
        """Judge answers to requests that end it, each in its way, which were sent at once."""
        was = held.end
        if was is None and held.path and not held.is_open(self.now_us):
            was = ("expired", 0)
        for (status, body), end in zip(answers, wanted, strict=True):
            if status == 200:
                assert end is not None
                held.ended(end)
                continue
            check_problem(body)
            if body["code"] in _CODES:
                held.ended((_CODES[body["code"]], body.get("settled", 0)))
                assert body["applied"] is (body["code"] == "hold_settled")
            else:
                assert (body["code"], body["applied"]) == ("token_too_old", None), body
                age_us = self.now_us - held.token.generation_time_us
                bounds = self.judge.bounds
                assert age_us > bounds.retention_us - bounds.margin_us
        if held.end is not None and was is not None:
            assert held.end == was

    async def _check_all(self) -> None:
        """At the end every hold that is remembered is as it was answered."""
        await super()._check_all()
        for held in self.all_held:
            if not held.path:
                continue
            answer = await self.rest.http.get(held.path)
            if answer.status_code == 200:
                found = answer.json()
                if found["state"] == "open":
                    assert held.is_open(self.now_us)
                else:
                    held.ended((found["state"], found.get("settled", 0)))
            else:
                assert answer.json()["code"] == "token_too_old"
