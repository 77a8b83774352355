"""docs/guarantees.md names tests that are there."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.store_folders import is_here

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
DOCUMENT = ROOT / "docs" / "guarantees.md"
NAMED = sorted(set(re.findall(r"`((?:\w+/)+\w+\.py)(?:::(\w+))?`", DOCUMENT.read_text("utf-8"))))


def test_the_document_names_some() -> None:
    assert len(NAMED) >= 20


@pytest.mark.parametrize(("path", "name"), NAMED, ids=lambda part: part)
def test_a_named_test_is_there(path: str, name: str) -> None:
    file = (ROOT if path.startswith("counter/") else TESTS) / path.removeprefix("tests/")
    if not is_here(file.relative_to(ROOT).as_posix()):
        pytest.skip("its store is not installed")
    assert file.is_file()
    found = {
        node.name
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert not name or name in found
