"""The queue is bounded: a request that could not be answered in time is refused."""

from collections import deque
from unittest.mock import patch

import pytest

from counter.core.admission import Bounded, Load
from counter.errors import OverloadedError
from counter.limits import MILLISECOND, PENDING_WRITES_MAX, SECOND, WRITE_WAIT_MAX_US
from counter.testing.clock import FakeClock
from tests.support.times import START_US

#: A smaller bound than the service's own: it is soon reached.
TRICKLE_WRITES = 64


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Always let in no more than that."""
    monkeypatch.setattr("counter.limits.TRICKLE_WRITES", TRICKLE_WRITES)


class Service:
    """A service in virtual time: it ends so many adds a millisecond, the oldest first."""

    def __init__(self, per_ms: int) -> None:
        self.per_ms = per_ms
        self.clock = FakeClock(START_US)
        self.load = Load(self.clock)
        self.waiting: deque[int] = deque()
        #: How long each add that ended had waited.
        self.waits: list[int] = []
        self.refused = 0
        self.longest_queue = 0

    def run(self, ms: int, arriving_per_ms: float) -> None:
        """Let adds come in, a turn of the event loop each millisecond."""
        came = 0.0
        for _ in range(ms):
            came += arriving_per_ms
            self.load.begin_turn()
            while came >= 1:
                came -= 1
                if self.load.refusal() is not None:
                    self.refused += 1
                    continue
                self.load.admit(1)
                self.waiting.append(self.clock.now_us())
            self.longest_queue = max(self.longest_queue, len(self.waiting))
            self.clock.advance(MILLISECOND)
            self.load.end_turn()
            ended = min(self.per_ms, len(self.waiting))
            now_us = self.clock.now_us()
            self.waits += [now_us - self.waiting.popleft() for _ in range(ended)]
            if ended:
                self.load.finish(ended)

    def goodput(self, ms: int, arriving_per_ms: float) -> float:
        """Serve the share of its capacity in *ms*, at most twice the bound."""
        self.waits.clear()
        self.run(ms, arriving_per_ms)
        in_time = [wait for wait in self.waits if wait <= 2 * WRITE_WAIT_MAX_US]
        return len(in_time) / (ms * self.per_ms)

    def goodput_unrefused(self, ms: int, arriving_per_ms: float) -> float:
        """The same for a load of which nothing may be refused."""
        self.refused = 0
        goodput = self.goodput(ms, arriving_per_ms)
        assert self.refused == 0
        return goodput


@pytest.mark.parametrize("times", [1.5, 3, 10])
@pytest.mark.parametrize("per_ms", [1, 10, 50])
def test_admitted_requests_are_answered_in_time_under_any_load(per_ms: int, times: float) -> None:
    service = Service(per_ms)
    service.goodput(3_000, times * per_ms)
    # Once it is known how fast this goes; an instant's arrivals are all that can be too many.
    assert service.goodput(2_000, times * per_ms) == 1
    assert max(service.waits) < 1.1 * WRITE_WAIT_MAX_US
    assert service.refused > 0


def test_no_write_is_rejected_below_capacity() -> None:
    service = Service(10)
    service.run(3_000, 9.9)
    assert service.refused == 0


def test_a_burst_after_hours_of_little_is_taken_in() -> None:
    """A low rate of completions under a low load does not show the capacity."""
    service = Service(20)
    service.run(2_000, 60)
    service.run(2_000, 0.05)
    service.refused = 0
    service.run(100, 80)
    assert service.refused == 0


def test_a_stalled_store_lets_few_more_wait_and_many_when_it_goes_on() -> None:
    service = Service(20)
    service.run(2_000, 15)
    service.per_ms = 0
    service.run(5_000, 15)
    waits_at_once = service.load.ahead
    assert waits_at_once <= service.longest_queue <= 20_000
    assert service.refused > 0
    service.run(5_000, 15)
    assert service.load.ahead == waits_at_once
    service.per_ms = 20
    service.run(1_000, 15)
    assert service.goodput_unrefused(1_000, 15) > 0.7


def test_a_flood_leaves_nothing_behind() -> None:
    service = Service(10)
    service.run(5_000, 100)
    service.run(500, 0)
    assert service.goodput_unrefused(1_000, 9) == pytest.approx(0.9, abs=0.01)
    assert service.load.wait_us < 10 * MILLISECOND


def test_a_service_that_becomes_slower_takes_in_less() -> None:
    service = Service(40)
    service.run(2_000, 60)
    service.per_ms = 4
    service.run(10_000, 60)
    service.waits.clear()
    service.run(1_000, 60)
    assert max(service.waits) < 1.1 * WRITE_WAIT_MAX_US
    assert service.load.rate_per_s == pytest.approx(4_000, rel=0.1)


@pytest.mark.parametrize("times", [1.5, 3, 10])
def test_a_bursty_service_admits_its_average_rate(times: float) -> None:
    """In each burst it does three times as much as it can keep up."""
    service = Service(10)
    for turn in range(24):
        if turn == 12:
            service.waits.clear()
        service.per_ms = 0
        service.run(200, 10 * times)
        service.per_ms = 30
        service.run(100, 10 * times)
    assert len(service.waits) == pytest.approx(12 * 300 * 10, rel=0.05)
    assert max(service.waits) < 1.3 * WRITE_WAIT_MAX_US


def test_a_few_adds_may_always_wait_or_nothing_would_be_learned_again() -> None:
    service = Service(0)
    service.run(10_000, 0.1)
    assert service.load.ahead == TRICKLE_WRITES
    assert service.refused > 0
    service.per_ms = 1
    service.run(200, 0.1)
    assert service.goodput_unrefused(1_000, 0.9) > 0.8


def test_long_turns_of_the_event_loop_count_as_waiting() -> None:
    """Requests lie unread as long as a turn takes: behind one of 400 ms, 100 ms are left."""
    service = Service(10)
    service.run(2_000, 20)
    service.load.finish(service.load.ahead)
    service.load.begin_turn()
    service.clock.advance(400 * MILLISECOND)
    service.load.end_turn()
    assert service.load.room == pytest.approx(1_000, rel=0.1)
    assert service.load.wait_us == 400 * MILLISECOND


def test_a_short_deadline_is_rejected_at_once() -> None:
    service = Service(10)
    service.run(2_000, 20)
    load = service.load
    load.finish(load.ahead - 1_000)
    assert load.refusal() is None
    assert load.refusal(within_us=SECOND) is None
    hurried = load.refusal(within_us=90 * MILLISECOND)
    assert hurried is not None
    assert "it may wait 0.09 s" in hurried.detail
    load.finish(load.ahead)
    assert load.refusal(within_us=1) is None


def test_each_sender_is_admitted_by_its_own_deadline() -> None:
    """Also one that would wait longer than anyone may. The refusal is worded once for all."""
    service = Service(10)
    service.run(5_000, 30)
    load = service.load
    load.admit(load.room - load.ahead)
    refusal = load.refusal()
    assert refusal is not None
    hurried = load.refusal(within_us=90 * MILLISECOND)
    assert hurried is not None
    assert "it may wait 0.09 s" in hurried.detail
    assert load.refusal() is load.refusal(within_us=60 * SECOND) is refusal


async def test_a_refusal_has_retry_after_and_advice() -> None:
    service = Service(10)
    service.run(5_000, 30)
    load = service.load
    load.admit(load.room - load.ahead)
    with pytest.raises(OverloadedError) as refusal:
        load.check()
    error = refusal.value
    assert (error.status, error.applied, error.retry) == (503, None, "same_token")
    assert error.retry_after_us == SECOND
    assert error.detail.startswith("an add would wait 0.5")
    assert "it may wait 0.5 s" in error.detail
    assert load.refused == service.refused + 1


def test_a_calm_service_does_not_even_look_at_the_clock() -> None:
    load = Service(10).load
    with patch.object(FakeClock, "boottime_us", side_effect=ZeroDivisionError):
        assert load.refusal() is None


def test_no_more_adds_wait_than_may_ever() -> None:
    load = Service(10).load
    load.admit(PENDING_WRITES_MAX)
    with pytest.raises(OverloadedError, match=f"{PENDING_WRITES_MAX} adds wait for a commit"):
        load.admit(1)
    load.finish(PENDING_WRITES_MAX)
    load.admit(1)


def test_a_bounded_resource_is_refused_above_its_bound() -> None:
    some = Bounded("bodies are being read", 10)
    some.take(7)
    with pytest.raises(OverloadedError, match="7 bodies are being read already, and 4 more come"):
        some.take(4)
    some.take(3)
    some.give_back(10)
    some.take(10)


def test_a_pause_long_ago_rejects_no_write() -> None:
    service = Service(per_ms=100)
    load = service.load
    load.begin_turn()
    load.admit(1)
    service.clock.advance(700 * MILLISECOND)
    load.end_turn()
    load.finish(1)
    service.clock.advance(3_600 * SECOND)
    assert load.wait_us == 0
    load.begin_turn()
    for _ in range(500):
        assert load.refusal() is None
        load.admit(1)
