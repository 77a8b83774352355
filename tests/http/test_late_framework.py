"""The framework behind the documentation is loaded for the first who reads it, not at the start."""

import asyncio
import subprocess
import sys
from unittest.mock import Mock

import httpx

from api.site import Site

LOOK = """
import sys
import api.serve, counter.cli
late = ("fastapi", "starlette", "structlog", "opentelemetry")
print(sorted(each for each in late if each in sys.modules))
"""


def test_a_start_loads_nothing_that_it_does_not_use() -> None:
    """The framework took longer than all else that a start does."""
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


async def test_the_first_readers_may_come_at_once_and_one_may_leave() -> None:
    site = Site((), Mock(), Mock(), Mock())
    transport = httpx.ASGITransport(site)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        readers = [asyncio.create_task(http.get("/problems")) for _ in range(3)]
        await asyncio.sleep(0)
        readers[0].cancel()
        answers = await asyncio.gather(*readers[1:], http.get("/openapi.json"))
    assert [each.status_code for each in answers] == [200, 200, 200]
