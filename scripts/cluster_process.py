"""A server process that survives the process that started it, and is found by its pid file.

The process inherits a lock on its pid file and holds it as long as it lives. So an unlocked pid
file is stale, whichever process has that number now, and of two concurrent starts only one
succeeds.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

#: How long a process may take to end after SIGTERM, before it is killed.
STOP_TIMEOUT_S: Final = 30.0
_POLL_S: Final = 0.02
_LOG_LINES: Final = 15
_PROBE_TIMEOUT_S: Final = 1.0


class ClusterError(Exception):
    """The cluster cannot do it; the message has the reason and the fix."""


def accepts(address: str, port: int) -> bool:
    """Whether something accepts connections there."""
    try:
        socket.create_connection((address, port), timeout=_PROBE_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def run_command(app: Callable[[], object]) -> None:
    """Run *app*, a command line; exit with 1, and the reason, if the cluster cannot do it."""
    try:
        app()
    except ClusterError as error:
        print(error, file=sys.stderr)
        sys.exit(1)


class ServerProcess:
    """One server with a folder of its own: ``pid``, ``log`` and whatever the server keeps."""

    #: Asks it to end.
    stop_signal = signal.SIGTERM

    def __init__(
        self,
        name: str,
        folder: Path,
        command: Callable[[], Sequence[str]],
        ready: Callable[[], bool],
        start_timeout_s: float,
    ) -> None:
        self.name = name
        self.folder = folder
        self._command = command
        self._ready = ready
        self._start_timeout_s = start_timeout_s

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def pid(self) -> int | None:
        """The process's number while it lives."""
        try:
            with (self.folder / "pid").open(encoding="ascii") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    # Empty for the moment between the lock and the start.
                    return int(file.read() or 0) or None
        except FileNotFoundError:
            pass
        return None

    def launch(self) -> bool:
        """Start the process unless it runs; whether it was started. Does not wait for it."""
        if self.pid() is not None:
            return False
        command = self._command()
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "pid").open("a+", encoding="ascii") as file, self.log.open("ab") as log:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            if self._ready():
                raise ClusterError(f"{self.name} cannot start: something else has its port already")
            file.truncate(0)
            # By a shell that exits at once: no process has to wait for the server to exit.
            spawned = subprocess.run(
                ["sh", "-c", '"$@" >&2 & echo $!', "sh", *command],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                pass_fds=[file.fileno()],
                check=True,
            )
            file.write(spawned.stdout)
        return True

    def wait_ready(self) -> None:
        """Wait until the server answers. Raises ClusterError if it ends or takes too long."""
        deadline_s = time.monotonic() + self._start_timeout_s
        while not self._ready():
            if self.pid() is None:
                raise ClusterError(f"{self.name} ended at its start:\n{self._last_lines()}")
            if time.monotonic() > deadline_s:
                raise ClusterError(
                    f"{self.name} does not answer after {self._start_timeout_s:.0f} s:"
                    f"\n{self._last_lines()}"
                )
            time.sleep(_POLL_S)

    def start(self) -> bool:
        """Start the server unless it runs, and wait until it answers; whether it was started."""
        started = self.launch()
        self.wait_ready()
        return started

    def stop(self) -> bool:
        """Ask it to end, and kill it if it does not; whether it ran."""
        if not self._signal(signal.SIGCONT) or not self._signal(self.stop_signal):
            return False
        if not self._ended(STOP_TIMEOUT_S):
            self.kill()
        return True

    def kill(self) -> bool:
        """``kill -9``: nothing of it gets to run again; whether it ran."""
        if not self._signal(signal.SIGKILL):
            return False
        if not self._ended(STOP_TIMEOUT_S):
            raise ClusterError(f"{self.name} survives SIGKILL; its folder is {self.folder}")
        return True

    def pause(self) -> bool:
        """Freeze it (SIGSTOP): connections stay open and nothing answers; whether it ran."""
        return self._signal(signal.SIGSTOP)

    def resume(self) -> bool:
        """Let it run on after :meth:`pause`; whether it ran."""
        return self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> bool:
        pid = self.pid()
        if pid is None:
            return False
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    def _ended(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while self.pid() is not None:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_POLL_S)
        return True

    def _last_lines(self) -> str:
        if not self.log.exists():
            return "(it wrote no log)"
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join([f"the end of {self.log}:", *lines[-_LOG_LINES:]])
