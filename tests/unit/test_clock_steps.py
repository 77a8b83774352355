"""A clock that is set while the service runs over SQLite, or between two starts of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, patch

import pytest

from counter.clock import SystemClock, to_rfc3339
from counter.core.clock_guard import StepGuard
from counter.errors import ClockSkewError
from counter.limits import CLOCK_HOLD_US, CLOCK_STEP_MAX_US
from counter.storage.sqlite.offline import inspect
from counter.testing.clock import FakeClock
from counter.types import ClockReading
from tests.support.app import App
from tests.support.rest import fresh
from tests.support.times import DAY, HOUR, MINUTE, SECOND, START_US

STEP_US = 2 * HOUR


class MachineClock(SystemClock):
    """A machine's clocks in the test's hand: the wall clock can be set."""

    def __init__(self) -> None:
        super().__init__()
        self.true_us = START_US
        self.set_us = 0
        #: Runs once, right after the next reading of the wall clock.
        self.then: Any = None

    def wall_us(self) -> int:
        wall_us = self.true_us + self.set_us
        then, self.then = self.then, None
        if then is not None:
            then()
        return wall_us

    def boottime_us(self) -> int:
        return self.true_us - START_US + DAY

    def advance(self, us: int) -> None:
        self.true_us += us

    def restarted(self) -> "MachineClock":
        """The same machine's clock, as another process sees it."""
        other = MachineClock()
        other.true_us, other.set_us = self.true_us, self.set_us
        return other


@pytest.fixture
async def app(fast_dir: Path) -> AsyncIterator[App]:
    """A service with short slices, and one acknowledged add."""
    app = App("sqlite", fast_dir, small=True)
    app.clock = MachineClock()  # type: ignore[assignment]
    await app.start()
    await add(app)
    yield app
    await app.stop()


async def add(app: App, **more: Any) -> Any:
    """An add of a client with a right clock."""
    return await app.rest.add("c", 1, fresh(app.clock.true_us), **more)  # type: ignore[attr-defined]


async def restart(app: App) -> None:
    await app.stop()
    app.clock = app.clock.restarted()  # type: ignore[attr-defined]
    await app.start()


def stored(app: App) -> Any:
    """Slices, watermarks, and the time before which all is dropped, as they are."""
    store: Any = app.application.store
    return (
        dict(store.database.slices),
        dict(store.database.watermarks),
        dict(store.database.dropped_before),
    )


async def maintain(app: App) -> None:
    """The attempts of a worker; its health shows the refusal."""
    for _ in range(3):
        with suppress(ClockSkewError):
            await app.application.worker.tick()


@pytest.mark.parametrize("step_us", [300 * SECOND, STEP_US])
async def test_a_jump_ahead_and_back_leaves_no_trace(app: App, step_us: int) -> None:
    """While it lasts, adds are refused and no token is judged; then all goes on at once."""
    clock: Any = app.clock
    app.clock.advance(MINUTE)
    before = stored(app)
    clock.set_us = step_us
    token = fresh(clock.true_us)
    for _ in range(5):
        answer = await app.rest.add("c", 1, token)
        assert (answer.status_code, answer.json()["code"]) == (503, "clock_skew")
        assert answer.json()["applied"] is None
        assert (await app.http.post("/v1/tokens", json={})).status_code == 503
        assert (await app.http.get("/readyz")).json()["code"] == "clock_skew"
        assert await app.rest.count("c") == 1
        await maintain(app)
        clock.advance(SECOND)
    assert stored(app) == before
    clock.set_us = 0
    # As it does every two seconds; an add that comes first is refused once more.
    await app.application.guard.measure()
    assert (await app.rest.add("c", 1, token)).status_code == 200
    assert (await app.http.get("/readyz")).status_code == 200
    (issued,) = (await app.http.post("/v1/tokens", json={})).json()["tokens"]
    assert issued["generation_time"] == to_rfc3339(clock.true_us)
    clock.advance(2 * MINUTE)
    await maintain(app)
    assert await app.rest.count("c") == 2
    assert await app.rest.count("c", "1h") == 2


async def test_a_step_ahead_that_stays_is_followed_and_drops_nothing(app: App) -> None:
    """A virtual machine that stood still: its clock is right now, and clients' are."""
    clock: Any = app.clock
    clock.set_us = STEP_US
    answer = await add(app)
    assert int(answer.headers["retry-after"]) == CLOCK_HOLD_US // SECOND
    clock.advance(CLOCK_HOLD_US)
    await maintain(app)
    token = fresh(clock.true_us + STEP_US)
    assert (await app.rest.add("c", 1, token)).status_code == 200
    clock.advance(10 * MINUTE)
    await maintain(app)
    assert await app.rest.count("c", "1h") == 2
    assert stored(app)[2] == {1: 0}, "nothing is dropped: the boot clock says that it is too early"
    clock.advance(STEP_US)
    for _ in range(3):
        await maintain(app)
    assert stored(app)[2] != {1: 0}


@pytest.mark.parametrize("step_us", [2 * MINUTE + SECOND, STEP_US])
async def test_a_key_is_remembered_for_its_time_though_the_clock_is_set(
    app: App, step_us: int
) -> None:
    """Expired by a clock that was set ahead, it would be counted a second time."""
    clock: Any = app.clock
    settled = await app.http.put("/v1/namespaces/default", json={"key_ttl": "2m"})
    assert settled.status_code == 200, settled.text
    assert (await app.rest.add("c", 1, key="order-1")).status_code == 200
    clock.set_us = step_us
    await maintain(app)
    clock.advance(CLOCK_HOLD_US)
    for _ in range(2):
        await maintain(app)
    answer = await app.rest.add("c", 1, key="order-1")
    if step_us < STEP_US:
        assert answer.json().get("replayed") is True, answer.text
    else:
        # Past retention by the clock that is followed: nothing is known of it, and nothing is done.
        assert (answer.status_code, answer.json()["applied"]) == (410, None)
    assert await app.rest.count("c") == 2


async def test_a_reading_of_a_moment_ahead_decides_nothing(app: App) -> None:
    """The wall clock is ahead for one reading, and right again when it is compared."""
    clock: Any = app.clock

    def back() -> None:
        clock.set_us = 0

    clock.set_us, clock.then = STEP_US, back
    answer = await app.http.post("/v1/tokens", json={})
    assert answer.json()["code"] == "clock_skew"
    answer = await app.http.post("/v1/tokens", json={})
    assert answer.status_code == 200
    assert clock.now_us() == clock.true_us


async def test_a_clock_that_is_set_back_catches_up_first(app: App) -> None:
    """The wait is the true one, and no token is judged during it."""
    clock: Any = app.clock
    clock.set_us = -HOUR
    answer = await add(app)
    assert answer.json()["code"] == "clock_skew"
    assert int(answer.headers["retry-after"]) == HOUR // SECOND
    clock.advance(HOUR // 2)
    ready = await app.http.get("/readyz")
    assert int(ready.headers["retry-after"]) == HOUR // 2 // SECOND
    clock.advance(HOUR // 2)
    await maintain(app)
    answer = await app.rest.add("c", 1, fresh(clock.true_us - HOUR))
    assert answer.status_code == 200, answer.text


async def test_a_small_step_is_followed_at_once(app: App) -> None:
    clock: Any = app.clock
    for step_us in (CLOCK_STEP_MAX_US, 0, -CLOCK_STEP_MAX_US, 0):
        clock.advance(SECOND)
        clock.set_us = step_us
        assert (await add(app)).status_code == 200


async def test_a_start_behind_the_stored_time_waits_and_logs_it(app: App) -> None:
    """The clock was two hours ahead long enough to be followed; the restart has the right one."""
    clock: Any = app.clock
    clock.set_us = STEP_US
    await maintain(app)
    clock.advance(CLOCK_HOLD_US)
    await maintain(app)
    clock.set_us = 0
    await restart(app)
    clock = app.clock
    answer = await add(app)
    assert answer.json()["code"] == "clock_skew"
    assert "behind" in answer.json()["detail"]
    wait_s = int(answer.headers["retry-after"])
    assert STEP_US - MINUTE < wait_s * SECOND <= STEP_US
    before = stored(app)
    await maintain(app)
    assert stored(app) == before
    ready = await app.http.get("/readyz")
    assert (ready.status_code, ready.json()["code"]) == (503, "clock_skew")
    metrics = (await app.http.get("/metrics")).text
    assert "counter_clock_out_of_bounds 1.0" in metrics
    clock.advance(wait_s * SECOND)
    await maintain(app)
    assert (await add(app)).status_code == 200
    assert await app.rest.count("c") == 2


async def test_a_directory_whose_first_clock_was_ahead_begins_again(fast_dir: Path) -> None:
    """As long as nothing was counted, nothing is lost by it."""
    app = App("sqlite", fast_dir)
    app.clock = clock = MachineClock()  # type: ignore[assignment]
    clock.set_us = 2 * DAY
    await app.start()
    clock.set_us = 0
    await restart(app)
    assert (await app.http.get("/readyz")).status_code == 200
    assert (await add(app)).status_code == 200
    app.clock.advance(2 * MINUTE)
    await maintain(app)
    assert await app.rest.count("c", "1h") == 1
    await app.stop()


async def test_a_directory_that_a_wrong_clock_counted_in_says_so(fast_dir: Path) -> None:
    """And so does a look from outside, while the service runs and when it does not."""
    app = App("sqlite", fast_dir)
    app.clock = clock = MachineClock()  # type: ignore[assignment]
    clock.set_us = 2 * DAY
    await app.start()
    assert (await app.rest.add("c", 1, fresh(clock.now_us()))).status_code == 200
    clock.set_us = 0
    await restart(app)
    ready = await app.http.get("/readyz")
    assert ready.json()["code"] == "clock_skew"
    assert "behind" in ready.json()["detail"]
    assert await app.rest.count("c") == 1
    counted_us = clock.true_us + 2 * DAY
    assert abs(inspect(fast_dir)[1] - counted_us) < MINUTE
    await app.stop()
    assert abs(inspect(fast_dir)[1] - counted_us) < MINUTE


async def test_a_measurement_that_began_before_another_does_not_end_after_it(app: App) -> None:
    """Its older result must not replace the newer one."""
    guard, store = app.application.guard, app.application.store
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def answers_late() -> ClockReading:
        asked.set()
        await go_on.wait()
        return ClockReading(0, 0)

    with patch.object(store.control, "read_clock", answers_late):
        first = asyncio.create_task(guard.measure())
        await asked.wait()
    with patch.object(store.control, "read_clock", AsyncMock(return_value=ClockReading(MINUTE, 0))):
        second = asyncio.create_task(guard.measure())
        go_on.set()
        await asyncio.gather(first, second)
    assert guard.trouble is not None


def test_a_pause_while_the_wall_clock_is_read_widens_the_reading() -> None:
    """A reading that seemed exact would make the pause look like a step."""

    class Paused(FakeClock):
        def wall_us(self) -> int:
            self.advance(SECOND)
            return super().wall_us()

    guard = StepGuard.__new__(StepGuard)
    guard._clock = Paused(START_US)
    assert guard._pair().width_us == SECOND
