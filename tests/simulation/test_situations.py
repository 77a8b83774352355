"""The table in docs/guarantees.md names the situations that runs note, and none is too rare."""

import re
from collections import Counter
from pathlib import Path

from tests.simulation.cells import Cell, Deletion, Partition, Row
from tests.simulation.run import run_seed
from tests.simulation.situations import MORE_PER_1000, SITUATIONS, missed

_GUARANTEES = Path(__file__).resolve().parents[2] / "docs" / "guarantees.md"


def _documented() -> tuple[int, dict[str, int]]:
    """How many seeds the table is of, and how many of them reached each situation."""
    text = _GUARANTEES.read_text(encoding="utf-8")
    _, _, rest = text.partition("<!-- written by scripts/simulate --seeds 1000 --situations -->")
    part, _, _ = rest.partition("<!-- end of the situations -->")
    seeds = re.search(r"of ([\d,]+) seeds", part)
    assert seeds is not None
    rows = re.findall(r"^\| `([\w-]+)` \|.*\| (\d+) \|$", part, re.MULTILINE)
    return int(seeds[1].replace(",", "")), {name: int(number) for name, number in rows}


def test_every_situation_is_in_the_table_and_no_other() -> None:
    _, documented = _documented()
    assert [*documented] == [*SITUATIONS]


def test_enough_seeds_of_the_table_reached_each() -> None:
    seeds, documented = _documented()
    assert missed(documented, seeds) == []


def test_a_situation_that_too_few_seeds_reached_is_missed() -> None:
    reached = Counter(dict.fromkeys(SITUATIONS, 20) | MORE_PER_1000)
    assert missed(reached, 1_000) == []
    reached["retention"] -= 1
    assert missed(reached, 1_000) == ["retention"]
    reached["watermark"] -= 1
    assert missed(reached, 1_000) == ["watermark", "retention"]
    # Too few seeds to tell.
    assert missed(reached, 999) == []


def test_a_run_notes_only_situations_that_are_named() -> None:
    assert {*run_seed(506).reached} <= {*SITUATIONS}


def test_a_new_ballot_stamps_what_is_deleted_just_before_what_is_written() -> None:
    """As Paxos v1 does: the same proposal may delete a row and write it."""
    row = Row({"a": Cell(5, False, 1), "b": Cell(4, True, None, 7)}, None, Deletion(4, 7))
    stamped = Row({"a": Cell(9, False, 1), "b": Cell(8, True, None, 7)}, None, Deletion(8, 7))
    assert Partition({(1,): row}).restamped(9) == Partition({(1,): stamped})
