"""``python -m benchmarks.peer_apps NAME [--at URL]``: serves one peer until SIGTERM."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

import uvicorn
from cyclopts import App

from benchmarks.peer_apps.floor import Floor
from benchmarks.peer_apps.route import Nothing, create_app

#: The module of each store, and its class.
_STORES: Final[Mapping[str, tuple[str, str]]] = {
    "redis": ("redis_lua", "RedisStore"),
    "postgres": ("postgres", "PostgresStore"),
    "jetstream": ("jetstream", "JetStreamStore"),
}


def _app(name: str, at: str) -> Any:
    if name == "floor":
        return Floor()
    if name == "nothing":
        return create_app(Nothing())
    module, store = _STORES[name]
    return create_app(getattr(import_module(f"benchmarks.peer_apps.{module}"), store)(at))


class _Server(uvicorn.Server):
    """A server that prints its address once it serves."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if sockets and not self.should_exit:
            sys.stdout.write("Serving on http://{}:{}\n".format(*sockets[0].getsockname()))
            sys.stdout.flush()


def main(name: str, *, at: str = "") -> None:
    """Serve the peer *name* with its store *at* that address."""
    # uvicorn raises the signal again once it has shut down in order: that is no failure.
    signal.signal(signal.SIGTERM, lambda *_: None)
    config = uvicorn.Config(
        _app(name, at),
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
