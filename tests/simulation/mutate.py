"""Small changes of the service's source, for as long as a test wants them.

The code of a function is replaced in place, so that every importer has the change. A
change that no longer fits the source raises: a bug that is not planted cannot be caught.
"""

import __future__

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any
from unittest.mock import patch

_FLAGS = __future__.annotations.compiler_flag


@dataclass(frozen=True, slots=True)
class Edit:
    """In the source of *function*, *old* becomes *new*; it must stand there once."""

    function: Any
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Swap:
    """The attribute *name* of *owner* becomes *value*, or the result of *value* for it."""

    owner: Any
    name: str
    value: Any = None
    of: Callable[[Any], Any] | None = None


Change = Edit | Swap


@cache
def _source(function: FunctionType) -> str:
    """As it was when it was first asked for: files may change during a long run."""
    return textwrap.dedent(inspect.getsource(function))


@contextmanager
def planted(changes: tuple[Change, ...]) -> Iterator[None]:
    """Have *changes* made."""
    edits: dict[FunctionType, list[Edit]] = {}
    with ExitStack() as stack:
        for change in changes:
            if isinstance(change, Edit):
                edits.setdefault(change.function, []).append(change)
            else:
                value = change.value
                if change.of is not None:
                    value = change.of(getattr(change.owner, change.name))
                stack.enter_context(patch.object(change.owner, change.name, value))
        for function, some in edits.items():
            stack.enter_context(_edited(function, some))
        yield


@contextmanager
def _edited(function: FunctionType, edits: list[Edit]) -> Iterator[None]:
    text = _source(function)
    for edit in edits:
        if text.count(edit.old) != 1:
            raise LookupError(
                f"{edit.old!r} occurs {text.count(edit.old)} times in {function.__qualname__}"
            )
        text = text.replace(edit.old, edit.new)
    made: dict[str, Any] = {}
    code = compile(text, f"<bug in {function.__qualname__}>", "exec", _FLAGS, dont_inherit=True)
    exec(code, function.__globals__, made)
    before = function.__code__
    function.__code__ = made[function.__name__].__code__
    try:
        yield
    finally:
        function.__code__ = before
