"""Keep the directory of namespaces in memory: every request looks it up, and it changes rarely.

If other processes change it too, each process reads it again every second, and writes no event with
a copy older than DIRECTORY_AGE_MAX_US. A changed accept limit is announced, and holds from a slice
that begins only when every copy that may still be used contains the announcement.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from counter import limits
from counter.bounds import NO_BOUNDS
from counter.core.clock_guard import ClockGuard, checked_now_us
from counter.errors import (
    InvalidBodyError,
    NamespaceUnknownError,
    NotSupportedError,
    PreconditionFailedError,
    UnavailableError,
    invariant,
)
from counter.ports import Clock, Store
from counter.types import CounterType, Dataset, Namespace, NamespaceSettings
from counter.windows import settling_time, slice_start

#: The shortest time between two reads that requests cause: unknown names share one read.
_REREAD_EVERY_US: Final = 100 * limits.MILLISECOND

#: Settings that a namespace keeps for life.
FIXED: Final = ("counter_type", "dataset", "rollup_window_us", "shards")


class Namespaces:
    """Namespaces by name, as of the last read of the control plane."""

    def __init__(self, store: Store, clock: Clock, guard: ClockGuard | None = None) -> None:
        """Without *guard*, which watches *clock*, namespaces can only be looked up."""
        self._store = store
        self._clock = clock
        self._guard = guard
        self._by_name: dict[str, Namespace] = {}
        self._changes = 0
        self._read_at_us: int | None = None
        self._reread_at_us: int | None = None
        self._reading: asyncio.Task[None] | None = None

    async def refresh(self) -> None:
        """Read all namespaces again."""
        while True:
            changes, began_us = self._changes, self._clock.boottime_us()
            found = {each.name: each for each in await self._store.control.namespaces()}
            if began_us < (self._read_at_us or 0):
                # A later read finished first.
                return
            if changes == self._changes:
                # Otherwise this process changed a namespace meanwhile, and the read may not contain
                # it.
                self._by_name, self._read_at_us = found, began_us
                return

    @property
    def is_fresh(self) -> bool:
        """Return whether this copy is young enough to admit an add or to close a window."""
        return self._store.capabilities.embedded or self._is_fresh_at(self._clock.boottime_us())

    def _is_fresh_at(self, boottime_us: int) -> bool:
        read_us = self._read_at_us
        return read_us is not None and boottime_us - read_us <= limits.DIRECTORY_AGE_MAX_US

    def needs_reread(self, name: str, *, writes: bool) -> bool:
        """Return whether the directory should be read before a request for *name* is handled."""
        if self._store.capabilities.embedded:
            return False
        namespace = self._by_name.get(name)
        if namespace is None:
            return True
        keeps_events = namespace.settings.counter_type is not CounterType.BEST_EFFORT
        return writes and keeps_events and not self.is_fresh

    async def reread(self) -> None:
        """Read the directory again; calls while a read is scheduled share it."""
        if self._store.capabilities.embedded:
            return
        if self._reading is None:
            self._reading = asyncio.create_task(self._reread_soon())
            # Otherwise asyncio logs a failure of which all callers were cancelled.
            self._reading.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(self._reading)

    async def _reread_soon(self) -> None:
        now_us = self._clock.boottime_us()
        latest_us = now_us - _REREAD_EVERY_US if self._reread_at_us is None else self._reread_at_us
        wait_us = latest_us + _REREAD_EVERY_US - now_us
        if wait_us > 0:
            await asyncio.sleep(wait_us / limits.SECOND)
        # Later callers need a later read: this one may miss the namespace that they need.
        self._reading = None
        self._reread_at_us = self._clock.boottime_us()
        await self.refresh()

    def find(self, name: str) -> Namespace | None:
        """Return the namespace *name*, if it is known."""
        return self._by_name.get(name)

    def get(self, name: str) -> Namespace:
        """Return the namespace *name*. Raises NamespaceUnknownError."""
        namespace = self._by_name.get(name)
        if namespace is None:
            raise unknown(name)
        return namespace

    def current(self, namespace: Namespace, boottime_us: int) -> Namespace:
        """Return *namespace* with its current settings, for a write whose deadline began at
        *boottime_us*.

        A request may have waited for its body, its mark or its process since it looked *namespace*
        up. Raises NamespaceUnknownError if it was deleted, UnavailableError if this copy was too
        old at *boottime_us* to know. If no copy was ever read, *namespace* is returned unchecked.
        """
        if self._read_at_us is None:
            return namespace
        if not self._is_fresh_at(boottime_us):
            raise UnavailableError(
                "this server has not read namespaces for over"
                f" {limits.DIRECTORY_AGE_MAX_US // limits.SECOND}s, and {namespace.name!r} may have"
                " been deleted since; nothing was written: send the request again",
                retry_after_us=limits.SECOND,
            )
        current = self.get(namespace.name)
        if current.id != namespace.id:
            raise unknown(namespace.name)
        return current

    def all(self) -> Sequence[Namespace]:
        """Return all namespaces, sorted by name."""
        return sorted(self._by_name.values(), key=lambda each: each.name)

    async def create(self, name: str, settings: NamespaceSettings) -> Namespace:
        """Create *name*, which is checked like *settings* by counter.config.namespace_rules.

        Raises PreconditionFailedError if it exists, UnavailableError if a namespace of that name
        was deleted so recently that adds to it may still be counted, and ClockSkewError: if the
        clock were ahead, the first watermark would pass adds that other processes acknowledge
        later.
        """
        self._check_bounds(settings)
        dataset = await self.dataset(settings.dataset)
        now_us = checked_now_us(self._clock, self._guard, dataset)
        created = await self._store.control.create_namespace(name, settings, now_us)
        if created is None:
            await self.refresh()
            raise PreconditionFailedError(f"namespace {name!r} exists already")
        self._put(created)
        return created

    async def update(self, namespace: Namespace, settings: NamespaceSettings) -> Namespace:
        """Change all but the FIXED settings; a new accept limit holds from the next slice to be
        made. The settings are checked by counter.config.namespace_rules.

        Raises PreconditionFailedError if the namespace has changed meanwhile, ClockSkewError, and
        UnavailableError if the change is to be sent again.
        """
        self._check_bounds(settings)
        for field in FIXED:
            kept = getattr(settings, field) == getattr(namespace.settings, field)
            invariant(kept, f"{field} of namespace {namespace.name!r} would change")
        era_from_us = 0
        if not namespace.accepts_by(settings.accept_limit_us):
            era_from_us = await self._era_start(namespace.dataset)
            namespace = await self._announce(namespace, settings.accept_limit_us, era_from_us)
        return await self._replace(namespace, namespace.changed(settings, era_from_us))

    def _check_bounds(self, settings: NamespaceSettings) -> None:
        """Raise NotSupportedError if *settings* have bounds that cannot be kept."""
        if settings.bounds != NO_BOUNDS:
            require_bounds(self._store)

    async def _announce(
        self, namespace: Namespace, accept_limit_us: int, era_from_us: int
    ) -> Namespace:
        """Announce the new accept limit. Returns when no process can use a directory copy without
        the announcement for events from *era_from_us* on.

        The announcement and the change may each land at any time. The limits of the present copy
        and of the changed one are between those of the announcement, so no window closes by a
        shorter limit than an add of it is accepted by.
        """
        announced = await self._replace(
            namespace, namespace.announced(accept_limit_us, era_from_us)
        )
        if self._reached_us(namespace.dataset) >= era_from_us:
            raise UnavailableError(
                f"announcing the accept limit of namespace {namespace.name!r} took too long; its"
                " settings are not changed: send the change again",
                retry_after_us=limits.SECOND,
            )
        return announced

    async def _replace(self, namespace: Namespace, updated: Namespace) -> Namespace:
        if not await self._store.control.update_namespace(namespace, updated):
            await self.refresh()
            raise PreconditionFailedError(f"namespace {namespace.name!r} has changed meanwhile")
        self._put(updated)
        return updated

    async def _era_start(self, dataset: Dataset) -> int:
        """Return the first slice that does not exist yet and that begins late enough for what a
        request may take to change an accept limit."""
        slices = await self._store.control.slices(dataset)
        made_us = max((each.end_us for each in slices), default=0)
        known_us = self._reached_us(dataset) + limits.REQUEST_TIMEOUT_US
        if made_us > known_us:
            return made_us
        return slice_start(known_us, dataset.slice_us) + dataset.slice_us

    def _reached_us(self, dataset: Dataset) -> int:
        """Return the latest time of an event that may be written by a copy of the directory which
        was read before now."""
        # The largest future limit: a copy may have one that was changed meanwhile.
        ahead_us = min(limits.FUTURE_LIMIT_MAX_US, dataset.slice_us) + settling_time(dataset)
        now_us = checked_now_us(self._clock, self._guard, dataset)
        return now_us + ahead_us + 2 * dataset.clock_skew_max_us

    def _put(self, namespace: Namespace) -> None:
        self._changes += 1
        self._by_name[namespace.name] = namespace

    async def delete(self, namespace: Namespace) -> None:
        """Delete the namespace and forget its tokens. Raises the errors of :meth:`update`.

        The remaining data is purged up to the instant of the deletion, by this clock.
        """
        checked_now_us(self._clock, self._guard, namespace.dataset)
        deleted = await self._store.control.delete_namespace(namespace)
        if not deleted:
            await self.refresh()
            raise PreconditionFailedError(f"namespace {namespace.name!r} has changed meanwhile")
        self._changes += 1
        self._by_name.pop(namespace.name, None)

    async def dataset(self, name: str) -> Dataset:
        """Return the dataset *name*. Raises InvalidBodyError."""
        datasets = await self._store.control.datasets()
        for each in datasets:
            if each.name == name:
                return each
        known = ", ".join(each.name for each in datasets)
        raise InvalidBodyError(
            f"dataset {name[:80]!r} is not known; known are: {known}", field="dataset"
        )


def require_bounds(store: Store) -> None:
    """Raise NotSupportedError if *store* cannot keep bounds."""
    if not store.capabilities.bounds:
        raise NotSupportedError(
            "a bound is kept in the transaction that adds, and this store has none: use SQLite or"
            " PostgreSQL"
        )


def unknown(name: str) -> NamespaceUnknownError:
    """Return the error for a namespace that does not exist, or that the caller's key excludes."""
    return NamespaceUnknownError(
        f"there is no namespace {name[: limits.NAMESPACE_NAME_CHARS_MAX]!r};"
        " create it with PUT /v1/namespaces/{name}"
    )
