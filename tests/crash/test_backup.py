"""A backup under load has all adds acknowledged before it began, and is served exactly."""

import asyncio
import re
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest

from counter.cli.app import app
from tests.support.rest import Rest, item, new_token
from tests.support.server import Server, serving
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("child_processes")


CLIENTS = 3
BATCH = 200
#: So much is there before the backup, of some MiB, that it takes a while at its bounded speed.
BATCHES_BEFORE = 40
#: On a busy machine whole batches take long; the rollup is waited for.
PATIENT: Mapping[str, str] = {"accept_limit": "3s", "write_timeout": "3s", "write_wait_max": "1m"}


async def command(*words: str) -> int:
    """The exit code of ``counter``, beside a running service."""

    def run() -> int:
        try:
            app(list(words))
        except SystemExit as ended:
            return int(ended.code or 0)
        return 0

    return await asyncio.to_thread(run)


class Adding:
    """Clients that add one to counters of their own until stopped."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.sent = [0] * CLIENTS
        self.acknowledged = [0] * CLIENTS
        self.ended = asyncio.Event()
        self.enough = asyncio.Event()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(self._client(number))

    async def _client(self, number: int) -> None:
        async with self.server.client() as rest:
            while not self.ended.is_set():
                self.sent[number] += BATCH
                items = [item(f"c{number}", 1, new_token()) for _ in range(BATCH)]
                answer = await rest.batch_add(items)
                assert all("status" not in each for each in answer.json()["results"])
                self.acknowledged[number] += BATCH
                if sum(self.acknowledged) >= BATCHES_BEFORE * BATCH:
                    self.enough.set()


async def counts(rest: Rest) -> list[int]:
    return [await rest.count(f"c{number}") for number in range(CLIENTS)]


async def audited_wrong(server: Server, counter: str) -> None:
    """Wait until the audit beside the service has found *counter*, and logged it."""

    async def is_reported() -> bool:
        async with server.client() as rest:
            text = (await rest.http.get("/metrics")).text
        found = re.search(r"^counter_audit_mismatches_total (\S+)", text, re.MULTILINE)
        return found is not None and float(found[1]) > 0

    await eventually(is_reported, "an audit finds the damage")
    assert f"counter '{counter}': the count as of " in server.output("err")


async def rolled_up(data: Path) -> None:
    """Wait until every counter has a checkpoint: only rolled-up counts can be damaged."""

    async def is_done() -> bool:
        with closing(sqlite3.connect(data / "counter.db")) as connection:
            sql = "SELECT count(checkpoint) FROM counters"
            return bool(connection.execute(sql).fetchone()[0] == CLIENTS)

    await eventually(is_done, "the rollup comes past")


async def test_a_backup_under_load_holds_what_was_acknowledged_before(tmp_path: Path) -> None:
    """Restored, it agrees with its events; the audit finds and repairs damage; and it counts on."""
    data, copy, restored = (tmp_path / name for name in ("data", "copy", "restored"))
    async with serving(data, tmp_path / "logs", **PATIENT) as server:
        adding = Adding(server)
        working = asyncio.create_task(adding.run())
        await adding.enough.wait()
        await rolled_up(data)
        before = list(adding.acknowledged)
        assert await command("backup", str(copy), f"--data={data}", "--rate=2MiB/s") == 0
        meanwhile = list(adding.acknowledged)
        adding.ended.set()
        await working
        assert sum(meanwhile) > sum(before)
        assert await server.stop() == 0
    assert await command("restore", str(copy), f"--data={restored}", "--without-keys") == 0
    assert await command("audit", "--all", f"--data={restored}") == 0
    # As a bug would damage it: the checksums of its pages are right.
    (restored / "counter.db-sums").unlink()
    with closing(sqlite3.connect(restored / "counter.db")) as connection, connection:
        damaged = connection.execute(
            "UPDATE counters SET checkpoint = checkpoint + 1 WHERE name = 'c2'"
            " AND checkpoint IS NOT NULL"
        )
        assert damaged.rowcount == 1
    flags = {**PATIENT, "audit_interval": "100ms"}
    async with serving(restored, tmp_path / "logs2", **flags) as server:
        await audited_wrong(server, "c2")
        assert await server.stop() == 0
    assert await command("audit", "--all", "--repair", f"--data={restored}") == 3
    async with (
        serving(restored, tmp_path / "logs3", **PATIENT) as server,
        server.client() as rest,
    ):
        found = await counts(rest)
        assert all(a <= b <= c for a, b, c in zip(before, found, adding.sent, strict=True))
        # A batch is a transaction of its own, or shares one: it is in the copy whole.
        assert {each % BATCH for each in found} == {0}
        assert (await rest.add("c0", 1, new_token())).status_code == 200
        assert await counts(rest) == [found[0] + 1, *found[1:]]
        assert await server.stop() == 0
