"""README's section "Operate", run as it is printed."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.support.server import serving
from tests.test_readme import README, WRITTEN_URL, compare, defaults, read, section


async def test_every_example_of_operating_is_true(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a service that runs, by the data directory that it holds."""
    counter = shutil.which("counter", path=str(Path(sys.executable).parent))
    assert counter is not None, "the command is installed beside this Python"
    monkeypatch.setenv("PATH", f"{Path(counter).parent}:/usr/bin:/bin")
    async with serving(tmp_path / "data", tmp_path / "logs", **defaults()) as server:
        await compare(section(read(README), "Operate"), {WRITTEN_URL: server.url}, tmp_path)
