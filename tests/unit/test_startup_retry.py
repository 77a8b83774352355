"""Startup while the store is unavailable, in virtual time."""

import asyncio
import logging

import pytest

from counter.errors import CounterError, StartupError, StoreUnavailableError
from counter.limits import SECOND
from counter.storage.shared.startup_retry import StartupRetry
from tests.support.virtual import virtually


class Store:
    """Unavailable until some time; each attempt takes the planned time."""

    def __init__(self, well_at_s: float, try_s: float = 0.0) -> None:
        self.tries: list[float] = []
        self._well_at_s = well_at_s
        self._try_s = try_s

    async def open(self) -> str:
        loop = asyncio.get_running_loop()
        self.tries.append(loop.time())
        await asyncio.sleep(self._try_s)
        if loop.time() < self._well_at_s:
            raise StoreUnavailableError(f"in trouble, try {len(self.tries)}")
        return "open"


def lines(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if record.name == "counter.start"]


def test_a_store_that_is_well_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    store = Store(0)
    assert virtually(StartupRetry(30 * SECOND).run(store.open)) == "open"
    assert store.tries == [0]
    assert lines(caplog) == []


def test_short_trouble_is_waited_for_and_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """With its cause, at a level that is logged by default."""
    store = Store(20)
    assert virtually(StartupRetry(30 * SECOND).run(store.open)) == "open"
    assert lines(caplog) == ["waiting up to 30s for the store: in trouble, try 1"]
    assert caplog.records[0].levelno == logging.WARNING


def test_tries_are_many_and_grow_rare() -> None:
    """Soon after short trouble is over, the start goes on; a long one is not made worse."""
    store = Store(20)
    virtually(StartupRetry(30 * SECOND).run(store.open))
    assert len([at for at in store.tries if at < 1]) > 3
    assert len(store.tries) < 40
    assert store.tries[-1] < 22


def test_trouble_that_does_not_end_is_raised_in_the_end() -> None:
    """As it was at the last try, which is made when the time is over."""
    store = Store(1_000)

    async def ends() -> float:
        with pytest.raises(StoreUnavailableError) as caught:
            await StartupRetry(30 * SECOND).run(store.open)
        assert caught.value.detail == f"in trouble, try {len(store.tries)}"
        return asyncio.get_running_loop().time()

    assert virtually(ends()) == 30
    assert store.tries[-1] == 30


def test_patience_counts_from_the_first_trouble_on_and_is_one_for_all() -> None:
    """A start that is slow, and well, loses none of it; one step after another gets no more."""
    slow, again = Store(40, try_s=25), Store(1_000)

    async def both() -> float:
        retry = StartupRetry(30 * SECOND)
        await retry.run(slow.open)
        with pytest.raises(StoreUnavailableError):
            await retry.run(again.open)
        return asyncio.get_running_loop().time()

    assert virtually(both()) == 25 + 30
    assert slow.tries[0] == 0
    assert 25 <= slow.tries[1] <= 26


def test_without_patience_the_first_trouble_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    store = Store(1)
    with pytest.raises(StoreUnavailableError):
        virtually(StartupRetry(0).run(store.open))
    assert store.tries == [0]
    assert lines(caplog) == []


@pytest.mark.parametrize("error", [StartupError("no schema"), CounterError("a bug"), KeyError()])
def test_a_permanent_error_is_raised_at_once(error: Exception) -> None:
    tries = 0

    async def work() -> None:
        nonlocal tries
        tries += 1
        raise error

    with pytest.raises(type(error)):
        virtually(StartupRetry(30 * SECOND).run(work))
    assert tries == 1
