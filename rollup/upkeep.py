"""What a process repeats while it runs: compare its clock with the store's, read the directory."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from counter.background import every
from counter.core.clock_guard import ClockGuard
from counter.core.namespaces import Namespaces
from counter.limits import DIRECTORY_READ_US, SECOND

_COMPARE_EVERY_S: Final = 2.0
_READ_EVERY_S: Final = DIRECTORY_READ_US / SECOND


async def keep_comparing(guard: ClockGuard, stop: asyncio.Event) -> None:
    """Compare the clocks every few seconds until *stop* is set."""
    log = logging.getLogger("counter.clock")
    await every(_COMPARE_EVERY_S, guard.measure, stop, log, "comparing the clocks")


async def keep_reading(namespaces: Namespaces, stop: asyncio.Event) -> None:
    """Read the directory again every second until *stop* is set."""
    log = logging.getLogger("counter.namespaces")
    await every(_READ_EVERY_S, namespaces.refresh, stop, log, "reading the namespaces")
