"""Group commit, over a commit function in the test's hand."""

import asyncio
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counter.errors import InvariantError, OverloadedError, WriteTimeoutError
from counter.storage.shared.batching import Batch, Batcher
from tests.support.virtual import virtually

_Batch = Batch[str, int, str | BaseException]
_Batcher = Batcher[str, int, str | BaseException]


class _SomeSerial(_Batcher):
    def is_serial(self, key: str) -> bool:
        return key == "b"


class Commits:
    """The batches that have begun; the test ends them."""

    def __init__(self) -> None:
        self.begun: list[_Batch] = []

    def __call__(self, batches: Sequence[_Batch]) -> None:
        self.begun += batches

    @property
    def items(self) -> list[tuple[str, list[int]]]:
        return [(batch.key, batch.items) for batch in self.begun]

    def end_first(self) -> None:
        batch = self.begun.pop(0)
        batch.end(results(batch.key, batch.items))

    def end_all(self) -> None:
        for _ in range(len(self.begun)):
            self.end_first()


def results(key: str, items: Sequence[int]) -> list[str]:
    return [f"{key}{item}" for item in items]


@pytest.fixture
def commits() -> Commits:
    return Commits()


@pytest.fixture
def batcher(commits: Commits) -> _Batcher:
    return Batcher(commits, name="the store", items_max=3, waiting_max=10, at_once=2)


async def put(batcher: _Batcher, key: str, *items: int) -> Sequence[str | BaseException]:
    return await batcher.put(key, items)


async def begin(*puts: Coroutine[Any, Any, Any]) -> list[asyncio.Task[Any]]:
    """Begin *puts* in one turn of the event loop; return when it is over."""
    tasks = [asyncio.create_task(each) for each in puts]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


async def test_items_of_one_turn_leave_together(batcher: _Batcher, commits: Commits) -> None:
    """Those of one key share a batch; each caller gets the outcomes of its own, in order."""
    one, two, three = await begin(
        batcher.put_all([("a", 1), ("b", 2)]),
        batcher.put_all([("b", 3), ("a", 4), ("c", 5)]),
        put(batcher, "c", 6, 7),
    )
    assert commits.items == [("a", [1, 4]), ("b", [2, 3]), ("c", [5, 6, 7])]
    commits.end_all()
    assert await one == ["a1", "b2"]
    assert await two == ["b3", "a4", "c5"]
    assert await three == ["c6", "c7"]


async def test_items_that_come_while_a_batch_is_under_way_leave_with_the_next(
    batcher: _Batcher, commits: Commits
) -> None:
    """Other keys do not wait for it."""
    tasks = await begin(put(batcher, "a", 1))
    tasks += await begin(put(batcher, "a", 2))
    tasks += await begin(batcher.put_all([("a", 3), ("b", 4)]))
    assert commits.items == [("a", [1]), ("b", [4])]
    assert batcher.waiting == 2
    assert batcher.is_under_way("a")
    commits.end_all()
    await asyncio.sleep(0)
    assert commits.items == [("a", [2, 3])]
    assert batcher.waiting == 0
    assert not batcher.is_under_way("b")
    commits.end_all()
    assert [await task for task in tasks] == [["a1"], ["a2"], ["a3", "b4"]]


async def test_a_full_batch_does_not_wait(batcher: _Batcher, commits: Commits) -> None:
    """At most two are under way at once, and none has more than three items."""
    (one, many) = await begin(
        put(batcher, "a", 1), batcher.put_all([("a", item) for item in range(2, 10)])
    )
    assert commits.items == [("a", [1]), ("a", [2, 3, 4])]
    commits.end_first()
    await asyncio.sleep(0)
    assert commits.items == [("a", [2, 3, 4]), ("a", [5, 6, 7])]
    commits.end_all()
    await asyncio.sleep(0)
    assert commits.items == [("a", [8, 9])]
    commits.end_all()
    assert await one == ["a1"]
    assert await many == [f"a{item}" for item in range(2, 10)]


async def test_a_put_is_not_cut_in_two(batcher: _Batcher, commits: Commits) -> None:
    """One that is larger than a batch may be leaves alone."""
    tasks = await begin(
        put(batcher, "a", 1, 2), put(batcher, "a", 3, 4, 5, 6), put(batcher, "a", 7)
    )
    assert commits.items == [("a", [1, 2]), ("a", [3, 4, 5, 6])]
    commits.end_all()
    await asyncio.sleep(0)
    commits.end_all()
    assert [len(await task) for task in tasks] == [2, 4, 1]
    with pytest.raises(InvariantError):
        batcher.put("a", [])


async def test_too_many_items_that_wait_are_rejected_before_any_work(
    batcher: _Batcher, commits: Commits
) -> None:
    """Also if there is room for a part of them. Other keys have room of their own."""
    (out,) = await begin(batcher.put_all([("a", item) for item in range(6)]))
    (waiting,) = await begin(batcher.put_all([("a", item) for item in range(6, 15)]))
    for many in (["a", "a"], ["b", "a", "a"]):
        with pytest.raises(OverloadedError, match="9 calls wait for the store; at most 10 may"):
            await batcher.put_all([(key, 0) for key in many])
    (one,) = await begin(put(batcher, "a", 15))
    with pytest.raises(OverloadedError, match="10 calls wait for the store; at most 10 may"):
        batcher.put("a", [0])
    (other,) = await begin(put(batcher, "b", 1))
    while commits.begun:
        commits.end_all()
        await asyncio.sleep(0)
    assert [*await out, *await waiting, *await one] == results("a", range(16))
    assert await other == ["b1"]
    assert await batcher.put_all([]) == []


async def test_a_failure_concerns_its_own_batch(batcher: _Batcher, commits: Commits) -> None:
    """Each of its waiters has the error as its outcome."""
    one, two = await begin(batcher.put_all([("a", 1), ("b", 2), ("a", 3)]), put(batcher, "a", 4))
    error = WriteTimeoutError("late")
    commits.begun[0].end_all(error)
    commits.begun[1].end_all("done")
    assert await one == [error, "done", error]
    assert await two == [error]


async def test_a_caller_that_is_cancelled_leaves_its_items(
    batcher: _Batcher, commits: Commits
) -> None:
    """They are committed with the rest, and their callers get the outcomes."""
    one, two = await begin(put(batcher, "a", 1), put(batcher, "a", 2))
    one.cancel()
    await asyncio.sleep(0)
    assert one.cancelled()
    commits.end_all()
    assert await two == ["a2"]


async def test_a_caller_can_be_cancelled_after_its_batch_has_ended(commits: Commits) -> None:
    """So that no write of a cancelled task is under way."""
    batcher = _Batcher(commits, name="the store", items_max=3, waiting_max=10, interrupts=False)
    one, two = await begin(put(batcher, "a", 1), put(batcher, "a", 2))
    one.cancel()
    await asyncio.sleep(0)
    assert not one.done()
    commits.end_all()
    assert await two == ["a2"]
    assert one.cancelled()


async def test_waiting_items_can_be_answered_without_being_sent(
    batcher: _Batcher, commits: Commits
) -> None:
    (out,) = await begin(put(batcher, "a", 1))
    waiting, other = await begin(put(batcher, "a", 2, 3), put(batcher, "b", 4))
    fresh = batcher.put("c", [5])
    for key in ("a", "c", "none"):
        batcher.answer_waiting(key, "gone")
    assert await waiting == ["gone", "gone"]
    assert await fresh == ["gone"]
    assert commits.items == [("a", [1]), ("b", [4])]
    commits.end_all()
    assert await out == ["a1"]
    assert await other == ["b4"]
    await batcher.close()


async def test_a_batch_that_is_answered_early_stays_in_flight(
    batcher: _Batcher, commits: Commits
) -> None:
    one, _ = await begin(put(batcher, "a", 1), put(batcher, "a", 2))
    commits.begun[0].answer_all("overdue")
    assert await one == ["overdue"]
    await begin(put(batcher, "a", 3))
    assert commits.items == [("a", [1, 2])]
    commits.end_all()
    await asyncio.sleep(0)
    assert commits.items == [("a", [3])]


async def test_the_next_batch_leaves_at_once_if_it_shall(
    batcher: _Batcher, commits: Commits
) -> None:
    """Before the callers of the one that ended go on, so that the store does not wait for them."""
    await begin(put(batcher, "a", 1))
    await begin(put(batcher, "a", 2))
    commits.end_all()
    batcher.commit_ready()
    assert commits.items == [("a", [2])]


async def test_close_waits_for_all_items_and_rejects_new_ones(
    batcher: _Batcher, commits: Commits
) -> None:
    one, two, closing = await begin(
        put(batcher, "a", 1, 2), put(batcher, "a", 3, 4), batcher.close()
    )
    with pytest.raises(OverloadedError, match="closing"):
        batcher.put("a", [5])
    assert commits.items == [("a", [1, 2])]
    commits.end_first()
    await asyncio.sleep(0)
    assert not closing.done()
    assert commits.items == [("a", [3, 4])]
    commits.end_first()
    await closing
    assert (await one, await two) == (["a1", "a2"], ["a3", "a4"])


async def outcome(future: asyncio.Future[Any]) -> Any:
    return await future


class Schedule:
    """Any order of puts, ends, cancellations and turns of the event loop, and the invariants."""

    def __init__(
        self, items_max: int, at_once: int, waiting_max: int, interrupts: bool, lingers: bool
    ) -> None:
        self.items_max, self.at_once, self.waiting_max = items_max, at_once, waiting_max
        self.begun: list[_Batch] = []
        self.batcher = _SomeSerial(
            self.commit,
            name="the store",
            items_max=items_max,
            waiting_max=waiting_max,
            at_once=at_once,
            linger_s=1.0 if lingers else 0.0,
            interrupts=interrupts,
        )
        self.number = 0
        self.waiting: dict[str, list[int]] = defaultdict(list)
        self.puts: list[list[int]] = []
        self.tasks: list[tuple[str, list[int], asyncio.Task[Any]]] = []
        self.cancelled: set[int] = set()
        self.failed: set[int] = set()

    def commit(self, batches: Sequence[_Batch]) -> None:
        for batch in batches:
            waiting = self.waiting[batch.key]
            under_way = sum(each.key == batch.key for each in self.begun)
            assert under_way < self.at_once
            assert under_way == 0 or len(waiting) >= self.items_max
            assert 0 < len(batch.items) <= self.items_max or batch.items in self.puts
            assert batch.items == waiting[: len(batch.items)]
            del waiting[: len(batch.items)]
            self.begun.append(batch)

    async def step(self, what: str, key: str, number: int) -> None:
        if what == "put":
            items = [self.number + at for at in range(1 + number % (self.items_max + 2))]
            self.number += len(items)
            has_room = len(self.waiting[key]) + len(items) <= self.waiting_max
            if not has_room:
                with pytest.raises(OverloadedError):
                    self.batcher.put(key, items)
                return
            self.waiting[key] += items
            self.puts.append(items)
            future = self.batcher.put(key, items)
            self.tasks.append((key, items, asyncio.create_task(outcome(future))))
        elif what == "turn":
            await asyncio.sleep(0)
        elif what == "cancel" and self.tasks:
            at = number % len(self.tasks)
            self.tasks[at][2].cancel()
            self.cancelled.add(at)
        elif self.begun:
            batch = self.begun.pop(number % len(self.begun))
            if what == "fail":
                self.failed.update(batch.items)
                batch.end_all(WriteTimeoutError("late"))
            else:
                batch.end(results(batch.key, batch.items))

    async def finish(self) -> None:
        closing = asyncio.create_task(self.batcher.close())
        while not closing.done():
            await self.step("end", "", 0)
            await asyncio.sleep(0.1)
        assert not any(self.waiting.values())
        for at, (key, items, task) in enumerate(self.tasks):
            with suppress(asyncio.CancelledError):
                found = await task
                expected = results(key, items)
                for item, one, each in zip(items, expected, found, strict=True):
                    assert (
                        isinstance(each, WriteTimeoutError) if item in self.failed else each == one
                    )
            assert not task.cancelled() or at in self.cancelled


_STEPS = st.tuples(
    st.sampled_from(["put", "put", "put", "turn", "turn", "end", "end", "fail", "cancel"]),
    st.sampled_from("ab"),
    st.integers(0, 20),
)


@given(
    steps=st.lists(_STEPS, max_size=60),
    items_max=st.integers(1, 4),
    at_once=st.integers(1, 3),
    waiting_max=st.integers(4, 9),
    interrupts=st.booleans(),
    lingers=st.booleans(),
)
def test_in_every_order_of_events_each_item_is_committed_once_and_answered(
    steps: list[tuple[str, str, int]],
    items_max: int,
    at_once: int,
    waiting_max: int,
    interrupts: bool,
    lingers: bool,
) -> None:
    """Within the bounds, in order, and each caller gets its own outcomes."""

    async def run() -> None:
        schedule = Schedule(items_max, at_once, waiting_max, interrupts, lingers)
        for step in steps:
            await schedule.step(*step)
        await schedule.finish()

    virtually(run())


async def some_turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_an_overdue_batch_holds_back_no_other(commits: Commits) -> None:
    """While a batch takes too long the next ones leave, as many at once as may be under way."""
    batcher = _Batcher(
        commits, name="the store", items_max=3, waiting_max=10, at_once=2, patience_s=0.0
    )
    waits = [batcher.put("a", [item]) for item in (1, 2)]
    await some_turns()
    waits += [batcher.put("a", [item]) for item in (3, 4)]
    await some_turns()
    waits.append(batcher.put("a", [5]))
    await some_turns()
    assert commits.items == [("a", [1, 2]), ("a", [3, 4])]
    commits.end_first()
    await some_turns()
    assert commits.items == [("a", [3, 4]), ("a", [5])]
    commits.end_all()
    assert await asyncio.gather(*waits) == [["a1"], ["a2"], ["a3"], ["a4"], ["a5"]]
    await batcher.close()


async def test_items_behind_an_overdue_batch_are_sent(commits: Commits) -> None:
    """No further put is needed."""
    batcher = _Batcher(
        commits, name="the store", items_max=3, waiting_max=10, at_once=2, patience_s=0.0
    )
    waits = [batcher.put("a", [1])]
    batcher.commit_ready()
    waits.append(batcher.put("a", [2]))
    assert commits.items == [("a", [1])]
    await some_turns()
    assert commits.items == [("a", [1]), ("a", [2])]
    commits.end_all()
    assert await asyncio.gather(*waits) == [["a1"], ["a2"]]
    await batcher.close()


_ROUNDING_S = 1e-9


class Loaded:
    """A store whose commits take 0.5 ms, on virtual time; the items of each commit."""

    COMMIT_S = 0.0005

    def __init__(self, *, is_serial: bool = False) -> None:
        self.batcher = (_SomeSerial if is_serial else _Batcher)(
            self._commit,
            name="the store",
            items_max=100,
            waiting_max=1_000,
            at_once=2,
            linger_s=0.002,
        )
        self.commits: list[int] = []
        self.longest_s = 0.0

    def _commit(self, batches: Sequence[_Batch]) -> None:
        for batch in batches:
            self.commits.append(len(batch.items))
            asyncio.get_running_loop().call_later(self.COMMIT_S, batch.end_all, "")

    async def put(self) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await self.batcher.put("b", [1])
        self.longest_s = max(self.longest_s, loop.time() - began_s)

    async def put_repeatedly(self, times: int) -> None:
        for _ in range(times):
            await self.put()

    async def put_at_pace(self, every_s: float, times: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(times):
                tasks.create_task(self.put())
                await asyncio.sleep(every_s)


def test_at_half_load_batches_linger_for_company() -> None:
    """An item waits for its commit, the one before, and 2 ms."""
    store = Loaded()
    virtually(store.put_at_pace(0.0001, 1_000))
    assert len(store.commits) < 1_000 / 15
    assert store.longest_s < 0.002 + 2 * store.COMMIT_S + _ROUNDING_S


@pytest.mark.parametrize("every_s", [0.0004, 0.002], ids=["few", "lone"])
def test_few_items_do_not_linger(every_s: float) -> None:
    store = Loaded()
    virtually(store.put_at_pace(every_s, 100))
    assert store.longest_s < 2 * store.COMMIT_S + _ROUNDING_S


@pytest.mark.parametrize("callers", [1, 2, 8, 23])
def test_a_batch_leaves_when_all_callers_wait_in_it(callers: int) -> None:
    """Callers that send their next item when the last one is answered are not held up."""
    store = Loaded()

    async def load() -> None:
        await asyncio.gather(*(store.put_repeatedly(50) for _ in range(callers)))

    virtually(load())
    assert store.longest_s < 2 * store.COMMIT_S + _ROUNDING_S


def test_callers_that_left_are_waited_for_once() -> None:
    store = Loaded()

    async def load() -> None:
        await asyncio.gather(*(store.put_repeatedly(50) for _ in range(20)))
        store.longest_s = 0.0
        store.commits.clear()
        await asyncio.gather(*(store.put_repeatedly(50) for _ in range(10)))

    virtually(load())
    assert len(store.commits) == 50
    assert store.longest_s < 0.002 + 2 * store.COMMIT_S + _ROUNDING_S


def test_a_full_batch_does_not_linger() -> None:
    store = Loaded()

    async def load() -> None:
        await asyncio.gather(*(store.put_repeatedly(50) for _ in range(64)))

    virtually(load())
    assert store.longest_s < 2 * store.COMMIT_S + _ROUNDING_S


@pytest.mark.parametrize(("is_serial", "size"), [(False, 32), (True, 64)])
def test_batches_that_a_store_does_one_by_one_have_an_item_of_each_caller(
    is_serial: bool, size: int
) -> None:
    """Here half of the callers come while the batch of the others is under way."""
    store = Loaded(is_serial=is_serial)

    async def repeat(after_s: float) -> None:
        await asyncio.sleep(after_s)
        await store.put_repeatedly(50)

    async def load() -> None:
        await asyncio.gather(*(repeat(number % 2 * store.COMMIT_S / 2) for number in range(64)))

    virtually(load())
    assert {*store.commits[4:-4]} == {size}


def test_an_idle_batcher_that_lingered_is_closed_at_once_or_after_its_time() -> None:
    store = Loaded()

    async def load() -> None:
        await store.put_at_pace(0.0001, 100)
        await store.batcher.close()
        assert not store.batcher._queues

    virtually(load())
