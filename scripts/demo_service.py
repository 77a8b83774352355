"""The demo's service on one machine: the real `counter serve` with SQLite, in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from scripts.demo_deployment import Load, Outage
from scripts.demo_process import HOST, CounterProcess, free_ports

#: How long the service stays down after each kill. The second time is longer than the accept limit:
#: whatever was in flight then comes late and has to be resolved.
DOWN_S: Final = (0.0, 6.0, 0.0)


class OneProcess:
    """One data directory and one address, and the process that serves them now."""

    load: Load = Load(
        occurrences=None,
        batch_items=500,
        read_items=1_000,
        clients=8,
        hedge_all=False,
        rollup_timeout_s=40.0,
    )

    def __init__(self, folder: Path) -> None:
        (port,) = free_ports(1)
        command = ["serve", "--host", HOST, "--port", str(port), "--data", str(folder / "data")]
        log = folder / "service.log"
        self._process = CounterProcess("the service", command, log, "Serving on ")
        self.urls: Sequence[str] = [f"http://{HOST}:{port}"]
        parts = len(DOWN_S) + 1
        self.outages: Sequence[Outage] = [
            Outage(self._process, part / parts, down_s) for part, down_s in enumerate(DOWN_S, 1)
        ]

    async def start(self, say: Callable[[str], None]) -> None:
        await self._process.start()
        say(f"serving on {self.urls[0]}")

    async def watch(self) -> None:
        await self._process.watch()

    async def stop(self) -> None:
        await self._process.stop()

    async def destroy(self) -> None:
        await self._process.destroy()
