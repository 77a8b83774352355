"""Lists of counters, and pages of lists: a ``next_page`` is the place of a page's last item, as
text."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import chain
from typing import Any, TypeVar

from counter import limits
from counter.core.read import Count, CountReader
from counter.errors import InvalidParameterError
from counter.holds import held_name
from counter.ports import Store
from counter.types import Accuracy, Namespace

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


@dataclass(frozen=True, slots=True)
class CounterLists:
    """Lists of a namespace's counters, in parts that are read on demand."""

    reader: CountReader
    store: Store

    async def names(
        self, namespace: Namespace, prefix: str, *, after: str | None = None
    ) -> AsyncIterator[Sequence[str]]:
        """Yield the names with *prefix*, those after *after*, in parts."""
        size = limits.BATCH_ITEMS_MAX
        while True:
            part = await self.store.control.counters(
                namespace, prefix=prefix, after=after, limit=size
            )
            if part:
                yield part
            if len(part) < size:
                return
            after = part[-1]

    async def count_names(
        self, namespace: Namespace, prefix: str, field: str, why: str, advice: str
    ) -> int:
        """Return the number of counters with *prefix*. Raises InvalidParameterError about *field*,
        with *why* and *advice*, if there are too many to be read together."""
        number = 0
        async for part in self.names(namespace, prefix):
            number += len(part)
            if number > limits.COUNTERS_TOGETHER_MAX:
                raise InvalidParameterError(
                    f"{why}, and more than {limits.COUNTERS_TOGETHER_MAX} counters begin with"
                    f" {prefix[:40]!r}: give a longer prefix, or {advice}",
                    field=field,
                )
        return number

    async def largest(
        self,
        namespace: Namespace,
        prefix: str,
        max_staleness_us: int | None,
        *,
        after: tuple[int | None, str | None],
        limit: int,
    ) -> list[Count]:
        """Return the *limit* counters with *prefix* that have the largest counts, largest first,
        *after* a count and name. It holds no more than these and a part at once."""

        def place(each: Count) -> tuple[int, str]:
            return -each.count, each.counter

        count, last = after
        largest: list[Count] = []
        async for part in self.names(namespace, prefix):
            found = await self.reader.read(namespace, part, max_staleness_us)
            if last is not None and count is not None:
                found = [each for each in found if place(each) > (-count, last)]
            largest = nsmallest(limit, [*largest, *found], key=place)
        return largest

    async def rolled_up(
        self, namespace: Namespace, prefix: str
    ) -> tuple[int, AsyncGenerator[list[Count], None]]:
        """Return an instant, and the rolled-up counts of all counters with *prefix*, ordered by
        name, in parts. Each count includes every add up to the instant, and has what is held if
        the namespace may have holds.

        The cache is not used: another process's cache may be older, and counts would go back."""
        # Read first, so that the names and counts that are read later include all up to it.
        watermark_us = min(await self.store.rollups.watermarks(namespace))

        holds = self.store.capabilities.holds
        may_hold = holds is not None and holds.may_hold(namespace)

        async def parts() -> AsyncGenerator[list[Count], None]:
            async for part in self.names(namespace, prefix):
                for start in range(0, len(part), limits.METRICS_PIECE_COUNTERS):
                    some = part[start : start + limits.METRICS_PIECE_COUNTERS]
                    held = [(held_name(x, 1), held_name(x, -1)) for x in some] if may_hold else []
                    stored = await self.reader.rolled_up(namespace, [*some, *chain(*held)])
                    sums = [(stored[up].count, stored[down].count) for up, down in held]
                    sums = sums or [(0, 0)] * len(some)
                    yield [
                        Count(
                            name, stored[name].count, stored[name].time_us, Accuracy.EVENTUAL, pair
                        )
                        for name, pair in zip(some, sums, strict=True)
                    ]

        return watermark_us, parts()
