"""Private names of libraries exist in every version that ``pyproject.toml`` allows.

A private name may change in any release, and a user who installs a wheel has no lock file. So each
library of which one is used has an upper bound, and the oldest and the newest version within the
bounds are inspected.
"""

import ast
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from importlib.metadata import distribution
from pathlib import Path
from typing import Final

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.support.server import ROOT

#: The private names that shipped code uses, and the signatures that it overrides: of each library,
#: by file.
USED: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "cassandra-driver": {
        "cassandra/cluster.py": (
            *("ResponseFuture._paging_state", "ResponseFuture._timer"),
            *("ResponseFuture._callbacks", "ResponseFuture._errbacks", "Session._pools"),
            "Session._default_timeout",
        ),
        "cassandra/pool.py": ("HostConnection._connection",),
        "cassandra/connection.py": (
            *("Connection.process_msg(self, header, body)", "Connection.in_flight"),
            "Timer.callback",
        ),
    },
    "pymemcache": {
        "pymemcache/client/base.py": ("Client._raise_errors(self, line, name)", "Client.sock"),
    },
    "redis": {"redis/connection.py": ("AbstractConnection._sock",)},
    "httpx": {
        "httpx/_client.py": ("Client._transport", "Client._mounts"),
        "httpx/_transports/default.py": ("HTTPTransport._pool",),
    },
    "uvicorn": {
        "uvicorn/server.py": (
            *("Server.serve(self, sockets)", "Server.startup(self, sockets)"),
            *("Server.main_loop(self)", "Server.shutdown(self, sockets)"),
            *("Server.capture_signals(self)", "Server.started"),
        ),
    },
    "httpcore": {"httpcore/_sync/connection_pool.py": ("ConnectionPool._network_backend",)},
}
#: Of tuples and of the standard library.
_PUBLIC: Final = frozenset({"_replace", "_asdict", "_fields", "_exit", "_Hash"})
_SHIPPED: Final = ("counter", "rollup", "api", "clients/python/counter_client")


def requirement_of(library: str) -> Requirement:
    """Return what our projects require of *library*; of httpcore, what httpx requires."""
    texts = distribution("httpx").requires or []
    for path in ("pyproject.toml", "clients/python/pyproject.toml"):
        project = tomllib.loads((ROOT / path).read_text("utf-8"))["project"]
        texts += project["dependencies"]
        for extra in project["optional-dependencies"].values():
            texts += extra
    [found] = {str(each) for each in map(Requirement, texts) if each.name == library}
    return Requirement(found)


def names_in(source: str) -> Iterator[str]:
    """Yield the attributes of each class, and its methods with their parameters."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef):
            continue
        for each in ast.walk(node):
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                parameters = ", ".join(part.arg for part in each.args.args)
                yield f"{node.name}.{each.name}({parameters})"
            elif isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
                yield f"{node.name}.{each.attr}"
            elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                yield f"{node.name}.{each.id}"


def missing_in(library: str, sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the names of *library* that its *sources* lack, by file."""
    lacks = {
        path: {*names}.difference(names_in(sources[path])) for path, names in USED[library].items()
    }
    return {path: names for path, names in lacks.items() if names}


def downloaded(requirement: str, folder: Path) -> dict[str, str]:
    """Return the sources of the newest version that *requirement* allows."""
    command = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", requirement)
    subprocess.run([*command, "--dest", str(folder)], check=True)
    [archive] = folder.iterdir()
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return {name: wheel.read(name).decode() for name in wheel.namelist() if is_code(name)}
    with tarfile.open(archive) as tar:
        members = [each for each in tar.getmembers() if is_code(each.name)]
        texts = {each.name: tar.extractfile(each) for each in members}
        return {
            name.partition("/")[2]: file.read().decode() for name, file in texts.items() if file
        }


def is_code(name: str) -> bool:
    return any(name.endswith(path) for used in USED.values() for path in used)


@pytest.mark.parametrize("library", USED)
def test_the_installed_version_has_the_names(library: str) -> None:
    installed = distribution(library)
    sources = {
        path: Path(str(installed.locate_file(path))).read_text("utf-8") for path in USED[library]
    }
    assert missing_in(library, sources) == {}


@pytest.mark.parametrize("library", USED)
def test_the_oldest_and_the_newest_version_have_the_names(
    library: str, minutes: None, tmp_path: Path
) -> None:
    requirement = requirement_of(library)
    oldest = min(
        (Version(each.version.removesuffix(".*")) for each in requirement.specifier
         if each.operator in (">=", "==")),
    )  # fmt: skip
    for number, each in enumerate((f"{library}=={oldest}", f"{library}{requirement.specifier}")):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert missing_in(library, downloaded(each, folder)) == {}, each


@pytest.mark.parametrize("library", USED)
def test_a_library_with_a_private_name_has_an_upper_bound(library: str) -> None:
    operators = {each.operator for each in requirement_of(library).specifier}
    assert operators & {"<", "<=", "~=", "=="}


def test_a_name_that_is_gone_is_noticed() -> None:
    source = "class Client:\n    def _raise_errors(self, line): ...\n"
    gone = {"Client._raise_errors(self, line, name)", "Client.sock"}
    assert missing_in("pymemcache", {"pymemcache/client/base.py": source}) == {
        "pymemcache/client/base.py": gone
    }


def own_names(tree: ast.AST) -> set[str]:
    """Return the private names that a module defines."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("self."):
            found |= {node.attr} if isinstance(node.ctx, ast.Store) else set()
    return found


def test_each_private_name_of_a_library_is_listed() -> None:
    """A private attribute that none of our classes has belongs to a library."""
    trees = {
        path: ast.parse(path.read_text("utf-8"))
        for folder in _SHIPPED
        for path in sorted((ROOT / folder).rglob("*.py"))
    }
    ours = set[str]().union(*map(own_names, trees.values()), _PUBLIC)
    used = {
        node.attr
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        if node.attr.startswith("_") and not node.attr.startswith("__")
    }
    listed = {
        name.partition(".")[2].partition("(")[0]
        for files in USED.values()
        for names in files.values()
        for name in names
    }
    assert used - ours <= listed
