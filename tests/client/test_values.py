"""Tokens, keys and errors keep their values through a store or over the wire."""

import json
import pickle
import ssl

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.http.problems import problem_bytes, problem_types
from counter import errors, limits
from counter_client import CounterClient, Key, Options, Token, Unfinished
from counter_client.calls import Request
from counter_client.errors import CounterError, InvalidParameterError, UnavailableError
from counter_client.failures import (
    UnexpectedAnswerError,
    UnknownOutcomeError,
    UnreachableError,
    UnsentError,
    error_of_answer,
    error_of_problem,
)
from counter_client.transport import Common, context_of

TOKENS = st.builds(
    Token, st.binary(min_size=16, max_size=16), st.integers(limits.TIME_MIN_US, limits.TIME_MAX_US)
)
KEYS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=255).map(
    Token.from_key
)


@given(st.one_of(TOKENS, KEYS))
def test_a_token_or_key_comes_back_from_its_text(credential: Token | Key) -> None:
    assert Token.parse(str(credential)) == credential
    assert pickle.loads(pickle.dumps(credential)) == credential


@given(TOKENS, st.text(st.characters(codec="utf-8"), min_size=1, max_size=255))
def test_a_derived_token_depends_on_parent_and_label_alone(token: Token, label: str) -> None:
    derived = token.derive(label)
    assert derived == token.derive(label) != token.derive(label + "x")
    assert derived.generation_time_us == token.generation_time_us
    assert derived.derive("x") != derived


def test_derived_tokens_and_keys_never_change() -> None:
    """Programs store the parent alone, so each release derives the same."""
    token = Token(bytes(range(16)), 0).derive("stock")
    assert token.nonce.hex() == "26e3a438f81844bf351641ff6682c77a"
    assert Token.from_key("order-123").derive("stock").text == (
        "derived:61cdc007f6759955c146add607900bc33b28e6747c4faf39"
    )


@pytest.mark.parametrize("label", ["", "x" * 257])
def test_a_label_out_of_bounds_is_refused_with_the_bound(label: str) -> None:
    for parent in (Token.new(), Token.from_key("order-123")):
        with pytest.raises(InvalidParameterError, match="256"):
            parent.derive(label)


def test_a_derived_key_is_one_key_for_each_label() -> None:
    key = Token.from_key("order-123")
    assert key.derive("stock") == key.derive("stock") != key.derive("mail")
    assert Token.from_key("order-1").derive("23x") != Token.from_key("order-12").derive("3x")


@pytest.mark.parametrize("text", ["", "x" * 256, "ü", "a\n", " a"], ids=repr)
def test_an_invalid_key_is_refused(text: str) -> None:
    with pytest.raises(InvalidParameterError):
        Token.from_key(text)


@pytest.mark.parametrize("text", ["", "x@y", "5f3a0f0e-6f0c-4f7e-9d3b-0c5f1d2e3a4b", "key:"])
def test_an_invalid_token_is_refused(text: str) -> None:
    with pytest.raises(InvalidParameterError):
        Token.parse(text)


def test_new_tokens_are_never_the_same() -> None:
    assert len({Token.new() for _ in range(1_000)}) == 1_000


@given(st.lists(st.tuples(st.text(), st.integers()), min_size=1), st.one_of(TOKENS, KEYS))
def test_an_unfinished_add_is_parsed_from_its_text(
    items: list[tuple[str, int]], credential: Token | Key
) -> None:
    operation = "add" if len(items) == 1 else "atomic/add"
    unfinished = Unfinished(operation, "default", tuple(items), str(credential))
    assert Unfinished.parse(str(unfinished)) == unfinished
    assert unfinished.token == credential


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", "[]", '{"items": [1]}', '{"items": [], "x": 1}'),
        str(Unfinished("add", "default", (("a", 1), ("b", 1)), "key:k")),
        str(Unfinished("live", "default", (("a", 1),), "key:k")),
        str(Unfinished("add", "default", (("a", 1),), "no token")),
        str(Unfinished("add", "default", (("a", 1),), "key:k")).replace("1]", "1e999]"),
    ],
)
def test_an_invalid_unfinished_add_is_refused(text: str) -> None:
    """Regression: resolve ended with errors of Python, before or after the request."""
    with pytest.raises(InvalidParameterError):
        Unfinished.parse(text)


@pytest.mark.parametrize("kind", problem_types(), ids=lambda kind: kind.code)
@pytest.mark.parametrize("retry_after_us", [None, 2_000_000])
def test_each_problem_is_read_back_as_the_error_it_was(
    kind: type[errors.CounterError], retry_after_us: int | None
) -> None:
    is_late = kind is errors.TokenTooOldError
    error = kind("why", applied=False) if is_late else kind("why", field="delta")
    error.retry_after_us = retry_after_us
    found = error_of_answer(error.status, problem_bytes(error), None)
    assert type(found).__name__ == kind.__name__
    assert (found.code, found.detail, found.applied) == (error.code, "why", error.applied)
    assert (found.retry, found.retry_after_us) == (error.retry, retry_after_us)
    assert found.fields == error.fields


def test_an_unknown_code_still_says_whether_to_retry() -> None:
    text = '{"code": "new_one", "retry": "same_token", "applied": null, "retry_after": 1}'
    found = error_of_problem(json.loads(text))
    assert (found.retry, found.applied, found.retry_after_us) == ("same_token", None, 1_000_000)
    assert found.fields["code"] == "new_one"


def test_options_can_be_pickled() -> None:
    options = Options(deadline_s=3.0, hedge_after_s="p95")
    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize("given", ["", " \n", "ck_a b", "ck_caf\u00e9", "ck_a\x00b"])
def test_an_invalid_api_key_is_rejected_and_not_shown(given: str) -> None:
    with pytest.raises(InvalidParameterError) as refused:
        CounterClient("http://127.0.0.1:1", api_key=given)
    assert not given.strip() or given.strip() not in str(refused.value)


def test_a_key_may_come_as_a_file_has_it() -> None:
    common = Common(["http://127.0.0.1:1"], "ck_abc\n", Options())
    assert common.headers["Authorization"] == "Bearer ck_abc"


def test_only_tls_loads_the_certificates_of_authorities() -> None:
    """The other one trusts no certificate."""
    urls = ["http://127.0.0.1:1", "https://127.0.0.1:2"]
    assert context_of(Options(), urls).get_ca_certs() != []
    plain = context_of(Options(), urls[:1])
    assert plain.verify_mode == ssl.CERT_REQUIRED
    assert plain.get_ca_certs() == []


@pytest.mark.parametrize("operation", ["get", "add"])
def test_a_server_that_is_not_trusted_is_not_asked_again(operation: str) -> None:
    url = "https://127.0.0.1:1"
    error = httpx.ConnectError("certificate verify failed")
    error.__cause__ = ssl.SSLCertVerificationError("self-signed certificate")
    found = Common([url], None, Options()).unreachable(url, error, Request("POST", "/", operation))
    assert (found.retry, found.sent) == ("never", False)


def test_an_unknown_outcome_is_no_definite_refusal() -> None:
    """A program that asks for a refusal by its class would add again."""
    for kind in (UnknownOutcomeError, UnsentError, UnreachableError, UnexpectedAnswerError):
        assert set(kind.__mro__) - {kind, Exception, BaseException, object} == {
            UnavailableError,
            CounterError,
        }
