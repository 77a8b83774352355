"""How tests have SQLite roll up."""

from collections.abc import Iterator
from unittest.mock import patch

import pytest

_COUNTERS_MIN = "counter.storage.sqlite.window_rollup._COUNTERS_MIN"


@pytest.fixture(autouse=True)
def windows_of_any_size_are_rolled_up_in_the_store() -> Iterator[None]:
    """Otherwise only the few tests with a thousand counters would cover it."""
    with patch(_COUNTERS_MIN, 1):
        yield


@pytest.fixture
def the_worker_rolls_up() -> Iterator[None]:
    """Leave every window to the worker, as other stores do."""
    with patch(_COUNTERS_MIN, 10**9):
        yield
