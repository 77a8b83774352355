"""Imports of one file, side by side, broken off and paused at any point: each line counts once."""

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from counter.limits import DAY, HOUR, SECOND
from counter.ops.importing import Horizon, Importer, LaterError, cut
from counter_client import Key, Token
from counter_client.errors import TokenTooOldError

LEDGER = "imported:x"
ACCEPT_US, KEY_TTL_US, RETENTION_US = 5 * SECOND, DAY, 7 * DAY
HORIZON = Horizon(ACCEPT_US, KEY_TTL_US)
LINES = [(f"c{number % 70}", number - 60) for number in range(150)]
EPOCH = datetime.fromtimestamp(0, UTC)


Items = Sequence[tuple[str, int]]


class Broken(Exception):
    """The run ends here: it was killed, or got no answer."""


class Service:
    """What the service promises of tokens and keys, and a clock that tests move."""

    def __init__(self) -> None:
        self.now_us = 10 * DAY
        self.counts: Counter[str] = Counter()
        self.keys: dict[str, tuple[int, int]] = {}
        self.ends: dict[Token, bool] = {}
        self.ledger: list[tuple[Token, int]] = []
        #: Adds that landed too late to be acknowledged: seen now, they are gone one day unless
        #: somebody asks about their tokens.
        self.ghosts: dict[Token, Items] = {}
        #: Adds that are half written: not seen now, they are whole one day, or when they are asked
        #: about.
        self.halves: dict[Token, Items] = {}

    def send(self, token: Token, items: Items) -> bool:
        """Whether *token* counts: what is said once is true for ever, while it is known."""
        age_us = self.now_us - token.generation_time_us
        if age_us > RETENTION_US:
            raise TokenTooOldError("forgotten", applied=None)
        self.make_whole(token)
        if self.ghosts.pop(token, None) is not None:
            self.ends[token] = True
        if token not in self.ends:
            self.ends[token] = age_us <= ACCEPT_US
            if self.ends[token]:
                self._land(token, items)
        return self.ends[token]

    def lands_late(self, token: Token, items: Items) -> bool:
        """The same where nobody hears of it, and the window is closed when it lands."""
        if self._is_new(token):
            self._land(token, items)
            self.ghosts[token] = items
        raise Broken

    def lands_half(self, token: Token, items: Items) -> bool:
        """The same where a part of it has landed, without the ledger's."""
        if self._is_new(token):
            self.halves[token] = items
        raise Broken

    def make_whole(self, token: Token) -> None:
        """What a rollup worker does of a half, if it ever comes to it."""
        items = self.halves.pop(token, None)
        if items is not None and self.now_us - token.generation_time_us <= RETENTION_US:
            self._land(token, items)
            self.ends[token] = True

    def _is_new(self, token: Token) -> bool:
        known = token in self.ends or token in self.ghosts or token in self.halves
        return not known and self.now_us - token.generation_time_us <= ACCEPT_US

    def _land(self, token: Token, items: Items) -> None:
        for name, delta in items:
            self.counts[name] += delta
        self.ledger += [(token, delta) for name, delta in items if name == LEDGER]

    def lay_ghosts(self) -> None:
        """Those whose windows are closed are seen no more."""
        for token, items in list(self.ghosts.items()):
            if self.now_us - token.generation_time_us > ACCEPT_US:
                del self.ghosts[token]
                for name, delta in items:
                    self.counts[name] -= delta
                self.ledger = [each for each in self.ledger if each[0] != token]

    def reserve(self, key: str) -> int:
        """The instant of a key: a new one where it is forgotten, or was not counted in time."""
        time_us, expires_us = self.keys.get(key, (self.now_us, 0))
        token = Token(key.encode().rjust(64), time_us)
        if expires_us <= self.now_us or not self.send(token, [(LEDGER, 0)]):
            time_us = self.now_us
            self.keys[key] = (time_us, time_us + KEY_TTL_US)
            self.send(token._replace(generation_time_us=time_us), [(LEDGER, 0)])
        return time_us


class Client:
    """A client whose calls may meet anything: *meet* is called before and after each."""

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

    def add_and_get(self, counter: str, _: int, token: Key) -> Any:
        def work() -> Any:
            time_us = self._service.reserve(token.text)
            # The two halves of the call are not one moment.
            self._meet()
            at = EPOCH + timedelta(microseconds=time_us)
            return SimpleNamespace(event_time=at, count=self._service.counts[counter])

        return self._done(work)

    def atomic(self, items: Items, token: Token) -> None:
        if not self._done(lambda: self._send(token, items)):
            raise TokenTooOldError("void", applied=False)

    def events(self, _: str) -> Iterator[Any]:
        oldest_us = self._service.now_us - RETENTION_US
        found = [
            SimpleNamespace(
                event_id=token.nonce.hex(),
                event_time=EPOCH + timedelta(microseconds=token.generation_time_us),
                delta=delta,
            )
            for token, delta in self._service.ledger
            if token.generation_time_us > oldest_us
        ]
        found.sort(key=lambda event: event.event_time, reverse=True)
        return iter(found)


class Story:
    """Runs of one import, drawn from one number."""

    def __init__(self, seed: int) -> None:
        self.service = Service()
        self._draw = random.Random(seed)
        self._depth = 0
        self.calm = False

    def run(self) -> None:
        """One run from its beginning, as far as it gets."""
        client: Any = Client(self.service, self._meet, self._send)
        importer = Importer(client, "x", LEDGER, HORIZON)
        try:
            importer.run(cut(LINES), importer.counted(), lambda _: None)
        except (Broken, LaterError):
            pass
        except TokenTooOldError:
            # It was asleep for longer than events are kept: the next run looks at the ledger.
            pass

    def _send(self, token: Token, items: Items) -> bool:
        """An atomic add, as far as it gets."""
        drawn = 1.0 if self.calm else self._draw.random()
        if drawn < 0.1:
            self.service.lands_late(token, items)
        if drawn < 0.2:
            self.service.lands_half(token, items)
        return self.service.send(token, items)

    def _meet(self) -> None:
        """What happens between two steps of a run: nothing mostly, or time, an end, other runs."""
        self.service.now_us += self._draw.randrange(SECOND // 10)
        if self.calm or self._draw.random() < 0.7:
            return
        what = self._draw.randrange(6)
        if what == 4:
            self.service.lay_ghosts()
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


def expected() -> Counter[str]:
    counts: Counter[str] = Counter()
    for name, count in LINES:
        counts[name] += count
    return counts


@pytest.mark.parametrize("part", range(2))
def test_whatever_happens_to_its_runs_an_import_counts_each_line_once(part: int) -> None:
    base = int(os.environ.get("IMPORT_SEED", random.randrange(2**32)))
    for seed in range(base + 300 * part, base + 300 * (part + 1)):
        story = Story(seed)
        for _ in range(6):
            story.run()
        story.calm = True
        # A key about to be forgotten is waited for.
        for _ in range(2):
            story.run()
            story.service.now_us += HORIZON.margin_us
        for token in list(story.service.halves):
            story.service.make_whole(token)
        ledger = story.service.counts.pop(LEDGER)
        assert (ledger, story.service.counts) == (len(LINES), expected()), f"IMPORT_SEED={seed}"


def test_what_a_forgotten_instant_left_is_found_though_others_went_on_meanwhile() -> None:
    """Regression: instants were looked for only after the last lines that are counted, and those
    were others' by then."""
    service = Service()

    def run(meet: Callable[[], None], send: Callable[[Token, Items], bool]) -> None:
        client: Any = Client(service, meet, send)
        importer = Importer(client, "x", LEDGER, HORIZON)
        importer.run(cut(LINES), importer.counted(), lambda _: None)

    with pytest.raises(Broken):
        run(lambda: None, service.lands_half)
    service.now_us += KEY_TTL_US
    steps = iter(range(1_000))

    def others_once() -> None:
        service.now_us += SECOND // 10
        # It has an instant of its own, and has read that nothing is counted.
        if next(steps) == 4:
            run(lambda: None, service.send)

    run(others_once, service.send)
    assert service.counts.pop(LEDGER) == len(LINES)
    assert service.counts == expected()


def test_what_follows_a_new_instant_is_not_what_followed_a_forgotten_one() -> None:
    """Regression: a second instant outlived the first, and stood between a new first and a third
    one that was half written."""
    service = Service()

    def run(*young: Callable[[Token, Items], bool]) -> None:
        """A run whose tokens that are in time meet *young* in turn."""
        left = iter(young)

        def send(token: Token, items: Items) -> bool:
            is_young = service.now_us - token.generation_time_us <= ACCEPT_US
            return (
                next(left, service.send)(token, items) if is_young else service.send(token, items)
            )

        client: Any = Client(service, lambda: None, send)
        importer = Importer(client, "x", LEDGER, HORIZON)
        with suppress(Broken):
            importer.run(cut(LINES), importer.counted(), lambda _: None)

    def asleep(us: int) -> Callable[[Token, Items], bool]:
        def send(token: Token, items: Items) -> bool:
            service.now_us += us
            return service.send(token, items)

        return send

    def broken(*_: object) -> bool:
        raise Broken

    run(asleep(KEY_TTL_US - HOUR // 3), broken)
    service.now_us += HOUR // 3 + SECOND
    run(asleep(2 * ACCEPT_US), service.lands_half)
    service.now_us += KEY_TTL_US - HOUR // 6
    run()
    for token in list(service.halves):
        service.make_whole(token)
    assert service.counts.pop(LEDGER) == len(LINES)
    assert service.counts == expected()
