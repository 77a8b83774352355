"""``counter backup`` and ``restore``: whole or not at all, and never twice the same life."""

import asyncio
import hashlib
import json
import os
import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from counter.clock import SystemClock
from counter.core.service import CounterService
from counter.errors import StartupError
from counter.storage.shared.memory_cache import MemoryCache
from counter.storage.sqlite import offline as backups
from counter.storage.sqlite.schema import SCHEMA_VERSION
from tests.cli.shell import Shell, exit_code
from tests.support.filled import COUNTERS, SETTINGS, fill, opened
from tests.support.waiting import eventually


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with counters and a key, and a backup of it."""
    root = tmp_path_factory.mktemp("backup")
    asyncio.run(fill(root / "data"))
    flags = [f"--data={root / 'data'}"]
    assert exit_code("key", "create", "--namespace=videos", "--scope=read", *flags) == 0
    assert exit_code("backup", str(root / "copy"), *flags) == 0
    return root


@pytest.fixture
def place(filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a copy of both."""
    monkeypatch.chdir(tmp_path)
    for name in ("data", "copy"):
        shutil.copytree(filled / name, tmp_path / name)
    return tmp_path


def rows(path: Path, sql: str) -> list[Any]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(sql).fetchall()


def below(place: Path, folders: str) -> list[str]:
    """The names of the files in *folders* of *place*, a pattern."""
    return sorted(each.name for each in place.glob(f"{folders}/*"))


def test_a_backup_is_made_during_service_and_restored(place: Path, shell: Shell) -> None:
    """With the keys; readable by its owner alone; and written to the audit log."""

    async def beside() -> None:
        async with opened(place / "data"):
            await asyncio.to_thread(shell.said, "backup", "new", "--data=data", "--rate=1GiB/s")

    asyncio.run(beside())
    assert below(place, "new") == ["counter.db", "keys.sqlite3", "manifest.json"]
    modes = {oct((place / "new" / each).stat().st_mode)[-3:] for each in ("counter.db", ".")}
    assert modes == {"600", "700"}
    text = shell.said("restore", "new", "--data=restored", "--audit-log=acts.jsonl")
    assert "are not in it; API keys that were revoked after it are valid again" in shell.err
    assert "counter audit --all --data restored" in text
    act = json.loads((place / "acts.jsonl").read_text(encoding="utf-8"))
    assert (act["act"], act["data"], act["backup"]) == ("backup.restore", "restored", "new")
    text = shell.said("audit", "--all", "--data=restored")
    assert text == "videos: 3 counters audited, 0 wrong"
    sql = "SELECT id FROM keys"
    old, new = (rows(place / each / "keys.sqlite3", sql) for each in ("data", "restored"))
    assert old == new
    assert len(old) == 1


def test_a_backup_gives_up_before_the_write_ahead_log_stops_the_service(place: Path) -> None:
    """The log grows for as long as the copy takes; nothing of the copy is left."""

    async def beside() -> None:
        async with opened(place / "data"):
            await asyncio.to_thread(
                backups.back_up,
                place / "data",
                place / "new",
                now_us=0,
                bytes_per_s=0.0,
                progress=lambda *_: None,
                wal_bytes_max=2,
            )

    with pytest.raises(StartupError, match=r"has grown to .*--rate 0/s"):
        asyncio.run(beside())
    assert not list(place.glob("new*"))


def test_a_restored_store_issues_no_token_again(place: Path, shell: Shell) -> None:
    """Tokens, ids of namespaces and versions: the old life may have gone on after its backup."""

    async def live(data: Path, name: str) -> tuple[list[Any], int, int]:
        clock = SystemClock()
        async with opened(data) as store:
            service = CounterService(store, MemoryCache(clock), clock)
            await service.namespaces.refresh()
            tokens = await service.issue_tokens(3)
            made = await service.namespaces.create(name, SETTINGS)
            videos = service.namespaces.get("videos")
            counts = await service.reader.read(videos, list(COUNTERS), None)
            assert {each.counter: each.count for each in counts} == COUNTERS
            return tokens, made.id, videos.version

    old_tokens, old_id, old_version = asyncio.run(live(place / "data", "lost"))
    shell.said("restore", "copy", "--data=restored")
    tokens, new_id, version = asyncio.run(live(place / "restored", "other"))
    assert {each.nonce[:8] for each in tokens}.isdisjoint(each.nonce[:8] for each in old_tokens)
    assert min(each.generation_time_us for each in tokens) > max(
        each.generation_time_us for each in old_tokens
    )
    assert new_id > old_id + 1_000
    assert version > old_version + 1_000
    shell.said("restore", "copy", "--data=again")
    again, _, _ = asyncio.run(live(place / "again", "other"))
    assert again[0].nonce[:8] != tokens[0].nonce[:8]


def test_nothing_is_written_over(place: Path, shell: Shell) -> None:
    """Neither a backup nor a data directory; one that holds but a lock is empty."""
    assert "copy is there already" in shell.fails(2, "backup", "copy", "--data=data")
    why = shell.fails(2, "restore", "copy", "--data=data")
    assert "data is not empty: it holds counter.db, counter.db-sums, keys" in why
    (place / "empty").mkdir()
    (place / "empty" / "lock").touch()
    shell.said("restore", "copy", "--data=empty")


@pytest.mark.usefixtures("child_processes")
async def test_a_backup_that_is_asked_to_end_leaves_nothing(place: Path) -> None:
    """Regression: at SIGTERM, by which a job is ended, the half copy stayed."""
    words = ("-m", "counter", "backup", "new", "--data=data", "--rate=1kB/s")
    process = await asyncio.create_subprocess_exec(sys.executable, *words, cwd=place)

    await eventually(
        lambda: any(name.startswith("counter.db") for name in below(place, "new.partial-*")),
        "it copies",
    )
    process.terminate()
    assert await process.wait() == 130
    assert below(place, ".") == ["copy", "data"]


def test_a_backup_of_nothing_is_refused(place: Path, shell: Shell) -> None:
    """And a place that cannot be written is said."""
    assert "typo holds no counters" in shell.fails(2, "backup", "new", "--data=typo")
    (place / "file").touch()
    assert "cannot write file/new" in shell.fails(2, "backup", "file/new", "--data=data")
    assert "'fast' is not a size" in shell.fails(2, "backup", "new", "--data=data", "--rate=fast")
    assert not list(place.glob("new*"))


def test_a_damaged_database_is_not_backed_up(place: Path, shell: Shell) -> None:
    """It is said, and nothing is left that looks like a backup."""
    with (place / "data" / "counter.db").open("r+b") as file:
        file.seek(3 * 4_096)
        file.write(b"\xff" * 4_096)
    assert "damaged" in shell.fails(2, "backup", "new", "--data=data")
    assert not list(place.glob("new*"))


def test_a_disk_that_is_too_small_is_noticed_first(
    place: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 0))
    for words in (["backup", "new", "--data=data"], ["restore", "copy", "--data=new"]):
        assert "has 0 bytes left" in shell.fails(2, *words)


#: Foreign parts of a database, and missing ones.
FOREIGN = {
    "trigger": (
        "counter.db",
        "CREATE TRIGGER evil AFTER UPDATE ON tokens BEGIN SELECT raise(ABORT, 'evil'); END",
    ),
    "view": ("counter.db", "CREATE VIEW evil AS SELECT 1"),
    "table": ("counter.db", "CREATE TABLE events_1_x (a)"),
    "other events": ("counter.db", "CREATE TABLE events_1_7 (counter CHECK (abs(counter) > 1))"),
    "lost table": ("counter.db", "DROP TABLE tokens"),
    "keys": (
        "keys.sqlite3",
        "CREATE TRIGGER evil AFTER UPDATE ON keys BEGIN DELETE FROM keys; END",
    ),
}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def spoil(copy: Path, kind: str) -> None:
    """Damage a backup."""
    manifest = copy / "manifest.json"
    document = json.loads(manifest.read_text())
    if kind == "changed":
        body = bytearray((copy / "counter.db").read_bytes())
        body[len(body) // 2] ^= 1
        (copy / "counter.db").write_bytes(body)
    elif kind == "cut":
        cut(copy / "counter.db")
    elif kind == "lost":
        (copy / "keys.sqlite3").unlink()
    elif kind == "no manifest":
        manifest.unlink()
    elif kind == "half a manifest":
        cut(manifest)
        cut(manifest)
    elif kind == "keyless":
        (copy / "keys.sqlite3").unlink()
        del document["files"]["keys.sqlite3"]
        manifest.write_text(json.dumps(document))
    elif kind == "deep":
        manifest.write_text("[" * 20_000)
    elif kind == "huge":
        manifest.write_text(json.dumps(document) + " " * 100_000)
    elif kind == "escapes":
        manifest.write_text(json.dumps(document | {"version": "1\x1b[2J"}))
    elif kind in FOREIGN:
        file, sql = FOREIGN[kind]
        with closing(sqlite3.connect(copy / file)) as connection:
            connection.executescript(sql)
        digest, size = hashlib.sha256((copy / file).read_bytes()), (copy / file).stat().st_size
        document["files"][file] = {"bytes": size, "sha256": digest.hexdigest()}
        manifest.write_text(json.dumps(document))
    elif kind == "newer":
        manifest.write_text(json.dumps(document | {"format": 2}))
    else:
        document["files"] |= {"../passwd": document["files"]["counter.db"]}
        manifest.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("kind", "hint"),
    [
        ("changed", "counter.db is not what was backed up"),
        ("cut", "counter.db is not what was backed up"),
        ("lost", "keys.sqlite3 cannot be read: No such file"),
        ("no manifest", "copy is no whole backup"),
        ("half a manifest", "manifest.json is damaged"),
        ("keyless", "copy holds no API keys (keys.sqlite3)"),
        ("deep", "manifest.json is damaged"),
        ("huge", "manifest.json is damaged"),
        ("escapes", "manifest.json is damaged"),
        ("trigger", "counter.db is not as this program makes it: see ['evil']"),
        ("view", "see ['evil']"),
        ("table", "see ['events_1_x']"),
        ("other events", "see ['events_1_7']"),
        ("lost table", "see ['tokens']"),
        ("keys", "keys.sqlite3 is not as this program makes it: see ['evil']"),
        ("newer", "is of format 2"),
        ("other files", "manifest.json names ['../passwd'"),
    ],
)
def test_a_damaged_backup_is_not_restored(kind: str, hint: str, place: Path, shell: Shell) -> None:
    """Before anything is written."""
    spoil(place / "copy", kind)
    assert hint in shell.fails(2, "restore", "copy", "--data=new")
    assert not (place / "new").exists()


@pytest.mark.parametrize("name", ["manifest.json", "counter.db", "keys.sqlite3"])
@pytest.mark.parametrize("kind", ["a FIFO", "a device", "a directory"])
def test_a_backup_with_special_files_is_not_restored(
    name: str, kind: str, place: Path, shell: Shell
) -> None:
    """Regression: a FIFO was waited for, and an endless device was read for ever."""
    path = Path("copy") / name
    path.unlink()
    match kind:
        case "a FIFO":
            os.mkfifo(path)
        case "a device":
            path.symlink_to("/dev/zero")
        case _:
            path.mkdir()
    assert "cannot be read: it is not a regular file" in shell.fails(
        2, "restore", "copy", "--data=restored"
    )
    assert not Path("restored").exists()


def test_a_backup_without_keys_needs_a_flag_to_be_restored(place: Path, shell: Shell) -> None:
    spoil(place / "copy", "keyless")
    shell.said("restore", "copy", "--data=new", "--without-keys")
    assert below(place, "new") == ["counter.db", "lock"]


def test_a_backup_that_was_made_while_a_slice_is_deleted_is_restored(
    place: Path, shell: Shell
) -> None:
    """Its table has another name until its last event is deleted."""
    sql = "SELECT name FROM sqlite_master WHERE name GLOB 'events_*' AND type = 'table'"
    [(table,), *_] = rows(place / "data" / "counter.db", sql)
    rows(place / "data" / "counter.db", f"ALTER TABLE {table} RENAME TO dropped_{table}")
    (place / "data" / "counter.db-sums").unlink()
    shell.said("backup", "other", "--data=data")
    shell.said("restore", "other", "--data=again")


@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION))
def test_a_backup_of_a_version_before_is_restored(place: Path, shell: Shell, version: int) -> None:
    """As the upgrade finds it, and as the upgrade leaves it."""
    (place / "data" / "counter.db-sums").unlink(missing_ok=True)
    with closing(sqlite3.connect(place / "data" / "counter.db")) as connection:
        connection.execute("DROP TABLE holds")
        if version < 5:
            connection.execute("DROP TABLE recent_windows")
        if version == 1:
            connection.execute("ALTER TABLE tokens DROP COLUMN time")
        connection.execute(f"PRAGMA user_version = {version}")
    for number, of in enumerate(("data", "restored-0")):
        shell.said("backup", f"new-{number}", f"--data={of}")
        restored = f"restored-{number}"
        shell.said("restore", f"new-{number}", f"--data={restored}", "--without-keys")
    assert rows(place / "restored-1" / "counter.db", "PRAGMA user_version") == [(SCHEMA_VERSION,)]


def test_a_database_of_a_newer_program_is_not_restored(place: Path, shell: Shell) -> None:
    """Nor could this one serve it."""
    (place / "data" / "counter.db-sums").unlink(missing_ok=True)
    with closing(sqlite3.connect(place / "data" / "counter.db")) as connection:
        connection.execute("PRAGMA user_version = 99")
    shell.said("backup", "new", "--data=data")
    assert "schema version 99" in shell.fails(2, "restore", "new", "--data=restored")


def test_a_restore_that_was_broken_off_is_not_served(
    place: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service would begin with nothing; another restore is required."""

    def pulled(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("counter.storage.sqlite.offline.begin_new_life", pulled)
    assert shell.run("restore", "copy", "--data=half")[0] == 130
    monkeypatch.undo()
    monkeypatch.chdir(place)
    assert "a restore into half was broken off" in shell.fails(
        2, "serve", "--data=half", "--port=0"
    )
    assert "half is not empty" in shell.fails(2, "restore", "copy", "--data=half")
