"""A fast share of the simulation: seeds that must pass, bugs that must not."""

import asyncio
import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from random import Random

import pytest

from tests.simulation.bugs import all_bugs
from tests.simulation.directed import QUICK, SEEDS
from tests.simulation.loop import SimulatedLoop
from tests.simulation.run import run_seed
from tests.simulation.shrink import report, shrink

#: How many seeds each run of the tests tries, and one test. The gate's `scripts/simulate` tries
#: others.
SEEDS_AT_A_TIME = 10
#: Within so many seeds each of them must be caught. The slowest took 7.
QUICK_SEEDS = 60
_ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_AT_A_TIME))
def test_nothing_promised_is_broken(first: int) -> None:
    for seed in range(first, first + SEEDS_AT_A_TIME):
        result = run_seed(seed)
        if result.problems:
            pytest.fail(report(shrink(result)), pytrace=False)


@pytest.mark.parametrize("name", QUICK)
def test_a_planted_bug_is_caught(name: str) -> None:
    bug = all_bugs()[name]
    assert any(run_seed(seed, bug.plant).problems for seed in range(QUICK_SEEDS))


@pytest.mark.parametrize("name", all_bugs())
def test_a_bug_can_be_planted_and_is_gone_again(name: str) -> None:
    """A bug that no longer fits its source is reported here, and not taken for harmless."""
    with all_bugs()[name].plant():
        pass


def test_a_bug_that_fits_no_source_leaves_no_loop_open() -> None:
    """An open loop would warn when it is collected, in whichever test runs then."""

    @contextmanager
    def misfit() -> Iterator[None]:
        raise LookupError("no such text")
        yield

    with pytest.raises(LookupError):
        run_seed(0, misfit)
    gc.collect()


@pytest.mark.usefixtures("child_processes")
def test_a_seed_gives_the_same_run_in_every_process() -> None:
    program = (
        "from tests.simulation.run import run_seed\n"
        "for seed in (3, 7, 214): print(run_seed(seed).digest)"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=_ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(_ROOT)},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(digests) == 1
    assert len(digests.pop().split()) == 3


def test_a_run_does_not_depend_on_the_time_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: large requests were read for 10 ms of real time in each turn of the loop."""
    digest = run_seed(3).digest
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, partial(next, count(1_000_000)))
    assert run_seed(3).digest == digest


@pytest.mark.parametrize(("seed", "crowds"), [(20_000_001, 30), (260_002_974, 0)])
def test_a_late_event_may_count_when_its_window_is_recomputed(seed: int, crowds: int) -> None:
    """Its client got no response, and the process that voided it died before it hid it."""
    assert run_seed(seed, crowds=crowds).problems == []


def test_a_later_delete_that_was_void_may_leave_the_name_on_the_list() -> None:
    assert run_seed(20_003_127, crowds=30).problems == []


def test_an_event_ahead_of_the_clocks_is_read_when_it_may_be_rolled_up() -> None:
    assert run_seed(246_799_988).problems == []


def test_another_seed_gives_another_run() -> None:
    assert run_seed(3).digest != run_seed(7).digest


def test_leftover_tasks_are_closed_within_the_loop() -> None:
    loop, cleaned_up_in = SimulatedLoop(Random(0)), []

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned_up_in.append(asyncio.get_running_loop())

    loop.create_task(endless())
    loop.run_until_complete(asyncio.sleep(1))
    loop.end()
    assert cleaned_up_in == [loop]
