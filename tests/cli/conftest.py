"""A real service for the commands that ask one."""

from collections.abc import Iterator
from uuid import uuid4

import httpx
import pytest

from tests.cli.shell import Shell
from tests.support.server import Server, served


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """``counter serve`` on a port of its own."""
    place = tmp_path_factory.mktemp("service")
    # Longer than a test takes: its commands share one token.
    with served(place, {"accept_limit": "2m"}) as server:
        yield server


@pytest.fixture(scope="session")
def soon_rolled_up(service: Server) -> str:
    """A namespace whose windows are rolled up within seconds, because its accept limit is short."""
    settings = {"counter_type": "ACCURATE", "accept_limit": "3s"}
    answer = httpx.put(
        f"{service.url}/v1/namespaces/soon", json=settings, trust_env=False, verify=False
    )
    assert answer.status_code == 201, answer.text
    return "soon"


@pytest.fixture
def shell(
    service: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Shell:
    monkeypatch.setenv("COUNTER_URL", service.url)
    return Shell(capsys)


@pytest.fixture
def name() -> str:
    return f"c {uuid4()}"
