"""Adds in batches over HTTP from this process: what the rollup and the cache are fed with."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Final

from benchmarks.cluster import Place
from benchmarks.harness import BenchError, Server, check
from counter.clock import to_rfc3339
from counter.limits import BATCH_ITEMS_MAX
from counter.tokens import TokenGenerator
from counter.types import Token

_RETRY_S: Final = 60.0
_PAUSE_S: Final = 0.5


def tokens_at(start_us: int) -> Callable[[], Token]:
    """Fresh tokens whose times begin at an instant of one's choice, a microsecond apart."""
    times_us = count(start_us)
    return lambda: Token(uuid.uuid4().bytes, next(times_us))


class Feeder:
    """Adds 1 to each of some counters, each under one of *tokens*; of now, unless given."""

    def __init__(
        self, server: Server, place: Place, tokens: Callable[[], Token] | None = None
    ) -> None:
        self._server = server
        self._path = f"{place.base}/batch/add"
        self._token = tokens or TokenGenerator().next

    def feed(self, names: Sequence[str]) -> None:
        """Add to each of *names* once; what is answered to be sent again, is, under its token.

        Raises BenchError unless every add is acknowledged in the end.
        """
        for start in range(0, len(names), BATCH_ITEMS_MAX):
            items = [self._item(name) for name in names[start : start + BATCH_ITEMS_MAX]]
            end_s = time.monotonic() + _RETRY_S
            while items:
                results = self._server.post(self._path, {"items": items})["results"]
                told = [*zip(items, results, strict=True)]
                failed = [each for each in results if "event_time" not in each]
                again = [item for item, each in told if each.get("retry") == "same_token"]
                refused = len(again) < len(failed) or time.monotonic() > end_s
                check(not (failed and refused), f"{len(failed)} adds were refused: {failed[:1]}")
                items = again
                if items:
                    time.sleep(_PAUSE_S)

    def _item(self, name: str) -> dict[str, Any]:
        nonce, time_us = self._token()
        token = {"token": nonce.hex(), "generation_time": to_rfc3339(time_us)}
        return {"counter": name, "delta": 1, "idempotency_token": token}


class Background:
    """Calls *work* again and again in a thread of its own, *every_s* seconds, until stopped."""

    def __init__(self, work: Callable[[], None], every_s: float) -> None:
        self._work = work
        self._every_s = every_s
        self._stop = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._stop.wait(max(0.0, due_s - time.monotonic())):
            due_s += self._every_s
            try:
                self._work()
            except Exception as error:
                self._failure = error
                return

    def check(self) -> None:
        """Raise BenchError if *work* failed."""
        if self._failure is not None:
            raise BenchError(f"in the background: {self._failure}") from self._failure

    def stop(self) -> None:
        """End it after the call under way. Raises BenchError if *work* failed."""
        self._stop.set()
        self._thread.join()
        self.check()
