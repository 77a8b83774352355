"""The service in this process, each way in, and the loop that it runs in."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from counter.background import loop_factory
from tests.support.app import App, running
from tests.support.certificates import Authority, Signed
from tests.support.virtual import no_deadline_by_the_wall
from tests.support.wire import Wire, wired


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop of tests that share a listening service is of the kind that a process runs."""
    marker = item.get_closest_marker("asyncio")
    shared = marker is not None and marker.kwargs.get("loop_scope") == "module"
    return {"loop": (loop_factory() if shared else None) or asyncio.new_event_loop}


@pytest.fixture
async def app(storage: str, fast_dir: Path) -> AsyncIterator[App]:
    """The service in this process: over one store each way in, as no response depends on both."""
    with no_deadline_by_the_wall():
        async with running(storage, fast_dir, over_socket=storage == "sqlite") as each:
            yield each


@pytest.fixture(params=["fast lane", "application"])
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The settings of a service that answers them one way."""
    return {"fast_lane": request.param == "fast lane"}


@pytest.fixture
async def wire(fast_dir: Path, way: dict[str, Any]) -> AsyncIterator[Wire]:
    """A service that listens, each way in."""
    async with wired(fast_dir, **way) as each:
        yield each


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory, child_processes: None) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def own(authority: Authority) -> Signed:
    """The certificate of the service."""
    return authority.sign()
