"""Shed load: reject writes that could not be answered in time, and bodies without room.

Rejections are delayed and limited in rate. Rejected clients retry, and reading and answering a
rejected request costs a good part of an add: at many times its capacity, the service would do
nothing but reject. And the event loop polls for requests again while every ready connection has
one, so immediate responses could block everything else.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Final

from api.http.responses import Response, problem_response
from counter import limits
from counter.core.admission import Bounded, Load
from counter.errors import InvalidParameterError, OverloadedError
from counter.quantities import parse_duration

#: Longer values are not parsed, because parsed ones are cached.
_TIMEOUT_BYTES_MAX: Final = 64
#: The pace of rejections: 5,000 a second, about a tenth of what a core can do.
_REJECT_EVERY_S: Final = 0.02
_REJECTED_AT_ONCE: Final = 100
#: Responses that are sent immediately in one turn of the event loop.
_AT_ONCE_IN_A_TURN: Final = 500

_log = logging.getLogger("counter.api")


@lru_cache(maxsize=1_024)
def timeout_us(value: bytes) -> int:
    """Return the microseconds that a client waits. Raises InvalidParameterError."""
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


class LoadShedder:
    """Reject writes before any work."""

    def __init__(self, load: Load) -> None:
        self._load = load
        #: Bodies that are being read.
        self.bodies = Bounded("bytes of bodies are being read", limits.BODIES_BYTES_MAX)
        #: Rejected requests that are not answered yet: at most one per connection.
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_rejecting = False
        self._sent_in_turn = 0
        self._refusal: OverloadedError | None = None
        self._response: Response

    def refuses(self, timeout: bytes | None, send: Callable[[Response], None]) -> bool:
        """Return True, and schedule a rejection, if the write would exceed its deadline.
        *timeout* is the value of the client's header."""
        try:
            within_us = None if timeout is None else timeout_us(timeout)
        except InvalidParameterError as error:
            send(problem_response(error))
            return True
        refusal = self._load.refusal(within_us)
        if refusal is None:
            return False
        if refusal is not self._refusal:
            self._refusal, self._response = refusal, problem_response(refusal)
        self._reject_soon(partial(send, self._response))
        return True

    def must_wait(self) -> bool:
        """Return whether an immediate response must wait for the next turn of the event loop,
        because this turn already has many."""
        self._sent_in_turn += 1
        if self._sent_in_turn == 1:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        return self._sent_in_turn > _AT_ONCE_IN_A_TURN

    def _begin_turn(self) -> None:
        self._sent_in_turn = 0

    async def admit_write(self, timeout: bytes | None) -> None:
        """Raise OverloadedError, after a delay, for such a write, and InvalidParameterError.

        Called when the body is complete and the write follows at once: so requests of one turn of
        the event loop are admitted with all the others counted.
        """
        try:
            self.check_write(timeout)
        except OverloadedError:
            await self.delay()
            raise

    def check_write(self, timeout: bytes | None, waited_s: float = 0.0) -> None:
        """Raise OverloadedError, at once, for such a write that has *waited* already, and
        InvalidParameterError."""
        within_us = None if timeout is None else timeout_us(timeout)
        if waited_s:
            most_us = self._load.wait_max_us if within_us is None else within_us
            within_us = max(0, most_us - round(waited_s * limits.SECOND))
        self._load.check(within_us)

    async def delay(self) -> None:
        """Wait until one more rejection may be sent."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reject_soon(partial(_resume, turn))
        await turn

    def _reject_soon(self, reject: Callable[[], None]) -> None:
        self._waiting.append(reject)
        if not self._is_rejecting:
            self._is_rejecting = True
            asyncio.get_running_loop().call_later(_REJECT_EVERY_S, self._reject_some)

    def _reject_some(self) -> None:
        for _ in range(min(len(self._waiting), _REJECTED_AT_ONCE)):
            try:
                self._waiting.popleft()()
            except Exception:
                # A failed response must not delay the others.
                _log.exception("a rejection could not be answered")
        self._is_rejecting = bool(self._waiting)
        if self._is_rejecting:
            asyncio.get_running_loop().call_later(_REJECT_EVERY_S, self._reject_some)


def _resume(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
