"""Whether a response is one that the contract allows, by the clock and the model alone."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from counter.bounds import NO_BOUNDS
from counter.bounds import Bounds as CountBounds
from counter.types import Token
from tests.support.model import Model, Refused, Send
from tests.support.problems import check_problem
from tests.support.times import MILLISECOND, MINUTE, SECOND, rfc3339, to_us


@dataclass(frozen=True, slots=True)
class Bounds:
    """The settings that decide the meaning of a token's time."""

    created_us: int
    #: (from, accept limit): each holds for tokens of its instant or later, until the next.
    accept_limits: tuple[tuple[int, int], ...] = ((0, 3 * SECOND),)
    future_limit_us: int = 2 * SECOND
    rollup_window_us: int = SECOND
    write_timeout_us: int = 500 * MILLISECOND
    retention_us: int = 10 * MINUTE
    key_ttl_us: int = 2 * MINUTE
    #: How far before retention the service may stop to know; it is free in that span.
    margin_us: int = 30 * SECOND

    def accept_limit_at(self, time_us: int) -> int:
        """How old a token of *time_us* may be when it is written."""
        return [limit_us for from_us, limit_us in self.accept_limits if from_us <= time_us][-1]


class Age(Enum):
    """The meaning of a token's time at an instant."""

    FUTURE = auto()
    FRESH = auto()
    #: Late, and a write may still be in flight.
    OPEN = auto()
    CLOSED = auto()
    #: Close to retention: still resolved, or past knowing.
    EDGE = auto()
    FORGOTTEN = auto()
    #: From before the namespace existed: it cannot have been written.
    ANCIENT = auto()


#: While the outcome of a token that was decided is known.
_KNOWN = (Age.FRESH, Age.OPEN, Age.CLOSED, Age.EDGE)


def age_of(token: Token, now_us: int, bounds: Bounds) -> Age:
    """The meaning of the time of *token* at *now_us*."""
    time_us = token.generation_time_us
    accept_limit_us = bounds.accept_limit_at(time_us)
    window_end_us = (time_us // bounds.rollup_window_us + 1) * bounds.rollup_window_us
    if time_us > now_us + bounds.future_limit_us:
        return Age.FUTURE
    if time_us >= now_us - accept_limit_us:
        return Age.FRESH
    if time_us < bounds.created_us - bounds.accept_limits[0][1]:
        return Age.ANCIENT
    if now_us < window_end_us + accept_limit_us + bounds.write_timeout_us:
        return Age.OPEN
    if time_us >= now_us - bounds.retention_us + bounds.margin_us:
        return Age.CLOSED
    return Age.EDGE if time_us >= now_us - bounds.retention_us else Age.FORGOTTEN


@dataclass(slots=True)
class Judge:
    """Holds every response against the model, and the model against every definite answer."""

    bounds: Bounds
    model: Model
    #: The bounds of counts that the namespace has.
    default: CountBounds = NO_BOUNDS

    def many(self, now_us: int, answers: list[tuple[Send, Any]]) -> None:
        """Judge concurrent answers, acknowledged ones first and conflicts last, because any of them
        may have been decided first; one of two payloads of a token must win."""
        known = [send.scope in self.model.applied for send, _ in answers]
        acknowledged = [(send, body) for send, body in answers if "status" not in body]
        for send, body in acknowledged:
            self._acknowledged(now_us, send, body)
        refused = [(send, body) for send, body in answers if "status" in body]
        for send, body in sorted(refused, key=lambda each: each[1]["code"] == "token_conflict"):
            self._refused(now_us, send, body)
        for scope in {send.scope for send, _ in acknowledged}:
            of_scope = [
                (before, body)
                for before, (send, body) in zip(known, answers, strict=True)
                if send.scope == scope and "status" not in body
            ]
            self._first_only(of_scope)

    def one(self, now_us: int, send: Send, body: Any) -> None:
        self.many(now_us, [(send, body)])

    def _acknowledged(self, now_us: int, send: Send, body: Any) -> None:
        age = age_of(send.token, now_us, self.bounds)
        if age is not Age.FRESH:
            assert age in (Age.OPEN, Age.CLOSED, Age.EDGE), f"{send} was taken although {age}"
            assert send.scope in self.model.applied, f"{send} was taken late, and never before"
            assert body["replayed"] is True
        assert body["event_time"] == rfc3339(send.token.generation_time_us)
        assert body["counter"] == send.counter
        if not send.clear:
            assert body["delta"] == send.delta
        self.model.apply(send)

    def _refused(self, now_us: int, send: Send, body: Any) -> None:
        check_problem(body)
        age = age_of(send.token, now_us, self.bounds)
        answer = (body["code"], body["applied"])
        first = self._decided(send)
        conflicts = first is not None and first.differs(send)
        allowed: set[tuple[str, bool | None]] = set()
        if age is Age.FUTURE:
            allowed = {("token_in_future", None)}
        elif age is Age.ANCIENT:
            allowed = {("token_too_old", False)}
        elif age in (Age.EDGE, Age.FORGOTTEN):
            allowed = {("token_too_old", None)}
        if send.scope in self.model.cancelled and allowed <= {("token_too_old", None)}:
            differs = self.model.cancelled[send.scope][0].differs(send)
            allowed |= {("token_conflict", None) if differs else ("token_cancelled", False)}
        elif age in (Age.FRESH, Age.OPEN, Age.CLOSED, Age.EDGE) and conflicts:
            allowed |= {("token_conflict", None)}
        elif first is None and age is Age.OPEN:
            allowed |= {("token_pending", None)}
        elif first is None and age in (Age.CLOSED, Age.EDGE):
            allowed |= {("token_too_old", False)}
            if send.scope in self.model.void:
                # It was voided for another payload, and that is no news for this one.
                allowed |= {("token_conflict", None)}
        if age is Age.FRESH and first is None and self.default.tightest(send.bounds) != NO_BOUNDS:
            allowed |= {("bound_reached", False)}
        if send.scope in self.model.refused and not conflicts and age in _KNOWN:
            allowed = (allowed & {("token_too_old", None)}) | {("bound_reached", False)}
        assert answer in allowed, f"{send} ({age}, first {first}) got {body}"
        if answer == ("token_too_old", False):
            self.model.never(send)
        elif answer == ("bound_reached", False):
            self.model.refuse(send, self._why(send, body))

    def _decided(self, send: Send) -> Send | None:
        """What was accepted or refused under the token of *send*."""
        refused = self.model.refused.get(send.scope)
        return self.model.applied.get(send.scope) or (refused[0] if refused else None)

    def _why(self, send: Send, body: Any) -> Refused:
        """What refused *send*, by the members of the problem, which must agree."""
        delta = sum(each for name, each in send.items if name == body["counter"])
        which, sign = ("at_most", 1) if delta > 0 else ("at_least", -1)
        bound, count, room = body[which], body["count"], body["room"]
        assert bound == getattr(send.bounds.tightest(self.default), which) or (
            send.scope in self.model.refused
        )
        assert sign * (count + delta - bound) > 0, f"there was room for {send}: {body}"
        assert room == max(0, sign * (bound - count))
        return body["counter"], count, bound, room

    def cancels(self, now_us: int, send: Send, bodies: list[Any], *, waits: bool) -> None:
        """Judge responses to cancels of *send* that were sent at once, the acknowledged first."""
        for body in sorted(bodies, key=lambda each: "status" in each):
            self.cancel(now_us, send, body, waits=waits)

    def cancel(self, now_us: int, send: Send, body: Any, *, waits: bool) -> bool:
        """Judge a response to a cancel; return whether it is definite. One that *waits* may have to
        until the window is closed."""
        age = age_of(send.token, now_us, self.bounds)
        if "status" not in body:
            assert age not in (Age.FUTURE, Age.FORGOTTEN, Age.ANCIENT), (age, body)
            assert not (waits and age in (Age.FRESH, Age.OPEN)), (age, body)
            assert body["event_time"] == rfc3339(send.token.generation_time_us)
            self.model.cancel(send, body["was_counted"], now_us)
            return True
        check_problem(body)
        answer, scope = (body["code"], body["applied"]), send.scope
        known = self._decided(send) or self.model.cancelled.get(scope, (None,))[0]
        allowed: set[tuple[str, bool | None]] = set()
        if age is Age.FUTURE:
            allowed = {("token_in_future", None)}
        elif age is Age.ANCIENT:
            allowed = {("token_too_old", False)}
        elif age in (Age.EDGE, Age.FORGOTTEN):
            allowed = {("token_too_old", None)}
        elif waits and age in (Age.FRESH, Age.OPEN):
            allowed = {("token_pending", None)}
        # A token that is void may be so for another payload.
        is_void = scope in self.model.void
        if age not in (Age.FUTURE, Age.ANCIENT) and (is_void or (known and known.differs(send))):
            allowed |= {("token_conflict", None)}
        assert answer in allowed, f"cancel of {send} ({age}, known {known}) got {body}"
        return answer[0] != "token_pending"

    @staticmethod
    def _first_only(answers: list[tuple[bool, Any]]) -> None:
        """Of all acknowledgements of a token, one at most says that it was the first."""
        firsts = [body for _, body in answers if body["replayed"] is False]
        known = any(before for before, _ in answers)
        assert len(firsts) <= (0 if known else 1), answers

    def unknown(self, now_us: int, send: Send, body: Any, *, written_perhaps: bool) -> bool:
        """Take a response after a delay; return whether nothing is open. Perhaps written:
        either."""
        age = age_of(send.token, now_us, self.bounds)
        if "status" not in body:
            is_news = send.scope not in self.model.applied and age is not Age.FRESH
            assert written_perhaps or not is_news, f"{send} was taken late, and never before"
            self.model.apply(send, resolved_at_us=now_us if age is not Age.FRESH else None)
            return True
        check_problem(body)
        answer = (body["code"], body["applied"])
        if answer == ("token_too_old", False):
            self.model.never(send)
            return True
        if answer[0] == "token_cancelled":
            assert send.scope in self.model.cancelled
            return True
        if answer[0] == "token_conflict":
            first = self.model.applied.get(send.scope)
            assert send.scope in self.model.void or (first is not None and first.differs(send))
            return True
        if answer == ("token_too_old", None):
            assert age in (Age.EDGE, Age.FORGOTTEN)
            return True
        assert (body["status"], body["retry"]) == (503, "same_token") or age is Age.FUTURE, body
        return False

    def read(self, now_us: int, body: Any, max_staleness_us: int | None) -> None:
        """A count is exactly the model's, all of it or up to the instant it names."""
        as_of_us = to_us(body["as_of"])
        assert as_of_us <= now_us, "nothing is known of the future"
        if max_staleness_us is not None:
            assert as_of_us >= now_us - max_staleness_us, "staler than was asked for"
        counter = body["counter"]
        if body["accuracy"] == "accurate":
            assert as_of_us == now_us
            expected = {self.model.count(counter)}
        else:
            assert body["accuracy"] == "eventual"
            assert max_staleness_us != 0
            expected = self.model.counts(counter, as_of_us)
        assert body["count"] in expected, (body, sorted(self.model.sends(counter), key=str))
