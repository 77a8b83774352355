"""Adds as lines: each is committed as it comes, and answered by a line when it is durable.

The responses have the order of the lines, and a stream lasts as long as its connection. It waits
where a request would be rejected: for the load and for the rates of its key and its namespace. It
reads no more than it holds, so that TCP slows down a client that sends too fast.
"""

from __future__ import annotations

import asyncio
from codecs import BOM_UTF8
from collections.abc import Sequence
from typing import Final

from api.http.auth import Authorizer, Caller
from api.http.call import NDJSON, Call, Message, Receive, Send
from api.http.connections import ReadQueue
from api.http.pipeline import known_error
from api.http.problems import problem_bytes
from api.http.streaming import StreamResponse, Streams
from api.routes.items import Items, texts_of
from counter import limits
from counter.api_keys import Scope
from counter.background import TURN_ITEMS, pause
from counter.core.rate_limits import Allowance, BatchAllowance
from counter.core.results import Added
from counter.core.service import CounterService
from counter.errors import (
    CounterError,
    InvalidBodyError,
    OverloadedError,
    RateLimitedError,
    StreamEndedError,
    TokenMissingError,
)
from counter.limits import MILLISECOND, SECOND
from counter.quantities import format_duration
from counter.types import Namespace

#: How often a stream looks whether the load lets it go on.
_LOOK_US: Final = 50 * MILLISECOND
#: What was not done, and will be done later.
_REJECTED: Final = (OverloadedError, RateLimitedError)
#: Lines that no later attempt can make adds.
_NO_ADD: Final = (InvalidBodyError, TokenMissingError)
#: How long a client may take to stop sending when its stream was ended: if the connection were
#: closed before, its last responses could be lost on their way.
_LAST_WORDS_S: Final = 1.0
_LINE_BYTES_MAX: Final = limits.ADD_STREAM_LINE_BYTES_MAX


class AddStreams:
    """The open streams of adds of a process."""

    def __init__(
        self,
        service: CounterService,
        authorizer: Authorizer,
        items_max: int,
        queue: ReadQueue,
        *,
        shares_by_address: bool = True,
    ) -> None:
        """A commit has at most *items_max* lines of a stream. *queue* shares the time to read lines
        and to make responses."""
        self._service = service
        self._authorizer = authorizer
        self._items_max = items_max
        self.queue = queue
        self.silence_us = limits.ADD_STREAM_SILENCE_US
        self.streams = Streams(
            "streams of adds",
            "send a batch with its Content-Length",
            limits.ADD_STREAMS_MAX,
            limits.ADD_STREAMS_PER_KEY_MAX,
            limits.ADD_STREAMS_PER_ADDRESS_MAX if shares_by_address else 0,
        )
        self._bodies: set[_Lines] = set()

    async def open(self, call: Call) -> StreamResponse:
        """Return the response to a body of lines. Raises OverloadedError."""
        await call.admit_write()
        end = self.streams.count(call)
        lines = _Lines(call.receive)
        self._bodies.add(lines)

        def ended() -> None:
            self._bodies.discard(lines)
            lines.close()
            end()

        # A client that waits for 100 Continue gets it by this, and only before a response begins.
        await lines.start()

        async def stream(send: Send, _: Receive) -> None:
            await self._respond(call, lines, send)

        return StreamResponse.of(NDJSON, stream, ended)

    def close(self) -> None:
        """End all streams after the lines that are being added, and accept no more, on shutdown."""
        self.streams.is_closed = True
        for each in self._bodies:
            each.end("this process is shutting down")

    async def _respond(self, call: Call, lines: _Lines, send: Send) -> None:
        """Respond to all lines. A line that says why follows them if the stream is ended here."""
        # The head at once: some clients send nothing before they have it.
        await send(_piece(b""))
        number = refused = 0
        # More at a time only while all are adds: many streams of others would make long turns.
        most = min(TURN_ITEMS, self._items_max)
        try:
            while some := await lines.next(most, self.silence_us):
                namespace, outcomes = await self._add(call, lines, some, number)
                texts = await self.queue.answer(texts_of(namespace, outcomes))
                number += len(some)
                await send(_piece("".join(f"{text}\n" for text in texts).encode()))
                for each in outcomes:
                    refused = refused + 1 if isinstance(each, _NO_ADD) else 0
                if refused >= limits.ADD_STREAM_REFUSED_MAX:
                    raise StreamEndedError(f"the last {refused} lines are no adds: correct them")
                most = min(TURN_ITEMS if refused else 2 * most, self._items_max)
        except CounterError as error:
            ended = StreamEndedError(
                f"{error.detail}; the {number} lines before this are answered, and what came after"
                " them was not added: send it again with the same tokens"
            )
            await send(_piece(problem_bytes(ended) + b"\n"))
            await lines.discard()

    async def _add(
        self, call: Call, lines: _Lines, some: Sequence[bytes | None], number: int
    ) -> tuple[Namespace, Sequence[Added | CounterError]]:
        """Return the namespace and the outcomes of *some* lines, the first of which has this
        *number*. Raises CounterError if the stream must end, with nothing added."""
        caller, namespace = await self._wait_for_room(call, lines, len(some))
        outcomes = await self._outcomes(caller, namespace, some, number)
        while rejected := [n for n, each in enumerate(outcomes) if isinstance(each, _REJECTED)]:
            try:
                allowance, namespace = await self._wait(
                    call, lines, [outcomes[n] for n in rejected]
                )
            except CounterError:
                # The others were added, so these have outcomes too.
                break
            again = await self._outcomes(allowance, namespace, [some[n] for n in rejected], number)
            for index, outcome in zip(rejected, again, strict=True):
                outcomes[index] = outcome
        return namespace, outcomes

    async def _outcomes(
        self,
        allowance: Allowance,
        namespace: Namespace,
        some: Sequence[bytes | None],
        number: int,
    ) -> list[Added | CounterError]:
        try:
            items = await self.queue.run(Items.of_lines(some, number))
            return [*await items.add(self._service, namespace, allowance)]
        except Exception as error:
            return [known_error(error)] * len(some)

    async def _wait_for_room(
        self, call: Call, lines: _Lines, adds: int
    ) -> tuple[Caller, Namespace]:
        """Wait until *adds* more may be added; return the caller and the namespace. Raises
        CounterError."""
        while True:
            caller, namespace = await self._check(call)
            wait_us = _LOOK_US
            if self._service.load.refusal() is None:
                try:
                    caller.charge(namespace, adds)
                    return caller, namespace
                except RateLimitedError as error:
                    wait_us = error.retry_after_us or SECOND
            await lines.pause(wait_us)

    async def _wait(
        self, call: Call, lines: _Lines, refusals: Sequence[Added | CounterError]
    ) -> tuple[Allowance, Namespace]:
        """Wait until lines that were rejected can be added; return their allowance, which the
        resolutions of late tokens were taken from, and the namespace. Raises CounterError.

        They are charged before they are read again: if many streams wait for the rate of one key,
        all but one of them only look at it."""
        late = sum(isinstance(each, RateLimitedError) for each in refusals)
        wait_us = max(getattr(each, "retry_after_us", None) or 0 for each in refusals)
        while True:
            await lines.pause(max(wait_us, _LOOK_US))
            caller, namespace = await self._check(call)
            try:
                if late:
                    caller.resolve(late, overdraws=False)
                return BatchAllowance(caller, late), namespace
            except RateLimitedError as error:
                wait_us = error.retry_after_us or SECOND

    async def _check(self, call: Call) -> tuple[Caller, Namespace]:
        """Return the caller and the namespace, which may have changed since the last time. Raises
        CounterError if the stream must end."""
        caller = self._authorizer.caller(call.header(b"authorization"))
        caller.require(Scope.WRITE, call.namespace)
        namespaces = self._service.namespaces
        if namespaces.needs_reread(call.namespace, writes=True):
            await namespaces.reread()
        return caller, namespaces.get(call.namespace)


class _Lines:
    """The lines of a body as they arrive."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._data = b""
        #: Whether no line was taken yet: the first one may begin with a byte order mark.
        self._is_start = True
        self._is_whole = False
        #: Why no more are taken; empty if the client is gone.
        self._why: str | None = None
        self._ended = asyncio.Event()
        self._changed = asyncio.Event()
        self._has_room = asyncio.Event()
        self._filling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to read."""
        self._filling = asyncio.create_task(self._fill())
        await asyncio.sleep(0)

    def close(self) -> None:
        """Read no more."""
        if self._filling is not None:
            self._filling.cancel()

    def end(self, why: str) -> None:
        """Take no more lines, and drop what arrives."""
        if self._why is None:
            self._why, self._data = why, b""
        for each in (self._ended, self._changed, self._has_room):
            each.set()

    async def _fill(self) -> None:
        while not self._is_whole:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.end("")
                return
            if self._why is None:
                self._data += message.get("body", b"")
            self._is_whole = not message.get("more_body", False)
            self._changed.set()
            while len(self._data) > limits.ADD_STREAM_BYTES_MAX:
                self._has_room.clear()
                await self._has_room.wait()

    async def next(self, most: int, silence_us: int) -> list[bytes | None]:
        """Return the lines that have arrived, at least one and at most *most*, and None for one
        that is too long; none at the end, or if the client is gone. Raises StreamEndedError."""
        while True:
            self._check()
            if (some := self._cut(most)) or (self._is_whole and not self._data):
                return some
            if self._is_whole or b"\n" in self._data:
                # All of those lines were empty.
                await asyncio.sleep(0)
                continue
            self._changed.clear()
            if not await pause(self._changed, silence_us / SECOND):
                raise StreamEndedError(
                    f"no line came for {format_duration(silence_us)}; an empty one keeps a stream"
                    " open"
                )

    async def pause(self, wait_us: int) -> None:
        """Wait. Raises StreamEndedError if the stream ends meanwhile."""
        await pause(self._ended, wait_us / SECOND)
        self._check()

    async def discard(self) -> None:
        """Discard further input until the request ends or _LAST_WORDS_S passes."""
        self.end("")
        if self._filling is not None:
            await asyncio.wait((self._filling,), timeout=_LAST_WORDS_S)

    def _check(self) -> None:
        if self._why is not None:
            raise StreamEndedError(self._why or "the client is gone")

    def _cut(self, most: int) -> list[bytes | None]:
        """Remove up to *most* whole lines; return those that are not empty."""
        *whole, rest = self._data.split(b"\n", most)
        if len(whole) < most:
            if self._is_whole:
                whole, rest = [*whole, rest], b""
            # Keep only enough of an overlong line to detect it.
            rest = rest[: _LINE_BYTES_MAX + 1]
        if self._is_start and whole:
            self._is_start = False
            whole[0] = whole[0].removeprefix(BOM_UTF8)
        self._data = rest
        self._has_room.set()
        return [
            line.strip() if len(line) <= _LINE_BYTES_MAX else None for line in whole if line.strip()
        ]


def _piece(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}
