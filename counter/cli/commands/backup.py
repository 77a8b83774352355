"""Run ``counter backup``, ``counter restore`` and ``counter schema restored``."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Final

from counter.cli.flags import StoreFlags, ready
from counter.cli.progress import progress
from counter.cli.terminal import Json, exit_on_error, flag, parsed, print_answer, remark
from counter.clock import SystemClock
from counter.config.settings import Settings
from counter.core.clock_guard import ClockGuard, checked_now_us
from counter.errors import StartupError
from counter.ops import backup as backups
from counter.quantities import format_bytes, parse_size, plural
from counter.security.audit_log import Act, AdminLog, os_user
from counter.storage.shared.startup_retry import StartupRetry

if TYPE_CHECKING:
    from counter.storage.cassandra import CassandraStore
    from counter.storage.dynamodb import DynamodbStore

#: What backs up the stores that are servers.
_BACKED_UP_BY: Final[Mapping[str, str]] = {
    "cassandra": "nodetool snapshot",
    "dynamodb": "point-in-time recovery",
    "postgresql": "pg_dump",
}


def backup(
    destination: Annotated[Path, flag("A directory that does not exist yet")],
    flags: StoreFlags | None = None,
    *,
    rate: Annotated[str, flag("Bytes to copy per second; 0/s for any number", "RATE")] = "64MiB/s",
    json: Json = False,
) -> None:
    """Copy a data directory; see ``counter backup --help``."""
    with exit_on_error():
        settings = _sqlite(flags)
        now_us, speed = SystemClock().now_us(), _bytes_per_s(rate)
        with ending_in_order(), progress("copying", None) as bar:
            made = backups.back_up(
                settings.data,
                destination,
                now_us=now_us,
                bytes_per_s=speed,
                progress=bar.be_at,
                wal_bytes_max=settings.wal_bytes_max,
            )
        did = {"backup": str(destination), "data": str(settings.data), "as_of": made.begun_at}
        print_answer(
            f"{destination} holds {settings.data} as of {made.begun_at}: {format_bytes(made.size)}"
            f" in {plural(len(made.files), 'file')} and {backups.MANIFEST}",
            {**did, "bytes": made.size, "files": len(made.files)},
            json=json,
        )


def restore(
    source: Annotated[Path, flag("A directory that counter backup made")],
    flags: StoreFlags | None = None,
    *,
    without_keys: Annotated[bool, flag("Restore a backup without API keys")] = False,
    json: Json = False,
) -> None:
    """Restore a backup into a new data directory; see ``counter restore --help``."""
    with exit_on_error():
        settings = _sqlite(flags)
        clock = SystemClock()
        log, now_us = AdminLog(settings.audit_log, clock), clock.now_us()
        with progress("restoring", None) as bar:
            made = backups.restore(
                source, settings.data, now_us=now_us, progress=bar.be_at, without_keys=without_keys
            )
        did = {"data": str(settings.data), "backup": str(source), "as_of": made.begun_at}
        log.record("backup.restore", os_user(), Act(did))
        print_answer(
            f"{settings.data} holds the backup of {made.begun_at}, made by version {made.version}."
            f"\nBefore it is served: counter audit --all --data {settings.data}",
            {**did, "version": made.version},
            json=json,
        )
        lost = f"adds that were acknowledged after {made.begun_at} are not in it"
        if len(made.files) > 1:
            lost += "; API keys that were revoked after it are valid again: revoke them again"
        remark(lost)


def restored(flags: StoreFlags | None = None, *, json: Json = False) -> None:
    """Prepare a restored store for use; see ``counter schema restored --help``."""
    with exit_on_error():
        settings = ready(flags).settings
        if settings.store == "sqlite":
            raise StartupError("store is sqlite: `counter restore` does all that is needed there")
        asyncio.run(_begin_new_life(settings))
        # A restored database is of one moment, and needs no repair.
        audit = "start a worker, and run counter audit --all --repair"
        if settings.store == "postgresql":
            audit = "and run counter audit --all"
        print_answer(
            f"{settings.keyspace} issues no id or token again."
            f"\nBefore it is served: restart the cache, {audit}",
            {"keyspace": settings.keyspace},
            json=json,
        )


async def _begin_new_life(settings: Settings) -> None:
    clock = SystemClock()
    if settings.store == "postgresql":
        from counter.storage.postgresql.schema import begin_new_life

        log = AdminLog(settings.audit_log, clock)
        async with log.act("schema.restored", os_user(), keyspace=settings.keyspace):
            await begin_new_life(settings)
        return
    store: CassandraStore | DynamodbStore
    if settings.store == "dynamodb":
        from counter.storage.dynamodb import DynamodbStore, dynamodb_options

        store = DynamodbStore(dynamodb_options(settings), clock)
    else:
        from counter.storage.cassandra import CassandraStore, options_of

        store = CassandraStore(options_of(settings), clock)
    await StartupRetry(settings.start_timeout).run(store.open)
    try:
        log = AdminLog(settings.audit_log, clock)
        async with log.act("schema.restored", os_user(), keyspace=settings.keyspace):
            guard = ClockGuard(store.control, clock)
            await guard.measure()
            # No token gets an earlier time than this one any more.
            await store.control.begin_new_life(checked_now_us(clock, guard))
    finally:
        await store.close()


def _sqlite(flags: StoreFlags | None) -> Settings:
    settings = ready(flags).settings
    if settings.store != "sqlite":
        by = _BACKED_UP_BY[settings.store]
        raise StartupError(
            f"store is {settings.store}, which is backed up by `{by}`: see"
            " docs/how-to/back-up-and-restore.md"
        )
    return settings


def _bytes_per_s(rate: str) -> float:
    text = rate.removesuffix("/s")
    return 0.0 if text == "0" else float(parsed("rate", text, parse_size))


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Raise KeyboardInterrupt at the first SIGTERM or Ctrl-C, and ignore later ones, which would
    interrupt the cleanup."""
    if threading.current_thread() is not threading.main_thread():
        # Signals are delivered to the main thread only.
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT)

    def end(_number: int, _frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = [signal.signal(each, end) for each in numbers]
    try:
        yield
    finally:
        for each, handler in zip(numbers, before, strict=True):
            signal.signal(each, handler)
