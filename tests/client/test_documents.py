"""The programs in README and docs/python.md are run: comments show the output."""

import asyncio
import re
from pathlib import Path

import pytest

from tests.support.child import run_python
from tests.support.server import ROOT, serving
from tests.test_readme import WRITTEN_URL

pytestmark = pytest.mark.usefixtures("child_processes")


def program_of(document: str) -> str:
    """All blocks of Python in *document*, in their order."""
    text = (ROOT / document).read_text(encoding="utf-8")
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("document", ["README.md", "docs/python.md"])
async def test_the_examples_run_as_printed(document: str, tmp_path: Path) -> None:
    await run_as_printed(program_of(document), tmp_path)


async def run_as_printed(program: str, tmp_path: Path) -> None:
    """Run *program* beside a service: its comments show the output."""
    expected = re.findall(r"print\(.*\)  # (.*)$", program, re.MULTILINE)
    assert expected
    async with serving(tmp_path / "data", tmp_path / "logs", accept_limit="5s") as server:
        words = ("-c", program.replace(WRITTEN_URL, server.url))
        path = {"PYTHONPATH": str(ROOT)}
        done = await asyncio.to_thread(run_python, *words, cwd=tmp_path, env=path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == expected
