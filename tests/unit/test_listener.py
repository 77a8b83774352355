"""Connections are accepted many at once, whatever the event loop does by itself."""

import asyncio
import errno
import socket
from typing import Any
from unittest.mock import patch

import pytest
import uvloop

from api.http.call import RequestIds
from api.http.connections import Connections
from api.server.listener import Listener
from api.server.protocol import HttpProtocol
from api.server.sockets import listen

CLIENTS = 300
TURNS_MAX = 30


class Counted(asyncio.Protocol):
    def __init__(self, made: list[asyncio.BaseTransport]) -> None:
        self._made = made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._made.append(transport)
        transport.close()


def test_clients_that_all_connect_at_once_are_accepted_in_a_few_turns_of_the_loop() -> None:
    """Regression: one was accepted in a turn, and under load a turn takes 30 ms; and a backlog of
    100, asyncio's default, had the others wait for a second or be reset."""

    async def accept() -> None:
        made = list[asyncio.BaseTransport]()
        with listen("127.0.0.1", 0) as listening:
            listener = Listener(listening, lambda: Counted(made), Connections())
            address = listening.getsockname()
            clients = [socket.create_connection(address, 0.5) for _ in range(CLIENTS)]
            for _ in range(TURNS_MAX):
                await asyncio.sleep(0)
            assert len(made) == CLIENTS
            listener.close()
            await listener.wait_closed()
            for client in clients:
                client.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(accept())


HEALTH = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"


async def answers(_: Any, __: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize(
    "loop", [uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"]
)
def test_at_the_limit_health_checks_that_come_at_once_are_all_answered(loop: Any) -> None:
    """Regression: each was closed for the next one, before what it had sent was read."""

    async def ask() -> None:
        shared, ids = Connections(), RequestIds()
        shared.most = 2
        with listen("127.0.0.1", 0) as listening:
            address = listening.getsockname()
            listener = Listener(listening, lambda: HttpProtocol(answers, ids, shared), shared)
            clients = []
            for _ in range(shared.most):
                clients.append(await asyncio.open_connection(*address))
                clients[-1][1].write(HEALTH)
                assert (await clients[-1][0].readline()).split()[1] == b"200"
            late = [socket.create_connection(address, 0.5) for _ in range(20)]
            for each in late:
                each.sendall(HEALTH)
            for each in late:
                clients.append(await asyncio.open_connection(sock=each))
                assert (await clients[-1][0].readline()).split()[1] == b"200"
            for _, writer in clients:
                writer.close()
                await writer.wait_closed()
            listener.close()
            await listener.wait_closed()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(ask())


async def test_a_closed_listener_refuses_connections_at_once() -> None:
    """Regression: the kernel took them, and reset them after what they had sent."""
    with listen("127.0.0.1", 0) as listening:
        address = listening.getsockname()
        listener = Listener(listening, asyncio.Protocol, Connections())
        listener.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, 0.5)


class Full:
    """A listening socket of a process that cannot open more files, the first time."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._refusals = [OSError(errno.EMFILE, "Too many open files")]

    def accept(self) -> Any:
        if self._refusals:
            raise self._refusals.pop()
        return self._listening.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listening, name)


async def test_where_no_more_files_can_be_opened_it_accepts_again_after_a_pause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = asyncio.Queue[asyncio.BaseTransport]()

    class Noted(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            made.put_nowait(transport)

    full: Any
    with listen("127.0.0.1", 0) as listening, patch("api.server.listener._FULL_PAUSE_S", 0.0):
        full = Full(listening)
        listener = Listener(full, Noted, Connections())
        with socket.create_connection(listening.getsockname()):
            (await made.get()).close()
        listener.close()
        await listener.wait_closed()
    assert "no connection can be accepted now: Too many open files" in caplog.text
