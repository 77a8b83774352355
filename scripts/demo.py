"""Counts every name in Python's own standard library, for real, and compares each count.

Over a million adds go through the batch endpoint of a real service. Clients time out, hedge, repeat
and overtake each other, and the servers are killed with ``kill -9``. In the end every counter must
equal that of ``collections.Counter``.

Over SQLite the service is one process. Over PostgreSQL, and over three nodes of Cassandra with
memcached, it is two API processes and two rollup workers, and the servers are killed too.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import json
import random
import shutil
import signal
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from itertools import count, cycle
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import httpx
from cyclopts import App, Parameter
from cyclopts.validators import Number

from counter.clock import to_rfc3339, to_us
from counter_client import AsyncCounterClient, Count, CounterError, Options
from scripts.cluster_nodes import Shape, dies_with_us, make_temporary
from scripts.cluster_process import ClusterError, ServerProcess
from scripts.library_names import read_names
from scripts.postgresql_server import PostgresqlServer
from scripts.service_process import HOST, CounterProcess, ServiceError, free_ports

ADD_PATH: Final = "/v1/namespaces/default/batch/add"
REQUEST_TIMEOUT_S: Final = 10.0
#: The minimum number of batches, so that faults happen even with few names.
BATCHES_MIN: Final = 200
#: Bound of waiting batches; while so many wait, no new ones are made.
WAITING_MAX: Final = 64
ACCEPT_LIMIT_S: Final = 5.0
HEDGE_S_MAX: Final = 0.02
LATE_S: Final = ACCEPT_LIMIT_S + 1.0
#: One of so many batches in the first part of the run is late on purpose: a client that follows the
#: protocol has to wait until it is resolved.
LATE_EVERY: Final = 250
LATE_UNTIL: Final = 0.6
_RETRY_AFTER_S: Final = 1.0
_JSON: Final = {"Content-Type": "application/json"}
_POLL_S: Final = 0.02

#: How long everything may take to be counted, and then to be rolled up.
COUNTING_TIMEOUT_S: Final = 900.0
ROLLUP_TIMEOUT_S: Final = 180.0
CLIENTS: Final = 8
REPEATED_SHARE_MIN: Final = 0.2
#: Counters that were never written: so many that every shard has one of them, nearly always.
PROBES: Final = 200
EXACT: Final = "0s"
ROLLED_UP: Final = "1h"
#: Rows of the table of counts.
TOP: Final = 15
#: Three nodes on a small machine write some thousand rows a second, so only a part is counted.
CASSANDRA_OCCURRENCES: Final = 150_000

say: Final = partial(print, flush=True)
Store = Literal["sqlite", "postgresql", "cassandra"]
Result = dict[str, Any]
#: A result per item, or how long the client waits after a send whose outcome is unknown.
Reply = list[Result] | float


class DemoError(Exception):
    """A response contradicts the protocol."""


class State(IntEnum):
    """A client's knowledge of one add."""

    UNKNOWN = 0
    #: It counts by an earlier send.
    REPLAYED = 1
    #: It counts by this send, or is known to count from an earlier response.
    COUNTED = 2
    VOID = 3


@dataclass(slots=True)
class Faults:
    """The faults of one batch; None for no fault."""

    #: The network delays it: later batches arrive earlier.
    delay_s: float | None = None
    #: The client disconnects this long after sending, without the reply, and waits to retry.
    give_up_s: float | None = None
    retry_s: float = 0.0
    #: The same batch is sent on a second connection, this long after the first.
    hedge_s: float | None = None
    #: The same batch is sent again, this long after its response.
    duplicate_s: float | None = None


@dataclass(slots=True)
class Batch:
    """Adds that are sent together: each one's name and JSON, the same in every attempt."""

    names: Sequence[str]
    items: Sequence[str]
    faults: Faults
    #: The outcomes of all its adds before it is sent.
    known: State = State.UNKNOWN

    def pick(self, positions: Sequence[int], faults: Faults, known: State = State.UNKNOWN) -> Batch:
        """Return a batch of some of these adds, their tokens unchanged."""
        names = [self.names[position] for position in positions]
        items = [self.items[position] for position in positions]
        return Batch(names, items, faults, known)


def draw_faults(number: int, batches: int, *, hedge: bool) -> Faults:
    """Draw the faults of batch *number*: at least every fourth is hedged or duplicated, and all are
    hedged with *hedge*."""
    faults = Faults(retry_s=random.uniform(0.0, 0.5))
    if number % 4 == 0 or random.random() < 0.05:
        if random.random() < 0.5:
            faults.hedge_s = random.uniform(0.0, HEDGE_S_MAX)
        else:
            faults.duplicate_s = random.uniform(0.0, 3.0)
    if hedge:
        faults.hedge_s = random.uniform(0.0, HEDGE_S_MAX)
    if random.random() < 0.15:
        faults.delay_s = random.uniform(0.05, 3.0)
    if random.random() < 0.08:
        faults.give_up_s = random.uniform(0.0, 0.1)
    if number % LATE_EVERY == LATE_EVERY // 3 and number < LATE_UNTIL * batches:
        if random.random() < 0.5:
            # Never arrived in time: to be voided.
            faults.delay_s, faults.give_up_s = LATE_S, None
        else:
            # Arrived, but the response is lost: to be found.
            faults.give_up_s, faults.retry_s = 0.5, LATE_S
    return faults


class Outbox:
    """Gives the clients what to send next: what is due to be sent again, else a new batch.

    A token is made for each occurrence when its batch is made. While WAITING_MAX batches wait, or a
    tenth of all, nothing new is made.
    """

    def __init__(self, occurrences: Sequence[str], batch_items: int, *, hedge_all: bool) -> None:
        self._occurrences = occurrences
        self._hedge_all = hedge_all
        self._size = max(1, min(batch_items, len(occurrences) // BATCHES_MIN))
        self._starts = list(range(0, len(occurrences), self._size))
        random.shuffle(self._starts)
        self._new = self._batches()
        self._waiting: list[tuple[float, int, Batch]] = []
        self._ticket = count()
        self._in_hand = 0
        self.batches = len(self._starts)
        self.adds = len(occurrences)
        #: The time of the newest token.
        self.latest_us = 0

    def make(self, names: Sequence[str], faults: Faults) -> Batch:
        """Make a batch of adds with new tokens."""
        return Batch(names, [self._item(name) for name in names], faults)

    def push(self, batch: Batch, delay_s: float) -> None:
        """Hand the batch out, but not before *delay_s* have passed."""
        due_s = time.monotonic() + delay_s
        heapq.heappush(self._waiting, (due_s, next(self._ticket), batch))

    async def take(self) -> Batch | None:
        """The next batch; None when all are done. Each one taken must be released."""
        while True:
            due_in_s = self._waiting[0][0] - time.monotonic() if self._waiting else _POLL_S
            if self._waiting and due_in_s <= 0:
                self._in_hand += 1
                return heapq.heappop(self._waiting)[2]
            has_room = len(self._waiting) < max(1, min(WAITING_MAX, self.batches // 10))
            if has_room and (batch := next(self._new, None)) is not None:
                self.push(batch, batch.faults.delay_s or 0.0)
            elif not self._waiting and not self._in_hand:
                return None
            else:
                await asyncio.sleep(min(due_in_s, _POLL_S))

    def release(self) -> None:
        """Finish a batch; a rest of it must have been pushed again."""
        self._in_hand -= 1

    def _batches(self) -> Iterator[Batch]:
        for number, start in enumerate(self._starts):
            names = self._occurrences[start : start + self._size]
            yield self.make(names, draw_faults(number, self.batches, hedge=self._hedge_all))

    def _item(self, name: str) -> str:
        nonce, self.latest_us = uuid.uuid4().bytes, time.time_ns() // 1_000
        token = {"token": nonce.hex(), "generation_time": to_rfc3339(self.latest_us)}
        return json.dumps({"counter": name, "delta": 1, "idempotency_token": token})


@dataclass(slots=True)
class Tally:
    """The events by their names in the report, and how often the adds of each name were sent."""

    events: Counter[str] = field(default_factory=Counter)
    adds_done: int = 0
    contradictions: list[str] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)
    collapsed: Counter[str] = field(default_factory=Counter)


class Client:
    """One of several clients that empty the outbox, each with its own connections."""

    def __init__(
        self, urls: Sequence[str], outbox: Outbox, tally: Tally, progress: Callable[[], None]
    ) -> None:
        # A hedge goes to another process than the first attempt.
        self._urls = cycle(url + ADD_PATH for url in random.sample(urls, len(urls)))
        self._http = httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, trust_env=False)
        self._outbox = outbox
        self._tally = tally
        self._events = tally.events
        self._progress = progress

    async def run(self) -> None:
        """Send until nothing is left. Raises DemoError at a response that cannot be followed."""
        async with self._http:
            while (batch := await self._outbox.take()) is not None:
                await self._deal_with(batch)
                self._outbox.release()

    async def _deal_with(self, batch: Batch) -> None:
        faults = batch.faults
        if faults.give_up_s is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(faults.give_up_s):
                    await self._send(batch)
            self._events["client time-outs injected"] += 1
            faults.give_up_s = None
            self._outbox.push(batch, faults.retry_s)
            return
        sends = [self._send(batch)]
        if faults.hedge_s is not None:
            self._events["hedges sent"] += 1
            sends.append(self._send(batch, faults.hedge_s))
            faults.hedge_s = None
        replies = await asyncio.gather(*sends)
        busy_s = max((reply for reply in replies if isinstance(reply, float)), default=0.0)
        self._settle(batch, [reply for reply in replies if isinstance(reply, list)], busy_s)
        # A client with a busy service starts nothing else.
        await asyncio.sleep(busy_s)

    async def _send(self, batch: Batch, delay_s: float = 0.0) -> Reply:
        await asyncio.sleep(delay_s)
        self._events["batch requests sent"] += 1
        self._tally.sent.update(batch.names)
        body = '{"items":[' + ",".join(batch.items) + "]}"
        try:
            response = await self._http.post(next(self._urls), content=body, headers=_JSON)
        except httpx.ConnectError:
            self._events["connections refused"] += 1
            self._events["batch requests sent"] -= 1
            self._tally.sent.subtract(batch.names)
            return random.uniform(0.1, 0.3)
        except httpx.TransportError:
            self._events["replies lost to a kill"] += 1
            return random.uniform(0.1, 0.3)
        if response.status_code != httpx.codes.OK:
            self._events["batches refused for a while (503)"] += 1
            return retry_after(read_problem(response))
        results: list[Result] = response.json()["results"]
        if len(results) != len(batch.names):
            raise DemoError(f"{len(results)} results for {len(batch.names)} items")
        return results

    def _settle(self, batch: Batch, responses: Sequence[list[Result]], wait_s: float) -> None:
        """Process the results of each response, and push the rest."""
        states = [batch.known] * len(batch.names)
        for results in responses:
            for position, result in enumerate(results):
                wait_s = max(wait_s, self._judge(batch, position, result, states))
        if batch.known is State.UNKNOWN:
            self._follow_up(batch, states, wait_s)
        elif not responses:
            self._outbox.push(batch, wait_s)

    def _judge(self, batch: Batch, position: int, result: Result, states: list[State]) -> float:
        """Record one result in *states*, and return how long it asks to wait."""
        state = states[position]
        if "code" not in result:
            # None if the service cannot know: then it is the first, unless known otherwise.
            replayed = result["replayed"]
            if replayed or (replayed is None and state is State.COUNTED):
                self._tally.collapsed[result["counter"]] += 1
            states[position] = (state or State.REPLAYED) if replayed else State.COUNTED
            is_wrong = state is State.VOID or (replayed is False and state is State.COUNTED)
            is_wrong = is_wrong or result["counter"] != batch.names[position]
        elif result["applied"] is None and result["retry"] == "same_token":
            is_pending = result["code"] == "token_pending"
            what = "had to wait (token_pending)" if is_pending else "with an unknown outcome"
            self._events[f"adds {what}"] += 1
            return retry_after(result)
        elif result["applied"] is False and result["retry"] == "new_token":
            states[position] = State.VOID
            is_wrong = state in (State.REPLAYED, State.COUNTED)
        else:
            raise DemoError(f"{batch.items[position]} was answered with {result}")
        if is_wrong:
            self._tally.contradictions.append(
                f"{batch.items[position]}, known as {batch.known.name}: {result}"
            )
        return 0.0

    def _follow_up(self, batch: Batch, states: Sequence[State], wait_s: float) -> None:
        """Retry adds without a definite result, and voided ones under a new token."""
        unknown, void, counted = (
            [position for position, state in enumerate(states) if state in wanted]
            for wanted in ((State.UNKNOWN,), (State.VOID,), (State.REPLAYED, State.COUNTED))
        )
        self._tally.adds_done += len(counted)
        self._progress()
        left = Faults(duplicate_s=batch.faults.duplicate_s)
        if counted and left.duplicate_s is not None:
            self._events["duplicates sent"] += 1
            self._outbox.push(batch.pick(counted, Faults(), State.COUNTED), left.duplicate_s)
            left = Faults()
        if unknown:
            self._outbox.push(batch.pick(unknown, left), wait_s)
        if void:
            self._events["new tokens after a void"] += len(void)
            names = [batch.names[position] for position in void]
            self._outbox.push(self._outbox.make(names, Faults() if unknown else left), 0.0)
            # A definite result must stay true: the voided tokens are sent again.
            self._outbox.push(batch.pick(void, Faults(), State.VOID), _RETRY_AFTER_S)


def retry_after(problem: Result) -> float:
    """The seconds that a problem asks to wait before the same token is sent again."""
    return float(problem.get("retry_after", _RETRY_AFTER_S))


def read_problem(response: httpx.Response) -> Result:
    """Return the problem of a rejected request if it can be retried.

    Raises DemoError otherwise.
    """
    try:
        problem: Result = response.json()
    except ValueError:
        problem = {}
    if not response.is_server_error and problem.get("retry") != "same_token":
        raise DemoError(f"HTTP {response.status_code}: {response.text[:1_000]}")
    return problem


class Server:
    """A server of the store or the cache, with blocking calls: each runs in a thread."""

    def __init__(self, process: ServerProcess) -> None:
        self.name = process.name
        self._process = process
        self._is_up = True

    async def start(self) -> None:
        await asyncio.to_thread(self._process.start)
        self._is_up = True

    async def kill(self) -> None:
        self._is_up = False
        if not await asyncio.to_thread(self._process.kill):
            raise self._ended()

    async def watch(self) -> None:
        """Run until cancelled. Raises ServiceError if it ends unexpectedly."""
        while True:
            if self._is_up and self._process.pid() is None:
                raise self._ended()
            await asyncio.sleep(0.2)

    async def destroy(self) -> None:
        self._is_up = False
        await asyncio.to_thread(self._process.kill)

    def _ended(self) -> ServiceError:
        return ServiceError(f"{self.name} ended by itself; its log is {self._process.log}")


@dataclass(frozen=True, slots=True)
class Outage:
    """Kill *server* when the share *at* of the adds is done; start it again *down_s* later."""

    server: Server | CounterProcess
    at: float
    down_s: float


@dataclass(frozen=True, slots=True)
class Deployment:
    """A service of one or more processes, and the servers that they share."""

    #: One address for each API process.
    urls: Sequence[str]
    processes: Sequence[CounterProcess]
    #: In the order of time for each server.
    outages: Sequence[Outage]
    servers: Sequence[Server] = ()
    #: Holds the servers' folders, and nothing else; None without servers.
    directory: Path | None = None
    #: Starts the servers, and waits until they can take a schema.
    start_servers: Callable[[], object] = tuple
    #: Applies the schema before the other processes start.
    schema: CounterProcess | None = None
    #: How many occurrences are counted unless the command line says it; None for all.
    limit: int | None = None
    batch_items: int = 500
    #: Send every batch to two processes at once, not only some.
    hedge_all: bool = False

    @property
    def _everything(self) -> Sequence[Server | CounterProcess]:
        return (*self.servers, *self.processes)

    def guarded(self) -> AbstractContextManager[None]:
        """Kill the servers at the end of the block, or when this process ends in any way.

        It must be around the event loop, which waits at its end for threads that still start a
        server.
        """
        return nullcontext() if self.directory is None else dies_with_us(self.directory)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start everything; end the running servers after the block."""
        async with AsyncExitStack() as stack:
            for each in self._everything:
                stack.push_async_callback(each.destroy)
            await asyncio.to_thread(self.start_servers)
            if self.schema is not None:
                stack.push_async_callback(self.schema.destroy)
                await self.schema.run()
            for process in self.processes:
                await process.start()
            yield

    async def watch(self) -> None:
        """Run until cancelled. Raises ServiceError if anything ends unexpectedly."""
        await asyncio.gather(*(each.watch() for each in self._everything))


def _over_sqlite(folder: Path) -> Deployment:
    (port,) = free_ports(1)
    arguments = ["serve", "--host", HOST, "--port", str(port), "--data", str(folder / "data")]
    service = CounterProcess("the service", arguments, folder / "service.log", "Serving on ")
    # The second time it is down for longer than the accept limit: adds that were in flight then
    # come late and have to be resolved.
    outages = [Outage(service, at, down_s) for at, down_s in ((0.25, 0), (0.5, 6), (0.75, 0))]
    return Deployment([f"http://{HOST}:{port}"], [service], outages)


def _over_postgresql(folder: Path) -> Deployment:
    """One server, killed twice: it is back at once, then after longer than the accept limit."""
    # The server's user, which is not root, must reach its files.
    folder.chmod(0o711)
    postgresql = PostgresqlServer(folder / "servers" / "postgresql")
    server = Server(postgresql)
    flags = ["--store", "postgresql"]
    service = _processes(folder, flags, environment={"COUNTER_DSN": postgresql.dsn()})
    return replace(
        service,
        outages=[Outage(server, 0.2, 0), Outage(server, 0.7, 8), *service.outages],
        servers=[server],
        directory=folder / "servers",
        start_servers=postgresql.start,
    )


def _over_cassandra(folder: Path) -> Deployment:
    """Three nodes and memcached: a node and memcached are killed, some of the time both."""
    cluster = make_temporary(folder / "cluster", Shape(nodes=3, memcached=1, quick=True))
    port = cluster.shape.cassandra_port
    flags = [
        *("--store", "cassandra", "--replication", "3"),
        *("--contact-points", ",".join(f"{each}:{port}" for each in cluster.contact_points)),
        *("--write-consistency", "LOCAL_QUORUM", "--read-consistency", "LOCAL_QUORUM"),
    ]
    servers = [Server(each) for each in cluster.servers]
    *nodes, memcached = servers
    service = _processes(folder, flags, ["--cache", cluster.memcached_url])
    return replace(
        service,
        outages=[
            Outage(random.choice(nodes), 0.2, 15),
            Outage(memcached, 0.3, 5),
            *service.outages,
        ],
        servers=servers,
        directory=cluster.directory,
        start_servers=cluster.start,
        limit=CASSANDRA_OCCURRENCES,
        batch_items=100,
        hedge_all=True,
    )


def _processes(
    folder: Path,
    store: Sequence[str],
    cache: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Deployment:
    """Two API processes and two rollup workers over one store.

    An API process is away for longer than the accept limit, and a worker for longer than its leases
    last.
    """

    def process(name: str, sign: str, *arguments: str) -> CounterProcess:
        log = folder / f"{name}.log"
        return CounterProcess(name, [*arguments, *store], log, sign, environment=environment)

    ports = free_ports(2)
    common = (*cache, "--host", HOST)
    apis = [
        process(f"api-{n}", "Serving on ", "serve", "--port", str(port), *common)
        for n, port in enumerate(ports, 1)
    ]
    workers = [process(f"rollup-{n}", "Rolling up", "rollup", *common) for n in (1, 2)]
    return Deployment(
        [f"http://{HOST}:{port}" for port in ports],
        [*apis, *workers],
        [Outage(random.choice(apis), 0.4, 8), Outage(random.choice(workers), 0.6, 15)],
        schema=process("schema", "", "schema", "apply"),
    )


def differing(truth: Mapping[str, int], readings: Mapping[str, Count]) -> list[str]:
    """Return the counters that were counted wrong."""
    return [name for name, number in truth.items() if readings[name].count != number]


class Demo:
    """One run: count the names with injected faults, read the counters back, compare."""

    def __init__(self, names: Sequence[str], deployment: Deployment) -> None:
        self._truth = Counter(names)
        self._deployment = deployment
        self._outbox = Outbox(names, deployment.batch_items, hedge_all=deployment.hedge_all)
        self._tally = Tally()
        self._due = {outage.at: asyncio.Event() for outage in deployment.outages}
        self._tenths = 0
        self._restarted: Counter[str] = Counter()
        self._probe = count()

    async def run(self) -> bool:
        """Whether every count is right and every fault was really injected."""
        task = asyncio.current_task()
        for number in (signal.SIGTERM, signal.SIGHUP):
            if task is not None:
                asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        async with self._deployment.running():
            say(f"serving on {' and '.join(self._deployment.urls)}")
            begin_s = time.monotonic()
            await self._count()
            counting_s = time.monotonic() - begin_s
            urls, options = self._deployment.urls, Options(trust_env=False)
            async with AsyncCounterClient(urls, options=options) as self._client:
                exact = await self._read(list(self._truth), EXACT)
                say("waiting for the rollup to pass the last add")
                rolled_up = await self._read_rolled_up()
            self._show_counts(exact, rolled_up)
            self._show_events(counting_s)
            problems = [*self._problems(exact, rolled_up)]
            try:
                for process in self._deployment.processes:
                    await process.stop()
            except ServiceError as error:
                problems.append(str(error))
        for problem in problems:
            say(f"FAILED: {problem}")
        if not problems:
            say(f"Every one of {len(self._truth):,} counters is exact.")
        return not problems

    async def _count(self) -> None:
        """Send everything while servers are killed and restarted."""
        try:
            async with asyncio.timeout(COUNTING_TIMEOUT_S), asyncio.TaskGroup() as tasks:
                outages = [
                    [each for each in self._deployment.outages if each.server is server]
                    for server in {each.server: None for each in self._deployment.outages}
                ]
                work = [tasks.create_task(self._break(each)) for each in outages]
                for _ in range(CLIENTS):
                    client = Client(
                        self._deployment.urls, self._outbox, self._tally, self._progress
                    )
                    work.append(tasks.create_task(client.run()))
                watch = tasks.create_task(self._deployment.watch())
                await asyncio.wait(work)
                watch.cancel()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        except TimeoutError:
            raise DemoError(
                f"not done after {COUNTING_TIMEOUT_S:.0f} s: {self._tally.events}"
            ) from None

    def _progress(self) -> None:
        """Show each tenth of the adds, and begin the outages that are due."""
        done, adds = self._tally.adds_done, self._outbox.adds
        if (tenths := 10 * done // adds) > self._tenths:
            self._tenths = tenths
            say(f"counted {done:,} of {adds:,}")
        for share, due in self._due.items():
            if done >= share * adds:
                due.set()

    async def _break(self, outages: Iterable[Outage]) -> None:
        """Kill one server at its times, and restart it each time."""
        for outage in outages:
            server = outage.server
            await self._due[outage.at].wait()
            # During a batch, not between two.
            await asyncio.sleep(random.uniform(0.0, 0.2))
            await server.kill()
            pause = f", and down for {outage.down_s:.0f} s" if outage.down_s else ""
            say(f"kill -9 of {server.name}{pause}")
            await asyncio.sleep(outage.down_s)
            await server.start()
            say(f"{server.name} runs again")
            self._restarted[server.name] += 1

    async def _read(self, counters: Sequence[str], max_staleness: str) -> dict[str, Count]:
        """Return the count of every counter."""
        found: dict[str, Count] = {}
        items = self._deployment.batch_items
        for start in range(0, len(counters), items):
            part = counters[start : start + items]
            for each in await self._client.get_many(part, max_staleness=max_staleness):
                found[each.counter] = each
        return found

    async def _read_rolled_up(self) -> dict[str, Count]:
        """Wait until the rollup has passed the last add, and read all counters.

        A cached count from before that instant is given the time to expire; one that is exact as
        of then and wrong is not.
        """
        truth, latest_us = self._truth, self._outbox.latest_us
        deadline_s = time.monotonic() + ROLLUP_TIMEOUT_S
        while await self._watermark_us() < latest_us:
            if time.monotonic() > deadline_s:
                raise DemoError(f"no rollup passed the last add within {ROLLUP_TIMEOUT_S:.0f} s")
            await asyncio.sleep(0.25)
        found = await self._read(list(truth), ROLLED_UP)
        while time.monotonic() < deadline_s:
            wrong = differing(truth, found)
            stale = [name for name in wrong if to_us(found[name].as_of) < latest_us]
            if not stale:
                break
            await asyncio.sleep(1)
            found.update(await self._read(stale, ROLLED_UP))
        return found

    async def _watermark_us(self) -> int:
        """Return the time up to which everything is rolled up: counters that were never written
        show it, each for its shard. Their names are new each time, so that no cache answers."""
        names = [f"the demo's probe {next(self._probe)}" for _ in range(PROBES)]
        found = await self._read(names, ROLLED_UP)
        return min(to_us(each.as_of) for each in found.values())

    def _problems(
        self, exact: Mapping[str, Count], rolled_up: Mapping[str, Count]
    ) -> Iterable[str]:
        """Yield the problems of counting, and the number of wrong counts."""
        tally, adds = self._tally, self._outbox.adds
        if tally.adds_done != adds:
            yield f"{tally.adds_done:,} of {adds:,} adds were acknowledged"
        if found := tally.contradictions:
            yield f"{len(found)} results contradict earlier ones; the first: {found[0]}"
        repeated = tally.events["duplicates sent"] + tally.events["hedges sent"]
        if (share := repeated / self._outbox.batches) < REPEATED_SHARE_MIN:
            yield f"{share:.1%} of the batches were duplicated or hedged: too few"
        planned = Counter(outage.server.name for outage in self._deployment.outages)
        if self._restarted != planned:
            yield f"killed and started again: {self._restarted}; planned: {planned}"
        for what, readings in (("exact as of now", exact), ("rolled up", rolled_up)):
            if wrong := differing(self._truth, readings):
                yield f"{len(wrong):,} counters differ when read {what}"

    def _show_counts(self, exact: Mapping[str, Count], rolled_up: Mapping[str, Count]) -> None:
        """Show the most frequent names, as many that were counted wrong, and the sums of all."""
        truth, tally = self._truth, self._tally
        rows = {
            name: (
                *(number, tally.sent[name], tally.collapsed[name]),
                *(exact[name].count, rolled_up[name].count),
            )
            for name, number in truth.items()
        }
        top = [name for name, _ in truth.most_common(TOP)]
        wrong = (differing(truth, exact) + differing(truth, rolled_up))[:TOP]
        columns = ("truth", "sent", "collapsed", "counted", "rolled up", "difference")
        say(f"\n{'name':<20}" + "".join(f"{column:>12}" for column in columns))
        for name in dict.fromkeys(top + wrong):
            _show_row(name, rows[name])
        sums = [sum(column) for column in zip(*rows.values(), strict=True)]
        _show_row(f"all {len(truth):,}", sums)

    def _show_events(self, counting_s: float) -> None:
        """Show the events on the way."""
        adds = self._outbox.adds
        numbers = {
            "adds": adds,
            "batches": self._outbox.batches,
            **dict(sorted(self._tally.events.items())),
            "adds collapsed into an earlier one": self._tally.collapsed.total(),
            **{f"kill -9 and restart: {name}": n for name, n in self._restarted.items()},
            "adds per second": round(adds / counting_s),
        }
        say("")
        for what, number in numbers.items():
            say(f"{what:<40}{number:>12,}")
        say("")


def _show_row(name: str, row: Sequence[int]) -> None:
    """Show one row: it begins with the truth, and ends with the two counts to compare with it."""
    off = max((number - row[0] for number in row[-2:]), key=abs)
    difference = f"{off:+,}" if off else "0"
    say(f"{name:<20}" + "".join(f"{number:>12,}" for number in row) + f"{difference:>12}")


def main(
    *,
    limit: Annotated[int | None, Parameter(validator=Number(gte=1))] = None,
    store: Store = "sqlite",
) -> int:
    """Count every name in Python's standard library with injected faults, and compare each count.

    Parameters
    ----------
    limit
        Count only the first so many occurrences. [all; 150,000 with cassandra]
    store
        The service's store. With postgresql the demo runs a server, two API processes and two
        rollup workers, with cassandra three nodes at QUORUM and memcached instead of the server;
        it kills one of each kind.
    """
    folder = Path(tempfile.mkdtemp(prefix="counter-demo-"))
    failed = False
    try:
        over = {"sqlite": _over_sqlite, "postgresql": _over_postgresql}
        deployment = over.get(store, _over_cassandra)(folder)
        names = read_names(limit or deployment.limit)
        if not names:
            raise DemoError("the standard library holds no Python files to count")
        say(f"{len(names):,} occurrences of {len(set(names)):,} names; the store is {store}")
        # Millions of long-lived strings: exclude them from garbage collection.
        gc.freeze()
        with deployment.guarded():
            failed = not asyncio.run(Demo(names, deployment).run())
    except (DemoError, ServiceError, ClusterError, CounterError) as error:
        say(f"FAILED: {error}")
        failed = True
    except (KeyboardInterrupt, asyncio.CancelledError):
        say("interrupted")
        return 130
    finally:
        if failed:
            say(f"The data and the logs of the service are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    App(default_command=main, help_format="plaintext", version_flags=())()
