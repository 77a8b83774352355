"""The command line of ``scripts/simulate``: run the service on virtual time for many seeds.

The same seed gives the same run. Exits with 1 if a seed failed, or a planted bug was not caught.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Final

from cyclopts import App, Parameter

from tests.simulation.bugs import Bug, all_bugs
from tests.simulation.directed import caught_by
from tests.simulation.run import run_seed
from tests.simulation.shrink import report, shrink

ROOT: Final = Path(__file__).resolve().parents[1]
GUARANTEES: Final = ROOT / "docs" / "guarantees.md"
_BEGIN: Final = "<!-- the table is written by scripts/simulate --table -->"
#: Seeds that a process runs before its garbage is collected, and before it is given more.
_AT_A_TIME: Final = 20

app = App(
    name="scripts/simulate",
    help="Runs the service on virtual time, over a simulated cluster, with faults.",
    help_format="plaintext",
    version_flags=(),
)


@app.default
def simulate(
    *,
    seeds: Annotated[int, Parameter(help="How many seeds.")] = 100,
    start: Annotated[int, Parameter(help="The first one.")] = 0,
    bug: Annotated[str | None, Parameter(help="A bug to plant; `all` for each in turn.")] = None,
    table: Annotated[bool, Parameter(help="Write what was caught to docs/guarantees.md.")] = False,
    shrinks: Annotated[int, Parameter(help="Runs that shrinking a failure may take.")] = 200,
    jobs: Annotated[int, Parameter(help="Processes that run seeds at once.")] = 1,
) -> int:
    """Run seeds; show the first failure, shrunk, and how to reproduce it."""
    gc.disable()
    if bug == "all" or table:
        return _catch_all(seeds, start, table=table)
    began_s = time.monotonic()
    wrong = next(_failures(range(start, start + seeds), bug, jobs), None)
    if wrong is not None:
        plant = _planter(bug)
        print(report(shrink(run_seed(wrong, plant), plant, shrinks), bug))
        return 1
    took_s = time.monotonic() - began_s
    print(f"{seeds} seeds from {start} on: nothing wrong; {60 * seeds / took_s:.0f} a minute")
    return 0


def _failures(seeds: range, bug: str | None, jobs: int) -> Iterator[int]:
    """Those of *seeds* that fail, in order."""
    parts = [seeds[at : at + _AT_A_TIME] for at in range(0, len(seeds), _AT_A_TIME)]
    run = partial(_first_failure, bug)
    if jobs == 1:
        yield from (seed for seed in map(run, parts) if seed is not None)
        return
    with ProcessPoolExecutor(jobs) as pool:
        try:
            yield from (seed for seed in pool.map(run, parts) if seed is not None)
        finally:
            pool.shutdown(cancel_futures=True)


def _first_failure(bug: str | None, seeds: range) -> int | None:
    """The first of *seeds* that fails."""
    gc.disable()
    plant = _planter(bug)
    failed = next((seed for seed in seeds if run_seed(seed, plant).problems), None)
    gc.collect()
    return failed


def _planter(bug: str | None) -> Callable[[], AbstractContextManager[None]]:
    return all_bugs()[bug].plant if bug is not None else nullcontext


def _catch_all(seeds: int, start: int, *, table: bool) -> int:
    """Plant each bug in turn, and report how many seeds it took to catch it."""
    took: dict[str, int | None] = {}
    for bug in all_bugs().values():
        # Read all sources before the first run, because files may change during a long run.
        with bug.plant():
            continue
    for name, bug in all_bugs().items():
        took[name] = seeds_to_catch(bug, start, seeds)
        print(f"{name}: {took[name] or f'not in {seeds}'}", flush=True)
    if table:
        text = GUARANTEES.read_text(encoding="utf-8")
        before, _, _ = text.partition(_BEGIN)
        GUARANTEES.write_text(f"{before}{_BEGIN}\n\n{_table(took, seeds)}", encoding="utf-8")
    return 0 if all(took.values()) else 1


def seeds_to_catch(bug: Bug, start: int, seeds: int) -> int | None:
    """Return how many seeds it took until one failed; None if none of *seeds* did."""
    for number in range(seeds):
        if number % _AT_A_TIME == 0:
            gc.collect()
        if run_seed(start + number, bug.plant).problems:
            return number + 1
    return None


def _table(took: dict[str, int | None], seeds: int) -> str:
    lines = ["| bug | what is broken | seeds it took | what catches it in every run |"]
    lines.append("|---|---|---|---|")
    for name, bug in all_bugs().items():
        seeds_text = took[name] or f"more than {seeds}"
        lines.append(f"| `{name}` | {bug.what} | {seeds_text} | {caught_by(name)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(app())
