"""Bound how long a write may take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from counter.errors import WriteTimeoutError
from counter.limits import SECOND


@asynccontextmanager
async def write_within(server: str, timeout_us: int) -> AsyncIterator[None]:
    """Cancel the block after *timeout_us* with WriteTimeoutError: what was sent to *server* may
    have been done, or may be done later."""
    try:
        async with asyncio.timeout(timeout_us / SECOND):
            yield
    except TimeoutError as error:
        raise WriteTimeoutError(
            f"{server} took longer than {timeout_us / SECOND:g} s; ask again with the same token",
            retry_after_us=SECOND,
        ) from error
