"""Run ``counter completion``, which prints a shell completion script."""

from __future__ import annotations

from typing import Annotated, Literal

from counter.cli.app import app
from counter.cli.terminal import flag, print_out


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], flag("Which shell")],
) -> None:
    """Print a shell completion script; see ``counter completion --help``."""
    print_out(app.generate_completion(prog_name="counter", shell=shell).rstrip("\n"))
