"""README's section "From Python" is run: what its prints say stands behind them."""

import re
import subprocess
import sys
from pathlib import Path

from tests.support.server import ROOT, Server
from tests.test_readme import WRITTEN_URL

README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTION = README.partition("\n## From Python\n")[2].partition("\n## ")[0]


def test_the_example_runs_as_printed(service: Server, tmp_path: Path) -> None:
    [program] = re.findall(r"^```python\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)
    expected = re.findall(r"print\(.*\)  # (.*)$", program, re.MULTILINE)
    assert expected
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-c",
            program.replace(WRITTEN_URL, service.url),
        ],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == expected
