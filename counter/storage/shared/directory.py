"""What a process of a shared store without transactions knows of datasets, slices and namespaces.

Slices in memory may be stale, which is safe. A slice's partitioning never changes; an unknown slice
is looked up once before it is reported missing; and the table of a dropped slice does not exist,
which is an error, never "not found".
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from counter.background import retrieve
from counter.errors import (
    InvalidParameterError,
    NamespaceUnknownError,
    SliceMissingError,
    StoreUnavailableError,
    UnavailableError,
)
from counter.limits import SECOND
from counter.ports import Clock
from counter.types import Dataset, Namespace, Slice
from counter.windows import settling_time, slice_of

_T = TypeVar("_T")


class Coalesced(Generic[_T]):
    """Call *work* once for all callers that arrive before it begins.

    Each caller gets the result of a call that began after its own request: a call in progress may
    have read earlier.
    """

    def __init__(self, work: Callable[[], Awaitable[_T]]) -> None:
        self._work = work
        self._running: asyncio.Task[_T] | None = None
        self._next: asyncio.Task[_T] | None = None

    async def __call__(self) -> _T:
        if self._next is None:
            self._next = asyncio.create_task(self._run(self._running))
            self._next.add_done_callback(retrieve)
        # Shielded, so that a cancelled caller does not cancel the work of the others.
        return await asyncio.shield(self._next)

    async def _run(self, before: asyncio.Task[_T] | None) -> _T:
        if before is not None:
            await asyncio.wait((before,))
        self._running, self._next = self._next, None
        return await self._work()


@dataclass(slots=True)
class DatasetState:
    """A dataset, and its slices as this process last read them.

    *slices* and *dropped_before_us* were read together: a slice that is not in the one and not
    before the other never existed.
    """

    dataset: Dataset
    slices: list[Slice] = field(default_factory=list)
    dropped_before_us: int = 0
    reload: Coalesced[None] = field(init=False)

    def read(self, slices: Sequence[Slice], dropped_before_us: int) -> None:
        """Take over what was read of the dataset: some of *slices* may be about to go."""
        self.slices = [each for each in slices if each.end_us > dropped_before_us]
        self.dropped_before_us = dropped_before_us

    def check_kept(self, from_us: int) -> None:
        """Raise SliceMissingError if events of *from_us* or later are dropped."""
        if from_us < self.dropped_before_us:
            raise SliceMissingError(
                f"events from {from_us} µs on were asked for; those before"
                f" {self.dropped_before_us} µs are dropped"
            )


_State = TypeVar("_State", bound=DatasetState)


class Directory(Generic[_State]):
    """The state of one process, a copy of what it read."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.states: dict[int, _State] = {}
        #: Ids of namespaces that this process knows, and of those that it saw deleted.
        self.known: set[int] = set()
        self.gone: set[int] = set()
        #: When this process first saw that a namespace is deleted, by id and its boot clock.
        self._seen_gone_us: dict[int, int] = {}

    # Datasets and their slices.

    def state_of(self, dataset: Dataset) -> _State:
        state = self.states.get(dataset.id)
        if state is None:
            raise StoreUnavailableError(
                f"dataset {dataset.name!r} (id {dataset.id}) was made after this process started;"
                " restart it"
            )
        return state

    def dataset_named(self, name: str) -> Dataset:
        """Return the dataset of that name. Raises InvalidParameterError."""
        known = {state.dataset.name: state.dataset for _, state in sorted(self.states.items())}
        if name not in known:
            names = ", ".join(known)
            raise InvalidParameterError(f"no dataset is named {name!r}; there are: {names}")
        return known[name]

    async def slice_of(self, dataset: Dataset, time_us: int) -> Slice:
        """Return the slice that contains *time_us*, read again if it is unknown. Raises
        SliceMissingError."""
        state = self.state_of(dataset)
        try:
            return slice_of(state.slices, time_us)
        except SliceMissingError:
            await state.reload()
            return slice_of(state.slices, time_us)

    async def slices_of(self, dataset: Dataset, times_us: Sequence[int]) -> list[Slice]:
        """Return the slices of one reading, which contains all *times_us*: a list that is read
        again for one of them may lack another, whose slice was dropped. Raises
        SliceMissingError."""
        state = self.state_of(dataset)

        def read() -> list[Slice]:
            for time_us in times_us:
                slice_of(state.slices, time_us)
            return state.slices

        try:
            return read()
        except SliceMissingError:
            await state.reload()
            return read()

    async def reload_slices(self, dataset: Dataset) -> _State:
        """Read the dataset's slices again after a table was missing."""
        state = self.state_of(dataset)
        await state.reload()
        return state

    async def state_until(self, dataset: Dataset, until_us: int | None) -> _State:
        """Return the dataset with all slices that can contain an event before *until_us*; all
        existing slices if that is None.

        The writer of an event may know a slice that another process made and this one has not read.
        """
        state = self.state_of(dataset)
        if until_us is None or not state.slices or state.slices[-1].end_us < until_us:
            await state.reload()
        return state

    # Namespaces.

    def note_namespaces(self, before: set[int], ids: Sequence[int]) -> None:
        """Read the ids of all namespaces. Those that were known *before* the listing began, and are
        not among them, are deleted."""
        for each in before.difference(ids):
            self.gone.add(each)
            self.gone_for(each)
        self.known = (self.known | set(ids)) - self.gone

    def settles_in(self, namespace_id: int, dataset: Dataset) -> int:
        """Return for how many microseconds a process may still acknowledge adds to a deleted
        namespace; 0 or less if none can.

        It was deleted before this process first saw it deleted. Only this process's clock counts.
        """
        return settling_time(dataset) - self.gone_for(namespace_id)

    def gone_for(self, namespace_id: int) -> int:
        """Return how long ago this process first saw that a namespace is deleted."""
        now_us = self.clock.boottime_us()
        return now_us - self._seen_gone_us.setdefault(namespace_id, now_us)

    def note_deleted(self, namespace: Namespace) -> None:
        """Remember that this process deleted *namespace* just now."""
        self.known.discard(namespace.id)
        self.gone.add(namespace.id)
        self.gone_for(namespace.id)

    def check_settled(self, name: str, namespace_id: int, dataset: Dataset) -> None:
        """Raise UnavailableError while adds to a deleted namespace may be acknowledged."""
        left_us = self.settles_in(namespace_id, dataset)
        if left_us > 0:
            raise UnavailableError(
                f"namespace {name!r} was deleted just now, and other servers may still take adds"
                f" for the deleted one; create it again in {left_us / SECOND:.1f} s",
                retry_after_us=left_us,
            )

    def check_exists(self, namespace: Namespace) -> None:
        """Raise NamespaceUnknownError if this process knows that *namespace* is deleted.

        If another process has deleted it and this one does not know yet, what is written is never
        read, and deleted with the rest.
        """
        if namespace.id in self.gone:
            raise unknown(namespace)


def unknown(namespace: Namespace) -> NamespaceUnknownError:
    """Return the error for a deleted namespace."""
    return NamespaceUnknownError(f"namespace {namespace.name!r} (id {namespace.id}) was deleted")
