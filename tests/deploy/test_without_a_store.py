"""A store can be taken out: the tests of the rest pass without its files."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.support.server import ROOT
from tests.support.store_folders import STORE_FOLDERS, owner_of

#: Builds the package that an editable installation adds to the path.
_BUILD = "import sys, hatchling.build as build; print(build.build_editable(sys.argv[1]))"


def without(store: str, place: Path) -> Path:
    """Copy the files that Git knows, but for those of *store* and its line in pyproject.toml."""
    tree = place / "tree"
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    for name in filter(None, names):
        if owner_of(name) != store and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    project = tree / "pyproject.toml"
    lines = project.read_text(encoding="utf-8").splitlines(keepends=True)
    line = f'{store} = "counter.storage.{store}:'
    assert [each for each in lines if each.startswith(line)]
    rest = "".join(each for each in lines if not each.startswith(line))
    project.write_text(rest, encoding="utf-8")
    return tree


def entry_points_of(tree: Path, place: Path) -> Path:
    """Return a folder for the path in which the package of *tree* has its entry points."""
    build = [sys.executable, "-c", _BUILD, str(place)]
    done = subprocess.run(build, cwd=tree, check=True, capture_output=True, text=True)
    with ZipFile(place / done.stdout.split()[-1]) as package:
        package.extractall(place / "metadata")
    return place / "metadata"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("minutes")
@pytest.mark.parametrize("store", STORE_FOLDERS)
def test_the_rest_passes_without_one_store(store: str, tmp_path: Path) -> None:
    """As if its package had been removed: its entry point is gone, too."""
    tree = without(store, tmp_path)
    metadata = entry_points_of(tree, tmp_path)
    tests = [sys.executable, "-m", "pytest", "-q", "--level", "alone", "-n", "2", "--maxfail=20"]
    done = subprocess.run(
        [*tests, "-p", "no:cacheprovider"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": f"{metadata}{os.pathsep}{tree}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:]
