"""Processes over a real PostgreSQL server, in a drawn order of their statements and commits.

Time is virtual. A statement is on its way for a drawn time, stops between drawn statements of the
server's functions and before its commit, and its response is on its way back. Connections break on
both ways, sessions are terminated, processes pause and crash.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final, TypeVar

import asyncpg

from counter.limits import MILLISECOND, SECOND
from counter.storage.postgresql.database import PostgresqlDatabase, PostgresqlOptions
from tests.postgresql.backends import Backend, Server
from tests.simulation.loop import SimulatedLoop

T = TypeVar("T")
#: Functions that stop between their statements, and how many of these they have about.
_TURNS: Final = {
    "append(": 12,
    "append_atomic(": 14,
    "settle(": 6,
    "apply(": 5,
    "make_slice(": 3,
    "drop_slice(": 4,
    "purge(": 8,
}
_WRITES: Final = re.compile(r"\b(INSERT|UPDATE|DELETE)\b|\.(append|append_atomic|settle|apply)\(")
_CALLED: Final = re.compile(r"\w+\.(\w+\()")
#: Those that wait for a lock are looked at again after so long, if nothing else happens.
_LOOK_US: Final = 20 * MILLISECOND
_CONNECT_US: Final = 2 * MILLISECOND


@dataclass(slots=True)
class Trouble:
    """Probabilities of a statement's fates; *slow_us* is the longest delay."""

    stops: float = 0.0
    slow: float = 0.0
    slow_us: int = SECOND
    #: The connection breaks before the statement is sent, or before its response arrives.
    unsent: float = 0.0
    unanswered: float = 0.0

    def calm(self) -> None:
        """Have nothing go wrong from now on."""
        self.stops = self.slow = self.unsent = self.unanswered = 0.0


class Orders:
    """Draws who goes on, and when."""

    def __init__(self, loop: SimulatedLoop, server: Server, draw: Random, start_us: int) -> None:
        self.loop, self.server, self.draw = loop, server, draw
        self.trouble = Trouble()
        self.seen: Counter[str] = Counter()
        self.note: Callable[[str], None] = lambda _: None
        self.statements = 0
        #: How far the server's clock was off from which instants on.
        self.clock_steps = [(0, 0)]
        #: Observers of the writes of an ended transaction.
        self.look_at_tables: Callable[[], None] = lambda: None
        self._start_us = start_us
        self._under_way: list[Statement] = []
        self._spare: list[Backend] = []
        self._made: dict[Backend, None] = {}

    def happens(self, chance: float) -> bool:
        return chance > 0 and self.draw.random() < chance

    def delay_us(self) -> int:
        """How long one step takes."""
        if self.happens(self.trouble.slow):
            self.seen["slow"] += 1
            return int(self.draw.random() * self.trouble.slow_us)
        return 50 + int(self.draw.random() * 2 * MILLISECOND)

    def work(self, step: Awaitable[T]) -> T:
        """Have a session take a *step* at this instant, and then those who waited for it."""

        async def taken() -> T:
            _, off_us = self.clock_steps[-1]
            await self.server.set_clock(self._start_us + self.loop.now_us + off_us)
            return await step

        return self.server.do(taken())

    def set_clock(self, off_us: int) -> None:
        """Have the server's clock be off by so much from now on."""
        self.clock_steps.append((self.loop.now_us, off_us))

    def backend(self) -> Backend:
        """Return a session that is idle."""
        made = self._spare.pop() if self._spare else self.server.backend()
        self._made[made] = None
        return made

    def give_back(self, backend: Backend) -> None:
        """Take *backend*, which is idle or closed, for the next session."""
        if not backend.is_closed:
            self._spare.append(backend)

    def close(self) -> None:
        """End the running statements."""
        for each in self._under_way:
            if each.is_at_server:
                self.server.do(each.backend.kill())
        for backend in self._made:
            self.server.give_back(backend)

    def begun(self, statement: "Statement") -> None:
        """Follow *statement*."""
        self.statements += 1
        self._under_way.append(statement)

    def look(self) -> None:
        """Go on with the statements that waited for locks which are free now."""
        for each in [*self._under_way]:
            each.look()
        self._under_way = [each for each in self._under_way if not each.is_over]

    def kill(self) -> None:
        """Terminate the session of a drawn statement."""
        ready = [each for each in self._under_way if each.is_at_server]
        if ready:
            self.draw.choice(ready).kill()


@dataclass(frozen=True, slots=True)
class Met:
    """The fate of a statement: held, not sent, response lost, or its session terminated."""

    hold_us: int = 0
    unsent: bool = False
    unanswered: bool = False
    kill_us: int = 0


_UNMET: Final = Met()


class Statement:
    """One statement, on its way, at the server, and back."""

    def __init__(
        self,
        orders: Orders,
        backend: Backend,
        sql: str,
        arguments: Sequence[Any],
        met: Met = _UNMET,
    ) -> None:
        self._orders, self.backend = orders, backend
        self._met = met
        self._sql, self._arguments = sql, arguments
        self.answer: asyncio.Future[Sequence[Any]] = orders.loop.create_future()
        self.is_over = self.is_at_server = False
        #: The client has given up: the session ends with the statement.
        self._is_left = False
        #: The number of its turns: earlier events are void.
        self._step = 0
        draw, trouble = orders.draw, orders.trouble
        name = _CALLED.search(sql)
        turns = _TURNS.get(name[1], 0) if name else 0
        self._stops: list[int] = []
        if turns and orders.happens(trouble.stops):
            self._stops = draw.sample(range(1, turns + 1), draw.choice((1, 1, 2)))
        self._holds = bool(_WRITES.search(sql)) and orders.happens(trouble.stops)
        self._held_at = draw.choice(("way", "turn", "turn", "commit")) if met.hold_us else ""
        if self._held_at == "turn" and turns:
            # Most of these are of the checks before the events.
            self._stops = [draw.randint(1, min(turns, 7))]
        elif self._held_at == "turn":
            self._held_at = "commit"
        self._holds = self._holds or self._held_at == "commit"
        if met.kill_us:
            orders.loop.at(met.kill_us, self.kill)
        orders.begun(self)
        self._after("way", self._begin)

    @property
    def waits(self) -> bool:
        """Whether it waits for a lock."""
        return self.is_at_server and self.backend.waits

    def look(self) -> None:
        """Go on, if it need not wait any more."""
        if self.waits:
            self._orders.work(self.backend.look())
            if not self.backend.waits:
                self._next()

    def _look_again(self) -> None:
        self.look()
        if self.waits:
            self._orders.loop.at(_LOOK_US, self._look_again)

    def kill(self) -> None:
        """Have the server terminate the session, if it runs the statement."""
        if not self.is_at_server:
            return
        self._orders.seen["killed"] += 1
        self._orders.note(f"killed: {self._sql[:60]}")
        self._do(self.backend.kill())

    def leave(self) -> None:
        """Give up the response: perhaps the server cancels, perhaps it goes on."""
        self._is_left = True
        if self._orders.draw.random() < 0.6:
            self._orders.loop.at(self._orders.delay_us(), self._cancel)

    def _cancel(self) -> None:
        if self.is_at_server:
            self._orders.seen["canceled"] += 1
            self._do(self.backend.cancel())

    def _after(self, place: str, call: Callable[[], None]) -> None:
        """Call after a drawn time, unless something else happens before."""
        self._step += 1
        step = self._step
        delay_us = self._orders.delay_us()
        if place == self._held_at:
            self._held_at, delay_us = "", self._met.hold_us

        def go_on() -> None:
            if self._step == step:
                call()

        self._orders.loop.at(delay_us, go_on)

    def _do(self, work: Awaitable[None]) -> None:
        """Let the session do *work*, and follow the outcome."""
        self._orders.work(work)
        self._next()
        self._orders.look()

    def _begin(self) -> None:
        if self._met.unsent or self._orders.happens(self._orders.trouble.unsent):
            self._orders.seen["unsent"] += 1
            self._end(_broken())
            return
        self.is_at_server = True
        self._do(self.backend.begin(self._sql, self._arguments, self._stops, self._holds))

    def _next(self) -> None:
        """Plan the next step."""
        backend, orders = self.backend, self._orders
        self._step += 1
        if not backend.ended:
            if backend.waits:
                orders.seen["waited"] += 1
                orders.loop.at(_LOOK_US, self._look_again)
            else:
                orders.seen["stopped"] += 1
                self._after("turn", lambda: self._do(backend.go()))
        elif backend.holds_transaction:
            if self._holds:
                orders.seen["held"] += 1
                self._after("commit", lambda: self._do(backend.commit()))
            else:
                self._do(backend.commit())
        elif not self.is_over:
            self.is_at_server = False
            if _WRITES.search(self._sql):
                orders.look_at_tables()
            self._end(backend.error)

    def _end(self, error: Exception | None) -> None:
        """Send its result back."""
        self.is_over = True
        if getattr(error, "sqlstate", "") == "40P01":
            self._orders.seen["deadlock"] += 1
        if self._is_left:
            if error is None:
                self._orders.seen["unseen commit"] += 1
            self._orders.give_back(self.backend)
            return
        is_lost = self._met.unanswered or self._orders.happens(self._orders.trouble.unanswered)
        if error is None and is_lost:
            self._orders.seen["unanswered"] += 1
            error = _broken()
        self._orders.loop.at(self._orders.delay_us(), self._tell, error, self.backend.rows)

    def _tell(self, error: Exception | None, rows: Sequence[Any]) -> None:
        if self._is_left or self.answer.done():
            return
        if error is None:
            self.answer.set_result(rows)
        else:
            self.answer.set_exception(error)


def _broken() -> Exception:
    error: Exception = asyncpg.ConnectionDoesNotExistError("the connection broke")
    return error


class Session:
    """A connection as the store uses it."""

    def __init__(self, orders: Orders, meet: Callable[[str], Met]) -> None:
        self._orders, self._meet = orders, meet
        self._backend = orders.backend()
        self._statement: Statement | None = None
        self.is_broken = False

    async def run(self, work: Callable[["Session"], Awaitable[T]]) -> T:
        return await work(self)

    async def fetch(self, sql: str, *arguments: Any) -> Sequence[Any]:
        met = self._meet(sql)
        self._statement = Statement(self._orders, self._backend, sql, arguments, met)
        try:
            return await self._statement.answer
        except asyncpg.PostgresConnectionError:
            self.leave()
            raise
        except asyncpg.PostgresError:
            if self._backend.is_closed:
                self.leave()
            raise
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Break the connection; the running statement may continue."""
        if self.is_broken:
            return
        self.is_broken = True
        if self._statement is not None and not self._statement.is_over:
            self._statement.leave()
        else:
            self._orders.give_back(self._backend)


class Pool:
    """The connections of one process, as asyncpg's pool has them."""

    def __init__(self, orders: Orders, size: int, meet: Callable[[str], Met]) -> None:
        self._orders, self._meet = orders, meet
        self._free = asyncio.Semaphore(size)
        self._idle: list[Session] = []
        #: In the order of their use, as a set would not be.
        self._used: dict[Session, None] = {}

    async def acquire(self) -> Session:
        await self._free.acquire()
        try:
            if not self._idle:
                await asyncio.sleep(_CONNECT_US / SECOND)
                self._idle.append(Session(self._orders, self._meet))
        except BaseException:
            self._free.release()
            raise
        session = self._idle.pop()
        self._used[session] = None
        return session

    async def release(self, session: Session, timeout: float) -> None:
        self._used.pop(session, None)
        if not session.is_broken:
            self._idle.append(session)
        self._free.release()

    async def close(self) -> None:
        self.crash()

    def crash(self) -> None:
        """Break all connections; running statements may continue."""
        for each in (*self._idle, *self._used):
            each.leave()
        self._idle.clear()
        self._used.clear()


class DrawnDatabase(PostgresqlDatabase):
    """A database with statements in the order of *orders*."""

    def __init__(
        self, options: PostgresqlOptions, orders: Orders, meet: Callable[[str], Met]
    ) -> None:
        """*meet* returns the fate of a statement that is about to be sent."""
        super().__init__(options)
        self._orders, self._meet = orders, meet

    async def open(self) -> None:
        self.pool = Pool(self._orders, self.options.connections_max, self._meet)
        self._pool = self.pool
