"""Spend the budgets of teams through a gateway that is killed, over networks that lose answers;
compare what is counted with the bill. Amounts are in cents.

It starts all servers itself, in a clone of the repository; ``--redis`` tries Redis, too.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
from gateway import CALL_S, Holds
from lost_answers import Network, together
from redis.asyncio import Redis
from redis.exceptions import RedisError

from counter_client import AsyncCounterClient, CounterError

TEAMS = ("ants", "bees", "cats", "dogs")
#: Of all teams, for each call: three of four calls find room.
BUDGET_PER_CALL = 100
AT_ONCE = 32
#: The shares of the answers that are lost, and of the calls that take too long, fail, are given up
#: when something goes wrong, and are cancelled.
LOST, SLOW, FAILING, GIVEN_UP, CANCELLED = 0.05, 0.01, 0.03, 0.1, 0.03
#: These are killed, at equal distances.
KILLED = ("gateway", "gateway", "ledger", "gateway", "gateway", "ledger", "gateway")
#: What the statuses of the gateway mean; after 503 the same call is sent again.
ANSWERS = {200: "answered", 402: "refused", 410: "failed", 502: "failed"}
_HERE = Path(__file__).parent


class Server:
    """A server process on a free port of this machine, which replaces ``PORT`` in *command*."""

    def __init__(self, *command: str, **environment: str) -> None:
        self.port = _free_port()
        self._command = [each.replace("PORT", str(self.port)) for each in command]
        self._environment = environment
        self._changing = asyncio.Lock()

    @asynccontextmanager
    async def up(self) -> AsyncIterator[Server]:
        """Run it."""
        await self._start()
        try:
            yield self
        finally:
            await self._kill()

    async def kill(self) -> None:
        """End it with SIGKILL, and start it again."""
        async with self._changing:
            await self._kill()
            await self._start()

    async def _start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            cwd=_HERE.parents[1],
            env=os.environ | self._environment,
        )
        while not await self._accepts():
            if self._process.returncode is not None:
                raise SystemExit(f"{' '.join(self._command)} has ended")
            await asyncio.sleep(0.05)

    async def _accepts(self) -> bool:
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.close()
            return True
        return False

    async def _kill(self) -> None:
        self._process.kill()
        await self._process.wait()


def _free_port() -> int:
    """Return a port below those of outgoing connections, or one of them could take it meanwhile."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port := random.randint(20_000, 30_000)))  # noqa: S311
            return port


@dataclass(frozen=True)
class Ledger:
    """Where the budgets are: its server, and what is counted and held for a team."""

    name: str
    server: Server
    app: str
    look: Callable[[str], Awaitable[tuple[int, int]]]
    client: AsyncCounterClient | None = None
    again: str = ""


Opened = Callable[[Path], AbstractAsyncContextManager[Ledger]]


@asynccontextmanager
async def service(folder: Path) -> AsyncIterator[Ledger]:
    """The counter service, over SQLite."""
    command = (sys.executable, "-m", "counter", "serve", "--port=PORT", f"--data={folder}")
    async with Server(*command).up() as server:
        url = f"http://127.0.0.1:{server.port}"
        async with AsyncCounterClient(url, "budgets") as client:
            await client.create_namespace(counter_type="ACCURATE")

            async def look(team: str) -> tuple[int, int]:
                found = await client.get(team)
                return found.count, found.held or 0

            yield Ledger("counter, holds", server, "gateway", look, client)


@asynccontextmanager
async def redis(folder: Path, *, again: str) -> AsyncIterator[Ledger]:
    """Redis, which has each change in its log before it answers."""
    command = ("redis-server", "--port", "PORT", "--dir", str(folder), "--appendonly", "yes")
    async with Server(*command).up() as server, Redis(port=server.port) as client:

        async def look(team: str) -> tuple[int, int]:
            spent, held = await client.hmget(team, ["spent", "held"])
            return int(spent or 0), int(held or 0)

        name = "Redis, scripts, sent again" if again else "Redis, scripts, sent once"
        yield Ledger(name, server, "gateway_over_redis", look, again=again)


@dataclass
class Run:
    """A run over a ledger, and what is seen in it."""

    ledger: Ledger
    calls: int
    seed: int
    results: Counter[str] = field(default_factory=Counter)
    #: Looks at a team, and those that found more spent and held than its budget.
    looks: int = 0
    passed: int = 0

    @property
    def budget(self) -> int:
        """The budget of each team."""
        return self.calls * BUDGET_PER_CALL // len(TEAMS)

    async def leave_calls(self, url: str, gateway: Server) -> int:
        """Kill the gateway while it makes calls that no client sends again; return what it held."""

        async def one(http: httpx.AsyncClient, number: int) -> None:
            prompt = {"cost": 50, "takes_s": 0.75 * CALL_S, "fails": number % 2 == 0}
            path = f"/teams/{TEAMS[number % len(TEAMS)]}/calls/left-{number}"
            with suppress(httpx.TransportError):
                await http.post(path, json={"most": 100, "prompt": prompt})

        async with (
            httpx.AsyncClient(base_url=url, timeout=60) as http,
            asyncio.TaskGroup() as clients,
        ):
            for number in range(AT_ONCE):
                clients.create_task(one(http, number))
            await self.until_held(lambda held: held > 0)
            await gateway.kill()
        return (await self.sums())[1]

    async def make_calls(self, url: str, gateway: Server) -> None:
        """Make all calls, and kill servers meanwhile."""
        room = asyncio.Semaphore(AT_ONCE)
        servers = {"gateway": gateway, "ledger": self.ledger.server}
        step = self.calls // (len(KILLED) + 1)
        kills = {step * at: servers[name] for at, name in enumerate(KILLED, 1)}

        async def one(http: httpx.AsyncClient, number: int) -> None:
            async with room:
                self.results[await self._call(http, number)] += 1
            if server := kills.pop(self.results.total(), None):
                await server.kill()

        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as http:
            await asyncio.gather(*(one(http, number) for number in range(self.calls)))

    async def _call(self, http: httpx.AsyncClient, number: int) -> str:
        """Make a call, and send it again until it is answered; return what became of it."""
        draw = random.Random(f"{self.seed} {number}")  # noqa: S311
        path, most = f"/teams/{draw.choice(TEAMS)}/calls/{number}", draw.randint(50, 500)
        prompt = {
            "cost": draw.randint(10, most),
            "takes_s": 5 * CALL_S if draw.random() < SLOW else draw.uniform(0, 0.02),
            "fails": draw.random() < FAILING,
        }
        gives_up_after_s = draw.uniform(0, 0.05) if draw.random() < CANCELLED else None
        is_sent_once = gives_up_after_s is not None or draw.random() < GIVEN_UP
        while True:
            with suppress(httpx.TransportError, TimeoutError):
                async with asyncio.timeout(gives_up_after_s):
                    response = await http.post(path, json={"most": most, "prompt": prompt})
                if response.status_code != 503:
                    return ANSWERS[response.status_code]
            if is_sent_once:
                return "given up"

    async def watch(self) -> None:
        """Look at all teams, until cancelled."""
        while True:
            for team in TEAMS:
                with suppress(CounterError, RedisError):
                    self.passed += sum(await self.ledger.look(team)) > self.budget
                    self.looks += 1
            await asyncio.sleep(1)

    async def until_held(self, is_enough: Callable[[int], bool]) -> None:
        """Wait until what is held *is_enough*."""
        while True:
            if is_enough((await self.sums())[1]):
                return
            await asyncio.sleep(0.05)

    async def sums(self) -> tuple[int, int]:
        """Return what is counted and held for all teams together."""
        found = [await self.ledger.look(team) for team in TEAMS]
        return sum(count for count, _ in found), sum(held for _, held in found)


async def report(run: Run) -> None:
    """Do the run; print what was billed, counted, and is held."""
    ledger = run.ledger
    python = (sys.executable, "-m", "uvicorn", "--log-level=warning", "--app-dir", str(_HERE))
    async with AsyncExitStack() as stack:
        model = Server(*python, "fake_model:app", "--port=PORT")
        behind = Network(ledger.server.port, LOST, run.seed)
        for each in (model, behind):
            await stack.enter_async_context(each.up())
        gateway = Server(
            *(*python, f"{ledger.app}:app", "--port=PORT"),
            COUNTER_URL=f"http://127.0.0.1:{behind.port}",
            REDIS_URL=f"redis://127.0.0.1:{behind.port}",
            MODEL_URL=f"http://127.0.0.1:{model.port}",
            BUDGET=str(run.budget),
            AGAIN=ledger.again,
        )
        front = Network(gateway.port, LOST, run.seed)
        for each in (gateway, front):
            await stack.enter_async_context(each.up())
        watching = asyncio.create_task(run.watch())
        url = f"http://127.0.0.1:{front.port}"
        left = await run.leave_calls(url, gateway)
        await run.make_calls(url, gateway)
        if ledger.client:
            await run.until_held(lambda held: held == 0)
        watching.cancel()
        async with httpx.AsyncClient() as http:
            bill = (await http.get(f"http://127.0.0.1:{model.port}/bill")).json()
        late = await reconcile(Holds(ledger.client), bill) if ledger.client else 0
        counted, held = await run.sums()
    billed = sum(cost for _, cost in bill.values())
    numbers = (front.lost + behind.lost, billed, counted, counted - billed, left, held)
    print(f"{ledger.name:<28}", *(f"{number:>10}" for number in numbers), sep="", flush=True)
    results = ", ".join(f"{number} {name}" for name, number in sorted(run.results.items()))
    print(
        f"  {results}; {late} counted late; {run.passed} of {run.looks} looks past a budget",
        flush=True,
    )


async def reconcile(holds: Holds, bill: dict[str, tuple[str, int]]) -> int:
    """Settle every call of the bill again; return how many had lost their holds."""
    lines = bill.items()
    late: int = await together(holds.settle(team, hold, cost) for hold, (team, cost) in lines)
    return late


async def main() -> None:
    """Try each ledger."""
    flags = argparse.ArgumentParser()
    flags.add_argument("--calls", type=int, default=10_000)
    flags.add_argument("--seed", type=int, default=1)
    flags.add_argument("--redis", action="store_true", help="try Redis, too: redis-server")
    given = flags.parse_args()
    ledgers: list[Opened] = [service]
    if given.redis:
        ledgers += [partial(redis, again=again) for again in ("yes", "")]
    names = ("lost", "billed", "counted", "wrong by", "left", "held")
    print(f"{'':<28}", *(f"{name:>10}" for name in names), sep="", flush=True)
    for opened in ledgers:
        with tempfile.TemporaryDirectory() as folder:
            async with opened(Path(folder)) as ledger:
                await report(Run(ledger, given.calls, given.seed))


if __name__ == "__main__":
    asyncio.run(main())
