"""The clock of a PostgreSQL server is set while the service runs, or between two starts of it."""

from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from counter.clock import StoreClock, to_rfc3339
from counter.config.settings import Settings
from counter.errors import ClockSkewError, UnavailableError
from counter.limits import CLOCK_HOLD_US, STORE_CLOCK_STEP_MAX_US
from counter.storage.postgresql.database import PostgresqlOptions
from counter.testing.clock import FakeClock
from scripts.postgresql_server import PostgresqlServer
from tests.support.app import SLOW, SMALL, App
from tests.support.postgresql import ClockedStore, FreshStore
from tests.support.rest import fresh
from tests.support.times import HOUR, MINUTE, SECOND, START_US

STEP_US = 2 * HOUR


class ServerClock(FakeClock):
    """The server's clock, which can be set."""

    set_us = 0

    @property
    def true_us(self) -> int:
        return super().now_us()

    def now_us(self) -> int:
        return self.true_us + self.set_us


class ProcessClock(StoreClock):
    """The clock of a process; its boot clock moves with the test's time."""

    def __init__(self, server: ServerClock) -> None:
        self._server = server
        super().__init__()

    def boottime_us(self) -> int:
        return self._server.boottime_us()


class Service(App):
    """One process after another over one server."""

    def __init__(self, server: PostgresqlServer, directory: Path) -> None:
        super().__init__("postgresql", directory, small=True, **SLOW)
        self.server_clock = ServerClock(START_US)
        self._options = PostgresqlOptions(server.dsn(), schema="kept")
        dataset = replace(Settings(**SMALL | SLOW).dataset(), id=1)
        self._datasets = [dataset]

    async def start(self) -> None:
        self.clock: Any = ProcessClock(self.server_clock)
        if self._datasets:
            kept = FreshStore(
                self._options, self.server_clock, self._datasets, keeps_schema=True, own=self.clock
            )
            self._new_store = lambda: kept
        else:
            self._new_store = lambda: ClockedStore(self._options, self.server_clock, self.clock)
        self._datasets = []
        await super().start()

    async def set_clock(self, step_us: int) -> None:
        """Set the server's clock; the process notices within two seconds."""
        self.server_clock.set_us = step_us
        await self.application.guard.measure()

    async def pass_time(self, us: int) -> None:
        self.server_clock.advance(us)
        await self.application.service.namespaces.refresh()

    async def maintain(self) -> None:
        """The attempts of a worker; its health shows their refusal."""
        for _ in range(3):
            with suppress(ClockSkewError, UnavailableError):
                await self.application.worker.tick()

    async def add(self) -> Any:
        """An add of a client with a right clock."""
        return await self.rest.add("c", 1, fresh(self.server_clock.true_us))

    async def stored(self) -> Any:
        """Slices, watermarks, the fence, the time before which all is dropped, as they are."""
        rows = self.store._database.rows
        return [
            [tuple(row) for row in await rows(f"SELECT {what} ORDER BY 1")]
            for what in (
                "start, retired_at FROM {s}.slices",
                "through FROM {s}.watermarks",
                "dropped_before FROM {s}.datasets",
                "time FROM {s}.tokens",
            )
        ] + [
            [
                row[0] > self.server_clock.true_us
                for row in await rows("SELECT fence FROM {s}.datasets")
            ]
        ]


@pytest.fixture
async def app(postgresql: PostgresqlServer, tmp_path: Path) -> AsyncIterator[Service]:
    """A service with short slices, and one acknowledged add."""
    app = Service(postgresql, tmp_path)
    await app.start()
    assert (await app.add()).status_code == 200
    yield app
    await app.stop()


@pytest.mark.parametrize("step_us", [300 * SECOND, STEP_US])
async def test_a_jump_ahead_and_back_leaves_no_trace(app: Service, step_us: int) -> None:
    """No fence is passed at such a time, and no token is judged; then all goes on at once."""
    await app.pass_time(MINUTE)
    await app.maintain()
    before = await app.stored()
    app.server_clock.set_us = step_us
    # Not noticed yet: refusals of the server are pending, and a worker closes no window.
    token = fresh(app.server_clock.true_us)
    await app.maintain()
    answer = await app.rest.add("c", 1, token)
    assert (answer.status_code, answer.json()["applied"]) == (503, None)
    await app.application.guard.measure()
    for _ in range(5):
        answer = await app.rest.add("c", 1, token)
        assert (answer.status_code, answer.json()["code"]) == (503, "clock_skew")
        assert (await app.http.post("/v1/tokens", json={})).status_code == 503
        assert (await app.http.get("/readyz")).json()["code"] == "clock_skew"
        assert await app.rest.count("c") == 1
        await app.maintain()
        await app.pass_time(SECOND)
    assert await app.stored() == before
    await app.set_clock(0)
    assert (await app.rest.add("c", 1, token)).status_code == 200
    assert (await app.http.get("/readyz")).status_code == 200
    (issued,) = (await app.http.post("/v1/tokens", json={})).json()["tokens"]
    assert issued["generation_time"] == to_rfc3339(app.server_clock.true_us)
    await app.pass_time(2 * MINUTE)
    await app.maintain()
    assert await app.rest.count("c") == await app.rest.count("c", "1h") == 2


async def test_a_step_ahead_that_stays_is_followed_and_drops_nothing(app: Service) -> None:
    """The promoted server's clock is right, and the old one's was not."""
    await app.set_clock(STEP_US)
    answer = await app.add()
    assert int(answer.headers["retry-after"]) == CLOCK_HOLD_US // SECOND
    await app.pass_time(CLOCK_HOLD_US)
    await app.maintain()
    token = fresh(app.server_clock.now_us())
    assert (await app.rest.add("c", 1, token)).status_code == 200
    await app.pass_time(10 * MINUTE)
    await app.maintain()
    assert await app.rest.count("c", "1h") == 2
    assert (await app.stored())[2] == [(0,)], "the boot clock says that it is too early"
    await app.pass_time(STEP_US)
    await app.maintain()
    assert (await app.stored())[2] != [(0,)]


async def test_a_key_is_remembered_for_its_time_though_the_clock_is_set(app: Service) -> None:
    settled = await app.http.put("/v1/namespaces/default", json={"key_ttl": "2m"})
    assert settled.status_code == 200, settled.text
    assert (await app.rest.add("c", 1, key="order-1")).status_code == 200
    await app.set_clock(2 * MINUTE + SECOND)
    await app.maintain()
    await app.pass_time(CLOCK_HOLD_US)
    await app.maintain()
    answer = await app.rest.add("c", 1, key="order-1")
    assert answer.json().get("replayed") is True, answer.text
    assert await app.rest.count("c") == 2


async def test_a_start_behind_the_fence_waits_and_says_so(app: Service) -> None:
    """The clock was two hours ahead long enough to be followed, and is then corrected."""
    await app.set_clock(STEP_US)
    await app.pass_time(CLOCK_HOLD_US)
    await app.maintain()
    await app.set_clock(0)
    for _ in range(2):
        answer = await app.add()
        assert answer.json()["code"] == "clock_skew"
        assert "behind" in answer.json()["detail"]
        wait_us = int(answer.headers["retry-after"]) * SECOND
        assert STEP_US - MINUTE < wait_us <= STEP_US
        ready = await app.http.get("/readyz")
        assert (ready.status_code, ready.json()["code"]) == (503, "clock_skew")
        assert "counter_clock_out_of_bounds 1.0" in (await app.http.get("/metrics")).text
        assert await app.rest.count("c") == 1
        await app.restart()
    await app.pass_time(wait_us)
    assert (await app.add()).status_code == 200
    assert await app.rest.count("c") == 2


async def test_a_step_that_no_token_can_notice_is_followed_at_once(app: Service) -> None:
    for step_us in (STORE_CLOCK_STEP_MAX_US, 0, -STORE_CLOCK_STEP_MAX_US, 0):
        await app.pass_time(2 * STORE_CLOCK_STEP_MAX_US)
        await app.set_clock(step_us)
        assert (await app.rest.add("c", 1, fresh(app.clock.now_us()))).status_code == 200
