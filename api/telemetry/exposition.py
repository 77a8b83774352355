"""Render /metrics for one API process, or the same for each of the processes on a port.

Each process writes its metrics to its own file in the supervisor's directory, every second and
before it answers a scrape, and answers with the sum of all files. Counters include processes that
died: a replacement continues from the file, so no sum ever decreases. Gauges have the number of the
process as a label and are exported only for running processes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

from prometheus_client.core import GaugeMetricFamily, Metric

from counter.background import every
from counter.limits import SECOND
from counter.ports import Clock
from counter.telemetry import families
from counter.telemetry.families import Collects, text_of

_T = TypeVar("_T")
_log = logging.getLogger("counter.workers")
_EVERY_S: Final = 1.0
#: A process whose file is older counts as dead or hung.
_AGE_MAX_US: Final = 5 * SECOND
_SUMMED: Final = ("counter", "histogram")

#: A family in a file: name, help, type, and samples of name, labels and value.
Kept = tuple[str, str, str, list[tuple[str, dict[str, str], float]]]


class MetricsDirectory:
    """The directory with the metrics files of the processes on one port."""

    def __init__(self, directory: Path, number: int, count: int, clock: Clock) -> None:
        """Use the file of process *number* of *count*."""
        self._directory = directory
        self._number = number
        self._count = count
        self._clock = clock
        self._fails = False
        #: All files are read and written on it, one after the other, so that older metrics never
        #: replace newer ones.
        self._thread = ThreadPoolExecutor(1, "metrics")
        #: The totals of dead processes with this number.
        self._past = [each for each in self._read(number)[1] if each[2] in _SUMMED]

    def past_labels(self, family: str, label: str) -> set[str]:
        """Return the values of *label* in the samples of *family* of dead processes with this
        number."""
        samples = (s for name, _, _, found in self._past if name == family for s in found)
        return {labels[label] for _, labels, _ in samples}

    async def run(self, collect: Callable[[], Iterable[Metric]], stop: asyncio.Event) -> None:
        """Write *collect*'s metrics every second until *stop* is set, and once more then."""

        async def write() -> None:
            await self._in_thread(self.write, collect)

        await every(_EVERY_S, write, stop, _log, "writing the metrics")
        await write()

    async def text(self, collect: Callable[[], Iterable[Metric]]) -> bytes:
        """Return the text of the families of all processes, those of *collect* for this one."""
        return await self._in_thread(lambda own: text_of(self.gathered(own)), collect)

    async def families(self, collect: Callable[[], Iterable[Metric]]) -> list[Metric]:
        """Return the families of all processes, those of *collect* for this one."""
        return await self._in_thread(self.gathered, collect)

    async def _in_thread(
        self, work: Callable[[list[Metric]], _T], collect: Callable[[], Iterable[Metric]]
    ) -> _T:
        own = list(collect())
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, own)

    def gathered(self, own: Iterable[Metric]) -> list[Metric]:
        """Return the families of all processes, *own* for this one."""
        # Write before reporting, or a sum could decrease when this process dies.
        return self._merged(self.write(own))

    def _merged(self, written: Sequence[Kept]) -> list[Metric]:
        """Merge *written*, just written, with the other files."""
        merged: dict[str, Metric] = {}
        up: list[int] = []
        for number in range(self._count):
            age_us, families = (0, written) if number == self._number else self._read(number)
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
            "Whether each of the processes that share the port is running.",
            labels=["worker"],
        )
        for number in range(self._count):
            family.add_metric([str(number)], number in up)
        return [*merged.values(), family]

    def write(self, own: Iterable[Metric]) -> Sequence[Kept]:
        """Write *own* plus the totals of dead predecessors, and return the sum. A failure is logged
        once."""
        metrics = {each.name: each for each in own}
        for name, text, kind, samples in self._past:
            _add(metrics.setdefault(name, Metric(name, text, kind)), samples)
        written = [_kept(each) for each in metrics.values()]
        text = json.dumps([self._clock.boottime_us(), written])
        path = self._path(self._number)
        new = path.with_suffix(".new")
        try:
            new.write_text(text, encoding="utf-8")
            os.replace(new, path)
        except OSError as error:
            if not self._fails:
                _log.warning("metrics cannot be written to %s: %s", path, error)
            self._fails = True
        else:
            self._fails = False
        return written

    def _read(self, number: int) -> tuple[int, Sequence[Kept]]:
        """Return the age and the content of the file of process *number*."""
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


class ApiExposition(families.Exposition):
    """Metrics of this process and of the others on its port, for Prometheus."""

    def __init__(self, parts: Sequence[Collects]) -> None:
        super().__init__(parts)
        #: Metrics of the other processes, if several share the port.
        self.directory: MetricsDirectory | None = None
        #: The port that only this process has, if any; it serves only this process's metrics.
        self.own_port: int | None = None

    async def text_at(self, port: int | None) -> bytes:
        """Return the text for a scrape on *port*."""
        if self.directory is None or (port is not None and port == self.own_port):
            return self.text()
        return await self.directory.text(self.collect)

    async def totals(self, family: str, label: str, own: Mapping[str, int]) -> Mapping[str, int]:
        """Return the counters of *family* by *label*: *own*, or the sum over all processes on the
        port."""
        if self.directory is None:
            return own
        families = await self.directory.families(self.collect)
        samples = [s for each in families if each.name == family for s in each.samples]
        return {s.labels[label]: int(s.value) for s in samples if s.name.endswith("_total")}
