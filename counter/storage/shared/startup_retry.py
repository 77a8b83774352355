"""Retry startup while the store is temporarily unavailable."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from counter.errors import UnavailableError
from counter.limits import SECOND
from counter.ports import Store
from counter.quantities import format_duration

_log = logging.getLogger("counter.start")
#: The upper bound of the first pause, which is random so that processes do not retry in step. It
#: doubles with each pause.
_PAUSE_S: Final = 0.1
_PAUSE_MAX_S: Final = 2.0

_T = TypeVar("_T")


class StartupRetry:
    """Retry the steps of one startup for at most *within_us* after the first failure."""

    def __init__(self, within_us: int) -> None:
        self._within_us = within_us
        self._until_s: float | None = None

    async def run(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Return the result of *work*, retried while it raises UnavailableError.

        When the time is over, the last UnavailableError is raised. Others are raised at once."""
        loop = asyncio.get_running_loop()
        pause_s = _PAUSE_S
        while True:
            try:
                return await work()
            except UnavailableError as error:
                if self._until_s is None:
                    self._until_s = loop.time() + self._within_us / SECOND
                    if self._within_us:
                        _log.warning(
                            "waiting up to %s for the store: %s",
                            *(format_duration(self._within_us), error.detail),
                        )
                left_s = self._until_s - loop.time()
                if left_s <= 0:
                    raise
            await asyncio.sleep(min(left_s, random.uniform(0, pause_s)))
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    async def warn_of_server(self, store: Store) -> None:
        """Log what the operator should know about the server of *store*, which is open."""
        if (warnings := store.capabilities.server_warnings) is not None:
            for each in await self.run(warnings):
                _log.warning("%s", each)
