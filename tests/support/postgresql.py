"""A real PostgreSQL server on a free port, of Debian's package."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from counter.storage.postgresql import PostgresqlOptions, PostgresqlStore, apply_schema
from counter.storage.postgresql.database import Database
from counter.types import Dataset
from tests.support.clock import FakeClock
from tests.support.needs import miss

_USER = "counter"


def _programs() -> Path:
    """The directory of the newest server programs."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    if not found:
        miss("PostgreSQL is not installed (apt-get install postgresql)")
    return found[-1].parent


class PostgresqlServer:
    """One server with its data in *directory*. Its superuser needs no password on loopback."""

    def __init__(self, directory: Path) -> None:
        self._programs = _programs()
        self.data = directory / "pg"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        #: The server refuses to run as root.
        self._as: list[str] = []
        if os.geteuid() == 0:
            self._as = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
            shutil.chown(directory, "postgres")
        self._run("initdb", "-D", str(self.data), "-U", _USER, "-A", "trust", "-E", "UTF8",
                  "--locale=C", "--no-sync")  # fmt: skip

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [*self._as, self._programs / program, *arguments],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd="/",
        )

    def start(self, **settings: str) -> None:
        """Start, and wait until connections are accepted."""
        extra = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        command = [
            *self._as, str(self._programs / "postgres"), "-D", str(self.data),
            "-c", f"port={self.port}", "-c", "listen_addresses=127.0.0.1",
            "-c", "unix_socket_directories=", "-c", "max_connections=100", *extra,
        ]  # fmt: skip
        with (self.data.parent / "pg.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=log, cwd="/"
            )
        deadline = time.monotonic() + 60
        ready = [str(self._programs / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        while subprocess.run(ready, check=False).returncode:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self.data.parent / "pg.log").read_text("utf-8")[-2_000:])
            time.sleep(0.05)

    def stop(self, sign: signal.Signals = signal.SIGINT) -> None:
        """End with *sign*: SIGINT is a fast shutdown, SIGKILL a crash."""
        if self._process is not None:
            self._process.send_signal(sign)
            self._process.wait()
            self._process = None

    def dsn(self, database: str = "postgres") -> str:
        return f"postgresql://{_USER}@127.0.0.1:{self.port}/{database}"


class ClockedDatabase(Database):
    """A database whose functions read the time that the test says."""

    clock: FakeClock
    _told_us = -1

    async def rows(self, sql: str, *arguments: Any) -> Sequence[Any]:
        now_us = self.clock.now_us()
        if now_us != self._told_us:
            self._told_us = now_us
            await super().rows("UPDATE {s}.test_clock SET us = $1", now_us)
        return await super().rows(sql, *arguments)


class FreshStore(PostgresqlStore):
    """A store that opens as if it were new."""

    def __init__(
        self, options: PostgresqlOptions, clock: FakeClock, datasets: Sequence[Dataset]
    ) -> None:
        super().__init__(options, clock)
        self._clock = clock
        self._datasets = datasets

    async def open(self) -> None:
        database = Database(self._database.options)
        await database.open()
        await database.rows("DROP SCHEMA IF EXISTS {s} CASCADE")
        await apply_schema(database, self._datasets)
        await database.rows("CREATE TABLE {s}.test_clock AS SELECT 0::bigint AS us")
        await database.rows(
            "CREATE OR REPLACE FUNCTION {s}.clock_us() RETURNS bigint LANGUAGE sql VOLATILE"
            " AS 'SELECT us FROM {s}.test_clock'"
        )
        await database.close()
        self._database.__class__ = ClockedDatabase
        self._database.clock = self._clock  # type: ignore[attr-defined]
        await super().open()


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgresqlServer]:
    """One server for all tests that need no more than a database of it.

    Its directory is not pytest's: that one is closed to the user that the server runs as.
    """
    with tempfile.TemporaryDirectory(prefix="postgresql-") as directory:
        server = PostgresqlServer(Path(directory))
        server.start()
        yield server
        server.stop()
