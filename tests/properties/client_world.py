"""Clients that crash, on a bad network, with disks that are full, before an exact small service.

All of it runs in virtual time and is drawn by a seed: the adds, what becomes of each request and
answer, each client's clock, and the SQL statement of a spool at which a client is killed.
"""

import asyncio
import json
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any
from uuid import UUID

import httpx
import pytest

import counter_client.spool as spools
from counter_client import (
    AsyncCounterClient,
    CounterError,
    Options,
    Sending,
    Watch,
    aio,
    buffer,
    delivery,
    retrying,
    tokens,
    transport,
)
from counter_client.addresses import Endpoints
from counter_client.failures import RejectedError, Unfinished, UnknownOutcomeError, UnsentError
from counter_client.tokens import parse_rfc3339, to_rfc3339
from tests.client.script import added_body
from tests.properties.client_holds import Holds, use
from tests.simulation.loop import _PROCESS, Process, SimulatedLoop

SECOND = 1_000_000
EPOCH_US = 1_790_000_000 * SECOND
#: When every fault has ended.
CALM_S = 240.0
#: Adds to one counter: add k is 4**k, so that the count says how often each is counted.
ADDS_MAX = 30


class Killed(BaseException):
    """The process was killed here."""


class Loop(SimulatedLoop):
    """Work for a thread takes a drawn time, and is done at once at its end."""

    def __init__(self, draw: Random) -> None:
        super().__init__(draw)
        self.draw = draw

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> Any:
        done = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except Killed:
                return
            except BaseException as error:
                if not done.cancelled():
                    done.set_exception(error)
            else:
                if not done.cancelled():
                    done.set_result(result)

        self.call_later(self.draw.choice((0.0, 0.001, 0.3)), work)
        return done


class Service:
    """The outcome of a token, exactly: counted once, void, or not decided yet."""

    def __init__(
        self, loop: Loop, draw: Random, seen: Counter[str], rates: dict[str, float]
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.accept_us = int(draw.choice((0.05, 1, 5, 30)) * SECOND)
        self.grace_us = 2 * SECOND
        self.retention_us = draw.choice((60, 3_600, 36_000)) * SECOND
        self.items_max = draw.choice((1, 3, 1_000))
        self.seen = seen
        self._loop, self._draw, self._rates = loop, draw, rates
        #: The purpose of each token, and whether it counts.
        self._fates: dict[str, tuple[Any, bool]] = {}
        self._done: set[str] = set()
        self._given = 0
        self._holds = Holds(self)

    @property
    def now_us(self) -> int:
        return EPOCH_US + self._loop.now_us

    @property
    def is_calm(self) -> bool:
        return self._loop.time() > CALM_S

    def happens(self, what: str) -> bool:
        """Whether this fault happens now."""
        return not self.is_calm and self._draw.random() < self._rates[what]

    def answer(self, operation: str, path: str, body: Any) -> tuple[int, Any]:
        """The status and the body of the response to one request that arrived."""
        if operation == "tokens":
            now = to_rfc3339(self.now_us)
            made = [
                {"token": str(UUID(int=self._next())), "generation_time": now}
                for _ in range(body["count"])
            ]
            return 200, {"tokens": made}
        if self.happens("busy"):
            code, status = self._draw.choice((("overloaded", 503), ("rate_limited", 429)))
            self.seen[code] += 1
            return status, problem(code, "same_token", retry_after=self._draw.choice((0, 1, 3)))
        if operation.startswith("holds/"):
            _, hold, verb = operation.split("/")
            return self._holds.end(hold, verb, body)
        if path.endswith("/holds"):
            return self._holds.begin(path.split("/")[-2], body)
        if operation == "batch/add":
            if len(body["items"]) > self.items_max:
                return 400, problem("invalid_body", "never", field="items")
            results = [
                self.one(each["idempotency_token"], {each["counter"]: each["delta"]})
                for each in body["items"]
            ]
            return 200, {"results": [found for _, found in results]}
        if operation == "atomic/add":
            items = {each["counter"]: each["delta"] for each in body["items"]}
            token = body["idempotency_token"]
            status, found = self.one(token, items)
            if status == 200:
                return 200, {"results": [added_body(*each, token) for each in items.items()]}
            return status, found
        return self.one(body["idempotency_token"], {path.split("/")[-2]: body["delta"]})

    def later(self, land: Callable[..., None], *given: Any) -> None:
        """Have a write land within a minute."""
        self._loop.at(self._draw.randrange(60 * SECOND), land, *given)

    def _next(self) -> int:
        self._given += 1
        return self._given

    def one(self, token: dict[str, str], what: dict[str, int]) -> tuple[int, Any]:
        nonce, time_us = UUID(token["token"]).hex, parse_rfc3339(token["generation_time"])
        key, age_us = f"{nonce}@{time_us}", self.now_us - time_us
        if age_us > self.retention_us:
            self.seen["forgotten"] += 1
            return 410, problem("token_too_old", "never")
        payload, counted = self._fates.get(key, (what, None))
        if counted is not None and payload != what:
            raise AssertionError(f"token {key} was used for {payload} and for {what}")
        if counted:
            self.seen["replayed"] += 1
        elif counted is False or age_us > self.accept_us + self.grace_us:
            self._fates[key] = what, False
            self.seen["void"] += 1
            return 410, problem("token_too_old", "new_token", applied=False)
        elif age_us < -5 * SECOND:
            self.seen["in future"] += 1
            return 400, problem("token_in_future", "same_token", retry_after=1)
        elif age_us > self.accept_us:
            self.seen["pending"] += 1
            return 503, problem("token_pending", "same_token", retry_after=1)
        elif self.happens("write timed out"):
            self.seen["write timed out"] += 1
            if self._draw.random() < 0.7:
                # It lands before the token can be void.
                left_us = self.accept_us + self.grace_us - max(0, age_us)
                self._loop.at(self._draw.randrange(left_us), self._count, key, what)
            return 503, problem("write_timeout", "same_token")
        else:
            self._count(key, what)
        [(counter, delta), *_] = what.items()
        return 200, added_body(counter, delta, token)

    def _count(self, key: str, what: dict[str, int]) -> None:
        _, counted = self._fates.setdefault(key, (what, True))
        if not counted:
            raise AssertionError(f"a write of the void token {key} landed")
        if key not in self._done:
            self._done.add(key)
            self.counts.update(what)


def problem(code: str, retry: str, **more: Any) -> dict[str, Any]:
    return {"code": code, "retry": retry, "applied": None, "detail": code, **more}


class Network(httpx.AsyncBaseTransport):
    """Loses, delays, repeats and refuses requests, and loses and delays answers."""

    def __init__(self, world: "World") -> None:
        self._world = world

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        world, draw = self._world, self._world.draw
        path, body = request.url.path, json.loads(request.content or b"null")
        operation = path.partition("/default/")[2] if "/default/" in path else "tokens"
        if operation.startswith("counters/"):
            operation = "add"
        # One that is refused for good is so however often a proxy sends it.
        is_gone = world.service.happens("gone")
        back: asyncio.Future[httpx.Response] = asyncio.get_running_loop().create_future()

        def arrive(answers: bool) -> None:
            status, found = 404, problem("namespace_unknown", "never")
            if not is_gone:
                status, found = world.service.answer(operation, path, body)
            if answers and not back.done():
                content = json.dumps(found).encode()
                if world.service.happens("proxy"):
                    # A proxy answers in place of the service.
                    world.seen["page of a proxy"] += 1
                    status, content = draw.choice((502, 200, 404)), b"<html>"
                ttl = str(world.service.retention_us // SECOND - 1)
                headers = {"idempotency-ttl": ttl, "content-type": "application/json"}
                response = httpx.Response(status, headers=headers, stream=httpx.ByteStream(content))
                late_us = world.delay_us()
                world.loop.at(late_us, give, back, response)

        if world.is_in(world.outages):
            world.seen["outage"] += 1
            if draw.random() < 0.5:
                raise httpx.ConnectError("refused")
            raise httpx.ReadError("cut") if draw.random() < 0.5 else httpx.ConnectTimeout("away")
        fate = draw.choice(FATES) if world.service.happens("network") else "none"
        if fate != "none":
            world.seen[fate] += 1
        if is_gone:
            world.seen["namespace_unknown"] += 1
        process = _PROCESS.get()
        if process is not None and world.service.happens("killed while it sends"):
            world.seen["killed while it sends"] += 1
            world.loop.at(world.delay_us(), world.kill, process)
        if fate == "refused":
            raise httpx.ConnectError("refused")
        if fate != "request lost":
            world.loop.at(world.delay_us(), arrive, fate != "answer lost")
        if fate == "repeated":
            world.loop.at(world.delay_us() + draw.randrange(60 * SECOND), arrive, False)
        if fate in ("request lost", "answer lost") and draw.random() < 0.5:
            await asyncio.sleep(0.5)
            raise httpx.ReadError("cut")
        return await back


def give(back: asyncio.Future[httpx.Response], response: httpx.Response) -> None:
    if not back.done():
        back.set_result(response)


FATES = ("refused", "request lost", "answer lost", "repeated")
#: How often each fault may happen; each world draws its own rates.
RATES = {
    "busy": (0, 0.1, 0.3),
    "write timed out": (0, 0.2, 0.5),
    "gone": (0, 0, 0.1, 0.3),
    "proxy": (0, 0, 0.2),
    "network": (0, 0.2, 0.6),
    "killed while it sends": (0, 0, 0.05, 0.2),
    "killed": (0, 0, 0.01, 0.05),
}


@dataclass
class Add:
    """One add of a program, and its reported outcome."""

    counter: str
    delta: int
    #: ``made``, ``durable`` (it must count), ``counted``, ``never``, or ``unknown``.
    reported: str = "made"


def is_part(totals: Counter[str], add: Add) -> bool:
    return bool(totals[add.counter] // add.delta % 4)


@dataclass
class World:
    """All of one run."""

    seed: int
    draw: Random = field(init=False)
    seen: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.draw = Random(self.seed)
        self.loop = Loop(self.draw)
        self.rates = {name: self.draw.choice(each) for name, each in RATES.items()}
        self.service = Service(self.loop, self.draw, self.seen, self.rates)
        self.adds: dict[str, list[Add]] = {}
        self.unfinished: list[tuple[Unfinished, list[Add]]] = []
        #: The spool's connections of each process, with their files.
        self.open: dict[Process, list[tuple[sqlite3.Connection, Path]]] = {}
        self.skews_us: dict[Process, int] = {}
        self.ends: dict[Process, asyncio.Future[None]] = {}
        self.is_slow = self.draw.random() < 0.5
        #: When no server can be reached, and when the disk is full.
        self.outages, self.full = self.windows(), self.windows()
        parent = Path("/dev/shm")
        self.place = Path(mkdtemp(prefix="clients-", dir=parent if parent.is_dir() else None))

    def windows(self) -> list[tuple[float, float]]:
        """A few spans of time."""
        begins = [self.draw.choice((0, 1, 3, 10, 40)) for _ in range(self.draw.randrange(3))]
        return [(begin, begin + self.draw.choice((0.5, 5, 60))) for begin in begins]

    def is_in(self, windows: list[tuple[float, float]]) -> bool:
        return any(begin <= self.loop.time() < end for begin, end in windows)

    def delay_us(self) -> int:
        slow = self.is_slow and not self.service.is_calm
        return self.draw.choice((1_000, 20_000, 3 * SECOND if slow else 50_000))

    # The disk.

    def kill(self, process: Process, torn: tuple[Path, int] | None = None) -> None:
        """End *process* as kill -9 does: its files stay as they are now, and its locks go."""
        if not process.alive:
            return
        process.crash()
        self.ends[process].set_result(None)
        left: dict[Path, bytes | None] = {}
        held = self.open.pop(process, [])
        for _, path in held:
            for each in (path.with_name(path.name + end) for end in ("", "-wal", "-journal")):
                left[each] = each.read_bytes() if each.exists() else None
        if torn is not None:
            wal, size = torn
            left[wal] = (left[wal] or b"")[:size]
        for connection, _ in held:
            connection.close()
        for each, content in left.items():
            if content is not None:
                each.write_bytes(content)
            else:
                each.unlink(missing_ok=True)

    def step(self, connection: "Shaky", sql: str, do: Callable[[], Any]) -> Any:
        """Execute a statement of a spool, or be killed, or find the disk full."""
        process = _PROCESS.get()
        if process is None or not process.alive:
            return do()
        if self.service.happens("killed"):
            self.seen["killed before a statement"] += 1
            self.kill(process)
            raise Killed
        is_write = sql.startswith(("INSERT", "UPDATE", "DELETE", "COMMIT", "CREATE"))
        if is_write and self.is_in(self.full):
            self.seen["disk full"] += 1
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        if sql != "COMMIT" or not (
            self.service.happens("killed") or self.service.happens("killed")
        ):
            return do()
        wal = connection.path.with_name(connection.path.name + "-wal")
        before = wal.stat().st_size if wal.exists() else 0
        do()
        after = wal.stat().st_size if wal.exists() else 0
        self.seen["killed in a commit"] += 1
        size = self.draw.choice((after, self.draw.randint(min(before, after), after)))
        self.kill(process, (wal, size))
        raise Killed

    # The program.

    def new(self, counter: str) -> Add | None:
        """The next add to *counter*, or None if it has enough."""
        made = self.adds.setdefault(counter, [])
        if len(made) == ADDS_MAX:
            return None
        made.append(Add(counter, 4 ** len(made)))
        return made[-1]

    def times(self, add: Add) -> int:
        """How often *add* is counted now."""
        return self.service.counts[add.counter] // add.delta % 4

    def check(self, is_right: bool, what: str) -> None:
        if not is_right:
            self.wrong.append(f"at {self.loop.time():.3f}: {what}")

    def counted(self, adds: list[Add], why: str) -> None:
        """*why* says that *adds* are counted: they must be."""
        for each in adds:
            self.check(self.times(each) == 1, f"{why}, but {each} counts {self.times(each)} times")
            each.reported = "counted"

    def mark(self, counter: str, total: int, reported: str) -> None:
        """Every add that is a part of *total* was reported as *reported*."""
        for each in self.adds.get(counter, []):
            if total // each.delta % 4 and each.reported != "counted":
                each.reported = reported

    async def call(self, adds: list[Add], work: Any, unfinished_of: Any = None) -> None:
        """Await *work*, a call that makes *adds* under one token, and judge its result."""
        try:
            await work
        except UnknownOutcomeError as error:
            self.note_unknown(error, adds)
        except CounterError as error:
            self.seen[f"refused {type(error).__name__}"] += 1
            for each in adds:
                each.reported = "never"
        else:
            self.counted(adds, "the call returned")

    def note_unknown(self, error: UnknownOutcomeError, adds: list[Add]) -> None:
        self.seen["unknown outcome"] += 1
        for each in adds:
            each.reported = "unknown"
        if error.sent:
            self.unfinished.append((error.unfinished, adds))
        else:
            self.seen["not sent"] += 1
            for each in adds:
                each.reported = "never"

    def note_attempt(self, sending: Sending) -> Watch:
        """Note whether it is another one of its call."""
        if sending.hedged:
            self.seen["hedged"] += 1
        elif sending.number:
            self.seen["retried"] += 1
        return Watch()

    def client(self, process: Process) -> AsyncCounterClient:
        draw = self.draw
        options = Options(
            trust_env=False,
            deadline_s=draw.choice((2.0, 30.0)),
            attempt_timeout_s=draw.choice((0.5, 5.0)),
            backoff_first_s=draw.choice((0.01, 0.5)),
            hedge_after_s=draw.choice((None, None, 0.03, "p95")),
            before_attempt=self.note_attempt,
        )
        urls = ["http://one", "http://two"][: draw.choice((1, 2))]
        made = AsyncCounterClient(urls, options=options)
        made._transport._http = httpx.AsyncClient(transport=Network(self), headers={})
        return made

    async def life(self, process: Process, name: str) -> None:
        """One life of a program, until it ends or is killed."""
        draw, client = self.draw, self.client(process)
        spool = self.place / "spool" if draw.random() < 0.8 else None
        calls = [
            asyncio.create_task(self.one_call(client, f"{name}-call-{at}"))
            for at in range(draw.randrange(6))
        ]
        made: list[Add] = []
        try:
            delay_s, items_max = draw.choice((0.0, 0.1, 5.0)), draw.choice((3, 99))
            held = client.buffer(spool=spool, max_delay=delay_s, max_items=items_max)
            await held.__aenter__()
        except CounterError:
            self.seen["spool cannot be opened"] += 1
            return
        for _ in range(draw.randrange(1, 25)):
            await self.one_step(held, made, spool is not None, name)
        await asyncio.gather(*calls)
        await self.end(held, made, spool is not None)

    async def one_step(self, held: Any, made: list[Add], durable: bool, name: str) -> None:
        draw = self.draw
        step = draw.choice(("add", "add", "add", "add", "sleep", "sync", "flush"))
        before = list(made)
        try:
            if step == "add":
                if (add := self.new(f"{name}-{draw.randrange(4)}")) is not None:
                    made.append(add)
                    try:
                        async with asyncio.timeout(draw.choice((0.1, 20.0))):
                            await held.add(add.counter, add.delta)
                    except TimeoutError:
                        self.seen["buffer full"] += 1
                        made.remove(add)
                        add.reported = "never"
            elif step == "sleep":
                await asyncio.sleep(draw.choice((0.01, 0.3, 5.0)))
            elif step == "sync":
                await held.sync()
                if durable:
                    self.seen["synced"] += 1
                    for each in before:
                        each.reported = "durable" if each.reported == "made" else each.reported
            else:
                await held.flush(draw.choice((1.0, 100.0)))
                self.seen["flushed"] += 1
                self.counted([x for x in before if x.reported != "unknown"], "the flush returned")
        except RejectedError as error:
            self.note_rejected(error.items)
        except UnsentError as error:
            self.seen["unsent"] += 1
            self.note_rejected(error.rejected)
        except CounterError as error:
            self.seen[f"buffer {type(error).__name__}"] += 1
            if step == "add" and made and made != before:
                made.pop().reported = "never"

    def note_rejected(self, items: Any) -> None:
        for each in items:
            self.seen["rejected"] += 1
            self.mark(each.counter, each.delta, "unknown")

    async def end(self, held: Any, made: list[Add], durable: bool) -> None:
        """Close the buffer, and judge its result."""
        left: Counter[str] = Counter()
        try:
            await held.close(self.draw.choice((0.0, 1.0, 60.0)))
        except RejectedError as error:
            self.note_rejected(error.items)
        except UnsentError as error:
            self.seen["unsent at the end"] += 1
            self.note_rejected(error.rejected)
            if durable:
                return
            for counter, total in error.unsent.items():
                left[counter] += total
                self.mark(counter, total, "never")
            for each in error.unfinished:
                [(counter, delta)] = each.items
                left[counter] += delta
                self.mark(counter, delta, "unknown")
        except CounterError as error:
            self.seen[f"close {type(error).__name__}"] += 1
            return
        sure = [x for x in made if x.reported in ("made", "durable") and not is_part(left, x)]
        self.counted(sure, "the buffer is closed and did not report it")

    async def one_call(self, client: AsyncCounterClient, name: str) -> None:
        draw = self.draw
        await asyncio.sleep(draw.choice((0.0, 1.0, 40.0)))
        kind = draw.choice(("add", "add", "batch", "atomic", "hold", "hold"))
        if kind == "hold":
            await use(self, client, name)
            return
        adds = [add for at in range(3) if (add := self.new(f"{name}-{at}")) is not None]
        if kind == "add":
            await self.call(adds[:1], client.add(adds[0].counter, adds[0].delta))
        elif kind == "atomic":
            await self.call(adds, client.atomic([(x.counter, x.delta) for x in adds]))
        else:
            await self.one_batch(client, adds)

    async def one_batch(self, client: AsyncCounterClient, adds: list[Add]) -> None:
        try:
            results = await client.batch([(x.counter, x.delta) for x in adds])
        except CounterError:
            for each in adds:
                each.reported = "never"
            return
        for each, result in zip(adds, results, strict=True):
            if isinstance(result, UnknownOutcomeError):
                self.note_unknown(result, [each])
            elif isinstance(result, CounterError):
                each.reported = "never"
            else:
                self.counted([each], "the batch returned")

    async def host(self, name: str) -> None:
        """The lives of one machine's program, one after the other."""
        for number in range(self.draw.randrange(1, 4)):
            process = Process(self.loop, f"{name}-{number}")
            self.skews_us[process] = int(self.draw.choice((0, 0, 0.5, -3, -40, 20)) * SECOND)
            task = process.spawn(self.life(process, process.name))
            gone = self.ends[process] = self.loop.create_future()
            lasts_s = self.draw.choice((1.0, 30.0, None))
            await asyncio.wait({task, gone}, timeout=lasts_s, return_when="FIRST_COMPLETED")
            if not task.done() and not gone.done():
                self.seen["killed at a time"] += 1
                self.kill(process)
            if task.done():
                task.result()
                self.open.pop(process, None)

    async def run(self) -> None:
        names = ("a", "b")[: self.draw.choice((1, 2))]
        async with asyncio.timeout(20_000):
            await asyncio.gather(*(self.host(name) for name in names))
            await asyncio.sleep(max(0.0, CALM_S + 70 - self.loop.time()))
            await self.drain()
        self.judge()

    async def drain(self) -> None:
        """Send the adds on the disk, and resolve the unknown ones, over a calm network."""
        process = Process(self.loop, "last")
        await process.spawn(self.last_life())

    async def last_life(self) -> None:
        client = AsyncCounterClient(
            "http://one", options=Options(trust_env=False, deadline_s=600.0)
        )
        client._transport._http = httpx.AsyncClient(transport=Network(self))
        for _ in range(4):
            try:
                async with client.buffer(spool=self.place / "spool") as held:
                    await held.flush(600.0)
                    await asyncio.sleep(130.0)
                    await held.flush(600.0)
            except RejectedError:
                # The slots have the rejected adds.
                self.seen["rejected at last"] += 1
        for unfinished, adds in self.unfinished:
            try:
                found = await client.resolve(unfinished)
            except CounterError as error:
                self.seen[f"resolve {type(error).__name__}"] += 1
                continue
            self.seen[f"resolved {found.applied}"] += 1
            if found.applied:
                self.counted(adds, "it is resolved as applied")
            else:
                for each in adds:
                    each.reported = "never"

    def judge(self) -> None:
        """Compare the counts with the reported outcomes."""
        for path in (self.place / "spool").glob("default.*"):
            if path.suffix[1:].isdigit():
                db = sqlite3.connect(path)
                if not db.execute("SELECT 1 FROM sqlite_master").fetchall():
                    continue
                for counter, delta in db.execute("SELECT counter, delta FROM rejected"):
                    self.mark(counter, delta, "unknown")
                    self.seen["rejected on disk"] += 1
                for table in ("totals", "piece"):
                    rows = db.execute(f"SELECT * FROM {table}").fetchall()
                    self.check(not rows, f"{path.name} still has {rows} in {table}")
                db.close()
        for each in (add for adds in self.adds.values() for add in adds):
            times = self.times(each)
            allowed = {"durable": (1,), "counted": (1,), "never": (0,)}.get(each.reported, (0, 1))
            self.check(times in allowed, f"{each} counts {times} times")
        self.wrong += self.loop.failures

    def close(self) -> None:
        for connection, _ in (each for held in self.open.values() for each in held):
            connection.close()
        self.loop.end()
        shutil.rmtree(self.place)


class Shaky(spools._OfOneProcess):
    """A connection of a spool, each statement of which may be the last of its process."""

    world: World

    def __init__(self, path: Path, *given: Any, **named: Any) -> None:
        super().__init__(path, *given, **named)
        self.path = path
        process = _PROCESS.get()
        if process is not None:
            self.world.open.setdefault(process, []).append((self, path))

    def execute(self, sql: str, *given: Any) -> Any:
        return self.world.step(self, sql, lambda: sqlite3.Connection.execute(self, sql, *given))

    def executemany(self, sql: str, rows: Any, /) -> Any:
        return self.world.step(self, sql, lambda: sqlite3.Connection.executemany(self, sql, rows))


class Clock:
    """The module ``time`` of the client, in virtual time; each process has its own wall clock."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.monotonic = self.perf_counter = world.loop.time

    def time_ns(self) -> int:
        process = _PROCESS.get()
        skew_us = 0 if process is None else self._world.skews_us.get(process, 0)
        return (self._world.service.now_us + skew_us) * 1_000


@contextmanager
def patched(world: World) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(world)
        for module in (aio, buffer, delivery, retrying, spools, tokens, transport):
            patch.setattr(module, "time", clock, raising=False)
        patch.setattr(Endpoints.__init__, "__defaults__", (clock.monotonic,))
        patch.setattr(spools.Spool.__init__, "__defaults__", (clock.monotonic,))
        patch.setattr(retrying, "random", world.draw)
        patch.setattr("os.register_at_fork", lambda **_: None)
        patch.setattr(Shaky, "world", world, raising=False)
        patch.setattr(spools, "_OfOneProcess", Shaky)
        patch.setattr(spools._LOG, "disabled", True)
        yield


def run(seed: int) -> World:
    """Run the world of *seed*; ``wrong`` has the problems."""
    world = World(seed)
    with patched(world):
        try:
            world.loop.run_until_complete(world.run())
        except BaseException as error:
            world.wrong.append(f"at {world.loop.time():.3f}: {error!r}")
        finally:
            world.close()
    return world
