"""Starting and stopping an ASGI application without a server.

The application's start and end run in one task, as under a real server: what it enters there (task
groups, cancel scopes) must be left by the same task.
"""

import asyncio
from typing import Any


class Lifespan:
    """The lifespan protocol's two sides of a conversation with *app*."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._to_app: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._from_app: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Run the application's start; its errors are raised here."""
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": {}}
        self._task = asyncio.create_task(
            self._app(scope, self._to_app.get, self._from_app.put), name="lifespan"
        )
        await self._say("startup")

    async def stop(self) -> None:
        """Run the application's end."""
        await self._say("shutdown")
        if self._task is not None:
            await self._task

    async def _say(self, what: str) -> None:
        assert self._task is not None
        await self._to_app.put({"type": f"lifespan.{what}"})
        answer = asyncio.create_task(self._from_app.get())
        await asyncio.wait((answer, self._task), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            answer.cancel()
            await self._task
            raise AssertionError(f"the application ended without an answer to {what}")
        message = answer.result()
        if message["type"] != f"lifespan.{what}.complete":
            await self._task
            raise AssertionError(f"{what} failed: {message}")
