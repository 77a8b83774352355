"""The conformance programs of the clients, and how to run them."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.needs import miss

CLIENTS = Path(__file__).resolve().parents[2] / "clients"
TYPESCRIPT = CLIENTS / "typescript"
Json = Any


def python(_: Path) -> list[str]:
    """The SDK's program."""
    return [sys.executable, str(CLIENTS / "python" / "conformance.py")]


def go(place: Path) -> list[str]:
    """The Go client's program, built in *place*."""
    program = place / "conformance-go"
    run_go("build", "-o", str(program), "./cmd/conformance")
    return [str(program)]


def typescript(_: Path) -> list[str]:
    """The TypeScript client's program, built in its own folder if a source is newer."""
    if shutil.which("npm") is None:
        miss("there is no npm (nodejs 18 or newer)")
    program = TYPESCRIPT / "dist" / "conformance" / "main.js"
    sources = [*TYPESCRIPT.glob("*/*.ts"), *TYPESCRIPT.glob("*.json")]
    with (TYPESCRIPT / "tsconfig.json").open() as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        built_s = program.stat().st_mtime if program.exists() else 0.0
        if built_s < max(each.stat().st_mtime for each in sources):
            install = ". scripts/setup.sh; install_node clients/typescript"
            run_node("bash", "-c", f"set -e; {install}", at=CLIENTS.parent)
            run_node("node_modules/.bin/tsc")
    return ["node", str(program)]


#: Each returns the command line that starts its program; it may build it in the folder given.
PROGRAMS: Mapping[str, Callable[[Path], list[str]]] = {
    "python": python,
    "go": go,
    "typescript": typescript,
}


def run_node(*command: str, at: Path = TYPESCRIPT) -> str:
    """Run *command*; return its output."""
    done = subprocess.run(command, cwd=at, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_go(*arguments: str, at: Path = CLIENTS / "go", **environment: str) -> str:
    """Run the go command without a network; return its output."""
    if shutil.which("go") is None:
        miss("there is no Go (Debian: golang-go)")
    offline = {"GOTOOLCHAIN": "local", "GOPROXY": "off", "GOFLAGS": "-mod=mod", "GOWORK": "off"}
    done = subprocess.run(
        ["go", *arguments],
        cwd=at,
        env=os.environ | offline | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run(
    program: Sequence[str], url: str, commands: Sequence[Mapping[str, Json]], **options: str
) -> list[Json]:
    """Run *commands*, many at a time; return their outcomes in order, without their ids."""
    flags = {"url": url, "namespace": "default"} | options
    lines = [json.dumps({"id": at, **each}) for at, each in enumerate(commands)]
    done = subprocess.run(
        [*program, *(x for name, value in flags.items() for x in _flag(name, value))],
        input="\n".join([*lines, ""]),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if key_file := options.get("api_key_file"):
        key = Path(key_file).read_text().strip()
        assert key not in done.stdout + done.stderr, "it writes the API key"
    found = {}
    for line in done.stdout.splitlines():
        outcome = json.loads(line)
        found[outcome.pop("id")] = outcome
    assert sorted(found) == list(range(len(commands))), done.stderr
    return [found[at] for at in range(len(commands))]


def _flag(name: str, value: str) -> tuple[str, str]:
    return f"--{name.replace('_', '-')}", value
