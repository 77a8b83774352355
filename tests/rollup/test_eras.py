"""A changed accept limit with late compare-and-sets: every acknowledged add counts once."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from counter.core.service import CounterService
from counter.errors import CounterError, TokenPendingError, UnavailableError
from counter.limits import DIRECTORY_AGE_MAX_US, SECOND
from counter.storage.shared.memory_cache import MemoryCache
from counter.types import Namespace
from tests.rollup.world import DATASET, SETTINGS, World

_SHORT, _LONG = 3 * SECOND, 60 * SECOND
#: Late by the short limit, and long past the end of its window; on time by the long one.
_AGE = 30 * SECOND


class _Change:
    """A changing namespace, a worker, and a process with the oldest copy that can be in use."""

    def __init__(self, old_us: int, new_us: int) -> None:
        self.world = World()
        self.old_us, self.new_us = old_us, new_us
        self.worker = self.world.process().worker
        self.other = CounterService(
            self.world.store, MemoryCache(self.world.clock), self.world.clock
        )
        self.acknowledged: dict[str, int] = {}

    async def change(self) -> None:
        settings = replace(self.world.api.namespaces.get("n").settings, accept_limit_us=self.new_us)
        await self.world.api.namespaces.update(self.world.api.namespaces.get("n"), settings)

    async def pass_slices(self, number: int) -> None:
        """The worker makes slices and closes windows in between."""
        for _ in range(number):
            self.world.clock.advance(DATASET.slice_us)
            await self.worker.tick()

    def late(self, number: int) -> Callable[..., Any]:
        """A change of the store of which compare-and-set *number* lands slices late."""
        update, left = self.world.store.control.update_namespace, [number]

        async def updated(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                await self.pass_slices(5)
                await self.other.namespaces.refresh()
            return await update(*arguments, **named)

        return updated

    async def add(self) -> None:
        """Add an old token through each process, to counters of their own; the worker is ahead."""
        await self.worker.tick()
        for counter, service in (("api", self.world.api), ("other", self.other)):
            namespace = service.namespaces.get("n")
            try:
                await service.add(namespace, counter, 1, self.world.token(_AGE))
            except CounterError:
                continue
            self.acknowledged[counter] = 1

    async def counted(self, namespace: Namespace) -> dict[str, int]:
        self.world.clock.advance(2 * _LONG)
        await self.worker.tick()
        found = await self.world.rolled_up(namespace)
        return {counter: count for counter, count in found.items() if count}


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(("old_us", "new_us"), [(_SHORT, _LONG), (_LONG, _SHORT)])
async def test_a_changed_accept_limit_that_lands_late_loses_no_add(
    old_us: int, new_us: int, number: int
) -> None:
    """Regression: windows of its first slices were closed by the old limit already, or other
    processes still accepted adds by it."""
    change = _Change(old_us, new_us)
    namespace = await change.world.begin(shards=1, accept_limit_us=old_us)
    await change.other.namespaces.refresh()
    late = patch.object(change.world.store.control, "update_namespace", change.late(number))
    with late, suppress(UnavailableError):
        await change.change()
    await change.add()
    assert await change.counted(namespace) == change.acknowledged


async def test_a_late_token_is_decided_by_the_limit_of_now() -> None:
    """Regression: however long its request has waited since it looked the namespace up."""
    change = _Change(_SHORT, _LONG)
    namespace = await change.world.begin(accept_limit_us=_SHORT)
    await change.change()
    await change.pass_slices(5)
    await change.other.namespaces.refresh()
    with pytest.raises(TokenPendingError):
        await change.other.add(namespace, "c", 1, change.world.token(_AGE))
    change.world.clock.advance(DIRECTORY_AGE_MAX_US + 1)
    with pytest.raises(UnavailableError):
        await change.other.add(namespace, "c", 1, change.world.token(_AGE))


async def test_a_change_that_was_not_confirmed_is_done_by_the_next_one() -> None:
    change = _Change(_SHORT, _LONG)
    await change.world.begin(accept_limit_us=_SHORT)
    with (
        patch.object(change.world.store.control, "update_namespace", change.late(1)),
        pytest.raises(UnavailableError, match="took too long"),
    ):
        await change.change()
    undone = change.world.api.namespaces.get("n")
    assert undone.settings == replace(SETTINGS, accept_limit_us=_SHORT)
    await change.change()
    done = change.world.api.namespaces.get("n")
    assert done.settings.accept_limit_us == done.eras[-1].accept_limit_us == _LONG
    assert done.accepts_by(_LONG)
