"""The servers that peers store in: each started for one measurement, on a port and in a folder of
its own, and gone afterwards, whatever happens."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from benchmarks.harness import Bench, BenchError, cpu_s_of, free_port

_START_TIMEOUT_S: Final = 30.0
_STOP_TIMEOUT_S: Final = 30.0
_LOG_CHARS: Final = 2_000
#: The folder of PostgreSQL's programs in Debian, by version: off the path.
_DEBIAN: Final = Path("/usr/lib/postgresql")
#: The user of PostgreSQL if we are root, which it refuses to be.
_USERS: Final = ("postgres", "nobody")


class StoreServer:
    """One process that listens, and its children."""

    def __init__(self, command: Sequence[str], url: str, log: Path, user: str | None = None):
        self.url = url
        self._address = ("127.0.0.1", urlsplit(url).port)
        self._log = log
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                **_as_user(user),
            )

    def wait(self) -> None:
        """Return once it listens. Raises BenchError if it does not."""
        end_s = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < end_s and self._process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(self._address):
                return
            time.sleep(0.02)
        said = self._log.read_text(encoding="utf-8", errors="replace")[-_LOG_CHARS:]
        raise BenchError(f"{self._process.args!r} does not listen:\n{said}")

    def cpu_s(self) -> float:
        """The CPU seconds of it and of its children so far: PostgreSQL has one a connection."""
        pid = self._process.pid
        return sum(map(cpu_s_of, (pid, *_children_of(pid))))

    def stop(self, number: signal.Signals) -> None:
        """End it by that signal, or by SIGKILL if it takes too long."""
        if self._process.poll() is None:
            self._process.send_signal(number)
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def redis(bench: Bench, appendfsync: str) -> Iterator[StoreServer]:
    """redis-server with an append-only file and no snapshots."""
    folder = bench.fresh_folder("redis")
    folder.mkdir()
    port = free_port()
    options = {
        "bind": "127.0.0.1",
        "port": str(port),
        "dir": str(folder),
        "save": "",
        "appendonly": "yes",
        "appendfsync": appendfsync,
    }
    command = ["redis-server", *(x for k, v in options.items() for x in (f"--{k}", v))]
    with _running(command, f"redis://127.0.0.1:{port}", folder / "log") as server:
        yield server


@contextmanager
def nats(bench: Bench, binary: Path, sync: str) -> Iterator[StoreServer]:
    """nats-server with JetStream in files; *sync* is its ``sync_interval``."""
    folder = bench.fresh_folder("nats")
    folder.mkdir()
    port = free_port()
    config = folder / "nats.conf"
    config.write_text(
        f'listen: "127.0.0.1:{port}"\n'
        f'jetstream {{ store_dir: "{folder}/store", sync_interval: {sync} }}\n',
        encoding="utf-8",
    )
    command = [str(binary), "--config", str(config)]
    with _running(command, f"nats://127.0.0.1:{port}", folder / "log") as server:
        yield server


@contextmanager
def postgres(bench: Bench) -> Iterator[StoreServer]:
    """A PostgreSQL of Debian's defaults, but for where it listens and what it trusts: `fsync` and
    `synchronous_commit` are on. Its database and its user are `bench`."""
    user = _unprivileged()
    folder = bench.fresh_folder("postgres")
    folder.mkdir()
    # Its user must find the way to it.
    bench.folder.chmod(0o711)
    shutil.copytree(_cluster(bench, user), folder / "data")
    if user is not None:
        for path in (folder, *folder.rglob("*")):
            shutil.chown(path, user)
    port = free_port()
    command = [
        *(str(_binary("postgres")), "-D", str(folder / "data"), "-p", str(port)),
        *("-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="),
    ]
    # SIGINT: end now and in order, without waiting for connections to be closed.
    url = f"postgresql://postgres@127.0.0.1:{port}/postgres"
    with _running(command, url, folder / "log", user, signal.SIGINT) as server:
        yield server


def postgres_version() -> str | None:
    """None if there is no PostgreSQL."""
    if _binary("postgres") is None:
        return None
    return _said(str(_binary("postgres")), "--version").split()[2]


def redis_version() -> str | None:
    """None if there is no Redis."""
    if shutil.which("redis-server") is None:
        return None
    found = dict(x.split("=", 1) for x in _said("redis-server", "--version").split() if "=" in x)
    return found["v"]


def _cluster(bench: Bench, user: str | None) -> Path:
    """A new database cluster, made once a run."""
    made: Path | None = bench.prepared.get("postgres")
    if made is not None:
        return made
    folder = bench.fresh_folder("initdb")
    folder.mkdir()
    if user is not None:
        shutil.chown(folder, user)
    options = ("-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
    done = subprocess.run(
        [str(_binary("initdb")), "-D", str(folder / "data"), *options],
        capture_output=True,
        text=True,
        check=False,
        **_as_user(user),
    )
    if done.returncode:
        raise BenchError(f"initdb failed:\n{(done.stdout + done.stderr)[-_LOG_CHARS:]}")
    bench.prepared["postgres"] = folder / "data"
    return folder / "data"


@contextmanager
def _running(
    command: Sequence[str],
    url: str,
    log: Path,
    user: str | None = None,
    end_by: signal.Signals = signal.SIGTERM,
) -> Iterator[StoreServer]:
    server = StoreServer(command, url, log, user)
    try:
        server.wait()
        yield server
    finally:
        server.stop(end_by)


def _binary(name: str) -> Path | None:
    """A program of PostgreSQL; None if there is none."""
    if found := shutil.which(name):
        return Path(found)
    return max(_DEBIAN.glob(f"*/bin/{name}"), key=lambda path: int(path.parts[-3]), default=None)


def _unprivileged() -> str | None:
    """The user to become if we are root; None if we are not."""
    if os.geteuid() != 0:
        return None
    return next(name for name in _USERS if name in {each.pw_name for each in pwd.getpwall()})


def _as_user(name: str | None) -> dict[str, Any]:
    """The arguments of Popen to start a process as that user."""
    if name is None:
        return {}
    found = pwd.getpwnam(name)
    return {"user": found.pw_uid, "group": found.pw_gid, "extra_groups": [], "cwd": "/"}


def _children_of(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(each) for each in path.read_text(encoding="ascii").split()]


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
