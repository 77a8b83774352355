"""Amazon's local DynamoDB on a free port of loopback."""

from collections.abc import Iterator, Sequence

import pytest

from counter.ports import Clock
from counter.storage.dynamodb import DynamodbOptions, DynamodbStore, apply_schema
from counter.storage.dynamodb.driver import Driver
from counter.types import Dataset
from scripts.cluster_jars import DYNAMODB
from scripts.dynamodb_server import DynamodbServer
from tests.support.needs import miss


@pytest.fixture(scope="session")
def dynamodb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DynamodbOptions]:
    """One engine for all tests that need no more than tables of it."""
    if problem := DYNAMODB.missing():
        miss(problem)
    server = DynamodbServer(tmp_path_factory.mktemp("dynamodb"))
    with pytest.MonkeyPatch.context() as patched:
        # The engine asks for some, and takes any.
        patched.setenv("AWS_ACCESS_KEY_ID", "nobody")
        patched.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
        server.start()
        yield DynamodbOptions(region="local", endpoint=server.endpoint)
        server.stop()


class FreshStore(DynamodbStore):
    """A store that opens as if it were new."""

    def __init__(self, options: DynamodbOptions, clock: Clock, datasets: Sequence[Dataset]) -> None:
        super().__init__(options, clock)
        self._datasets = datasets

    async def open(self) -> None:
        await empty(self.driver)
        await self.driver.open()
        await apply_schema(self.driver, self._datasets)
        await self.driver.close()
        await super().open()


async def empty(driver: Driver) -> None:
    """Delete all items: to make the tables again would take longer."""
    await driver.open()
    for table in await driver.tables():
        answer = await driver._call("scan", TableName=table, ProjectionExpression="pk, sk")
        keys = [(item["pk"]["B"], item["sk"]["B"]) for item in answer["Items"]]
        await driver.write_many(table, deletes=keys)
    await driver.close()
