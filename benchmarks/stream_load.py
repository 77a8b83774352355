"""Send lines of adds over streams, and print what was answered and when: a process of its own.

Arguments: URL, path of the namespace, counters, connections, seconds, lines a second (0: as many as
the service takes).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections import deque
from datetime import UTC, datetime
from typing import Final
from urllib.parse import urlsplit

#: Lines in one write at full speed; and writes a second at a given rate.
_LINES: Final = 500
_WRITES_PER_S: Final = 200
#: Lines of one connection without a response, at full speed.
_AHEAD_MAX: Final = 4_000
_NEW: Final = b'"replayed":false}\n'
_HEAD: Final = (
    "POST {path}/batch/add HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/x-ndjson\r\n"
    "transfer-encoding: chunked\r\n\r\n"
)


class Stream:
    """One connection."""

    def __init__(self, counters: int) -> None:
        self.sent = 0
        self.answered = 0
        self.waits_ms: list[float] = []
        self._counters = counters
        #: How many lines were sent at which instant.
        self._marks: deque[tuple[int, float]] = deque()
        self._moved = asyncio.Event()

    def _lines(self, count: int) -> bytes:
        nonces = os.urandom(16 * count).hex()
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return "".join(
            f'{{"counter":"c{int(random.paretovariate(1)) % self._counters:07}","delta":1,'
            f'"idempotency_token":{{"token":"{nonces[at : at + 32]}",'
            f'"generation_time":"{now}"}}}}\n'
            for at in range(0, 32 * count, 32)
        ).encode()

    async def run(self, url: str, path: str, seconds: float, rate: float) -> None:
        """Send for *seconds*, then wait for the responses."""
        host, port = urlsplit(url).hostname, urlsplit(url).port
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(_HEAD.format(path=path, host=host).encode())
        reading = asyncio.create_task(self._read(reader))
        began_s = time.monotonic()
        writes = 0
        while (now_s := time.monotonic()) < began_s + seconds:
            due = int((now_s - began_s) * rate) - self.sent if rate else _LINES
            if not rate:
                while self.sent - self.answered > _AHEAD_MAX:
                    self._moved.clear()
                    await self._moved.wait()
            if due > 0:
                lines = self._lines(due)
                self.sent += due
                self._marks.append((self.sent, time.monotonic()))
                writer.write(b"%x\r\n%s\r\n" % (len(lines), lines))
                await writer.drain()
            if rate:
                writes += 1
                await asyncio.sleep(began_s + writes / _WRITES_PER_S - time.monotonic())
        writer.write(b"0\r\n\r\n")
        await reading
        writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        kept = b""
        while not kept.endswith(b"\r\n0\r\n\r\n"):
            data = await reader.read(262_144)
            if not data:
                raise SystemExit(f"the stream ended: {kept!r}")
            text = kept + data
            self.answered += text.count(_NEW) - kept.count(_NEW)
            kept = text[-2 * len(_NEW) :]
            now_s = time.monotonic()
            while self._marks and self._marks[0][0] <= self.answered:
                self.waits_ms.append(1_000 * (now_s - self._marks.popleft()[1]))
            self._moved.set()


async def main(url: str, path: str, counters: str, *numbers: str) -> None:
    """Run the load, and print it as a line of JSON."""
    connections, seconds, rate = map(float, numbers)
    streams = [Stream(int(counters)) for _ in range(int(connections))]
    began_s = time.monotonic()
    await asyncio.gather(*(s.run(url, path, seconds, rate / connections) for s in streams))
    waits_ms = sorted(each for stream in streams for each in stream.waits_ms)
    found = {
        "requests": sum(each.answered for each in streams),
        "sent": sum(each.sent for each in streams),
        "seconds": time.monotonic() - began_s,
        "p50_ms": waits_ms[len(waits_ms) // 2],
        "p99_ms": waits_ms[len(waits_ms) * 99 // 100],
    }
    print("RESULT", json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
