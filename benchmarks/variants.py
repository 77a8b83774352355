"""Servers to compare with: the same process set-up, the same front, the same parsing, less work.

``python -m benchmarks.variants no-storage`` validates adds and answers, and writes nothing.
``python -m benchmarks.variants bare --size 150`` answers every get with one constant.

With the flags of ``counter serve``, over Cassandra:

``python -m benchmarks.variants lwt`` inserts each add by a compare-and-set of its own.
``python -m benchmarks.variants native`` adds to a native counter column, and is not retry-safe.
``python -m benchmarks.variants counting`` is the service, and counts what it asks memcached.

With the flags of ``counter serve``, embedded:

``python -m benchmarks.variants unmetered`` is the service without metrics, but for the outcomes of
adds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from cyclopts import App
from prometheus_client.core import CounterMetricFamily, Metric

from api import serve
from api.app import Application, create_app
from api.http.call import Reply
from api.http.middleware import Front
from api.http.routing import COUNTER, CallOf, Route
from api.routes.site import site_of
from api.telemetry.metrics import Metrics, RequestMetrics
from counter.cli.commands.serve import serve_one
from counter.cli.flags import ServeFlags, given
from counter.clock import SystemClock
from counter.config.report import load
from counter.config.settings import Settings
from counter.core.results import Add, Added, Credential
from counter.core.service import CounterService, Done
from counter.errors import CounterError, TokenMissingError, TokenTooOldError
from counter.metrics import Histogram, StoreTally
from counter.storage.cassandra.options import options_of
from counter.types import CounterType, Event, Namespace, Scope, Token, Written


class UnstoredService(CounterService):
    """The service's checks of a token, and none of what comes after them."""

    async def add(
        self, namespace: Namespace, counter: str, delta: int, credential: Credential
    ) -> Added:
        """Answer as if *delta* had been counted."""
        if namespace.settings.counter_type is CounterType.BEST_EFFORT:
            self.tally["original"] += 1
            return Added(counter, delta, self._clock.now_us(), None)
        added = self._unstored(namespace, Add(counter, delta, credential), self._clock.now_us())
        if isinstance(added, CounterError):
            raise added
        return added

    def add_soon(self, namespace: Namespace, event: Event, done: Done) -> bool:
        """Answer as if *event* had been counted."""
        added = self._unstored(
            namespace,
            Add(event.counter, event.delta, Token(event.event_id, event.event_time_us)),
            self._clock.now_us(),
        )
        done(added if isinstance(added, CounterError) else Written.NEW)
        return True

    async def add_many(
        self, namespace: Namespace, adds: Sequence[Add]
    ) -> list[Added | CounterError]:
        """Answer as if each of *adds* had been counted."""
        now_us = self._clock.now_us()
        return [self._unstored(namespace, each, now_us) for each in adds]

    async def add_events(
        self, namespace: Namespace, events: Sequence[Event]
    ) -> list[Added | CounterError]:
        """Answer as if each of *events* had been counted."""
        adds = [Add(e.counter, e.delta, Token(e.event_id, e.event_time_us)) for e in events]
        return await self.add_many(namespace, adds)

    def _unstored(self, namespace: Namespace, add: Add, now_us: int) -> Added | CounterError:
        counter, delta, token = add
        if not isinstance(token, Token):
            return TokenMissingError("the benchmark sends a token with every add")
        age_us = now_us - token.generation_time_us
        settings = namespace.settings
        if not -settings.future_limit_us <= age_us <= settings.accept_limit_us:
            return TokenTooOldError("the benchmark sends fresh tokens", applied=False)
        self.tally["original"] += 1
        return Added(counter, delta, token.generation_time_us, False)


def no_storage_app(settings: Settings) -> Application:
    """The application over a service that writes nothing."""
    with patch("api.app.CounterService", UnstoredService):
        return create_app(settings)


def bare_app(settings: Settings, body: bytes) -> Application:
    """The application with its route of gets, and no other, answering *body*."""
    application = create_app(settings)
    reply = Reply(200, body)

    async def constant(_call: CallOf) -> Reply:
        return reply

    routes = [Route("GET", COUNTER, constant, Scope.READ)]
    front = application.front
    application.front = Front(
        routes,
        application.service.namespaces,
        site_of(routes, application.health, application.exposition, None),
        front.gate,
        front.door,
        body_bytes_max=settings.body_bytes_max,
    )
    return application


def rival_app(settings: Settings, service: str) -> Application:
    """The application over a *service* of benchmarks/rivals.py, which needs the driver."""
    from benchmarks import rivals

    clock = SystemClock()
    store = rivals.RivalStore(options_of(settings), clock)
    with patch("api.app.CounterService", getattr(rivals, service)):
        return create_app(settings, store=store, clock=clock)


def counting_app(settings: Settings) -> Application:
    """The application; its metrics tell how often memcached was asked for counts, and how many."""
    from counter.storage.memcached import commands

    asked = {"calls": 0, "keys": 0}
    read = commands.read

    def counted(connection: Any, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        asked["calls"] += 1
        asked["keys"] += len(keys)
        return read(connection, keys)

    class CountingMetrics(Metrics):
        def collect(self) -> Iterable[Metric]:
            yield from super().collect()
            for name, number in asked.items():
                yield CounterMetricFamily(f"bench_get_many_{name}", "Of memcached.", value=number)

    with patch.object(commands, "read", counted), patch("api.app.Metrics", CountingMetrics):
        return create_app(settings)


@contextmanager
def unmetered() -> Iterator[None]:
    """Nothing is counted or timed for metrics, but what becomes of adds: a benchmark adds it up."""

    def nothing(*_: object) -> None:
        """Count nothing."""

    with (
        patch.object(RequestMetrics, "answered", nothing),
        patch.object(Histogram, "observe", nothing),
        patch.object(StoreTally, "mark", nothing),
    ):
        yield


def settings_of(flags: ServeFlags | None) -> Settings:
    """The settings that ``counter serve`` would have with *flags*."""
    return load(given(flags)).settings


def serve_with(
    make: Callable[[Settings], Application], settings: Settings | None = None, **more: Any
) -> None:
    """Serve what *make* wires exactly as ``counter serve`` would serve the real thing; over SQLite
    in a temporary folder, with *more* settings, unless *settings* are given."""
    with tempfile.TemporaryDirectory() as folder, patch("api.serve.create_app", make):
        serve.serve(settings or Settings(port=0, data=Path(folder), **more), serve_one)


def main() -> None:
    """The command line."""
    app = App(help_format="plaintext")

    @app.command
    def no_storage() -> None:
        """Validate adds, answer them, write nothing."""
        serve_with(no_storage_app)

    @app.command
    def bare(*, size: int) -> None:
        """Answer every get with one constant of *size* bytes."""
        body = b'"' + b"x" * (size - 2) + b'"'
        serve_with(lambda settings: bare_app(settings, body), fast_lane=False)

    @app.command
    def lwt(flags: ServeFlags | None = None) -> None:
        """Insert each add by a compare-and-set of its own."""
        serve_with(lambda settings: rival_app(settings, "LwtService"), settings_of(flags))

    @app.command
    def native(flags: ServeFlags | None = None) -> None:
        """Add to a native counter column: a retry counts twice."""
        serve_with(lambda settings: rival_app(settings, "NativeService"), settings_of(flags))

    @app.command
    def counting(flags: ServeFlags | None = None) -> None:
        """Serve as ever, and count what memcached is asked."""
        serve_with(counting_app, settings_of(flags))

    @app.command(name="unmetered")
    def serve_unmetered(flags: ServeFlags | None = None) -> None:
        """Serve as ever, without metrics."""
        with unmetered():
            serve_with(create_app, settings_of(flags))

    app()


if __name__ == "__main__":
    main()
