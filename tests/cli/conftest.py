"""A real service for the commands that ask one."""

from collections.abc import Iterator
from uuid import uuid4

import pytest

from tests.cli.shell import Shell
from tests.support.server import Server, served


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """``counter serve`` on a port of its own."""
    place = tmp_path_factory.mktemp("service")
    # Long enough for a few commands with one token.
    with served(place, {"accept_limit": "3s"}) as server:
        yield server


@pytest.fixture
def shell(
    service: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Shell:
    monkeypatch.setenv("COUNTER_URL", service.url)
    return Shell(capsys)


@pytest.fixture
def name() -> str:
    return f"c {uuid4()}"
