"""Keep the directory of namespaces in memory: every request looks it up, and it changes rarely.

If other processes change it too, each process reads it again every second, and writes no event with
a copy older than DIRECTORY_AGE_MAX_US. A changed accept limit is announced, and holds from a slice
that begins only when every copy that may still be used contains the announcement.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from counter import limits
from counter.background import every, retrieve
from counter.core.clock_guard import ClockGuard, checked_now_us
from counter.core.event_rules import check_rules
from counter.durations import format_duration
from counter.errors import (
    InvalidBodyError,
    InvalidParameterError,
    NamespaceConflictError,
    NamespaceUnknownError,
    PreconditionFailedError,
    UnavailableError,
)
from counter.names import is_namespace_name
from counter.partitions import slice_start
from counter.ports import Clock, Store
from counter.types import CounterType, Dataset, Namespace, NamespaceSettings
from counter.windows import settling_time

_READ_EVERY_S: Final = limits.DIRECTORY_READ_US / limits.SECOND
#: The shortest time between two reads that requests cause: unknown names share one read.
_LOOK_EVERY_US: Final = 100 * limits.MILLISECOND

_log = logging.getLogger("counter.namespaces")
_FIXED: Final = ("counter_type", "dataset", "rollup_window_us", "shards")


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
        self._looked_at_us: int | None = None
        self._look: asyncio.Task[None] | None = None

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

    async def run(self, stop: asyncio.Event) -> None:
        """Read the directory again every second until *stop* is set."""
        await every(_READ_EVERY_S, self.refresh, stop, _log, "reading the namespaces")

    @property
    def is_fresh(self) -> bool:
        """Return whether this copy is young enough to admit an add or to close a window."""
        return self._store.capabilities.embedded or self._is_fresh_at(self._clock.boottime_us())

    def _is_fresh_at(self, boottime_us: int) -> bool:
        read_us = self._read_at_us
        return read_us is not None and boottime_us - read_us <= limits.DIRECTORY_AGE_MAX_US

    def doubts(self, name: str, *, writes: bool) -> bool:
        """Return whether the directory should be read before a request for *name* is handled."""
        if self._store.capabilities.embedded:
            return False
        namespace = self._by_name.get(name)
        if namespace is None:
            return True
        keeps_events = namespace.settings.counter_type is not CounterType.BEST_EFFORT
        return writes and keeps_events and not self.is_fresh

    def at_hand(self, name: str, *, writes: bool) -> Namespace | None:
        """Return the namespace *name* if it is known and needs no read of the directory."""
        return None if self.doubts(name, writes=writes) else self._by_name.get(name)

    async def look(self) -> None:
        """Read the directory again; calls while a read is scheduled share it."""
        if self._store.capabilities.embedded:
            return
        if self._look is None:
            self._look = asyncio.create_task(self._look_soon())
            self._look.add_done_callback(retrieve)
        await asyncio.shield(self._look)

    async def _look_soon(self) -> None:
        now_us = self._clock.boottime_us()
        latest_us = now_us - _LOOK_EVERY_US if self._looked_at_us is None else self._looked_at_us
        wait_us = latest_us + _LOOK_EVERY_US - now_us
        if wait_us > 0:
            await asyncio.sleep(wait_us / limits.SECOND)
        # Later callers need a later read: this one may miss the namespace that they look for.
        self._look = None
        self._looked_at_us = self._clock.boottime_us()
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
                f"this server has not read namespaces for over"
                f" {format_duration(limits.DIRECTORY_AGE_MAX_US)}, and {namespace.name!r} may have"
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
        """Create *name*.

        Raises PreconditionFailedError if it exists, UnavailableError if a namespace of that name
        was deleted so recently that adds to it may still be counted, and ClockSkewError: if the
        clock were ahead, the first watermark would pass adds that other processes acknowledge
        later.
        """
        if not is_namespace_name(name):
            raise InvalidParameterError(
                f"namespace {name[:80]!r} does not match [a-z][a-z0-9_-]{{0,62}}", field="namespace"
            )
        dataset = await self._dataset(settings.dataset)
        check_settings(settings, dataset)
        now_us = checked_now_us(self._clock, self._guard, dataset)
        created = await self._store.control.create_namespace(name, settings, now_us)
        if created is None:
            await self.refresh()
            raise PreconditionFailedError(f"namespace {name!r} exists already")
        self._put(created)
        return created

    async def fitted(self, settings: NamespaceSettings) -> NamespaceSettings:
        """Return *settings* with a default ``key_ttl`` that the dataset's retention allows."""
        dataset = await self._dataset(settings.dataset)
        return replace(settings, key_ttl_us=min(settings.key_ttl_us, dataset.retention_us // 2))

    async def update(self, namespace: Namespace, settings: NamespaceSettings) -> Namespace:
        """Change the changeable settings; a new accept limit holds from the next slice to be made.

        Raises NamespaceConflictError for a fixed setting, PreconditionFailedError if the namespace
        has changed meanwhile, ClockSkewError, and UnavailableError if the change is to be sent
        again.
        """
        for field in _FIXED:
            old, new = getattr(namespace.settings, field), getattr(settings, field)
            if old != new:
                if field.endswith("_us"):
                    old, new = format_duration(old), format_duration(new)
                raise NamespaceConflictError(
                    f"{field.removesuffix('_us')} is {old} for the life of namespace"
                    f" {namespace.name!r}; it cannot become {new}",
                    field=field.removesuffix("_us"),
                )
        checked = settings
        if settings.event_rules == namespace.settings.event_rules:
            # Rules that an older version accepted do not keep other settings from being changed.
            checked = replace(settings, event_rules=())
        check_settings(checked, namespace.dataset)
        era_from_us = 0
        if not namespace.accepts_by(settings.accept_limit_us):
            era_from_us = await self._era_start(namespace.dataset)
            namespace = await self._announce(namespace, settings.accept_limit_us, era_from_us)
        return await self._replace(namespace, namespace.changed(settings, era_from_us))

    async def _announce(
        self, namespace: Namespace, accept_limit_us: int, era_from_us: int
    ) -> Namespace:
        """Announce another accept limit, and return the namespace once every copy of the directory
        that an add from *era_from_us* on is written by, or that its window is closed by, has it.

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

    async def _dataset(self, name: str) -> Dataset:
        datasets = await self._store.control.datasets()
        for each in datasets:
            if each.name == name:
                return each
        known = ", ".join(each.name for each in datasets)
        raise InvalidBodyError(
            f"dataset {name[:80]!r} is not known; known are: {known}", field="dataset"
        )


def unknown(name: str) -> NamespaceUnknownError:
    """Return the error for a namespace that does not exist, or that the caller's key excludes."""
    return NamespaceUnknownError(
        f"there is no namespace {name[: limits.NAMESPACE_NAME_CHARS_MAX]!r};"
        " create it with PUT /v1/namespaces/{name}"
    )


def check_settings(settings: NamespaceSettings, dataset: Dataset) -> None:
    """Raise InvalidBodyError, naming field, value and bound, if a rule is broken."""
    check_rules(settings.event_rules)
    bounds: dict[str, tuple[int, int]] = {
        "accept_limit": (
            limits.MILLISECOND,
            min(limits.ACCEPT_LIMIT_MAX_US, dataset.slice_us, dataset.retention_us // 10),
        ),
        "future_limit": (
            max(limits.MILLISECOND, 2 * dataset.clock_skew_max_us),
            # A token must not reach past the slices made ahead, nor past the end of a read's live
            # tail.
            min(limits.FUTURE_LIMIT_MAX_US, dataset.slice_us),
        ),
        "rollup_window": (limits.ROLLUP_WINDOW_MIN_US, limits.ROLLUP_WINDOW_MAX_US),
        "key_ttl": (limits.KEY_TTL_MIN_US, dataset.retention_us // 2),
        "cache_ttl": (0, limits.DAY),
    }
    for field, (low_us, high_us) in bounds.items():
        value_us = getattr(settings, f"{field}_us")
        if not low_us <= value_us <= high_us:
            raise InvalidBodyError(
                f"{field} is {format_duration(value_us)}; it must be from"
                f" {format_duration(low_us)} to {format_duration(high_us)}",
                field=field,
            )
    if dataset.slice_us > dataset.retention_us:
        raise InvalidBodyError(
            f"slice is {format_duration(dataset.slice_us)}; it must not be longer than the"
            f" retention of {format_duration(dataset.retention_us)}",
            field="slice",
        )
    if not 1 <= settings.shards <= limits.SHARDS_MAX:
        raise InvalidBodyError(
            f"shards is {settings.shards}; it must be from 1 to {limits.SHARDS_MAX}",
            field="shards",
        )
    window_us = settings.rollup_window_us
    if dataset.slice_us % window_us:
        raise InvalidBodyError(
            f"rollup_window {format_duration(window_us)} does not divide the dataset's slice of"
            f" {format_duration(dataset.slice_us)}",
            field="rollup_window",
        )
    windows = dataset.retention_us // window_us
    if windows > limits.WINDOWS_PER_RETENTION_MAX:
        least_us = dataset.retention_us / limits.WINDOWS_PER_RETENTION_MAX / limits.SECOND
        raise InvalidBodyError(
            f"rollup_window {format_duration(window_us)} makes {windows} windows in the dataset's"
            f" retention of {format_duration(dataset.retention_us)}; at most"
            f" {limits.WINDOWS_PER_RETENTION_MAX} are allowed, so at least {least_us:g}s",
            field="rollup_window",
        )
