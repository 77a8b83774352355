"""Run ``counter recount``, which recounts a counter and reports the change."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final

from counter.cli.client import (
    DEFAULT_SERVICE,
    EXIT_NO,
    EXIT_UNKNOWN,
    ServiceFlags,
    exit_codes,
    fail,
    open_client,
)
from counter.cli.progress import progress
from counter.cli.terminal import Json, exiting, flag, instant, print_answer
from counter.durations import format_duration, parse_duration
from counter.quantities import plural
from counter_client import CounterClient, Point

_ASK_EVERY_S: Final = 0.5
#: A recount waits until the current window is closed: seconds to a minute, by the namespace's
#: settings.
_WAIT_S: Final = 120.0
#: Longer than any history, so that the answer has one point, at its end.
_ALL: Final = timedelta(days=366)


def recount(
    counter: Annotated[str, flag("The counter's name")],
    flags: ServiceFlags = DEFAULT_SERVICE,
    *,
    json: Json = False,
) -> None:
    """Recount a counter from its events; see ``counter recount --help``."""
    with exit_codes(flags), open_client(flags) as client:
        step = _step(client)
        before = _rolled_up(client, counter, datetime.now(UTC) + timedelta(days=1), step)
        windows = client.recount(counter)
        if windows == 0 or before is None:
            text = (
                f"nothing of {counter!r} is rolled up: its count is the sum of its events already"
            )
            print_answer(text, {"counter": counter, "windows": 0}, json=json)
            return
        _wait(client, counter, windows, step)
        # At the same instant, so that later adds are in neither count.
        after = _rolled_up(client, counter, before.time + timedelta(microseconds=1), step)
        count = before.count if after is None else after.count
        is_right = count == before.count
        as_of = instant(before.time)
        document = {
            "counter": counter,
            "windows": windows,
            "as_of": as_of,
            "count": count,
            "count_before": before.count,
            "was_right": is_right,
        }
        verdict = "it was right" if is_right else f"it was {before.count}, which was wrong"
        text = (
            f"{plural(windows, 'window')} of {counter!r} recounted from the events: as of {as_of}"
            f" its count is {count}, and {verdict}"
        )
        with exiting(0 if is_right else EXIT_NO):
            print_answer(text, document, json=json)


def _step(client: CounterClient) -> str:
    """Return the longest step of a history: the largest number of windows."""
    window_us = parse_duration(client.namespace()["rollup_window"])
    return format_duration(_ALL // timedelta(microseconds=window_us) * window_us)


def _rolled_up(client: CounterClient, counter: str, end: datetime, step: str) -> Point | None:
    """Return the latest rolled-up count before *end*."""
    points = list(client.history(counter, end - _ALL, end, step))
    return points[-1] if points else None


def _wait(client: CounterClient, counter: str, windows: int, step: str) -> None:
    """Wait until the rollup has passed this moment: then the recount is done."""
    asked_at = client.get(counter, max_staleness="0s").as_of
    until_s = time.monotonic() + _WAIT_S
    with progress(f"waiting for the rollup of {plural(windows, 'window')}", None):
        while time.monotonic() < until_s:
            latest = _rolled_up(client, counter, datetime.now(UTC) + timedelta(days=1), step)
            if latest is not None and latest.time > asked_at:
                return
            time.sleep(_ASK_EVERY_S)
    fail(
        f"{plural(windows, 'window')} of {counter!r} to be recounted, and not done in {_WAIT_S:g}"
        " s: is a rollup worker running? counter doctor reports it",
        EXIT_UNKNOWN,
    )
