"""Clients generated from the OpenAPI document compile, and count a retried add once.

Locks pin the generators: those of clients/generated and of the tests, and scripts/cluster_jars.py.
They run without options that would work around the document.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from scripts.cluster_jars import OPENAPI_GENERATOR
from tests.support.needs import miss, need
from tests.support.server import ROOT, served

PROGRAMS = ROOT / "clients" / "generated"
#: A new add, the same one again, and the count.
COUNTED_ONCE = ["replayed false", "replayed true", "count 2"]

pytestmark = pytest.mark.usefixtures("child_processes")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("service"), {"accept_limit": "1m"}) as server:
        yield server.url


@pytest.fixture
def work(service: str, tmp_path: Path) -> Path:
    """A folder with the document of the service."""
    document = httpx.get(f"{service}/openapi.json", timeout=100)
    (tmp_path / "openapi.json").write_bytes(document.content)
    return tmp_path


@pytest.fixture(scope="module")
def node_modules() -> Path:
    if shutil.which("npm") is None:
        miss("there is no npm (nodejs 20 or newer)")
    run(ROOT, "bash", "-c", ". scripts/setup.sh; install_node clients/generated")
    return PROGRAMS / "node_modules"


def test_by_oapi_codegen(service: str, work: Path) -> None:
    need_go()
    copied(work, "oapi-codegen")
    (work / "counterapi").mkdir()
    kinds = ("-generate", "types,client", "-package", "counterapi")
    target = ("-o", "counterapi/client.gen.go")
    run(work, "go", "tool", "oapi-codegen", *kinds, *target, "openapi.json")
    assert said(work, "go", "run", ".", service) == COUNTED_ONCE


def test_by_openapi_generator(service: str, work: Path) -> None:
    need_go()
    if reason := OPENAPI_GENERATOR.missing():
        miss(reason)
    jar = OPENAPI_GENERATOR.fetch() / OPENAPI_GENERATOR.jar
    copied(work, "openapi-generator")
    generate = ("java", "-jar", str(jar), "generate", "-i", "openapi.json", "-g", "go")
    names = "--git-host=counter.example", "--git-user-id=.", "--git-repo-id=openapi"
    run(work, *generate, "-o", "openapi", *names)
    # Its own tests need another library.
    shutil.rmtree(work / "openapi" / "test")
    module = "module counter.example/openapi\n\ngo 1.23\n"
    (work / "openapi" / "go.mod").write_text(module, encoding="utf-8")
    assert said(work, "go", "run", ".", service) == COUNTED_ONCE


def test_by_openapi_typescript_and_openapi_fetch(
    service: str, work: Path, node_modules: Path
) -> None:
    copied(work, "openapi-fetch")
    (work / "node_modules").symlink_to(node_modules)
    (work / "package.json").write_text('{"type": "module"}', encoding="utf-8")
    run(work, "node_modules/.bin/openapi-typescript", "openapi.json", "-o", "schema.d.ts")
    run(work, "node_modules/.bin/tsc")
    assert said(work, "node", "main.js", service) == COUNTED_ONCE


def test_by_openapi_python_client(service: str, work: Path) -> None:
    need("openapi_python_client")
    copied(work, "openapi-python-client")
    command = (sys.executable, "-m", "openapi_python_client", "generate", "--path", "openapi.json")
    run(work, *command, "--output-path", "generated", "--meta", "none")
    run(work, sys.executable, "-m", "compileall", "-q", "generated")
    assert [line.lower() for line in said(work, sys.executable, "main.py", service)] == COUNTED_ONCE


def need_go() -> None:
    if shutil.which("go") is None:
        miss("there is no go")


def copied(work: Path, program: str) -> None:
    shutil.copytree(PROGRAMS / program, work, dirs_exist_ok=True)


def run(work: Path, *command: str) -> str:
    done = subprocess.run(
        command,
        cwd=work,
        env=os.environ | {"GOFLAGS": "", "GOWORK": "off"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout[-4_000:]}\n{done.stderr[-4_000:]}"
    return done.stdout


def said(work: Path, *command: str) -> list[str]:
    return run(work, *command).splitlines()
