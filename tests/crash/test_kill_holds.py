"""kill -9 while holds begin and end: what was acknowledged is there, and each ends exactly once."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.rest import Json, Rest, new_token, on_wire
from tests.support.seeds import seed_of
from tests.support.server import Server, serving
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("child_processes")

ROUNDS = 5
CLIENTS = 6
#: Of each counter.
MOST = 200
#: How many holds that were refused are sent again after each kill.
_AGAIN = 20
_ENDS = {"hold_settled": "settled", "hold_released": "released", "hold_expired": "expired"}
#: A hold that ended, and what was settled.
End = tuple[str, int]


@dataclass(slots=True)
class Sent:
    """A hold that a client asked for, and what is known of it."""

    counter: str
    body: Json
    #: What the client wants to happen to it: the amount to settle, or None for a release.
    settles: int | None
    is_left: bool
    path: str = ""
    end: End | None = None
    refusal: Any = None
    is_void: bool = False

    @property
    def is_decided(self) -> bool:
        return bool(self.path or self.refusal or self.is_void or self.end)

    def ended(self, end: End) -> None:
        assert self.end in (None, end), f"{self} has ended again: {end}"
        assert self.refusal is None, f"{self} was refused and has ended"
        assert not self.is_void, f"{self} was never to be, and has ended"
        self.end = end


class Load:
    """Clients that hold, settle and release, until the service is gone."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server = server
        self.random = random.Random(seed)
        self.sent: list[Sent] = []
        self.requests = 0
        #: Each round has its own, which is empty.
        self.counters: list[str] = []

    async def until(self, acknowledged: int, end: Callable[[], None]) -> None:
        """Send from several clients; *end* the service after so many acknowledged requests."""
        goal = self.requests + acknowledged
        self.counters.append(f"budget {len(self.counters)}")

        def at_goal() -> None:
            if self.requests == goal:
                end()

        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(self._client(at_goal))

    async def _client(self, acknowledged: Callable[[], None]) -> None:
        async with self.server.client() as rest:
            while True:
                sent = self._draw()
                for ask in (self.begin, self.finish):
                    try:
                        await ask(rest, sent, copies=self.random.choice((1, 1, 2)))
                    except httpx.TransportError:
                        return
                    self.requests += 1
                    acknowledged()

    def _draw(self) -> Sent:
        amount = self.random.randrange(1, 9)
        body = {"amount": amount, "at_most": MOST, "idempotency_token": on_wire(new_token())}
        body["expires_in"] = self.random.choice(("1s", "30s"))
        settles = self.random.choice((None, 0, 1, amount, amount))
        counter = self.counters[-1]
        self.sent.append(Sent(counter, body, settles, is_left=self.random.random() < 0.2))
        return self.sent[-1]

    async def begin(self, rest: Rest, sent: Sent, copies: int = 1) -> None:
        path = rest.path(sent.counter, "holds")
        for answer in await _all_of(rest.post(path, sent.body) for _ in range(copies)):
            found = answer.json()
            if answer.status_code == 201:
                assert not any((sent.end, sent.refusal, sent.is_void)), (sent, found)
                hold = rest.path(verb=f"holds/{found['hold']}")
                assert sent.path in ("", hold)
                sent.path = hold
            elif found["code"] == "bound_reached":
                refusal = [found.get(name) for name in ("count", "held", "room")]
                assert sent.refusal in (None, refusal), (sent, found)
                assert not any((sent.path, sent.end, sent.is_void)), (sent, found)
                sent.refusal = refusal
            elif found["applied"] is False and found["code"] == "token_too_old":
                assert not any((sent.path, sent.end, sent.refusal)), (sent, found)
                sent.is_void = True
            else:
                _record_end(sent, found)

    async def finish(self, rest: Rest, sent: Sent, copies: int = 1) -> None:
        """Settle or release a hold that has begun, unless it is left alone."""
        if not sent.path or sent.is_left:
            return
        verb, end, body = "release", ("released", 0), None
        if sent.settles is not None:
            verb, end, body = "settle", ("settled", sent.settles), {"amount": sent.settles}
        work = (rest.post(f"{sent.path}/{verb}", body) for _ in range(copies))
        for answer in await _all_of(work):
            if answer.status_code == 200:
                sent.ended(end)
            else:
                _record_end(sent, answer.json())

    async def settle(self) -> None:
        """Send again whatever has no definite answer, and compare all that the service says."""
        async with self.server.client() as rest:

            async def all_known() -> bool:
                for sent in self.sent:
                    if not sent.is_decided:
                        await self.begin(rest, sent)
                    elif sent.end is None:
                        await self.finish(rest, sent)
                return all(
                    each.is_decided and (each.end or each.is_left or not each.path)
                    for each in self.sent
                )

            await eventually(all_known, "every hold gets a definite answer")
            refused = [each for each in self.sent if each.refusal]
            for sent in refused[-_AGAIN:]:
                await self.begin(rest, sent)
            await eventually(lambda: self._adds_up(rest), "counted and held add up")

    async def _adds_up(self, rest: Rest) -> bool:
        """Whether nothing has expired meanwhile. Every hold is found as it was answered."""
        held: Counter[str] = Counter()
        for sent in self.sent:
            if sent.path:
                found = (await rest.http.get(sent.path)).json()
                if found["state"] == "open":
                    assert sent.end is None, (sent, found)
                    held[sent.counter] += found["amount"]
                else:
                    sent.ended((found["state"], found.get("settled", 0)))
        is_same = True
        for name in self.counters:
            shown = (await rest.get(name, "0s")).json()
            now_held = shown.get("held", 0)
            assert shown["count"] == self.settled(name)
            assert shown["count"] <= shown["count"] + now_held <= MOST
            is_same = is_same and now_held == held[name]
        return is_same

    def settled(self, counter: str) -> int:
        return sum(each.end[1] for each in self.sent if each.end and each.counter == counter)

    async def check_rolled_up(self, rest: Rest) -> None:
        """Once the watermark has passed the last end, the rolled-up count says the same."""
        for name in self.counters:

            async def is_rolled_up(name: str = name) -> bool:
                answer = (await rest.get(name, "10m")).json()
                is_whole: bool = answer["count"] == self.settled(name)
                return is_whole and answer["accuracy"] == "eventual"

            await eventually(is_rolled_up, f"{name} is rolled up")


async def _all_of(work: Iterable[Awaitable[httpx.Response]]) -> list[httpx.Response]:
    """All responses, the acknowledged first, because any may have been the first. Raises what any
    request raised, when all are done."""
    done = await asyncio.gather(*work, return_exceptions=True)
    for each in done:
        if isinstance(each, BaseException):
            raise each
    answers = [each for each in done if isinstance(each, httpx.Response)]
    return sorted(answers, key=lambda each: each.status_code)


def _record_end(sent: Sent, problem: Json) -> None:
    """Note the end of a hold, if *problem* says that it has one."""
    if problem["code"] in _ENDS:
        sent.ended((_ENDS[problem["code"]], problem.get("settled", 0)))
    else:
        assert problem["retry"] == "same_token", problem


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["sqlite", "postgresql"], indirect=True)
async def test_every_hold_ends_once_whenever_the_service_is_killed(
    tmp_path: Path, flags: Mapping[str, str]
) -> None:
    """The rollup and the worker that ends expired holds are in the process."""
    seed = seed_of("CRASH_SEED")
    async with serving(tmp_path / "data", tmp_path / "logs", **flags) as server:
        load = Load(server, seed)
        # Over PostgreSQL no files are recovered.
        for _ in range(2 if flags else ROUNDS):
            await load.until(load.random.randrange(1, 400), server.kill)
            await server.start()
            await load.settle()
        async with server.client() as rest:
            await load.check_rolled_up(rest)
        assert await server.stop() == 0
        assert "Traceback" not in server.all_errors()
