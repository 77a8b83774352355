"""Backups as docs/how-to/back-up-and-restore.md has them: a dump, and a recovery to an instant."""

import asyncio
import os
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import asyncpg
import pytest
from pydantic import SecretStr

from counter.limits import SECOND
from counter.storage.postgresql.database import PostgresqlOptions
from counter.storage.postgresql.schema import begin_new_life
from counter.storage.postgresql.settings import PostgresqlSettings
from counter.testing.cases import DATASET, NOW, SETTINGS
from counter.testing.clock import FakeClock
from scripts.postgresql_server import PostgresqlServer, program
from scripts.service_process import free_ports
from tests.support.child import run_python
from tests.support.documents import page
from tests.support.postgresql import FreshStore
from tests.support.rest import Rest
from tests.support.server import serving
from tests.support.servers import postgresql_server
from tests.support.waiting import eventually
from tests.test_readme import compare, defaults, section

pytestmark = pytest.mark.usefixtures("child_processes")


@asynccontextmanager
async def served_by(home: Path, flags: Mapping[str, str]) -> AsyncIterator[Rest]:
    """A service over the server that the environment names."""
    async with serving(home, home.with_suffix(".logs"), **flags) as server, server.client() as rest:
        yield rest


def _counter(*words: str) -> str:
    done = run_python("-m", "counter", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_a_dump_of_postgresql_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = section(page("how-to/back-up-and-restore.md"), "PostgreSQL")
    flags = {**defaults(), "store": "postgresql"}
    with postgresql_server() as database:
        for made in (
            "CREATE ROLE counter_owner LOGIN CREATEDB",
            "CREATE DATABASE counter OWNER counter_owner",
        ):
            database.run("psql", "-qX", "-d", database.dsn(), "-c", made)
        monkeypatch.setenv("PATH", f"{Path(program('pg_dump')).parent}:{os.environ['PATH']}")
        monkeypatch.setenv("COUNTER_DSN", database.dsn("counter", "counter_owner"))
        monkeypatch.setenv("COUNTER_STORE", "postgresql")
        await asyncio.to_thread(_counter, "schema", "apply")
        async with serving(tmp_path / "data", tmp_path / "logs", **flags) as server:
            (port,) = free_ports(1)
            places = {
                "http://127.0.0.1:8081": server.url,
                "127.0.0.1:8091": f"127.0.0.1:{port}",
                "--port 8091": f"--port {port}",
                "@127.0.0.1/": f"@127.0.0.1:{database.port}/",
            }
            await compare(text, places, tmp_path)


async def test_postgresql_is_recovered_to_an_instant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = section(page("how-to/back-up-and-restore.md"), "PostgreSQL")
    archive, recovery = re.findall(r"^```ini\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    [base] = re.findall(r"^pg_basebackup (.*)$", text, re.MULTILINE)
    flags = {**defaults(), "store": "postgresql"}
    monkeypatch.setenv("COUNTER_STORE", "postgresql")
    with TemporaryDirectory() as directory:
        place = Path(directory)
        (place / "wal").mkdir()
        for each in (place, place / "wal"):
            each.chmod(0o777)
        old, new = PostgresqlServer(place / "old"), PostgresqlServer(place / "new")
        base = base.replace("/backups/base", str(new.data))
        try:
            old.start(**_assigned(archive, place))
            monkeypatch.setenv("COUNTER_DSN", old.dsn())
            await asyncio.to_thread(_counter, "schema", "apply")
            old.run("pg_basebackup", f"--dbname={old.dsn()}", *base.split())
            async with served_by(tmp_path / "old", flags) as rest:
                assert (await rest.add("c", 5, key="kept")).status_code == 200
                instant = datetime.now(UTC).isoformat()
                assert (await rest.add("c", 2, key="lost")).status_code == 200
            old.run("psql", "-qX", "-d", old.dsn(), "-c", "SELECT pg_switch_wal()")
            old.stop()
            (new.data / "recovery.signal").touch()
            new.start(**_assigned(recovery, place) | {"recovery_target_time": instant})
            monkeypatch.setenv("COUNTER_DSN", new.dsn())
            await eventually(lambda: _is_promoted(new), "the server is promoted")
            await asyncio.to_thread(_counter, "schema", "restored")
            audited = await asyncio.to_thread(_counter, "audit", "--all")
            assert audited == "default: 1 counter audited, 0 wrong\n"
            async with served_by(tmp_path / "new", flags) as rest:
                assert await rest.count("c") == 5
                assert (await rest.add("c", 5, key="kept")).json()["replayed"] is True
                assert (await rest.add("c", 2, key="lost")).json()["replayed"] is False
                assert await rest.count("c") == 7
        finally:
            old.kill()
            new.kill()


def _assigned(text: str, place: Path) -> dict[str, str]:
    """The settings of a block, for backups that are in *place*."""
    found = re.findall(r"^(\w+) = '?(.*?)'?$", text, re.MULTILINE)
    return {name: value.replace("/backups", str(place)) for name, value in found}


async def _is_promoted(server: PostgresqlServer) -> bool:
    connection = await asyncpg.connect(server.dsn())
    try:
        return not await connection.fetchval("SELECT pg_is_in_recovery()")
    finally:
        await connection.close()


async def test_a_restored_schema_issues_nothing_again(postgresql: PostgresqlServer) -> None:
    store = FreshStore(PostgresqlOptions(postgresql.dsn()), FakeClock(NOW), [DATASET])
    await store.open()
    before = await store.control.create_namespace("before", SETTINGS, NOW)
    assert before is not None
    given = await store.control.lease_tokens(5, NOW + SECOND)
    await begin_new_life(PostgresqlSettings(store="postgresql", dsn=SecretStr(postgresql.dsn())))
    block = await store.control.lease_tokens(1, NOW)
    assert block.issuer != given.issuer
    assert block.time_us == NOW + SECOND
    after = await store.control.create_namespace("after", SETTINGS, NOW)
    assert after is not None
    assert after.id - before.id > 1_000_000
    (found,) = [each for each in await store.control.namespaces() if each.id == before.id]
    assert found.version - before.version == 1_000_000
    await store.close()
