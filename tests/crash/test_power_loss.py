"""The power fails at any instant: what was acknowledged is there, and each response is still true.

The process is a real service. Its writes and syncs are recorded, and for each sync of the run the
disk is rebuilt as a loss of power might leave it.
"""

import os
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from counter.clock import SystemClock
from counter.config.settings import Settings
from counter.core.service import CounterService
from counter.storage.shared.memory_cache import MemoryCache
from counter.storage.sqlite import SqliteStore
from counter.types import Token
from counter_client.spool import Spool
from tests.support.power import Disk, Recorder
from tests.support.rest import Rest, new_token
from tests.support.seeds import seed_of
from tests.support.server import Server
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("child_processes")


#: The log is copied into the database after some commits, as otherwise after thousands.
PROGRAM = (
    "import counter.storage.sqlite.database as database; database._WAL_PAGES = 40;"
    "from counter.__main__ import main; main()"
)


@dataclass
class Acknowledged:
    """An add, and the length of the record when it was answered."""

    counter: str
    delta: int
    token: Token | str
    sent_at: int
    at: int = 0


async def added(
    server: Server, recorder: Recorder, draw: random.Random, many: int
) -> list[Acknowledged]:
    made = []
    async with server.client() as rest:
        for number in range(many):
            name, delta = f"c{draw.randrange(6)}", draw.randint(1, 9)
            key = f"order:{server.starts}-{number}" if number % 3 == 0 else None
            token = None if key else new_token()
            add = Acknowledged(name, delta, key or token or "", recorder.length())
            made.append(add)
            await acknowledged(rest, add)
            add.at = recorder.length()
    return made


async def acknowledged(rest: Rest, add: Acknowledged) -> None:
    """Send *add* until it is answered: on a busy machine its time may be over before."""

    async def is_answered() -> bool:
        token = add.token if isinstance(add.token, Token) else None
        key = add.token if isinstance(add.token, str) else None
        answer = await rest.add(add.counter, add.delta, token, key=key)
        if answer.status_code == 410:
            assert answer.json()["applied"] is False, answer.text
            add.token = new_token()
        return answer.status_code == 200

    await eventually(is_answered, f"{add} is acknowledged")


async def holds(at: Path, adds: list[Acknowledged], length: int) -> None:
    """The directory is served, each acknowledged add is counted, and known by its token."""
    store = SqliteStore(at, SystemClock(), Settings().datasets())
    await store.open()
    try:
        service = CounterService(store, MemoryCache(store.database.clock), store.database.clock)
        await service.namespaces.refresh()
        sure = [each for each in adds if each.at <= length]
        if not sure:
            return
        namespace = service.namespaces.get("default")
        for name in {each.counter for each in sure}:
            least = sum(each.delta for each in sure if each.counter == name)
            most = sum(e.delta for e in adds if e.counter == name and e.sent_at <= length)
            (read,) = await service.reader.read(namespace, [name], 0)
            assert least <= read.count <= most, (name, least, read.count, most)
        for each in (*sure[:1], *sure[-2:]):
            answer = await service.add(namespace, each.counter, each.delta, each.token)
            assert answer.replayed, each
    finally:
        await store.close()


async def test_acknowledged_adds_survive_a_loss_of_power(
    tmp_path: Path, fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each sync and each response: with none, all or some of the unsynced changes."""
    draw = random.Random(seed_of("POWER_SEED"))
    under = tmp_path / "disk"
    under.mkdir()
    data = under / "data"
    recorder = Recorder(tmp_path / "tools", under, data / "counter.db-sums")
    for name, value in recorder.environment.items():
        monkeypatch.setenv(name, value)
    adds: list[Acknowledged] = []
    # So short that windows are rolled up between the adds.
    flags = {"write_timeout": "100ms"}
    server = Server(data, tmp_path / "logs", flags, (sys.executable, "-c", PROGRAM))
    try:
        await server.start()
        adds += await added(server, recorder, draw, 25)
        assert await server.stop() == 0
        await server.start()
        adds += await added(server, recorder, draw, 15)
    finally:
        server.clean_up()
    size = (data / "counter.db-sums").stat().st_size
    disk, states = Disk(under, size), 0
    answered = {each.at for each in adds}
    for change in recorder.changes():
        disk.change(change)
        if change.kind not in "SD" and change.ends not in answered:
            continue
        for how in ("synced", "all", "some"):
            at = fast_dir / f"state-{states}"
            disk.leave(at, draw, how)
            try:
                await holds(at / "data", adds, change.ends)
            except BaseException:
                print(f"state {states}: {how}, after {change.kind} of {change.path.name}")
                raise
            shutil.rmtree(at)
            states += 1
    print(f"{states} states")
    assert states > 100


#: Adds to a spool, and after each the length of the record.
SPOOLER = """
import os, sys
from pathlib import Path
from counter_client.spool import Spool
spool = Spool(Path(sys.argv[1]), "default")
for number in range(30):
    spool.put({f"c{number % 3}": 1})
    print(os.stat(os.environ["RECORD_TO"]).st_size, flush=True)
os._exit(0)
"""


def test_spooled_adds_survive_a_loss_of_power(tmp_path: Path, fast_dir: Path) -> None:
    """``put`` returns when the add is on disk, and so is the name of the spool's directory."""
    draw = random.Random(seed_of("POWER_SEED"))
    under = tmp_path / "disk"
    under.mkdir()
    recorder = Recorder(tmp_path / "tools", under)
    done = subprocess.run(
        [sys.executable, "-c", SPOOLER, str(under / "spool")],
        env=os.environ | dict(recorder.environment),
        capture_output=True,
        check=True,
        text=True,
    )
    taken = [int(line) for line in done.stdout.split()]
    assert len(taken) == 30
    disk, states = Disk(under), 0
    for change in recorder.changes():
        disk.change(change)
        if change.kind != "S" and change.ends not in taken:
            continue
        for how in ("synced", "all", "some"):
            at = fast_dir / f"spool-{states}"
            disk.leave(at, draw, how)
            spool = Spool(at / "spool", "default")
            least = sum(each <= change.ends for each in taken)
            held = sum(spool._own._totals.values())
            assert least <= held <= least + 1, (states, how, change[:2], held, least)
            spool._own.close()
            states += 1
    assert states > 90
