"""Where attempts go: to each base URL in turn, past those that just did not answer."""

import pytest

from counter_client.addresses import Places

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
def places(clock: Clock) -> Places:
    return Places(URLS, clock)


def test_each_attempt_goes_to_the_next(places: Places) -> None:
    assert [places.pick(number) for number in range(5)] == ["a", "b", "c", "a", "b"]


def test_one_that_is_away_is_passed_by(places: Places) -> None:
    places.failed("a")
    assert [places.pick(number) for number in range(4)] == ["b", "b", "c", "b"]


def test_after_a_while_one_attempt_finds_out(places: Places, clock: Clock) -> None:
    places.failed("a")
    clock.now_s = 1.0
    assert [places.pick(0) for _ in range(3)] == ["a", "b", "b"]
    places.answered("a")
    assert [places.pick(0) for _ in range(3)] == ["a"] * 3


def test_where_none_answers_all_are_tried(places: Places) -> None:
    for url in URLS:
        places.failed(url)
    assert [places.pick(number) for number in range(4)] == ["a", "b", "c", "a"]


def test_one_alone_is_always_tried(clock: Clock) -> None:
    alone = Places(["a"], clock)
    alone.failed("a")
    assert [alone.pick(number) for number in range(3)] == ["a"] * 3
