"""SECURITY.md and docs/threat-model.md refer to existing files and tests."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.support.server import ROOT
from tests.support.settings import documented
from tests.support.store_folders import is_here

THREATS = (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8")
SECURITY = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
STRIDE = "STRIDE"
#: Kind, threat, mitigation, code, test.
Row = tuple[str, str, str, str, str]


def rows() -> list[Row]:
    """The table of threats."""
    table = THREATS.partition("## Threats")[2].partition("## Residual risks")[0]
    found = re.findall(
        rf"^\| ([{STRIDE}]) \|(.*)\|(.*)\| `(.*)` \| `(.*)` \|$", table, re.MULTILINE
    )
    assert len(found) == len(re.findall(r"^\| [A-Z] \|", table, re.MULTILINE))
    return found


@cache
def named_tests(path: Path) -> frozenset[str]:
    """The names of the tests that a file holds, within classes too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = (each.name for each in ast.walk(tree) if isinstance(each, kinds))
    return frozenset(name for name in names if name.startswith("test_"))


def test_every_kind_of_threat_is_thought_of() -> None:
    kinds = [kind for kind, *_ in rows()]
    assert set(kinds) == set(STRIDE)
    assert kinds == sorted(kinds, key=STRIDE.index)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[1].strip()[:40])
def test_a_mitigation_is_in_code_and_shown_by_a_test(row: Row) -> None:
    _, _, _, code, shown = row
    if not is_here(code):
        pytest.skip("its store is not installed")
    assert (ROOT / code).is_file(), code
    path, _, name = shown.partition("::")
    assert name in named_tests(ROOT / path), shown


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize(("text", "home"), [(SECURITY, ROOT), (THREATS, ROOT / "docs")])
def test_what_they_point_at_is_there(text: str, home: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = target.partition("#")
        document = home / path if path else None
        if document is not None:
            assert document.exists(), target
        if anchor:
            there = text if document is None else document.read_text(encoding="utf-8")
            assert anchor in anchors(there), target
    for script in re.findall(r"`\./(scripts/\w+)`", text):
        assert (ROOT / script).is_file(), script


def test_what_the_checklist_names_are_settings_and_flags() -> None:
    """A setting that was renamed would leave operators with advice that they cannot follow."""
    from counter.cli.commands.key import NewKey

    checklist = SECURITY.partition("## Hardening checklist")[2].partition("\n## ")[0]
    flags = {each.replace("-", "_") for each in re.findall(r"`--([a-z-]+)`", checklist)}
    flags -= {"require_hashes"}
    # Other tests compare its tables with the settings of the stores that are installed.
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    known = set(documented(page)) | set(NewKey.__dataclass_fields__)
    assert flags <= known
    names = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", checklist))
    assert names <= known
