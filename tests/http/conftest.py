"""The service in this process, each way in, and the loop of a module of tests."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.app import App, running
from tests.support.certificates import Authority, Signed
from tests.support.wire import Run, runner


@pytest.fixture
async def app(storage: str, fast_dir: Path) -> AsyncIterator[App]:
    """The service in this process: over one store each way in, as no response depends on both."""
    async with running(storage, fast_dir, over_socket=storage == "sqlite") as each:
        yield each


@pytest.fixture(params=["fast lane", "application"])
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The settings of a service that answers them one way."""
    return {"fast_lane": request.param == "fast lane"}


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs coroutines in the one loop of a module's tests."""
    with runner() as each:
        yield each.run


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory, child_processes: None) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def own(authority: Authority) -> Signed:
    """The certificate of the service."""
    return authority.sign()
