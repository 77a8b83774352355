"""Work that repeats in the background."""

import asyncio
import gc
import logging
import subprocess
import sys

import pytest

from api.http.connections import Connections
from api.server.protocol import cut_slow_clients
from counter.background import TURN_ITEMS, every, importing, in_turns, pause
from counter.errors import StoreUnavailableError


async def test_work_is_repeated_until_it_is_stopped_and_no_failure_ends_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of expected failures in a row one is logged, of unexpected ones each."""
    stop = asyncio.Event()
    away = StoreUnavailableError("it is away", retry_after_us=1)
    outcomes = [away, away, None, away, ValueError("odd"), ValueError("odd"), away]

    async def work() -> None:
        outcome = outcomes.pop(0)
        if not outcomes:
            stop.set()
        if outcome is not None:
            raise outcome

    with caplog.at_level(logging.WARNING):
        await every(0, work, stop, logging.getLogger("counter"), "reading")
    said = [each.getMessage() for each in caplog.records]
    expected = "reading failed: it is away"
    unexpected = "reading failed unexpectedly"
    assert said == [expected, expected, unexpected, unexpected]


async def test_a_failure_does_not_end_the_checks_of_slow_clients(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Regression: after one unexpected error no slow client was ever disconnected again."""
    stop = asyncio.Event()

    class Odd:
        checks = 0

        def check(self, now_s: float) -> None:
            self.checks += 1
            if self.checks > 1:
                stop.set()
            raise ValueError("odd")

    async with asyncio.timeout(30):
        shared = Connections()
        shared.open, shared.request_timeout_us = {Odd()}, 1
        await cut_slow_clients(shared, stop)
    assert caplog.text.count("checking for slow clients failed unexpectedly") == 2


async def test_a_pause_ends_when_it_is_stopped() -> None:
    stop = asyncio.Event()
    assert not await pause(stop, 0)
    waiting = asyncio.create_task(pause(stop, 3_600))
    await asyncio.sleep(0)
    stop.set()
    assert await waiting


def test_imports_are_excluded_from_garbage_collection() -> None:
    frozen = gc.get_freeze_count()
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > frozen


@pytest.mark.parametrize("command", ["--version", "serve --port 0 --data /proc/none"])
@pytest.mark.usefixtures("child_processes")
def test_a_command_imports_its_modules_without_collecting(command: str) -> None:
    code = (
        "import gc, sys\n"
        "class Seen:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name in ('counter.cli.app', 'api.serve'):\n"
        "            print(name, gc.isenabled(), file=sys.stderr)\n"
        "sys.meta_path.insert(0, Seen())\n"
        f"sys.argv = ['counter', *{command.split()}]\n"
        "from counter.__main__ import main\n"
        "main()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    seen = [
        line.split()[1] for line in ended.stderr.splitlines() if line.endswith(("True", "False"))
    ]
    assert seen == ["False"] * len(command.split()[:2])


async def test_work_done_in_turns_is_completed() -> None:
    items = range(2 * TURN_ITEMS + 1)
    parts = [part async for part in in_turns(items)]
    assert [len(part) for part in parts] == [TURN_ITEMS, TURN_ITEMS, 1]
    assert [item for part in parts for item in part] == [*items]
