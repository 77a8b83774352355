"""Make the tables that a deployment needs; any number of processes may do it at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from counter.storage.dynamodb.control import first_items
from counter.storage.dynamodb.driver import Driver, DynamodbOptions, Refused, put
from counter.storage.dynamodb.layout import EXPIRES
from counter.storage.dynamodb.session import control_table, data_table
from counter.types import Dataset

if TYPE_CHECKING:
    from counter.config.settings import Settings


def dynamodb_options(settings: Settings) -> DynamodbOptions:
    """Return what *settings* say about DynamoDB."""
    units = settings.dynamodb_read_units, settings.dynamodb_write_units
    return DynamodbOptions(
        region=settings.dynamodb_region,
        endpoint=settings.dynamodb_endpoint,
        prefix=settings.keyspace,
        connections_max=settings.dynamodb_connections,
        units=units if all(units) else None,
        recovers=settings.dynamodb_recovery,
    )


async def apply_for(settings: Settings) -> Sequence[str]:
    """Apply the schema of *settings*; return what was done. Raises StartupError and
    UnavailableError."""
    driver = Driver(dynamodb_options(settings))
    await driver.open()
    try:
        return await apply_schema(driver, settings.datasets())
    finally:
        await driver.close()


async def apply_schema(driver: Driver, datasets: Sequence[Dataset]) -> Sequence[str]:
    """Make the tables that are missing, and the *datasets*; return what was done."""
    prefix, known, did = driver.options.prefix, await driver.tables(), []
    control = control_table(prefix)
    for table in (control, *(data_table(prefix, each) for each in datasets)):
        # What expires is not read any more, so it does not matter when DynamoDB deletes it.
        await driver.create_table(table, EXPIRES)
        if table not in known:
            did.append(f"made table {table}")
    for item in first_items(datasets):
        answer = await driver.write(put(control, item, "attribute_not_exists(pk)"))
        if not isinstance(answer, Refused) and "document" in item:
            did.append(f"made dataset {item['sk'].decode()}")
    return did or [f"the tables {prefix}_* are up to date"]
