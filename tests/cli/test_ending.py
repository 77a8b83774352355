"""A process that is terminated while it counts answers every accepted request."""

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from counter.types import Token
from tests.support.rest import new_token, on_wire
from tests.support.server import serving
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("child_processes")


CLIENTS = 12
COUNTER = "c"
ADD = f"POST /v1/namespaces/default/counters/{COUNTER}/add HTTP/1.1"


@dataclass(slots=True)
class Load:
    """Clients that add one after the other, each on a connection that it keeps."""

    port: int
    acknowledged: int = 0
    #: Connections whose last response announced it.
    dismissed: int = 0
    #: Sent without a response: their outcome is unknown.
    open: list[Token] = field(default_factory=list)
    heads: set[bytes] = field(default_factory=set)
    halves: set[bytes] = field(default_factory=set)

    async def run(self) -> None:
        """Add until the port is closed."""
        await asyncio.gather(*(self._client() for _ in range(CLIENTS)))

    async def _client(self) -> None:
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except (ConnectionRefusedError, ConnectionResetError):
                return
            try:
                while await self._add(reader, writer):
                    pass
            finally:
                writer.close()

    async def _add(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection may be used again."""
        token = new_token()
        body = json.dumps({"delta": 1, "idempotency_token": on_wire(token)}).encode()
        head = f"{ADD}\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        try:
            answer = await reader.readuntil(b"\r\n\r\n")
            length = int(answer.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            self.halves |= {getattr(error, "partial", b"")}
            self.open.append(token)
            return False
        self.heads.add(answer.partition(b"\r\n")[0])
        self.acknowledged += 1
        closes = b"\r\nconnection: close\r\n" in answer.lower()
        self.dismissed += closes
        return not closes


@pytest.mark.slow
async def test_accepted_requests_are_answered_and_counted(tmp_path: Path) -> None:
    """It delays its shutdown, then accepts no connection, and closes each one with its response."""
    flags = {"accept_limit": "1m", "shutdown_delay": "5m"}
    async with serving(tmp_path / "data", tmp_path / "logs", **flags) as server:
        load = Load(int(server.url.rpartition(":")[2]))
        running = asyncio.create_task(load.run())

        async def more_than(number: int) -> bool:
            return load.acknowledged > number

        await eventually(lambda: more_than(100), "adds are acknowledged")
        server.terminate()
        async with httpx.AsyncClient(
            base_url=server.url, timeout=100, trust_env=False, verify=False
        ) as http:

            async def is_leaving() -> httpx.Response | None:
                answer = await http.get("/readyz")
                return answer if answer.status_code == 503 else None

            response = await eventually(is_leaving, "it says that it ends")
            assert "shutting down" in response.json()["detail"]
            assert (await http.get("/healthz")).status_code == 200
        before = load.acknowledged
        await eventually(lambda: more_than(before + 100), "it goes on as before")
        assert load.dismissed == 0
        server.terminate()
        assert await server.ended() == 0
        await running
        assert load.heads == {b"HTTP/1.1 200 OK"}
        assert load.halves <= {b""}
        assert load.dismissed > 0
        assert "Traceback" not in server.all_errors()

        await server.start()
        async with server.client() as rest:
            for token in load.open:
                assert (await rest.add(COUNTER, 1, token)).status_code == 200
            assert await rest.count(COUNTER) == load.acknowledged + len(load.open)
