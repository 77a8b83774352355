"""The demo's service: the real `counter serve` in a process of its own, to be killed at will."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import sys
from asyncio.subprocess import Process
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
HOST: Final = "127.0.0.1"
#: Below the range that systems take outgoing ports from: a client that knocks while the service is
#: down could otherwise be given the service's own port, connect to itself and keep it.
PORTS: Final = range(20_000, 30_000)
START_TIMEOUT_S: Final = 30.0
STOP_TIMEOUT_S: Final = 20.0
LOG_TAIL_CHARS: Final = 4_000


class ServiceError(Exception):
    """The service did not do what it was told; the message holds the end of its log."""


class Service:
    """One data directory and one address, and the process that serves them now."""

    def __init__(self, folder: Path) -> None:
        self._data = folder / "data"
        self._log = folder / "service.log"
        self._port = free_port()
        self._log_begin = 0
        self._process: Process | None = None
        self.kills = 0
        self.restarts = 0

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._port}"

    async def start(self) -> None:
        """Start and wait until it listens. Raises ServiceError if it does not."""
        command = [sys.executable, "-m", "counter", "serve", "--host", HOST]
        command += ["--port", str(self._port), "--data", str(self._data)]
        with self._log.open("ab") as log:
            self._log_begin = log.tell()
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                # The service's own defaults, whatever the caller's environment sets.
                env={k: v for k, v in os.environ.items() if not k.startswith("COUNTER_")},
                # Ctrl-C is for the demo alone, which then ends the service itself.
                start_new_session=True,
            )
        await self._listens(self._process)

    async def _listens(self, process: Process) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_TIMEOUT_S):
                while process.returncode is None:
                    if "Serving on " in self.log_tail():
                        return
                    await asyncio.sleep(0.02)
        raise ServiceError(
            f"the service did not listen within {START_TIMEOUT_S:.0f} s "
            f"(exit code {process.returncode}):\n{self.log_tail()}"
        )

    async def kill(self) -> None:
        """End it with SIGKILL: no handler runs, nothing is flushed."""
        process = self._running()
        self._process = None
        process.send_signal(signal.SIGKILL)
        if await process.wait() != -signal.SIGKILL:
            raise ServiceError(f"the service ended by itself:\n{self.log_tail()}")
        self.kills += 1

    async def restart(self) -> None:
        """Start it again on the same data."""
        await self.start()
        self.restarts += 1

    async def stop(self) -> None:
        """Ask it to end, and wait. Raises ServiceError unless it ends in time with exit code 0."""
        process = self._running()
        process.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                code = await process.wait()
        except TimeoutError:
            raise ServiceError(
                f"SIGTERM did not end the service in {STOP_TIMEOUT_S:.0f} s"
            ) from None
        if code != 0:
            raise ServiceError(
                f"after SIGTERM the service's exit code is {code}, not 0:\n{self.log_tail()}"
            )

    async def watch(self) -> None:
        """Run until cancelled. Raises ServiceError if the service ends without being told to."""
        while True:
            if (process := self._process) is not None:
                await process.wait()
                if process is self._process:
                    raise ServiceError(f"the service ended by itself:\n{self.log_tail()}")
            await asyncio.sleep(0.1)

    async def destroy(self) -> None:
        """End it if it still runs, and whatever it may have started."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()

    def log_tail(self) -> str:
        """The end of what it wrote since its last start."""
        written = self._log.read_bytes()[self._log_begin :]
        return written.decode(errors="replace")[-LOG_TAIL_CHARS:]

    def _running(self) -> Process:
        if self._process is None or self._process.returncode is not None:
            raise ServiceError(f"the service does not run any more:\n{self.log_tail()}")
        return self._process


def free_port() -> int:
    """A port nobody listens on."""
    for port in random.sample(PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise ServiceError(f"no free port between {PORTS.start} and {PORTS.stop}")
