"""The order of base URLs: each in turn, past those that just did not answer."""

import pytest

from counter_client.addresses import Endpoints

URLS = ("a", "b", "c")


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def endpoints(clock: Clock) -> Endpoints:
    return Endpoints(URLS, clock)


def test_each_attempt_goes_to_the_next(endpoints: Endpoints) -> None:
    assert [endpoints.pick(number) for number in range(5)] == ["a", "b", "c", "a", "b"]


def test_an_address_that_is_away_is_skipped(endpoints: Endpoints) -> None:
    endpoints.failed("a")
    assert [endpoints.pick(number) for number in range(4)] == ["b", "b", "c", "b"]


def test_after_a_while_one_attempt_finds_out(endpoints: Endpoints, clock: Clock) -> None:
    endpoints.failed("a")
    clock.now_s = 1.0
    assert [endpoints.pick(0) for _ in range(3)] == ["a", "b", "b"]
    endpoints.mark_reachable("a")
    assert [endpoints.pick(0) for _ in range(3)] == ["a"] * 3


def test_if_none_answers_all_are_tried(endpoints: Endpoints) -> None:
    for url in URLS:
        endpoints.failed(url)
    assert [endpoints.pick(number) for number in range(4)] == ["a", "b", "c", "a"]


def test_one_alone_is_always_tried(clock: Clock) -> None:
    alone = Endpoints(["a"], clock)
    alone.failed("a")
    assert [alone.pick(number) for number in range(3)] == ["a"] * 3
