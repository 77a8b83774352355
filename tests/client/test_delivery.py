"""Whatever happens on the way, each add of a batch is counted once: against a service that loses
requests and answers, voids tokens, and answers some items with problems."""

import time
from collections import Counter
from collections.abc import Callable
from threading import Event
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counter import limits
from counter_client.answers import Added
from counter_client.buffer import Buffer, Limits
from counter_client.calls import Calls
from counter_client.delivery import Backlog, Delivery, Item
from counter_client.errors import (
    CounterError,
    InvalidParameterError,
    NamespaceUnknownError,
    TokenTooOldError,
)
from counter_client.failures import (
    RejectedError,
    UnknownOutcomeError,
    UnreachableError,
    UnsentError,
    unexpected,
)
from counter_client.options import Options
from counter_client.retrying import Answer, Budget, Policy, Send
from counter_client.tokens import Token
from tests.client.ledger import Ledger, drawing, forever
from tests.client.script import Script, added, batch, lost, problem

CALLS = Calls("default")
AWAY = UnreachableError("no connection", sent=False)
#: Results of an item of a batch.
LATE = {"code": "write_timeout", "retry": "same_token", "applied": None, "detail": "late"}
CONFLICT = {"code": "token_conflict", "retry": "never", "applied": None, "detail": "used"}
VOID = {"code": "token_too_old", "retry": "new_token", "applied": False, "detail": "late"}
CANCELLED = {"code": "token_cancelled", "retry": "never", "applied": False, "detail": "cancelled"}
FORGOTTEN = {"code": "token_too_old", "retry": "never", "applied": None, "detail": "too old"}
GONE = {"code": "namespace_unknown", "retry": "never", "applied": None, "detail": "gone"}
FORBIDDEN = problem("scope_insufficient", 403, "never", retry_after=3_600)
NO_TOKENS = problem("not_found", 404, "never")
ADDS = st.dictionaries(st.sampled_from("abcdef"), st.integers(-(2**66), 2**66), max_size=6)


@given(st.lists(ADDS, max_size=6), st.data())
def test_a_backlog_is_counted_exactly_once(puts: list[dict[str, int]], data: st.DataObject) -> None:
    ledger, backlog = drawing(data, items_max=data.draw(st.integers(1, 8))), Backlog()
    script, expected = forever(ledger), Counter[str]()
    for adds in puts:
        expected.update(adds)
        backlog.put(dict(adds))
        if data.draw(st.booleans()):
            send_all(backlog, script)
    send_all(backlog, script)
    assert ledger.counts == expected
    assert (len(backlog), backlog.begun) == (0, backlog.finished)


def send_all(backlog: Backlog, script: Script) -> None:
    while piece := backlog.seal():
        delivery = Delivery(CALLS, piece, backlog.renew)
        script.run(delivery.for_ever(script.policy()))
        assert backlog.finish() == []


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-9, 9)), min_size=1), st.data())
def test_a_batch_reports_the_outcome_of_each_item(
    items: list[tuple[str, int]], data: st.DataObject
) -> None:
    """By the deadline each item is counted, void, or has an unknown outcome."""
    ledger = drawing(data, most=30, items_max=data.draw(st.integers(1, 8)))
    script = forever(ledger)
    delivery = Delivery.of_items(CALLS, items)
    results = script.run(delivery.until_deadline(script.policy(deadline_s=2.0)))
    sure, possible = Counter[str](), Counter[str]()
    for (counter, _), item, result in zip(items, delivery.items, results, strict=True):
        is_counted = item.token.nonce.hex() in ledger.counted
        possible[counter] += is_counted
        if isinstance(result, TokenTooOldError):
            assert result.applied is False
            assert not is_counted
        elif isinstance(result, CounterError):
            assert isinstance(result, UnknownOutcomeError)
            assert result.token == item.token
        else:
            sure[counter] += 1
    assert sure <= possible


def test_items_keep_their_tokens_over_every_attempt() -> None:
    script = Script([lost(), batch(LATE, LATE), added])
    script.run(Delivery.of_items(CALLS, [("a", 1), ("b", 1)]).for_ever(script.policy()))
    assert len({each.request.body for each in script.sent}) == 1


def test_a_spool_sends_no_token_that_the_service_honours_no_longer() -> None:
    """An old one is reported with its end; a young one goes on, until it is old too."""
    script = Script([])
    now_us = int(script.now_s * 1e6)
    old, young = (Token(bytes(16), now_us - age_s * 1_000_000) for age_s in (3_600, 60))
    items = [Item("old", 1, old), Item("young", 1, young)]
    busy = problem("overloaded", 503, "same_token")._replace(ttl_s=300)
    delivery = Delivery(CALLS, items)
    script = Script(iter(lambda: busy, None))
    script.run(delivery.for_ever(script.policy(attempt_timeout_s=10.0)))
    counters = [[each["counter"] for each in body["items"]] for body in script.bodies()]
    assert counters[0] == ["old", "young"]
    assert len(counters) > 3
    assert {tuple(each) for each in counters[1:]} == {("young",)}
    for each in items:
        assert isinstance(each.result, UnknownOutcomeError)
        assert each.result.unfinished.until_us == each.token.generation_time_us + 300 * 10**6
        assert "Compare the count" in each.result.detail
    # The last attempt could still end in time.
    assert script.now_s * 1e6 <= young.generation_time_us + 300 * 10**6
    assert script.now_s * 1e6 > young.generation_time_us + 280 * 10**6


def test_a_batch_to_a_namespace_that_is_not_there_is_refused_as_a_whole() -> None:
    script = Script([problem("namespace_unknown", 404, "never")])
    delivery = Delivery.of_items(CALLS, [("a", 1)])
    with pytest.raises(NamespaceUnknownError):
        script.run(delivery.until_deadline(script.policy()))


@pytest.mark.parametrize("count", [0, 1_001])
def test_a_batch_of_no_items_or_too_many_is_refused(count: int) -> None:
    with pytest.raises(InvalidParameterError, match=str(count)):
        Delivery.of_items(CALLS, [("a", 1)] * count)


def test_a_request_is_never_larger_than_the_service_reads() -> None:
    """A thousand of the longest names are more than one body."""
    ledger = Ledger(lambda: "none")
    script = forever(ledger)
    items = [Item(f"{'🜂' * 252}{at:04}", 1, Token.new()) for at in range(1_000)]
    script.run(Delivery(CALLS, items).for_ever(script.policy()))
    sizes = [len(each.request.body or b"") for each in script.sent]
    assert len(sizes) > 1
    assert max(sizes) <= limits.BODY_BYTES_MAX
    assert sum(ledger.counts.values()) == 1_000


@pytest.mark.parametrize("final", [CONFLICT, CANCELLED], ids=lambda final: str(final["code"]))
def test_an_add_that_can_never_count_is_returned(final: dict[str, Any]) -> None:
    """For sure, although the attempt before may have counted it."""
    backlog = Backlog()
    backlog.put({"a": 3})
    script = Script([lost(), batch(final)])
    script.run(Delivery(CALLS, backlog.seal()).for_ever(script.policy()))
    [rejected] = backlog.finish()
    assert (rejected.counter, rejected.delta, rejected.error.code) == ("a", 3, final["code"])
    assert len(script.sent) == 2
    assert len(backlog) == 0


def test_a_closed_buffer_returns_all_unsent_adds() -> None:
    """Regression: a batch in progress was lost, or reported as unsent although it was sent."""
    for thousandths in range(30):
        ledger = Ledger(lambda: "none")
        names = [str(number) for number in range(4_000)]
        left: Counter[str] = Counter()
        error = closed(filled(ledger.answer, names), thousandths / 1_000)
        if error is not None:
            left.update(error.unsent)
            for each in error.unfinished:
                assert isinstance(each.token, Token)
                if each.token.nonce.hex() not in ledger.counted:
                    left.update(dict(each.items))
            assert not [each for each in error.unsent if ledger.counts[each]]
        assert ledger.counts + left == Counter(names)


def filled(send: Callable[[Send], Answer], names: list[str]) -> Buffer:
    """A buffer that begins to send when it has an add to each of *names*: it is half full then."""
    policy = Policy(Options(), Budget.of(Options(), 0.0), time.monotonic)
    buffer = Buffer(CALLS, policy, send, Limits(60.0, 2 * len(names)), None)
    for each in names:
        buffer.add(each)
    return buffer


def closed(buffer: Buffer, timeout: float) -> UnsentError | None:
    """Close *buffer* within this time; return the error with the rest, if any."""
    try:
        buffer.close(timeout=timeout)
    except UnsentError as error:
        return error
    return None


def test_rejected_adds_of_an_unfinished_batch_are_returned() -> None:
    """Regression: it was in no part of the error."""

    def send(send: Send) -> Answer:
        for each in answers:
            return each(send)
        again.set()
        return lost()

    answers, again = iter([batch(CONFLICT, LATE)]), Event()
    buffer = filled(send, ["a", "b"])
    assert again.wait(60)
    error = closed(buffer, 0.0)
    assert error is not None
    assert [each.counter for each in error.rejected] == ["a"]
    assert [each.items for each in error.unfinished] == [(("b", 1),)]
    assert error.unsent == {}


def test_adds_of_a_batch_that_was_refused_as_a_whole_are_unsent() -> None:
    """Regression: they were reported as perhaps counted."""

    def send(send: Send) -> Answer:
        refused.set()
        return FORBIDDEN

    refused = Event()
    buffer = filled(send, ["a", "b"])
    assert refused.wait(60)
    error = closed(buffer, 0.0)
    assert error is not None
    assert (error.unsent, error.unfinished, error.rejected) == ({"a": 1, "b": 1}, (), ())


@pytest.mark.parametrize(
    ("answers", "is_counted_perhaps"),
    [
        ([FORBIDDEN], False),
        ([AWAY], False),
        ([lost(), FORBIDDEN], True),
        ([unexpected(403, b"a page")], True),
    ],
)
def test_a_refusal_of_an_item_decides_it_if_no_attempt_may_have_counted(
    answers: list[Any], is_counted_perhaps: bool
) -> None:
    for result, kind in ((GONE, NamespaceUnknownError), (FORGOTTEN, Added)):
        script = Script([*answers, batch(result), NO_TOKENS, added])
        delivery = Delivery.of_items(CALLS, [("a", 1)])
        script.run(delivery.for_ever(script.policy()))
        expected = UnknownOutcomeError if is_counted_perhaps else kind
        assert isinstance(delivery.items[0].result, expected)


def test_a_token_that_was_never_counted_is_renewed_when_it_is_too_old() -> None:
    """Regression: the add was reported as rejected, although a new token cannot count it twice."""
    script = Script([AWAY, AWAY, batch(FORGOTTEN), NO_TOKENS, added])
    script.run(Delivery.of_items(CALLS, [("a", 1)]).for_ever(script.policy()))
    sent = [body["items"][0]["idempotency_token"] for body in script.bodies() if "items" in body]
    assert sent[0] == sent[2] != sent[3]


def test_a_token_that_was_never_counted_is_renewed_before_it_is_honoured_no_longer() -> None:
    script = Script([])
    old = Token(bytes(16), int(script.now_s * 1e6) - 3_600 * 10**6)
    items = [Item("a", 1, old)]
    script = Script([FORBIDDEN._replace(ttl_s=300), NO_TOKENS, added])
    script.run(Delivery(CALLS, items).for_ever(script.policy()))
    assert isinstance(items[0].result, Added)
    assert items[0].token != old


def test_a_token_that_the_program_may_resolve_is_not_renewed() -> None:
    """Its add could count twice: by resolve, and by the buffer under the new token."""
    answers, again = iter([batch(FORGOTTEN)]), [Event(), Event()]

    def send(send: Send) -> Answer:
        again[0].set()
        assert again[1].wait(60)
        return next(answers)(send)

    buffer = filled(send, ["a"])
    assert again[0].wait(60)
    with pytest.raises(UnsentError) as caught:
        buffer.flush(timeout=0.0)
    assert [each.items for each in caught.value.unfinished] == [(("a", 1),)]
    again[1].set()
    with pytest.raises(RejectedError) as rejected:
        buffer.close()
    assert isinstance(rejected.value.items[0].error, UnknownOutcomeError)


@pytest.mark.parametrize("other", [LATE, VOID])
def test_a_batch_waits_as_long_as_the_first_of_its_items(other: dict[str, Any]) -> None:
    script = Script(
        [batch(LATE | {"retry_after": 3_600}, other), *[NO_TOKENS] * (other == VOID), added]
    )
    script.run(Delivery.of_items(CALLS, [("a", 1), ("b", 1)]).for_ever(script.policy()))
    assert script.pauses == [0.1]


def test_void_tokens_are_not_renewed_as_fast_as_can_be() -> None:
    """Regression: without tokens of the service, a slow clock made it loop without a pause."""
    none = problem("rate_limited", 429, "same_token")
    answers: list[Any] = [*[batch(VOID), none] * 3, added]
    script = Script(answers)
    delivery = Delivery.of_items(CALLS, [("a", 1)])
    script.run(delivery.for_ever(script.policy(backoff_first_s=0.1)))
    assert script.pauses == pytest.approx([0.2, 0.4, 0.8])


def test_new_tokens_are_used_soon_after_an_outage() -> None:
    """Regression: the pauses of the outage went on, and made new tokens too old again."""
    script = Script([*[lost()] * 9, batch(VOID), problem("not_found", 404, "never"), added])
    script.run(Delivery.of_items(CALLS, [("a", 1)]).for_ever(script.policy()))
    assert script.pauses[-2:] == pytest.approx([5.0, 0.1])


def test_a_machine_whose_clock_is_slow_learns_the_time_from_void_tokens() -> None:
    """Else each piece would be made too old, and be sent twice."""
    backlog = Backlog()
    backlog.put({"a": 1})
    [item] = backlog.seal()
    ahead = Token(item.token.nonce, item.token.generation_time_us + 60_000_000)
    backlog.renew([(item, ahead)])
    backlog.finish()
    backlog.put({"a": 1})
    [later] = backlog.seal()
    assert later.token.generation_time_us >= ahead.generation_time_us


def test_without_a_deadline_a_pause_is_an_hour_at_most() -> None:
    """Regression: a Retry-After of a year, as a proxy may send it, ended the sending for a year."""
    script = Script([problem("overloaded", 503, "same_token", retry_after=10**9), added])
    script.run(Delivery.of_items(CALLS, [("a", 1)]).for_ever(script.policy()))
    assert script.pauses == [3_600.0]


def test_a_batch_has_the_time_at_which_it_is_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counter_client.delivery._now_us", lambda: 1_700_000_000_000_000)
    backlog = Backlog()
    backlog.put({"a": 1, "b": 2})
    times = {each.token.generation_time_us for each in backlog.seal()}
    assert times == {1_700_000_000_000_000}
