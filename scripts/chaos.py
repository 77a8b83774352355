"""The command line of ``scripts/chaos``: inject faults into real servers, and check counts.

Exits with 1 if anything was wrong, 2 if something is not installed or does not start.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Final, Literal

from cyclopts import App, Parameter

from scripts import cluster_jars, cluster_servers
from scripts.cluster_process import ClusterError
from scripts.postgresql_server import postgresql_missing
from scripts.service_process import ServiceError
from tests.chaos.deployments import CassandraNodes, PostgresqlAlone
from tests.chaos.run import Verdict, play
from tests.simulation.reported import COVERED, COVERED_MIN

_TRACE_LINES_MAX: Final = 200

app = App(
    name="scripts/chaos",
    help="Breaks the servers of a store, API processes, workers and the connections between them,"
    " at random and under load; then checks every answer that was given. The store is three"
    " Cassandra nodes with memcached, or PostgreSQL.",
    help_format="plaintext",
    version_flags=(),
)


@app.default
def chaos(
    *,
    store: Annotated[
        Literal["cassandra", "postgresql"], Parameter(help="The store that is broken.")
    ] = "cassandra",
    minutes: Annotated[float, Parameter(help="How long things are broken.")] = 3.0,
    seed: Annotated[int | None, Parameter(help="Draws the same clients and faults again.")] = None,
    keep: Annotated[bool, Parameter(help="Keep the servers' files and logs.")] = False,
) -> int:
    """Inject faults, repair them, and print the verdict."""
    problem = (
        postgresql_missing()
        if store == "postgresql"
        else cluster_jars.missing() or cluster_servers.memcached_missing()
    )
    if problem:
        print(problem, file=sys.stderr)
        return 2
    began_s = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began_s:6.1f} s  {line}", flush=True)

    folder = Path(tempfile.mkdtemp(prefix="counter-chaos-"))
    # PostgreSQL runs as a user of its own, because it refuses to run as root.
    folder.chmod(0o711)
    try:
        deployment = PostgresqlAlone(folder) if store == "postgresql" else CassandraNodes(folder)
        verdict = asyncio.run(play(folder, deployment, 60 * minutes, seed, say))
    except (ServiceError, ClusterError) as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        if keep:
            print(f"files and logs are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return _report(verdict, store)


def _report(verdict: Verdict, store: str) -> int:
    broken = ", ".join(f"{what} {number}" for what, number in sorted(verdict.faults.items()))
    print(f"broken {verdict.faults.total()} times: {broken}")
    print(", ".join(f"{number:,} {what}" for what, number in verdict.reported.items()))
    compared = sum((each.compared for each in verdict.plays), Counter())
    print(", ".join(f"{number:,} items {what}" for what, number in compared.items()))
    for number, problems in verdict.problems.items():
        for problem in problems:
            print(f"WRONG: {problem}")
        if number >= 0:
            print("\n".join(verdict.plays[number].trace()[:_TRACE_LINES_MAX]))
    if verdict.problems:
        print(
            f"again: ./scripts/chaos --store {store} --seed {verdict.seed}"
            " (what the machine does differs)"
        )
        return 1
    if compared[COVERED] < COVERED_MIN * compared.total():
        print(f"at least {COVERED_MIN:.0%} of all items must be compared with the model")
        return 1
    print(f"seed {verdict.seed}: every acknowledged change counts once, every other at most once")
    return 0


if __name__ == "__main__":
    sys.exit(app())
