"""Find the kinds of store that are installed, by name.

A kind is a class that a package names in the entry-point group ``counter.stores``. It is imported
when the settings name it, and imports its driver only to open the store.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from counter import limits
from counter.clock import SystemClock
from counter.errors import StartupError

if TYPE_CHECKING:
    from counter.config.findings import Finding
    from counter.core.clock_guard import ClockGuard
    from counter.ports import Clock, KeyStore, Store

GROUP: Final = "counter.stores"
_S_contra = TypeVar("_S_contra", contravariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreDefaults:
    """Defaults of settings that depend on the store, by the name of the setting."""

    write_timeout: int = limits.SECOND
    write_wait_max: int = limits.WRITE_WAIT_MAX_US
    clock_skew_max: int = 0
    #: The whole slice where this does not divide it, or is 0.
    time_bucket: int = 0
    event_buckets: int = 1
    event_buckets_max: int = 1
    shards: int = 1
    rollup: bool = True


class StoreKind(Protocol[_S_contra]):
    """What the program needs to know about one kind of store. A kind may inherit from it, and then
    changes what differs."""

    name: str
    #: One process opens the store, so it serves, rolls up and audits alone.
    serves_alone: bool = False
    #: A comparison costs several round trips, and guards of tokens are in the cache alone.
    compares_slowly: bool = False
    #: The setting that names the server, which only this kind has; "" if there is none.
    address: str = ""
    #: What backs it up; "" if it is ``counter backup``.
    backed_up_by: str = ""
    defaults: StoreDefaults = StoreDefaults()

    def problems(self, settings: _S_contra) -> Iterator[str]:
        """Return what is wrong with the settings that only this kind uses."""
        yield from ()

    def warnings(self, settings: _S_contra) -> Iterator[str]:
        """Return warnings about such settings that are allowed and often a mistake."""
        yield from ()

    def clock(self) -> Clock:
        """Return the clock of a process: the machine's, or one that follows the store's."""
        return SystemClock()

    def open(self, settings: _S_contra, clock: Clock, *, to_audit: bool = False) -> Store:
        """Return the store, not yet open. Raises StartupError if its driver is missing.

        *to_audit*, a data directory must have counters, and is read completely when it is opened.
        """
        ...

    def opened_keys(
        self, settings: _S_contra, clock: Clock
    ) -> AbstractAsyncContextManager[tuple[KeyStore, ClockGuard | None]]:
        """Open the API keys, which a running service may be using.

        Also yields a guard of *clock*, not yet measured, if the store has its own clock. Raises
        StartupError and UnavailableError."""
        ...

    async def apply_schema(self, settings: _S_contra) -> Sequence[str]:
        """Create or update the schema; return what was done."""
        ...

    async def begin_new_life(
        self, settings: _S_contra, act: AbstractAsyncContextManager[Any]
    ) -> str:
        """Make sure that a restored store issues nothing that was issued before, as *act*; return
        what is to be done before it is served. Raises StartupError and UnavailableError."""
        ...

    async def describe(self, settings: _S_contra) -> tuple[str, Sequence[str]]:
        """Return the server's settings that the promise depends on, "" if there are none, and
        warnings about them. Raises StartupError if the promise cannot be kept there."""
        return "", ()

    def check(self, settings: _S_contra, clock: Clock) -> AsyncIterator[Finding]:
        """Check the store and its clock for ``counter doctor``, without changing anything."""
        ...


@cache
def _installed() -> Mapping[str, EntryPoint]:
    return {each.name: each for each in sorted(entry_points(group=GROUP))}


def store_names() -> Sequence[str]:
    """Return the names of all kinds that are installed."""
    return tuple(_installed())


@cache
def store_kind(name: str) -> StoreKind[Any]:
    """Return the kind of store *name*. Raises StartupError if it is not installed."""
    if name not in _installed():
        raise StartupError(f"store is {name[:80]!r}; {_known()}")
    kind: StoreKind[Any] = _installed()[name].load()()
    return kind


def check_store(name: str) -> str:
    """Return *name*. Raises ValueError if no such kind is installed."""
    if name not in _installed():
        raise ValueError(_known())
    return name


def _known() -> str:
    if not (names := [repr(each) for each in store_names()]):
        return "no store is installed: install this program again (pip install --editable .)"
    return f"Input should be {' or '.join(filter(None, (', '.join(names[:-1]), names[-1])))}"
