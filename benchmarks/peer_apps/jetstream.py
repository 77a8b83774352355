"""NATS JetStream: a stream of counters; a message's header has the delta."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final
from uuid import UUID

import nats
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import StorageType, StreamConfig
from nats.js.errors import NotFoundError

_STREAM: Final = "COUNTS"


class JetStreamStore:
    """A subject a counter. The server knows a message's id again within its window for duplicates:
    two minutes unless one asks for more, for it keeps them in memory. All messages are kept, for
    that is where it finds their ids after a restart; keeping only the last of each subject was
    hardly faster."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client: Client
        self._stream: JetStreamContext

    async def open(self) -> None:
        """Connect, and make the stream."""
        self._client = await nats.connect(self._url)
        self._stream = self._client.jetstream()
        await self._stream.add_stream(
            StreamConfig(
                name=_STREAM,
                subjects=["count.*"],
                storage=StorageType.FILE,
                allow_msg_counter=True,
                allow_direct=True,
            )
        )

    async def close(self) -> None:
        """Send pending messages, and disconnect."""
        await self._client.drain()

    async def add(self, counter: str, token: UUID, delta: int) -> bool:
        """Publish, and wait for the acknowledgement."""
        headers = {"Nats-Incr": f"{delta:+d}", "Nats-Msg-Id": token.hex}
        acknowledged = await self._stream.publish(f"count.{counter}", headers=headers)
        return not acknowledged.duplicate

    async def counts(self, counters: Sequence[str]) -> list[int]:
        """The last message of each subject."""
        return [await self._count(name) for name in counters]

    async def _count(self, counter: str) -> int:
        try:
            message = await self._stream.get_last_msg(_STREAM, f"count.{counter}", direct=True)
        except NotFoundError:
            return 0
        return int(json.loads(message.data or b"")["val"])
