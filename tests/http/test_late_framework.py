"""The framework behind the documentation is loaded for the first who reads it, not at the start."""

import asyncio
import subprocess
import sys
from unittest.mock import Mock, patch

import httpx
from fastapi import FastAPI

from api.document.problem_page import problems_page
from api.routes.site import Site

LOOK = """
import sys
import api.serve, counter.cli.app
late = ("fastapi", "starlette", "opentelemetry")
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


async def test_what_readers_are_given_is_made_once() -> None:
    """It takes as long as dozens of adds, and who reads it need not have a key."""
    with (
        patch.object(FastAPI, "openapi", autospec=True, side_effect=FastAPI.openapi) as made,
        patch("api.document.documents.problems_page", side_effect=problems_page) as shown,
    ):
        transport = httpx.ASGITransport(Site((), Mock(), Mock(), Mock()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            documents = [await http.get("/openapi.json") for _ in range(3)]
            pages = [await http.get("/problems") for _ in range(3)]
    assert documents[0].json()["openapi"] >= "3.1"
    assert documents[0].headers["content-type"] == "application/json"
    assert len({each.content for each in (*documents, *pages)}) == 2
    assert (made.call_count, shown.call_count) == (1, 1)
