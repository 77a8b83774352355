"""A service with ten minutes of adds to a video site, a shop and an API, its clock in our hand."""

import asyncio
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from counter.limits import MINUTE, SECOND
from tests.support.app import App
from tests.support.rest import fresh, item

#: Counters by namespace, and the share that each has of the adds.
COUNTERS: Mapping[str, Mapping[str, int]] = {
    "videos": {
        "views:how-a-token-counts-once": 40,
        "views:rolling-up-in-the-background": 24,
        "views:what-a-retry-costs": 13,
        "likes:how-a-token-counts-once": 6,
        "views:cassandra-in-a-minute": 5,
        "likes:what-a-retry-costs": 2,
    },
    "shop": {
        "orders": 9,
        "sold:espresso-cup": 5,
        "sold:notebook-a5": 4,
        "sold:desk-lamp": 2,
        "carts:abandoned": 3,
        "refunds": 1,
    },
    "api-usage": {
        "requests:acme": 30,
        "tokens:acme": 30,
        "requests:globex": 11,
        "tokens:globex": 11,
        "requests:initech": 4,
        "errors:initech": 1,
    },
    "default": {"signups": 2},
}
_TYPES = {"videos": "EVENTUAL", "api-usage": "EVENTUAL"}
_STEP_US = 5 * SECOND
_STEPS = 10 * MINUTE // _STEP_US
_ADDS_A_STEP = 60


async def _never(*_: object) -> None:
    """Stand for a task that repeats its work."""


def _delta(counter: str, drawn: random.Random) -> int:
    return drawn.randint(200, 3_000) if counter.startswith("tokens:") else 1


class Life:
    """A service over *data* whose clock moves by steps of five seconds, with adds in each."""

    def __init__(self, data: Path) -> None:
        self._app = App("sqlite", data, over_socket=True)
        self._drawn = random.Random(4)
        self._steps = 0
        self._ended = asyncio.Event()

    async def begin(self) -> str:
        """Live ten minutes up to now; return the address of the service."""
        clock = self._app.clock
        clock.advance(time.time_ns() // 1_000 - _STEPS * _STEP_US - clock.now_us())
        # Samples are taken by this clock alone.
        with patch("api.app.every", _never):
            await self._app.start()
        self._app.application.health.rolls_up = True
        for name in COUNTERS:
            if name != "default":
                await self._app.rest.within(name).create(_TYPES.get(name, "ACCURATE"))
        for _ in range(_STEPS):
            await self.step()
        return str(self._app.http.base_url).rstrip("/")

    async def step(self) -> None:
        """Live five seconds more."""
        drawn, clock = self._drawn, self._app.clock
        busy = 1 + 0.5 * math.sin(self._steps / 17) + drawn.random() / 4
        for name, counters in COUNTERS.items():
            number = round(_ADDS_A_STEP * busy * sum(counters.values()) / 200)
            adds = drawn.choices(list(counters), list(counters.values()), k=number)
            items = [item(each, _delta(each, drawn), fresh(clock.now_us())) for each in adds]
            if items:
                answer = await self._app.rest.within(name).batch_add(items)
                assert answer.status_code == 200, answer.text
        self._steps += 1
        clock.advance(_STEP_US)
        await self._app.application.activity.sample()
        await self._app.roll_up()

    async def until_ended(self) -> None:
        """Serve until :meth:`end`."""
        await self._ended.wait()
        await self._app.stop()

    def end(self) -> None:
        self._ended.set()


@contextmanager
def lifelike(data: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """The address of such a service, and a function that makes a step."""
    started: Future[tuple[asyncio.AbstractEventLoop, Life, str]] = Future()

    async def serve() -> None:
        life = Life(data)
        started.set_result((asyncio.get_running_loop(), life, await life.begin()))
        await life.until_ended()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=run, name="lifelike")
    thread.start()
    loop, life, url = started.result()
    try:
        yield url, lambda: asyncio.run_coroutine_threadsafe(life.step(), loop).result()
    finally:
        loop.call_soon_threadsafe(life.end)
        thread.join()
