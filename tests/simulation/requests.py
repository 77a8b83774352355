"""Requests of simulated clients to processes that run in this one, on their way for a while."""

import asyncio
import json
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, Protocol

from api.app import Application
from counter.limits import SECOND
from tests.simulation.loop import NOWHERE, Process, SimulatedLoop
from tests.simulation.plan import BRIEF, EXACT_US, FUTURE_US, Config
from tests.simulation.weather import Weather

START_US = 1_800_000_000 * SECOND

Answer = tuple[int, dict[str, Any]]


class Clocked(Protocol):
    """A clock of a process."""

    def wall_us(self) -> int: ...


class Asked(Protocol):
    """A process that may be asked: it serves if it is alive and has an application."""

    process: Process
    application: Application | None

    @property
    def clock(self) -> Clocked: ...


class Requests:
    """How clients reach the processes of a run."""

    def __init__(self, config: Config, loop: SimulatedLoop) -> None:
        self.config = config
        self.loop = loop
        self.random = Random(f"world {config.seed}")
        self.weather = Weather(self.random)
        self.notes: list[str] = []
        #: When a client sent its last request.
        self._asked_us = 0

    def asked(self, api: int) -> Asked:
        """The API process of this number."""
        raise NotImplementedError

    def reach(self, situation: str) -> None:
        """Remember that the run came into *situation*."""

    def note(self, text: str) -> None:
        """Remember *text* for the trace."""
        if not self.loop.ending:
            self.notes.append(f"{self.loop.now_us / SECOND:10.6f} s  {text}")

    async def create(self, api: int, name: str, counter_type: str) -> Answer:
        """Ask *api* to create a namespace with the settings of this run."""
        config = self.config
        body = {
            "counter_type": counter_type,
            "accept_limit": _text(config.accept_us),
            "future_limit": _text(FUTURE_US),
            "rollup_window": _text(config.window_us),
            # Each shard is passed once a window: most of the workers' time.
            "shards": config.shards if name in dict(config.namespaces) else 1,
            "payload_check": config.payload_check,
            "cache_ttl": _text(config.cache_ttl_us),
        }
        if name == BRIEF:
            body["key_ttl"] = _text(config.key_ttl_us)
        return await self.request(api, "PUT", f"/v1/namespaces/{name}", body)

    @property
    def apis(self) -> int:
        """How many API processes there are."""
        return self.config.apis

    @property
    def true_us(self) -> int:
        """The true time."""
        return START_US + self.loop.now_us

    async def request(
        self,
        api: int,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout_us: int = 10 * SECOND,
    ) -> Answer:
        """Ask *api*; status 0 if no response came."""
        weather, loop = self.weather, self.loop
        self._asked_us = loop.now_us
        answered: asyncio.Future[Answer] = loop.create_future()

        def tell(answer: Answer) -> None:
            if not answered.done():
                answered.set_result(answer)

        def reply(answer: Answer) -> None:
            if not weather.happens(weather.client_lost_reply):
                loop.at(self._client_delay(), tell, answer)

        loop.at(timeout_us, tell, (0, {"code": "no_answer"}))
        if not weather.happens(weather.client_lost_request):
            exact = "x-exact" in (headers or {})
            delay_us = EXACT_US if exact else self._client_delay()
            loop.at(delay_us, self._deliver, api, method, path, body, headers or {}, reply)
        return await answered

    def _client_delay(self) -> int:
        weather = self.weather
        if weather.happens(weather.client_slow):
            return int(self.random.random() * weather.slow_us)
        return weather.delay()

    def _note_age(self, age_us: int) -> None:
        """Note a token that arrives at such an age."""
        config = self.config
        for name, edge_us in (
            ("accept-limit", config.accept_us),
            ("future-limit", -FUTURE_US),
            ("retention-limit", config.known_us),
        ):
            if abs(age_us - edge_us) <= 1:
                self.reach(name)

    def _deliver(
        self,
        api: int,
        method: str,
        path: str,
        body: Any,
        headers: Mapping[str, str],
        reply: Callable[[Answer], None],
    ) -> None:
        member = self.asked(api)
        if not member.process.alive or member.application is None:
            reply((0, {"code": "refused"}))
            return
        if "x-exact" in headers:
            self._note_age(member.clock.wall_us() - int(headers["x-exact"]))
        raw, _, query = path.partition("?")
        scope = {
            "type": "http",
            "method": method,
            "path": raw,
            "raw_path": raw.encode(),
            "query_string": query.encode(),
            "headers": [
                (b"content-type", b"application/json"),
                *((key.lower().encode(), value.encode()) for key, value in headers.items()),
            ],
        }
        content = b"" if body is None else json.dumps(body).encode()
        pipeline = member.application.pipeline

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": content, "more_body": False}

        status = 0

        async def send(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                loaded = json.loads(message["body"]) if message["body"] else {}
                NOWHERE.run(reply, (status, loaded))

        member.process.spawn(pipeline(scope, receive, send))


def _text(us: int) -> str:
    return f"{us // 1000}ms" if us else "0s"
