"""The directory of namespaces in two processes over one store: each learns of changes."""

import asyncio
import gc
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from counter.capabilities import Capabilities
from counter.config.settings import Settings
from counter.core.namespaces import Namespaces
from counter.core.service import CounterService
from counter.errors import (
    NamespaceUnknownError,
    PreconditionFailedError,
    StoreUnavailableError,
    UnavailableError,
)
from counter.limits import DIRECTORY_AGE_MAX_US
from counter.storage.memory import DEFAULT_DATASET, MemoryStore
from counter.storage.memory.control import MemoryControl
from counter.storage.shared.memory_cache import MemoryCache
from counter.testing.clock import FakeClock
from counter.types import CounterType, Namespace, Slice, Token
from counter.windows import accept_limit_at, settling_time
from rollup.parts import keep_reading
from tests.support.times import SECOND, START_US
from tests.support.waiting import eventually

SETTINGS = replace(Settings().default_namespace(), cache_ttl_us=SECOND)


class CountedControl(MemoryControl):
    """Counts the reads of its directory, and runs planned events during the next ones."""

    looks = 0
    down = False
    meanwhile: Callable[[], Awaitable[object]] | None = None

    async def namespaces(self) -> Sequence[Namespace]:
        self.looks += 1
        if self.down:
            raise StoreUnavailableError("a fault that a test planted")
        found = await super().namespaces()
        if self.meanwhile is not None:
            happens, self.meanwhile = self.meanwhile, None
            await happens()
        return found


class Pair:
    """Two processes, by their copies of the namespaces of one store."""

    def __init__(self) -> None:
        self.clock = FakeClock(START_US)
        self.store = MemoryStore(self.clock)
        self.control = self.store.control = CountedControl(self.store.tables)
        self.one = Namespaces(self.store, self.clock)
        self.other = Namespaces(self.store, self.clock)


@pytest.fixture
def pair() -> Pair:
    return Pair()


async def test_a_refresh_finds_a_namespace_of_another_process(pair: Pair) -> None:
    await pair.other.refresh()
    created = await pair.one.create("new", SETTINGS)
    assert pair.other.needs_reread("new", writes=False)
    await pair.other.reread()
    assert pair.other.get("new") == created
    assert not pair.other.needs_reread("new", writes=False)


async def test_a_name_that_another_process_has_taken_is_known_from_then_on(pair: Pair) -> None:
    created = await pair.other.create("new", SETTINGS)
    with pytest.raises(PreconditionFailedError):
        await pair.one.create("new", SETTINGS)
    assert pair.one.find("new") == created


async def test_a_directory_is_fresh_until_its_age_is_past_the_bound(pair: Pair) -> None:
    await pair.one.refresh()
    with patch.object(pair.store, "capabilities", Capabilities()):
        pair.clock.advance(DIRECTORY_AGE_MAX_US)
        assert pair.one.is_fresh
        pair.clock.advance(1)
        assert not pair.one.is_fresh


async def test_a_flood_of_unknown_names_shares_its_looks(pair: Pair) -> None:
    await asyncio.gather(*(pair.one.reread() for _ in range(1_000)))
    assert pair.control.looks == 1


async def test_a_caller_during_a_refresh_gets_a_later_one(pair: Pair) -> None:
    """The look under way may have read the directory before the namespace was created."""
    looked: list[asyncio.Task[None]] = []

    async def created() -> None:
        await pair.one.create("new", SETTINGS)
        looked.append(asyncio.create_task(pair.other.reread()))

    pair.control.meanwhile = created
    await pair.other.reread()
    with pytest.raises(NamespaceUnknownError):
        pair.other.get("new")
    await looked[0]
    assert pair.other.get("new").name == "new"


async def test_a_failed_refresh_is_reported_to_its_callers(pair: Pair) -> None:
    pair.control.down = True
    with pytest.raises(StoreUnavailableError):
        await pair.one.reread()
    pair.control.down = False
    await pair.one.reread()


async def test_a_look_that_fails_when_its_caller_has_gone_logs_no_trace(pair: Pair) -> None:
    logged: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: logged.append(what))
    gone = asyncio.Event()

    async def fails_later() -> None:
        await gone.wait()
        raise StoreUnavailableError("a fault that a test planted")

    pair.control.meanwhile = fails_later
    call = asyncio.create_task(pair.one.reread())
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    gone.set()
    await asyncio.sleep(0)
    gc.collect()
    assert logged == []


async def test_changes_and_deletions_are_learnt_in_the_background(pair: Pair) -> None:
    stop = asyncio.Event()
    namespace = await pair.one.create("each", SETTINGS)

    async def until_seen(cache_ttl_us: int | None) -> None:
        def seen() -> bool:
            found = [each.settings.cache_ttl_us for each in pair.other.all()]
            return found == [each for each in [cache_ttl_us] if each]

        await eventually(seen, f"a cache_ttl of {cache_ttl_us} us")

    with patch("rollup.parts._READ_EVERY_S", 0.001):
        running = asyncio.create_task(keep_reading(pair.other, stop))
        await until_seen(SECOND)
        pair.control.down = True
        namespace = await pair.one.update(namespace, replace(SETTINGS, cache_ttl_us=2 * SECOND))
        pair.control.down = False
        await until_seen(2 * SECOND)
        await pair.one.delete(namespace)
        await until_seen(None)
        stop.set()
        await running


async def test_a_fault_in_a_look_ends_no_later_one(pair: Pair) -> None:
    """Whatever it is: without looks this process would stop to take adds."""
    stop = asyncio.Event()
    looks = iter([RuntimeError("a fault"), StoreUnavailableError("down"), None])

    async def fails() -> None:
        error = next(looks, None)
        if error is not None:
            pair.control.meanwhile = fails
            raise error

    await pair.one.create("each", SETTINGS)
    pair.control.meanwhile = fails
    with patch("rollup.parts._READ_EVERY_S", 0.001):
        running = asyncio.create_task(keep_reading(pair.other, stop))
        await eventually(
            lambda: [each.name for each in pair.other.all()] == ["each"], "the namespace is seen"
        )
        stop.set()
        await running


@pytest.mark.parametrize("what", ["update", "delete"])
async def test_a_change_of_an_outdated_version_is_rejected(pair: Pair, what: str) -> None:
    """And has the present version, to decide again."""
    namespace = await pair.one.create("each", SETTINGS)
    await pair.other.refresh()
    await pair.other.update(namespace, replace(SETTINGS, cache_ttl_us=2 * SECOND))
    changed = replace(SETTINGS, cache_ttl_us=3 * SECOND)
    is_update = what == "update"
    change = pair.one.update(namespace, changed) if is_update else pair.one.delete(namespace)
    with pytest.raises(PreconditionFailedError, match="meanwhile"):
        await change
    assert pair.one.get("each").settings.cache_ttl_us == 2 * SECOND


async def test_a_refresh_does_not_undo_concurrent_changes(pair: Pair) -> None:
    async def created() -> None:
        await pair.one.create("mine", SETTINGS)

    pair.control.meanwhile = created
    await pair.one.refresh()
    assert pair.one.get("mine").name == "mine"


async def test_an_earlier_reading_that_comes_late_changes_nothing(pair: Pair) -> None:
    async def overtaken() -> None:
        pair.clock.advance(SECOND)
        await pair.one.create("new", SETTINGS)
        await pair.other.refresh()

    pair.control.meanwhile = overtaken
    await pair.other.refresh()
    assert pair.other.get("new").name == "new"


async def test_writes_want_a_copy_that_is_fresh_and_reads_do_not(pair: Pair) -> None:
    await pair.one.create("c", SETTINGS)
    await pair.one.create("rough", replace(SETTINGS, counter_type=CounterType.BEST_EFFORT))
    await pair.one.refresh()
    assert not pair.one.needs_reread("c", writes=True)
    pair.clock.advance(DIRECTORY_AGE_MAX_US + 1)
    assert pair.one.needs_reread("c", writes=True)
    assert not pair.one.needs_reread("c", writes=False)
    assert not pair.one.needs_reread("rough", writes=True)


@pytest.mark.parametrize("left_us", [0, 1, SECOND, DIRECTORY_AGE_MAX_US + 5 * SECOND])
async def test_an_accept_limit_changes_only_if_every_copy_knows_it(
    pair: Pair, left_us: int
) -> None:
    """Regression: the last slice that is made may end in a moment, or have ended."""
    size_us = DEFAULT_DATASET.slice_us
    start_us = START_US - START_US % size_us
    await pair.store.control.make_slices(
        DEFAULT_DATASET, Slice(start_us, start_us + size_us, size_us, 1)
    )
    namespace = await pair.one.create("c", SETTINGS)
    pair.clock.advance(start_us + size_us - left_us - pair.clock.now_us())
    await pair.other.refresh()
    changed = await pair.one.update(namespace, replace(SETTINGS, accept_limit_us=60 * SECOND))
    # The latest instant at which the other may use its copy, and the latest token it admits then.
    pair.clock.advance(DIRECTORY_AGE_MAX_US)
    assert pair.other.is_fresh
    latest_us = pair.clock.now_us() + SETTINGS.future_limit_us
    stale = pair.other.get("c")
    assert accept_limit_at(stale, latest_us) == accept_limit_at(changed, latest_us)
    assert changed.eras[-1].from_us % size_us == 0


async def test_an_accept_limit_changes_from_the_first_slice_that_is_not_made(pair: Pair) -> None:
    size_us = DEFAULT_DATASET.slice_us
    start_us = START_US - START_US % size_us
    for each_us in (start_us, start_us + size_us):
        await pair.store.control.make_slices(
            DEFAULT_DATASET, Slice(each_us, each_us + size_us, size_us, 1)
        )
    namespace = await pair.one.create("c", SETTINGS)
    changed = await pair.one.update(namespace, replace(SETTINGS, accept_limit_us=60 * SECOND))
    assert changed.eras[-1].from_us == start_us + 2 * size_us


@pytest.mark.parametrize("change", [-SECOND, SECOND], ids=["shorter", "longer"])
async def test_an_accept_limit_is_announced_before_it_changes(pair: Pair, change: int) -> None:
    """In between adds are accepted by the shorter limit, and windows close by the longer one."""
    old_us = SETTINGS.accept_limit_us
    new_us = old_us + change
    namespace = await pair.one.create("c", SETTINGS)
    update, written = pair.control.update_namespace, []

    async def noted(before: Namespace, after: Namespace) -> bool:
        written.append(after)
        return await update(before, after)

    with patch.object(pair.control, "update_namespace", noted):
        await pair.one.update(namespace, replace(SETTINGS, accept_limit_us=new_us))
    limits_us = [(each.eras[-1][1], each.closing_eras[-1][1]) for each in written]
    assert limits_us == [(min(old_us, new_us), max(old_us, new_us)), (new_us, new_us)]


async def test_another_setting_leaves_the_accept_limits_of_earlier_slices(pair: Pair) -> None:
    namespace = await pair.one.create("c", SETTINGS)
    longer = replace(SETTINGS, accept_limit_us=SETTINGS.accept_limit_us + SECOND)
    changed = await pair.one.update(namespace, longer)
    assert len(changed.eras) == 2
    again = await pair.one.update(changed, replace(longer, cache_ttl_us=2 * SECOND))
    assert (again.eras, again.closing_eras) == (changed.eras, changed.closing_eras)


async def test_an_add_uses_the_directory_as_of_its_write(pair: Pair) -> None:
    """However long its request waited for its body since the namespace was looked up."""
    service = CounterService(pair.store, MemoryCache(pair.clock), pair.clock)
    size_us = DEFAULT_DATASET.slice_us
    start_us = START_US - START_US % size_us
    await pair.store.control.make_slices(
        DEFAULT_DATASET, Slice(start_us, start_us + size_us, size_us, 1)
    )
    await pair.one.create("c", SETTINGS)
    await service.namespaces.refresh()
    namespace = service.namespaces.get("c")
    changed = await pair.one.update(pair.one.get("c"), replace(SETTINGS, accept_limit_us=SECOND))
    await service.namespaces.refresh()
    assert service.namespaces.current(namespace, pair.clock.boottime_us()) == changed
    pair.clock.advance(DIRECTORY_AGE_MAX_US + 1)
    token = Token(bytes(16), pair.clock.now_us())
    with pytest.raises(UnavailableError, match="has not read namespaces for over 5s"):
        await service.add(namespace, "c", 1, token)
    await pair.one.delete(changed)
    await pair.one.create("c", SETTINGS)
    await service.namespaces.refresh()
    with pytest.raises(NamespaceUnknownError):
        await service.add(namespace, "c", 1, token)
    await service.add(service.namespaces.get("c"), "c", 1, token)


def test_a_name_settles_no_sooner_than_the_last_add_can_be_acknowledged() -> None:
    """By the copy read last before the deletion, and by boot clocks that drift."""
    latest_us = DIRECTORY_AGE_MAX_US + DEFAULT_DATASET.write_timeout_us
    assert settling_time(DEFAULT_DATASET) == latest_us * 1_001 // 1_000
