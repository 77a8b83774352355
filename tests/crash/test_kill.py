"""kill -9 at any instant under load: every acknowledged add is there, exactly once."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from counter.bounds import Bounds
from counter.types import Token
from tests.support.model import Model, Send
from tests.support.rest import Rest, new_token
from tests.support.seeds import seed_of
from tests.support.server import Server, serving
from tests.support.times import to_us
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("child_processes")


#: Kills, and the most acknowledged requests before each. Only SQLite's files are recovered, and the
#: local engine of DynamoDB is slow.
ROUNDS = {"sqlite": 5, "postgresql": 2, "dynamodb": 2}
REQUESTS = {"sqlite": 400, "postgresql": 400, "dynamodb": 80}
_CANCELLED = 0.2
_BOUNDED = 0.25
#: Bounded adds of each outcome that are sent again after each kill.
_AGAIN = 40
CLIENTS = 6
COUNTERS = [f"c{number}" for number in range(5)]
#: A counter with nothing but bounded adds of more than 0, and its bound.
FULL, MOST = "full", Bounds(at_most=60)


class Load:
    """Clients that send, hedge and count acknowledged adds, until the service is gone."""

    def __init__(self, server: Server, seed: int, flags: Mapping[str, str]) -> None:
        self.server = server
        self.store = flags.get("store", "sqlite")
        self.keeps_bounds = self.store != "dynamodb"
        self.random = random.Random(seed)
        self.model = Model()
        #: Sent, and no definite answer yet.
        self.unknown: list[Send] = []
        self.requests = 0
        #: Sent to be cancelled, and no definite answer yet.
        self.uncancelled: list[Send] = []

    async def until(self, acknowledged: int, end: Callable[[], None]) -> None:
        """Send from several clients; *end* the service after so many acknowledged requests."""
        goal = self.requests + acknowledged

        def at_goal() -> None:
            if self.requests == goal:
                end()

        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(self._client(at_goal))

    async def _client(self, acknowledged: Callable[[], None]) -> None:
        async with self.server.client() as rest:
            while True:
                sends = self._draw()
                self.unknown += sends
                work = [self._request(rest, sends) for _ in range(self.random.choice((1, 1, 2)))]
                try:
                    answers = await asyncio.gather(*work, return_exceptions=True)
                    for answer in answers:
                        if isinstance(answer, BaseException):
                            raise answer
                        self._record(sends, answer)
                except httpx.TransportError:
                    return
                self.requests += 1
                acknowledged()
                try:
                    await self._cancel_one(rest, sends)
                except httpx.TransportError:
                    return

    async def _cancel_one(self, rest: Rest, sends: list[Send]) -> None:
        """Cancel one of the *sends*, acknowledged or refused, sometimes."""
        send = self.random.choice(sends)
        is_known = send.scope in self.model.applied or send.scope in self.model.refused
        if is_known and self.random.random() < _CANCELLED:
            self.uncancelled.append(send)
            await self._cancel(rest, send)

    async def _cancel(self, rest: Rest, send: Send) -> None:
        kind = {} if send.atomic else {"operation": "add"}
        answer = await rest.post(_path(rest, send, "cancel"), send.body | kind)
        found = answer.json()
        if "status" in found:
            assert found["retry"] == "same_token", found
            return
        self.model.cancel(send, found["was_counted"], time.time_ns() // 1_000)
        self.uncancelled.remove(send)

    def _draw(self) -> list[Send]:
        """One single add, one atomic add, or a batch; of any kind, bounded ones."""
        names = self.random.sample(COUNTERS, 3)
        kind = self.random.randrange(4)
        if self.keeps_bounds and self.random.random() < _BOUNDED:
            number = 1 if kind < 2 else self.random.randrange(2, 6)
            return [self._bounded(atomic=kind == 0) for _ in range(number)]
        if kind == 0:
            items = tuple((name, self.random.randrange(-5, 6)) for name in names)
            return [Send(self._token(), items, atomic=True)]
        number = 1 if kind == 1 else self.random.randrange(2, 12)
        return [
            Send(self._token(), ((self.random.choice(names), self.random.randrange(-5, 6)),))
            for _ in range(number)
        ]

    def _bounded(self, *, atomic: bool) -> Send:
        items = tuple((FULL, self.random.randrange(1, 6)) for _ in range(1 + atomic))
        return Send(self._token(), items, atomic=atomic, bounds=MOST)

    def _token(self) -> Token:
        return new_token()

    async def _request(self, rest: Rest, sends: list[Send]) -> list[Any]:
        """A response for each of *sends*: the body of an acknowledgement, or a problem."""
        first = sends[0]
        if len(sends) == 1:
            answer = await rest.post(_path(rest, first, "add"), first.body)
        else:
            answer = await rest.batch_add([each.as_item for each in sends])
            assert answer.status_code == 200, answer.text
            results: list[Any] = answer.json()["results"]
            return results
        return [answer.json()]

    def _record(self, sends: list[Send], answers: list[Any]) -> None:
        for send, answer in zip(sends, answers, strict=True):
            if "status" not in answer:
                self.model.apply(send)
            elif answer["code"] == "bound_reached":
                assert answer["applied"] is False
                assert answer["count"] + sum(delta for _, delta in send.items) > answer["at_most"]
                why = answer["counter"], answer["count"], answer["at_most"], answer["room"]
                self.model.refuse(send, why)
            elif answer["applied"] is False:
                assert answer["code"] == "token_too_old", answer
                self.model.never(send)
            else:
                assert answer["retry"] == "same_token", answer
                continue
            if send in self.unknown:
                self.unknown.remove(send)

    async def settle(self) -> None:
        """Send whatever is unknown again, with the same token, until the response is definite."""
        async with self.server.client() as rest:

            async def all_known() -> bool:
                await self._send_again(rest, self.unknown)
                return not self.unknown

            async def all_cancelled() -> bool:
                for send in list(self.uncancelled):
                    await self._cancel(rest, send)
                return not self.uncancelled

            await eventually(all_cancelled, "every cancel gets a definite answer")
            await eventually(all_known, "every token gets a definite answer")
            await self._check_cancelled(rest)
            await self._check_bounded(rest)

    async def _send_again(self, rest: Rest, sends: Sequence[Send]) -> None:
        """Send each of *sends* alone, a few at once."""
        left = list(sends)

        async def client() -> None:
            while left:
                send = left.pop()
                self._record([send], await self._request(rest, [send]))

        await asyncio.gather(*(client() for _ in range(CLIENTS)))

    async def _check_cancelled(self, rest: Rest) -> None:
        """Every retry of what is cancelled is refused."""
        for send, was_counted, _ in list(self.model.cancelled.values()):
            [answer] = await self._request(rest, [send])
            assert answer["code"] == "token_cancelled", (answer, was_counted)

    async def _check_bounded(self, rest: Rest) -> None:
        """No count is past its bound, and every retry gets the answer that the first one got."""
        assert 0 <= await rest.count(FULL) <= (MOST.at_most or 0)
        bounded = [each for each in self.model.applied.values() if each.bounds == MOST]
        refused = [each for each, _ in self.model.refused.values()]
        some = self.random.sample(bounded, min(len(bounded), _AGAIN))
        await self._send_again(rest, some + refused[-_AGAIN:])


def _path(rest: Rest, send: Send, verb: str) -> str:
    return rest.path(verb=f"atomic/{verb}") if send.atomic else rest.path(send.counter, verb)


async def check_events(rest: Rest, model: Model) -> None:
    """The log holds each applied token once, and nothing else."""
    for counter in (*COUNTERS, FULL):
        events = await rest.events(counter, limit=1_000)
        refused = [event for event in events if "refused" in event]
        found = Counter(
            (to_us(event["event_time"]), event["delta"], False)
            for event in events
            if event not in refused
        )
        assert found == Counter(model.events(counter)), counter
        deltas = [(to_us(event["event_time"]), event["refused"]["delta"]) for event in refused]
        assert sorted(deltas) == model.refusals(counter)
        identities = {
            (event["event_time"], event["event_id"], event["event_item_key"]) for event in events
        }
        assert len(identities) == len(events)
        assert await rest.count(counter) == model.count(counter)


async def check_rolled_up(rest: Rest, model: Model) -> None:
    """Once the watermark has passed the last event, the rolled-up count says the same."""
    for counter in (*COUNTERS, FULL):
        # A count that was cached before a cancel is as of an earlier instant.
        cancels = [cancelled_us for _, _, cancelled_us in model.cancelled.values()]
        last_us = max([*(time_us for time_us, _, _ in model.events(counter)), *cancels], default=0)

        async def rolled_up(counter: str = counter, last_us: int = last_us) -> int | None:
            answer = (await rest.get(counter, "10m")).json()
            is_past = answer["accuracy"] == "eventual" and to_us(answer["as_of"]) >= last_us
            return int(answer["count"]) if is_past else None

        count = await eventually(rolled_up, f"the watermark passes the last event of {counter}")
        assert count == model.count(counter), counter


@pytest.mark.slow
async def test_every_acknowledged_add_survives_kill_9_exactly_once(
    tmp_path: Path, flags: Mapping[str, str]
) -> None:
    seed = seed_of("CRASH_SEED")
    async with serving(tmp_path / "data", tmp_path / "logs", **flags) as server:
        load = Load(server, seed, flags)
        for _ in range(ROUNDS[load.store]):
            await load.until(load.random.randrange(1, REQUESTS[load.store]), server.kill)
            await server.start()
            await load.settle()
            async with server.client() as rest:
                await check_events(rest, load.model)
        async with server.client() as rest:
            await check_rolled_up(rest, load.model)
        assert await server.stop() == 0
        await server.start()
        async with server.client() as rest:
            await check_events(rest, load.model)
            await check_rolled_up(rest, load.model)
        assert "Traceback" not in server.all_errors()


async def test_requests_in_flight_at_sigterm_are_answered_or_retried(
    tmp_path: Path, flags: Mapping[str, str]
) -> None:
    """A graceful end acknowledges accepted adds; the rest is as after a crash."""
    seed = seed_of("CRASH_SEED")
    async with serving(tmp_path / "data", tmp_path / "logs", **flags) as server:
        load = Load(server, seed, flags)
        await load.until(50, server.terminate)
        assert await server.ended() == 0
        await server.start()
        await load.settle()
        async with server.client() as rest:
            await check_events(rest, load.model)


#: On a busy machine the first add after a start can take longer than half a second.
_PATIENT: Mapping[str, str] = {"accept_limit": "30s"}


@pytest.mark.parametrize("file", ["lock", "counter.db", "counter.db-wal"])
async def test_a_first_start_that_is_killed_can_be_done_again(tmp_path: Path, file: str) -> None:
    path = tmp_path / "data" / file
    server = Server(tmp_path / "data", tmp_path / "logs", _PATIENT)
    try:
        await server.kill_once(path.exists, f"{file} is there")
        await server.start()
        async with server.client() as rest:
            answer = await rest.add("c", 1, new_token())
            assert answer.status_code == 200, answer.text
    finally:
        server.clean_up()


async def test_an_idle_service_survives_kill_9_at_once_after_its_start(tmp_path: Path) -> None:
    async with serving(tmp_path / "data", tmp_path / "logs", **_PATIENT) as server:
        for _ in range(3):
            server.kill()
            await server.start()
        async with server.client() as rest:
            answer = await rest.add("c", 1, new_token())
            assert answer.status_code == 200
            assert await rest.count("c") == 1
