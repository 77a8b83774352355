"""Three nodes, memcached, two API processes, two rollup workers: one of each kind is killed with
``kill -9`` under load and brought back. Every acknowledged add is counted exactly once, every other
at most once, and what any process said for certain about a token all of them say for ever."""

import asyncio
import os
import random
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from counter.tokens import TokenGenerator
from scripts.cluster_nodes import Cluster
from scripts.demo_process import HOST, CounterProcess, free_ports
from tests.support.model import Model, Send
from tests.support.rest import Rest, item
from tests.support.times import to_us
from tests.support.waiting import eventually

CLIENTS = 6
COUNTERS = [f"c{number}" for number in range(8)]
#: Definite answers between two strokes.
STEP = 60
#: Tokens that are asked about again in the end; each is resolved by compare-and-set.
AGAIN = 100
#: So many of them at once.
AT_ONCE = 20
#: Sends kept for later answers are bounded: past it a client waits for the next stroke.
SENDS_MAX = 2_000
#: Small windows, so that late tokens are decided while the test looks on.
STORE_FLAGS = {
    "store": "cassandra",
    "replication": "3",
    "retention": "1h",
    "slice": "10m",
    "write_timeout": "1s",
    "clock_skew_max": "250ms",
}
API_FLAGS = {"rollup_window": "1s", "accept_limit": "2s", "shards": "4"}


class Service:
    """The processes over one keyspace of a cluster."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        points = [f"{each}:{cluster.shape.cassandra_port}" for each in cluster.contact_points]
        keyspace = f"chaos_{uuid.uuid4().hex[:12]}"
        store = STORE_FLAGS | {"contact_points": ",".join(points), "keyspace": keyspace}
        cached = store | {"cache": cluster.memcached_url, "lease_time": "3s"}
        ports = free_ports(2)
        self.urls = [f"http://{HOST}:{port}" for port in ports]
        self.folder = folder
        self.schema = self._process("schema", ["schema", "apply"], store, "")
        self.api = [
            self._process(
                f"api-{port}", ["serve"], cached | API_FLAGS | {"port": str(port)}, "Serving on "
            )
            for port in ports
        ]
        self.workers = [
            self._process(f"rollup-{number}", ["rollup"], cached, "Rolling up")
            for number in range(2)
        ]

    def _process(
        self, name: str, command: list[str], flags: dict[str, str], sign: str
    ) -> CounterProcess:
        given = [f"--{flag.replace('_', '-')}={value}" for flag, value in flags.items()]
        return CounterProcess(name, [*command, *given], self.folder / f"{name}.log", sign)

    async def start(self) -> None:
        """All at once: they contend for what the first of them makes."""
        await self.schema.run()
        await asyncio.gather(*(each.start() for each in (*self.api, *self.workers)))

    async def stop(self) -> None:
        """Ask all to end: each must, and with exit code 0."""
        for each in (*self.api, *self.workers):
            await each.stop()

    async def destroy(self) -> None:
        for each in (self.schema, *self.api, *self.workers):
            await each.destroy()

    def logs(self) -> str:
        """Everything that every process wrote."""
        return "".join(path.read_text(errors="replace") for path in self.folder.glob("*.log"))


class Load:
    """Clients that send, hedge, hang up, ask again and read, and believe what they are told."""

    def __init__(self, rests: list[Rest], seed: int) -> None:
        self.rests = rests
        self.random = random.Random(seed)
        self.generator = TokenGenerator()
        self.model = Model()
        self.sent: list[Send] = []
        #: Sent, and no definite answer yet.
        self.unknown: dict[tuple[object, ...], Send] = {}
        self.definite = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Send from several clients until *stop* is set."""
        async with asyncio.TaskGroup() as clients:
            for _ in range(CLIENTS):
                clients.create_task(self._client(stop))

    async def _client(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            deed = self.random.choices((self._send, self._ask_again, self._read), (6, 2, 1))[0]
            await deed()
            # At full speed they would only starve the server that is being started.
            await asyncio.sleep(self.random.uniform(0.0, 0.03))

    async def _send(self) -> None:
        """Something new: to one process, to both, or not waiting for the answer."""
        if len(self.sent) > SENDS_MAX:
            await self._ask_again()
            return
        sends = self._draw()
        self.sent += sends
        self.unknown |= {send.scope: send for send in sends}
        first, second = self.random.sample(self.rests, 2)
        manner = self.random.choices(("hedge", "single", "hang up"), (6, 3, 1))[0]
        if manner == "hang up":
            try:
                async with asyncio.timeout(self.random.uniform(0.0, 0.03)):
                    await self._tell(first, sends)
            except TimeoutError:
                return
        elif manner == "hedge":
            delay_s = self.random.uniform(0.0, 0.02)
            await asyncio.gather(self._tell(first, sends), self._tell(second, sends, delay_s))
        else:
            await self._tell(first, sends)

    async def _ask_again(self) -> None:
        """One that was sent before, whatever is known of it, at whichever process."""
        if self.sent:
            choose_from = list(self.unknown.values()) or self.sent
            send = self.random.choice(self.random.choice((choose_from, self.sent)))
            await self._tell(self.random.choice(self.rests), [send])

    async def _read(self) -> None:
        """An exact count lies between what was acknowledged before and what was ever sent."""
        counter = self.random.choice(COUNTERS)
        least = self.model.count(counter)
        try:
            answer = await self.random.choice(self.rests).get(counter, "0s")
        except httpx.TransportError:
            return
        if answer.status_code == httpx.codes.OK:
            sends = [each for each in self.sent if each.scope not in self.model.void]
            most = sum(delta for each in sends for name, delta in each.items if name == counter)
            assert least <= answer.json()["count"] <= most, (counter, answer.json())
        else:
            assert answer.status_code == httpx.codes.SERVICE_UNAVAILABLE, answer.text

    def _draw(self) -> list[Send]:
        """One single add, one atomic add, or a batch."""
        names = self.random.sample(COUNTERS, 3)
        kind = self.random.randrange(4)
        if kind == 0:
            items = tuple((name, self.random.randrange(1, 6)) for name in names)
            return [Send(self.generator.next(), items, atomic=True)]
        number = 1 if kind == 1 else self.random.randrange(2, 12)
        return [
            Send(self.generator.next(), ((self.random.choice(names), self.random.randrange(1, 6)),))
            for _ in range(number)
        ]

    async def _tell(self, rest: Rest, sends: list[Send], delay_s: float = 0.0) -> None:
        """Send to one process and note what it says; an answer that is lost says nothing."""
        await asyncio.sleep(delay_s)
        try:
            answers = await _request(rest, sends)
        except httpx.TransportError:
            # Nobody there: a client that goes on at full speed would only starve the others.
            await asyncio.sleep(self.random.uniform(0.0, 0.1))
            return
        for send, answer in zip(sends, answers, strict=True):
            self._record(send, answer)

    def _record(self, send: Send, answer: Any) -> None:
        if "status" not in answer:
            self.model.apply(send)
        elif answer["applied"] is False:
            assert answer["code"] == "token_too_old", answer
            self.model.never(send)
        else:
            assert (answer["applied"], answer["retry"]) == (None, "same_token"), answer
            return
        self.definite += 1
        self.unknown.pop(send.scope, None)

    async def settle(self) -> None:
        """Ask about whatever is unknown until every token has a definite answer."""

        async def all_known() -> bool:
            sends = list(self.unknown.values())
            await self._ask_about([(self.random.choice(self.rests), send) for send in sends])
            return not self.unknown

        await eventually(all_known, "every token gets a definite answer", seconds=60)

    async def ask_again(self) -> None:
        """Some tokens once more, at both processes: the model refuses an answer that has changed.

        All but the latest are late by now, so that each is resolved, and not merely written again.
        """
        void = [send for send in self.sent if send.scope in self.model.void]
        chosen = void[:AGAIN] + self.random.sample(self.sent, min(AGAIN, len(self.sent)))
        for rest in self.rests:
            await self._ask_about([(rest, send) for send in chosen])

    async def _ask_about(self, asked: list[tuple[Rest, Send]]) -> None:
        """Send each again to whom it stands with, a few at once."""
        for start in range(0, len(asked), AT_ONCE):
            part = asked[start : start + AT_ONCE]
            await asyncio.gather(*(self._tell(rest, [send]) for rest, send in part))


async def _request(rest: Rest, sends: list[Send]) -> list[Any]:
    """An answer for each of *sends*: the body of an acknowledgement, or a problem."""
    first = sends[0]
    if first.atomic:
        answer = await rest.atomic_add(first.items, first.token)
    elif len(sends) == 1:
        answer = await rest.add(first.counter, first.delta, first.token)
    else:
        answer = await rest.batch_add(
            [item(each.counter, each.delta, each.token) for each in sends]
        )
        if answer.status_code == httpx.codes.OK:
            results: list[Any] = answer.json()["results"]
            return results
    return [answer.json()] * len(sends)


class Chaos:
    """Kills one server of each kind and starts it again, in an order that the seed draws."""

    def __init__(self, cluster: Cluster, service: Service, load: Load, seed: int) -> None:
        self._load = load
        self._random = random.Random(seed)
        node, cache = self._random.choice(cluster.cassandra), cluster.memcached[0]
        api, worker = self._random.choice(service.api), self._random.choice(service.workers)
        self._strokes: dict[str, tuple[Callable[[], Awaitable[Any]], ...]] = {
            node.name: (_in_thread(node.kill), _in_thread(node.start)),
            cache.name: (_in_thread(cache.kill), _in_thread(cache.start)),
            "one API process": (api.kill, api.start),
            "one worker": (worker.kill, worker.start),
        }

    async def run(self, stop: asyncio.Event) -> None:
        """All kills, then all starts, each kind in an order of its own, and *stop* at the end."""
        for stroke, what in enumerate(("kill", "start")):
            names = list(self._strokes)
            self._random.shuffle(names)
            for name in names:
                await self._load_goes_on()
                print(f"{what} {name} after {self._load.definite} answers")
                await self._strokes[name][stroke]()
        await self._load_goes_on()
        stop.set()

    async def _load_goes_on(self) -> None:
        goal = self._load.definite + STEP

        async def reached() -> bool:
            return self._load.definite >= goal

        await eventually(reached, "adds go on with a server of each kind down", seconds=60)


def _in_thread(work: Callable[[], object]) -> Callable[[], Awaitable[object]]:
    return lambda: asyncio.to_thread(work)


@asynccontextmanager
async def running(cluster: Cluster, folder: Path) -> AsyncIterator[Service]:
    """The processes, started; gone at the end."""
    service = Service(cluster, folder)
    try:
        await service.start()
        yield service
    finally:
        await service.destroy()


async def check_counts(rest: Rest, model: Model) -> None:
    """The log holds each applied token once and nothing else, and both kinds of count say so."""
    for counter in COUNTERS:
        events = await rest.events(counter, limit=1_000)
        found = Counter((to_us(event["event_time"]), event["delta"], False) for event in events)
        assert found == Counter(model.events(counter)), counter
        assert await rest.count(counter, "0s") == model.count(counter), counter
        last_us = max(time_us for time_us, _, _ in model.events(counter))

        async def rolled_up(counter: str = counter, last_us: int = last_us) -> int | None:
            answer = (await rest.get(counter, "10m")).json()
            is_past = answer["accuracy"] == "eventual" and to_us(answer["as_of"]) >= last_us
            return int(answer["count"]) if is_past else None

        count = await eventually(rolled_up, f"the rollup passes the last add to {counter}")
        assert count == model.count(counter), counter


@pytest.mark.slow
async def test_one_of_each_kind_may_die_under_load(breakable: Cluster, tmp_path: Path) -> None:
    seed = int(os.environ.get("CHAOS_SEED", random.randrange(2**32)))
    print(f"CHAOS_SEED={seed}")
    async with running(breakable, tmp_path) as service, AsyncExitStack() as stack:
        clients = [
            httpx.AsyncClient(base_url=url, timeout=10.0, trust_env=False) for url in service.urls
        ]
        rests = [Rest(await stack.enter_async_context(client)) for client in clients]
        load = Load(rests, seed)
        chaos = Chaos(breakable, service, load, seed)
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load.run(stop))
            tasks.create_task(chaos.run(stop))
        print(f"{len(load.unknown)} of {len(load.sent)} tokens are not known about yet")
        await load.settle()
        for rest in rests:
            await check_counts(rest, load.model)
        print(f"{len(load.model.void)} tokens are void; some are asked about again")
        await load.ask_again()
        for rest in rests:
            await check_counts(rest, load.model)
        await service.stop()
        assert "Traceback" not in service.logs()
