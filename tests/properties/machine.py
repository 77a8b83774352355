"""The service under every interleaving a client, a clock and an operator can make, in process."""

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import httpx
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from counter.bounds import NO_BOUNDS
from counter.types import Token
from tests.properties.judge import Bounds, Judge
from tests.support.app import App, bounds_of_a_few, store_that_fails
from tests.support.model import Model, Send
from tests.support.rest import Rest
from tests.support.times import HOUR, MILLISECOND, MINUTE, SECOND, rfc3339, to_us

T = TypeVar("T")
COUNTERS = ("a", "b", "ü/🙂")
INT64_MAX = 2**63 - 1
#: The namespace under test: windows of 1 s, closed 3 s + 500 ms after their end.
SETTINGS = {
    "rollup_window": "1s",
    "accept_limit": "3s",
    "future_limit": "2s",
    "key_ttl": "2m",
    "cache_ttl": "2s",
}

counters = st.sampled_from(COUNTERS)
deltas = st.integers(-3, 3) | st.sampled_from([INT64_MAX, -INT64_MAX - 1])
#: How old a token is when it is sent, on a grid so that tokens, clears and windows meet. Most are
#: on time; the others lie on both sides of every bound.
ages = st.sampled_from(
    [
        *([0] * 8),
        *(steps * 500 * MILLISECOND for steps in range(-4, 10)),
        # The last instant of a window, if the clock is at a whole second.
        *(steps * SECOND + 1 for steps in range(4)),
        *(3 * SECOND + 1, -2 * SECOND - 1, 20 * SECOND, MINUTE),
        *(5 * MINUTE, 9 * MINUTE, 10 * MINUTE - SECOND, 10 * MINUTE + 1, HOUR),
    ]
)
nonces = st.integers(0, 5).map(lambda number: number.to_bytes(16, "big"))
staleness = st.sampled_from(
    [None, 0, 500 * MILLISECOND, 2 * SECOND, 4 * SECOND, 5 * SECOND, 10 * SECOND, HOUR]
)


class CounterMachine(RuleBasedStateMachine):
    """Sends, duplicates, hedges, clears, reads, rollups, restarts: always the distinct tokens."""

    storage: ClassVar[str]
    payload_check: ClassVar[str] = "guard"
    #: Whether of two atomic adds under one token, sent at once, one alone is acknowledged.
    distinguishes_atomics: ClassVar[bool] = True
    #: Whether a cancel has to wait until the window is closed.
    waits: ClassVar[bool] = False
    sent: Bundle[Send] = Bundle("sent")

    def __init__(self) -> None:
        super().__init__()
        memory = Path("/dev/shm")
        parent = memory if memory.is_dir() else None
        self.directory = Path(tempfile.mkdtemp(prefix="counter-machine-", dir=parent))
        self.runner = asyncio.Runner()
        self.patches = ExitStack()
        self.atomics = 0
        self.keys: dict[tuple[str, str], tuple[int, int]] = {}
        self.tried: set[str] = set()
        #: The requests for each counter, and their times by token, and whether each was a delete.
        self.asked: set[tuple[str, int, bool]] = set()
        #: The counters of requests that were cancelled.
        self.cancelled: set[str] = set()
        #: The deletes that were acknowledged.
        self.deleted: set[tuple[str, int]] = set()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    @initialize(
        counter_type=st.sampled_from(["ACCURATE", "EVENTUAL"]),
        shards=st.sampled_from([1, 3]),
        minutes=st.sampled_from([0, 12]),
        forgetful=st.booleans(),
    )
    def start(self, counter_type: str, shards: int, minutes: int, forgetful: bool) -> None:
        if forgetful:
            self.patches.enter_context(bounds_of_a_few())
        self.run(self._start(counter_type, shards))
        self.sleep(minutes)

    async def _start(self, counter_type: str, shards: int) -> None:
        # Its dataset keeps events for 10 m in slices of 5 m.
        self.app = App(self.storage, self.directory, small=True)
        await self.app.start()
        self.app.clock.advance(-self.now_us % SECOND)
        await self.app.rest.within("p").create(
            counter_type, shards=shards, payload_check=self.payload_check, **SETTINGS
        )
        self.judge = Judge(Bounds(self.now_us), Model())

    def teardown(self) -> None:
        try:
            if hasattr(self, "judge"):
                self.run(self._check_all())
        finally:
            if hasattr(self, "app"):
                self.run(self.app.stop())
            self.runner.close()
            self.patches.close()
            shutil.rmtree(self.directory)

    @property
    def now_us(self) -> int:
        return self.app.clock.now_us()

    @property
    def rest(self) -> Rest:
        return self.app.rest.within("p")

    # Sending.

    @rule(target=sent, counter=counters, delta=deltas, clear=st.booleans(), age=ages, nonce=nonces)
    def send(self, counter: str, delta: int, clear: bool, age: int, nonce: bytes) -> Send:
        each = Send(Token(nonce, self.now_us - age), ((counter, 0 if clear else delta),), clear)
        self._send_all([each])
        return each

    @rule(target=sent, counter=counters, age=ages, nonce=nonces)
    def send_delete(self, counter: str, age: int, nonce: bytes) -> Send:
        token = Token(nonce, self.now_us - age)
        each = Send(token, ((counter, 0),), clear=True, delete=True)
        self._send_all([each])
        return each

    @rule(
        target=sent, items=st.lists(st.tuples(counters, deltas), min_size=1, max_size=4), age=ages
    )
    def send_atomic(self, items: list[tuple[str, int]], age: int) -> Send:
        self.atomics += 1
        nonce = (1_000 + self.atomics).to_bytes(16, "big")
        each = Send(Token(nonce, self.now_us - age), tuple(items), atomic=True)
        self._send_all([each])
        return each

    @rule(each=sent, copies=st.integers(1, 4))
    def send_again(self, each: Send, copies: int) -> None:
        """A duplicate, or several at once: a hedge."""
        self._send_all([each] * copies)

    @rule(each=sent, delta=deltas, copies=st.integers(0, 2))
    def send_another_payload(self, each: Send, delta: int, copies: int) -> None:
        """The same token for something else, together with *copies* of the first payload."""
        if each.atomic and not self.distinguishes_atomics:
            return
        if each.atomic:
            other = Send(each.token, ((each.counter, delta), *each.items[1:]), atomic=True)
        else:
            other = Send(each.token, ((each.counter, delta),))
        self._send_all([each] * copies + [other])

    @rule(target=sent, counter=counters, delta=deltas, other=deltas, atomic=st.booleans())
    def send_two_payloads(self, counter: str, delta: int, other: int, atomic: bool) -> Send:
        """One new token for two things at once: one of them wins, and stays."""
        self.atomics += 1
        atomic = atomic and self.distinguishes_atomics
        token = Token((1_000 + self.atomics).to_bytes(16, "big"), self.now_us)
        one, two = (
            Send(token, ((counter, each), *((("b", 1),) if atomic else ())), atomic=atomic)
            for each in (delta, other)
        )
        self._send_all([one, two, one])
        self._send_all([two, one])
        return one

    @rule(
        target=sent,
        old=st.lists(sent, max_size=3),
        new=st.lists(st.tuples(counters, deltas, ages, nonces), max_size=4),
        rolls_up=st.booleans(),
        restarts=st.booleans(),
    )
    def send_crowd(
        self,
        old: list[Send],
        new: list[tuple[str, int, int, bytes]],
        rolls_up: bool,
        restarts: bool,
    ) -> Any:
        """Many clients at once, while the rollup runs and before a restart."""
        fresh = [Send(Token(n, self.now_us - a), ((c, d),)) for c, d, a, n in new]
        self._send_all([*fresh, *old, *fresh], rolls_up=rolls_up)
        if restarts:
            self.run(self.app.restart())
        return multiple(*fresh)

    @rule(
        target=sent,
        old=st.lists(sent, max_size=3),
        new=st.lists(st.tuples(counters, deltas, ages, nonces), min_size=1, max_size=5),
    )
    def send_batch(self, old: list[Send], new: list[tuple[str, int, int, bytes]]) -> Any:
        fresh = [Send(Token(n, self.now_us - a), ((c, d),)) for c, d, a, n in new]
        self._send_batch([*fresh, *old])
        return multiple(*fresh)

    def _send_batch(self, sends: list[Send]) -> None:
        """Send the single adds of *sends* in one request."""
        sends = [each for each in sends if not each.clear and not each.atomic]
        answer = self.run(self.rest.batch_add([each.as_item for each in sends]))
        assert answer.status_code == 200, answer.text
        self.tried |= {each.counter for each in sends}
        self.asked |= {(each.counter, each.token.generation_time_us, False) for each in sends}
        results = answer.json()["results"]
        self.judge.many(self.now_us, list(zip(sends, results, strict=True)))

    @precondition(lambda self: self.judge.default == NO_BOUNDS)
    @rule(counter=counters, key=st.sampled_from(["k", "order:1"]), hedges=st.integers(1, 3))
    def send_key(self, counter: str, key: str, hedges: int) -> None:
        """An id without a time: the first sighting within its time to live gives it one."""

        async def all_at_once() -> list[httpx.Response]:
            sends = (self.rest.add(counter, 1, key=key) for _ in range(hedges))
            return await asyncio.gather(*sends)

        self.tried.add(counter)
        for answer in self.run(all_at_once()):
            assert answer.status_code == 200, answer.text
            time_us, expires_us = self.keys.get((counter, key), (0, 0))
            if self.now_us >= expires_us:
                time_us, expires_us = self.now_us, self.now_us + self.judge.bounds.key_ttl_us
                self.keys[(counter, key)] = (time_us, expires_us)
                self.asked.add((counter, time_us, False))
                nonce = f"{key}@{len(self.keys)}".encode().ljust(16, b"k")
                self.judge.model.apply(Send(Token(nonce, time_us), ((counter, 1),)))
            assert to_us(answer.json()["event_time"]) == time_us

    @rule(each=sent, lands=st.booleans())
    def send_into_a_fault(self, each: Send, lands: bool) -> None:
        """The store fails before the write, or after it: unknown, until the token is sent again."""
        method = "append_atomic" if each.atomic else "append"
        with store_that_fails(self.app, method, after=lands):
            self.run(self._ask(each))
        self._send_all([each])

    @rule(each=sent, steps=st.integers(0, 12))
    def hang_up(self, each: Send, steps: int) -> None:
        """The client goes away in the middle: unknown, until the token is sent again."""

        async def cancelled() -> None:
            task = asyncio.create_task(self._ask(each))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        self.run(cancelled())
        self._send_all([each])

    @rule(each=sent, cancels=st.integers(1, 3), sends=st.integers(0, 2), rolls_up=st.booleans())
    def cancel(self, each: Send, cancels: int, sends: int, rolls_up: bool) -> None:
        """Cancel a token, in several requests at once and beside retries of what it is of."""

        async def all_at_once() -> list[Any]:
            work: list[Any] = [self._ask(each) for _ in range(sends)]
            work += [self._ask_to_cancel(each) for _ in range(cancels)]
            if rolls_up:
                work.append(self.app.roll_up())
            return await asyncio.gather(*work)

        self.tried |= {name for name, _ in each.items}
        self.cancelled |= {name for name, _ in each.items}
        bodies = self.run(all_at_once())
        done, asked = bodies[:sends], bodies[sends : sends + cancels]
        # A retry that did not meet a cancel came before them.
        met = [body.get("code") == "token_cancelled" for body in done]
        before = [(each, body) for body, late in zip(done, met, strict=True) if not late]
        after = [(each, body) for body, late in zip(done, met, strict=True) if late]
        self.judge.many(self.now_us, before)
        self.judge.cancels(self.now_us, each, asked, waits=self.waits)
        self.judge.many(self.now_us, after)

    async def _ask_to_cancel(self, each: Send) -> Any:
        """The response to a request that cancels *each*."""
        if each.bounds != NO_BOUNDS:
            answer = await self._ask_bounded(each, "cancel")
        elif each.atomic:
            answer = await self.rest.cancel_atomic(each.items, each.token)
        else:
            delta = None if each.clear else each.delta
            kind = ("delete" if each.delete else "clear") if each.clear else "add"
            answer = await self.rest.cancel(each.counter, delta, each.token, operation=kind)
        found = answer.json()
        assert found.get("status", 200) == answer.status_code
        return found

    async def _ask_bounded(self, each: Send, verb: str) -> httpx.Response:
        """The response to a request about an add that may have bounds."""
        path = self.rest.path(verb=f"atomic/{verb}")
        if not each.atomic:
            path = self.rest.path(each.counter, verb)
        return await self.rest.post(path, each.body)

    def _send_all(self, sends: list[Send], *, rolls_up: bool = False) -> None:
        """Send all at once, and hold every response against the model."""

        async def all_at_once() -> list[Any]:
            work: list[Any] = [self._ask(each) for each in sends]
            if rolls_up:
                work.insert(len(work) // 2, self.app.roll_up())
            results = await asyncio.gather(*work)
            return [each for each in results if each is not None]

        self.tried |= {name for each in sends for name, _ in each.items}
        bodies = self.run(all_at_once())
        self.judge.many(self.now_us, list(zip(sends, bodies, strict=True)))

    async def _ask(self, each: Send) -> Any:
        """The response to one send: the body of an acknowledgement, or a problem."""
        self.asked |= {(name, each.token.generation_time_us, each.delete) for name, _ in each.items}
        if each.bounds != NO_BOUNDS:
            answer = await self._ask_bounded(each, "add")
        elif each.atomic:
            answer = await self.rest.atomic_add(each.items, each.token)
        elif each.delete:
            answer = await self.rest.delete(each.counter, each.token)
        elif each.clear:
            answer = await self.rest.clear(each.counter, each.token)
        else:
            answer = await self.rest.add(each.counter, each.delta, each.token)
        body = answer.json()
        if answer.status_code != 200:
            assert body["status"] == answer.status_code
            return body
        if each.delete:
            self.deleted.add((each.counter, each.token.generation_time_us))
        if each.atomic:
            found = [(result["counter"], result["delta"]) for result in body["results"]]
            assert found == list(each.items)
            return body["results"][0]
        return body

    # Time, the operator, and reading.

    @rule(
        wait=st.sampled_from(
            [1, 100 * MILLISECOND, 500 * MILLISECOND, SECOND, 4 * SECOND, 20 * SECOND]
        )
    )
    def advance(self, wait: int) -> None:
        self.app.clock.advance(wait)

    @rule(minutes=st.sampled_from([1, 4, 6, 12]))
    def sleep(self, minutes: int) -> None:
        """Long enough for slices to end and to be dropped; their keeper looks in in each slice."""
        passes = minutes // 4 + 1
        for _ in range(passes):
            self.app.clock.advance(minutes * MINUTE // passes)
            self.run(self.app.roll_up())

    @rule()
    def roll_up(self) -> None:
        self.run(self.app.roll_up())

    @rule()
    def restart(self) -> None:
        self.run(self.app.restart())

    @rule(
        accept_limit=st.sampled_from(["1s", "3s", "5s"]),
        future_limit=st.sampled_from([SECOND, 2 * SECOND, 4 * SECOND]),
        key_ttl=st.sampled_from([MINUTE, 2 * MINUTE]),
    )
    def change_settings(self, accept_limit: str, future_limit: int, key_ttl: int) -> None:
        """Each holds at once, except the accept limit, which waits for an unused slice."""
        body = {"accept_limit": accept_limit, "future_limit": f"{future_limit}us"}
        body["key_ttl"] = f"{key_ttl}us"
        answer = self.run(self.rest.http.put(self.rest.path(), json=body))
        assert answer.status_code == 200, answer.text
        eras = self.app.application.service.namespaces.get("p").eras
        held = {each for each in self.judge.bounds.accept_limits if each[0] <= self.now_us}
        assert held == {each for each in eras if each.from_us <= self.now_us}, "what held, holds"
        self.judge.bounds = replace(
            self.judge.bounds,
            accept_limits=tuple(eras),
            future_limit_us=future_limit,
            key_ttl_us=key_ttl,
        )

    @rule(counter=counters)
    def recount(self, counter: str) -> None:
        answer = self.run(self.rest.post(self.rest.path(counter, "recount"), {}))
        assert answer.status_code == 202, answer.text
        self.tried.add(counter)

    @rule(wanted=st.lists(counters, min_size=1, max_size=3), max_staleness=staleness)
    def read(self, wanted: list[str], max_staleness: int | None) -> None:
        self.run(self._read(wanted, max_staleness))

    @invariant()
    def accurate_reads_are_exact(self) -> None:
        """After every step, whatever it was: by the core, because HTTP takes as long again."""
        service = self.app.application.service
        namespace = service.namespaces.get("p")
        for each in self.run(service.reader.read(namespace, COUNTERS, 0)):
            body = {**each._asdict(), "as_of": rfc3339(each.as_of_us)}
            self.judge.read(self.now_us, body, 0)

    async def _read(self, wanted: list[str], max_staleness: int | None) -> None:
        text = None if max_staleness is None else f"{max_staleness}us"
        if len(wanted) > 1 and text is not None:
            answers = [await self.rest.batch_get(wanted, text)]
        else:
            answers = [await self.rest.get(counter, text) for counter in wanted]
        for answer in answers:
            assert answer.status_code == 200, answer.text
            for body in answer.json().get("results", [answer.json()]):
                self.judge.read(self.now_us, body, max_staleness)

    @rule(each=sent)
    def add_and_get(self, each: Send) -> None:
        """The returned count includes its add."""
        if each.atomic or each.clear:
            return
        answer = self.run(self._ask_bounded(each, "add-and-get"))
        self.judge.one(self.now_us, each, answer.json())
        if answer.status_code == 200:
            assert answer.json()["count"] == self.judge.model.count(each.counter)

    async def _check_all(self) -> None:
        """At the end: every way to look at every counter shows the distinct tokens."""
        await self._read(list(COUNTERS), 0)
        assert set(await self.rest.names()) <= self.tried
        self.app.clock.advance(10 * SECOND)
        await self.app.roll_up()
        await self._read(list(COUNTERS), 6 * SECOND)
        await self._read(list(COUNTERS), 0)
        self.app.clock.advance(10 * SECOND)
        await self.app.roll_up()
        names = set(await self.rest.names())
        self._check_names(names)
        await self._check_lists({name: self._count_of(name) for name in names})
        kept_us = self.now_us - self.judge.bounds.retention_us
        for counter in COUNTERS:
            await self._check_events(counter, kept_us)

    def _count_of(self, counter: str) -> int:
        """The count of a counter by all that was answered."""
        return self.judge.model.count(counter)

    async def _check_events(self, counter: str, kept_us: int) -> None:
        """The log since then has each event that was acknowledged, and each refusal."""
        listed = [
            (to_us(each["event_time"]), each) for each in await self.rest.events(counter, limit=3)
        ]
        assert [at for at, _ in listed] == sorted((at for at, _ in listed), reverse=True)
        recent = sorted(
            (at, each.get("delta", 0), each.get("clear", False))
            for at, each in listed
            if at >= kept_us and "refused" not in each
        )
        assert recent == self.judge.model.events(counter, kept_us)
        refused = sorted(
            (at, each["refused"]["delta"])
            for at, each in listed
            if at >= kept_us and "refused" in each
        )
        assert refused == self.judge.model.refusals(counter, kept_us)

    async def _check_lists(self, expected: dict[str, int]) -> None:
        """By name and by count, the listed counters have the counts that are expected."""
        path = self.rest.path(verb="counters")
        for order, sign in (("name", 0), ("-count", -1)):
            params = {"counts": "true", "order": order, "max_staleness": "0s"}
            answer = await self.rest.http.get(path, params=params)
            found = [(each["counter"], each["count"]) for each in answer.json()["counts"]]
            assert found == sorted(expected.items(), key=lambda each: (sign * each[1], each[0]))

    def _check_names(self, names: set[str]) -> None:
        """All counters are listed, except those with a delete as the last event."""
        for counter in COUNTERS:
            events = [time_us for time_us, _, _ in self.judge.model.events(counter, 0)]
            deletes = [at for name, at, is_delete in self.asked if name == counter and is_delete]
            if events and max(events) > max(deletes, default=-1):
                assert counter in names
            deleted_us = max((at for name, at in self.deleted if name == counter), default=None)
            others = [at for name, at, is_delete in self.asked if name == counter and not is_delete]
            if counter in self.cancelled:
                # A delete that was cancelled lists what an earlier one took off the list.
                continue
            if deleted_us is not None and max(others, default=-1) <= deleted_us:
                assert counter not in names
