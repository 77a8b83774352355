"""Faults, one after the other, of servers, processes, connections and clocks."""

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from counter.limits import SECOND
from scripts.cluster_process import ServerProcess
from scripts.service_process import CounterProcess
from tests.chaos.site import CLOCK_OFF_MAX_US, Site
from tests.support.relay import Relay

#: Between two strokes.
_PAUSE_S: Final = (0.3, 3.0)
#: At most so many of the nodes, or of the relays before them, are hurt at once: mostly fewer than a
#: quorum can bear, now and then not.
_STORES_HURT: Final = (1, 1, 1, 1, 1, 1, 2)

Deed = Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Stroke:
    """Something that is hurt, and mended after a while."""

    what: str
    #: Held during a fault: no process has two faults at once.
    victim: str
    hurt: Deed
    mend: Deed
    seconds: tuple[float, float]
    weight: float = 1.0

    #: Whether it may cost a replica of the store.
    is_of_a_store: bool = False


class Faults:
    """Draws faults until stopped; then everything is repaired."""

    def __init__(self, site: Site, random: Random, say: Callable[[str], None]) -> None:
        self._random = random
        self._say = say
        self._strokes = [
            *(each for server in site.deployment.stores for each in _of_store(*server)),
            *(each for server in site.deployment.caches for each in _of_cache(*server)),
            *(each for number in range(site.apis) for each in _of_api(site, number)),
            *(each for process in site.workers for each in _of_worker(process, site)),
            *_of_clock(site, random),
        ]  # fmt: skip
        self._hurt: dict[str, Stroke] = {}
        self.done: Counter[str] = Counter()

    async def run(self, stop: asyncio.Event) -> None:
        """Until *stop* is set, and all is mended."""
        async with asyncio.TaskGroup() as mending:
            while not stop.is_set():
                stroke = self._draw()
                if stroke is not None:
                    self._hurt[stroke.victim] = stroke
                    seconds = self._random.uniform(*stroke.seconds)
                    self._say(f"{stroke.what} {stroke.victim} for {seconds:.1f} s")
                    mending.create_task(self._carry_out(stroke, seconds, stop))
                pause_s = self._random.uniform(*_PAUSE_S)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), pause_s)

    def _draw(self) -> Stroke | None:
        stores_hurt = sum(each.is_of_a_store for each in self._hurt.values())
        bearable = stores_hurt < self._random.choice(_STORES_HURT)
        free = [
            each
            for each in self._strokes
            if each.victim not in self._hurt and (bearable or not each.is_of_a_store)
        ]
        if not free:
            return None
        return self._random.choices(free, [each.weight for each in free])[0]

    async def _carry_out(self, stroke: Stroke, seconds: float, stop: asyncio.Event) -> None:
        await stroke.hurt()
        self.done[stroke.what] += 1
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), seconds)
        await stroke.mend()
        del self._hurt[stroke.victim]


def _of_store(server: ServerProcess, relay: Relay) -> list[Stroke]:
    name = server.name
    strokes = [
        Stroke("kill", name, _thread(server.kill), _thread(server.start), (0.5, 8.0), 0.5),
        Stroke("freeze", name, _thread(server.pause), _thread(server.resume), (0.5, 8.0)),
        *_of_relay(relay, name),
    ]
    return [replace(each, is_of_a_store=True) for each in strokes]


def _of_cache(memcached: ServerProcess, relay: Relay) -> list[Stroke]:
    name = memcached.name

    async def wipe() -> None:
        await asyncio.to_thread(_wipe, *relay.server)

    return [
        Stroke("kill", name, _thread(memcached.kill), _thread(memcached.start), (0.5, 4.0)),
        Stroke("freeze", name, _thread(memcached.pause), _thread(memcached.resume), (0.5, 4.0)),
        Stroke("wipe", name, wipe, _nothing, (0.0, 0.1)),
        *_of_relay(relay, name),
    ]


def _of_api(site: Site, number: int) -> list[Stroke]:
    process, relay = site.api_processes[number], site.api_relays[number]
    return [
        Stroke("kill", process.name, process.kill, process.start, (0.0, 3.0), 3.0),
        _freezing(process, (0.2, 4.0)),
        *_of_relay(relay, process.name),
    ]


def _of_worker(process: CounterProcess, site: Site) -> list[Stroke]:
    lease_s = site.config.lease_us / SECOND
    return [
        Stroke("kill", process.name, process.kill, process.start, (0.0, 2 * lease_s), 3.0),
        # Some wake when their leases are another's.
        _freezing(process, (0.2, 3 * lease_s)),
    ]


def _freezing(process: CounterProcess, seconds: tuple[float, float]) -> Stroke:
    async def freeze() -> None:
        process.pause()

    async def wake() -> None:
        process.resume()

    return Stroke("freeze", process.name, freeze, wake, seconds, 2.0)


def _of_relay(relay: Relay, name: str) -> list[Stroke]:
    """Faults of the network on the connections of one server."""

    async def slow() -> None:
        relay.delay_s = 0.05

    async def fast() -> None:
        relay.delay_s = 0.0

    async def cut() -> None:
        relay.cut()

    async def leave() -> None:
        relay.go_away()

    async def come_back() -> None:
        relay.is_away = False

    async def fall_silent() -> None:
        relay.mute = True

    async def speak() -> None:
        relay.mute = False

    async def go_deaf() -> None:
        relay.deaf = True

    async def hear() -> None:
        # What was lost is lost: its sender must not continue in the middle.
        relay.cut()
        relay.deaf = False

    async def half_close() -> None:
        relay.half_closed = True

    async def close_whole() -> None:
        relay.cut()
        relay.half_closed = False

    return [
        Stroke("slow down", name, slow, fast, (1.0, 6.0), 0.5),
        Stroke("cut off", name, cut, _nothing, (0.0, 0.1), 0.5),
        Stroke("take away", name, leave, come_back, (0.5, 4.0), 0.3),
        Stroke("hold answers of", name, fall_silent, speak, (0.2, 4.0), 0.5),
        Stroke("lose requests to", name, go_deaf, hear, (0.2, 4.0), 0.5),
        Stroke("half-close", name, half_close, close_whole, (0.2, 2.0), 0.3),
    ]


def _of_clock(site: Site, random: Random) -> list[Stroke]:
    """Set the first API process's clock: a little within the bound, or far off."""
    skew_s = site.config.skew_us / SECOND

    def to(seconds: Callable[[], float]) -> Deed:
        async def shift() -> None:
            site.clock.shift_ns = round(seconds() * 1e9)

        return shift

    def near() -> float:
        return random.uniform(-0.9, 0.9) * skew_s

    def far() -> float:
        return random.choice((-1, 1)) * random.uniform(1.5 * skew_s, CLOCK_OFF_MAX_US / SECOND)

    right = to(lambda: 0.0)
    return [
        Stroke("set a little", "the clock of api-0", to(near), right, (2.0, 10.0)),
        Stroke("set far off", "the clock of api-0", to(far), right, (0.5, 5.0)),
    ]


def _thread(work: Callable[[], object]) -> Deed:
    return lambda: asyncio.to_thread(work)


async def _nothing() -> None:
    """It is over already."""


def _wipe(host: str, port: int) -> None:
    try:
        with socket.create_connection((host, port), timeout=2) as asked:
            asked.sendall(b"flush_all\r\n")
            asked.recv(64)
    except OSError:
        # It is frozen or gone, which is one more way to hold nothing.
        return
