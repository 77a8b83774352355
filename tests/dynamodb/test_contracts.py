"""The DynamoDB adapter keeps the contracts, over Amazon's local engine."""

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from counter.ports import Store
from counter.storage.dynamodb.driver import DynamodbOptions
from counter.testing.cases import DATASET
from counter.testing.clock import FakeClock
from counter.testing.suites import add_suites
from tests.dynamodb.cases import DynamodbCases, DynamodbPurgeCases
from tests.support.dynamodb import FreshStore


class OnDynamodb(DynamodbCases):
    """How the suites get a DynamoDB store."""

    @pytest.fixture(autouse=True)
    def engine(self, dynamodb: DynamodbOptions) -> None:
        self.options = dynamodb

    def new_store(self, clock: FakeClock, directory: Path) -> Store:
        store = FreshStore(self.options, clock, [DATASET])
        # No case is about a time-out, and a busy machine is slow: the driver's own bound is longer.
        store.driver._call = _without_deadline(store.driver._call)  # type: ignore[method-assign]
        return store


def _without_deadline(
    call: Callable[..., Coroutine[Any, Any, Any]],
) -> Callable[..., Coroutine[Any, Any, Any]]:
    return lambda operation, _timeout_us=None, **request: call(operation, **request)


class TestPurge(OnDynamodb, DynamodbPurgeCases):
    """Purging."""


add_suites(globals(), OnDynamodb)
