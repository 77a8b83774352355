"""Import a file of counts into a service exactly once, however often that is tried.

The lines are counted in order, about a hundred in one atomic add, and each of these adds also adds
their number to a counter of the target, the *ledger*. Its count is the number of lines imported,
and the next run begins there. Concurrent runs, or a run after a crash, agree on the token of the
next add: its nonce is derived from the file, and its instant is reserved by the service under a key
that is derived from the file, too. docs/how-to/move-counts.md has the argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import Final

from counter.client import CounterClient, Token
from counter.client.answers import Event
from counter.errors import TokenConflictError, TokenTooOldError
from counter.limits import MINUTE, PAGE_ITEMS_MAX, SECOND
from counter.ops.import_file import Chunk

#: After this time, plus the accept limit, no write of an abandoned add can be applied any more: the
#: write time-out and the difference of clocks.
_SETTLED_US: Final = 5 * MINUTE


#: More than the difference of the clocks of two server processes.
_APART: Final = timedelta(seconds=5)


class LedgerError(Exception):
    """The ledger has a value that imports of this file alone cannot have produced."""


class LaterError(Exception):
    """An import was interrupted so long ago that its key is about to expire."""


@dataclass(frozen=True, slots=True)
class Horizon:
    """Times of the target's namespace, in microseconds."""

    accept_limit_us: int
    key_ttl_us: int

    @property
    def margin_us(self) -> int:
        """Return the time after which an add can no longer be applied; shorter if keys expire
        early."""
        return self.accept_limit_us + min(_SETTLED_US, self.key_ttl_us // 4)

    @property
    def chain_us(self) -> int:
        """Return how long after the first instant of a chunk another one may follow.

        The key of the first must not expire while an add under a later one can be applied.
        """
        return self.key_ttl_us - self.margin_us


class Importer:
    """Counts the chunks of one file through a client of the target's namespace.

    Raises the client's CounterErrors, LedgerError, and LaterError.
    """

    def __init__(
        self, client: CounterClient, import_id: str, ledger: str, horizon: Horizon
    ) -> None:
        self._client = client
        self._id = import_id
        self._ledger = ledger
        self._horizon = horizon
        #: The instant of the previous chunk's add.
        self._latest: datetime | None = None

    def counted(self) -> int:
        """Return how many lines are counted now."""
        return self._client.get(self._ledger, max_staleness="0s").count

    def run(self, chunks: Iterable[Chunk], done: int, on_progress: Callable[[int], None]) -> None:
        """Count all *chunks*, of which the first *done* lines were counted before; *on_progress* is
        called with the number of counted lines."""
        for chunk in chunks:
            if chunk.end < done:
                # The chunk after it was sent only after this one was known to be counted.
                continue
            self._count(chunk)
            on_progress(chunk.end)

    def _count(self, chunk: Chunk) -> None:
        """Count *chunk*, after all chunks before it."""
        first: datetime | None = None
        after = ""
        while True:
            # Reserve the instant first and read the count afterwards. If another run has another
            # instant because the key expired, it had it so long ago that its result is in this
            # count.
            reserved = self._client.add_and_get(
                self._ledger, 0, token=Token.from_key(f"import:{self._id}:{chunk.number}{after}")
            )
            first = first or reserved.event_time
            if reserved.count > chunk.end:
                return
            if reserved.count == chunk.end:
                if self._is_confirmed(chunk):
                    return
                continue
            if reserved.count != chunk.first:
                raise self._wrong(reserved.count, chunk)
            if _us(reserved.event_time - first) > self._horizon.chain_us:
                raise LaterError(
                    f"lines {chunk.first + 1} to {chunk.end} were begun at {first.isoformat()}, and"
                    f" the key of that is forgotten after {self._horizon.key_ttl_us // SECOND} s;"
                    f" begin again after that: in {self._horizon.margin_us // SECOND} s",
                )
            if not after and self._was_away(reserved.event_time):
                instants = self._forgotten(reserved.event_time)
                if self.counted() != chunk.first:
                    # Other runs continued meanwhile: the listed events may be of a later chunk.
                    continue
                if self._counts_under_one_of(instants, chunk):
                    return
            if self._is_sent(chunk, reserved.event_time):
                self._latest = reserved.event_time
                return
            # The token is void permanently, so the next instant is safe. Its key contains this
            # instant, because the successor of a new first instant must differ from the successor
            # of an expired one.
            after = f":{_time_us(reserved.event_time)}"

    def _is_sent(self, chunk: Chunk, instant: datetime) -> bool:
        """Return whether *chunk* counts under its token of *instant*: if not, it never will."""
        items = [*chunk.items, (self._ledger, chunk.lines)]
        try:
            self._client.atomic(items, token=chunk.token(self._id, _time_us(instant)))
        except TokenTooOldError as error:
            if error.applied is None:
                raise
            return False
        except TokenConflictError as error:
            raise LedgerError(
                f"another file was imported under the same id ({self._ledger!r}): {error.detail}"
            ) from error
        return True

    def _was_away(self, instant: datetime) -> bool:
        """Return whether keys may have expired since this run last counted something."""
        chain = timedelta(microseconds=self._horizon.chain_us)
        return self._latest is None or instant - self._latest >= chain

    def _forgotten(self, instant: datetime) -> list[datetime]:
        """Yield instants before *instant* that other runs may have reserved for the next chunk,
        under keys that are expired: those of adds of 0 after the last counted lines."""
        # Asking with a younger token would count it; and keys of younger ones are not expired.
        late = instant - timedelta(microseconds=self._horizon.margin_us)
        instants: list[datetime] = []
        oldest: datetime | None = None
        for event in self._client.events(self._ledger):
            if oldest is not None and event.event_time < oldest:
                break
            if event.delta and oldest is None:
                # Later ones may come from a process whose clock is behind.
                oldest = event.event_time - _APART
            if not event.delta and event.event_time <= late:
                instants.append(event.event_time)
        return instants[::-1]

    def _counts_under_one_of(self, instants: Iterable[datetime], chunk: Chunk) -> bool:
        """Return whether *chunk* counts under one of some instants whose keys are expired.

        Over Cassandra a crash may leave an add half written, and a rollup worker completes it at an
        unknown time: if no worker has run, that is still to come. Asking about such a token decides
        it permanently.
        """
        try:
            return any(self._is_sent(chunk, each) for each in instants)
        except TokenTooOldError as error:
            # Its events are not dropped yet, so half of the add may exist: do not guess.
            raise LaterError(
                f"lines {chunk.first + 1} to {chunk.end} were begun so long ago that it is unknown"
                " whether they are counted; begin again when those events are dropped, a slice of"
                " time after their retention, by a rollup worker that runs"
            ) from error

    def _is_confirmed(self, chunk: Chunk) -> bool:
        """Return whether *chunk*, the last one in the ledger's count, is permanently counted.

        Possibly no run got the acknowledgement. Then the add is sent again with the same token. If
        it is older than retention, it is permanent.
        """
        event = self._event_of(chunk)
        if event is not None:
            with suppress(TokenTooOldError):
                return self._is_sent(chunk, event.event_time)
        # Unless the count lost it as well, as can happen with a write that was applied too late.
        return self.counted() >= chunk.end

    def _event_of(self, chunk: Chunk) -> Event | None:
        """Return the ledger's event of *chunk*."""
        nonce = chunk.token(self._id, 0).nonce.hex()
        for event in islice(self._client.events(self._ledger), PAGE_ITEMS_MAX):
            if event.event_id.replace("-", "") == nonce:
                return event
        return None

    def _wrong(self, count: int, chunk: Chunk) -> LedgerError:
        return LedgerError(
            f"counter {self._ledger!r} is {count}, which no import of this file leaves after its"
            f" first {chunk.first} lines: somebody else wrote to it, or imports another file under"
            " the same id; nothing more is counted"
        )


def _time_us(instant: datetime) -> int:
    return _us(instant - datetime.fromtimestamp(0, instant.tzinfo))


def _us(span: timedelta) -> int:
    return span // timedelta(microseconds=1)
