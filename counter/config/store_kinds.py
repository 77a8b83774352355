"""Find the kinds of store that are installed, by name.

A kind is a class that a package names in the entry-point group ``counter.stores``. It is imported
when the settings name it, and imports its driver only to open the store.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from counter import limits
from counter.clock import SystemClock
from counter.config.findings import Finding, ok, wrong
from counter.errors import CounterError, StartupError

if TYPE_CHECKING:
    from counter.api_keys import KeyStore
    from counter.core.clock_guard import ClockGuard
    from counter.ports import Clock, Store
    from counter.types import NamespaceSettings

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


#: Called with the bytes of a file that are done, and its size.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class BackedUpFile:
    """One file of a backup."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Backup:
    """The content of a backup. It includes every add that was acknowledged before *begun_at*."""

    begun_at: str
    version: str
    files: Mapping[str, BackedUpFile]

    @property
    def size(self) -> int:
        """Return the total size of the files in bytes."""
        return sum(each.bytes for each in self.files.values())


class StoreKind(Protocol[_S_contra]):
    """What the program needs to know about one kind of store.

    A kind inherits from it, has ``name``, ``settings`` and ``open``, and changes what differs: the
    other defaults are those of a store that one process opens, without schema or backup.
    """

    name: str
    #: A subclass of :class:`counter.config.settings.Settings`. The first setting that it adds says
    #: where the store is. Its ``problems`` and ``warnings`` check what it adds.
    settings: type[Any]
    defaults: StoreDefaults = StoreDefaults()
    #: One process opens the store, so it serves, rolls up and audits alone.
    serves_alone: bool = False

    def advice(self, namespace: NamespaceSettings) -> Iterator[str]:
        """Return warnings about settings of a namespace that this store makes expensive."""
        yield from ()

    def clock(self) -> Clock:
        """Return the clock of a process: the machine's, or one that follows the store's."""
        return SystemClock()

    def open(self, settings: _S_contra, clock: Clock, *, to_audit: bool = False) -> Store:
        """Return the store, not yet open. Raises StartupError if its driver is missing.

        *to_audit*, a data directory must have counters, and is read completely when it is opened.
        """
        ...

    @asynccontextmanager
    async def opened(self, settings: _S_contra, clock: Clock) -> AsyncIterator[Store]:
        """Open the store for one command. Raises StartupError and UnavailableError."""
        store = self.open(settings, clock)
        await store.open()
        try:
            yield store
        finally:
            await store.close()

    @asynccontextmanager
    async def opened_keys(
        self, settings: _S_contra, clock: Clock
    ) -> AsyncIterator[tuple[KeyStore, ClockGuard | None]]:
        """Open the API keys, which a running service may be using.

        Also yields a guard of *clock*, not yet measured, if the store has its own clock. Raises
        StartupError and UnavailableError."""
        async with self.opened(settings, clock) as store:
            yield store.keys, None

    async def apply_schema(self, settings: _S_contra) -> Sequence[str]:
        """Create or update the schema; return what was done."""
        return [f"store is {self.name}, which has no schema to apply"]

    def back_up(
        self,
        settings: _S_contra,
        target: Path,
        *,
        now_us: int,
        bytes_per_s: float,
        progress: Progress,
    ) -> Backup:
        """Copy the data to the new directory *target* while another process may use them.

        Raises StartupError, with what backs the store up instead if this cannot."""
        raise StartupError(f"store is {self.name}, which `counter backup` cannot copy")

    def restore(
        self,
        settings: _S_contra,
        source: Path,
        *,
        now_us: int,
        progress: Progress,
        without_keys: bool,
    ) -> Backup:
        """Restore the backup *source*. Raises StartupError likewise."""
        raise StartupError(f"store is {self.name}, which `counter restore` cannot write")

    async def begin_new_life(
        self, settings: _S_contra, act: AbstractAsyncContextManager[Any]
    ) -> str:
        """Make sure that a restored store issues nothing that was issued before, as *act*; return
        what is to be done before it is served. Raises StartupError and UnavailableError."""
        raise StartupError(f"store is {self.name}, which has nothing to do after a restore")

    async def check(self, settings: _S_contra, clock: Clock) -> AsyncIterator[Finding]:
        """Check the store and its clock for ``counter doctor``, without changing anything."""
        try:
            async with self.opened(settings, clock) as store:
                await store.ping()
        except (CounterError, StartupError) as error:
            yield wrong(
                "store", str(error), "do what it says, or see the documentation of the store"
            )
        else:
            yield ok("store", f"{self.name} can be opened and written")


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
