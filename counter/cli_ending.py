"""The end of a command that must clear away what it has begun."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Have SIGTERM and Ctrl-C end this once, by KeyboardInterrupt: a second one would cut short the
    clearing away."""
    if threading.current_thread() is not threading.main_thread():
        # Nobody sends signals to a thread.
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT)

    def end(_number: int, _frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = [signal.signal(each, end) for each in numbers]
    try:
        yield
    finally:
        for each, handler in zip(numbers, before, strict=True):
            signal.signal(each, handler)
