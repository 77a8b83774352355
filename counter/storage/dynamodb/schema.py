"""Make the tables that a deployment needs; any number of processes may do it at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from counter.storage.dynamodb.control import first_items
from counter.storage.dynamodb.driver import Driver, DynamodbOptions, Put, Refused
from counter.storage.dynamodb.tables import EXPIRES, control_table, data_table
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
    options, did = driver.options, []
    known = set(await driver.tables())
    for table in (
        control_table(options.prefix),
        *(data_table(options.prefix, each) for each in datasets),
    ):
        # What expires is not read any more, so it does not matter when DynamoDB deletes it.
        await driver.create_table(table, EXPIRES)
        if table not in known:
            did.append(f"made table {table}")
    for item in first_items(datasets):
        put = Put(control_table(options.prefix), item, "attribute_not_exists(pk)")
        if not isinstance(await driver.write(put), Refused) and "document" in item:
            did.append(f"made dataset {item['sk'].decode()}")
    return did or [f"the tables {options.prefix}_* are up to date"]
