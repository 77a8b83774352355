"""The command line of ``scripts/simulate``: run the service on virtual time for many seeds.

The same seed gives the same run. Exits with 1 if a seed failed, or a planted bug was not caught.
"""

from __future__ import annotations

import gc
import multiprocessing
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Final, Literal, NamedTuple

from cyclopts import App, Parameter
from cyclopts.validators import Number

from tests.simulation.bugs import Bug, all_bugs, bugs_of
from tests.simulation.directed import caught_by
from tests.simulation.reported import COVERED, COVERED_FEW_MIN, COVERED_MIN
from tests.simulation.run import run_seed
from tests.simulation.shrink import report, shrink
from tests.simulation.situations import MANY, OF_DYNAMODB, SITUATIONS, missed

ROOT: Final = Path(__file__).resolve().parents[1]
GUARANTEES: Final = ROOT / "docs" / "guarantees.md"
_BEGIN: Final = "<!-- the table is written by scripts/simulate --table -->"
LEDGER: Final = ROOT / "proof" / "simulation.md"
_SUM: Final = "| in all |"
_SITUATIONS_BEGIN: Final = "<!-- written by scripts/simulate --seeds 1000 --situations -->"
_SITUATIONS_END: Final = "<!-- end of the situations -->"
#: Seeds that a process runs; one if there are crowds. It leaves its garbage behind: to collect it
#: would take a tenth of all time.
_AT_A_TIME: Final = 20
#: With more, a seed takes minutes.
_CROWDS_MAX: Final = 30

app = App(
    name="scripts/simulate",
    help="Runs the service on virtual time, over a simulated cluster, with faults.",
    help_format="plaintext",
    version_flags=(),
)


class Part(NamedTuple):
    """The results of some seeds: the first failure, if any, and the runs until then."""

    failed: int | None = None
    seeds: int = 0
    operations: int = 0
    cpu_s: float = 0.0
    #: How many of them came into each situation.
    reached: Mapping[str, int] = MappingProxyType({})
    #: Items of adds that were compared with the model, and those that were not by which reason.
    compared: Mapping[str, int] = MappingProxyType({})

    def and_then(self, other: Part) -> Part:
        """Return both."""
        seeds, operations = self.seeds + other.seeds, self.operations + other.operations
        reached = Counter(self.reached) + Counter(other.reached)
        compared = Counter(self.compared) + Counter(other.compared)
        cpu_s = self.cpu_s + other.cpu_s
        return Part(other.failed, seeds, operations, cpu_s, dict(reached), dict(compared))


@app.default
def simulate(  # noqa: PLR0913 - each is an option
    *,
    seeds: Annotated[int, Parameter(help="How many seeds.")] = 100,
    start: Annotated[int, Parameter(help="The first one.")] = 0,
    bug: Annotated[str | None, Parameter(help="A bug to plant; `all` for each in turn.")] = None,
    situations: Annotated[
        bool, Parameter(help="Write the situations reached to docs/guarantees.md.")
    ] = False,
    table: Annotated[bool, Parameter(help="Write what was caught to docs/guarantees.md.")] = False,
    crowds: Annotated[
        int,
        Parameter(
            help="Crowds of clients to add to each seed, each with counters of its own. One is"
            " some 50 operations. 30 of them meet what only many writes at once do, as full"
            " batches and lanes, and give more operations a minute; more seeds without them meet"
            " more settings and faults.",
            validator=Number(gte=0, lte=_CROWDS_MAX),
        ),
    ] = 0,
    store: Annotated[
        Literal["cassandra", "dynamodb"], Parameter(help="The store whose servers are simulated.")
    ] = "cassandra",
    jobs: Annotated[int, Parameter(help="Processes that run seeds at once.")] = 1,
    ledger: Annotated[bool, Parameter(help="Add the run to proof/simulation.md.")] = False,
) -> int:
    """Run seeds; show the first failure, shrunk, and how to reproduce it."""
    gc.disable()
    if store != "cassandra" and (bug == "all" or table or situations or ledger):
        raise ValueError("docs/guarantees.md and proof/simulation.md are about cassandra")
    if bug == "all" or table:
        return _catch_all(seeds, start, crowds, table=table)
    commit = _commit()
    began_s = time.monotonic()
    ran = Part()
    for part in _parts(range(start, start + seeds), bug, crowds, store, jobs):
        ran = ran.and_then(part)
        if ran.failed is not None:
            break
    took_min = (time.monotonic() - began_s) / 60
    if ledger:
        before = LEDGER.read_text(encoding="utf-8")
        LEDGER.write_text(entered(before, commit, start, crowds, ran), encoding="utf-8")
    if ran.failed is not None:
        plant = _planter(bug)
        failed = run_seed(ran.failed, plant, crowds, store)
        print(report(shrink(failed, plant), bug, crowds))
        return 1
    print(table_of(ran, SITUATIONS if store == "cassandra" else {**SITUATIONS, **OF_DYNAMODB}))
    if situations:
        text = GUARANTEES.read_text(encoding="utf-8")
        GUARANTEES.write_text(documented(text, table_of(ran)), encoding="utf-8")
    print(f"{seeds} seeds from {start} on, {ran.operations} operations: nothing wrong")
    for what, minutes in ("", took_min), (" of CPU time", ran.cpu_s / 60):
        print(
            f"{seeds / minutes:.0f} seeds and {ran.operations / minutes:.0f} operations"
            f" a minute{what}"
        )
    too_few = missed(ran.reached, seeds) if store == "cassandra" else []
    if too_few:
        print(f"too few of 1,000 seeds reached: {', '.join(too_few)}")
    return 1 if too_few or not _has_compared(ran) else 0


def table_of(ran: Part, situations: Mapping[str, str] = SITUATIONS) -> str:
    """Return a table of the situations, and of how many seeds came into each, in Markdown."""
    lines = [f"| situation | what happened in the run | of {ran.seeds:,} seeds |", "|---|---|---|"]
    for name, what in situations.items():
        lines.append(f"| `{name}` | {what} | {ran.reached.get(name, 0)} |")
    return "\n".join(lines) + "\n"


def documented(text: str, table: str) -> str:
    """Return the document *text* with *table* between the marks of the situations."""
    before, _, rest = text.partition(_SITUATIONS_BEGIN)
    after = rest.partition(_SITUATIONS_END)[2]
    return f"{before}{_SITUATIONS_BEGIN}\n\n{table}\n{_SITUATIONS_END}{after}"


def _has_compared(ran: Part) -> bool:
    """Print how much was compared with the model. Return whether it was enough."""
    compared, items = Counter(ran.compared), sum(ran.compared.values())
    print(f"{compared[COVERED]} of {items} items of adds were compared with the model; the others:")
    for why, times in compared.most_common():
        if why != COVERED:
            print(f"  {times}: {why}")
    least = COVERED_MIN if ran.seeds >= MANY else COVERED_FEW_MIN
    if ran.seeds >= _AT_A_TIME and compared[COVERED] < least * items:
        print(f"at least {least:.0%} must be compared with it")
        return False
    return True


def _parts(seeds: range, bug: str | None, crowds: int, store: str, jobs: int) -> Iterator[Part]:
    """Run *seeds*, each part of them in a process of its own, and yield the results in order."""
    size = 1 if crowds else _AT_A_TIME
    parts = [seeds[at : at + size] for at in range(0, len(seeds), size)]
    run = partial(_run_part, bug, crowds, store)
    if len(parts) > 1:
        # Computed once by the first seed of a process, and inherited by its children.
        run(seeds[:1])
    with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=1) as pool:
        yield from pool.imap(run, parts)


def _run_part(bug: str | None, crowds: int, store: str, seeds: range) -> Part:
    """Run *seeds* until one fails."""
    plant, ran = _planter(bug), Part()
    for seed in seeds:
        began_s = time.process_time()
        result = run_seed(seed, plant, crowds, store)
        took_s = time.process_time() - began_s
        failed = seed if result.problems else None
        reached = dict.fromkeys(result.reached, 1)
        ran = ran.and_then(Part(failed, 1, result.operations, took_s, reached, result.compared))
        if failed is not None:
            break
    return ran


def _commit() -> str:
    """The commit that is checked out, with a mark if files differ from it."""
    command = ["git", "describe", "--always", "--abbrev=10", "--exclude=*", "--dirty"]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout.strip()


def entered(ledger: str, commit: str, start: int, crowds: int, ran: Part) -> str:
    """Return *ledger* with a line for a run, and with the sums of all its lines."""
    before, _, _ = ledger.partition(_SUM)
    violations = int(ran.failed is not None)
    today = datetime.now(UTC).date()
    lines = (
        f"{before}| {today} | `{commit}` | {start} | {crowds} | {ran.seeds} | {ran.operations} |"
        f" {ran.cpu_s / 60:.1f} | {violations} |\n"
    )
    return f"{lines}{sums_of(lines)}\n"


def sums_of(ledger: str) -> str:
    """Return the last line of *ledger*, from the lines of its runs."""
    rows = [line.split("|")[5:9] for line in ledger.splitlines() if line.startswith("| 20")]
    columns = [[float(each) for each in column] for column in zip(*rows, strict=True)]
    seeds, operations, minutes, violations = map(sum, columns)
    return f"{_SUM} | | | {seeds:.0f} | {operations:.0f} | {minutes:.1f} | {violations:.0f} |"


def _planter(bug: str | None) -> Callable[[], AbstractContextManager[None]]:
    if bug is None:
        return nullcontext
    return {**all_bugs(), **bugs_of("dynamodb")}[bug].plant


def _catch_all(seeds: int, start: int, crowds: int, *, table: bool) -> int:
    """Plant each bug in turn, and report how many seeds it took to catch it."""
    took: dict[str, int | None] = {}
    for bug in all_bugs().values():
        # Read all sources before the first run, because files may change during a long run.
        with bug.plant():
            continue
    for name, bug in all_bugs().items():
        took[name] = seeds_to_catch(bug, start, seeds, crowds)
        print(f"{name}: {took[name] or f'not in {seeds}'}", flush=True)
    if table:
        text = GUARANTEES.read_text(encoding="utf-8")
        before, _, _ = text.partition(_BEGIN)
        GUARANTEES.write_text(f"{before}{_BEGIN}\n\n{_table(took, seeds)}", encoding="utf-8")
    return 0 if all(took.values()) else 1


def seeds_to_catch(bug: Bug, start: int, seeds: int, crowds: int = 0) -> int | None:
    """Return how many seeds it took until one failed; None if none of *seeds* did."""
    for number in range(seeds):
        if crowds or number % _AT_A_TIME == 0:
            gc.collect()
        if run_seed(start + number, bug.plant, crowds).problems:
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
