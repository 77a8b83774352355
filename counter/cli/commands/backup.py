"""Run ``counter backup``, ``counter restore`` and ``counter schema restored``."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

from counter.cli.flags import StoreFlags, ready
from counter.cli.progress import progress
from counter.cli.terminal import Json, exit_on_error, flag, parsed, print_answer, remark
from counter.clock import SystemClock
from counter.config.settings import Settings, own_settings
from counter.quantities import format_bytes, parse_size, plural
from counter.security.audit_log import Act, AdminLog, os_user


def backup(
    destination: Annotated[Path, flag("A directory that does not exist yet")],
    flags: StoreFlags | None = None,
    *,
    rate: Annotated[str, flag("Bytes to copy per second; 0/s for any number", "RATE")] = "64MiB/s",
    json: Json = False,
) -> None:
    """Copy a data directory; see ``counter backup --help``."""
    with exit_on_error():
        settings = ready(flags).settings
        data = _place(settings)
        now_us, speed = SystemClock().now_us(), _bytes_per_s(rate)
        with ending_in_order(), progress("copying", None) as bar:
            made = settings.kind.back_up(
                settings, destination, now_us=now_us, bytes_per_s=speed, progress=bar.update
            )
        did = {"backup": str(destination), "data": data, "as_of": made.begun_at}
        print_answer(
            f"{destination} holds {data} as of {made.begun_at}: {format_bytes(made.size)}"
            f" in {plural(len(made.files), 'file')} and its manifest",
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
        settings = ready(flags).settings
        data = _place(settings)
        clock = SystemClock()
        log, now_us = AdminLog(settings.audit_log, clock), clock.now_us()
        with progress("restoring", None) as bar:
            made = settings.kind.restore(
                settings, source, now_us=now_us, progress=bar.update, without_keys=without_keys
            )
        did = {"data": data, "backup": str(source), "as_of": made.begun_at}
        log.record("backup.restore", os_user(), Act(did))
        print_answer(
            f"{data} holds the backup of {made.begun_at}, made by version {made.version}."
            f"\nBefore it is served: counter audit --all --data {data}",
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
        audit = asyncio.run(_begin_new_life(settings))
        print_answer(
            f"{settings.keyspace} issues no id or token again."
            f"\nBefore it is served: restart the cache, {audit}",
            {"keyspace": settings.keyspace},
            json=json,
        )


async def _begin_new_life(settings: Settings) -> str:
    log = AdminLog(settings.audit_log, SystemClock())
    act = log.act("schema.restored", os_user(), keyspace=settings.keyspace)
    return await settings.kind.begin_new_life(settings, act)


def _place(settings: Settings) -> str:
    """Return where the store is, as its first setting says."""
    return str(getattr(settings, own_settings(settings.kind)[0]))


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
