"""One answer to a scrape, whichever of the processes on a port gets it.

Each process lays what it counted into a file of its own in a directory that its supervisor made,
every second and before it answers a scrape. Who is asked adds up what lies there. Counters are the
sum over all processes, those too that died: who is started in a dead one's place goes on from its
file, so no sum ever goes back. Gauges bear the number of the process, and are told of the living.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from prometheus_client.core import GaugeMetricFamily, Metric

from counter.background import pause
from counter.limits import SECOND
from counter.ports import Clock

_log = logging.getLogger("counter.workers")
_EVERY_S: Final = 1.0
#: Past this age a process is taken for dead, or for hung.
_AGE_MAX_US: Final = 5 * SECOND
_SUMMED: Final = ("counter", "histogram")

#: A family as it lies in a file: name, help, type, and samples of a name, labels and a value.
Kept = tuple[str, str, str, list[tuple[str, dict[str, str], float]]]


class Board:
    """The place where the processes of one port lay what they counted."""

    def __init__(self, directory: Path, number: int, count: int, clock: Clock) -> None:
        """*number* is this process's, of *count*."""
        self._directory = directory
        self._number = number
        self._count = count
        self._clock = clock
        self._fails = False
        #: What processes of this number that are dead counted.
        self._past = [each for each in self._read(number)[1] if each[2] in _SUMMED]

    async def run(self, collect: Callable[[], Iterable[Metric]], stop: asyncio.Event) -> None:
        """Lay down what *collect* gives every second until *stop* is set, and a last time then."""
        self.lay(collect())
        while not await pause(stop, _EVERY_S):
            self.lay(collect())
        self.lay(collect())

    def gathered(self, own: Iterable[Metric]) -> list[Metric]:
        """The families of all processes, this one's being *own*."""
        # What is told was laid down before: else a sum could go back when this process dies.
        return self.merged(self.lay(own))

    def merged(self, laid: Sequence[Kept]) -> list[Metric]:
        """The same, where *laid* was laid down just now. It only reads: any thread may do it."""
        merged: dict[str, Metric] = {}
        up: list[int] = []
        for number in range(self._count):
            age_us, families = (0, laid) if number == self._number else self._read(number)
            if age_us <= _AGE_MAX_US:
                up.append(number)
            for name, text, kind, samples in families:
                metric = merged.setdefault(name, Metric(name, text, kind))
                if kind in _SUMMED:
                    _add(metric, samples)
                elif number in up:
                    for sample, labels, value in samples:
                        metric.add_sample(sample, labels | {"worker": str(number)}, value)
        family = GaugeMetricFamily(
            "counter_worker_up",
            "Whether each of the processes that share the port lives.",
            labels=["worker"],
        )
        for number in range(self._count):
            family.add_metric([str(number)], number in up)
        return [*merged.values(), family]

    def lay(self, own: Iterable[Metric]) -> Sequence[Kept]:
        """Lay down *own* with what those before it counted, and give that. A disk that takes
        nothing is logged, once."""
        metrics = {each.name: each for each in own}
        for name, text, kind, samples in self._past:
            _add(metrics.setdefault(name, Metric(name, text, kind)), samples)
        laid = [_kept(each) for each in metrics.values()]
        text = json.dumps([self._clock.boottime_us(), laid])
        path = self._path(self._number)
        new = path.with_suffix(".new")
        try:
            new.write_text(text, encoding="utf-8")
            os.replace(new, path)
        except OSError as error:
            if not self._fails:
                _log.warning("metrics cannot be laid into %s: %s", path, error)
            self._fails = True
        else:
            self._fails = False
        return laid

    def _read(self, number: int) -> tuple[int, Sequence[Kept]]:
        """How old what process *number* laid down is, and that; nothing where it did not yet."""
        try:
            at_us, families = json.loads(self._path(number).read_bytes())
        except FileNotFoundError:
            return _AGE_MAX_US + 1, ()
        return self._clock.boottime_us() - at_us, families

    def _path(self, number: int) -> Path:
        return self._directory / f"{number}.json"


def _kept(metric: Metric) -> Kept:
    samples = [(each.name, dict(each.labels), float(each.value)) for each in metric.samples]
    return metric.name, metric.documentation, metric.type, samples


def _add(metric: Metric, samples: Iterable[Any]) -> None:
    """Add *samples* to those of *metric* that have the same name and labels."""
    places = {
        (each.name, tuple(sorted(each.labels.items()))): place
        for place, each in enumerate(metric.samples)
    }
    for name, labels, value in samples:
        place = places.get((name, tuple(sorted(labels.items()))))
        if place is None:
            metric.add_sample(name, labels, value)
        else:
            found = metric.samples[place]
            metric.samples[place] = found._replace(value=found.value + value)
