"""PostgreSQL's machine loses power: with the settings that the service requires, every acknowledged
add is there; with others it is not.

The writes and syncs of all of the server's processes are recorded, and the disk is rebuilt as it
was at drawn moments. ``POWER_SEED`` repeats a run, and ``POWER_DISKS`` sets their number.
"""

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from counter.types import Token
from scripts.postgresql_server import PostgresqlServer, postgresql_missing
from tests.postgresql.test_faults import fresh_schema, service
from tests.support.needs import miss
from tests.support.power import Change, Disk, Recorder
from tests.support.rest import new_token
from tests.support.seeds import seed_of

pytestmark = pytest.mark.usefixtures("child_processes")


DISKS = int(os.environ.get("POWER_DISKS", "2"))
ADDS = 40
HOWS = ("synced", "all", "some")
#: No add is given up on a busy machine.
PATIENT: dict[str, Any] = {"write_timeout": "10s"}

#: Counter, delta, token, and the length of the record when it was sent and when it was answered.
Add = tuple[str, int, Token, int, int]


class Recorded:
    """A server with its writes recorded from a clean start on."""

    def __init__(self, place: Path) -> None:
        if problem := postgresql_missing():
            miss(problem)
        place.chmod(0o711)
        self.place = place
        self.server = PostgresqlServer(place / "server")
        self.recorder = Recorder(place / "tools", self.server.data)
        # The processes run as another user.
        self.recorder.log.touch()
        self.recorder.log.chmod(0o666)

    async def run(self, draw: random.Random, *, weakened: str = "") -> list[Add]:
        """Add through a service, with checkpoints, perhaps with a setting off; kill the server."""
        server, recorder = self.server, self.recorder
        server.make_folder()
        server.run(
            *("initdb", "-D", str(server.data), "-U", "counter", "-A", "trust", "-E", "UTF8"),
            *("--locale=C", "--no-sync", "--data-checksums", "--wal-segsize=1"),
        )
        server.start()
        await fresh_schema(server.dsn(), **PATIENT)
        server.stop()
        shutil.copytree(server.data, self.place / "before")
        with pytest.MonkeyPatch.context() as patch:
            for name, value in recorder.environment.items():
                patch.setenv(name, value)
            # Only a commit or a checkpoint syncs the log.
            server.start(wal_writer_delay="10s", autovacuum="off")
        made: list[Add] = []
        control = await asyncpg.connect(server.dsn())
        async with service(server.dsn(), **PATIENT) as rest:
            if weakened:
                await control.execute(f"ALTER SYSTEM SET {weakened} = off")
                await control.execute("SELECT pg_reload_conf()")
            for number in range(ADDS):
                if number % 15 == 10 and not weakened:
                    await control.execute("CHECKPOINT")
                name, delta, token = f"c{draw.randrange(4)}", draw.randint(1, 9), new_token()
                sent_at = recorder.length()
                answer = await rest.add(name, delta, token)
                assert answer.status_code == 200, answer.text
                made.append((name, delta, token, sent_at, recorder.length()))
            await control.close()
        server.kill()
        return made

    def changes(self) -> Iterator[tuple[Disk, Change]]:
        # PostgreSQL depends on it.
        disk = Disk(self.server.data, syncs_names_with_files=True)
        disk.hold(self.place / "before")
        for each in self.recorder.changes():
            disk.change(each)
            yield disk, each

    async def lost(
        self, disk: Disk, how: str, draw: random.Random, adds: list[Add], at: int
    ) -> int:
        """Start a server on the rest of *disk*; return how many answered adds it lost."""
        after = PostgresqlServer(self.place / "after")
        after.make_folder()
        disk.leave(after.data, draw, how)
        (after.data / "postgresql.auto.conf").write_text("")
        for each in (after.data, *after.data.rglob("*")):
            shutil.chown(each, after.data.parent.owner())
        after.data.chmod(0o700)
        try:
            after.start()
            async with service(after.dsn(), **PATIENT) as rest:
                sure = [each for each in adds if each[4] <= at]
                for name in {each[0] for each in sure}:
                    most = sum(each[1] for each in adds if each[0] == name and each[3] <= at)
                    assert await rest.count(name) <= most
                lost = 0
                for name, delta, token, _, _ in sure:
                    answer = await rest.add(name, delta, token)
                    lost += answer.json()["replayed"] is False
                for name in {each[0] for each in sure}:
                    least = sum(each[1] for each in sure if each[0] == name)
                    assert await rest.count(name) >= least
                return lost
        finally:
            after.kill()
            shutil.rmtree(after.folder)


async def test_acknowledged_writes_survive_a_loss_of_power(fast_dir: Path) -> None:
    draw = random.Random(seed_of("POWER_SEED"))
    recorded = Recorded(fast_dir)
    adds = await recorded.run(draw)
    answered = {each[4] for each in adds}
    moments = [
        each.ends
        for each in recorded.recorder.changes()
        if each.ends > adds[5][4] and (each.kind in "SR" or each.ends in answered)
    ]
    chosen = {each: draw.choice(HOWS) for each in draw.sample(moments, DISKS)}
    for disk, change in recorded.changes():
        if how := chosen.get(change.ends):
            lost = await recorded.lost(disk, how, draw, adds, change.ends)
            assert lost == 0, (how, change.kind, change.path)


@pytest.mark.parametrize("weakened", ["synchronous_commit", "fsync"])
async def test_a_weaker_setting_loses_acknowledged_writes(fast_dir: Path, weakened: str) -> None:
    """So the service does not start with it, and the test above would notice it."""
    draw = random.Random(1)
    recorded = Recorded(fast_dir)
    adds = await recorded.run(draw, weakened=weakened)
    last = None
    for disk, change in recorded.changes():
        if change.ends > adds[-1][4]:
            break
        last = disk
    assert last is not None
    assert await recorded.lost(last, "synced", draw, adds, adds[-1][4]) > ADDS // 2
