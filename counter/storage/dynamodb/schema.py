"""Make the tables that a deployment needs; any number of processes may do it at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING

from counter.storage.dynamodb.control import DATASET_IDS, begin_numbers, take
from counter.storage.dynamodb.driver import NEW, Driver, DynamodbOptions, Refused, put, update
from counter.storage.dynamodb.layout import DATASETS, DROPPED, EXPIRES, slices_partition, to_text
from counter.storage.dynamodb.session import control_table, data_table
from counter.storage.shared.dataset_changes import change_of, changed_dataset
from counter.storage.shared.startup_retry import StartupRetry
from counter.types import Dataset

if TYPE_CHECKING:
    from counter.storage.dynamodb.settings import DynamodbSettings


def dynamodb_options(settings: DynamodbSettings) -> DynamodbOptions:
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


async def apply_for(settings: DynamodbSettings) -> Sequence[str]:
    """Apply the schema of *settings*; return what was done. Raises StartupError and
    UnavailableError."""
    driver = Driver(dynamodb_options(settings))
    await driver.open()
    try:
        work = partial(apply_schema, driver, settings.datasets())
        return await StartupRetry(settings.start_timeout).run(work)
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
    await begin_numbers(driver)
    for each in datasets:
        did += await _have_dataset(driver, control, each)
    return did or [f"the tables {prefix}.* are up to date"]


async def _have_dataset(driver: Driver, control: str, asked: Dataset) -> Sequence[str]:
    """Make a dataset under an id of its own, or change what may be changed of it."""
    key = DATASETS, asked.name.encode()
    stored = await driver.get(control, key)
    if not stored:
        block = await take(driver, DATASET_IDS, 1)
        made = replace(asked, id=block.first)
        item = {"pk": key[0], "sk": key[1], "document": to_text(asdict(made))}
        refused = await driver.transact(
            [
                put(control, item, NEW),
                put(control, {"pk": slices_partition(made), "sk": DROPPED, "t": 0}),
            ]
        )
        # If it is refused, another process was first.
        return [] if refused else [f"made dataset {asked.name}"]
    existing = Dataset(**json.loads(stored["document"]))
    changed, stays = changed_dataset(existing, asked)
    if changed != existing:
        text, before = to_text(asdict(changed)), stored["document"]
        write = update(control, key, "SET document = :d", "document = :o", d=text, o=before)
        if not isinstance(await driver.write(write), Refused):
            return [*stays, change_of(changed)]
    return stays
