"""The stores of services that are killed."""

from collections.abc import Mapping

import pytest

from tests.support.needs import need


@pytest.fixture(params=["sqlite", "postgresql", "dynamodb"])
async def flags(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, child_processes: None
) -> Mapping[str, str]:
    """The settings of the service under test besides small windows, over a store that is new."""
    # Else it refuses adds on a busy machine, whole batches of them.
    patient = {"write_wait_max": "1m"}
    if request.param == "sqlite":
        # So short that windows are rolled up between the kills.
        return {**patient, "write_timeout": "100ms"}
    server = request.getfixturevalue(request.param)
    given = {**patient, "keyspace": "killed", "write_timeout": "3s", "lease_time": "6s"}
    found: Mapping[str, str] = await need(f"tests.support.{request.param}").settings_of_new(
        server, given, monkeypatch
    )
    return found
