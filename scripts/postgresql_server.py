"""A real PostgreSQL server on loopback, of Debian's package: for tests, the demo and chaos.

server = PostgresqlServer(Path("/tmp/pg"))
server.start()
server.kill()
server.start(synchronous_commit="on")
server.stop()
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from scripts.cluster_process import ClusterError, ServerProcess
from scripts.service_process import HOST, free_ports

START_TIMEOUT_S: Final = 180.0
_PROGRAMS: Final = Path("/usr/lib/postgresql")
_USER: Final = "counter"


def postgresql_missing() -> str | None:
    """Return the packages to install before PostgreSQL can run; None if it is installed."""
    if not any(_PROGRAMS.glob("*/bin/postgres")):
        return f"there is no PostgreSQL in {_PROGRAMS} (Debian, Ubuntu: apt-get install postgresql)"
    return None


def program(name: str) -> str:
    """Return the path of a program of the newest PostgreSQL. Raises ClusterError."""
    if problem := postgresql_missing():
        raise ClusterError(problem)
    found = _PROGRAMS.glob(f"*/bin/{name}")
    return str(max(found, key=lambda path: int(path.parts[-3])))


class PostgresqlServer(ServerProcess):
    """One server; *folder* holds its ``data`` and its ``log``.

    Its superuser, ``counter``, needs no password on loopback. The directories above *folder* must
    be open to all users, because a server that root starts runs as the user ``postgres``.
    """

    #: A fast shutdown; SIGTERM would wait until all clients have left.
    stop_signal = signal.SIGINT

    def __init__(self, folder: Path, name: str = "PostgreSQL") -> None:
        super().__init__(name, folder, self._server, self._accepts, START_TIMEOUT_S)
        self.data = folder / "data"
        (self.port,) = free_ports(1)
        self._settings: dict[str, str] = {}
        #: The server refuses to run as root.
        self._as: Sequence[str] = ()
        if os.geteuid() == 0:
            self._as = ("setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups")

    def start(self, **settings: str) -> bool:
        """Start it with these *settings* of PostgreSQL, and wait until it accepts connections."""
        self._settings = settings
        return super().start()

    def dsn(self, database: str = "postgres", user: str = _USER) -> str:
        """Return the DSN of *database*."""
        return f"postgresql://{user}@{HOST}:{self.port}/{database}"

    def make_folder(self) -> None:
        """Make the folder, for the user of the server."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._as:
            shutil.chown(self.folder, "postgres")

    def run(self, name: str, *arguments: str) -> None:
        """Run one of PostgreSQL's programs as the user of the server. Raises ClusterError."""
        done = subprocess.run(
            [*self._as, program(name), *arguments],
            capture_output=True,
            text=True,
            cwd="/",
            check=False,
        )
        if done.returncode:
            raise ClusterError(f"{name} failed:\n{done.stderr.strip()}")

    def _signal(self, number: signal.Signals) -> bool:
        """Signal its backends too, because each has a session of its own; a shutdown does not."""
        pid = self.pid()
        if pid is None or number == self.stop_signal:
            return super()._signal(number)
        # It starts no backend during that time.
        super()._signal(signal.SIGSTOP)
        with suppress(FileNotFoundError):
            for backend in Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split():
                with suppress(ProcessLookupError):
                    os.kill(int(backend), number)
        return super()._signal(number)

    def _server(self) -> Sequence[str]:
        """Return the command, after making the data directory unless there is one."""
        command = program("postgres")
        if not self.data.exists():
            self.make_folder()
            self.run(
                *("initdb", "-D", str(self.data), "-U", _USER, "-A", "trust", "-E", "UTF8"),
                *("--locale=C", "--no-sync", "--data-checksums"),
            )
        if self.pid() is None:
            # Its own check takes a killed server for alive until init has reaped it.
            (self.data / "postmaster.pid").unlink(missing_ok=True)
        settings = {
            "port": str(self.port),
            "listen_addresses": HOST,
            "unix_socket_directories": "",
            **self._settings,
        }
        given = [part for key, value in settings.items() for part in ("-c", f"{key}={value}")]
        return [*self._as, command, "-D", str(self.data), *given]

    def _accepts(self) -> bool:
        asked = [program("pg_isready"), "-q", "-h", HOST, "-p", str(self.port), "-U", _USER]
        return subprocess.run(asked, check=False).returncode == 0
