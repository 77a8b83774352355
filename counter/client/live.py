"""A count as it changes: the service's stream of server-sent events, read and taken up again.

No I/O here. A library for these streams would bring its own idea of reconnecting; what is read of
one is a few lines.
"""

from __future__ import annotations

import json
from typing import Final

from counter import limits
from counter.client import answers
from counter.client.calls import Request
from counter.client.failures import error_of_problem, too_large, unexpected
from counter.client.retrying import Policy
from counter.errors import CounterError

#: The service breaks a silence every 15 s; after so long nobody is there any more.
SILENCE_S: Final = 40.0
#: What a stream is asked for with.
HEADERS: Final = (("Accept", "text/event-stream"),)
Told = answers.Count | CounterError


class Course:
    """What is known of one counter's stream, from one connection to the next."""

    def __init__(self, request: Request, policy: Policy) -> None:
        self.request = request
        self.number = 0
        self._policy = policy
        self._failures = 0
        self._heard_s = policy.now_s()
        self._event = self._data = ""

    def line(self, text: str) -> Told | None:
        """What *text*, the next line of the stream, tells of the count: it, or why it cannot be
        told now. Raises the CounterError of a definite end."""
        self._heard_s, self._failures = self._policy.now_s(), 0
        name, _, value = text.partition(":")
        if name == "event":
            self._event = value.strip()
        elif name == "data":
            self._data += value.strip()
            if len(self._data) > limits.ANSWER_ONE_BYTES_MAX:
                raise too_large(limits.ANSWER_ONE_BYTES_MAX, "an event of a stream")
        elif not text:
            event, data = self._event, self._data
            self._event = self._data = ""
            return _told(event, data)
        return None

    def pause_s(self, error: CounterError | None) -> float:
        """How long to wait before the next connection: after *error*, or where the service ended
        the stream in order. Raises *error* where it will not get better, or where nothing was heard
        for as long as a call may take."""
        self.number += 1
        self._event = self._data = ""
        if error is None:
            return self._policy.draw(self._policy.options.backoff_first_s)
        silent_s = self._policy.now_s() - self._heard_s
        # What the service asks to wait for is silence, too.
        silent_s += (error.retry_after_us or 0) / 1e6
        is_over = silent_s >= self._policy.options.deadline_s
        if error.retry == "never" or is_over:
            raise error
        self._failures += 1
        return self._policy.pause_s(self._failures, error)


def _told(event: str, data: str) -> Told | None:
    if event not in ("count", "problem"):
        return None
    try:
        body = json.loads(data)
        if event == "count":
            return answers.count_of(body)
        error = error_of_problem(body)
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as broken:
        raise unexpected(200, data.encode()) from broken
    if error.retry == "never":
        raise error
    return error
