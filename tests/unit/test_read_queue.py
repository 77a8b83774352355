"""The work of large requests, in turn for a bounded time in each turn of the event loop."""

import gc
import time
import weakref
from collections.abc import Generator

import pytest

from api.http.connections import ReadQueue
from counter.errors import InvalidBodyError


class Body:
    """The sent messages of a refused request."""


async def test_a_request_that_is_refused_leaves_nothing_to_the_garbage_collector() -> None:
    """Regression: the error of a refused batch was in a cycle with its body."""

    def steps(_: Body) -> Generator[None, None, None]:
        yield
        raise InvalidBodyError("not an object")

    body = Body()
    held = weakref.ref(body)
    gc.disable()
    try:
        with pytest.raises(InvalidBodyError):
            await ReadQueue(time.monotonic).run(steps(body))
        del body
        assert held() is None
    finally:
        gc.enable()
