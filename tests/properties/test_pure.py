"""Properties of every token, duration, window and partition."""

import re
import uuid
from collections import Counter
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from counter import limits
from counter.clock import to_rfc3339, to_us
from counter.errors import SliceMissingError
from counter.quantities import format_duration, parse_duration
from counter.tokens import format_nonce, nonce_of_key, token_of_uuid7
from counter.types import Event, Slice, Token, WindowRow
from counter.windows import (
    apply_fold,
    event_bucket_of,
    fingerprint,
    fold_events,
    fold_rows,
    shard_of,
    slice_of,
    slice_start,
    window_of,
)
from tests.support.rest import uuid7
from tests.support.times import rfc3339

nonces = st.binary(min_size=16, max_size=16)
times = st.integers(limits.TIME_MIN_US, limits.TIME_MAX_US)
tokens = st.builds(Token, nonces, times)
deltas = st.integers(limits.INT64_MIN, limits.INT64_MAX)


@given(nonces)
def test_a_nonce_is_written_as_a_uuid_and_read_back(nonce: bytes) -> None:
    assert uuid.UUID(format_nonce(nonce)).bytes == nonce
    assert format_nonce(nonce) == str(uuid.UUID(bytes=nonce))


@given(times)
@example(limits.TIME_MIN_US)
@example(limits.TIME_MAX_US)
def test_a_time_is_written_and_read_back_exactly(time_us: int) -> None:
    text = to_rfc3339(time_us)
    assert text == rfc3339(time_us)
    assert to_us(datetime.fromisoformat(text)) == time_us


@given(times, st.integers(-14 * 60, 14 * 60))
def test_an_instant_is_the_same_in_every_offset(time_us: int, offset_minutes: int) -> None:
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=time_us)
    zone = timezone(timedelta(minutes=offset_minutes))
    assert to_us(moment.astimezone(zone)) == time_us


@given(times, st.integers(0, 2**62 - 1))
def test_a_uuid7_carries_its_time_and_itself(time_us: int, tail: int) -> None:
    key = uuid7(time_us, tail=tail)
    assert uuid.UUID(key).variant == uuid.RFC_4122
    assert uuid.UUID(key).version == 7
    assert token_of_uuid7(key) == Token(uuid.UUID(key).bytes, time_us)
    assert token_of_uuid7(key.upper()) == token_of_uuid7(key)


@given(nonces, st.sampled_from([0, 4, 7, 7, 8, 15]))
def test_only_a_uuid7_is_read_as_one(bits: bytes, version: int) -> None:
    number = int.from_bytes(bits) & ~(15 << 76 | 3 << 62) | version << 76 | 2 << 62
    value = uuid.UUID(int=number)
    token = token_of_uuid7(str(value))
    assert (token is not None) == (value.version == 7)
    if token is not None:
        assert token.nonce == value.bytes
        assert 0 <= token.generation_time_us - (value.int >> 80) * 1_000 < 1_000


@given(st.text(max_size=40) | st.from_regex(r"[0-9a-f-]{30,40}", fullmatch=True))
@example("01890a5d-ac96-774b-bcce-b302099a805")
@example("01890a5dac96-774b-bcce-b302099a8057-")
@example("{1890a5d-ac96-774b-bcce-b302099a805}")
@example("01890a5d-ac96-774b-0cce-b302099a8057")
@example("0189 a5d-ac96-774b-bcce-b302099a8057")
def test_any_text_is_a_uuid7_or_none(key: str) -> None:
    token = token_of_uuid7(key)
    if token is not None:
        assert format_nonce(token.nonce) == key.lower()


scopes = st.tuples(st.integers(1, 3), st.text(max_size=3), st.text(max_size=3), st.text(max_size=3))


@given(scopes, scopes)
@example((1, "a", "bc", "d"), (1, "ab", "c", "d"))
@example((1, "add", "", "ck"), (1, "add", "c", "k"))
def test_two_keys_share_a_nonce_only_in_one_scope(
    one: tuple[int, str, str, str], other: tuple[int, str, str, str]
) -> None:
    assert (nonce_of_key(*one) == nonce_of_key(*other)) == (one == other)


@given(st.integers(0, 10**15))
@example(0)
@example(90_000_000)
def test_a_duration_is_written_and_read_back(duration_us: int) -> None:
    assert parse_duration(format_duration(duration_us)) == duration_us


@given(
    st.lists(
        st.tuples(st.integers(0, 10**6), st.sampled_from(["us", "ms", "s", "m", "h", "d"])),
        min_size=1,
        max_size=4,
    )
)
def test_a_duration_is_the_sum_of_its_parts(parts: list[tuple[int, str]]) -> None:
    text = "".join(f"{number}{unit}" for number, unit in parts)
    assert parse_duration(text) == sum(parse_duration(f"{n}{unit}") for n, unit in parts)


@given(st.text(max_size=12))
@example("5")
@example("-5s")
@example("1.5s")
@example("5 s")
@example("5S")
@example("٣s")
@example("s")
def test_any_other_text_is_no_duration_and_is_named(text: str) -> None:
    parts = re.fullmatch(r"([0-9]+(us|ms|s|m|h|d))+", text)
    if parts is not None:
        assert parse_duration(text) >= 0
    else:
        with pytest.raises(ValueError, match=re.escape(repr(text))):
            parse_duration(text)


@given(times, st.integers(1, limits.DAY))
def test_a_window_holds_its_instant_and_no_other_does(time_us: int, size_us: int) -> None:
    start_us = window_of(time_us, size_us)
    assert start_us % size_us == 0
    assert start_us <= time_us < start_us + size_us
    assert slice_start(time_us, size_us) == start_us


@given(st.text(), st.integers(1, limits.SHARDS_MAX))
def test_a_counter_has_one_shard(counter: str, shards: int) -> None:
    try:
        counter.encode()
    except UnicodeEncodeError:
        return
    assert 0 <= shard_of(counter, shards) < shards
    assert shard_of(counter, shards) == shard_of(counter, shards)


@pytest.mark.parametrize("parts", [2, 7, 64])
def test_routing_spreads_evenly(parts: int) -> None:
    """Within 20 % of even over 200 names a part: far outside the effects of chance."""
    number = 200 * parts
    for spread in (
        Counter(shard_of(f"counter-{each}", parts) for each in range(number)),
        Counter(event_bucket_of(each.to_bytes(16, "big"), parts) for each in range(number)),
    ):
        assert sorted(spread) == list(range(parts))
        assert max(spread.values()) < 300


def test_routing_is_the_same_on_every_machine_and_for_ever() -> None:
    """Data on disk was routed with these: a change would lose it."""
    assert [shard_of(name, 1_024) for name in ("", "a", "page/home", "🙂")] == ROUTED_NAMES
    assert [event_bucket_of(bytes([each]) * 16, 64) for each in range(4)] == ROUTED_NONCES


def test_digests_are_the_same_in_every_version() -> None:
    """Retries are compared with the digests of another version."""
    events = [Event("a", 5, bytes(16), 1, -7), Event("b", 6, bytes(16), 0, 0, clear=True)]
    assert fingerprint(events).hex() == "37f9414730bfba2477e940c10a22db44"
    nonce = nonce_of_key(7, "add", "page/home", "order-1")
    assert nonce.hex() == "fd7e14f93ed6842b34b14c4cb1dfb4a4"


#: The last 10 bits of the published xxh64 of "" and "a", and of two names of our own.
ROUTED_NAMES = [409, 603, 334, 467]
ROUTED_NONCES = [50, 6, 16, 55]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(-10, 500))
def test_an_instant_is_in_one_slice_or_an_error(widths: list[int], time_us: int) -> None:
    slices, start_us = [], 0
    for position, width in enumerate(widths):
        if position % 3 != 2:
            slices.append(Slice(start_us, start_us + width, width, 1))
        start_us += width
    holding = [each for each in slices if each.start_us <= time_us < each.end_us]
    if holding:
        assert [slice_of(slices, time_us)] == holding
    else:
        with pytest.raises(SliceMissingError, match=str(time_us)):
            slice_of(slices, time_us)


events = st.lists(
    st.builds(
        Event,
        st.just("c"),
        st.integers(0, 40),
        nonces,
        st.just(0),
        deltas,
        st.sampled_from([False, False, False, True]),
    ),
    max_size=30,
)


@given(events.flatmap(st.permutations), st.integers(1, 20))
def test_folding_windows_is_folding_all_at_once(log: list[Event], size_us: int) -> None:
    """In whatever order the events of a window come."""
    cleared_us = max((event.event_time_us for event in log if event.clear), default=-1)
    expected = sum(event.delta for event in log if event.event_time_us > cleared_us)
    rows = []
    for start_us in range(0, 60, size_us):
        fold = fold_events(e for e in log if window_of(e.event_time_us, size_us) == start_us)
        rows.append(WindowRow(start_us, fold.cleared, fold.total))
    assert fold_rows(0, rows) == expected
    assert apply_fold(0, fold_events(log)) == expected
    middle = len(rows) // 2
    assert fold_rows(fold_rows(0, rows[:middle]), rows[middle:]) == expected


items = st.lists(st.tuples(st.text(max_size=2), st.integers(0, 2), deltas), min_size=1, max_size=4)


@given(items, items)
def test_a_fingerprint_depends_on_the_payload_not_its_order(
    one: list[tuple[str, int, int]], other: list[tuple[str, int, int]]
) -> None:
    def of(payload: list[tuple[str, int, int]]) -> bytes:
        return fingerprint([Event(name, 5, bytes(16), key, delta) for name, key, delta in payload])

    def names_fit() -> bool:
        return all(name.isprintable() for name, _, _ in one + other)

    if names_fit() and len({each[:2] for each in one}) == len(one):
        assert of(one) == of(one[::-1])
        if len({each[:2] for each in other}) == len(other):
            assert (of(one) == of(other)) == (sorted(one) == sorted(other))
