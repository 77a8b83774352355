"""The machine over a store that keeps bounds: each add counts or is refused, once and for all."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import invariant, multiple, rule

from counter.bounds import NO_BOUNDS, Bounds
from counter.types import Token
from tests.properties.held import HoldMachine
from tests.properties.machine import CounterMachine, ages, counters, deltas
from tests.support.model import Send
from tests.support.times import rfc3339

sent = CounterMachine.sent
#: Counters with nothing but bounded adds and their cancels, and their bound.
FULL = tuple(f"full {number}" for number in range(4))
MOST = 5
limits = st.none() | st.integers(-4, 4)
bounded = (
    st.tuples(limits, limits)
    .map(lambda each: Bounds(*each))
    .filter(
        lambda each: each.at_least is None or each.at_most is None or each.at_least <= each.at_most
    )
)
copies = st.integers(1, 3)


class BoundedMachine(HoldMachine):
    """Bounded adds among all others, alone and at once, and bounds that the namespace has."""

    def _token(self, age: int) -> Token:
        self.atomics += 1
        return Token((1_000 + self.atomics).to_bytes(16, "big"), self.now_us - age)

    @rule(target=sent, counter=counters, delta=deltas, own=bounded, age=ages, copies=copies)
    def send_bounded(self, counter: str, delta: int, own: Bounds, age: int, copies: int) -> Send:
        each = Send(self._token(age), ((counter, delta),), bounds=own)
        self._send_alone(each, copies)
        return each

    @rule(
        target=sent,
        items=st.lists(st.tuples(counters, deltas), min_size=1, max_size=4),
        own=bounded,
        age=ages,
        copies=copies,
    )
    def send_bounded_atomic(
        self, items: list[tuple[str, int]], own: Bounds, age: int, copies: int
    ) -> Send:
        each = Send(self._token(age), tuple(items), atomic=True, bounds=own)
        self._send_alone(each, copies)
        return each

    def _send_alone(self, each: Send, copies: int) -> None:
        """Send what is new and nothing else: whether it is refused is known."""
        refuses = self.judge.model.refuses(each, self.judge.default)
        self._send_all([each] * copies)
        if each.scope in self.judge.model.applied:
            assert not refuses, each
        if each.scope in self.judge.model.refused:
            assert refuses, each
            name, count, _, _ = self.judge.model.refused[each.scope][1]
            assert count == self.judge.model.count(name)

    @rule(
        target=sent,
        counter=st.sampled_from(FULL),
        amounts=st.lists(st.integers(1, 3), min_size=1, max_size=5),
        how=st.sampled_from(["single", "batch", "atomic"]),
        old=st.lists(sent, max_size=2),
        rolls_up=st.booleans(),
    )
    def fill(
        self, counter: str, amounts: list[int], how: str, old: list[Send], rolls_up: bool
    ) -> Any:
        """Many clients at once, or one, fill a counter up to its bound."""
        fresh = [
            Send(
                self._token(0),
                ((counter, each),),
                atomic=how == "atomic",
                bounds=Bounds(at_most=MOST),
            )
            for each in amounts
        ]
        if how == "batch":
            self._send_batch([*fresh, *old, *fresh])
        else:
            self._send_all([*fresh, *old, *fresh], rolls_up=rolls_up)
        return multiple(*fresh)

    @invariant()
    def no_full_counter_is_past_its_bound(self) -> None:
        service = self.app.application.service
        namespace = service.namespaces.get("p")
        for each in self.run(service.reader.read(namespace, FULL, 0)):
            self.judge.read(self.now_us, {**each._asdict(), "as_of": rfc3339(each.as_of_us)}, 0)
            assert 0 <= each.count <= MOST

    @rule(own=bounded | st.just(NO_BOUNDS))
    def bound_the_namespace(self, own: Bounds) -> None:
        """It holds at once, also for what another process was sent."""
        body = {"bounds": {name: each for name, each in own._asdict().items() if each is not None}}
        answer = self.run(self.rest.http.put(self.rest.path(), json=body))
        assert answer.status_code == 200, answer.text
        self.judge.default = own

    async def _check_all(self) -> None:
        """At the end these counters have the events and the refusals that were answered, too."""
        await super()._check_all()
        model = self.judge.model
        kept_us = self.now_us - self.judge.bounds.retention_us
        for name in FULL:
            await self._check_events(name, kept_us)
            assert await self.rest.count(name) == model.count(name)
