"""Watch the calls of a store: tracing adds spans, and tests count, delay and fail calls."""

from __future__ import annotations

from collections.abc import Callable
from inspect import iscoroutinefunction
from typing import Any, Final, cast

from counter.ports import Store

#: The parts of a store.
PARTS: Final = (
    "events",
    "separate_writes",
    "rollups",
    "recounts",
    "decisions",
    "control",
    "leases",
    "keys",
)


def wrapped(store: Store, wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Store:
    """Return *store* with each asynchronous method, of it and of its parts, replaced by what *wrap*
    returns for its name and itself."""
    return cast(Store, _Wrapped(store, wrap))


class _Wrapped:
    def __init__(self, inner: object, wrap: Callable[[str, Callable[..., Any]], Any]) -> None:
        self._inner = inner
        self._wrap = wrap

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name in PARTS and found is not None:
            found = self.__dict__[name] = _Wrapped(found, self._wrap)
        elif iscoroutinefunction(found):
            found = self._wrap(name, found)
        return found
