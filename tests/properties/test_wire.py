"""Values over the wire: tokens, problems, pages, the points of a history."""

import json
import uuid
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.http.calendar import fixed_step
from api.http.models import TokenBody
from api.http.problems import problem_bytes, problem_types, retry_after_s
from api.routes.items import token_of
from api.routes.paging import page_of
from api.routes.reports import _event_of_page, _place
from api.routes.spans import history_points
from counter import limits
from counter.errors import (
    BoundReachedError,
    CounterError,
    HoldExpiredError,
    HoldReleasedError,
    HoldSettledError,
    InvalidBodyError,
    InvalidParameterError,
    TokenCancelledError,
    TokenTooOldError,
)
from counter.types import Checkpoint, Event, Token, WindowRow
from counter.windows import fold_rows
from tests.support.problems import check_problem
from tests.support.rest import on_wire
from tests.support.times import SECOND

nonces = st.binary(min_size=16, max_size=16)
times = st.integers(limits.TIME_MIN_US, limits.TIME_MAX_US)
tokens = st.builds(Token, nonces, times)
#: The possible text of a detail: a client's own, decoded, and so never a lone surrogate.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)


@given(tokens, st.integers(-14 * 60, 14 * 60), st.booleans(), st.booleans())
def test_a_token_is_the_same_however_it_is_written(
    token: Token, offset_minutes: int, as_hex: bool, upper: bool
) -> None:
    """As a UUID or its digits, in any case, and its time in any offset."""
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=token.generation_time_us)
    zone = timezone(timedelta(minutes=offset_minutes))
    nonce = uuid.UUID(bytes=token.nonce)
    text = nonce.hex if as_hex else str(nonce)
    body = TokenBody(
        token=text.upper() if upper else text,
        generation_time=moment.astimezone(zone).isoformat(timespec="microseconds"),
    )
    assert token_of(body) == token
    again = on_wire(token)
    assert token_of(TokenBody(token=again["token"], generation_time=again["generation_time"])) == (
        token
    )


@given(st.text(max_size=40), texts)
def test_any_other_text_is_a_token_or_named(nonce: str, time: str) -> None:
    for body in (
        TokenBody(token=nonce, generation_time="2026-01-31T08:15:30Z"),
        TokenBody(token="0" * 32, generation_time=time),
    ):
        try:
            token = token_of(body)
        except InvalidBodyError as error:
            assert error.fields["field"].startswith("idempotency_token.")  # noqa: PT017
        else:
            assert token is not None
            assert len(token.nonce) == limits.NONCE_BYTES
            assert limits.TIME_MIN_US <= token.generation_time_us <= limits.TIME_MAX_US


def errors() -> st.SearchStrategy[CounterError]:
    """Every kind of error, with any detail, wait and extra members."""

    def made(
        kind: type[CounterError], detail: str, wait_us: int | None, field: str
    ) -> CounterError:
        if kind is TokenTooOldError:
            return TokenTooOldError(detail, applied=None, field=field)
        return kind(detail, retry_after_us=wait_us, field=field)

    waits = st.none() | st.integers(0, 10**9)
    return st.builds(made, st.sampled_from(problem_types()), texts.filter(bool), waits, texts)


@given(errors())
def test_a_problem_says_what_its_error_says(error: CounterError) -> None:
    problem = json.loads(problem_bytes(error))
    check_problem(problem)
    assert problem["detail"] == error.detail
    assert problem["field"] == error.fields["field"]
    assert (problem["code"], problem["status"]) == (error.code, error.status)
    assert (problem["applied"], problem["retry"]) == (error.applied, error.retry)
    assert problem["type"].rpartition("#")[2] == error.code
    assert problem.get("retry_after") == retry_after_s(error)


@given(errors())
def test_retry_after_is_long_enough(error: CounterError) -> None:
    seconds = retry_after_s(error)
    if error.retry_after_us is None:
        assert seconds is None
    else:
        assert seconds is not None
        assert 0 <= seconds * SECOND - error.retry_after_us <= max(SECOND, error.retry_after_us)
        assert seconds >= 1, "0 would have it come back at once"


event_ids = st.builds(
    lambda time_us, nonce, item_key: Event("c", time_us, nonce, item_key, 0),
    st.integers(0, limits.TIME_MAX_US),
    nonces,
    st.integers(0, 100),
)


@given(event_ids)
def test_a_page_continues_after_the_event_it_names(event: Event) -> None:
    assert _event_of_page("c", page_of(_place(event))) == event


@given(
    st.text(max_size=60) | st.lists(st.integers() | st.text() | st.none(), max_size=4).map(page_of)
)
def test_any_other_page_is_refused(page: str) -> None:
    try:
        found = _event_of_page("c", page)
    except InvalidParameterError as error:
        assert "page" in error.detail  # noqa: PT017
    else:
        assert found is not None


rows = st.lists(
    st.builds(WindowRow, st.integers(1, 60), st.booleans(), st.integers(-9, 9)),
    max_size=12,
    unique_by=lambda row: row.window_us,
).map(sorted)


@given(st.integers(-9, 9), rows, st.integers(0, 50), st.integers(1, 70), st.integers(1, 20))
def test_a_history_is_the_count_at_each_instant(
    settled: int, found: list[WindowRow], from_us: int, span_us: int, step_us: int
) -> None:
    """And each delta is the change of the count."""
    to_us = from_us + span_us
    points = history_points(Checkpoint(0, settled), found, from_us, to_us, fixed_step(step_us))
    counts = [
        fold_rows(settled, (row for row in found if row.window_us < at_us))
        for at_us, _, _ in points
    ]
    assert [count for _, count, _ in points] == counts
    before = fold_rows(settled, (row for row in found if row.window_us < from_us))
    changes = [after - count for after, count in zip(counts, [before, *counts], strict=False)]
    assert [delta for _, _, delta in points] == changes
    instants = [at_us for at_us, _, _ in points]
    assert instants[-1] == to_us
    assert all(at_us % step_us == 0 for at_us in instants[:-1])
    assert instants == sorted(set(instants))


#: What an error says for ever of the token; others do not know.
KNOWN: dict[type[CounterError], bool] = {
    HoldSettledError: True,
    HoldReleasedError: False,
    HoldExpiredError: False,
    TokenCancelledError: False,
    BoundReachedError: False,
}


@pytest.mark.parametrize("kind", problem_types(), ids=lambda kind: kind.code)
def test_a_new_token_is_advised_only_where_the_old_one_never_counts(
    kind: type[CounterError],
) -> None:
    """Or an add would count twice."""
    if kind is TokenTooOldError:
        never, unknown = (TokenTooOldError("", applied=applied) for applied in (False, None))
        assert (never.retry, unknown.retry) == ("new_token", "never")
    else:
        error = kind("")
        assert error.retry != "new_token"
        assert error.applied is KNOWN.get(kind)
