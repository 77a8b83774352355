"""Turns writes away that could not be answered in time, and bodies that there is no room for.

Those that are turned away are told so a little later, and not all at once. Who is refused comes
again, and to read and answer a refused request takes a good part of the time that an add takes: at
many times the load that the service can bear, it would do nothing but refuse. And the event loop
looks for requests again and again while every connection it knows of has one, so that what is
answered on the spot could keep it from everything else.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Final

from api.http.answers import problem_reply
from api.http.call import Message, Receive, Reply
from counter import limits
from counter.core.admission import Bounded, Load
from counter.durations import parse_duration
from counter.errors import InvalidParameterError, OverloadedError

#: How long the client waits for its answer: a duration, such as ``250ms``.
TIMEOUT_HEADER: Final = b"request-timeout"
#: Longer ones are not read: what was read is remembered.
_TIMEOUT_BYTES_MAX: Final = 64
#: So often, so many of those that were turned away are told: 5,000 a second, about a tenth of what
#: a core can do.
_TELL_EVERY_S: Final = 0.02
_TOLD_AT_ONCE: Final = 100
#: Requests that are answered on the spot in one turn of the event loop.
_AT_ONCE_IN_A_TURN: Final = 500

_log = logging.getLogger("counter.api")


@lru_cache(maxsize=1_024)
def timeout_us(value: bytes) -> int:
    """The microseconds that a client waits. Raises InvalidParameterError."""
    try:
        if len(value) > _TIMEOUT_BYTES_MAX:
            raise ValueError(
                f"it has {len(value)} characters; at most {_TIMEOUT_BYTES_MAX} are read"
            )
        return parse_duration(value.decode("latin-1"))
    except ValueError as error:
        raise InvalidParameterError(
            f"Request-Timeout: {error}; write it like 250ms or 2s", field="Request-Timeout"
        ) from error


class Door:
    """Where writes are refused before any work."""

    def __init__(self, load: Load) -> None:
        self._load = load
        #: Bodies that are being read.
        self.bodies = Bounded("bytes of bodies are being read", limits.BODIES_BYTES_MAX)
        #: Those that were turned away and are not told yet: one of a connection at most.
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_telling = False
        self._answered_in_turn = 0
        self._refusal: OverloadedError | None = None
        self._reply: Reply

    def refuses(self, timeout: bytes | None, answer: Callable[[Reply], None]) -> bool:
        """Whether a write could not be answered in time, of which *answer* is told soon. *timeout*
        is what the client's header says."""
        try:
            within_us = None if timeout is None else timeout_us(timeout)
        except InvalidParameterError as error:
            answer(problem_reply(error))
            return True
        refusal = self._load.refuses(within_us)
        if refusal is None:
            return False
        if refusal is not self._refusal:
            self._refusal, self._reply = refusal, problem_reply(refusal)
        self._tell_soon(partial(answer, self._reply))
        return True

    def keeps_waiting(self) -> bool:
        """Whether the answer to a request that can be answered on the spot is one for the next turn
        of the event loop: so many were given in this one that it would never end."""
        self._answered_in_turn += 1
        if self._answered_in_turn == 1:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        return self._answered_in_turn > _AT_ONCE_IN_A_TURN

    def _begin_turn(self) -> None:
        self._answered_in_turn = 0

    def guarded(self, receive: Receive, timeout: bytes | None) -> Receive:
        """*receive* of a request, whose last message raises OverloadedError, soon, for such a
        write, and InvalidParameterError.

        With the whole body there all that is left is to read it and to write: so none of the
        requests that come in one turn of the event loop is let in without counting the others.
        """

        async def receive_and_look() -> Message:
            message = await receive()
            if not message.get("more_body", False):
                await self._let_in(None if timeout is None else timeout_us(timeout))
            return message

        return receive_and_look

    async def _let_in(self, within_us: int | None) -> None:
        try:
            self._load.check(within_us)
        except OverloadedError:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._tell_soon(partial(_end, turn))
            await turn
            raise

    def _tell_soon(self, tell: Callable[[], None]) -> None:
        self._waiting.append(tell)
        if not self._is_telling:
            self._is_telling = True
            asyncio.get_running_loop().call_later(_TELL_EVERY_S, self._tell_some)

    def _tell_some(self) -> None:
        for _ in range(min(len(self._waiting), _TOLD_AT_ONCE)):
            try:
                self._waiting.popleft()()
            except Exception:
                # One that cannot be told must not keep the others waiting.
                _log.exception("a refusal could not be told")
        self._is_telling = bool(self._waiting)
        if self._is_telling:
            asyncio.get_running_loop().call_later(_TELL_EVERY_S, self._tell_some)


def _end(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
