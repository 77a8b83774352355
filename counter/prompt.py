"""What an adapter may offer besides its port: to begin at once, and to call back.

A task for each add, and a coroutine for each step of it, cost more than the add.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from counter.errors import CacheUnavailableError
from counter.types import Event, Guarded, Mark, Namespace, Written

#: Told what became of one event: an outcome, or why there is none.
Told = Callable[[Written | BaseException], None]


@runtime_checkable
class PromptStore(Protocol):
    """A store without transactions that begins to write at once, without a task that waits.

    Each call tells once, and not before it returns. It returns False, and has done nothing, where
    something must be waited for first, or is wrong: the call of :class:`counter.ports.EventStore`
    does that.
    """

    def mark_soon(
        self, namespace: Namespace, mark: Mark, told: Callable[[BaseException | None], None]
    ) -> bool:
        """Begin to do what :meth:`counter.ports.EventStore.mark` does; *told* gets None once
        *mark* stands."""
        ...

    def append_soon(self, namespace: Namespace, event: Event, told: Told) -> bool:
        """Begin to do what :meth:`counter.ports.EventStore.append` does of *event* alone."""
        ...


@runtime_checkable
class PromptCache(Protocol):
    """A cache that asks the guard of one token at once."""

    def guard_soon(
        self, namespace: Namespace, event: Event, told: Callable[[Guarded], None]
    ) -> None:
        """Begin to do what :meth:`counter.ports.Cache.guard` does of *event* alone; *told* is
        called once, and may be before this returns."""
        ...


@runtime_checkable
class PromptCounters(Protocol):
    """A cache that changes a best-effort counter at once."""

    def increment_soon(
        self,
        namespace: Namespace,
        counter: str,
        delta: int,
        told: Callable[[int | CacheUnavailableError], None],
    ) -> None:
        """Begin to do what :meth:`counter.ports.Cache.increment` does; *told*, which must not
        raise, is called once, and may be before this returns."""
        ...
