"""What is not hot: health, metrics, and the way to the documentation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST

from api.console.pages import console_reply, is_of_console
from api.http.answers import json_reply, problem_reply
from api.http.call import AsgiScope, Receive, Reply, Route, Send
from api.http.router import App
from api.telemetry.exposition import Exposition
from api.telemetry.health import Health


class Site:
    """The application behind the front.

    It answers health and metrics itself. The framework behind the documentation takes longer to
    load than all else together, and no counting needs it: it is loaded when the first request for
    it comes, on a thread, while others are answered.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        health: Health,
        exposition: Exposition,
        lifespan: Callable[[Any], Any],
    ) -> None:
        self._routes = routes
        self._health = health
        self._exposition = exposition
        self._lifespan = lifespan
        self._pages: Mapping[str, Callable[[AsgiScope], Awaitable[Reply]]] = {
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/metrics": self._metrics,
        }
        self._documents: asyncio.Task[App] | None = None

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and is_of_console(scope["path"]):
            await console_reply(scope).send(send)
            return
        if scope["type"] == "http" and scope["method"] == "GET":
            page = self._pages.get(scope["path"])
            if page is not None:
                reply = await page(scope)
                await reply.send(send)
                return
        if self._documents is None:
            self._documents = asyncio.create_task(asyncio.to_thread(self._load))
        # Who gives up waiting for it does not end it for the others.
        documents = await asyncio.shield(self._documents)
        await documents(scope, receive, send)

    def _load(self) -> App:
        from api.document.documents import documents_of

        return documents_of(self._routes, self._lifespan)

    async def _healthz(self, _: AsgiScope) -> Reply:
        """The process is alive."""
        return json_reply({"status": "alive"})

    async def _readyz(self, _: AsgiScope) -> Reply:
        """Whether requests may be sent here; what is missing, and since when."""
        found = await self._health.look()
        if found.failure is not None:
            return problem_reply(found.failure)
        answer: dict[str, Any] = {
            "status": "degraded" if found.cache else "ready",
            "store": "ok",
            "cache": found.cache or "ok",
            "rollup": "ok" if self._health.rolls_up else "elsewhere",
        }
        if found.troubles:
            answer["troubles"] = found.troubles_json
        return json_reply(answer)

    async def _metrics(self, scope: AsgiScope) -> Reply:
        """Metrics for Prometheus."""
        await self._health.look()
        _, port = scope.get("server") or (None, None)
        return Reply(200, await self._exposition.text_at(port), CONTENT_TYPE_LATEST.encode())
