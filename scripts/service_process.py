"""One process of the demo's service, run from this checkout, to be killed at will."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
HOST: Final = "127.0.0.1"
#: Below the range of outgoing ports: a client that connects while the service is down could
#: otherwise get the service's port as its own, and connect to itself.
PORTS: Final = range(20_000, 30_000)
START_TIMEOUT_S: Final = 180.0
STOP_TIMEOUT_S: Final = 60.0
LOG_TAIL_CHARS: Final = 4_000


class ServiceError(Exception):
    """The service failed to start, run or stop; the message contains the end of its log."""


class CounterProcess:
    """``counter`` with the same *arguments* at each start; it runs once it has written *sign*."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        log: Path,
        sign: str,
        *,
        module: str = "counter",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._arguments = arguments
        self._log = log
        self._sign = sign
        self._module = module
        self._environment = environment or {}
        self._log_begin = 0
        self._process: Process | None = None

    async def start(self) -> None:
        """Start and wait until it runs. Raises ServiceError if it does not."""
        with self._log.open("ab") as log:
            self._log_begin = log.tell()
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", self._module, *self._arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                # The program's own defaults, whatever the caller's environment sets.
                env={
                    **{k: v for k, v in os.environ.items() if not k.startswith("COUNTER_")},
                    **self._environment,
                },
                # Ctrl-C is for the demo alone, which then ends the service itself.
                start_new_session=True,
            )
        await self._runs(self._process)

    async def _runs(self, process: Process) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_TIMEOUT_S):
                while self._sign not in self._written():
                    if process.returncode is not None:
                        raise ServiceError(
                            f"{self.name} ended at its start with exit code"
                            f" {process.returncode}:\n{self.log_tail()}"
                        )
                    await asyncio.sleep(0.02)
                return
        raise ServiceError(
            f"{self.name} does not run after {START_TIMEOUT_S:.0f} s:\n{self.log_tail()}"
        )

    async def run(self) -> None:
        """Start it and wait for its end. Raises ServiceError unless it exits cleanly."""
        await self.start()
        if self._process is not None and (code := await self._process.wait()) != 0:
            raise ServiceError(f"{self.name} ended with exit code {code}:\n{self.log_tail()}")

    async def kill(self) -> None:
        """End it with SIGKILL: no handler runs, nothing is flushed."""
        process = self._running()
        self._process = None
        process.send_signal(signal.SIGKILL)
        if await process.wait() != -signal.SIGKILL:
            raise self._ended()

    def pause(self) -> None:
        """Freeze it by SIGSTOP: its connections stay open, and it does not answer."""
        self._running().send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume it by SIGCONT."""
        self._running().send_signal(signal.SIGCONT)

    async def stop(self) -> None:
        """Ask it to end, and wait. Raises ServiceError unless it ends in time with exit code 0."""
        process = self._running()
        process.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                code = await process.wait()
        except TimeoutError:
            raise ServiceError(
                f"SIGTERM did not end {self.name} in {STOP_TIMEOUT_S:.0f} s"
            ) from None
        if code != 0:
            raise ServiceError(
                f"after SIGTERM the exit code of {self.name} is {code}, not 0:\n{self.log_tail()}"
            )

    async def watch(self) -> None:
        """Run until cancelled. Raises ServiceError if it ends unexpectedly."""
        while True:
            if (process := self._process) is not None:
                await process.wait()
                if process is self._process:
                    raise self._ended()
            await asyncio.sleep(0.1)

    async def destroy(self) -> None:
        """End it if it still runs, and whatever it may have started."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()

    def log_tail(self) -> str:
        """The end of its output since its last start."""
        return self._written()[-LOG_TAIL_CHARS:]

    def _written(self) -> str:
        """Return all of its output; lines of its startup may be far from the end."""
        return self._log.read_bytes()[self._log_begin :].decode(errors="replace")

    def _running(self) -> Process:
        if self._process is None or self._process.returncode is not None:
            raise self._ended()
        return self._process

    def _ended(self) -> ServiceError:
        return ServiceError(f"{self.name} ended by itself:\n{self.log_tail()}")


def free_ports(count: int) -> list[int]:
    """Return *count* free ports."""
    found: list[int] = []
    for port in random.sample(PORTS, 100 + count):
        if len(found) == count:
            return found
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            found.append(port)
    raise ServiceError(f"no {count} free ports between {PORTS.start} and {PORTS.stop}")
