"""What is uploaded to the registries of Node and Go, and the version in all of them."""

import json
import re
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

import counter
from scripts.release import set_version, versions
from tests.clients.programs import CLIENTS, TYPESCRIPT, run_go, run_node
from tests.support.needs import miss
from tests.support.server import ROOT

MODULE = "distributed-counter.example/clients/go"
TOOLS = CLIENTS / "generated" / "node_modules" / ".bin"


def test_one_version_is_written_everywhere() -> None:
    assert {version for _, version in versions()} == {counter.__version__}
    newest = re.findall(r"^## (.+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)[0]
    assert newest.endswith(" - unreleased") is ("dev" in counter.__version__)


def test_a_release_sets_the_version_everywhere_and_dates_the_changelog(tmp_path: Path) -> None:
    for path, _ in versions():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, tmp_path / path)
    before = counter.__version__
    log = tmp_path / "CHANGELOG.md"
    if "dev" not in before:
        set_version(before, "7.0.0.dev0", tmp_path)
        before = "7.0.0.dev0"
    set_version(before, "7.0.0", tmp_path)
    assert {version for _, version in versions(tmp_path)} == {"7.0.0"}
    assert re.search(r"^## \[7\.0\.0\] - \d{4}-\d\d-\d\d$", log.read_text(), re.M)
    set_version("7.0.0", "7.1.0.dev0", tmp_path)
    assert {version for _, version in versions(tmp_path)} == {"7.1.0.dev0"}
    assert re.findall(r"^## (\S+)", log.read_text(), re.M)[:2] == ["[7.1.0.dev0]", "[7.0.0]"]
    assert json.loads((tmp_path / "clients/typescript/package.json").read_text())["version"] == (
        "7.1.0-dev.0"
    )


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory, child_processes: None) -> Path:
    """The npm package of a clean clone."""
    if shutil.which("npm") is None:
        miss("there is no npm (nodejs 18 or newer)")
    place = tmp_path_factory.mktemp("npm")
    ignored = shutil.ignore_patterns("node_modules", "dist")
    shutil.copytree(TYPESCRIPT, place / "clone", ignore=ignored)
    run_node("npm", "pack", "--pack-destination", str(place), at=place / "clone")
    [packed] = place.glob("*.tgz")
    return packed


def test_the_npm_package_has_the_code_and_nothing_else(package: Path) -> None:
    with tarfile.open(package) as archive:
        names = {each.removeprefix("package/") for each in archive.getnames()}
    sources = {each.stem for each in (TYPESCRIPT / "src").glob("*.ts") if ".d." not in each.name}
    built = {f"dist/src/{each}{end}" for each in sources for end in (".js", ".d.ts")}
    assert names == {"LICENSE", "README.md", "package.json", *built}


def test_node_tools_find_no_fault_in_the_npm_package(package: Path) -> None:
    run_node("bash", "-c", ". scripts/setup.sh; install_node clients/generated", at=ROOT)
    run_node(str(TOOLS / "publint"), "--strict", str(package))
    run_node(str(TOOLS / "attw"), "--profile", "esm-only", str(package))
    # It would be uploaded: nothing is asked of a registry.
    run_node("npm", "publish", "--dry-run", "--tag", "next", str(package))


@pytest.mark.usefixtures("child_processes")
def test_go_get_takes_the_module(tmp_path: Path) -> None:
    """From a proxy that has it (https://go.dev/ref/mod#goproxy-protocol)."""
    assert run_go("list", "-m").strip() == MODULE
    version, proxy = "v0.7.0", tmp_path / "proxy"
    at = proxy / MODULE / "@v"
    at.mkdir(parents=True)
    (at / f"{version}.info").write_text(json.dumps({"Version": version}))
    shutil.copyfile(CLIENTS / "go" / "go.mod", at / f"{version}.mod")
    with zipfile.ZipFile(at / f"{version}.zip", "w") as archive:
        for path in (CLIENTS / "go").rglob("*"):
            if path.is_file():
                archive.write(path, f"{MODULE}@{version}/{path.relative_to(CLIENTS / 'go')}")
    place = tmp_path / "user"
    place.mkdir()
    settings = {
        "GOPROXY": proxy.as_uri(),
        "GOSUMDB": "off",
        "GOFLAGS": "-mod=mod -modcacherw",
        "GOMODCACHE": str(tmp_path / "cache"),
    }
    run_go("mod", "init", "user.example/x", at=place)
    run_go("get", f"{MODULE}/counter@{version}", at=place, **settings)
    (place / "main.go").write_text(
        f'package main\n\nimport "{MODULE}/counter"\n\nfunc main() {{ counter.NewToken() }}\n'
    )
    run_go("vet", "./...", at=place, **settings)
    own = (CLIENTS / "go" / "LICENSE").read_bytes()
    assert own == (ROOT / "LICENSE").read_bytes()
