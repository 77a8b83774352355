"""A buffer that threads share, with its own thread, in drawn orders of their turns.

:mod:`tests.properties.client_world` has the service, and what may become of a request.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings

from counter_client import Options, buffer, delivery, retrying, tokens
from counter_client.buffer import Buffer, Limits
from counter_client.calls import Calls, Response
from counter_client.failures import (
    BufferFullError,
    ClosedError,
    RejectedError,
    UnreachableError,
    UnsentError,
)
from counter_client.retrying import Answer, Budget, Policy, Send
from tests.properties.client_world import ADDS_MAX, RATES, SECOND, Add, Clock, Service, is_part
from tests.properties.seeds import Fault, check_seeds, is_found, planted
from tests.properties.turns import Condition, Lock, Thread, Turns

SEEDS = settings().max_examples * 2 // 3
SITUATIONS = frozenset(
    {
        *("preempted", "flushed", "synced", "unsent", "unsent at the end", "buffer full"),
        *("closed while it adds", "request lost", "answer lost", "refused", "void", "replayed"),
    }
)
FILES = ("counter_client/buffer.py", "counter_client/delivery.py")


class World:
    """One run: a buffer, threads that use it, and one that closes it."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = Random(seed)
        self.turns = self.loop = Turns(draw, FILES, draw.choice((0.0, 0.03, 0.3)))
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.rates = {name: draw.choice(each) for name, each in RATES.items()}
        self.service = Service(self.turns, draw, self.seen, self.rates)  # type: ignore[arg-type]
        self.skews_us: dict[Any, int] = {}
        self.adds: dict[str, list[Add]] = {}
        self.done: list[Add] = []
        parent = Path("/dev/shm")
        self.place = Path(mkdtemp(prefix="buffer-", dir=parent if parent.is_dir() else None))
        self.spool = self.place / "spool" if draw.random() < 0.5 else None

    def sleep(self, seconds: float) -> None:
        self.turns.wait_until(lambda: False, self.turns.now_s + seconds)

    def send(self, send: Send) -> Answer:
        """One attempt."""
        draw = self.draw
        fates = ("refused", "request lost", "answer lost")
        fate = draw.choice(fates) if self.service.happens("network") else "none"
        self.seen[fate] += 1
        self.sleep(draw.choice((0.0, 0.01, 3.0)))
        if fate in ("refused", "request lost"):
            return UnreachableError(fate, sent=fate != "refused")
        path, operation = send.request.path, send.request.operation
        status, found = self.service.answer(operation, path, json.loads(send.request.body or b""))
        self.sleep(draw.choice((0.0, 0.01, 3.0)))
        if fate == "answer lost":
            return UnreachableError(fate)
        return Response(
            status, json.dumps(found).encode(), ttl_s=self.service.retention_us // SECOND
        )

    def made(self) -> Buffer:
        draw = self.draw
        options = Options(attempt_timeout_s=5.0, deadline_s=draw.choice((1.0, 30.0)))
        policy = Policy(options, Budget.of(options, 0.0), self.turns.time)
        bounds = Limits(draw.choice((0.0, 0.1, 2.0)), draw.choice((2, 99)))
        return Buffer(Calls("default"), policy, self.send, bounds, self.spool)

    def times(self, add: Add) -> int:
        return self.service.counts[add.counter] // add.delta % 4

    def check(self, adds: list[Add], allowed: tuple[int, ...], why: str) -> None:
        for each in (x for x in adds if x.reported != "unknown"):
            if self.times(each) not in allowed:
                self.wrong.append(
                    f"at {self.turns.now_s:.3f} {why}: {each} counts {self.times(each)} times"
                )

    def program(self, held: Buffer, name: str) -> None:
        """Add, sync and flush."""
        draw = self.draw
        for _ in range(draw.randrange(1, 12)):
            step = draw.choice(("add", "add", "add", "sleep", "sync", "flush"))
            before = [*self.done]
            try:
                if step == "add":
                    counter = f"{name}-{draw.randrange(3)}"
                    made = self.adds.setdefault(counter, [])
                    if len(made) < ADDS_MAX:
                        add = Add(counter, 4 ** len(made))
                        made.append(add)
                        held.add(counter, add.delta, timeout=draw.choice((0.0, 1.0, None)))
                        self.done.append(add)
                        add.reported = "taken"
                elif step == "sleep":
                    self.sleep(draw.choice((0.0, 0.05, 3.0)))
                elif step == "sync":
                    held.sync()
                    self.seen["synced"] += 1
                else:
                    held.flush(draw.choice((0.5, 100.0, None)))
                    self.seen["flushed"] += 1
                    self.check(before, (1,), "flushed")
            except BufferFullError:
                self.seen["buffer full"] += 1
            except UnsentError as error:
                self.seen["unsent"] += 1
                self.note_rejected(error.rejected)
            except RejectedError as error:
                self.note_rejected(error.items)
            except ClosedError:
                self.seen["closed while it adds"] += 1
                return

    def note_rejected(self, items: Any) -> None:
        """The outcome of *items* is no longer known to the service."""
        for each in items:
            self.seen["rejected"] += 1
            for add in self.adds[each.counter]:
                if each.delta // add.delta % 4:
                    add.reported = "unknown"

    def close(self, held: Buffer, seconds: float) -> UnsentError | None:
        try:
            held.close(seconds)
        except UnsentError as error:
            self.note_rejected(error.rejected)
            return error
        except RejectedError as error:
            self.note_rejected(error.items)
        return None

    def main(self) -> None:
        """Make the buffer, let threads use it, and close it, perhaps under them."""
        draw, held = self.draw, self.made()
        users = [
            Thread(target=self.program, args=(held, f"user-{at}"), name=f"user-{at}")
            for at in range(draw.choice((1, 2, 3)))
        ]
        for each in users:
            each.start()
        if draw.random() < 0.5:
            self.sleep(draw.choice((0.0, 0.2, 4.0)))
        else:
            for each in users:
                each.join()
        left, unsent = Counter[str](), Counter[str]()
        if (error := self.close(held, draw.choice((0.0, 1.0, 60.0)))) is not None:
            self.seen["unsent at the end"] += 1
            unsent.update(error.unsent)
            left.update(error.unsent)
            for item in error.unfinished:
                left.update(dict(item.items))
        for each in users:
            each.join()
        taken = self.done
        self.check([x for x in taken if not is_part(left, x)], (1,), "closed")
        self.check([x for x in taken if is_part(unsent, x)], (0,), "said to be unsent")
        if self.spool is not None:
            self.sleep(300.0)
            self.close(self.made(), 100_000.0)
            self.check(taken, (1,), "sent by the next one")
        every = [add for adds in self.adds.values() for add in adds]
        self.check(every, (0, 1), "at the end")
        self.check([x for x in every if x.reported == "made"], (0,), "refused")


@contextmanager
def patched(world: World) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Thread, "turns", world.turns, raising=False)
        clock = Clock(world)  # type: ignore[arg-type]
        for module in (buffer, delivery, retrying, tokens):
            patch.setattr(module, "time", clock)
        threads = SimpleNamespace(Thread=Thread, Lock=Lock, Condition=Condition)
        threads.current_thread, threads.main_thread = lambda: 0, lambda: 1
        patch.setattr(buffer, "threading", threads)
        ending = SimpleNamespace(register=lambda _: None, unregister=lambda _: None)
        patch.setattr(buffer, "atexit", ending)
        patch.setattr(Buffer, "_close_with_multiprocessing", no_finalizer)
        patch.setattr(retrying, "random", world.draw)
        patch.setattr("os.register_at_fork", lambda **_: None)
        yield


def no_finalizer(self: Buffer) -> None:
    self._finalizer = None


def run(seed: int) -> World:
    """Run the world of *seed*; ``wrong`` has the problems."""
    world = World(seed)

    def main() -> None:
        try:
            world.main()
        except BaseException as error:
            world.wrong.append(f"at {world.turns.now_s:.3f}: {error!r}")

    with patched(world):
        Thread(target=main, name="main").start()
        try:
            world.turns.run()
        except RuntimeError as error:
            world.wrong.append(repr(error))
    world.seen["preempted"] += world.turns.preempted
    shutil.rmtree(world.place)
    return world


def test_threads_get_true_results() -> None:
    check_seeds(run, SEEDS, SITUATIONS)


def wait_past_the_end(patch: pytest.MonkeyPatch) -> None:
    """A flush does not learn of the end of the sending."""
    ended = property(lambda _: False, lambda *_: None)
    patch.setattr(buffer.Merging, "ended", ended, raising=False)


def move_adds_outside_of_the_lock(patch: pytest.MonkeyPatch) -> None:
    """Adds are moved to the backlog while the flusher makes a piece of it."""

    def careless(self: Buffer) -> int:
        with self._lock:
            taken = self._merging.drain()
        self._merging.backlog.put(taken)
        with self._lock:
            self._merging.held = len(self._merging.backlog)
            return self._merging.backlog.begun

    patch.setattr(Buffer, "_move_to_backlog", careless)


def wake_no_flush(patch: pytest.MonkeyPatch) -> None:
    """The end of a piece wakes only one of those that wait for it."""
    patch.setattr(Condition, "notify_all", Condition.notify)


FAULTS: list[tuple[Fault, int]] = [
    (wait_past_the_end, 2),
    (move_adds_outside_of_the_lock, 23),
    (wake_no_flush, 10),
]


@planted(FAULTS)
def test_a_planted_fault_is_found(fault: Fault, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    assert is_found(run, seed)
