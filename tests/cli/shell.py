"""Runs ``counter`` in this process, and captures its output."""

import io
import json
import sys
from typing import Any
from unittest.mock import patch

import pytest

from counter.cli.app import app


def exit_code(*words: str) -> int:
    try:
        app(list(words))
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


class Shell:
    """A person at a terminal that is none: output is captured."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.err = ""

    def run(self, *words: str, stdin: bytes | None = None) -> tuple[int, str]:
        """The exit code and the standard output. *stdin* comes by a pipe."""
        given = sys.stdin if stdin is None else io.TextIOWrapper(io.BytesIO(stdin))
        with patch("sys.stdin", given):
            code = exit_code(*words)
        out, self.err = self._capsys.readouterr()
        return code, out

    def said(self, *words: str) -> str:
        """The output of a command that must succeed, without the end of its line."""
        code, out = self.run(*words)
        assert code == 0, self.err
        return out.removesuffix("\n")

    def fails(self, code: int, *words: str, stdin: bytes | None = None) -> str:
        """The messages of a command that ends with *code* and prints nothing else."""
        assert self.run(*words, stdin=stdin) == (code, ""), self.err
        return self.err

    def documents(self, *words: str) -> list[dict[str, Any]]:
        """Its output with --json."""
        return [json.loads(line) for line in self.said(*words, "--json").splitlines()]
