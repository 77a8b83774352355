"""Amazon's local DynamoDB on a free port of loopback."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar
from unittest.mock import patch

import pytest

from counter.limits import MINUTE
from counter.ports import Clock
from counter.storage.dynamodb.driver import Driver, DynamodbOptions
from counter.storage.dynamodb.schema import apply_for, apply_schema
from counter.storage.dynamodb.settings import DynamodbSettings
from counter.storage.dynamodb.store import DynamodbStore
from counter.types import ClockReading, Dataset
from scripts.cluster_jars import DYNAMODB
from scripts.dynamodb_server import DynamodbServer
from tests.support.needs import miss
from tests.support.server import SMALL_WINDOWS


@pytest.fixture(scope="session")
def dynamodb(
    tmp_path_factory: pytest.TempPathFactory, child_processes: None
) -> Iterator[DynamodbOptions]:
    """One engine for all tests that need no more than tables of it."""
    if problem := DYNAMODB.missing():
        miss(problem)
    server = DynamodbServer(tmp_path_factory.mktemp("dynamodb"))
    with pytest.MonkeyPatch.context() as patched:
        # The engine asks for some, and takes any.
        patched.setenv("AWS_ACCESS_KEY_ID", "none")
        patched.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
        server.start()
        _Shared.options = DynamodbOptions(
            region="local", endpoint=server.endpoint, timeout_us=MINUTE
        )
        yield _Shared.options
        _Shared.options = None
        server.stop()


class ClockedStore(DynamodbStore):
    """A store with the test's clock."""

    def __init__(self, options: DynamodbOptions, clock: Clock) -> None:
        super().__init__(options, clock)
        self.control.read_clock = _right  # type: ignore[method-assign]


async def _right() -> ClockReading:
    return ClockReading(0, 0)


class FreshStore(ClockedStore):
    """A store that opens as if it were new."""

    def __init__(self, options: DynamodbOptions, clock: Clock, datasets: Sequence[Dataset]) -> None:
        super().__init__(options, clock)
        self._datasets = datasets

    async def open(self) -> None:
        await self.driver.open()
        await empty(self.driver)
        # The engine deletes by its own clock what has expired; the test's may be months behind.
        with patch("counter.storage.dynamodb.schema.EXPIRES", None):
            await apply_schema(self.driver, self._datasets)
        await self.driver.close()
        await super().open()


class _Shared:
    """The engine of the fixture ``dynamodb``, for code that is no fixture."""

    options: ClassVar[DynamodbOptions | None] = None


def stores_of(dataset: Dataset, clock: Clock) -> Callable[[], DynamodbStore]:
    """Return a factory of stores over the same tables, which are empty at first."""
    options = _Shared.options
    assert options is not None, "use the fixture dynamodb"
    first = iter([FreshStore(options, clock, [dataset])])
    return lambda: next(first, None) or ClockedStore(options, clock)


async def empty(driver: Driver) -> None:
    """Delete all items: to make the tables again would take longer."""
    for table in await driver.tables():
        answer = await driver._call("scan", TableName=table, ProjectionExpression="pk, sk")
        keys = [(item["pk"]["B"], item["sk"]["B"]) for item in answer["Items"]]
        await driver.write_many(table, deletes=keys)


async def settings_of_new(
    engine: DynamodbOptions, given: Mapping[str, str], _: pytest.MonkeyPatch
) -> Mapping[str, str]:
    """Make new tables, and return the settings of a service over them: those that are *given*, and
    where the tables are."""
    own = {"store": "dynamodb", "dynamodb_region": "local", "dynamodb_endpoint": engine.endpoint}
    found: dict[str, Any] = {**given, **own}
    driver = Driver(replace(engine, prefix=given["keyspace"]))
    await driver.open()
    for table in await driver.tables():
        await driver.drop_table(table)
    await driver.close()
    await apply_for(DynamodbSettings(**{**SMALL_WINDOWS, **found}))
    return found
