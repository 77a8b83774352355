"""Permanent errors are refused with the value and the fix; transient ones are waited for."""

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from shutil import chown, copy
from unittest.mock import patch

import asyncpg
import pytest

from counter.clock import SystemClock
from counter.errors import StartupError, StoreUnavailableError
from counter.limits import MILLISECOND, SECOND
from counter.storage.postgresql.database import PostgresqlDatabase, PostgresqlOptions
from counter.storage.postgresql.schema import SCHEMA_VERSION, apply_for, apply_schema
from counter.storage.postgresql.settings import PostgresqlSettings
from counter.storage.postgresql.store import PostgresqlStore
from counter.storage.shared.startup_retry import StartupRetry
from counter.testing.cases import DATASET
from scripts.postgresql_server import PostgresqlServer
from tests.rollup.processes import TIMES
from tests.support.certificates import Authority
from tests.support.child import run_python
from tests.support.rest import fresh
from tests.support.server import ROOT, serving
from tests.support.servers import postgresql_server
from tests.support.waiting import eventually

#: asyncpg leaves the connection over which a server refused to log in to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

CONNECTIONS = 12
ACCESS = """
host all locked 127.0.0.1/32 scram-sha-256
host all banned 127.0.0.1/32 reject
host all all 127.0.0.1/32 trust
"""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory, child_processes: None) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def server(authority: Authority) -> Iterator[PostgresqlServer]:
    """A server with TLS, few connections, and rules of who may log in; with a schema."""
    with postgresql_server() as server:
        signed = authority.sign("db")
        for path in (signed.cert, signed.key):
            copy(path, server.data / path.name)
            chown(server.data / path.name, server.data.owner())
        (server.data / signed.key.name).chmod(0o600)
        (server.data / "pg_hba.conf").write_text(ACCESS)
        server.stop()
        server.start(
            ssl="on",
            ssl_cert_file=signed.cert.name,
            ssl_key_file=signed.key.name,
            max_connections=str(CONNECTIONS),
            superuser_reserved_connections="0",
        )
        asyncio.run(_prepare(server.dsn()))
        yield server
        gc.collect()


async def _prepare(dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    await connection.execute("CREATE ROLE locked LOGIN PASSWORD 'right'; CREATE ROLE banned LOGIN")
    await connection.close()
    database = PostgresqlDatabase(PostgresqlOptions(dsn))
    await database.open()
    await apply_schema(database, [DATASET])
    await database.close()


@asynccontextmanager
async def opened(
    dsn: str, schema: str = "counter", timeout_us: int = 10 * SECOND
) -> AsyncIterator[PostgresqlStore]:
    store = PostgresqlStore(PostgresqlOptions(dsn, schema, 4, timeout_us), SystemClock())
    await store.open()
    try:
        yield store
    finally:
        await store.close()


@pytest.mark.usefixtures("child_processes")
def test_the_driver_is_not_installed() -> None:
    """The error names the extra to install; nothing else of the service needs the driver."""
    script = (
        "import sys; sys.modules['asyncpg'] = None\n"
        "import counter.storage, api.app, rollup.process\n"
        "from counter.errors import StartupError\n"
        "from counter.config.store_kinds import store_kind\n"
        "try: store_kind('postgresql').open(None, None)\n"
        "except StartupError as error: print(error)"
    )
    assert f"pip install '.[postgresql]' in {ROOT}" in run_python("-c", script).stdout


@pytest.mark.parametrize(
    ("dsn", "said"),
    [
        ("mysql://u:S3cret@{place}/db", "begins with 'mysql:': give postgresql://"),
        ("{place}/db", "give postgresql://user:password@host:port/database"),
        ("postgresql://u:S3cret/x@{place}/db", "in a password, write / as %2F"),
        ("postgresql://u:S3cret@h:99999/db", "a port in the DSN.*from 1 to 65535"),
        ("postgresql://counter@{place}/postgres?sslmode=always", "`sslmode` parameter must be one"),
        ("postgresql://counter@{place}/postgres?colour=red", 'unrecognized.*"colour"'),
        ("postgresql://counter@{place}/postgres?sslrootcert=/no/ca.pem", "is no file: /no/ca.pem"),
        ("postgresql://locked:S3cret@{place}/postgres", 'user "locked": change user or password'),
        ("postgresql://banned:S3cret@{place}/postgres", 'user "banned".*pg_hba.conf'),
        ("postgresql://stranger:S3cret@{place}/postgres", 'role "stranger" does not exist'),
        ("postgresql://counter:S3cret@{place}/nowhere", '"nowhere" does not exist: create the'),
    ],
)
async def test_a_permanent_error_is_reported_at_once(
    server: PostgresqlServer, dsn: str, said: str
) -> None:
    with pytest.raises(StartupError, match=said) as refused:
        async with opened(dsn.format(place=f"127.0.0.1:{server.port}")):
            pass
    assert "S3cret" not in str(refused.value)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (None, "the schema is empty: run `counter schema apply`"),
        (0, f"has version 0, and this program needs {SCHEMA_VERSION}: run `counter schema apply`"),
        (99, f"has version 99, and this program knows {SCHEMA_VERSION}: start it with"),
    ],
)
async def test_a_schema_of_another_version(
    server: PostgresqlServer, version: int | None, said: str
) -> None:
    connection = await asyncpg.connect(server.dsn())
    await connection.execute("CREATE SCHEMA other; CREATE TABLE other.meta (version integer)")
    try:
        if version is not None:
            await connection.execute("INSERT INTO other.meta VALUES ($1)", version)
        with pytest.raises(StartupError, match=said):
            async with opened(server.dsn(), "other"):
                pass
    finally:
        await connection.execute("DROP SCHEMA other CASCADE")
        await connection.close()


async def test_a_schema_that_is_missing(server: PostgresqlServer) -> None:
    with pytest.raises(StartupError, match=r"other.meta.*run `counter schema apply`"):
        async with opened(server.dsn(), "other"):
            pass


@pytest.mark.parametrize(
    "error", [StoreUnavailableError("away"), StartupError("no")], ids=["away", "no"]
)
async def test_a_start_that_fails_has_closed_its_connections(error: Exception) -> None:
    store = PostgresqlStore(PostgresqlOptions("postgresql://u@h/db"), SystemClock())
    failing = patch.object(store._database, "value", side_effect=error)
    with (
        failing,
        patch.object(store._database, "open"),
        patch.object(store._database, "close") as close,
    ):
        with pytest.raises(type(error)):
            await store.open()
        assert close.await_count == 1


async def test_connections_are_closed_after_the_appends_that_need_them() -> None:
    store = PostgresqlStore(PostgresqlOptions("postgresql://u@h/db"), SystemClock())
    with (
        patch.object(store.events, "close") as appends,
        patch.object(store._database, "close") as connections,
    ):
        connections.side_effect = appends.assert_awaited_once
        await store.close()
        connections.assert_awaited_once()


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        ("no-such-host.invalid", "no-such-host.invalid: .*not known"),
        ("127.0.0.1:1,127.0.0.1:2", "127.0.0.1:1: .*; 127.0.0.1:2: "),
    ],
)
async def test_a_server_that_is_not_there_yet_is_waited_for(
    hosts: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The store's errors that may heal name the host; startup retries them for its time-out."""
    store = PostgresqlStore(PostgresqlOptions(f"postgresql://u:S3cret@{hosts}/db"), SystemClock())
    with pytest.raises(StoreUnavailableError, match=said) as refused:
        await StartupRetry(10 * MILLISECOND).run(store.open)
    assert "waiting up to 10ms for the store: PostgreSQL: " in caplog.text
    assert "S3cret" not in caplog.text + refused.value.detail


async def test_a_read_only_server_is_waited_for(server: PostgresqlServer) -> None:
    """As a standby is, which may be promoted."""
    dsn = f"{server.dsn()}?default_transaction_read_only=on"
    with pytest.raises(StoreUnavailableError, match="add target_session_attrs=read-write"):
        async with opened(dsn):
            pass
    with pytest.raises(StoreUnavailableError, match="not what target_session_attrs"):
        async with opened(f"{dsn}&target_session_attrs=read-write"):
            pass


async def test_parameters_of_libpq_that_have_no_effect_are_warned_of(
    server: PostgresqlServer,
) -> None:
    """The DSNs that hosting companies show have some."""
    dsn = f"{server.dsn()}?channel_binding=require&connect_timeout=10&keepalives=1"
    async with opened(dsn) as store:
        await store.ping()
        warn = store.capabilities.server_warnings
        assert warn is not None
        [warning] = await warn()
    assert "no effect: channel_binding, connect_timeout, keepalives;" in warning


async def test_a_host_that_is_silent_does_not_take_the_time_of_the_next(
    server: PostgresqlServer,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = f"127.0.0.1:{silent.getsockname()[1]}"
        dsn = server.dsn().replace("@", f"@{place},")
        async with opened(dsn, timeout_us=5 * SECOND) as store:
            await store.ping()
            # From now on, new connections begin with the host that answered.
            await asyncio.gather(*(store.ping() for _ in range(4)))


async def test_a_host_that_refuses_the_password_is_named_and_the_next_is_not_tried(
    server: PostgresqlServer,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        first, second = (f"127.0.0.1:{port}" for port in (server.port, other.getsockname()[1]))
        dsn = f"postgresql://locked:S3cret@{first},{second}/postgres"
        with pytest.raises(StartupError, match=f'log in: {first}: .*"locked": change user or'):
            async with opened(dsn):
                pass
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.accept()


async def test_too_many_connections(server: PostgresqlServer) -> None:
    """Refused at the start, and of requests later; both recover by themselves."""
    full = "raise max_connections, or lower postgresql_connections"
    async with opened(server.dsn()) as store:
        await store._database._pool.expire_connections()  # type: ignore[union-attr]
        others = await _all_connections(server.dsn())
        with pytest.raises(StoreUnavailableError, match=full):
            async with opened(server.dsn()):
                pass
        answers = await asyncio.gather(*(store.ping() for _ in range(8)), return_exceptions=True)
        refused = [each for each in answers if each is not None]
        assert refused
        for each in refused:
            assert isinstance(each, StoreUnavailableError)
            assert full in each.detail
            assert each.retry_after_us == SECOND
        for other in others:
            await other.close()

        async def recovered() -> bool:
            found = await asyncio.gather(*(store.ping() for _ in range(4)), return_exceptions=True)
            return not any(found)

        await eventually(recovered, "the pool recovers")


async def test_too_many_connections_are_a_503_with_retry_after(
    server: PostgresqlServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the same token counts once when there is room again."""
    monkeypatch.setenv("COUNTER_DSN", server.dsn())
    # Else a busy machine may take longer to be refused a connection than a write may take.
    patient = {**TIMES, "write_timeout": "10s"}
    await apply_for(PostgresqlSettings(store="postgresql", keyspace="wire", **patient))
    async with (
        serving(
            tmp_path, tmp_path / "logs", store="postgresql", keyspace="wire", accept_limit="1m"
        ) as process,
        process.client() as rest,
    ):
        token = fresh(SystemClock().now_us())
        assert (await rest.add("warm", key="warm")).status_code == 200
        owner = await asyncpg.connect(server.dsn())
        others = await _instead_of_the_service(server.dsn(), owner)
        answer = await rest.add("c", 1, token)
        body = answer.json()
        assert (answer.status_code, body["code"]) == (503, "store_unavailable"), body
        assert (body["applied"], body["retry"]) == (None, "same_token")
        assert answer.headers["retry-after"] == "1"
        assert "raise max_connections, or lower postgresql_connections" in body["detail"]
        for other in (*others, owner):
            await other.close()

        async def acknowledged() -> bool:
            return (await rest.add("c", 1, token)).status_code == 200

        await eventually(acknowledged, "there is room again")
        assert await rest.count("c") == 1


async def _instead_of_the_service(dsn: str, owner: asyncpg.Connection) -> list[asyncpg.Connection]:
    """Take every connection of the server, those of other clients too."""
    mine = [owner]
    while True:
        pids = [each.get_server_pid() for each in mine]
        await owner.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE backend_type = 'client backend' AND pid <> ALL($1::integer[])",
            pids,
        )
        mine += await _all_connections(dsn)
        if len(mine) == CONNECTIONS:
            return mine[1:]


async def _all_connections(dsn: str) -> list[asyncpg.Connection]:
    found = []
    while True:
        try:
            found.append(await asyncpg.connect(dsn))
        except asyncpg.TooManyConnectionsError:
            return found


async def test_tls_with_the_servers_authority(
    server: PostgresqlServer, authority: Authority, tmp_path: Path
) -> None:
    verified = f"{server.dsn()}?sslmode=verify-full&sslrootcert="
    async with opened(f"{verified}{authority.cert}") as store:
        assert await store._database.value(
            "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()"
        )
    other = Authority(tmp_path, "other")
    with pytest.raises(StartupError, match=r"certificate of PostgreSQL is refused.*sslrootcert"):
        async with opened(f"{verified}{other.cert}"):
            pass
    elsewhere = f"{verified}{authority.cert}".replace("127.0.0.1", "127.0.0.2")
    with pytest.raises(StoreUnavailableError, match=r"127\.0\.0\.2"):
        async with opened(elsewhere):
            pass
