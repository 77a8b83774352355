"""The page on moving counts is followed as written."""

import os
import sys
from pathlib import Path

import pytest

from tests.support.documents import page
from tests.support.server import serving
from tests.test_readme import WRITTEN_URL, compare, defaults

pytestmark = pytest.mark.usefixtures("child_processes")


async def test_the_commands_of_the_page_answer_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    async with serving(tmp_path / "data", tmp_path / "logs", **defaults()) as server:
        await compare(page("how-to/move-counts.md"), {WRITTEN_URL: server.url}, tmp_path)
