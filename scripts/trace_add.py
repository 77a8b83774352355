"""Trace one add and one get through a running server over SQLite: which files they enter.

``sys.setprofile`` reports each call of a Python function in every thread of the server. A call into
one of our files counts as a move if the call before it, in the same thread, was into another one.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any
from uuid import uuid4

import httpx

from api.serve import serve
from counter.clock import to_rfc3339
from counter.storage.sqlite.settings import SqliteSettings
from scripts.service_process import free_ports

ROOT = Path(__file__).resolve().parents[1]
OURS = tuple(f"{ROOT / package}{os.sep}" for package in ("counter", "rollup", "api"))
WARM = 200
#: Requests of each kind that are traced: that with the fewest calls met no timer and no task.
TRACED = 20
COUNTER = "/v1/namespaces/default/counters/c"


class Trace:
    """Record which of our files each thread enters, while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.entered: dict[int, list[str]] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if self.on and event == "call" and frame.f_code.co_filename.startswith(OURS):
            name = str(Path(frame.f_code.co_filename).relative_to(ROOT))
            self.entered.setdefault(threading.get_ident(), []).append(name)

    def of(self, request: Any) -> dict[int, list[str]]:
        """Return the files entered during *request*."""
        self.entered, self.on = {}, True
        try:
            request().raise_for_status()
        finally:
            self.on = False
        return self.entered


def report(what: str, entered: dict[int, list[str]], *, names: bool) -> None:
    """Print the figures of one request, and the files if *names*."""
    files = sorted({name for names_ in entered.values() for name in names_})
    moves = sum(before != after for calls in entered.values() for before, after in pairwise(calls))
    print(f"{what}: {len(files)} files, {moves} moves, {_calls(entered)} calls")
    for name in files if names else ():
        print(f"  {name}")


def _calls(entered: dict[int, list[str]]) -> int:
    return sum(map(len, entered.values()))


def ask(port: int, trace: Trace, *, names: bool) -> None:
    """Warm the server up, trace one add and one get, and stop it."""
    transport = httpx.HTTPTransport(retries=10)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", transport=transport) as http:

        def add() -> httpx.Response:
            token = {"token": str(uuid4()), "generation_time": to_rfc3339(time.time_ns() // 1_000)}
            return http.post(f"{COUNTER}/add", json={"delta": 1, "idempotency_token": token})

        for _ in range(WARM):
            add().raise_for_status()
            http.get(COUNTER).raise_for_status()
        for what, request in (("an add", add), ("a get", lambda: http.get(COUNTER))):
            traced = [trace.of(request) for _ in range(TRACED)]
            report(what, min(traced, key=_calls), names=names)
    signal.raise_signal(signal.SIGTERM)


def main() -> None:
    """Serve in this process, and send requests from a thread."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--names", action="store_true", help="print the names of the files, too")
    names = parser.parse_args().names
    (port,) = free_ports(1)
    trace = Trace()
    asking = threading.Thread(target=ask, args=(port, trace), kwargs={"names": names})
    threading.setprofile(trace)
    sys.setprofile(trace)
    with TemporaryDirectory() as folder:
        asking.start()
        serve(SqliteSettings(port=port, data=Path(folder)), lambda *_: None)
        asking.join()


if __name__ == "__main__":
    main()
