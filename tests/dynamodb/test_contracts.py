"""The DynamoDB adapter keeps the contracts, over Amazon's local engine."""

from pathlib import Path

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
        return FreshStore(self.options, clock, [DATASET])


class TestPurge(OnDynamodb, DynamodbPurgeCases):
    """Purging."""


add_suites(globals(), OnDynamodb)
