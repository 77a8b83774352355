"""A real service for the client's tests, one for each module."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.support.server import Server


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """``counter serve`` on a port of its own."""
    place = tmp_path_factory.mktemp("service")
    server = Server(place / "data", place / "logs", {})
    try:
        asyncio.run(server.start())
        yield server
    finally:
        server.clean_up()
