"""Adds to best-effort counters, begun without a task."""

import logging

import pytest

from counter.core.best_effort import BestEffort
from counter.core.results import TALLIES, Added
from counter.errors import CacheUnavailableError, CounterError
from counter.storage.memory import MemoryCache
from counter.types import Namespace
from tests.contracts.cache_cases import namespace_of
from tests.support.clock import FakeClock

NOW = 1_000


def tally() -> dict[str, int]:
    return dict.fromkeys(TALLIES, 0)


@pytest.fixture
def namespace() -> Namespace:
    return namespace_of()


def test_an_add_is_answered_at_once_where_the_cache_answers_at_once(namespace: Namespace) -> None:
    clock = FakeClock(NOW)
    told: list[Added | CounterError] = []
    tallied = tally()
    adds = BestEffort(MemoryCache(clock), clock, tallied)
    assert adds.add_soon(namespace, "c", 3, told.append)
    assert told == [Added("c", 3, NOW, None)]
    assert tallied == tally() | {"best_effort": 1}


def test_an_add_that_was_not_made_is_told(namespace: Namespace) -> None:
    class Down(MemoryCache):
        def increment_soon(self, _namespace, _counter, _delta, told) -> None:  # type: ignore[no-untyped-def]
            told(error)

    clock, error = FakeClock(NOW), CacheUnavailableError("planted")
    told: list[Added | CounterError] = []
    tallied = tally()
    assert BestEffort(Down(clock), clock, tallied).add_soon(namespace, "c", 3, told.append)
    assert told == [error]
    assert tallied == tally() | {"unknown": 1}


def test_one_that_cannot_be_told_keeps_no_other_waiting(
    namespace: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    def hung_up(_outcome: Added | CounterError) -> None:
        raise ConnectionError("planted")

    clock = FakeClock(NOW)
    with caplog.at_level(logging.ERROR, "counter.best_effort"):
        assert BestEffort(MemoryCache(clock), clock, tally()).add_soon(namespace, "c", 3, hung_up)
    assert "could not be told" in caplog.text
