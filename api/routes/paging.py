"""Pages of lists: a page's ``next_page`` is the place of its last item, as text."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from counter.errors import InvalidParameterError

_Item = TypeVar("_Item")


def paged(
    found: Sequence[_Item], limit: int, place: Callable[[_Item], list[Any]]
) -> tuple[list[_Item], str | None]:
    """Return the first *limit* of what was found, and the next_page if there is more."""
    shown = list(found[:limit])
    if len(found) <= limit:
        return shown, None
    return shown, page_of(place(shown[-1]))


def page_of(parts: Sequence[Any]) -> str:
    """Return the next_page that goes on after an item at the place *parts*."""
    return base64.urlsafe_b64encode(json.dumps(parts).encode()).decode().rstrip("=")


def parts_of(page: str, count: int) -> list[Any]:
    """Return the place of a page, the last of whose *count* parts is text. Raises
    InvalidParameterError."""
    try:
        parts = json.loads(base64.urlsafe_b64decode(page + "=" * (-len(page) % 4)))
        if not isinstance(parts, list) or len(parts) != count or not isinstance(parts[-1], str):
            raise ValueError("it has other parts")
        # A lone surrogate is in no name.
        parts[-1].encode()
    except (ValueError, binascii.Error, RecursionError) as error:
        raise unknown_page(page) from error
    return parts


def unknown_page(page: str) -> InvalidParameterError:
    """Return the error about a page that no answer had."""
    return InvalidParameterError(
        f"page {page[:40]!r} is not one that this service gave out", field="page"
    )
