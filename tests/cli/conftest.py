"""A service for the commands that ask one."""

from collections.abc import Iterator
from uuid import uuid4

import httpx
import pytest

from tests.cli.shell import Shell
from tests.support.in_thread import Service, in_thread


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    # Longer than a test takes: its commands share one token.
    with in_thread(tmp_path_factory.mktemp("service") / "data", accept_limit="2m") as service:
        yield service


@pytest.fixture(scope="session")
def soon_rolled_up(service: Service) -> str:
    """A namespace with windows that are rolled up within seconds: its accept limit is short."""
    settings = {"counter_type": "ACCURATE", "accept_limit": "3s"}
    answer = httpx.put(
        f"{service.url}/v1/namespaces/soon",
        json=settings,
        timeout=100,
        trust_env=False,
        verify=False,
    )
    assert answer.status_code == 201, answer.text
    return "soon"


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


@pytest.fixture
def at_service(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands ask the service unless they say otherwise."""
    monkeypatch.setenv("COUNTER_URL", service.url)


@pytest.fixture
def name() -> str:
    return f"c {uuid4()}"
