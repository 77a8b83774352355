"""Adds by namespace: exact, bounded, and no series ever goes back."""

import tracemalloc
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from api.telemetry.exposition import MetricsDirectory
from counter.metrics import (
    NAMESPACES_SHOWN_MAX,
    NAMESPACES_WAITING_MAX,
    OTHER_NAMESPACES,
    NamespaceTally,
)
from counter.quantities import is_namespace_name
from counter.telemetry.families import counters
from counter.testing.clock import FakeClock

#: So many namespaces, from the first of these numbers on, have so many adds each.
ADDS = st.tuples(
    st.integers(0, 2 * NAMESPACES_WAITING_MAX),
    st.integers(1, NAMESPACES_WAITING_MAX + NAMESPACES_SHOWN_MAX),
    st.integers(0, 9),
)


def no_series_goes_back(before: Mapping[str, float], now: Mapping[str, float]) -> bool:
    return all(now.get(name, -1) >= value for name, value in before.items())


@given(st.lists(ADDS | st.none()))
def test_each_add_is_in_one_series_and_none_goes_back(
    steps: list[tuple[int, int, int] | None],
) -> None:
    """None is a scrape."""
    tally, true = NamespaceTally(), Counter[str]()
    shown: Mapping[str, int] = {}
    for step in [*steps, None]:
        if step is None:
            before, shown = shown, tally.totals()
            assert no_series_goes_back(before, shown)
            assert sum(shown.values()) == true.total()
            assert all(shown[name] <= true[name] for name in shown.keys() - {OTHER_NAMESPACES})
            assert len(shown) == min(len(true), NAMESPACES_SHOWN_MAX) + 1
        else:
            first, number, adds = step
            for name in (f"n{at}" for at in range(first, first + number)):
                tally.count(name, adds)
                true[name] += adds


@given(st.dictionaries(st.integers(0, 10_000), st.integers(1, 9), max_size=NAMESPACES_SHOWN_MAX))
def test_up_to_a_hundred_namespaces_all_have_their_own(adds: Mapping[int, int]) -> None:
    tally = NamespaceTally()
    for at, number in adds.items():
        tally.count(f"n{at}", number)
    assert tally.totals() == {f"n{at}": n for at, n in adds.items()} | {OTHER_NAMESPACES: 0}


def test_free_places_go_to_the_busiest() -> None:
    """A later one counts with the others, however busy it is."""
    tally = NamespaceTally()
    for at in range(300):
        tally.count(f"n{at}", 1 + at)
    shown = tally.totals()
    assert shown.keys() == {*(f"n{at}" for at in range(200, 300)), OTHER_NAMESPACES}
    assert shown[OTHER_NAMESPACES] == sum(range(1, 201))
    tally.count("late", 1_000_000)
    assert tally.totals() == {**shown, OTHER_NAMESPACES: shown[OTHER_NAMESPACES] + 1_000_000}


def test_a_hundred_thousand_namespaces_need_little_memory() -> None:
    """Also if no one scrapes."""
    tally = NamespaceTally()
    tracemalloc.start()
    try:
        for at in range(100_000):
            tally.count(f"n{at}", 1)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert len(tally.totals()) == NAMESPACES_SHOWN_MAX + 1


def test_no_namespace_can_have_the_name_of_the_others() -> None:
    assert not is_namespace_name(OTHER_NAMESPACES)


class Port:
    """Two processes on a port, started as ``api.serve`` starts them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.processes = [self.start(number) for number in range(2)]

    def start(self, number: int) -> tuple[NamespaceTally, MetricsDirectory]:
        directory = MetricsDirectory(self._folder, number, 2, FakeClock(0))
        tally = NamespaceTally()
        tally.show(directory.past_labels("counter_namespace_adds", "namespace"))
        return tally, directory

    def restart(self, number: int) -> None:
        self.processes[number] = self.start(number)

    def scrape(self, number: int) -> dict[str, float]:
        """The series of all processes, by that one."""
        tally, directory = self.processes[number]
        own = counters("namespace_adds", "Adds.", "namespace", tally.totals())
        return {
            sample.labels["namespace"]: sample.value
            for family in directory.gathered([own])
            for sample in family.samples
            if family.name == "counter_namespace_adds"
        }


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 1), ADDS | st.none()), max_size=12))
def test_no_sum_of_several_processes_goes_back(
    steps: list[tuple[int, tuple[int, int, int] | None]],
) -> None:
    """None is the death of a process, which is scraped before and replaced. However many die, the
    series stay bounded."""
    with TemporaryDirectory() as folder:
        port, total = Port(Path(folder)), 0
        before: dict[str, float] = {}
        for number, adds in steps:
            if adds is None:
                port.restart(number)
            else:
                first, many, each = adds
                for at in range(first, first + many):
                    port.processes[number][0].count(f"n{at}", each)
                total += many * each
            now = port.scrape(number)
            assert no_series_goes_back(before, now)
            assert sum(now.values()) == total
            assert len(now) <= 2 * NAMESPACES_SHOWN_MAX + 1
            before = now


def test_a_process_that_replaces_another_has_its_namespaces_and_its_free_places(
    tmp_path: Path,
) -> None:
    port = Port(tmp_path)
    for at in range(NAMESPACES_SHOWN_MAX - 1):
        port.processes[1][0].count(f"n{at}", 1)
    before = port.scrape(1)
    port.restart(1)
    port.processes[1][0].count("late", 1)
    port.processes[1][0].count("latest", 2)
    assert port.scrape(1) == before | {"latest": 2, OTHER_NAMESPACES: 1}
