"""Numbers that are given out once, ever: to tokens, namespaces and datasets."""

from __future__ import annotations

import asyncio
import os
import random
from typing import Final

from counter.errors import OverloadedError, StoreUnavailableError
from counter.limits import SECOND
from counter.storage.cassandra.ground import ControlKeyspace
from counter.types import TokenBlock

TOKENS: Final = "tokens"
NAMESPACES: Final = "namespaces"
DATASETS: Final = "datasets"

_ISSUER_BYTES: Final = 8
_ATTEMPTS_MAX: Final = 40
_PAUSE_MAX_S: Final = 0.2

_BEGIN: Final = (
    "INSERT INTO {control}.sequences (name, next, time, issuer, op) VALUES (?, 1, 0, ?, ?)"
    " IF NOT EXISTS"
)
#: Every taker moves ``next``, so it alone tells whether anybody was there in between.
_TAKE: Final = (
    "UPDATE {control}.sequences SET next = ?, time = ?, op = ? WHERE name = ? IF next = ?"
)
_READ: Final = "SELECT next, time, issuer, op FROM {control}.sequences WHERE name = ?"
_OP: Final = 3


class Sequences:
    """Takes numbers by compare-and-set. A number that was taken and not used is a gap."""

    def __init__(self, control: ControlKeyspace) -> None:
        self._control = control
        #: As last seen: where this process alone takes numbers, the first try is right.
        self._seen: dict[str, tuple[int, int, bytes]] = {}

    async def begin(self, name: str) -> None:
        """Have the sequence *name*, from 1."""
        op = os.urandom(16)
        await self._control.compare(
            _BEGIN,
            (name, os.urandom(_ISSUER_BYTES), op),
            seen_by=(_READ, (name,)),
            mine=op,
            at=_OP,
        )

    async def take(self, name: str, count: int = 1, now_us: int = 0) -> TokenBlock:
        """*count* numbers above all that were taken before, and *now_us*, or the latest time that
        was taken where this is later."""
        for attempt in range(_ATTEMPTS_MAX):
            seen = self._seen.get(name) or await self._read(name)
            first, latest_us, issuer = seen
            time_us = max(latest_us, now_us)
            op = os.urandom(16)
            # Forgotten until it is known how it went.
            self._seen.pop(name, None)
            applied, row = await self._control.compare(
                _TAKE,
                (first + count, time_us, op, name, first),
                seen_by=(_READ, (name,)),
                mine=op,
                at=_OP,
            )
            if applied:
                self._seen[name] = (first + count, time_us, issuer)
                return TokenBlock(issuer, first, time_us)
            if row is not None:
                self._seen[name] = (row[0], row[1], row[2])
            await asyncio.sleep(random.uniform(0, min(_PAUSE_MAX_S, 0.01 * 2**attempt)))
        raise OverloadedError(
            f"{_ATTEMPTS_MAX} tries to take numbers of {name!r} met others who took them",
            retry_after_us=SECOND,
        )

    async def _read(self, name: str) -> tuple[int, int, bytes]:
        row = await self._control.settled(_READ, name)
        if row is None:
            raise StoreUnavailableError(
                f"there is no sequence {name!r} in keyspace {self._control.keyspace!r}:"
                " run `counter schema apply`"
            )
        return row[0], row[1], row[2]
