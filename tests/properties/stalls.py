"""The machine over a store without transactions, where each step of a write may be held up.

Over a store of one transaction nothing lands later than it was sent, so there is nothing to stall.
"""

from typing import Any, NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import rule

from counter.types import Token
from tests.properties.machine import CounterMachine, ages, counters, deltas
from tests.support.app import store_that_stalls
from tests.support.model import Send
from tests.support.times import MILLISECOND, SECOND

sent = CounterMachine.sent
#: The request, and the step of its write that is held up.
writes = st.sampled_from(
    [
        *(("add", "mark"), ("add", "append"), ("clear", "mark"), ("clear", "append")),
        *(("atomic", "mark_atomic"), ("atomic", "append_atomic")),
    ]
)
#: The step of a late token's resolution that is held up.
resolutions = st.sampled_from(["find", "decide", "rewrite", "void", "write_pending", "write_marks"])


class Meanwhile(NamedTuple):
    """The events while a step is held up."""

    wait_us: int
    hedges: bool
    rolls_up: bool


meanwhiles = st.builds(
    Meanwhile,
    st.sampled_from([100 * MILLISECOND, SECOND, 4 * SECOND, 9 * SECOND, 20 * SECOND]),
    st.booleans(),
    st.booleans(),
)


class StallingMachine(CounterMachine):
    """Time passes, hedges are sent and windows close between any two steps of a write."""

    waits = True

    @rule(target=sent, write=writes, counter=counters, delta=deltas, meanwhile=meanwhiles)
    def send_into_a_stall(
        self, write: tuple[str, str], counter: str, delta: int, meanwhile: Meanwhile
    ) -> Send:
        """Held up in the middle of its write, a token is unknown: to be resolved, once for all."""
        kind, step = write
        each = self._new(kind, counter, delta, 0)
        self.run(self._stalled(each, step, meanwhile, written_perhaps=True))
        return each

    @rule(
        target=sent,
        kind=st.sampled_from(["add", "clear", "atomic"]),
        counter=counters,
        delta=deltas,
        age=ages,
        lands=st.booleans(),
        step=resolutions,
        meanwhile=meanwhiles,
    )
    def resolve_into_a_stall(
        self,
        kind: str,
        counter: str,
        delta: int,
        age: int,
        lands: bool,
        step: str,
        meanwhile: Meanwhile,
    ) -> Send:
        """Held up in the middle of its resolution, a token gets the same response as its hedge."""
        each = self._new(kind, counter, delta, age)
        if lands:
            self._send_all([each])
            self.app.clock.advance(9 * SECOND)
        self.run(self._stalled(each, step, meanwhile, written_perhaps=False))
        return each

    @rule(each=sent, step=resolutions, meanwhile=meanwhiles)
    def resolve_again_into_a_stall(self, each: Send, step: str, meanwhile: Meanwhile) -> None:
        self.run(self._stalled(each, step, meanwhile, written_perhaps=False))

    def _new(self, kind: str, counter: str, delta: int, age: int) -> Send:
        self.atomics += 1
        token = Token((1_000 + self.atomics).to_bytes(16, "big"), self.now_us - age)
        items = ((counter, 0 if kind == "clear" else delta), ("b", 1))
        is_atomic = kind == "atomic"
        self.tried |= {counter, "b"} if is_atomic else {counter}
        return Send(token, items if is_atomic else items[:1], kind == "clear", is_atomic)

    async def _stalled(
        self, each: Send, step: str, meanwhile: Meanwhile, *, written_perhaps: bool
    ) -> None:
        """Send *each* with a *step* held up, then until its outcome is known."""

        async def ask() -> bool:
            body: Any = await self._ask(each)
            return self.judge.unknown(self.now_us, each, body, written_perhaps=written_perhaps)

        async def passes() -> None:
            self.app.clock.advance(meanwhile.wait_us)
            if meanwhile.hedges:
                await ask()
            if meanwhile.rolls_up:
                await self.app.roll_up()

        with store_that_stalls(self.app, step, passes):
            await ask()
        if not await ask():
            self.app.clock.advance(20 * SECOND)
            assert await ask(), "a closed window leaves nothing open"
