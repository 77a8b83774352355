"""The examples of docs/security.md: run as they are printed, over a service that runs."""

import re
import shutil
import sys
from pathlib import Path
from typing import Final

import pytest

from tests import test_readme
from tests.support.server import ROOT, serving

pytestmark = pytest.mark.usefixtures("child_processes")


DOCUMENT: Final = ROOT / "docs" / "security.md"
_SECTION: Final = re.compile(r"^## API keys\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_MASK: Final = (re.compile(r"(?<=the key )[a-z2-7]{12}(?= (?:has the scope|gives no more))"), "ID")


async def test_the_examples_of_api_keys_are_true(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands and requests, by the data directory that the service holds."""
    found = _SECTION.search(DOCUMENT.read_text(encoding="utf-8"))
    assert found is not None
    assert len(list(test_readme.steps(found[0]))) > 10
    counter = shutil.which("counter", path=str(Path(sys.executable).parent))
    assert counter is not None, "the command is installed beside this Python"
    monkeypatch.setenv("PATH", f"{Path(counter).parent}:/usr/bin:/bin")
    monkeypatch.setattr(test_readme, "_MASKS", (*test_readme._MASKS, _MASK))
    async with serving(tmp_path / "data", tmp_path / "logs") as server:
        await test_readme.compare(found[0], {test_readme.WRITTEN_URL: server.url}, tmp_path)
