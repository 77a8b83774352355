"""What the kinds of stores that are servers have in common."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from counter import how_to_install
from counter.clock import StoreClock, SystemClock
from counter.config.findings import Finding, ok, warning, wrong
from counter.config.settings import Settings
from counter.config.store_kinds import StoreKind
from counter.core.clock_guard import ClockGuard, checked_now_us, guard_of
from counter.errors import CounterError, StartupError
from counter.quantities import plural
from counter.storage.shared.startup_retry import StartupRetry

if TYPE_CHECKING:
    from counter.api_keys import KeyStore
    from counter.ports import Clock, Store

_S_contra = TypeVar("_S_contra", bound=Settings, contravariant=True)


class ServerKind(StoreKind[_S_contra]):
    """The base of such a kind."""

    #: What people call the server, and the module of its driver, which has an extra of *name*.
    title: str
    driver: str
    #: What to do if it cannot be opened, and where to look if it fails.
    start: str
    look: str
    #: What backs it up.
    backed_up_by: str
    #: Processes follow the server's clock, and do not compare theirs with it.
    leads_clocks: bool = False

    def clock(self) -> Clock:
        return StoreClock() if self.leads_clocks else SystemClock()

    def require_driver(self) -> None:
        """Raise StartupError if the driver cannot be imported."""
        try:
            import_module(self.driver)
        except ImportError as error:
            raise StartupError(
                f"the {self.title} driver is missing ({error}): {how_to_install(self.name)}"
            ) from error

    @asynccontextmanager
    async def opened(self, settings: _S_contra, clock: Clock) -> AsyncIterator[Store]:
        store = self.open(settings, clock)
        await StartupRetry(settings.start_timeout).run(store.open)
        try:
            yield store
        finally:
            await store.close()

    @asynccontextmanager
    async def opened_keys(
        self, settings: _S_contra, clock: Clock
    ) -> AsyncIterator[tuple[KeyStore, ClockGuard | None]]:
        async with self.opened(settings, clock) as store:
            yield store.keys, guard_of(store, clock)

    def back_up(self, settings: _S_contra, *_: Any, **__: Any) -> NoReturn:
        raise StartupError(
            f"store is {self.name}, which is backed up by `{self.backed_up_by}`: see"
            " docs/how-to/back-up-and-restore.md"
        )

    restore = back_up

    async def begin_new_life(
        self, settings: _S_contra, act: AbstractAsyncContextManager[Any]
    ) -> str:
        clock = self.clock()
        async with self.opened(settings, clock) as store, act:
            control: Any = store.control
            guard = ClockGuard(control, clock)
            await guard.measure()
            # No token gets an earlier time than this one any more.
            await control.begin_new_life(checked_now_us(clock, guard))
        return "start a worker, and run counter audit --all --repair"

    async def check(self, settings: _S_contra, clock: Clock) -> AsyncIterator[Finding]:
        try:
            async with self.opened(settings, clock) as store:
                namespaces = plural(len(await store.control.namespaces()), "namespace")
                detail = f"{self.title} answers; {settings.keyspace} has the schema of this version"
                yield ok("store", f"{detail}, and {namespaces}")
                do = "docs/guarantees.md says what each setting of the store loses and when"
                if (server_warnings := store.capabilities.server_warnings) is not None:
                    for each in await server_warnings():
                        yield warning("server", each, do)
                guard = guard_of(store, clock)
                await guard.measure()
                if guard.trouble is not None:
                    do = f"synchronize the clocks of this machine and of {self.title}'s with NTP"
                    yield wrong("clock", guard.trouble, do)
                else:
                    apart = f"{abs(guard.offset_us) / 1_000:.1f} ms"
                    yield ok("clock", f"{apart} from {self.title}'s, which is within the bound")
        except (CounterError, StartupError) as error:
            do = f"{self.start}, run counter schema apply as it says, or {self.look}"
            yield wrong("store", str(error), do)
