"""The client has its own errors, bounds and names; they are the service's."""

from collections.abc import Callable
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

import counter_client.errors
from api.http.problems import problem_types
from counter import clock, errors, limits, quantities
from counter_client import calls, tokens, transport
from counter_client.errors import InvalidParameterError
from counter_client.tokens import checked_name, checked_namespace, parse_rfc3339, to_rfc3339

ANY_TEXT = st.text(max_size=300) | st.from_regex(r"[a-z][a-z0-9_-]{0,70}", fullmatch=True)


@pytest.mark.parametrize("kind", problem_types(), ids=lambda kind: kind.code)
def test_each_error_of_the_service_is_one_of_the_client(kind: type[errors.CounterError]) -> None:
    """Of the same name, code, base classes and default values."""
    found = getattr(counter_client.errors, kind.__name__)
    assert (found.code, found.applied, found.retry) == (kind.code, kind.applied, kind.retry)
    assert [each.__name__ for each in found.__mro__] == [each.__name__ for each in kind.__mro__]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        *((tokens, name) for name in ("INT64_MIN", "INT64_MAX", "NONCE_BYTES")),
        *((tokens, f"{name}_CHARS_MAX") for name in ("COUNTER_NAME", "IDEMPOTENCY_KEY")),
        *((calls, f"{name}_ITEMS_MAX") for name in ("ATOMIC", "BATCH", "PAGE")),
        (calls, "BODY_BYTES_MAX"),
    ],
)
def test_the_bounds_are_those_of_the_service(module: ModuleType, name: str) -> None:
    assert getattr(module, name) == getattr(limits, name)


def test_every_response_fits_the_clients_bound() -> None:
    """With each character of a name escaped as two surrogates."""
    one = 12 * limits.COUNTER_NAME_CHARS_MAX + 1_024
    assert one <= transport.ANSWER_ONE_BYTES_MAX
    many = max(limits.BATCH_ITEMS_MAX * one, limits.HISTORY_POINTS_MAX * 256)
    assert many <= transport.ANSWER_BYTES_MAX


def fault_of(check: Callable[[str], str], name: str) -> str:
    """The error of *check* for *name*, without the name; empty if it accepts it."""
    try:
        check(name)
    except (ValueError, InvalidParameterError) as error:
        return str(error).rpartition("a counter's name ")[2]
    return ""


@given(ANY_TEXT)
def test_both_accept_the_same_counter_names(name: str) -> None:
    assert fault_of(checked_name, name) == fault_of(quantities.check_counter_name, name)


@given(ANY_TEXT)
def test_both_accept_the_same_namespaces(name: str) -> None:
    if quantities.is_namespace_name(name):
        assert checked_namespace(name) == name
    else:
        with pytest.raises(InvalidParameterError):
            checked_namespace(name)


@given(st.integers(limits.TIME_MIN_US, limits.TIME_MAX_US))
def test_both_write_and_read_an_instant_alike(time_us: int) -> None:
    text = to_rfc3339(time_us)
    assert text == clock.to_rfc3339(time_us)
    assert parse_rfc3339(text) == clock.parse_rfc3339(text) == time_us
