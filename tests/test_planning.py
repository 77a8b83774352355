"""docs/planning.md is run: each command gives the very answer that is written below it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.server import ROOT
from tests.test_readme import Step, read, steps

TEXT = read(ROOT / "docs" / "planning.md")


def run(command: str, home: Path) -> str:
    """The output of *command* in a shell in *home*, errors and all."""
    folder = str(Path(sys.executable).parent)
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=home,
        env={"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(home), "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout.rstrip("\n")


@pytest.mark.parametrize("step", tuple(steps(TEXT)), ids=lambda step: f"line-{step.line}")
@pytest.mark.usefixtures("child_processes")
def test_every_command_answers_as_it_says(step: Step, tmp_path: Path) -> None:
    assert run(step.command, tmp_path) == step.answer
