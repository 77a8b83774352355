"""The two ways that an add and a get of one counter may take: every answer must be the same."""

from typing import Any

import pytest


@pytest.fixture(params=["fast lane", "application"])
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The settings of a service that answers them one way."""
    return {"fast_lane": request.param == "fast lane"}
