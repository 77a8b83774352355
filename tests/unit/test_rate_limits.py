"""Token buckets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.http.token_bucket import TokenBucket
from counter.errors import RateLimitedError

_RATES = st.one_of(st.integers(1, 10_000), st.floats(0.01, 1))
#: Steps of a clock, in seconds: none at all, short ones, long ones.
_STEPS = st.lists(st.sampled_from([0.0, 0.0, 0.001, 0.01, 0.3, 2.0]), max_size=200)


def test_a_full_bucket_gives_one_second_of_its_rate() -> None:
    bucket = TokenBucket("adds", 5)
    assert [bucket.take(1, 100.0) for _ in range(7)] == [True] * 5 + [False] * 2


def test_a_bucket_fills_at_its_rate() -> None:
    bucket = TokenBucket("adds", 5)
    assert all(bucket.take(1, 100.0) for _ in range(5))
    assert not bucket.take(1, 100.19)
    assert bucket.take(1, 100.21)
    assert not bucket.take(1, 100.22)


def test_a_batch_larger_than_the_bucket_is_taken_whole_and_paid_for_by_those_after_it() -> None:
    bucket = TokenBucket("adds", 10)
    assert bucket.take(35, 100.0)
    assert not bucket.take(1, 102.5)
    assert bucket.wait_s(102.5) == pytest.approx(0.1)
    assert bucket.take(1, 102.61)


def test_returned_tokens_are_available_again() -> None:
    bucket = TokenBucket("adds", 5)
    for now_s in (100.0, 100.5, 107.0):
        while bucket.take(1, now_s):
            pass
        wait_s = bucket.wait_s(now_s)
        assert bucket.take(3, now_s + 0.25)
        bucket.give_back(3)
        assert bucket.wait_s(now_s) == pytest.approx(wait_s)


def test_a_rate_below_one_a_second_gives_one_whenever_it_has_come_together() -> None:
    bucket = TokenBucket("requests", 0.1)
    assert bucket.take(1, 100.0)
    assert not bucket.take(1, 109.9)
    assert bucket.wait_s(100.0) == pytest.approx(10)
    assert bucket.take(1, 110.1)
    assert not bucket.take(1, 110.2)


@pytest.mark.parametrize(("rate", "wait"), [(0.0005, "2,000 s"), (20_000.0, "0.001 s")])
def test_a_refusal_has_no_exponent(rate: float, wait: str) -> None:
    bucket = TokenBucket("adds", rate)
    while bucket.take(1, 100.0):
        pass
    assert str(bucket.refusal(100.0)).endswith(f"send the same again in {wait}")


def test_a_refusal_says_how_much_and_for_how_long() -> None:
    bucket = TokenBucket("adds", 2, "the key abc")
    assert bucket.take(2, 100.0)
    error = bucket.refusal(100.0)
    assert isinstance(error, RateLimitedError)
    assert (error.status, error.code, error.applied) == (429, "rate_limited", None)
    assert error.retry == "same_token"
    assert error.retry_after_us == 500_000
    assert "the key abc may have 2 adds a second" in error.detail


@given(rate=_RATES, steps=_STEPS)
def test_in_no_span_of_time_does_it_give_more_than_its_rate_and_a_burst(
    rate: float, steps: list[float]
) -> None:
    bucket, now_s, taken_s = TokenBucket("adds", rate), 1_000.0, []
    for step in steps:
        now_s += step
        if bucket.take(1, now_s):
            taken_s.append(now_s)
    for first, start_s in enumerate(taken_s):
        for last in range(first, len(taken_s)):
            span_s = taken_s[last] - start_s
            most = rate * (bucket.burst_s + span_s)
            assert last - first + 1 <= most * 1.000_001 + 1e-6


@given(rate=_RATES, amount=st.integers(1, 100_000))
def test_after_the_wait_that_it_names_it_gives_again(rate: float, amount: int) -> None:
    bucket = TokenBucket("adds", rate)
    assert bucket.take(amount, 50.0)
    assert bucket.take(1, 50.0 + bucket.wait_s(50.0) + 1e-6)
