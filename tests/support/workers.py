"""``python -m tests.support.workers WORKERS PORT``: several real processes on one port.

Each counts in a store of its own memory, which is enough to see who answers, who ends and who is
started again. With PORT 0 the first worker cannot start.
"""

import sys
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socket
from typing import Any
from unittest.mock import patch

from api.app import Application, create_app
from api.server.sockets import listen
from api.workers import supervise
from counter.cli.commands.serve import serve_one
from counter.clock import SystemClock
from counter.config.settings import Settings
from counter.errors import StartupError
from counter.storage.memory import MemoryStore

HOST = "127.0.0.1"


def over_memory(settings: Settings, **named: Any) -> Application:
    """The application over a store of this process alone."""
    clock = SystemClock()
    return create_app(settings, store=MemoryStore(clock), clock=clock, **named)


def fails(_: Settings) -> Application:
    """An application that finds no store."""
    raise StartupError("there is no store here; start one")


def work(settings: Settings, listener: socket, number: int, pipe: Connection, folder: Path) -> None:
    """The main function of a spawned process."""
    make = fails if settings.metrics_port is None else over_memory
    with patch("api.serve.create_app", make):
        serve_one(settings, listener, number, pipe, folder)


def main(workers: int, port: int) -> int:
    """Run them until a signal comes; each has a port of its own too, from *port* + 1 on."""
    settings = Settings(
        port=port,
        workers=workers,
        metrics_port=port + 1 if port else None,
    )
    with listen(HOST, port) as listener:
        return supervise(settings, listener, lambda: print("ready", flush=True), work)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
