"""The level of a test: what must run beside it. It follows from the fixtures that the test uses.

- *alone*: nothing. No server, no child process, no package of the system.
- *served*: a server, or a process that the test starts: the fixture ``child_processes``.
- *long*: what takes minutes, such as three nodes of Cassandra: the fixture ``minutes``.

``--level`` selects tests by level. A test of the level *alone* that starts a process or connects to
another process's server fails.
"""

import ast
import os
import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from enum import StrEnum
from functools import cache
from multiprocessing import util
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import pytest


class Level(StrEnum):
    """The requirements of a test."""

    ALONE = "alone"
    SERVED = "served"
    LONG = "long"


#: The command for the tests that a level leaves out.
COMMANDS: Final = {
    Level.ALONE: "./scripts/test",
    Level.SERVED: "./scripts/test --all",
    Level.LONG: "./scripts/long",
}
#: The values of the fixture ``storage`` that start a server.
_SERVED_STORES: Final = frozenset({"postgresql", "dynamodb"})
_STORES: Final = "counter/storage/"
_ROOT: Final = Path(__file__).resolve().parents[2]
_LEFT_OUT: Final = "left_out"
_UNTOUCHED: Final = "untouched"
#: With --changed-since, tests of these run only if one of the paths has changed, the test itself,
#: or a module that it imports.
WATCHED: Final[dict[str, tuple[str, ...]]] = {
    "tests/browser": ("api/console", "api/http/responses.py", "api/routes/site.py", "docs"),
    "tests/benchmarks": ("benchmarks",),
    "tests/docs": ("README.md", "docs", "scripts"),
    # It compiles all of that schema, for a minute.
    "tests/deploy/test_grafana_schema.py": ("deploy/grafana", "tests/deploy/grafana_schema"),
    # It compiles Kustomize, as long.
    "tests/deploy/test_kustomize.py": ("deploy/kubernetes", "deploy/prometheus"),
    "tests/clients/test_generated.py": ("api", "clients/generated", "counter/types.py"),
    "tests/cluster": ("counter/storage/cassandra", "counter/storage/shared"),
    "tests/dynamodb": ("counter/storage/shared",),
    "tests/postgresql": ("counter/storage/shared",),
}


@pytest.fixture(scope="session")
def child_processes() -> None:
    """Permission to start processes and to connect to them."""


@pytest.fixture(scope="session")
def minutes(child_processes: None) -> None:
    """Permission to take minutes."""


def level_of(item: pytest.Item) -> Level:
    """Return the level of a test."""
    fixtures = getattr(item, "fixturenames", ())
    if "minutes" in fixtures:
        return Level.LONG
    callspec = getattr(item, "callspec", None)
    storage = callspec.params.get("storage") if callspec else None
    if "child_processes" in fixtures or storage in _SERVED_STORES:
        return Level.SERVED
    return Level.ALONE


def add_options(parser: pytest.Parser) -> None:
    """Add the options that select tests."""
    group = parser.getgroup("levels")
    group.addoption(
        "--level",
        action="append",
        choices=[*Level],
        help="run the tests of this level only; can be repeated",
    )
    group.addoption(
        "--changed-since",
        metavar="COMMIT",
        help="also run tests of the level long whose imports changed since COMMIT, and leave out"
        " those of an engine, the console, the benchmarks and the documents if theirs did not",
    )


class Levels:
    """Selects tests, guards the level *alone*, and reports the deselected tests."""

    def __init__(self, config: pytest.Config) -> None:
        self._levels = frozenset(map(Level, config.getoption("level") or Level))
        since = config.getoption("changed_since")
        self._changed = None if since is None else changed_since(since)
        self._left_out: dict[str, int] = {}
        self._untouched: dict[str, int] = {}
        self._guard = Guard()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Deselect tests by --level and --changed-since."""
        kept, dropped = list[pytest.Item](), list[pytest.Item]()
        left_out, untouched = Counter[str](), Counter[str]()
        for item in items:
            level, path = level_of(item), item.nodeid.partition("::")[0]
            if self._is_wanted(level, path):
                kept.append(item)
                continue
            dropped.append(item)
            if self._changed is not None and (level is Level.LONG or level in self._levels):
                untouched[path] += 1
            else:
                left_out[level.value] += 1
        if dropped:
            config.hook.pytest_deselected(items=dropped)
            items[:] = kept
        self._left_out, self._untouched = dict(left_out), dict(untouched)

    def _is_wanted(self, level: Level, path: str) -> bool:
        if self._changed is None:
            return level in self._levels
        if level is Level.LONG:
            return is_touched(path, self._changed)
        watched = any(path.startswith(each) for each in WATCHED)
        return level in self._levels and (not watched or is_touched(path, self._changed))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Forbid processes and foreign servers if the test runs alone."""
        if level_of(item) is not Level.ALONE:
            return (yield)
        with self._guard:
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[_LEFT_OUT] = self._left_out
            session.config.workeroutput[_UNTOUCHED] = self._untouched
        return (yield)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Take the deselected tests of a worker of xdist: all workers have the same."""
        output = getattr(node, "workeroutput", {})
        self._left_out = output.get(_LEFT_OUT, self._left_out)
        self._untouched = output.get(_UNTOUCHED, self._untouched)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for level, count in sorted(self._left_out.items()):
            line = (
                f"left out: {count} tests of the level {level}; {COMMANDS[Level(level)]} runs them"
            )
            terminalreporter.write_line(line)
        for path, count in sorted(self._untouched.items()):
            line = f"left out, because nothing of it was changed: {path} ({count} tests)"
            terminalreporter.write_line(line)


class Guard:
    """Fails whatever starts a process, or connects to a server that is not in this process."""

    def __init__(self) -> None:
        self._own: set[Any] = set()
        listen = socket.socket.listen

        def listens(this: socket.socket, *backlog: int) -> None:
            listen(this, *backlog)
            self._own.add(_place(this.getsockname()))

        # For the whole run: servers of fixtures outlive a test.
        socket.socket.listen = listens  # type: ignore[assignment,method-assign]
        self._patches = [
            patch.object(subprocess.Popen, "__init__", _forbidden("starts a process")),
            patch.object(util, "spawnv_passfds", _forbidden("starts a process")),
            *(
                patch.object(os, name, _forbidden("starts a process"))
                for name in ("fork", "forkpty", "posix_spawn", "posix_spawnp", "system")
            ),
            patch.object(socket.socket, "connect", self._checked(socket.socket.connect)),
            patch.object(socket.socket, "connect_ex", self._checked(socket.socket.connect_ex)),
        ]

    def __enter__(self) -> None:
        for each in self._patches:
            each.start()

    def __exit__(self, *_: object) -> None:
        for each in self._patches:
            each.stop()

    def _checked(self, connect: Callable[..., Any]) -> Callable[..., Any]:
        def connects(this: socket.socket, address: Any) -> Any:
            try:
                return connect(this, address)
            finally:
                # On loopback a connection exists as soon as the call ends, if anything listens.
                with suppress(OSError):
                    if _place(this.getpeername()) not in self._own:
                        this.close()
                        _fail(f"connects to a server at {address}")

        return connects


def _place(address: Any) -> Any:
    """Return the port, or the path of a Unix socket."""
    return address[1] if isinstance(address, tuple) else address


def _forbidden(what: str) -> Callable[..., Any]:
    def fails(*arguments: Any, **_: Any) -> Any:
        words = [each for each in arguments if isinstance(each, str | list | tuple)]
        _fail(f"{what} ({str(words)[:200]})")

    return fails


def _fail(what: str) -> None:
    pytest.fail(
        f"this test is of the level alone, and {what}: use the fixture child_processes, or one that"
        " starts the server (tests/README.md)"
    )


def changed_since(commit: str) -> frozenset[str]:
    """Return the paths of the files that differ from *commit*, from the root of the repository."""
    command = ["git", "diff", "--name-only", commit]
    return frozenset(
        subprocess.run(
            command, cwd=_ROOT, check=True, capture_output=True, text=True
        ).stdout.splitlines()
    )


def is_touched(path: str, changed: Iterable[str]) -> bool:
    """Return whether a test module, its imports, or its watched files are among the *changed*."""
    watched = [
        each for folder, paths in WATCHED.items() if path.startswith(folder) for each in paths
    ]
    parts = [path, *imports_of(path), *watched]
    return any(each == part or each.startswith(f"{part}/") for each in changed for part in parts)


@cache
def imports_of(path: str) -> tuple[str, ...]:
    """Return the files and packages of this repository that a module imports directly."""
    names = list[str]()
    for node in ast.walk(ast.parse((_ROOT / path).read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names += [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{each.name}" for each in node.names]
    return tuple(filter(None, map(_path_of, names)))


def _path_of(name: str) -> str | None:
    """Return the path of import *name*: a package means all its modules, a store all of its."""
    path = name.replace(".", "/")
    if path.startswith(_STORES):
        return "/".join(path.split("/")[: _STORES.count("/") + 1])
    while path:
        if (_ROOT / f"{path}.py").is_file():
            return f"{path}.py"
        if (_ROOT / path / "__init__.py").is_file():
            return path
        path = path.rpartition("/")[0]
    return None
