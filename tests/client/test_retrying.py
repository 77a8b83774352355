"""When a call is tried again, on a clock that the test moves."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counter_client.answers import Added, Cancelled
from counter_client.calls import Calls, Response
from counter_client.delivery import Delivery
from counter_client.errors import (
    CounterError,
    NamespaceUnknownError,
    OverloadedError,
    TokenCancelledError,
    TokenConflictError,
    TokenTooOldError,
)
from counter_client.failures import (
    ClosedError,
    UnexpectedAnswerError,
    Unfinished,
    UnknownOutcomeError,
    UnreachableError,
)
from counter_client.retrying import ProcessLock, Send, attempts
from counter_client.tokens import Key, Token, to_rfc3339
from tests.client.script import Script, added, batch, lost, problem, small_budget

CALLS = Calls("default")
VOID = problem("token_too_old", 410, "new_token", applied=False)
FRESH = Response(
    200,
    b'{"tokens":[{"token":"5b056d1d-7f27-cb17-0000-000000000000",'
    b'"generation_time":"2026-11-21T13:01:23.875103Z"}]}',
)


def add(script: Script, token: Token | Key | None = None, **options: Any) -> Added:
    """Add 1 to a counter, with the responses of *script*."""
    return script.run(attempts(CALLS.add("c", 1, token), script.policy(**options)))


def unknown(script: Script, token: Token | None = None, **options: Any) -> UnknownOutcomeError:
    """The error of an add whose outcome stays unknown."""
    with pytest.raises(UnknownOutcomeError) as caught:
        add(script, token, **options)
    return caught.value


def batch_of_one(script: Script, **options: Any) -> object:
    """The result of the one item of a batch."""
    delivery = Delivery.of_items(CALLS, [("c", 1)])
    [result] = script.run(delivery.until_deadline(script.policy(**options)))
    return result


def test_every_attempt_of_a_call_carries_the_same_token() -> None:
    script = Script([lost(), problem("write_timeout", 503, "same_token"), lost(), added])
    result = add(script)
    assert (result.counter, result.delta) == ("c", 1)
    assert len({each.request.body for each in script.sent}) == 1
    assert [each.number for each in script.sent] == [0, 1, 2, 3]


@pytest.mark.parametrize("arrived", [False, True])
def test_the_end_reports_whether_anything_was_sent(arrived: bool) -> None:
    """Without a connection nothing has arrived."""
    answers = [UnreachableError("no connection", sent=False) for _ in range(9)]
    script = Script([*answers[:1], lost(), *answers] if arrived else answers)
    assert unknown(script, deadline_s=1.0).sent is arrived


def test_pauses_grow_and_are_bounded() -> None:
    script = Script([*[lost()] * 6, added])
    add(script, backoff_first_s=0.1, backoff_max_s=1.0)
    assert script.pauses == pytest.approx([0.2, 0.4, 0.8, 1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("busy", "pause_s"),
    [
        (problem("overloaded", 503, "same_token", retry_after=3), 3.2),
        (Response(503, b"<html>", "2"), 2.2),
    ],
    ids=["body", "header"],
)
def test_a_pause_is_never_shorter_than_the_service_asks_for(busy: Response, pause_s: float) -> None:
    script = Script([busy, added])
    add(script, backoff_first_s=0.1)
    assert script.pauses == pytest.approx([pause_s])


def test_a_definite_refusal_is_raised_at_once() -> None:
    script = Script([problem("token_conflict", 409, "never")])
    with pytest.raises(TokenConflictError):
        add(script)
    assert script.pauses == []


def test_at_the_deadline_the_error_carries_the_token() -> None:
    script = Script([lost()] * 100)
    token = Token.new()
    error = unknown(script, token, deadline_s=10.0)
    assert (error.token, error.applied) == (token, None)
    assert error.unfinished == Unfinished("add", "default", (("c", 1),), str(token))
    assert isinstance(error.__cause__, UnreachableError)
    assert script.now_s <= 1_010.0
    assert len(script.sent) > 1


def test_no_attempt_lasts_past_the_deadline() -> None:
    script = Script([lost()] * 100)
    unknown(script, deadline_s=10.0, attempt_timeout_s=8.0)
    assert script.sent[0].timeout_s == 8.0
    assert script.sent[-1].timeout_s < 8.0


def test_asking_for_a_new_token_ends_at_the_deadline() -> None:
    script = Script([lost(), VOID, FRESH, added])
    add(script, deadline_s=2.0, backoff_first_s=0.3)
    assert [each.timeout_s for each in script.sent] == pytest.approx([2.0, 1.4, 0.2, 0.2])


def test_a_read_without_an_answer_raises_that() -> None:
    script = Script([lost()] * 100)
    with pytest.raises(UnreachableError):
        script.run(attempts(CALLS.get("c", None), script.policy(deadline_s=1.0)))


def test_a_void_token_of_the_clients_own_is_replaced_by_one_of_the_service() -> None:
    script = Script([lost(), VOID, FRESH, added])
    add(script)
    first, _, _, last = script.bodies()
    assert first["idempotency_token"] != last["idempotency_token"]
    assert last["idempotency_token"]["generation_time"] == "2026-11-21T13:01:23.875103Z"
    assert last["delta"] == 1


def test_a_new_token_is_made_after_the_pause() -> None:
    """Regression: a pause longer than `accept_limit` made the new tokens too old, too."""
    script = Script([*[lost()] * 6, VOID, lost(), added])
    add(script)
    assert script.pauses[-1] == 5.0
    assert [each.request.operation for each in script.sent[-2:]] == ["tokens", "add"]
    assert script.moments[-2] == script.moments[-1]


def test_a_void_token_that_cannot_be_replaced_in_time_is_a_definite_answer() -> None:
    """Regression: it was said to be not known whether the add is counted."""
    with pytest.raises(TokenTooOldError) as caught:
        add(Script([lost(), VOID]), deadline_s=0.2)
    assert caught.value.applied is False
    script = Script([lost(), batch(json.loads(VOID.body))])
    assert isinstance(batch_of_one(script, deadline_s=0.15), TokenTooOldError)


def test_a_void_token_of_the_program_is_the_programs_to_replace() -> None:
    with pytest.raises(TokenTooOldError) as caught:
        add(Script([VOID]), Token.new())
    assert (caught.value.applied, caught.value.retry) == (False, "new_token")


def test_a_refused_retry_says_nothing_of_the_attempt_before_it() -> None:
    """The namespace is gone by now; whether the first attempt was counted is not known."""
    gone = problem("namespace_unknown", 404, "never")
    assert isinstance(unknown(Script([lost(), gone])).__cause__, NamespaceUnknownError)
    with pytest.raises(NamespaceUnknownError):
        add(Script([gone]))
    assert isinstance(batch_of_one(Script([lost(), gone])), UnknownOutcomeError)


@pytest.mark.parametrize("batch", [False, True])
def test_a_refusal_is_raised_as_it_is_if_nothing_was_sent(batch: bool) -> None:
    """Regression: an add that was never sent was reported as perhaps counted."""
    away = UnreachableError("no connection", sent=False)
    gone = problem("namespace_unknown", 404, "never")

    def call(script: Script) -> None:
        result = batch_of_one(script) if batch else add(script)
        if isinstance(result, CounterError):
            raise result

    with pytest.raises(NamespaceUnknownError):
        call(Script([away, gone]))
    # But an earlier attempt may have arrived.
    with pytest.raises(UnknownOutcomeError):
        call(Script([lost(), away, gone]))


def test_a_batch_reports_whether_anything_of_it_was_sent() -> None:
    for answers, sent in (
        ([UnreachableError("no connection", sent=False)], False),
        ([lost()], True),
    ):
        result = batch_of_one(Script(answers), retries_at_once=0, retries_per_s=0)
        assert isinstance(result, UnknownOutcomeError)
        assert result.sent is sent


@pytest.mark.parametrize("sent", [False, True])
def test_a_client_that_is_closed_amid_a_call_leaves_the_token(sent: bool) -> None:
    """Regression: the add may have been counted, and the error had no token to find out with."""

    def closed(_: Send) -> Response:
        raise ClosedError("the client is closed")

    answers: list[Any] = [*[lost()] * sent, closed]
    with pytest.raises(UnknownOutcomeError if sent else ClosedError) as caught:
        add(Script(answers))
    if isinstance(caught.value, UnknownOutcomeError):
        assert caught.value.unfinished.items == (("c", 1),)
        result = batch_of_one(Script(answers))
        assert isinstance(result, UnknownOutcomeError)
        assert isinstance(result.__cause__, ClosedError)
    else:
        with pytest.raises(ClosedError):
            batch_of_one(Script(answers))


def test_another_number_of_tokens_than_asked_for_is_no_answer() -> None:
    """Regression: of none the first one was taken, and the call ended with an IndexError."""
    script = Script([VOID, Response(200, b'{"tokens":[]}'), added])
    add(script)
    first, _, last = script.bodies()
    assert first["idempotency_token"] != last["idempotency_token"]


@pytest.mark.parametrize("result", ["5", "{}", '"counted"', "[]", "null"])
def test_a_result_of_a_batch_that_is_none_is_no_answer(result: str) -> None:
    """Regression: 5 ended the call, or the buffer, with a TypeError; {} was taken for counted."""
    script = Script([batch(json.loads(result)), added])
    assert isinstance(batch_of_one(script), Added)
    assert len({each.request.body for each in script.sent}) == 1


def test_a_page_of_a_proxy_is_no_answer() -> None:
    script = Script([Response(200, b"<html>"), Response(502, b"bad gateway"), added])
    add(script)
    assert len(script.sent) == 3
    script = Script([Response(404, b"<html>")])
    with pytest.raises(UnexpectedAnswerError):
        script.run(attempts(CALLS.get("c", None), script.policy()))


@pytest.mark.parametrize("batch", [False, True])
def test_a_page_refuses_no_add(batch: bool) -> None:
    """Regression: an add that a proxy forwarded and answered by a page lost its token."""
    script = Script([Response(404, b"<html>")])
    error = batch_of_one(script) if batch else unknown(script)
    assert isinstance(error, UnknownOutcomeError)
    assert isinstance(error.__cause__, UnexpectedAnswerError)
    assert error.sent
    assert len(script.sent) == 1


def test_a_token_too_old_to_look_up_leaves_an_unknown_attempt_unknown() -> None:
    """Regression: it was raised as if the attempt before it had not been."""
    past = problem("token_too_old", 410, "never", applied=None)
    assert isinstance(unknown(Script([lost(), past])).__cause__, TokenTooOldError)


CANCELLED = problem("token_cancelled", 410, "never", applied=False)


@pytest.mark.parametrize("batched", [False, True])
def test_an_add_that_was_cancelled_is_not_counted_whatever_came_before(batched: bool) -> None:
    """Its token is never replaced: the add would count."""
    script = Script([lost(), batch(json.loads(CANCELLED.body)) if batched else CANCELLED])
    if batched:
        assert isinstance(batch_of_one(script), TokenCancelledError)
    else:
        with pytest.raises(TokenCancelledError):
            add(script)
    assert len(script.sent) == 2
    with pytest.raises(TokenCancelledError):
        add(Script([CANCELLED]))


def test_a_cancel_waits_until_the_token_is_settled() -> None:
    token = Token.new()
    moment = to_rfc3339(token.generation_time_us)
    done = {"cancelled": True, "was_counted": True, "event_time": moment}
    pending = problem("token_pending", 503, "same_token", retry_after=2)
    script = Script([pending, lost(), Response(200, json.dumps(done).encode())])
    found = script.run(attempts(CALLS.cancel("c", 3, "add", token), script.policy()))
    assert isinstance(found, Cancelled)
    assert found.was_counted is True
    assert script.pauses[0] >= 2.0
    assert len({each.request for each in script.sent}) == 1
    assert script.sent[0].request.path.endswith("/counters/c/cancel")


def test_a_cancel_that_is_not_answered_has_the_add_to_cancel_again() -> None:
    """Not under a key that the service may have forgotten: it would be another add's."""
    key = Token.from_key("order-1")
    busy = problem("token_pending", 503, "same_token", retry_after=31)._replace(ttl_s=60)
    script = Script([busy])
    with pytest.raises(UnknownOutcomeError, match="cancel it again") as caught:
        script.run(attempts(CALLS.cancel("c", 5, "clear", key), script.policy()))
    unfinished = caught.value.unfinished
    assert (unfinished.operation, unfinished.items, unfinished.token) == ("clear", (("c", 0),), key)
    again = CALLS.cancel_unfinished(unfinished)
    assert json.loads(again.request.body or b"") == {"operation": "clear"}
    script.now_s += 60
    with pytest.raises(UnknownOutcomeError, match="too late"):
        script.run(attempts(again, script.policy()))
    assert len(script.sent) == 1


def test_a_client_without_retries_left_does_not_make_any() -> None:
    script = Script([problem("overloaded", 503, "same_token")] * 9)
    policy = script.policy(retries_at_once=2, retries_per_s=0, retries_per_call=0)
    with pytest.raises(UnknownOutcomeError) as caught:
        script.run(attempts(CALLS.add("c", 1, None), policy))
    assert isinstance(caught.value.__cause__, OverloadedError)
    assert len(script.sent) == 3
    with pytest.raises(UnknownOutcomeError):
        script.run(attempts(CALLS.add("c", 1, None), policy))
    assert len(script.sent) == 4


@given(st.lists(st.floats(0.0, 5.0), max_size=50), st.integers(1, 10), st.floats(0.1, 10.0))
def test_a_budget_gives_no_more_than_its_bucket_and_its_rate(
    steps: list[float], at_once: int, per_s: float
) -> None:
    budget = small_budget(at_once=at_once, per_s=per_s, per_call=0.0)
    now_s, made = 0.0, []
    for step_s in steps:
        now_s += step_s
        wait_s = budget.reserve(now_s, 1.0)
        if wait_s is not None:
            made.append(now_s + wait_s)
    for number, at_s in enumerate(made, start=1):
        assert number <= at_once + at_s * per_s + 1e-6


def test_a_key_is_sent_no_longer_than_the_service_remembers_it() -> None:
    """Later it would count again, also from another process: the unfinished add has the end."""
    busy = problem("overloaded", 503, "same_token")._replace(ttl_s=60)
    script = Script(iter(lambda: busy, None))
    policy = script.policy(deadline_s=600.0, retries_at_once=100)
    with pytest.raises(UnknownOutcomeError) as caught:
        script.run(attempts(CALLS.add("c", 5, Token.from_key("order-1")), policy))
    begun_s, ended_s = 1_000.0, script.now_s
    assert begun_s + 60 - 5 - 5 < ended_s <= begun_s + 60
    unfinished = Unfinished.parse(str(caught.value.unfinished))
    assert unfinished.until_us == (begun_s + 60) * 1e6
    script.sent.clear()
    with pytest.raises(UnknownOutcomeError, match="too late to send it again"):
        script.run(attempts(CALLS.resolve(unfinished), policy))
    assert script.sent == []


def test_a_retry_that_begins_at_the_last_moment_is_made() -> None:
    budget = small_budget(at_once=1.0, per_s=1.0, per_call=0.0)
    assert budget.reserve(0.0, 0.0) == 0.0
    assert budget.reserve(0.0, 0.5) is None
    assert budget.reserve(0.0, 1.0) == 1.0


@pytest.mark.parametrize("given", [{}, {"max_staleness": "0s"}])
def test_a_bound_of_staleness_is_sent_if_it_is_given(given: dict[str, str]) -> None:
    request = CALLS.batch_get(["a", "b"], given.get("max_staleness")).request
    assert json.loads(request.body or b"") == {"counters": ["a", "b"], **given}


def test_the_budget_of_retries_is_filled_by_time() -> None:
    budget = small_budget(at_once=1.0, per_s=1.0, per_call=0.0)
    pauses = [budget.reserve(now_s, 0.0) for now_s in (0.0, 0.5, 1.0, 1.5, 3.0, 3.5)]
    assert pauses == [0.0, None, 0.0, None, 0.0, None]


def test_the_budget_of_retries_is_changed_under_its_lock() -> None:
    class Locked(ProcessLock):
        def here(self) -> Any:
            taken.append(True)
            return super().here()

    taken: list[bool] = []
    budget = small_budget(at_once=1.0, per_s=1.0, per_call=0.5)
    budget.lock = Locked()
    budget.reserve(0.0, 0.0)
    budget.call()
    assert taken == [True, True]


def test_an_attempt_that_ends_when_the_token_is_still_honoured_is_made() -> None:
    """To the second, at the end that its time-out allows."""
    script = Script([added, added])
    policy = script.policy(attempt_timeout_s=2.0)
    token = Token(bytes(16), int((script.now_s - 58) * 1e6))
    unfinished = CALLS.unfinished("c", 1, token).with_ttl(60, int(script.now_s * 1e6))
    assert unfinished.until_us == (script.now_s + 2) * 1e6
    script.run(attempts(CALLS.resolve(unfinished), policy))
    script.now_s += 0.001
    with pytest.raises(UnknownOutcomeError):
        script.run(attempts(CALLS.resolve(unfinished), policy))
    assert len(script.sent) == 1


def test_what_of_a_batch_is_known_is_returned_whatever_refuses_the_rest() -> None:
    """The first response counts one item, and the service then refuses the whole batch."""
    waits = json.loads(problem("overloaded", 503, "same_token").body)
    script = Script([batch("added", waits), problem("unauthorized", 401, "never", applied=False)])
    delivery = Delivery.of_items(CALLS, [("a", 1), ("b", 1)])
    one, two = script.run(delivery.until_deadline(script.policy()))
    assert isinstance(one, Added)
    assert isinstance(two, UnknownOutcomeError)
