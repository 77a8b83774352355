"""Tests that share a cluster are run by one process: each process more would start it again."""

import os
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.cluster import group_of


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="one process runs all tests")
def test_the_groups_reach_the_scheduler(request: pytest.FixtureRequest) -> None:
    """It reads them off the ends of the tests' ids."""
    for item in request.session.items:
        assert item.nodeid.endswith(f"@{group_of(item)}")


@pytest.mark.parametrize(
    ("fixtures", "storage", "group"),
    [
        (["three_nodes", "cassandra"], None, "three nodes"),
        (["postgresql"], None, "postgresql"),
        (["storage", "app"], "postgresql", "postgresql"),
        (["storage", "app"], "sqlite", "tests/a.py alone"),
        (["child_processes"], None, "tests/a.py served"),
    ],
)
def test_tests_that_use_a_server_of_a_kind_share_a_group(
    fixtures: list[str], storage: str | None, group: str
) -> None:
    params = {} if storage is None else {"storage": storage}
    item: Any = SimpleNamespace(
        nodeid="tests/a.py::test", fixturenames=fixtures, callspec=SimpleNamespace(params=params)
    )
    assert group_of(item) == group
