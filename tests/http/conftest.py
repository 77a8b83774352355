"""The two ways that an add and a get of one counter may take: every answer must be the same."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.app import App, running


@pytest.fixture
async def app(storage: str, fast_dir: Path) -> AsyncIterator[App]:
    """The service in this process: over one store each way in, as no answer depends on both."""
    async with running(storage, fast_dir, over_socket=storage == "sqlite") as each:
        yield each


@pytest.fixture(params=["fast lane", "application"])
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The settings of a service that answers them one way."""
    return {"fast_lane": request.param == "fast lane"}
