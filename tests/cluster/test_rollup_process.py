"""``python -m rollup`` as real processes over a real Cassandra: ends in order, dies, shares."""

import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from counter.storage.cassandra.settings import CassandraSettings
from scripts.cluster_nodes import Cluster
from scripts.service_process import free_ports
from tests.rollup.processes import Desk, desk_over, have_their_shares, worker
from tests.support.cassandra import flags_for, settings_over
from tests.support.collector import collecting
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("child_processes")


@pytest.fixture(scope="module")
def settings(cassandra: Cluster) -> CassandraSettings:
    return settings_over(cassandra, copies=1)


@pytest.fixture
async def desk(settings: CassandraSettings) -> AsyncIterator[Desk]:
    async with desk_over(settings) as desk:
        yield desk


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Whatever was started ends with the test."""
    with ExitStack() as stack:
        yield stack


async def test_a_worker_asked_to_end_finishes_and_gives_its_leases_back(
    settings: CassandraSettings, desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 0, no slot is held, no work is lost, and its traces are sent."""
    with collecting() as collector:
        collector.send_here(monkeypatch)
        await _finishes(settings, desk, tmp_path / "log")
    [of_cassandra, *_] = collector.named("store.apply")
    assert "cassandra" in {each.value.string_value for each in of_cassandra.attributes}
    batches = {each.span_id for each in collector.named("rollup.batch")}
    assert of_cassandra.parent_span_id in batches
    with worker(flags_for(settings), tmp_path / "second") as second:
        await second.runs()
        await desk.rolled_up(200, 2)


async def _finishes(settings: CassandraSettings, desk: Desk, log: Path) -> None:
    with worker(flags_for(settings, traces="otlp"), log) as first:
        await first.runs()
        await desk.shared_by(1)
        await desk.add_many(200)
        await desk.rolled_up(200, 1)
        await desk.add_many(200)
        first.process.send_signal(signal.SIGTERM)
        assert await first.ended() == 0, first.output()
        assert list(await desk.store.leases.workers()) == []
        assert "joined" in first.output()
        assert "Traceback" not in first.output()


async def test_two_workers_share_and_take_over_from_a_killed_one(
    settings: CassandraSettings, desk: Desk, stack: ExitStack, tmp_path: Path
) -> None:
    """By lease, within its time: no worker has to notice."""
    ports = free_ports(2)
    one, two = (
        stack.enter_context(worker(flags_for(settings), tmp_path / str(port), port))
        for port in ports
    )
    for each in (one, two):
        await each.runs()
    await desk.shared_by(2)
    await have_their_shares(one, two)
    await desk.add_many(300)
    await desk.rolled_up(300, 1)
    shares = [await each.metric("counter_rollup_counters_total") for each in (one, two)]
    assert min(shares) > 0, "one did all of it"
    assert await one.metric("counter_rollup_workers") == 2
    two.kill()
    await desk.add_many(300)
    await desk.shared_by(1)
    await desk.rolled_up(300, 2)
    three = stack.enter_context(worker(flags_for(settings), tmp_path / "three"))
    await three.runs()
    await desk.shared_by(2)


async def test_health_reports_the_work_of_a_worker(
    settings: CassandraSettings, desk: Desk, tmp_path: Path
) -> None:
    """Ready as soon as it works."""
    (port,) = free_ports(1)
    with worker(flags_for(settings), tmp_path / "log", port) as one:
        await one.runs()

        async def ready() -> bool:
            return (await one.get("/readyz")).status_code == 200

        await eventually(ready, "the worker is ready")
        assert (await one.get("/healthz")).json() == {"status": "alive"}
        assert await one.metric("counter_rollup_up") == 1
        assert abs(await one.metric("counter_clock_offset_seconds")) < 5


async def test_a_second_signal_ends_at_once(settings: CassandraSettings, tmp_path: Path) -> None:
    """Exit code 1: other workers finish its work."""
    with worker(flags_for(settings), tmp_path / "log") as one:
        await one.runs()
        # Stopped, it gets both together, and takes the first one first.
        one.process.send_signal(signal.SIGSTOP)
        one.process.send_signal(signal.SIGTERM)
        one.process.send_signal(signal.SIGINT)
        one.process.send_signal(signal.SIGCONT)
        assert await one.ended() == 1
        assert "a second time" in one.output()


async def test_a_drain_that_takes_too_long_is_cut_off(
    settings: CassandraSettings, tmp_path: Path
) -> None:
    """Exit code 1, and the log says why."""
    with worker(flags_for(settings, drain_timeout="0s"), tmp_path / "log") as one:
        await one.runs()
        one.process.send_signal(signal.SIGINT)
        assert await one.ended() == 1
        assert "draining took longer than 0s" in one.output()


async def cannot_start(flags: list[str], log: Path) -> str:
    """The output of a worker that must end with exit code 2."""
    with worker(flags, log) as one:
        assert await one.ended() == 2, one.output()
        assert "Traceback" not in one.output()
        return one.output()


async def test_a_store_of_one_process_is_refused(tmp_path: Path) -> None:
    """Its owner rolls up itself."""
    said = await cannot_start(["--store=sqlite"], tmp_path / "log")
    assert "counter serve" in said


async def test_a_cluster_that_cannot_be_reached_is_reported(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        point = f"127.0.0.1:{closed.getsockname()[1]}"
        flags = ["--store=cassandra", f"--contact-points={point}", "--start-timeout=1s"]
        waiting, _, ended = (await cannot_start(flags, tmp_path / "log")).partition("counter: ")
        assert "waiting up to 1s for the store: cannot reach Cassandra" in waiting
        assert point in ended


async def test_a_cluster_without_the_schema_is_reported(
    settings: CassandraSettings, tmp_path: Path
) -> None:
    """With the fix."""
    flags = flags_for(settings, keyspace="nothing_here")
    said = await cannot_start(flags, tmp_path / "log")
    assert "counter schema apply" in said


async def test_a_port_that_is_taken_is_reported(
    settings: CassandraSettings, tmp_path: Path
) -> None:
    """Before any work is begun."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        flags = flags_for(settings, metrics_port=str(taken.getsockname()[1]))
        assert "--metrics-port" in await cannot_start(flags, tmp_path / "log")
