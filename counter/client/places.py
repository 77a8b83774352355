"""The base URLs of a client: each attempt goes to the next one, past those that do not answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

#: How long a base URL that did not answer is passed by; then one attempt tries it again. Without
#: that every call would begin with a failure while the first server is away, and the retries that
#: calls share would soon be used up.
_AWAY_S: Final = 1.0


class Places:
    """Base URLs, and until when which of them is passed by. Threads may share it."""

    def __init__(self, urls: Sequence[str], now_s: Callable[[], float] = time.monotonic) -> None:
        self._urls = tuple(urls)
        self._now_s = now_s
        self._away_until_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._urls)

    def pick(self, number: int) -> str:
        """Where attempt *number* of a call goes; where none answers, to each in turn."""
        count = len(self._urls)
        first = self._urls[number % count]
        if not self._away_until_s:
            return first
        now_s = self._now_s()
        for place in range(number, number + count):
            url = self._urls[place % count]
            until_s = self._away_until_s.get(url)
            if until_s is None:
                return url
            if until_s <= now_s:
                # This attempt finds out; others go by until it has.
                self._away_until_s[url] = now_s + _AWAY_S
                return url
        return first

    def answered(self, url: str) -> None:
        """*url* gave an answer, whatever it was."""
        if self._away_until_s:
            self._away_until_s.pop(url, None)

    def failed(self, url: str) -> None:
        """*url* gave none."""
        self._away_until_s[url] = self._now_s() + _AWAY_S
