"""Run several API processes on one port under a supervisor.

uvicorn's own supervisor does not fit (see docs/architecture.md). Each worker has a pipe to its
supervisor, to report that it is ready and to detect that the supervisor is gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Protocol

from counter.background import first_of, pause
from counter.config.settings import Settings
from counter.errors import StartupError
from counter.limits import SECOND

#: The main function of a worker. It takes the settings, the listener, the worker's number, its end
#: of the pipe, and the folder that the workers share.
Work = Callable[[Settings, socket.socket, int, Connection, Path], None]

_log = logging.getLogger("counter.workers")
_READY: Final = b"ready"
_PAUSE_MIN_S: Final = 0.5
_PAUSE_MAX_S: Final = 15.0
#: How long a worker may take to end, besides draining requests and background work.
_GRACE_S: Final = 5.0


class SupervisorLink:
    """A worker's end of the pipe to its supervisor.

    The workers share their metrics in *folder*: see :mod:`api.telemetry.exposition`.
    """

    def __init__(self, pipe: Connection, number: int, folder: Path) -> None:
        self._pipe = pipe
        self.number = number
        self.folder = folder

    def say_ready(self) -> None:
        """Report that requests are accepted."""
        with suppress(OSError):
            self._pipe.send_bytes(_READY)

    def when_gone(self, act: Callable[[], None]) -> None:
        """Call *act* from the running loop when the supervisor has ended in any way."""
        loop = asyncio.get_running_loop()

        def gone() -> None:
            loop.remove_reader(self._pipe.fileno())
            act()

        # The supervisor never writes, so only the end can be read.
        loop.add_reader(self._pipe.fileno(), gone)


class WorkerProcess(Protocol):
    """The supervisor's view of a worker process."""

    ready: asyncio.Event
    ended: asyncio.Event

    @property
    def exit_code(self) -> int:
        """The exit code; negative for a signal."""
        ...

    def send(self, number: int) -> None:
        """Send the signal *number*, unless the process has ended."""
        ...


class Supervisor:
    """Keep *count* workers running until :meth:`end` is called."""

    def __init__(
        self,
        count: int,
        start: Callable[[int], WorkerProcess],
        *,
        drain_s: float,
        pause_min_s: float = _PAUSE_MIN_S,
    ) -> None:
        self._count = count
        self._start = start
        self._drain_s = drain_s
        self._pause_min_s = pause_min_s
        self._live: dict[int, WorkerProcess] = {}
        self._stop = asyncio.Event()

    async def run(self, ready: Callable[[], None]) -> int:
        """Run the workers; call *ready* once, when each is ready or has failed.

        The first one starts alone: if it fails, all would, and its exit code is returned.
        Otherwise return 0 when all have ended after :meth:`end`.
        """
        first = self._begin(0)
        await first_of(first.ready, first.ended)
        if first.ended.is_set() and not first.ready.is_set():
            return 0 if self._stop.is_set() else max(1, first.exit_code)
        others = [] if self._stop.is_set() else range(1, self._count)
        workers = [first, *(self._begin(number) for number in others)]
        keepers = [asyncio.create_task(self._keep(n, each)) for n, each in enumerate(workers)]
        await asyncio.gather(*(first_of(each.ready, each.ended) for each in workers))
        if not self._stop.is_set():
            ready()
        await self._stop.wait()
        _, late = await asyncio.wait(keepers, timeout=self._drain_s)
        if late:
            _log.error("%d workers did not end in time and are killed", len(late))
            self._send(signal.SIGKILL)
            await asyncio.wait(keepers)
        for each in keepers:
            each.result()
        return 0

    def end(self, number: int = signal.SIGTERM) -> None:
        """End the workers gracefully; a second SIGINT ends them at once."""
        again = self._stop.is_set() and number == signal.SIGINT
        self._stop.set()
        self._send(signal.SIGINT if again else signal.SIGTERM)

    def _send(self, number: int) -> None:
        for worker in self._live.values():
            worker.send(number)

    def _begin(self, number: int) -> WorkerProcess:
        worker = self._live[number] = self._start(number)
        return worker

    async def _keep(self, number: int, worker: WorkerProcess) -> None:
        """Restart worker *number* when it ends; back off while it never becomes ready."""
        pause_s = self._pause_min_s
        while True:
            await worker.ended.wait()
            if self._stop.is_set():
                return
            pause_s = self._pause_min_s if worker.ready.is_set() else min(2 * pause_s, _PAUSE_MAX_S)
            _log.error(
                "worker %d %s; it is started again in %g s",
                *(number, _how(worker.exit_code), pause_s),
            )
            if await pause(self._stop, pause_s):
                return
            worker = self._begin(number)


class _Process:
    """A worker in a spawned process; see :class:`WorkerProcess`."""

    def __init__(self, process: SpawnProcess, pipe: Connection) -> None:
        self.ready = asyncio.Event()
        self.ended = asyncio.Event()
        self._process = process
        self._pipe = pipe
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pipe.fileno(), self._hear)
        self._loop.add_reader(process.sentinel, self._end)

    @property
    def exit_code(self) -> int:
        return self._process.exitcode or 0

    def send(self, number: int) -> None:
        pid = self._process.pid
        if pid is not None and not self.ended.is_set():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _hear(self) -> None:
        self._loop.remove_reader(self._pipe.fileno())
        with suppress(EOFError, OSError):
            if self._pipe.poll() and self._pipe.recv_bytes() == _READY:
                self.ready.set()

    def _end(self) -> None:
        self._hear()
        self._loop.remove_reader(self._process.sentinel)
        self._process.join()
        self._pipe.close()
        self.ended.set()


def supervise(
    settings: Settings,
    listener: socket.socket,
    ready: Callable[[], None],
    work: Work,
) -> int:
    """Run ``settings.workers`` processes that do *work* on *listener* until SIGTERM or SIGINT.

    Return the exit code. Raises StartupError. They are spawned, not forked, so they inherit only
    their arguments.
    """
    context = get_context("spawn")
    try:
        folder = TemporaryDirectory(prefix="counter-workers-")
    except OSError as error:
        raise StartupError(
            f"several processes need a folder for their metrics: {error}; name one that can be"
            " written to with TMPDIR"
        ) from error

    def start(number: int) -> _Process:
        ours, theirs = context.Pipe()
        with theirs:
            process = context.Process(
                target=work,
                args=(settings, listener, number, theirs, Path(folder.name)),
                name=f"counter-{number}",
            )
            process.start()
        return _Process(process, ours)

    async def keep() -> int:
        drain_s = (settings.shutdown_delay + 2 * settings.drain_timeout) / SECOND + _GRACE_S
        supervisor = Supervisor(settings.workers, start, drain_s=drain_s)
        loop = asyncio.get_running_loop()

        def end(number: int) -> None:
            supervisor.end(number)
            # The port stays open while any process holds it, but this one never accepts.
            listener.close()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, end, number)
        return await supervisor.run(ready)

    with folder:
        return asyncio.run(keep())


def _how(exit_code: int) -> str:
    return f"was ended by signal {-exit_code}" if exit_code < 0 else f"ended with code {exit_code}"
