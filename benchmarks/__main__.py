"""Run the benchmarks: all of them or the named ones. See `scripts/bench --help`."""

from __future__ import annotations

import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Final

from cyclopts import App, Parameter
from cyclopts.validators import Number
from rich.console import Console

from benchmarks import (
    accurate_gets,
    add_streams,
    adds,
    best_effort,
    bounded,
    cluster,
    cluster_adds,
    cluster_gets,
    cluster_rollups,
    dynamodb,
    gets,
    growth,
    holds,
    memory,
    overload,
    peers,
    postgresql,
    results,
    rollups,
    sdk_buffered,
    soak,
    start,
)
from benchmarks.document import write_document
from benchmarks.harness import Bench, BenchError, MissingToolError
from benchmarks.loads import find_wrk
from benchmarks.results import Report, Stamp
from counter.background import tune_interpreter

SUBJECTS: Final[Mapping[str, Callable[[Bench], Report]]] = {
    "single-adds": adds.single,
    "half-load": soak.short,
    "soak": soak.long,
    "peers": peers.run,
    "batch-adds": adds.batches,
    "bounded-adds": bounded.run,
    "holds": holds.run,
    "add-streams": add_streams.run,
    "sdk-buffered": sdk_buffered.run,
    "gets": gets.run,
    "accurate-gets": accurate_gets.run,
    "best-effort": best_effort.run,
    "overload": overload.run,
    "start": start.run,
    "memory": memory.run,
    "rollups": rollups.run,
    "growth-counters": growth.counters,
    "growth-events": growth.events,
    "growth-rollup": growth.rollup,
    "postgresql-adds": postgresql.run,
    "postgresql-bounded-adds": bounded.over_postgresql,
    "postgresql-rollups": rollups.over_postgresql,
    "dynamodb-adds": dynamodb.run,
    "cluster-adds": cluster_adds.run,
    "cluster-quorum": cluster_adds.at_quorum,
    "cluster-gets": cluster_gets.run,
    "cluster-rollups": cluster_rollups.run,
}
#: It takes an hour.
_NAMED_ONLY: Final = "soak"
_WITHOUT_WRK: Final = frozenset(
    {"rollups", "postgresql-rollups", "sdk-buffered", "start", "growth-rollup", "cluster-rollups"}
)


def main(
    *subjects: str,
    quick: bool = False,
    rounds: Annotated[int, Parameter(validator=Number(gte=1))] = 3,
    seconds: Annotated[float, Parameter(validator=Number(gte=1))] = 3.0,
    folder: Path | None = None,
    write: bool = True,
    render: bool = False,
    draw: Annotated[int | None, Parameter(validator=Number(gte=1))] = None,
    seed: int = 0,
) -> int:
    """Measure the service, and check on the way that every count is right.

    Exit codes: 0 even where a target is missed, for speed is no test; 1 on a wrong count or where
    no work was done; 2 where something is not installed or a name is not known.

    Parameters
    ----------
    subjects
        Which ones, by their names in benchmarks/README.md; if none is named, all but soak.
        Those of the cluster need Java, Maven and memcached, dynamodb-adds the first two.
    quick
        One short round on little data: checks every count, and its figures mean nothing.
    rounds
        Rounds of each comparison, in turn.
    seconds
        How long each load lasts.
    folder
        Where the data directories go; it is left empty. A temporary folder if not given.
    write
        Write benchmarks/results.json, and the pages in docs/. A quick run never does.
    render
        Only rewrite the pages from benchmarks/results.json.
    draw
        Run so many of the subjects, drawn at random; the same *seed* draws the same ones.
    """
    if render:
        write_document()
        return 0
    # In a log there is no terminal to ask for its width, and 80 columns break the table.
    console = Console(width=None if sys.stdout.isatty() else 120)
    unknown = [name for name in subjects if name not in SUBJECTS]
    if unknown:
        console.print(f"there is no {unknown[0]!r}; there are: {', '.join(SUBJECTS)}", markup=False)
        return 2
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="counter-bench-", dir=folder))
    if quick:
        rounds, seconds = 1, 1.0
    bench = Bench(console, place, rounds=rounds, seconds=seconds, quick=quick)
    try:
        with _ending_in_order():
            names = _drawn(list(subjects) or _that_can_run(console), draw, seed)
            reports = _run_all(bench, names)
    except BenchError as error:
        console.print(f"FAILED: {error}", style="bold red", markup=False, soft_wrap=True)
        return 1
    except MissingToolError as error:
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        return 2
    finally:
        shutil.rmtree(place, ignore_errors=True)
    console.print(results.table(reports))
    if write and not quick:
        results.store(reports, list(SUBJECTS))
        write_document()
    return 0


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """Have SIGTERM end this process as Ctrl-C does: after its servers, which would live on."""

    def end(number: int, _frame: FrameType | None) -> None:
        # A second one would cut the end short.
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _that_can_run(console: Console) -> list[str]:
    """All subjects but the one of an hour; those of the cluster and of DynamoDB are left out, with
    a word, if it cannot be started."""
    names = [name for name in SUBJECTS if name != _NAMED_ONLY]
    for kind, problem in (("cluster-", cluster.missing()), ("dynamodb-", dynamodb.missing())):
        if problem:
            console.print(f"no {kind} subjects: {problem}", markup=False, soft_wrap=True)
            names = [name for name in names if not name.startswith(kind)]
    return names


def _drawn(names: list[str], draw: int | None, seed: int) -> list[str]:
    """Draw so many of *names*, in their order; all for None."""
    if draw is None or draw >= len(names):
        return names
    drawn = random.Random(seed).sample(names, draw)
    return [name for name in names if name in drawn]


def _run_all(bench: Bench, names: Sequence[str]) -> list[Report]:
    if set(names) - _WITHOUT_WRK:
        find_wrk()
    # What is measured within this process shall run as it does in a worker.
    tune_interpreter()
    return [_run(bench, name) for name in names]


def _run(bench: Bench, name: str) -> Report:
    bench.console.rule(name, align="left")
    stamp = Stamp(bench)
    return stamp.on(SUBJECTS[name](bench))


if __name__ == "__main__":
    App(default_command=main, help_format="plaintext", version_flags=())()
