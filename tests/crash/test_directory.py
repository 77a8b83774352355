"""A data directory that is held, read-only, damaged or full: a clear word, and nothing lost."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.disk import Disk, mounted
from tests.support.problems import assert_problem
from tests.support.rest import Rest, new_token
from tests.support.server import Server, refused, serving
from tests.support.waiting import eventually

#: On a busy machine an add can take longer than half a second.
PATIENT: Mapping[str, str] = {"accept_limit": "30s", "write_timeout": "10s"}


@asynccontextmanager
async def filled(data: Path, logs: Path) -> AsyncIterator[tuple[Server, Rest]]:
    """A service with 3 in the counter ``c``."""
    async with serving(data, logs, **PATIENT) as server, server.client() as rest:
        assert (await rest.add("c", 3, new_token())).status_code == 200
        yield server, rest


async def refusal(data: Path, *names: str, **flags: str) -> None:
    """A start on *data* fails, in words that name the directory, and these."""
    code, message = await asyncio.to_thread(refused, data, **PATIENT, **flags)
    assert code == 2
    assert [each for each in (str(data), *names) if each not in message] == [], message
    assert "Traceback" not in message


@pytest.mark.usefixtures("child_processes")
async def test_a_second_process_learns_who_holds_the_directory(tmp_path: Path) -> None:
    async with filled(tmp_path / "data", tmp_path / "logs") as (server, rest):
        await refusal(tmp_path / "data", str(server.process.pid))
        assert await rest.count("c") == 3
        server.kill()
        await server.start()
        async with server.client() as again:
            assert await again.count("c") == 3


@pytest.mark.usefixtures("child_processes")
async def test_a_second_process_is_refused_when_the_lock_file_was_deleted(tmp_path: Path) -> None:
    """A second process with locks of its own would append events that the first one's sums miss."""
    async with filled(tmp_path / "data", tmp_path / "logs") as (_, rest):
        (tmp_path / "data" / "lock").unlink()
        for _ in range(2):
            await refusal(tmp_path / "data", "is held by")
        assert await rest.count("c") == 3


@pytest.mark.usefixtures("child_processes")
async def test_a_start_that_was_refused_leaves_nothing_behind(tmp_path: Path) -> None:
    """A start that never served must not fix settings for ever."""
    code, message = await asyncio.to_thread(refused, tmp_path / "data", rollup_window="7s")
    assert (code, "rollup_window" in message) == (2, True)
    assert not (tmp_path / "data").exists()


@pytest.mark.usefixtures("child_processes")
async def test_a_data_directory_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("not a directory")
    await refusal(tmp_path / "data")


@pytest.mark.usefixtures("child_processes")
async def test_a_file_that_is_not_a_database_is_left_alone(tmp_path: Path) -> None:
    database = tmp_path / "data" / "counter.db"
    database.parent.mkdir()
    garbage = bytes(range(256)) * 64
    database.write_bytes(garbage)
    await refusal(tmp_path / "data", "counter.db", "backup")
    assert database.read_bytes() == garbage


@pytest.mark.usefixtures("child_processes")
async def test_a_damaged_database_answers_with_a_problem_or_does_not_start(tmp_path: Path) -> None:
    """Pages in the middle are overwritten: no wrong count, and no acknowledged add on top of it."""
    async with serving(tmp_path / "data", tmp_path / "logs") as server:
        async with server.client() as rest:
            for number in range(300):
                await rest.add(f"counter number {number}", 3, new_token())
        await server.stop()
        database = tmp_path / "data" / "counter.db"
        content = bytearray(database.read_bytes())
        for start in range(4_096, len(content), 4_096):
            content[start : start + 2_048] = b"\xa5" * 2_048
        database.write_bytes(content)
        if (code := await server.try_start()) is not None:
            assert code == 2
            assert "Traceback" not in server.output("err")
            return
        async with server.client() as rest:
            for answer in (
                await rest.get("counter number 7", "0s"),
                await rest.add("c", 1, new_token()),
            ):
                if answer.status_code != 200:
                    assert_problem(answer, "store_unavailable")
        server.kill()


@pytest.fixture
def disk(tmp_path: Path, child_processes: None) -> Iterator[Disk]:
    with mounted(tmp_path / "disk", "8m") as disk:
        yield disk


async def test_a_read_only_directory_is_refused_at_the_start(tmp_path: Path, disk: Disk) -> None:
    data = disk.path / "data"
    async with filled(data, tmp_path / "logs") as (server, _):
        await server.stop()
        disk.make_read_only()
        await refusal(data, "ead-only")
        disk.make_writable()
        await server.start()
        async with server.client() as rest:
            assert await rest.count("c") == 3


@pytest.mark.usefixtures("child_processes")
async def test_a_directory_without_permission_is_refused_at_the_start(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere; the read-only disk replaces this test")
    data = tmp_path / "data"
    data.mkdir()
    data.chmod(0o555)
    await refusal(data)


async def test_a_full_disk_loses_nothing_acknowledged_and_heals(tmp_path: Path, disk: Disk) -> None:
    data = disk.path / "data"
    async with filled(data, tmp_path / "logs") as (server, rest):
        disk.fill()
        added, refused_token = 0, new_token()
        for _ in range(20_000):
            answer = await rest.add("full", 1, refused_token)
            if answer.status_code != 200:
                break
            added, refused_token = added + 1, new_token()
        problem = assert_problem(answer, "store_unavailable")
        assert "space" in problem["detail"]
        assert answer.headers["retry-after"]
        for _ in range(3):
            assert (await rest.add("full", 1, new_token())).status_code == 503

        async def is_ready() -> bool:
            return (await rest.http.get("/readyz")).status_code == 200

        async def is_full() -> bool:
            return not await is_ready()

        # Adds that were committed within the last second prove to it that the store works.
        await eventually(is_full, "the process is not ready")
        assert (await rest.http.get("/healthz")).status_code == 200
        assert await rest.count("c") == 3
        assert await rest.count("full") == added
        disk.make_room()

        async def heals() -> bool:
            return (await rest.add("full", 1, new_token())).status_code == 200

        await eventually(heals, "adds are taken again once there is room")
        assert await rest.count("full") == added + 1
        await eventually(is_ready, "the rollup has worked again too")
        assert await server.stop() == 0
        await server.start()
        async with server.client() as again:
            assert await again.count("full") == added + 1
            assert await again.count("c") == 3


async def test_a_service_killed_on_a_full_disk_starts_again_with_room(
    tmp_path: Path, disk: Disk
) -> None:
    data = disk.path / "data"
    async with filled(data, tmp_path / "logs") as (server, rest):
        disk.fill()
        added = 0
        while (await rest.add("full", 1, new_token())).status_code == 200:
            added += 1
        server.kill()
        await refusal(data, "space")
        disk.make_room()
        await server.start()
        async with server.client() as again:
            assert await again.count("full") == added
            assert await again.count("c") == 3
