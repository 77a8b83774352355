"""A program in a process of its own."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.server import ROOT


def run_python(
    *words: str | Path, cwd: Path = ROOT, timeout: int = 300, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """Run Python with *words*; the result has its output."""
    return subprocess.run(
        [sys.executable, *words],
        **{"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, **options},
        cwd=cwd,
        timeout=timeout,
        check=False,
    )
