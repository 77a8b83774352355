"""The rollup over Cassandra: the rate of a worker process, alone and beside another."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Final

from benchmarks.cluster import DATASET, Place, Site, Worker, conditions, site
from benchmarks.harness import (
    Background,
    Bench,
    Server,
    check,
    counter_names,
    new_token,
    token_json,
)
from benchmarks.loads import check_counts
from benchmarks.results import Figure, Report, figure, median, ratios
from counter.clock import SystemClock
from counter.limits import BATCH_ITEMS_MAX, MILLISECOND, SECOND

_PER_S: Final = 1_500
#: One core for each worker and for what they wait for: Cassandra takes about as much as they do.
_CORES_FOR_TWO: Final = 4
_SCALES: Final = 1.5
_STREAM_EVERY_S: Final = 0.2
#: A little faster than the target, so that it can be met.
_STREAM_PER_S: Final = 1_800
_WINDOW_US: Final = SECOND
_ACCEPT_US: Final = SECOND
_WRITE_TIMEOUT_US: Final = SECOND
_SKEW_US: Final = 250 * MILLISECOND
_LAG_US: Final = _ACCEPT_US + _WRITE_TIMEOUT_US + 2 * _SKEW_US
_SCHEMA: Final = (*DATASET, "--write-timeout=1s", "--clock-skew-max=250ms")
_TIMEOUT_S: Final = 300.0
_SLACK_US: Final = 2 * SECOND
_RETRY_S: Final = 60.0
_PAUSE_S: Final = 0.5


class Feeder:
    """Adds 1 to each of some counters, each under one of *tokens*; of now, unless given."""

    def __init__(
        self, server: Server, place: Place, tokens: Callable[[], dict[str, str]] = new_token
    ) -> None:
        self._server = server
        self._path = f"{place.base}/batch/add"
        self._token = tokens

    def feed(self, names: Sequence[str]) -> None:
        """Add to each of *names* once; what is answered to be sent again, is, under its token.

        Raises BenchError unless every add is acknowledged in the end.
        """
        for start in range(0, len(names), BATCH_ITEMS_MAX):
            items: list[dict[str, Any]] = [
                {"counter": name, "delta": 1, "idempotency_token": self._token()}
                for name in names[start : start + BATCH_ITEMS_MAX]
            ]
            end_s = time.monotonic() + _RETRY_S
            while items:
                results = self._server.post(self._path, {"items": items})["results"]
                failed = [each for each in results if "event_time" not in each]
                pairs = zip(items, results, strict=True)
                items = [item for item, each in pairs if each.get("retry") == "same_token"]
                refused = len(items) < len(failed) or time.monotonic() > end_s
                check(not (failed and refused), f"{len(failed)} adds were refused: {failed[:1]}")
                if items:
                    time.sleep(_PAUSE_S)


@dataclass(frozen=True, slots=True)
class Rolled:
    """So many counters in so many seconds, by so many workers."""

    counters: int
    seconds: float
    cpu_s: float
    #: The largest age of a shard during that time.
    stalest_s: float = 0.0

    @property
    def per_s(self) -> float:
        return self.counters / self.seconds

    def __str__(self) -> str:
        return (
            f"{self.counters:,} counters in {self.seconds:.1f} s, {self.per_s:,.0f}/s;"
            f" the workers used {self.cpu_s / self.seconds:.2f} cores"
        )


def run(bench: Bench) -> Report:
    """Drain one window by one worker and by two, in turn; then follow a stream."""
    cores = os.cpu_count() or 1
    with site(bench, *_SCHEMA) as where, where.api() as server:
        one, two = bench.alternate(
            {
                "one worker, one large window": partial(_drain, bench, where, server, 1),
                "two workers, one large window": partial(_drain, bench, where, server, 2),
            }
        ).values()
        (stream,) = bench.alternate(
            {"one worker, a stream": partial(_follow, bench, where, server)}
        ).values()
    return Report(
        subject="cluster-rollups",
        title="Rollup over Cassandra",
        method=(
            "`counter rollup` processes over one Cassandra node and memcached, new counters with"
            " one event each, 16 shards. *One large window*: all of them lie in one"
            f" window of {_WINDOW_US / SECOND:g} s; what is counted begins at the instant at which"
            " it closes and ends when the watermarks of all shards have passed it. *A stream*:"
            f" {_STREAM_PER_S:,} new counters a second by `batch/add`, whose API process runs on"
            " the same machine, in windows of a second; what is counted is what the worker says it"
            " wrote between two instants. Afterwards every counter is read back."
        ),
        figures=(
            _rate("counters a second, one worker, one large window", one),
            _rate("counters a second, one worker, a stream", stream),
            figure(
                "how far the oldest shard was behind, a stream",
                [x.stalest_s for x in stream],
                "s",
                at_most=(_WINDOW_US + _LAG_US + _SLACK_US) / SECOND,
                note=(f"window {_WINDOW_US / SECOND:g} s, lag {_LAG_US / SECOND:g} s, and 2 s"),
            ),
            figure(
                f"counters a second of two workers, of one; {cores} cores",
                ratios([x.per_s for x in two], [x.per_s for x in one]),
                at_least=_SCALES if cores >= _CORES_FOR_TWO else None,
                note=(
                    f"{median([x.per_s for x in two]):,.0f}/s against"
                    f" {median([x.per_s for x in one]):,.0f}/s; a second worker can only scale"
                    " where a core is free for it"
                ),
            ),
        ),
        conditions=conditions(),
    )


def _rate(what: str, rounds: Sequence[Rolled]) -> Figure:
    return figure(
        what,
        [each.per_s for each in rounds],
        "/s",
        at_least=_PER_S,
        note=(
            f"{rounds[0].counters:,} counters; {median([x.cpu_s / x.seconds for x in rounds]):.2f}"
            f" cores of the worker, {median([x.counters / x.cpu_s for x in rounds]):,.0f} a CPU"
            " second"
        ),
    )


@contextmanager
def _working(where: Site, number: int) -> Iterator[list[Worker]]:
    """So many workers, each with its share."""
    workers: list[Worker] = []
    try:
        workers += (where.worker() for _ in range(number))
        where.wait_for_shares(number)
        yield workers
        for each in workers:
            each.stop()
    finally:
        for each in workers:
            each.kill()


def _drain(bench: Bench, where: Site, server: Server, number: int) -> Rolled:
    """Put many counters into one window to come, and wait for its rollup."""
    names = counter_names(1_000 if bench.quick else 20_000)
    ahead_us = (4 if bench.quick else 15) * SECOND
    place = _place(where, server)
    clock = SystemClock()
    with _working(where, number) as workers:
        start_us = (clock.now_us() + ahead_us) // _WINDOW_US * _WINDOW_US
        end_us = start_us + _WINDOW_US
        times_us = count(start_us)

        def token() -> dict[str, str]:
            return token_json(uuid.uuid4().bytes, next(times_us))

        Feeder(server, place, token).feed(names)
        closes_us = end_us + _LAG_US
        late_us = clock.now_us() - closes_us
        check(late_us < 0, f"feeding took {late_us / SECOND:.1f} s too long")
        time.sleep(-late_us / SECOND)
        cpu_s = sum(each.cpu_s() for each in workers)
        where.wait_for_rollup(place, end_us - 1, _TIMEOUT_S)
        seconds = (clock.now_us() - closes_us) / SECOND
        cpu_s = sum(each.cpu_s() for each in workers) - cpu_s
    _check(server, place, names)
    return Rolled(len(names), seconds, cpu_s)


def _follow(bench: Bench, where: Site, server: Server) -> Rolled:
    """Feed new counters at a steady pace, and see whether one worker keeps it."""
    place = _place(where, server)
    some = round(_STREAM_PER_S * _STREAM_EVERY_S)
    fed: list[str] = []
    clock = SystemClock()
    stalest_us = 0
    with _working(where, 1) as (worker,):
        feeder = Feeder(server, place)

        def feed() -> None:
            new = [f"s{number:07}" for number in range(len(fed), len(fed) + some)]
            feeder.feed(new)
            fed.extend(new)

        stream = Background(feed, _STREAM_EVERY_S)
        # Until the first counters are rolled up.
        time.sleep((_WINDOW_US + _LAG_US + _SLACK_US) / SECOND)
        written, cpu_s, begin_s = worker.counters(), worker.cpu_s(), time.monotonic()
        end_s = begin_s + (3.0 if bench.quick else 15.0)
        while time.monotonic() < end_s:
            stream.check()
            stalest_us = max(stalest_us, clock.now_us() - min(where.watermarks(place)))
            time.sleep(_STREAM_EVERY_S)
        written, cpu_s = worker.counters() - written, worker.cpu_s() - cpu_s
        seconds = time.monotonic() - begin_s
        stream.stop()
        where.wait_for_rollup(place, clock.now_us(), _TIMEOUT_S)
    _check(server, place, fed)
    return Rolled(written, seconds, cpu_s, stalest_us / SECOND)


def _place(where: Site, server: Server) -> Place:
    return where.create(
        server, rollup_window="1s", accept_limit="1s", future_limit="1m", cache_ttl="1s"
    )


def _check(server: Server, place: Place, names: Sequence[str]) -> None:
    """Each counter was added to once, and is rolled up."""
    check_counts(server.counts(place.base, names, None), dict.fromkeys(names, 1))
