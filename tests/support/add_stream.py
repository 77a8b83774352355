"""A client of one stream of adds: sends lines and reads responses at the same time."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import h11

from tests.support.bytes_on_wire import token
from tests.support.problems import check_problem
from tests.support.rest import Json
from tests.support.times import START_US


def line(number: int, delta: int = 1, counter: str = "c", time_us: int = START_US) -> bytes:
    """An add under the token of *number*."""
    item = {"counter": counter, "delta": delta, "idempotency_token": token(number, time_us)}
    return json.dumps(item).encode() + b"\n"


class AddStream:
    """One stream: its sent lines and received responses."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.http = h11.Connection(h11.CLIENT)
        self._received = b""

    async def begin(
        self,
        *headers: tuple[str, str],
        namespace: str = "default",
        framing: Sequence[tuple[str, str]] = (("transfer-encoding", "chunked"),),
    ) -> None:
        path = f"/v1/namespaces/{namespace}/batch/add"
        names = [("host", "localhost"), ("content-type", "application/x-ndjson")]
        every = [*names, *framing, *headers]
        self._send(h11.Request(method="POST", target=path, headers=every))

    def _send(self, event: Any) -> None:
        if data := self.http.send(event):
            self.writer.write(data)

    def send(self, *lines: bytes) -> None:
        """Send *lines*, or parts of them, as one chunk."""
        self._send(h11.Data(data=b"".join(lines)))

    def end(self) -> None:
        self._send(h11.EndOfMessage())

    async def event(self) -> Any:
        """The next response."""
        async with asyncio.timeout(100):
            while (found := self.http.next_event()) is h11.NEED_DATA:
                self.http.receive_data(await self.reader.read(65_536))
        return found

    async def status(self) -> int:
        """The status of the head; the rest follows."""
        while not isinstance(head := await self.event(), h11.Response):
            assert head.status_code == 100
        return int(head.status_code)

    async def answer(self) -> Json | None:
        """The next line of the response; None at its end."""
        while b"\n" not in self._received:
            event = await self.event()
            if isinstance(event, h11.EndOfMessage):
                assert not self._received, self._received
                return None
            if isinstance(event, (h11.InformationalResponse, h11.Response)):
                continue
            assert isinstance(event, h11.Data), event
            self._received += bytes(event.data)
        text, _, self._received = self._received.partition(b"\n")
        found: Json = json.loads(text)
        if "code" in found:
            check_problem(found)
        return found

    async def is_added(self) -> None:
        """The next line of the response is that of a new add."""
        assert (await self.answer() or {}).get("replayed") is False

    async def answers(self) -> list[Json]:
        """All lines that still come."""
        found = []
        while (answer := await self.answer()) is not None:
            found.append(answer)
        return found


@asynccontextmanager
async def open_stream(
    port: int, *headers: tuple[str, str], **request: Any
) -> AsyncIterator[AddStream]:
    """A stream to the service at *port* of this machine."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    stream = AddStream(reader, writer)
    await stream.begin(*headers, **request)
    try:
        yield stream
    finally:
        writer.close()


async def answers_to(port: int, *lines: bytes) -> list[Json]:
    """All responses to *lines*, which are one stream."""
    async with open_stream(port) as stream:
        stream.send(*lines)
        stream.end()
        assert await stream.status() == 200
        return await stream.answers()
