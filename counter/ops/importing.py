"""How a file of counts gets into a service exactly once, however often that is tried.

The lines are counted in order, about a hundred in one atomic add, and each of these adds as many to
a counter of the target, the *ledger*: so its count says for ever how many of the lines are counted,
and the next one begins there. What two runs at once, or one after a crash, agree on is the token of
the add that comes next: its nonce follows from the file, its instant is reserved by the service
under a key that follows from the file, too. docs/how-to/move-counts.md has the argument.
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

#: Whatever may still land of an add that nobody waits for has landed by then, its accept limit
#: not counted: the time-out of a write, and clocks that are apart.
_SETTLED_US: Final = 5 * MINUTE


#: More than the clocks of two processes that serve are apart.
_APART: Final = timedelta(seconds=5)


class LedgerError(Exception):
    """The ledger does not say what it would if only imports of this file had written it."""


class LaterError(Exception):
    """An import was broken off so long ago that its key is about to be forgotten."""


@dataclass(frozen=True, slots=True)
class Horizon:
    """Times of the target's namespace, in microseconds."""

    accept_limit_us: int
    key_ttl_us: int

    @property
    def margin_us(self) -> int:
        """After what time, at most, an add can land no more; short where keys live shortly."""
        return self.accept_limit_us + min(_SETTLED_US, self.key_ttl_us // 4)

    @property
    def chain_us(self) -> int:
        """So long after the first instant for a piece another one may follow: the key of the first
        must not be forgotten while an add under a later one can land."""
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
        #: The instant that the chunk before was counted under.
        self._latest: datetime | None = None

    def counted(self) -> int:
        """How many lines are counted, as of now."""
        return self._client.get(self._ledger, max_staleness="0s").count

    def run(self, chunks: Iterable[Chunk], done: int, told: Callable[[int], None]) -> None:
        """Count all *chunks*, of which the first *done* lines were counted before; *told* is called
        with the lines that are."""
        for chunk in chunks:
            if chunk.end < done:
                # The one after it was sent only when this one was known to be counted.
                continue
            self._count(chunk)
            told(chunk.end)

    def _count(self, chunk: Chunk) -> None:
        """Have *chunk* counted; all chunks before it are."""
        first: datetime | None = None
        after = ""
        while True:
            # The instant first, and then what is counted: whoever has another instant, because the
            # key was forgotten, had it so long ago that what came of it is in this count.
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
                    # Others went on meanwhile: what was listed may be of what comes later.
                    continue
                if self._counts_under_one_of(instants, chunk):
                    return
            if self._is_sent(chunk, reserved.event_time):
                self._latest = reserved.event_time
                return
            # Void for ever, for everybody: the next instant is safe. Its key names this one: else
            # what follows a new first instant could be what followed a forgotten one.
            after = f":{_time_us(reserved.event_time)}"

    def _is_sent(self, chunk: Chunk, instant: datetime) -> bool:
        """Whether *chunk* counts under its token of *instant*: if not, it never will."""
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
        """Whether keys may have been forgotten since this run counted something."""
        chain = timedelta(microseconds=self._horizon.chain_us)
        return self._latest is None or instant - self._latest >= chain

    def _forgotten(self, instant: datetime) -> list[datetime]:
        """Instants before *instant* that other runs may have reserved for what comes next, under
        keys that are forgotten: those of adds of 0 after the last lines that are counted."""
        # Asked about under a younger one it would be counted; and none of those is forgotten.
        late = instant - timedelta(microseconds=self._horizon.margin_us)
        instants: list[datetime] = []
        oldest: datetime | None = None
        for event in self._client.events(self._ledger):
            if oldest is not None and event.event_time < oldest:
                break
            if event.delta and oldest is None:
                # Later ones may be of a process whose clock is behind.
                oldest = event.event_time - _APART
            if not event.delta and event.event_time <= late:
                instants.append(event.event_time)
        return instants[::-1]

    def _counts_under_one_of(self, instants: Iterable[datetime], chunk: Chunk) -> bool:
        """Whether *chunk* counts under one of some instants whose keys are forgotten.

        Over Cassandra a crash may leave an add half written, which a rollup worker makes whole, and
        nobody sees when: with no worker for so long, that is still to come. Asked about, each such
        token is decided for ever.
        """
        try:
            return any(self._is_sent(chunk, each) for each in instants)
        except TokenTooOldError as error:
            # Its events are still there, and so may be a half of it: no guess is made.
            raise LaterError(
                f"lines {chunk.first + 1} to {chunk.end} were begun so long ago that nobody can"
                " tell now what became of them; begin again when those events are dropped, a slice"
                " of time after their retention, by a rollup worker that runs"
            ) from error

    def _is_confirmed(self, chunk: Chunk) -> bool:
        """Whether *chunk*, the last one in the ledger's count, is there for good.

        Nobody may have been told so yet: then the add that a crash left is sent once more, with the
        very token it had. Older than events are kept, it is.
        """
        event = self._event_of(chunk)
        if event is not None:
            with suppress(TokenTooOldError):
                return self._is_sent(chunk, event.event_time)
        # Unless it is gone from the count as well, as what landed too late may be.
        return self.counted() >= chunk.end

    def _event_of(self, chunk: Chunk) -> Event | None:
        """The ledger's event of *chunk*."""
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
