"""A real service for the client's tests, one for each module."""

from collections.abc import Iterator

import pytest

from tests.support.server import Server, served


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """``counter serve`` on a port of its own."""
    place = tmp_path_factory.mktemp("service")
    with served(place) as server:
        yield server
