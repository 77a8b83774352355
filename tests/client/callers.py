"""Both clients, called the same way."""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from counter_client import AsyncCounterClient, CounterClient, CounterError, Options


class Caller:
    """Calls a client, or its buffer, of either kind: calls are coroutines, iterators are lists."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            result = getattr(self.of, name)(*args, **kwargs)
            if inspect.isasyncgen(result):
                return [each async for each in result]
            if inspect.isgenerator(result):
                return list(result)
            return await result if inspect.isawaitable(result) else result

        return call


async def both_fail(
    url: str,
    options: Options,
    call: Callable[[Any], Awaitable[object]],
    kind: type[CounterError],
    match: str,
) -> list[CounterError]:
    """The errors of *call* on each of the clients of *url*."""
    found = []
    for make in (CounterClient, AsyncCounterClient):
        client = Caller(make(url, options=options))
        with pytest.raises(kind, match=match) as caught:
            await call(client)
        found.append(caught.value)
        await client.close()
    return found
