"""After a failover to a synchronous standby acknowledged adds are there, and tokens have one
answer."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from counter.clock import SystemClock
from counter.errors import WriteTimeoutError
from counter.limits import SECOND
from counter.storage.postgresql import session
from counter.storage.postgresql.database import PostgresqlOptions
from counter.storage.postgresql.store import PostgresqlStore
from counter.testing.cases import atomic
from counter.types import Written
from tests.chaos.run import Play
from tests.chaos.site import config_of
from tests.postgresql.pair import BEHIND_US, Pair
from tests.postgresql.test_faults import added, is_unknown, service
from tests.simulation.plan import Config
from tests.support.rest import Rest, fresh
from tests.support.waiting import eventually

#: Adds that wait for the standby until they time out: on a busy machine, too, they are committed on
#: the primary by then, and their tokens are not too old.
PATIENT: dict[str, Any] = {"write_timeout": "1s", "accept_limit": "1m"}


@pytest.fixture
def no_proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections have no proof to renew: without the standby they would send nothing then."""
    monkeypatch.setattr(session, "_PROVEN_S", 1e9)


@pytest.mark.usefixtures("no_proofs")
async def test_a_replay_is_acknowledged_when_the_standby_has_the_add(pair: Pair) -> None:
    """An add that timed out is committed on the primary alone, and its token is found."""
    await pair.begin(**PATIENT)
    async with service(pair.dsn, **PATIENT) as rest:
        await added(rest, "before")
        token, atom = fresh(time.time_ns() // 1_000), fresh(time.time_ns() // 1_000)
        pair.standby.pause()
        for _ in range(2):
            assert is_unknown(await rest.add("c", 1, token))
            assert is_unknown(await rest.atomic_add([("a", 1), ("b", 1)], atom))
        pair.primary.pause()
        pair.standby.resume()
        await asyncio.to_thread(pair.fail_over)

        async def acknowledged() -> bool:
            one = await rest.add("c", 1, token)
            both = await rest.atomic_add([("a", 1), ("b", 1)], atom)
            return one.status_code == both.status_code == 200

        await eventually(acknowledged, "the standby is found")
        assert [await rest.count(name) for name in "abc"] == [1, 1, 2]


@pytest.mark.usefixtures("no_proofs")
async def test_a_conflict_is_reported_when_the_standby_has_its_evidence(pair: Pair) -> None:
    """With the header of an atomic add, or with one of its items."""
    await pair.begin(**PATIENT)
    async with service(pair.dsn, **PATIENT) as rest:
        await added(rest, "before")
    clock = SystemClock()
    store = PostgresqlStore(PostgresqlOptions(pair.dsn), clock)
    await store.open()
    [namespace] = await store.control.namespaces()
    now_us = clock.now_us()
    whole, other = (atomic(("a", delta), ("b", 1), at=now_us, number=1) for delta in (1, 2))
    [item, _] = atomic(("a", 7), ("b", 1), at=now_us, number=2)
    clashing = atomic(("a", 1), ("b", 1), at=now_us, number=2)
    pair.standby.pause()
    for put in (
        store.events.append_atomic(namespace, whole),
        store.events.append(namespace, [item]),
        store.events.append_atomic(namespace, other),
        store.events.append_atomic(namespace, clashing),
    ):
        with pytest.raises(WriteTimeoutError):
            await put
    pair.standby.resume()
    for events in (other, clashing):
        assert await store.events.append_atomic(namespace, events) is Written.CONFLICT
    await store.close()


class Place:
    """Two services of this process, as clients of the simulation see them."""

    apis = 2
    has_transactions = True

    def __init__(self, config: Config, services: list[Rest]) -> None:
        self.config = config
        self._services = services
        self.created_us = self.true_us

    @property
    def true_us(self) -> int:
        return time.time_ns() // 1_000

    async def request(
        self,
        api: int,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, dict[str, Any]]:
        http = self._services[api].http
        answer = await http.request(method, path, json=body, headers=headers)
        return answer.status_code, answer.json()


async def test_the_checker_of_the_simulation_judges_a_failover(pair: Pair) -> None:
    """Clients add, clear, retry and read while the primary is killed; then all is asked again."""
    config = replace(
        config_of(7, apis=2, workers=0),
        payload_check="strict",
        offsets_us=(0, 0),
        # Reads use the promoted server's clock.
        wrong_us=BEHIND_US + SECOND,
        end_us=3 * SECOND,
    )
    dataset = {"retention": "1h", "slice": "10m", "write_timeout": "1s"}
    given: dict[str, Any] = {**dataset, "rollup": True, "rollup_window": "1s", "accept_limit": "2s"}
    await pair.begin(**dataset)
    async with service(pair.dsn, **given) as one, service(pair.dsn, **given) as other:
        for name, counter_type in config.namespaces:
            made = await one.within(name).create(
                counter_type, rollup_window="1s", accept_limit="2s", shards=config.shards
            )
            assert made.status_code == 201, made.text
        place = Place(config, [one, other])
        plays = [Play(place, number) for number in range(4)]
        running = asyncio.gather(*(each.run() for each in plays))
        await asyncio.sleep(config.end_us / 2 / SECOND)
        await asyncio.to_thread(pair.fail_over)
        await running
        found = await asyncio.gather(*(each.judge() for each in plays))
    applied = sum(
        item.applied_us is not None
        for each in plays
        for changed in each.clients.history.changes
        for item in changed.items
    )
    assert applied > 0
    assert [problem for problems in found for problem in problems] == []
