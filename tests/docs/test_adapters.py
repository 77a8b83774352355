"""The page for authors of stores names everything that a store consists of."""

from dataclasses import fields
from pathlib import Path

import pytest

from counter.capabilities import Capabilities
from counter.telemetry.store_calls import PARTS
from counter.testing import suites

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adapters.md"
SUITES = sorted(name for name in vars(suites) if name.endswith("Cases"))
NAMES = (*PARTS, *(each.name for each in fields(Capabilities)), *SUITES)


@pytest.mark.parametrize("name", NAMES)
def test_the_page_names_each_part_capability_and_suite(name: str) -> None:
    assert f"`{name}`" in PAGE.read_text()
