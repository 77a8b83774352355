"""What the parts of the store share: the driver, and datasets and slices as last read.

Slices in memory may be stale, which is safe: a slice's partitioning never changes, an unknown slice
is looked up once before it is reported missing, and the table of a dropped slice does not exist,
which is an error, never "not found".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from counter.errors import (
    NamespaceUnknownError,
    SliceMissingError,
    StartupError,
    StoreUnavailableError,
)
from counter.partitions import slice_of
from counter.ports import Clock
from counter.storage.dynamodb.driver import Driver, NoTableError
from counter.storage.dynamodb.tables import control_table, data_table, events_table, number
from counter.types import Dataset, Namespace, Slice
from counter.windows import settling_time

DATASETS = b"datasets"
#: The sort key of a dataset's ``dropped_before``, which comes before those of its slices.
DROPPED = b"\x00"


def slices_partition(dataset: Dataset) -> bytes:
    """Return the partition key of a dataset's slices."""
    return b"slices" + number(dataset.id)


@dataclass(slots=True)
class DatasetState:
    """A dataset, and its slices as this process last read them, together with *dropped_us*."""

    dataset: Dataset
    slices: list[Slice] = field(default_factory=list)
    dropped_us: int = 0


class Session:
    """The state of one process, a copy of what it read."""

    def __init__(self, driver: Driver, clock: Clock) -> None:
        self.driver = driver
        self.clock = clock
        self.control = control_table(driver.options.prefix)
        self.states: dict[int, DatasetState] = {}
        #: Ids of namespaces that this process knows, and of those that it saw deleted.
        self.known: set[int] = set()
        self.gone: set[int] = set()
        self._seen_gone_us: dict[int, int] = {}

    def data(self, dataset: Dataset) -> str:
        """Return the table of the dataset's marks, counts and decisions."""
        return data_table(self.driver.options.prefix, dataset)

    def events(self, dataset: Dataset, start_us: int) -> str:
        """Return the table of a slice."""
        return events_table(self.driver.options.prefix, dataset, start_us)

    async def load(self) -> None:
        """Read the datasets and their slices. Raises StartupError where there is no schema."""
        try:
            items = await self.driver.query(self.control, DATASETS)
        except NoTableError as error:
            raise StartupError(error.detail) from error
        for item in items:
            dataset = Dataset(**json.loads(item["document"]))
            if dataset.id not in self.states:
                self.states[dataset.id] = DatasetState(dataset)
                await self.reload(dataset)

    def state_of(self, dataset: Dataset) -> DatasetState:
        """Return what this process knows of *dataset*."""
        state = self.states.get(dataset.id)
        if state is None:
            raise StoreUnavailableError(
                f"dataset {dataset.name!r} (id {dataset.id}) was made after this process started;"
                " restart it"
            )
        return state

    async def reload(self, dataset: Dataset) -> DatasetState:
        """Read the slices of *dataset* again."""
        state = self.state_of(dataset)
        items = await self.driver.query(self.control, slices_partition(dataset))
        dropped_us = next((each["t"] for each in items if each["sk"] == DROPPED), 0)
        slices = [slice_from(each["document"]) for each in items if each["sk"] != DROPPED]
        state.slices = [each for each in slices if each.end_us > dropped_us]
        state.dropped_us = dropped_us
        return state

    async def slice_of(self, dataset: Dataset, time_us: int) -> Slice:
        """Return the slice that contains *time_us*. Raises SliceMissingError."""
        try:
            return slice_of(self.state_of(dataset).slices, time_us)
        except SliceMissingError:
            return slice_of((await self.reload(dataset)).slices, time_us)

    async def state_until(self, dataset: Dataset, until_us: int | None) -> DatasetState:
        """Return the dataset with all slices that can contain an event before *until_us*; all
        existing slices if that is None."""
        state = self.state_of(dataset)
        if until_us is None or not state.slices or state.slices[-1].end_us < until_us:
            return await self.reload(dataset)
        return state

    async def missing(self, dataset: Dataset, error: NoTableError) -> SliceMissingError:
        """Return the error for the missing table of a slice, and read the slices again."""
        await self.reload(dataset)
        return SliceMissingError(f"a time slice was dropped meanwhile: {error.detail}")

    def check_exists(self, namespace: Namespace) -> None:
        """Raise NamespaceUnknownError if this process knows that *namespace* is deleted."""
        if namespace.id in self.gone:
            raise unknown(namespace)

    def settles_in(self, namespace_id: int, dataset: Dataset) -> int:
        """Return for how many microseconds a process may still acknowledge adds to a deleted
        namespace; 0 or less if none can. Only this process's clock counts."""
        now_us = self.clock.boottime_us()
        seen_us = self._seen_gone_us.setdefault(namespace_id, now_us)
        return settling_time(dataset) - (now_us - seen_us)


def unknown(namespace: Namespace) -> NamespaceUnknownError:
    """Return the error for a deleted namespace."""
    return NamespaceUnknownError(f"namespace {namespace.name!r} (id {namespace.id}) was deleted")


def slice_from(document: str) -> Slice:
    """Return the slice of its stored text."""
    read: Mapping[str, int] = json.loads(document)
    return Slice(**read)


def slice_text(each: Slice) -> str:
    """Return what is stored of a slice."""
    return json.dumps(asdict(each))


def retired(each: Slice, now_us: int) -> Slice:
    """Return the slice with the instant at which every watermark had passed its end."""
    return replace(each, retired_at_us=now_us)


def spans_of(slices: Sequence[Slice], low_us: int, high_us: int) -> list[tuple[Slice, int, int]]:
    """Return the parts of ``[low_us, high_us)`` by slice, earliest first."""
    parts = ((each, max(low_us, each.start_us), min(high_us, each.end_us)) for each in slices)
    return [part for part in parts if part[1] < part[2]]
