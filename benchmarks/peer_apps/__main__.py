"""``python -m benchmarks.peer_apps NAME [--at URL]``: serves one peer until SIGTERM."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import uvicorn
from cyclopts import App

from benchmarks.peer_apps.floor import Floor
from benchmarks.peer_apps.route import Nothing, create_app


def _redis(at: str) -> Any:
    from benchmarks.peer_apps.redis_lua import RedisStore

    return create_app(RedisStore(at))


def _postgres(at: str) -> Any:
    from benchmarks.peer_apps.postgres import PostgresStore

    return create_app(PostgresStore(at))


def _postgres_transaction(at: str) -> Any:
    from benchmarks.peer_apps.postgres import TransactionStore

    return create_app(TransactionStore(at))


def _sqlite(at: str) -> Any:
    from benchmarks.peer_apps.sqlite import SqliteStore

    return create_app(SqliteStore(Path(at)))


def _sqlite_threads(at: str) -> Any:
    from benchmarks.peer_apps.sqlite import ThreadStore

    return create_app(ThreadStore(Path(at)))


def _jetstream(at: str) -> Any:
    from benchmarks.peer_apps.jetstream import JetStreamStore

    return create_app(JetStreamStore(at))


_APPS: Final[Mapping[str, Callable[[str], Any]]] = {
    "floor": lambda _: Floor(),
    "nothing": lambda _: create_app(Nothing()),
    "redis": _redis,
    "postgres": _postgres,
    "postgres-transaction": _postgres_transaction,
    "sqlite": _sqlite,
    "sqlite-threads": _sqlite_threads,
    "jetstream": _jetstream,
}


class _Server(uvicorn.Server):
    """A server that says where it serves, once it does."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if sockets and not self.should_exit:
            sys.stdout.write("Serving on http://{}:{}\n".format(*sockets[0].getsockname()))
            sys.stdout.flush()


def main(name: str, *, at: str = "") -> None:
    """Serve the peer *name*, whose store is *at* that address."""
    # uvicorn raises the signal again once it has shut down in order: that is no failure.
    signal.signal(signal.SIGTERM, lambda *_: None)
    config = uvicorn.Config(
        _APPS[name](at),
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="off" if name == "floor" else "on",
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
    )
    with socket.create_server(("127.0.0.1", 0), backlog=2_048) as listener:
        _Server(config).run(sockets=[listener])


if __name__ == "__main__":
    App(default_command=main, help_format="plaintext", version_flags=())()
