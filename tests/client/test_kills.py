"""kill -9 of the client at any time: adds on its disk are counted exactly once."""

import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from counter_client import CounterClient, Options
from tests.client.mortal import COUNTERS, add_of
from tests.support.seeds import seed_of
from tests.support.server import ROOT, Server

LIVES = 4
OPTIONS = Options(trust_env=False)


@pytest.mark.slow
@pytest.mark.usefixtures("child_processes")
def test_a_killed_client_loses_nothing_it_had_on_disk(service: Server, tmp_path: Path) -> None:
    """The counted adds are a prefix of those made, and include the durable ones."""
    seed = seed_of("CRASH_SEED")
    draw = random.Random(seed)
    spool = tmp_path / "spool"
    counted: Counter[str] = Counter()
    first = 0
    for _ in range(LIVES):
        durable, taken = one_life(service.url, spool, seed, first, draw.randrange(1, 400))
        with CounterClient(service.url, options=OPTIONS) as client:
            # The next life of the spool sends the rest of the last one.
            client.buffer(spool=spool).close(timeout=60)
            names = [f"mortal-{seed}-{number}" for number in range(COUNTERS)]
            found = {each.counter: each.count for each in client.get_many(names)}
        counted, ends = after(counted, seed, first, durable, taken, found)
        assert ends, f"{found} is no beginning of the adds {first} to {taken}"
        # If several prefixes have the same counts, any of them will do.
        first = taken


def one_life(url: str, spool: Path, seed: int, first: int, lines: int) -> tuple[int, int]:
    """Run a client for some *lines*, and kill it; return how many adds were durable, and made."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.client.mortal", url, str(spool), str(seed), str(first)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    progress = {"durable": first, "taken": first}
    try:
        assert process.stdout is not None
        for number, line in enumerate(process.stdout):
            what, at = line.split()
            progress[what] = int(at)
            if number == lines:
                break
    finally:
        process.kill()
    # Its output until it was dead.
    for line in process.stdout:
        what, _, at = line.partition(" ")
        if line.endswith("\n") and at.strip().isdigit():
            progress[what] = int(at)
    process.stdout.close()
    process.wait()
    return progress["durable"], progress["taken"]


def after(
    before: Counter[str], seed: int, first: int, durable: int, taken: int, found: dict[str, int]
) -> tuple[Counter[str], list[int]]:
    """*found*, and after how many adds, from *durable* to *taken*, the counts are these."""
    counts, ends = Counter(before), []
    for number in range(first, taken + 1):
        if number >= durable and all(counts[name] == found[name] for name in found):
            ends.append(number)
        name, delta = add_of(seed, number)
        counts[name] += delta
    return Counter(found), ends
