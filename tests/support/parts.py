"""Faults and pauses of single methods of a store, of whichever part has them."""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import isawaitable
from typing import Any
from unittest.mock import patch

from counter.telemetry.store_calls import PARTS


def part_of(store: Any, method: str) -> Any:
    """The part of *store* that has *method*, or the store itself."""
    parts = (getattr(store, name) for name in PARTS)
    return next((part for part in parts if hasattr(part, method)), store)


@contextmanager
def failing(store: Any, method: str, error: Exception, times: int = 10_000) -> Iterator[None]:
    """Have the next calls of *method* raise *error*."""
    part = part_of(store, method)
    works, fails = getattr(part, method), iter(range(times))

    async def call(*arguments: Any, **named: Any) -> Any:
        if next(fails, None) is not None:
            raise error
        return await works(*arguments, **named)

    with patch.object(part, method, call):
        yield


@contextmanager
def followed(
    store: Any, *methods: str, by: Callable[[], Awaitable[object] | object], times: int = 1
) -> Iterator[None]:
    """Have *by* happen once a next call of *methods* was answered, before its caller goes on."""
    left = iter(range(times))

    def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
        async def slowly(*arguments: Any, **named: Any) -> Any:
            result = await call(*arguments, **named)
            if next(left, None) is not None and isawaitable(happened := by()):
                await happened
            return result

        return slowly

    with ExitStack() as stack:
        for method in methods:
            part = part_of(store, method)
            stack.enter_context(patch.object(part, method, wrapped(getattr(part, method))))
        yield
