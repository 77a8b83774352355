"""The command line of ``scripts/mutants``: plant one-line faults, and see a test or a seed fail.

tests/mutants/list.tsv has each fault that was drawn, and what kills it, or why it is harmless.
Exits with 1 if a fault survives without a reason.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Annotated, Final

from cyclopts import App, Parameter

from tests.mutants import coverage_map
from tests.mutants.coverage_map import CoverageMap
from tests.mutants.listing import Row, read_rows, write_rows, write_summary
from tests.mutants.operators import Mutant, mutants_of
from tests.mutants.plan import AREAS, LEFT_OUT, SIMULATED, TESTS, all_mutants, drawn
from tests.mutants.runner import Outcome, Runner, collect

ROOT: Final = Path(__file__).resolve().parents[1]
#: Where the tree was copied from: faults are planted in a copy.
_HOME: Final = "MUTANTS_HOME"
_MAP: Final = "build/mutants.map"
_BUDGET_S: Final = 10.0
_FAST_S: Final = 5.0

app = App(
    name="scripts/mutants",
    help="Plants one-line faults in a copy of the tree, and runs what must fail with each.",
    help_format="plaintext",
    version_flags=(),
)


@app.default
def mutants(
    *,
    sample: Annotated[int | None, Parameter(help="Try so many killed faults again.")] = None,
    start: Annotated[int, Parameter(help="The seed of the sample.")] = 0,
    of: Annotated[str | None, Parameter(help="Try all faults of PATH or PATH:FUNCTION.")] = None,
    rest: Annotated[bool, Parameter(help="Try only faults that nothing has killed.")] = False,
    seeds: Annotated[int, Parameter(help="Seeds of the simulation that a fault must pass.")] = 60,
    record: Annotated[bool, Parameter(help="First record which tests run which lines.")] = False,
) -> int:
    """Try each fault of the list with what killed it; if that fails, with all tests of its lines.

    Without options, faults whose source has changed are replaced, and the list is written.
    """
    if _HOME not in os.environ:
        return _in_copy()
    home = Path(os.environ[_HOME])
    if record:
        options = [*TESTS, *(f"--ignore={each}" for each in LEFT_OUT)]
        coverage_map.save(coverage_map.record(options), home / _MAP)
        return 0
    trial = _Trial(home, range(seeds))
    if sample is not None:
        keys = trial.sample(sample, start)
        return trial.run(lambda: trial.killed_again(keys), trial.files_of_killers(keys))
    if of is not None:
        return trial.run(lambda: trial.all_of(of), trial.files_of_map())
    return trial.run(lambda: trial.all(rest=rest), trial.files_of_map())


def _in_copy() -> int:
    """Run this again in a copy of the tree."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        copy = Path(directory) / "tree"
        git = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(git, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for each in filter(None, listed.split("\0")):
            if (ROOT / each).is_file():
                (copy / each).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / each, copy / each)
        packages = ("counter", "api", "rollup", "clients")
        compiling = [sys.executable, "-m", "compileall", "-q", *packages]
        subprocess.run(compiling, cwd=copy, check=True)
        paths = f"{copy}{os.pathsep}{copy / 'clients/python'}"
        env = {**os.environ, _HOME: str(ROOT), "PYTHONPATH": paths, "CI": "true"}
        env["PYTHONDONTWRITEBYTECODE"] = "1"
        command = [sys.executable, "-m", "scripts.mutants", *sys.argv[1:]]
        return subprocess.run(command, cwd=copy, env=env, check=False).returncode


class _Trial:
    """The faults to try, and the known results."""

    def __init__(self, home: Path, seeds: range) -> None:
        self._home = home
        self._seeds = seeds
        self._rows = read_rows(home)
        self._possible = all_mutants(ROOT)
        self._map = CoverageMap()
        self._runner: Runner
        self._failed = False

    def run(self, work: Callable[[], None], tests: Sequence[str]) -> int:
        def begin(runner: Runner) -> None:
            self._runner = runner
            work()

        return collect(tests, begin) or int(self._failed)

    def files_of_map(self) -> list[str]:
        """Read the record of which tests run which lines; return the files of these tests, and of
        those that killed faults."""
        self._map = coverage_map.load(self._home / _MAP)
        files = {each.partition("::")[0] for each in self._map.seconds}
        files.update(self.files_of_killers([*self._rows]))
        return sorted(each for each in files if (ROOT / each).exists())

    def sample(self, number: int, start: int) -> list[str]:
        """Draw some of the faults that are still in the source and were killed fast."""
        known = [
            key
            for key, row in sorted(self._rows.items())
            if row.verdict == "killed" and key in self._possible
            if float(row.seconds) <= _FAST_S
        ]
        return Random(start).sample(known, min(number, len(known)))

    def files_of_killers(self, keys: Sequence[str]) -> list[str]:
        files = {
            self._rows[key].by.partition("::")[0] for key in keys if "::" in self._rows[key].by
        }
        # Any test, if seeds kill them all.
        return sorted(each for each in files if (ROOT / each).exists()) or [
            "tests/unit/test_write.py"
        ]

    def killed_again(self, keys: Sequence[str]) -> None:
        """Repeat the kill of each fault by its known test."""
        for key in keys:
            outcome = self._with_killer(key, self._rows[key].by)
            self._failed |= outcome.verdict != "killed"
            self._show(key, outcome)

    def all(self, *, rest: bool) -> None:
        """Try each fault of the list, and new ones for those that are gone."""
        queue = drawn(self._possible, {key: row.verdict for key, row in self._rows.items()})
        for key in list(self._rows):
            if key not in self._possible:
                del self._rows[key]
        tried: set[str] = set()
        while queue:
            key = queue.pop(0)
            tried.add(key)
            row = self._rows.get(key)
            done = ("harmless", "killed") if rest else ("harmless",)
            if row is not None and row.verdict in done:
                continue
            outcome = self._try(key)
            self._show(key, outcome)
            area, mutant = self._possible[key]
            self._rows[key] = Row.of(area, mutant, outcome)
            write_rows(self._home, self._rows)
            if outcome.verdict == "does not start":
                known = {each: row.verdict for each, row in self._rows.items()}
                queue += [
                    each
                    for each in drawn(self._possible, known)
                    if each not in tried and each not in queue
                ]
        self._control()
        write_rows(self._home, self._rows)
        write_summary(self._home, self._rows)
        self._failed = any(row.verdict == "survived" for row in self._rows.values())

    def all_of(self, place: str) -> None:
        """Try all faults of a file or of a function, and show the survivors."""
        path, _, function = place.partition(":")
        if not any(path in paths for paths in AREAS.values()):
            raise SystemExit(f"{path} is in no area of tests/mutants/plan.py")
        for mutant in mutants_of(ROOT, path):
            if mutant.function == function or not function:
                self._show(mutant.id, outcome := self._search(mutant.id))
                self._failed |= outcome.verdict == "survived"

    def _try(self, key: str) -> Outcome:
        row = self._rows.get(key)
        if row is not None and row.verdict == "killed":
            outcome = self._with_killer(key, row.by)
            if outcome.verdict == "killed":
                return outcome
        outcome = self._search(key)
        # Again, because a test may fail by chance.
        return self._with_killer(key, outcome.by) if outcome.verdict == "killed" else outcome

    def _with_killer(self, key: str, by: str) -> Outcome:
        mutant = self._possible[key][1]
        if by.startswith("seed "):
            return self._runner.try_one(mutant, (), (int(by.split()[1]),), _BUDGET_S)
        return self._runner.try_one(mutant, (by,), (), _BUDGET_S)

    def _search(self, key: str) -> Outcome:
        area, mutant = self._possible[key]
        tests = self._map.tests_of(ROOT, mutant)
        seeds = self._seeds if area in SIMULATED else ()
        return self._runner.try_one(mutant, tests, seeds, _BUDGET_S)

    def _control(self) -> None:
        """A test that fails without a fault kills none."""
        for by in sorted({row.by for row in self._rows.values() if row.verdict == "killed"}):
            if by.startswith("seed "):
                continue
            outcome = self._runner.try_one(None, (by,), (), _BUDGET_S)
            if outcome.verdict != "survived":
                print(f"without a fault: {outcome.verdict} {by} {outcome.why}", flush=True)
                for key, row in self._rows.items():
                    if row.by == by and row.verdict == "killed":
                        self._rows[key] = row.survives(f"{by} fails without it")

    def _show(self, key: str, outcome: Outcome) -> None:
        _, mutant = self._possible[key]
        place = f"{mutant.path}:{mutant.line} {mutant.function}"
        print(f"{key} {outcome.verdict}: {mutant.operator}: {place}", flush=True)
        print(f"    {_diff(mutant)}", flush=True)
        why = outcome.why[:150]
        print(f"    {outcome.took_s:.1f} s {outcome.by} {why}", flush=True)


def _diff(mutant: Mutant) -> str:
    old, new = (" ".join(each.split()) for each in (mutant.old, mutant.new))
    return f"{old[:160]}  ->  {new[:160]}"


if __name__ == "__main__":
    sys.exit(app())
