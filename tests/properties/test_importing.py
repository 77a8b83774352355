"""Imports of one file, side by side, interrupted and paused at any point: no line counts twice."""

import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from counter.limits import DAY, HOUR, SECOND
from counter.ops.importing import Importer, ImportRefusedError, cut
from counter_client import Key, Token
from counter_client.errors import TokenCancelledError, TokenTooOldError

MARK = "imported:x"
ACCEPT_US, KEY_TTL_US, RETENTION_US = 5 * SECOND, DAY, 7 * DAY
LINES = [(f"c{number % 70}", number - 60) for number in range(150)]
EPOCH = datetime.fromtimestamp(0, UTC)


Items = Sequence[tuple[str, int]]


class Broken(Exception):
    """The run ends here: it was killed, or got no response."""


class Service:
    """The service's promise of tokens and keys, and a clock that tests move."""

    def __init__(self) -> None:
        self.now_us = 10 * DAY
        self.counts: Counter[str] = Counter()
        self.keys: dict[str, tuple[int, int]] = {}
        self.ends: dict[Token, bool] = {}
        self.cancelled: set[Token] = set()
        #: Adds that landed too late to be acknowledged: seen now, they are gone one day unless
        #: somebody asks about their tokens.
        self.ghosts: dict[Token, Items] = {}
        #: Adds that are half written: not seen now, they are whole one day, or when they are asked
        #: about.
        self.halves: dict[Token, Items] = {}

    def send(self, token: Token, items: Items) -> bool:
        """Whether *token* counts: a definite answer stays, while it is known."""
        age_us = self.now_us - token.generation_time_us
        if age_us > RETENTION_US:
            raise TokenTooOldError("forgotten", applied=None)
        if token in self.cancelled:
            raise TokenCancelledError("cancelled")
        self.make_whole(token)
        if self.ghosts.pop(token, None) is not None:
            self.ends[token] = True
        if token not in self.ends:
            self.ends[token] = age_us <= ACCEPT_US
            if self.ends[token]:
                self._land(items)
        return self.ends[token]

    def lands_late(self, token: Token, items: Items) -> bool:
        """The same without a response, and the window is closed when it lands."""
        if self._is_new(token):
            self._land(items)
            self.ghosts[token] = items
        raise Broken

    def lands_half(self, token: Token, items: Items) -> bool:
        """The same if a part of it has landed."""
        if self._is_new(token):
            self.halves[token] = items
        raise Broken

    def cancel(self, token: Token, items: Items) -> None:
        """Cancel a token that was counted."""
        assert self.ends.pop(token)
        self.cancelled.add(token)
        for name, delta in items:
            self.counts[name] -= delta

    def make_whole(self, token: Token) -> None:
        """A rollup worker completes or voids a half."""
        items = self.halves.pop(token, None)
        if items is not None and self.now_us - token.generation_time_us <= RETENTION_US:
            self._land(items)
            self.ends[token] = True

    def _is_new(self, token: Token) -> bool:
        known = token in self.ends or token in self.ghosts or token in self.halves
        return not known and self.now_us - token.generation_time_us <= ACCEPT_US

    def _land(self, items: Items) -> None:
        for name, delta in items:
            self.counts[name] += delta

    def lay_ghosts(self, age_us: int) -> None:
        """Those that are older than *age_us*, in closed windows, are not visible any more."""
        for token, items in list(self.ghosts.items()):
            if self.now_us - token.generation_time_us > age_us:
                del self.ghosts[token]
                for name, delta in items:
                    self.counts[name] -= delta

    def add(self, counter: str, delta: int, key: str) -> datetime:
        """The time of a key's add: a new one if the key expired, or was not counted in time."""
        time_us, expires_us = self.keys.get(key, (self.now_us, 0))
        token = Token(key.encode().rjust(64), time_us)
        if expires_us <= self.now_us or not self.send(token, [(counter, delta)]):
            time_us = self.now_us
            self.keys[key] = (time_us, time_us + KEY_TTL_US)
            self.send(token._replace(generation_time_us=time_us), [(counter, delta)])
        return EPOCH + timedelta(microseconds=time_us)


class Client:
    """A client with faults: *meet* is called before and after each call."""

    def __init__(
        self, service: Service, meet: Callable[[], None], send: Callable[[Token, Items], bool]
    ) -> None:
        self._service = service
        self._meet = meet
        self._send = send

    def _done(self, work: Callable[[], Any]) -> Any:
        self._meet()
        answer = work()
        self._meet()
        return answer

    def get(self, counter: str, **_: str) -> Any:
        return self._done(lambda: SimpleNamespace(count=self._service.counts[counter]))

    def add(self, counter: str, delta: int, token: Key) -> Any:
        time = self._done(lambda: self._service.add(counter, delta, token.text))
        return SimpleNamespace(event_time=time)

    def add_and_get(self, counter: str, delta: int, token: Key) -> Any:
        added = self.add(counter, delta, token)
        # The two halves of the call are not one moment.
        return SimpleNamespace(event_time=added.event_time, count=self.get(counter).count)

    def atomic(self, items: Items, token: Token) -> None:
        if not self._done(lambda: self._send(token, items)):
            raise TokenTooOldError("void", applied=False)


def run(client: Any) -> bool:
    """One run from its beginning; whether it says that all lines are counted."""
    importer = Importer(client, "x", KEY_TTL_US)
    try:
        importer.run(cut(LINES), lambda _: None)
    except (Broken, ImportRefusedError, TokenTooOldError):
        # It was killed, it came too late, or it was asleep for longer than events are kept.
        return False
    return importer.counted == len(LINES)


class Story:
    """Runs of one import, drawn from one number."""

    def __init__(self, seed: int) -> None:
        self.service = Service()
        self._draw = random.Random(seed)
        self._depth = 0
        self.calm = False

    def run(self) -> bool:
        """One run from its beginning, as far as it gets."""
        try:
            return run(Client(self.service, self._meet, self._send))
        except Broken:
            return False

    def _send(self, token: Token, items: Items) -> bool:
        """An atomic add, as far as it gets."""
        drawn = 1.0 if self.calm else self._draw.random()
        if drawn < 0.1:
            self.service.lands_late(token, items)
        if drawn < 0.2:
            self.service.lands_half(token, items)
        return self.service.send(token, items)

    def _meet(self) -> None:
        """Events between two steps of a run: nothing mostly, or time, an end, other runs."""
        self.service.now_us += self._draw.randrange(SECOND // 10)
        # A rollup worker runs at least this often.
        self.service.lay_ghosts(KEY_TTL_US // 2)
        if self.calm or self._draw.random() < 0.7:
            return
        what = self._draw.randrange(6)
        if what == 4:
            self.service.lay_ghosts(ACCEPT_US)
            return
        if what == 5:
            for token in list(self.service.halves):
                self.service.make_whole(token)
            return
        if what == 0:
            raise Broken
        if what == 1 and self._depth < 3:
            self._depth += 1
            self.run()
            self._depth -= 1
            return
        self.service.now_us += self._draw.choice(
            [SECOND, ACCEPT_US, HOUR, KEY_TTL_US // 2, KEY_TTL_US - SECOND, KEY_TTL_US]
        )


def expected(lines: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    for name, count in LINES[:lines]:
        counts[name] += count
    return counts


@pytest.mark.parametrize("part", range(2))
def test_an_import_counts_no_line_twice(part: int) -> None:
    """All lines if a run says so, and otherwise those of the first atomic adds. A run that ends
    within half of the life of a key is not refused."""
    base = int(os.environ.get("IMPORT_SEED", random.randrange(2**32)))
    ends = [0, *(chunk.end for chunk in cut(LINES))]
    whole = 0
    for seed in range(base + 300 * part, base + 300 * (part + 1)):
        story = Story(seed)
        began_us = story.service.now_us
        said = [story.run() for _ in range(6)]
        story.calm = True
        said.append(story.run())
        for token in list(story.service.halves):
            story.service.make_whole(token)
        story.service.lay_ghosts(0)
        story.service.counts.pop(MARK, 0)
        assert story.service.counts in [expected(end) for end in ends], f"IMPORT_SEED={seed}"
        if any(said) or story.service.now_us - began_us < KEY_TTL_US // 2:
            assert story.service.counts == expected(len(LINES)), f"IMPORT_SEED={seed}"
            whole += 1
    assert 0 < whole < 300


def test_a_late_import_says_what_is_counted() -> None:
    service = Service()
    sends = iter([service.send, service.lands_half])

    def first_only(token: Token, items: Items) -> bool:
        return next(sends)(token, items)

    assert not run(Client(service, lambda: None, first_only))
    service.keys = {key: found for key, found in service.keys.items() if not key.endswith(":100")}
    service.halves.clear()
    for known in (100, 0, 0):
        service.now_us += KEY_TTL_US // 2 + SECOND
        importer = Importer(Client(service, lambda: None, service.send), "x", KEY_TTL_US)  # type: ignore[arg-type]
        with pytest.raises(ImportRefusedError, match=rf"\(1d\).* {known} lines are known"):
            importer.run(cut(LINES), lambda _: None)
    service.counts.pop(MARK)
    assert service.counts == expected(100)


@pytest.mark.parametrize(
    ("sent", "cancelled", "named"),
    [(1, [0], "1 to 100"), (2, [0], "1 to 100"), (2, [1], "101 to 150"), (2, [0, 1], "1 to 150")],
)
def test_a_run_skips_what_was_cancelled_and_names_it(
    sent: int, cancelled: list[int], named: str
) -> None:
    """An earlier run has *sent* so many atomic adds."""
    service = Service()
    tokens: list[tuple[Token, Items]] = []

    def only_so_many(token: Token, items: Items) -> bool:
        if len(tokens) == sent:
            raise Broken
        tokens.append((token, items))
        return service.send(token, items)

    run(Client(service, lambda: None, only_so_many))
    for at in cancelled:
        service.cancel(*tokens[at])
    for _ in range(2):
        importer = Importer(Client(service, lambda: None, service.send), "x", KEY_TTL_US)  # type: ignore[arg-type]
        with pytest.raises(ImportRefusedError, match=rf"first 150 lines .* but {named}, "):
            importer.run(cut(LINES), lambda _: None)
    service.counts.pop(MARK)
    whole = expected(len(LINES))
    for at in cancelled:
        for name, delta in tokens[at][1]:
            whole[name] -= delta
    assert service.counts == whole


def test_a_late_import_still_confirms_lines_sent_in_time() -> None:
    """The last lines were sent in time, and were not acknowledged: they have their token."""
    service = Service()
    sends = iter([service.send, service.lands_half])

    def last_lands_half(token: Token, items: Items) -> bool:
        return next(sends)(token, items)

    assert not run(Client(service, lambda: None, last_lands_half))
    service.now_us += KEY_TTL_US * 3 // 4
    assert run(Client(service, lambda: None, service.send))
    service.now_us += 2 * KEY_TTL_US
    assert not run(Client(service, lambda: None, service.send))
    service.counts.pop(MARK)
    assert service.counts == expected(len(LINES))


def test_a_run_that_outsleeps_its_keys_counts_nothing() -> None:
    """Other runs have counted all lines in between, and the keys of these have expired."""
    service = Service()
    steps = iter(range(100))

    def others_first() -> None:
        # It has read that the import begins now.
        if next(steps) == 4:
            assert run(Client(service, lambda: None, service.send))
            service.now_us += KEY_TTL_US

    assert not run(Client(service, others_first, service.send))
    service.counts.pop(MARK)
    assert service.counts == expected(len(LINES))


def test_lines_counted_by_an_earlier_version_are_not_counted_again() -> None:
    """It counted its lines in the counter of the first key."""
    for lines in (len(LINES), 99):
        service = Service()
        service.counts[MARK] = lines
        assert not run(Client(service, lambda: None, service.send))
        assert set(service.counts) == {MARK}
