"""The Go client's own tests, and its README as a new user would follow it."""

import re
from pathlib import Path

import pytest

from tests.clients.programs import CLIENTS, run_go
from tests.support.server import served

pytestmark = pytest.mark.usefixtures("child_processes")


GO = CLIENTS / "go"


def test_its_own_tests_pass() -> None:
    run_go("test", "./...")


def test_its_readme_counts(tmp_path: Path) -> None:
    """Each command line of the README, in order, and its output."""
    text = (GO / "README.md").read_text(encoding="utf-8")
    program, buffered, *_ = re.findall(r"```go\n(.*?)```", text, re.DOTALL)
    [console] = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    *commands, shown = console.strip().split("\n")
    place = tmp_path / "example"
    place.mkdir()
    with served(tmp_path) as server:
        (place / "main.go").write_text(program.replace("http://127.0.0.1:8080", server.url))
        for command in commands:
            words = command.replace("/path/to/clients/go", str(GO)).split()
            assert words[:2] == ["$", "go"]
            written = run_go(*words[2:], at=place)
        assert written.strip() == shown
        begin, end = program.index("\tif _, err := client.Add("), program.index("\tcount, err :=")
        other = program[:begin] + buffered + program[end:]
        imported = other.replace('"context"\n', '"context"\n\t"errors"\n')
        (place / "main.go").write_text(imported.replace("http://127.0.0.1:8080", server.url))
        assert run_go("run", ".", at=place).strip() == "1003 <nil>"
