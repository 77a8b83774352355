"""Disks that damage what was written: it is refused, or an audit finds it, or no count is wrong.

Each case copies a data directory, as a process that was killed or stopped left it, and damages one
file of the copy: by flipped bits, torn, zeroed, truncated or stale blocks, or by a sync that was
lost. ``DAMAGE_SEED`` repeats a run, and ``DAMAGES`` sets the number of cases.
"""

import asyncio
import os
import random
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from counter.core.namespaces import Namespaces
from counter.core.service import CounterService
from counter.errors import DamagedError, StartupError
from counter.ops.audit import Auditor, State, all_names
from counter.storage.shared.memory_cache import MemoryCache
from counter.storage.sqlite import ALL_PAGES, SqliteStore, page_sums
from counter.storage.sqlite.offline import back_up, restore
from counter.storage.sqlite.page_sums import PageSums
from counter.testing.clock import FakeClock
from counter.types import Namespace, Token
from rollup.maintenance import Maintenance
from rollup.worker import RollupWorker
from tests.rollup.world import DATASET, SETTINGS
from tests.support.damage import ALL, truncate
from tests.support.seeds import seed_of
from tests.support.times import SECOND, START_US

DAMAGES = int(os.environ.get("DAMAGES", "120"))
COUNTERS = [f"counter {number}" for number in range(40)]
FILES = ("counter.db", "counter.db-wal", "counter.db-sums")


@dataclass(frozen=True)
class Disk:
    """A data directory at one moment, an earlier one of it, and its counts."""

    at: Path
    earlier: Path
    now_us: int
    counts: dict[str, int]
    tokens: list[tuple[str, int, Token]]


def copied(source: Path, target: Path) -> Path:
    """Copy the remains of a killed process."""
    target.mkdir()
    for name in FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)
    return target


@asynccontextmanager
async def counting(
    data: Path, clock: FakeClock, name: str = "n", *, wal_pages: int = 1_000
) -> AsyncIterator[tuple[SqliteStore, CounterService, Namespace]]:
    """A service over *data*, and a new namespace of it."""
    store = SqliteStore(data, clock, [DATASET])
    store.database._wal_pages = wal_pages
    await store.open()
    service = CounterService(store, MemoryCache(clock), clock)
    await Maintenance(store, clock).run_once()
    yield store, service, await service.namespaces.create(name, replace(SETTINGS, shards=2))
    await store.close()


async def filled(place: Path, draw: random.Random) -> list[Disk]:
    """Have a service count, roll up and copy its log; return its directory at some moments."""
    clock, data = FakeClock(START_US), place / "data"
    counts: Counter[str] = Counter()
    tokens: list[tuple[str, int, Token]] = []
    disks: list[Disk] = []

    def note(name: str, earlier: Path) -> Path:
        at = copied(data, place / name)
        disks.append(Disk(at, earlier, clock.now_us(), dict(counts), tokens[-20:]))
        return at

    async with counting(data, clock, wal_pages=60) as (store, service, namespace):
        worker = RollupWorker(store, MemoryCache(clock), clock, service.namespaces)
        earlier = copied(data, place / "earlier-0")
        for moment in range(1, 5):
            for _ in range(draw.randint(40, 90)):
                name, delta = draw.choice(COUNTERS), draw.randint(-9, 99)
                token = Token(draw.randbytes(16), clock.now_us() - draw.randrange(SECOND))
                await service.add(namespace, name, delta, token)
                counts[name] += delta
                tokens.append((name, delta, token))
                clock.advance(draw.choice([0, SECOND // 10, SECOND]))
            if moment % 2:
                clock.advance(10 * SECOND)
                await worker.tick()
                last = Token(draw.randbytes(16), clock.now_us())
                await service.add(namespace, "counter 0", 1, last)
                counts["counter 0"] += 1
            earlier = note(f"killed-{moment}", earlier)
    note("stopped", earlier)
    return disks


class Outcome:
    REFUSED = "refused at startup"
    BY_RESTORE = "refused by the restore"
    BY_AUDIT = "refused by the audit"
    ERROR = "an error when read"
    NAMED = "named by the audit"
    HARMLESS = "harmless"
    SILENT = "SILENT"


async def served(disk: Disk, at: Path, *, pages_checked: int) -> tuple[str, list[str]]:
    """Serve a damaged directory; return the outcome, and the counters that are wrong."""
    store = SqliteStore(at, FakeClock(disk.now_us), [DATASET])
    store.database.pages_checked = pages_checked
    try:
        await store.open()
    except StartupError:
        return Outcome.REFUSED, []
    try:
        clock = store.database.clock
        service = CounterService(store, MemoryCache(clock), clock)
        await service.namespaces.refresh()
        if not any(each.name == "n" for each in service.namespaces.all()):
            return Outcome.ERROR, []
        namespace = service.namespaces.get("n")
        found = await service.reader.read(namespace, COUNTERS, 0)
        wrong = [
            name
            for name, each in zip(COUNTERS, found, strict=True)
            if each.count != disk.counts.get(name, 0)
        ]
        if wrong:
            return Outcome.SILENT, wrong
        for name, delta, token in disk.tokens:
            answer = await service.add(namespace, name, delta, token)
            if not answer.replayed:
                return Outcome.SILENT, [name]
        return Outcome.HARMLESS, []
    except Exception:
        # Whatever a damaged row makes of it: no count is answered.
        return Outcome.ERROR, []
    finally:
        await store.close()


async def audited(disk: Disk, at: Path) -> set[str] | None:
    """Return the counters that ``counter audit --all`` finds wrong; None if it refuses."""
    clock = FakeClock(disk.now_us)
    store = SqliteStore(at, clock, [DATASET])
    store.database.pages_checked = ALL_PAGES
    try:
        await store.open()
    except StartupError:
        return None
    try:
        namespaces = Namespaces(store, clock)
        await namespaces.refresh()
        namespace = namespaces.get("n")
        names = [name async for name in all_names(store, namespace)]

        async def sleep(_: float) -> None:
            clock.advance(SECOND)

        verdicts = await Auditor(store, sleep=sleep).audit(namespace, names)
        return {each.counter for each in verdicts if each.state is not State.RIGHT}
    finally:
        await store.close()


async def outcome_of(disk: Disk, at: Path, spare: Path, *, pages_checked: int) -> str:
    shutil.copytree(at, spare)
    outcome, wrong = await served(disk, at, pages_checked=pages_checked)
    if outcome != Outcome.SILENT:
        return outcome
    named = await audited(disk, spare)
    if named is None:
        return Outcome.BY_AUDIT
    return Outcome.NAMED if named >= set(wrong) else Outcome.SILENT


@pytest.mark.parametrize("pages_checked", [ALL_PAGES, 0], ids=["small", "large"])
async def test_no_damage_makes_a_count_wrong_in_silence(fast_dir: Path, pages_checked: int) -> None:
    """A large database is not read at startup: the audit finds the damage."""
    draw = random.Random(seed_of("DAMAGE_SEED"))
    disks = await filled(fast_dir, draw)
    outcomes: Counter[tuple[str, str]] = Counter()
    silent = []
    for number in range(DAMAGES):
        disk = draw.choice(disks)
        at, spare = fast_dir / f"case-{number}", fast_dir / f"spare-{number}"
        where = damaged_copy(draw, disk, at)
        outcome = await outcome_of(disk, at, spare, pages_checked=pages_checked)
        outcomes[where[0], outcome] += 1
        if outcome == Outcome.SILENT:
            silent.append((number, disk.at.name, where))
        for each in (at, spare):
            shutil.rmtree(each)
    for (file, outcome), count in sorted(outcomes.items()):
        print(f"{file:16} {outcome:22} {count:6}")
    assert not silent
    assert outcomes["counter.db", Outcome.HARMLESS] < DAMAGES


def damaged_copy(draw: random.Random, disk: Disk, at: Path) -> tuple[str, str, object]:
    """Copy *disk* to *at* and damage one file of it; return the file, the damage and its place."""
    file = draw.choice([name for name in FILES if (disk.at / name).exists()])
    damage = draw.choice(ALL)
    copied(disk.at, at)
    # Of the checksums, those in use.
    body = bytearray((at / file).read_bytes()[: 1_024 if file == FILES[2] else None])
    earlier = (disk.earlier / file).read_bytes() if (disk.earlier / file).exists() else b""
    what = damage(draw, body, earlier)
    with (at / file).open("r+b") as written:
        written.write(body)
        if damage is truncate:
            written.truncate()
    return file, damage.__name__, what


def backed_up(data: Path, target: Path, now_us: int) -> None:
    back_up(data, target, now_us=now_us, bytes_per_s=0, progress=lambda *_: None)


async def restored(disk: Disk, copy: Path, at: Path) -> tuple[str, list[str]]:
    try:
        restore(copy, at, now_us=disk.now_us, progress=lambda *_: None, without_keys=True)
    except StartupError:
        return Outcome.BY_RESTORE, []
    return await served(disk, at, pages_checked=ALL_PAGES)


async def test_no_backup_of_a_damaged_disk_is_wrong_in_silence(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: one in ten had lost the adds after a damaged frame of the log."""
    monkeypatch.setattr(page_sums, "_PAUSE_S", 0)
    draw = random.Random(seed_of("DAMAGE_SEED"))
    disks = await filled(fast_dir, draw)
    outcomes: Counter[str] = Counter()
    silent = []
    for number in range(DAMAGES // 3):
        disk = draw.choice(disks)
        at, copy, again = (fast_dir / f"{name}-{number}" for name in ("case", "copy", "again"))
        where = damaged_copy(draw, disk, at)
        try:
            backed_up(at, copy, disk.now_us)
        except StartupError:
            outcome = Outcome.REFUSED
        else:
            outcome, _ = await restored(disk, copy, again)
        outcomes[outcome] += 1
        if outcome in (Outcome.SILENT, Outcome.ERROR):
            silent.append((number, disk.at.name, where, outcome))
        for each in (at, copy, again):
            shutil.rmtree(each, ignore_errors=True)
    print(dict(outcomes))
    assert not silent
    assert outcomes[Outcome.REFUSED]


async def test_no_damaged_backup_is_restored_wrong_in_silence(fast_dir: Path) -> None:
    draw = random.Random(seed_of("DAMAGE_SEED"))
    disks = await filled(fast_dir, draw)
    disk, copy = disks[-1], fast_dir / "copy"
    backed_up(disk.at, copy, disk.now_us)
    backed_up(disk.earlier, fast_dir / "earlier", disk.now_us)
    outcomes: Counter[str] = Counter()
    for number in range(DAMAGES // 3):
        at, again = fast_dir / f"damaged-{number}", fast_dir / f"restored-{number}"
        shutil.copytree(copy, at)
        file = draw.choice(["counter.db", "counter.db", "manifest.json"])
        body = bytearray((at / file).read_bytes())
        what = draw.choice(ALL)(draw, body, (fast_dir / "earlier" / file).read_bytes())
        (at / file).write_bytes(body)
        outcome, _ = await restored(disk, at, again)
        assert outcome in (Outcome.BY_RESTORE, Outcome.HARMLESS), (number, file, what, outcome)
        outcomes[outcome] += 1
        for each in (at, again):
            shutil.rmtree(each, ignore_errors=True)
    print(dict(outcomes))
    assert outcomes[Outcome.BY_RESTORE]


async def test_no_backup_is_made_of_a_log_that_was_damaged_beside_a_service(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite checks the frames of its log only after a crash."""
    monkeypatch.setattr(page_sums, "_PAUSE_S", 0)
    clock, data = FakeClock(START_US), fast_dir / "data"
    async with counting(data, clock) as (_, service, namespace):
        await service.add(namespace, "counter", 1, Token(bytes(range(16)), clock.now_us()))
        await asyncio.to_thread(backed_up, data, fast_dir / "whole", clock.now_us())
        log = bytearray((data / "counter.db-wal").read_bytes())
        log[log.rindex(bytes(range(16)))] ^= 1
        (data / "counter.db-wal").write_bytes(log)
        with pytest.raises(DamagedError, match="what is in page"):
            await asyncio.to_thread(backed_up, data, fast_dir / "damaged", clock.now_us())
        assert not (fast_dir / "damaged").exists()


async def test_a_power_loss_while_the_log_is_deleted_loses_nothing(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite syncs pages copied from the log; the checksums are on disk before that."""
    clock, data, after = FakeClock(START_US), fast_dir / "data", fast_dir / "after"
    flush, close = PageSums.flush, PageSums.close
    synced = b""

    def flushed(self: PageSums) -> None:
        nonlocal synced
        flush(self)
        synced = (data / "counter.db-sums").read_bytes()

    def lose_power(self: PageSums) -> None:
        shutil.rmtree(after, ignore_errors=True)
        copied(data, after)
        (after / "counter.db-sums").write_bytes(synced)
        close(self)

    monkeypatch.setattr(PageSums, "flush", flushed)
    monkeypatch.setattr(PageSums, "close", lose_power)
    for life in range(2):
        async with counting(data, clock, f"n{life}"):
            pass
    store = SqliteStore(after, clock, [DATASET])
    await store.open()
    assert {each.name for each in await store.control.namespaces()} == {"n0", "n1"}
    await store.close()


async def test_a_backup_during_writes_reports_no_damage(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While all pages of a large database are read, its log is copied into it again and again."""
    clock, data = FakeClock(START_US), fast_dir / "data"
    loop = asyncio.get_running_loop()
    sums_of, looks = page_sums._file_sums, []

    def at_length(database: Path, page_size: int, parts: Iterable[range]) -> Any:
        looks.append(sum(map(len, parts := list(parts))))
        if looks[-1] > 10:
            add = service.add(namespace, "c", 1, Token(os.urandom(16), clock.now_us()))
            asyncio.run_coroutine_threadsafe(add, loop).result()
        yield from sums_of(database, page_size, parts)

    monkeypatch.setattr(page_sums, "_file_sums", at_length)
    monkeypatch.setattr(page_sums, "_PAUSE_S", 0)
    async with counting(data, clock, wal_pages=1) as (_, service, namespace):
        await asyncio.to_thread(page_sums.check_pages, data / "counter.db")
    whole, again = looks
    assert 0 < again < 10 < whole
