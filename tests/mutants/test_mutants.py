"""The faults that scripts/mutants plants, and the list of their killers."""

from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.coverage_map import CoverageMap
from tests.mutants.listing import read_rows, summary
from tests.mutants.operators import mutants_of
from tests.mutants.plan import OPERATORS, all_mutants, drawn, installed_areas

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("operator", "body", "fault"),
    [
        ("comparison", "return a < b", "return a >= b"),
        ("comparison", "return a and b", "return (b)"),
        ("boundary", "return a < b", "return a <= b"),
        ("boundary", "return a[1:]", "return a[1 + 1:]"),
        ("boundary", "return 'DELETE WHERE a < b'", "return 'DELETE WHERE a <= b'"),
        ("await", "await a.put(b)", '__import__("asyncio").ensure_future(a.put(b))'),
        ("swap", "await a.x()\n    b.y()", "b.y()\n    await a.x()"),
        ("lock", "with a.lock: b()", "if True: b()"),
        ("lock", "return 'SELECT 1 FOR UPDATE'", "return 'SELECT 1'"),
        ("stamp", "a.write(t_us)", "a.write(t_us + 1_000_000)"),
        ("consistency", "return a.to_settle(b)", "return a.to_read(b)"),
        ("cache", "await a.x()\n    b.cache.put(1)", "b.cache.put(1)\n    await a.x()"),
        ("durability", "os.fsync(a)", "pass"),
        ("durability", "a('PRAGMA synchronous = FULL')", "a('PRAGMA synchronous = OFF')"),
        ("step", "a.drop(b)", "pass"),
    ],
)
def test_an_operator_makes_its_fault(operator: str, body: str, fault: str, tmp_path: Path) -> None:
    text = f"async def f(a, b):\n    {body}\n"
    (tmp_path / "a.py").write_text(text, "utf-8")
    made = {each.plant(text): each.operator for each in mutants_of(tmp_path, "a.py")}
    assert made.get(f"async def f(a, b):\n    {fault}\n") == operator


@pytest.mark.parametrize(
    "body",
    [
        "_log.info('a %s', a > b)",
        "raise ValueError(a < b)",
        "'A text: a < b, and SELECT a < b.'",
        "invariant(a < b, 'text')",
    ],
)
def test_text_for_people_gets_no_fault(body: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(f"def f(a, b):\n    {body}\n", "utf-8")
    assert mutants_of(tmp_path, "a.py") == []


def test_a_docstring_is_no_step(tmp_path: Path) -> None:
    text = "def f(a):\n    'What it does.'\n    a.cache.put(1)\n"
    (tmp_path / "a.py").write_text(text, "utf-8")
    assert [each.old for each in mutants_of(tmp_path, "a.py")] == ["a.cache.put(1)"]


def test_a_fault_keeps_its_name_if_other_lines_change(tmp_path: Path) -> None:
    names = []
    for before in ("", "x = 1\n\n\n"):
        (tmp_path / "a.py").write_text(f"{before}def f(a, b):\n    return a < b\n", "utf-8")
        names.append([each.id for each in mutants_of(tmp_path, "a.py")])
    assert names[0] == names[1]
    assert len(set(names[0])) == 2


def test_drawn_faults_stay_in_the_list() -> None:
    possible = all_mutants(ROOT)
    first = drawn(possible, {})
    assert drawn(possible, dict.fromkeys(first, "killed")) == first
    assert len(first) >= 300
    assert {possible[key][0] for key in first} == {*installed_areas()}
    assert {possible[key][1].operator for key in first} == {*OPERATORS}
    of_module = Counter(possible[key][1].path for key in first)
    assert {*of_module} == {path for paths in installed_areas().values() for path in paths}


def test_a_fault_that_prevents_the_start_is_replaced() -> None:
    possible = all_mutants(ROOT)
    first, *_ = drawn(possible, {})
    assert first not in drawn(possible, {first: "does not start"})


def test_the_fastest_tests_of_a_line_come_first(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f(a, b):\n    return a < b\n", "utf-8")
    mutant = mutants_of(tmp_path, "a.py")[0]
    seconds = {"x.py::slow": 3.0, "x.py::fast": 1.0, "x.py::too_slow": 60.0, "x.py::else": 0.0}
    known = CoverageMap(seconds, {"a.py": {2: ["x.py::slow", "x.py::too_slow", "x.py::fast"]}})
    assert known.tests_of(tmp_path, mutant) == ["x.py::fast", "x.py::slow"]


def test_the_tables_are_those_of_the_list() -> None:
    rows = read_rows(ROOT)
    assert summary(rows) in (ROOT / "docs" / "guarantees.md").read_text("utf-8")
    assert not [row for row in rows.values() if row.verdict == "harmless" and not row.by]
