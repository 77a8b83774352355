"""Every planted bug is caught in every run: by a few seeds, or by a test directed at it."""

import pytest

from counter.errors import CounterError
from tests.simulation.bugs import Bug, all_bugs
from tests.simulation.directed import DIRECTED, QUICK
from tests.simulation.outcomes import outcomes_with


@pytest.mark.parametrize("name", DIRECTED)
def test_a_directed_test_fails_where_the_bug_is_planted(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it passes without: it is among the tests of this suite."""
    came = outcomes_with(all_bugs()[name], DIRECTED[name], monkeypatch)
    assert came.outcomes == ["call failed"], came.text or f"there is no {DIRECTED[name]}"
    # A planted bug must run, and not be a fault that any test would notice.
    assert isinstance(came.error, (AssertionError, CounterError, pytest.fail.Exception)), came.text
    assert not str(came.error).startswith("Timeout"), came.text


@pytest.mark.parametrize("bug", all_bugs().values(), ids=lambda bug: bug.name)
def test_every_bug_fits_the_source(bug: Bug) -> None:
    """A change of the source may unplant one: it edits text."""
    with bug.plant():
        pass


def test_every_bug_is_caught_in_every_run() -> None:
    assert {*QUICK, *DIRECTED} == {*all_bugs()}
    assert not {*QUICK} & {*DIRECTED}
