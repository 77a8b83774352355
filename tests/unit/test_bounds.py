"""What the service makes of refusals, and which bounds of a namespace are in force."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from counter.bounds import NO_BOUNDS, Bounds, terms_if_bounded
from counter.core.adds import event_of
from counter.core.results import Add, Added
from counter.errors import (
    BoundReachedError,
    CounterError,
    NotSupportedError,
    StoreUnavailableError,
    TokenCancelledError,
)
from counter.limits import MINUTE
from counter.storage.memory.store import MemoryStore
from counter.testing.cases import DATASET, NOW, make_namespace, make_slices, nonce
from counter.testing.clock import FakeClock
from counter.testing.service_cases import Process
from counter.types import Event, Namespace, Token, Written
from tests.support.waiting import eventually
from tests.unit.test_sqlite_bounds import Desk


@pytest.fixture
async def desk(fast_dir: Path) -> AsyncIterator[Desk]:
    desk = Desk(fast_dir)
    await desk.begin()
    await desk.process.api.namespaces.refresh()
    yield desk
    await desk.store.close()


class Finding:
    """Finds events; first does what the test plants before a look-up of one number."""

    def __init__(self, find: Any, plants: dict[int, Callable[[], Any]]) -> None:
        self._find, self._plants, self.calls = find, plants, 0

    async def __call__(self, namespace: Namespace, events: Sequence[Event]) -> Any:
        self.calls += 1
        plant = self._plants.get(self.calls)
        planted = None if plant is None else await plant()
        return planted or await self._find(namespace, events)


async def refused(desk: Desk) -> Event:
    """An add that was refused, and is late now."""
    event = desk.add(1, at_most=0)
    assert await desk.append(event) == [Written.BOUND_REACHED]
    desk.clock.advance(MINUTE)
    return event


async def retry(desk: Desk, event: Event) -> Added:
    token = Token(event.event_id, event.event_time_us)
    api = desk.process.api
    return await api.add(desk.namespace, "c", event.delta, token, terms=event.atom)


@pytest.mark.parametrize("cancels_at", [None, 2])
async def test_a_refusal_that_lands_while_a_retry_is_resolved_is_its_answer(
    desk: Desk, cancels_at: int | None
) -> None:
    """Unless it is cancelled, too, before the retry is answered."""
    event = await refused(desk)

    async def not_yet() -> Sequence[None]:
        return [None]

    async def cancel() -> None:
        token = Token(event.event_id, event.event_time_us)
        with patch.object(desk.store.events, "find", find._find):
            api = desk.process.api
            await api.cancel(desk.namespace, "add", "c", 1, token, terms=event.atom)

    plants: dict[int, Callable[[], Any]] = {1: not_yet}
    if cancels_at:
        plants[cancels_at] = cancel
    find = Finding(desk.store.events.find, plants)
    error: type[CounterError] = TokenCancelledError if cancels_at else BoundReachedError
    with patch.object(desk.store.events, "find", find), pytest.raises(error):
        await retry(desk, event)
    assert await desk.count() == 0


async def test_a_refusal_that_is_cancelled_before_its_reason_is_read_is_cancelled(
    desk: Desk,
) -> None:
    """Regression: it was answered as counted before."""
    event = desk.add(1, at_most=0)

    async def cancel() -> None:
        token = Token(event.event_id, event.event_time_us)
        with patch.object(desk.store.events, "find", find._find):
            api = desk.process.api
            await api.cancel(desk.namespace, "add", "c", 1, token, terms=event.atom)

    find = Finding(desk.store.events.find, {1: cancel})
    with patch.object(desk.store.events, "find", find), pytest.raises(TokenCancelledError):
        await retry(desk, event)


async def test_a_refusal_whose_reason_cannot_be_read_fails_alone(desk: Desk) -> None:
    """Regression: none of its batch had an outcome, and the others were in no tally."""
    api = desk.process.api

    async def fails() -> None:
        raise StoreUnavailableError("planted")

    adds = [Add("c", 1, Token(nonce(n), NOW), terms_if_bounded(1, None, 2)) for n in range(3)]
    find = Finding(desk.store.events.find, {1: fails})
    with patch.object(desk.store.events, "find", find):
        outcomes = await api.add_many(desk.namespace, adds)
    assert [type(each) for each in outcomes] == [Added, Added, StoreUnavailableError]
    assert (api.tally["original"], api.tally["unknown"]) == (2, 1)


async def test_a_gathered_refusal_is_written_once(desk: Desk) -> None:
    """Regression: it was sent to the store again for its reason."""
    api, calls, outcomes = desk.process.api, list[int](), list[Any]()
    append = desk.store.events.append

    async def counted(namespace: Namespace, events: Sequence[Event]) -> Any:
        calls.append(len(events))
        return await append(namespace, events)

    with patch.object(desk.store.events, "append", counted):
        assert api.add_soon(desk.namespace, desk.add(1, at_most=0), outcomes.append)
        await eventually(lambda: len(outcomes) == 1, "the add has an outcome")
    assert isinstance(outcomes[0], BoundReachedError)
    assert calls == [1]
    assert api.tally["bound_reached"] == 1


async def test_a_store_without_bounds_gets_no_bounded_add() -> None:
    """Also of those that are gathered, which were counted without their bound."""
    clock = FakeClock(NOW)
    store = MemoryStore(clock, [DATASET])
    await make_slices(store)
    namespace, api = await make_namespace(store), Process(store, clock).api
    await api.namespaces.refresh()
    terms = terms_if_bounded(7, None, 5)
    event = event_of("c", Token(nonce(1), NOW), 7, terms)
    assert not api.add_soon(namespace, event, lambda _: None)
    with pytest.raises(NotSupportedError):
        await api.add(namespace, "c", 7, Token(nonce(1), NOW), terms=terms)
    assert api.tally["refused"] == 1


async def set_bounds(desk: Desk, **bounds: int) -> None:
    namespaces = desk.process.api.namespaces
    await namespaces.refresh()
    namespace = namespaces.get(desk.namespace.name)
    settings = replace(namespace.settings, bounds=Bounds(**bounds))
    desk.namespace = await namespaces.update(namespace, settings)


@pytest.mark.parametrize("lands", [False, True])
@pytest.mark.parametrize("change", ["bounds", "others", "deletes"])
async def test_the_bounds_on_disk_are_in_force_after_a_failed_change(
    desk: Desk, change: str, lands: bool
) -> None:
    """Of the bounds, of another setting by an older copy, and of a deletion."""
    old = desk.namespace
    await set_bounds(desk, at_most=2)
    await desk.append(desk.add(1, delta=2))
    desk.fail_at_commit(after=lands)
    control = desk.store.control
    none = replace(desk.namespace.settings, bounds=NO_BOUNDS)
    other = replace(old.settings, adds_per_s=9)
    changes: dict[str, Callable[[], Any]] = {
        "bounds": lambda: control.update_namespace(desk.namespace, desk.namespace.changed(none, 0)),
        "others": lambda: control.update_namespace(old, old.changed(other, 0)),
        "deletes": lambda: control.delete_namespace(desk.namespace),
    }
    with pytest.raises(StoreUnavailableError):
        await changes[change]()
    if change == "deletes" and lands:
        assert not await control.namespaces()
        return
    is_bounded = change != "bounds" or not lands
    expected = Written.BOUND_REACHED if is_bounded else Written.NEW
    assert await desk.append(desk.add(2, delta=50)) == [expected]
    [stored] = await control.namespaces()
    assert (stored.settings.bounds != NO_BOUNDS) is is_bounded
