"""Which tests run which lines, and how long each takes: the order of the tests for a fault."""

from __future__ import annotations

import ast
import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import coverage
import pytest

from tests.mutants.operators import Mutant
from tests.mutants.plan import installed_areas

#: Tests that take longer kill no fault: it would not be within a bounded time.
TEST_S_MAX = 8.0


@dataclass(slots=True)
class CoverageMap:
    """The seconds of each test, and by file and line the tests that run it."""

    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[int, list[str]]] = field(default_factory=dict)

    def tests_of(self, root: Path, mutant: Mutant) -> list[str]:
        """Return the tests that run the lines of *mutant*: the fastest of each file first."""
        if mutant.path.endswith(".sql"):
            found = {each for each in self.seconds if "postgresql" in each}
        else:
            lines = self.lines.get(mutant.path, {})
            found = {each for line in _places(root, mutant, lines) for each in lines.get(line, ())}
        of_file: dict[str, list[str]] = {}
        for each in sorted(found, key=lambda test: (self.seconds[test], test)):
            if self.seconds[each] <= TEST_S_MAX:
                of_file.setdefault(each.partition("::")[0], []).append(each)
        # Those that run little besides come first: files with few tests of the place.
        turns = zip_longest(*sorted(of_file.values(), key=len))
        return [each for turn in turns for each in turn if each is not None]


def _places(root: Path, mutant: Mutant, lines: Mapping[int, Sequence[str]]) -> set[int]:
    """Return lines of which any runs whenever *mutant* does."""
    text = (root / mutant.path).read_text("utf-8")
    tree = ast.parse(text)
    last = text.count("\n", 0, mutant.end) + 1
    places = set(range(mutant.line, last + 1))
    functions = [
        each
        for each in ast.walk(tree)
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        and each.lineno <= mutant.line <= (each.end_lineno or 0)
    ]
    if not functions:
        # A constant: the lines that read its name.
        return {
            each.lineno
            for each in ast.walk(tree)
            if isinstance(each, ast.Name)
            and each.id == mutant.function
            and isinstance(each.ctx, ast.Load)
        }
    first = functions[-1].lineno
    at = mutant.line
    while not any(lines.get(place) for place in places) and at > first:
        # Of a statement of several lines only some are recorded.
        at -= 1
        places.add(at)
    return places


class _Recorder:
    def __init__(self, measured: coverage.Coverage) -> None:
        self._measured = measured
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._measured.switch_context(item.nodeid)
        began_s = time.monotonic()
        result = yield
        self.seconds[item.nodeid] = time.monotonic() - began_s
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed":
            self.failed.add(report.nodeid)


def record(tests: Sequence[str]) -> CoverageMap:
    """Run *tests*, and return the lines of each that passed."""
    root = Path.cwd()
    paths = [str(root / path) for paths in installed_areas().values() for path in paths]
    measured = coverage.Coverage(data_file=None, config_file=False, include=paths)
    recorder = _Recorder(measured)
    measured.start()
    pytest.main([*tests, "-q", "-p", "no:cacheprovider", "-p", "no:xdist"], plugins=[recorder])
    measured.stop()
    found = CoverageMap(recorder.seconds)
    data = measured.get_data()
    for path in data.measured_files():
        found.lines[Path(path).relative_to(root).as_posix()] = {
            line: [each for each in tests if each and each not in recorder.failed]
            for line, tests in data.contexts_by_lineno(path).items()
        }
    return found


def save(found: CoverageMap, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps((found.seconds, found.lines)))


def load(path: Path) -> CoverageMap:
    if not path.exists():
        raise SystemExit(f"{path} is missing: run `./scripts/mutants --record`")
    return CoverageMap(*pickle.loads(path.read_bytes()))
