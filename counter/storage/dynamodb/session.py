"""What the parts of the store share: the driver, the tables' names, datasets and slices.

One table holds what all processes agree on, one a dataset's marks, counts and decisions, and one
the events of each slice: a table is dropped in one free call, and items would have to be deleted
one by one, each for the price of a write.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from counter.errors import SliceMissingError, StartupError
from counter.ports import Clock
from counter.storage.dynamodb.driver import Driver, NoTableError
from counter.storage.dynamodb.layout import DATASETS, DROPPED, slices_partition
from counter.storage.shared.directory import Coalesced, DatasetState, Directory
from counter.types import Dataset, Slice


class DynamodbSession(Directory[DatasetState]):
    """The state of one process, a copy of what it read."""

    def __init__(self, driver: Driver, clock: Clock) -> None:
        super().__init__(clock)
        self.driver = driver
        self.control = control_table(driver.options.prefix)

    def data(self, dataset: Dataset) -> str:
        """Return the table of the dataset's marks, counts and decisions."""
        return data_table(self.driver.options.prefix, dataset)

    def events(self, dataset: Dataset, start_us: int) -> str:
        """Return the table of the slice that starts at *start_us*."""
        return f"{self.driver.options.prefix}.{dataset.name}.events.{start_us}"

    async def load(self) -> None:
        """Read the datasets and their slices. Raises StartupError if there is no schema."""
        try:
            items = await self.driver.query(self.control, DATASETS)
        except NoTableError as error:
            raise StartupError(error.detail) from error
        for item in items:
            dataset = Dataset(**json.loads(item["document"]))
            if dataset.id not in self.states:
                state = DatasetState(dataset)
                state.reload = Coalesced(partial(self._load_slices, state))
                await state.reload()
                self.states[dataset.id] = state

    async def _load_slices(self, state: DatasetState) -> None:
        items = await self.driver.query(self.control, slices_partition(state.dataset))
        dropped_us = next((each["t"] for each in items if each["sk"] == DROPPED), 0)
        documents = (json.loads(each["document"]) for each in items if each["sk"] != DROPPED)
        state.read([Slice(**each) for each in documents], dropped_us)

    @asynccontextmanager
    async def while_kept(self, dataset: Dataset, from_us: int) -> AsyncIterator[None]:
        """Do something with slices of *from_us* and later. Raises SliceMissingError if the table of
        one is missing, or may be: DynamoDB goes on to answer from a table that it deletes."""
        try:
            yield
        except NoTableError as error:
            await self.reload_slices(dataset)
            raise SliceMissingError(f"a slice was dropped meanwhile: {error.detail}") from error
        # A slice goes when retention is over, by the clocks of others, and its record goes first.
        kept_us = self.clock.now_us() - dataset.retention_us + 2 * dataset.clock_skew_max_us
        if from_us < kept_us:
            (await self.reload_slices(dataset)).check_kept(from_us)


def control_table(prefix: str) -> str:
    """Return the table of what all processes agree on."""
    return f"{prefix}.control"


def data_table(prefix: str, dataset: Dataset) -> str:
    """Return the table of the dataset's marks, counts and decisions."""
    return f"{prefix}.{dataset.name}.data"
