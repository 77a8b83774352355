"""The gateway of the page on budgets runs for real: answers are lost, and processes are killed."""

import re
from typing import NamedTuple

import pytest

from scripts.cluster_servers import redis_missing
from tests.support.child import run_python
from tests.support.documents import page
from tests.support.needs import miss
from tests.support.server import ROOT

#: A name and numbers; in the next line, what became of the calls, and of the looks.
_RUN = re.compile(
    r"^(\S.*?) {2,}(\d+) +(\d+) +(\d+) +(-?\d+) +(\d+) +(-?\d+)\n"
    r"  ([\w, ]+); (\d+) counted late; (\d+) of (\d+) looks past a budget$",
    re.MULTILINE,
)
_BUDGET_PER_CALL = 100


class Run(NamedTuple):
    """What the program prints for a ledger."""

    name: str
    lost: int
    billed: int
    counted: int
    wrong_by: int
    left: int
    held: int
    calls: int
    late: int
    past: int
    looks: int


def runs_of(text: str) -> list[Run]:
    """The runs that *text* shows."""
    found = []
    for name, *numbers, results, late, past, looks in _RUN.findall(text):
        calls = sum(map(int, re.findall(r"\d+", results)))
        found.append(Run(name, *map(int, (*numbers, calls, late, past, looks))))
    return found


def check(runs: list[Run], calls: int) -> None:
    """What is counted over holds is what is billed, and Redis differs from it."""
    assert [each.calls for each in runs] == [calls] * 3
    counter, *redis = runs
    assert all(each.lost > 0 and each.looks > 0 for each in runs)
    # The killed gateway held something, and nothing is held in the end.
    assert counter.left > 0
    assert (counter.wrong_by, counter.held) == (0, 0)
    assert counter.counted == counter.billed
    # A budget can be passed only by what was billed after its hold had ended.
    assert counter.past == 0 or counter.late > 0
    if not counter.late:
        assert counter.counted <= calls * _BUDGET_PER_CALL
    for each in redis:
        assert each.wrong_by == each.counted - each.billed
        assert (each.wrong_by, each.held) != (0, 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("child_processes")
def test_what_is_billed_is_counted() -> None:
    """The page has a longer run."""
    if problem := redis_missing():
        miss(problem)
    done = run_python(
        *("docs/programs/keep_a_budget.py", "--redis", "--calls", "100"),
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'clients/python'}"},
        timeout=590,
    )
    assert (done.returncode, done.stderr) == (0, "")
    found, written = runs_of(done.stdout), runs_of(page("how-to/keep-a-budget.md"))
    assert [each.name for each in found] == [each.name for each in written]
    check(found, 100)
    check(written, 10_000)


def test_a_wrong_run_is_found() -> None:
    text = (
        "name, a     1  9  7  -2  5  0\n"
        "  3 answered, 1 given up; 0 counted late; 0 of 8 looks past a budget\n"
    )
    assert runs_of(text) == [Run("name, a", 1, 9, 7, -2, 5, 0, 4, 0, 0, 8)]
    with pytest.raises(AssertionError):
        check(runs_of(text) * 3, 4)
