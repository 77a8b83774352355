"""Messages of commands."""

from typing import Any

import pytest

from counter.cli.client import ServiceFlags, explain
from counter.quantities import plural
from counter_client.errors import CounterError


def wrong(*errors: Any) -> CounterError:
    return CounterError("adds_per_s: no (it is -1)", code="invalid_body", errors=list(errors))


def test_each_field_that_is_wrong_is_a_line() -> None:
    """Regression: only the first one was printed."""
    first = {"field": "adds_per_s", "message": "no", "value": "-1"}
    second = {"field": "requests_per_s", "message": "too many", "value": "5"}
    missing = {"field": "shards", "message": "Field required", "value": None}
    assert explain(wrong(first, second, missing)).splitlines() == [
        "adds_per_s: no (it is -1)",
        "requests_per_s: too many (it is 5)",
        "shards: Field required",
    ]


@pytest.mark.parametrize("errors", [None, "x", 5, [], ["x"], [None], [{}], [{"field": 5}, 5]])
def test_an_answer_of_another_service_is_printed_as_it_is(errors: Any) -> None:
    assert explain(CounterError("no", errors=errors)).startswith("no")


def test_one_is_not_many() -> None:
    assert plural(1, "line") == "1 line"
    assert plural(0, "line") == "0 lines"
    assert plural(1_234, "line is", "lines are") == "1,234 lines are"


def test_the_namespace_of_a_hint_is_ready_for_a_shell() -> None:
    error = CounterError("n", code="scope_insufficient", scope="write")
    assert explain(error, ServiceFlags(namespace="a b")).endswith("--namespace 'a b' --scope write")
