"""Each bug that is planted into the adapter for DynamoDB is caught in every run."""

from typing import Final

import pytest

from counter.errors import CounterError
from tests.simulation.bugs import Bug
from tests.simulation.bugs_dynamodb import BUGS
from tests.simulation.outcomes import outcomes_with
from tests.simulation.run import run_seed

_RULES: Final = "tests/simulation/test_dynamodb_rules.py::"
_SEEN: Final = f"{_RULES}test_every_read_sees_written_data"

#: Bugs that the first seed catches.
QUICK: Final = ("query-eventual", "transaction-in-parts", "head-before-rows", "rows-not-awaited")
#: By bug: the test that catches it.
DIRECTED: Final = {
    "get-eventual": _SEEN,
    "get-many-eventual": _SEEN,
    "sent-again": f"{_RULES}test_an_add_without_a_response_is_unknown_until_it_is_resolved",
    "cancel-overwrites": (
        "tests/simulation/test_dynamodb.py::TestCancels::test_a_cancel_replaces_a_decision"
    ),
    "cancelled-item-kept": (
        "tests/simulation/test_dynamodb.py::"
        "TestPurge::test_a_decision_that_is_cancelled_lives_as_long_again"
    ),
    "void-by-deletion": f"{_RULES}test_an_add_that_lands_after_it_was_made_void_does_not_count",
    "namespace-item-removed": (
        f"{_RULES}test_a_creation_that_lands_after_a_deletion_makes_no_namespace"
    ),
    "missing-is-not-found": (
        "tests/simulation/test_dynamodb.py::TestEvents::test_a_missing_slice_is_not_not_found"
    ),
    "settled-rows-first": f"{_RULES}test_a_checkpoint_is_the_sum_of_its_rows_at_each_moment",
    "throttled-is-written": f"{_RULES}test_a_throttled_add_is_refused_and_not_written[add]",
}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_caught(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    """And without it the seed, or the test, passes."""
    if bug.name in QUICK:
        assert run_seed(0, bug.plant, store="dynamodb").problems
        return
    came = outcomes_with(bug, DIRECTED[bug.name], monkeypatch)
    assert came.outcomes == ["call failed"], came.text or f"there is no {DIRECTED[bug.name]}"
    assert isinstance(came.error, (AssertionError, CounterError, pytest.fail.Exception)), came.text
