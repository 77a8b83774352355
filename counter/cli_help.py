"""What the help of a command says: what it does, examples, and what it ends with."""

from __future__ import annotations

from typing import Final

#: What Ctrl-C ends a command with.
INTERRUPTED: Final = "130 if it was interrupted"


def helped(what: str, examples: str, ends: str, more: str = "") -> str:
    """A help text. *examples* are a line each; *ends* tells the exit codes."""
    shown = "".join(f"\n  {each.strip()}" for each in examples.strip().splitlines())
    parts = (what, more, f"For example:{shown}", f"Exit codes: {ends}")
    return "\n\n".join(part for part in parts if part)
