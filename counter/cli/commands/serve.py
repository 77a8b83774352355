"""Run ``counter serve``, ``rollup``, ``schema apply`` and ``config check``.

This is the only command module that imports api and rollup, and only inside functions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from counter.background import importing
from counter.cli.flags import RollupFlags, SchemaFlags, ServeFlags, given, ready
from counter.cli.terminal import Json, exit_on_error, print_answer
from counter.config.report import document_of, effective, load
from counter.config.settings import Settings
from counter.telemetry.logs import log_to_stderr

if TYPE_CHECKING:
    import socket
    from multiprocessing.connection import Connection
    from pathlib import Path

    from counter.core.namespaces import Namespaces
    from counter.ports import Clock, Store
    from counter.types import Namespace

#: Rolls up all closed windows of a namespace.
Roller = Callable[["Namespace"], Awaitable[None]]


def serve(flags: ServeFlags | None = None) -> None:
    """Serve the REST API until SIGTERM or SIGINT."""
    with importing():
        from api.serve import serve as run

    with exit_on_error():
        run(ready(flags).settings, serve_one)


def serve_one(
    settings: Settings, listener: socket.socket, number: int, pipe: Connection, folder: Path
) -> None:
    """Serve as one of several processes that share *listener*; see :data:`api.workers.Work`."""
    with importing():
        from api.serve import serve_as_worker
        from api.workers import SupervisorLink

    log_to_stderr(settings)
    with exit_on_error():
        serve_as_worker(settings, listener, SupervisorLink(pipe, number, folder))


def rollup(flags: RollupFlags | None = None) -> None:
    """Roll up the writes of API processes that share a store."""
    with exit_on_error():
        settings = ready(flags).settings
        with importing():
            from rollup.process import run

        raise SystemExit(run(settings))


def apply(flags: SchemaFlags | None = None, *, json: Json = False) -> None:
    """Create or update the schema of a shared store."""
    with exit_on_error():
        settings = ready(flags).settings
        did = asyncio.run(_applied(settings))
        print_answer("\n".join(did), {"did": did}, json=json)


async def _applied(settings: Settings) -> Sequence[str]:
    """Apply the schema, record it in the audit log, and return the changes."""
    from counter.clock import SystemClock
    from counter.security.audit_log import AdminLog, os_user

    if settings.kind.serves_alone:
        return await settings.kind.apply_schema(settings)
    log = AdminLog(settings.audit_log, SystemClock())
    async with log.act("schema.apply", os_user(), keyspace=settings.keyspace) as act:
        done = act.to["did"] = list(await settings.kind.apply_schema(settings))
    return done


def check(flags: ServeFlags | None = None, *, json: Json = False) -> None:
    """Print the settings that a process would have, and the source of each."""
    with exit_on_error():
        loaded = load(given(flags))
        print_answer(effective(loaded).rstrip("\n"), document_of(loaded), json=json, indent=2)


def roller_for(store: Store, clock: Clock, namespaces: Namespaces) -> Roller:
    """Return a function that rolls up a namespace of a store that only this process can reach."""
    from counter.storage.shared.memory_cache import MemoryCache
    from rollup.worker import RollupWorker

    worker = RollupWorker(store, MemoryCache(clock), clock, namespaces)

    async def roll(namespace: Namespace) -> None:
        await namespaces.refresh()
        # No slices were created while no process served, and the watermark moves up to now: every
        # recounted window needs a slice.
        await worker.maintenance.make_slices(namespace.dataset)
        for shard in range(namespace.settings.shards):
            await worker.roll_shard(namespace, shard)

    return roll
