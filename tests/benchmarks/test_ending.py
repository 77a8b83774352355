"""A benchmark that is terminated leaves no server behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("child_processes")


SUBJECT = """
import os, sys, time
from pathlib import Path
from unittest.mock import patch
from benchmarks import __main__ as bench
from benchmarks.harness import counter_serve

def serve(run):
    with counter_serve(run, run.fresh_folder("data")) as server:
        print(server.pid, flush=True)
        time.sleep(600)

with patch.dict(bench.SUBJECTS, {"start": serve}):
    bench.main("start", quick=True, folder=Path(sys.argv[1]))
"""


def test_sigterm_ends_its_servers_first(tmp_path: Path) -> None:
    """Regression: they lived on, and made every later figure worse."""
    run = subprocess.Popen(
        [sys.executable, "-c", SUBJECT, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with run:
        assert run.stdout is not None
        server = next(int(line) for line in run.stdout if line.strip().isdigit())
        run.terminate()
    assert run.returncode == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(server, signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []
