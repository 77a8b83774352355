"""Each planted fault and bug is caught in the level alone, but for those of real servers."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.listing import Row, level_table, read_rows
from tests.simulation.bugs import all_bugs
from tests.simulation.directed import DIRECTED, QUICK, SEEDS
from tests.support.levels import Level

ROOT = Path(__file__).resolve().parents[2]
#: Areas of faults that need no server to be caught: not PostgreSQL and the caches.
ALONE = ("core", "sqlite", "memory", "dynamodb", "cassandra", "rollup", "streams", "client")


@pytest.fixture(scope="module")
def alone(child_processes: None) -> frozenset[str]:
    """The ids of the tests of the level alone."""
    command = (sys.executable, "-m", "pytest", "--collect-only", "-q", f"--level={Level.ALONE}")
    listed = subprocess.run(
        [*command, "-p", "no:cacheprovider"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return frozenset(listed.stdout.splitlines())


def level_of_killer(by: str, alone: frozenset[str]) -> Level:
    """Return the level in which a test or a seed of the simulation runs."""
    is_alone = int(by.split()[1]) < SEEDS if by.startswith("seed ") else by in alone
    return Level.ALONE if is_alone else Level.SERVED


def killed() -> list[Row]:
    return [row for row in read_rows(ROOT).values() if row.verdict == "killed"]


def test_the_tests_that_kill_a_fault_run_alone(alone: frozenset[str]) -> None:
    elsewhere = {
        row.id: row.by
        for row in killed()
        if row.area in ALONE and level_of_killer(row.by, alone) is not Level.ALONE
    }
    assert elsewhere == {}


def test_the_table_gives_the_level_that_catches_each_fault(alone: frozenset[str]) -> None:
    found = Counter((row.area, level_of_killer(row.by, alone)) for row in killed())
    assert level_table(found) in (ROOT / "docs" / "guarantees.md").read_text("utf-8")


def test_the_tests_that_catch_a_planted_bug_run_alone(alone: frozenset[str]) -> None:
    assert {*DIRECTED, *QUICK} >= {*all_bugs()}
    assert {bug: test for bug, test in DIRECTED.items() if test not in alone} == {}


def test_a_fault_whose_test_moved_to_another_level_is_noticed(alone: frozenset[str]) -> None:
    by = next(row.by for row in killed() if row.area == "core" and "::" in row.by)
    assert level_of_killer(by, alone) is Level.ALONE
    assert level_of_killer(by, alone - {by}) is Level.SERVED
    assert level_of_killer(f"seed {SEEDS}", alone) is Level.SERVED
