"""Tests that share a cluster are run by one process: each process more would start it again."""

import os

import pytest

from tests.support.cluster import SLOW_FIXTURES


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="one process runs all tests")
def test_the_groups_reach_the_scheduler(request: pytest.FixtureRequest) -> None:
    """It reads them off the ends of the tests' ids."""
    for item in request.session.items:
        name, _, group = item.nodeid.rpartition("@")
        shares = not SLOW_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))
        assert group in (("three nodes", "one node") if shares else (name.partition("::")[0],))
