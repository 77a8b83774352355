"""The interface of a service that the demo runs: its load and its faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Load:
    """The default load of such a service."""

    #: Occurrences that are counted; None for all.
    occurrences: int | None
    batch_items: int
    read_items: int
    clients: int
    #: Every batch is sent to two processes at once, not only some.
    hedge_all: bool
    #: How long a rollup may take to pass the last add.
    rollup_timeout_s: float


class Server(Protocol):
    """A process that can be broken."""

    @property
    def name(self) -> str: ...

    async def kill(self) -> None:
        """``kill -9``."""
        ...

    async def start(self) -> None:
        """Start it, and wait until it runs. Raises ServiceError."""
        ...


@dataclass(frozen=True, slots=True)
class Outage:
    """Kill *server* when the share *at* of the adds is done; start it again *down_s* later."""

    server: Server
    at: float
    down_s: float


class Deployment(Protocol):
    """A service of one or more processes, which share what they keep."""

    load: Load
    #: Where it listens: one address for each API process.
    urls: Sequence[str]
    #: In the order of time for each server.
    outages: Sequence[Outage]

    async def start(self, say: Callable[[str], None]) -> None:
        """Start all servers, wait until they run, and report each. Raises ServiceError."""
        ...

    async def watch(self) -> None:
        """Run until cancelled. Raises ServiceError if a process ends unexpectedly."""
        ...

    async def stop(self) -> None:
        """Ask the service's processes to end. Raises ServiceError unless they exit cleanly."""
        ...

    async def destroy(self) -> None:
        """End whatever still runs."""
        ...
