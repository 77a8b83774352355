"""A server with settings that break the promise is refused, with the value and the fix."""

import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import asyncpg
import pytest
from pydantic import SecretStr

from counter.cli.commands.backup import _begin_new_life
from counter.cli.commands.serve import _applied
from counter.errors import StartupError
from counter.storage.postgresql.database import PostgresqlDatabase, PostgresqlOptions
from counter.storage.postgresql.server import VERSION_MIN, check_server
from counter.storage.postgresql.settings import PostgresqlSettings
from counter.storage.shared.startup_retry import StartupRetry
from counter.testing.cases import DATASET, NOW
from counter.testing.clock import FakeClock
from scripts.postgresql_server import PostgresqlServer
from tests.deploy.test_compose import SERVICES
from tests.support.postgresql import FreshStore


class Answering(PostgresqlDatabase):
    """A database of a server that reports some other settings."""

    reported: dict[str, str]

    async def rows(self, sql: str, *arguments: Any) -> Sequence[Any]:
        return list((dict(await super().rows(sql, *arguments)) | self.reported).items())


@pytest.fixture
async def database(postgresql: PostgresqlServer) -> AsyncIterator[Answering]:
    found = Answering(PostgresqlOptions(postgresql.dsn()))
    found.reported = {}
    await found.open()
    yield found
    await found.close()


async def test_a_good_server_is_not_warned_of(database: Answering) -> None:
    assert await check_server(database) == []


@pytest.mark.parametrize(
    ("reported", "refusal"),
    [
        ({"fsync": "off"}, "fsync = off, and would lose .*: set fsync = on"),
        ({"full_page_writes": "off"}, "set full_page_writes = on"),
        ({"synchronous_commit": "off"}, "set synchronous_commit = on"),
        ({"server_encoding": "SQL_ASCII"}, "encoding SQL_ASCII.*: create one with ENCODING 'UTF8'"),
        (
            {"server_version": "13.22", "server_version_num": "130022"},
            "version 13.22: it must be 14 or newer; upgrade it",
        ),
        ({"client_min_messages": "error"}, "client_min_messages = error, .*: set it to warning"),
        ({"default_transaction_isolation": "serializable"}, "= serializable, .*ALTER ROLE"),
    ],
)
async def test_a_server_that_breaks_the_promise_is_refused(
    database: Answering, reported: dict[str, str], refusal: str
) -> None:
    database.reported = reported
    with pytest.raises(StartupError, match=refusal):
        await check_server(database)


@pytest.mark.parametrize("level", ["local", "remote_write"])
async def test_a_standby_that_a_commit_does_not_wait_for_is_warned_of(
    database: Answering, level: str
) -> None:
    database.reported = {"synchronous_commit": level}
    assert await check_server(database) == []
    database.reported["synchronous_standby_names"] = "*"
    (warning,) = await check_server(database)
    assert f"synchronous_commit = {level}" in warning
    assert "set synchronous_commit = on" in warning


async def test_pages_without_checksums_are_warned_of(database: Answering) -> None:
    database.reported = {"data_checksums": "off"}
    (warning,) = await check_server(database)
    assert "data_checksums = off" in warning
    assert "pg_checksums --enable" in warning


async def test_warnings_are_logged_at_startup(
    postgresql: PostgresqlServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def check(_: PostgresqlDatabase) -> Sequence[str]:
        return ["a setting is weak"]

    monkeypatch.setattr("counter.storage.postgresql.store.check_server", check)
    store = FreshStore(PostgresqlOptions(postgresql.dsn()), FakeClock(NOW), [DATASET])
    await store.open()
    await StartupRetry(0).warn_of_server(store)
    await store.close()
    assert caplog.messages == ["a setting is weak"]


async def test_every_text_key_is_compared_by_its_bytes(postgresql: PostgresqlServer) -> None:
    """So it does not matter which collation the database has."""
    store = FreshStore(PostgresqlOptions(postgresql.dsn()), FakeClock(NOW), [DATASET])
    await store.open()
    others = await store._database.rows(
        "SELECT a.attrelid::regclass::text, a.attname FROM pg_attribute a"
        " JOIN pg_class c ON c.oid = a.attrelid WHERE c.relnamespace = '{s}'::regnamespace"
        " AND EXISTS (SELECT FROM pg_index i WHERE indrelid = c.oid AND attnum = ANY (indkey))"
        " AND a.attcollation NOT IN (0, '\"C\"'::regcollation)"
    )
    await store.close()
    assert [tuple(each) for each in others] == []


async def test_the_doctor_asks_the_server(
    postgresql: PostgresqlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FreshStore(PostgresqlOptions(postgresql.dsn()), FakeClock(NOW), [DATASET])
    await store.open()
    await store.close()
    settings = PostgresqlSettings(store="postgresql", dsn=SecretStr(postgresql.dsn()))
    kind = settings.kind
    found = [each async for each in kind.check(settings, kind.clock())]
    assert [(each.part, each.state) for each in found] == [("store", "ok"), ("clock", "ok")]
    weak = AsyncMock(return_value=["a setting is weak"])
    monkeypatch.setattr("counter.storage.postgresql.store.check_server", weak)
    found = [each async for each in kind.check(settings, kind.clock())]
    assert ("server", "warning", "a setting is weak") in [
        (each.part, each.state, each.detail) for each in found
    ]


async def test_a_role_without_rights_calls_no_function(
    postgresql: PostgresqlServer, tmp_path: Path
) -> None:
    """Not even one that runs with the owner's rights; and a refused change is not audited."""
    store = FreshStore(PostgresqlOptions(postgresql.dsn()), FakeClock(NOW), [DATASET])
    await store.open()
    await store._database.rows(
        "DO $$ BEGIN CREATE ROLE stranger LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$"
    )
    await store._database.rows("GRANT USAGE ON SCHEMA {s} TO stranger")
    stranger = await asyncpg.connect(postgresql.dsn(user="stranger"))
    with pytest.raises(asyncpg.InsufficientPrivilegeError, match="function drop_slice"):
        await stranger.execute("SELECT counter.drop_slice(1, 0)")
    await stranger.close()
    await store.close()
    audit_log = tmp_path / "audit.jsonl"
    dsn = SecretStr(postgresql.dsn(user="stranger"))
    settings = PostgresqlSettings(store="postgresql", dsn=dsn, audit_log=audit_log)
    for work in (_applied, _begin_new_life):
        with pytest.raises(StartupError, match=r"permission denied.*connect as the role that owns"):
            await work(settings)
    assert audit_log.read_bytes() == b""


def test_postgresql_is_of_a_version_that_the_service_takes() -> None:
    major = re.match(r"postgres:(\d+)", SERVICES["postgresql"]["image"])
    assert major is not None
    assert int(major[1]) >= VERSION_MIN
