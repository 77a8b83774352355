"""A service for the client's tests, one for each module."""

from collections.abc import Iterator

import pytest

from tests.support.in_thread import Service, in_thread


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    # A token is not too old when a busy machine has sent a few requests.
    with in_thread(
        tmp_path_factory.mktemp("service") / "data", accept_limit="10s", rollup_window="1s"
    ) as service:
        yield service
