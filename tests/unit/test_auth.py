"""Rate limits of many namespaces in one process."""

from dataclasses import replace

import pytest

from api.http.auth import Authorizer
from counter.config.settings import Settings
from counter.errors import RateLimitedError
from counter.security.keys import KeyRing
from counter.storage.memory import DEFAULT_DATASET, MemoryStore
from counter.testing.clock import FakeClock
from counter.types import Namespace
from tests.support.times import SECOND, START_US

SETTINGS = replace(Settings().default_namespace(), adds_per_s=1)
#: More than a process remembers of those that have nothing to remember.
MANY = 2_500


def space(number: int) -> Namespace:
    return Namespace(number, f"n{number}", SETTINGS, (), DEFAULT_DATASET, START_US, 1)


def admitted(authorizer: Authorizer, numbers: range) -> list[int]:
    """Those of the namespaces that may be added to."""
    found = []
    for number in numbers:
        try:
            authorizer.anyone.admit(space(number), 1)
        except RateLimitedError:
            continue
        found.append(number)
    return found


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(START_US)


@pytest.fixture
def authorizer(clock: FakeClock) -> Authorizer:
    ring = KeyRing(MemoryStore(clock).keys, clock)
    return Authorizer(ring, now_s=lambda: clock.boottime_us() / SECOND)


def test_each_of_many_namespaces_is_held_to_its_rate(
    authorizer: Authorizer, clock: FakeClock
) -> None:
    """Regression: past a thousand of them all rates were forgotten, again and again."""
    everyone = range(MANY)
    assert admitted(authorizer, everyone) == list(everyone)
    assert admitted(authorizer, everyone) == []
    clock.advance(SECOND)
    assert admitted(authorizer, everyone) == list(everyone)
    assert admitted(authorizer, everyone) == []


def test_full_buckets_are_forgotten(authorizer: Authorizer, clock: FakeClock) -> None:
    """Namespaces come and go; deleted ones are not remembered for ever."""
    for begin in range(0, 8 * MANY, MANY):
        some = range(begin, begin + MANY)
        assert admitted(authorizer, some) == list(some)
        assert admitted(authorizer, some) == []
        clock.advance(2 * SECOND)
    assert len(authorizer._shared) <= 4 * MANY


def test_adds_that_a_namespace_refuses_take_nothing_of_their_senders_rate(clock: FakeClock) -> None:
    """Regression: a batch that was refused was paid for all the same, for minutes."""
    ring = KeyRing(MemoryStore(clock).keys, clock)
    authorizer = Authorizer(ring, {"adds": 10}, lambda: clock.boottime_us() / SECOND)
    narrow, wide = space(1), replace(space(2), settings=replace(SETTINGS, adds_per_s=0))
    authorizer.anyone.admit(narrow, 1)
    with pytest.raises(RateLimitedError, match="namespace 'n1'"):
        authorizer.anyone.charge(narrow, 1_000)
    with pytest.raises(RateLimitedError, match="namespace 'n1'"):
        authorizer.anyone.admit(narrow, 1)
    authorizer.anyone.admit(wide, 9)
    with pytest.raises(RateLimitedError, match="a client without a key"):
        authorizer.anyone.admit(wide, 1)


def test_namespaces_without_rates_share_nothing(authorizer: Authorizer) -> None:
    """Otherwise every caller would have to refresh its copy if there are many."""
    for number in range(MANY):
        free = replace(space(number), settings=replace(SETTINGS, adds_per_s=0))
        assert authorizer.anyone.meters(free).is_empty
    assert len(authorizer._shared) == 0
