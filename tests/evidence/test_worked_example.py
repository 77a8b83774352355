"""The worked example: how long a token must live, and what becomes of every duplicate in that time.

80 commands a second; a caller tries for 10 s, its retries go on for 90 s, the network may keep a
message for 30 s, and clocks differ by 5 s: a duplicate may come 135 s after its original. For ten
minutes 6 % of the commands are sent twice.
"""

import heapq
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from counter.types import Token
from tests.support.app import App, running
from tests.support.rest import Rest, item
from tests.support.times import MINUTE, SECOND

RATE = 80
MINUTES = 10
#: Longer than any duplicate takes: with another store, or a shorter limit, some are late.
FEWER_MINUTES = 3
T_CALLER, T_RETRY, T_NETWORK, T_CLOCK = 10 * SECOND, 90 * SECOND, 30 * SECOND, 5 * SECOND
T_TTL = T_CALLER + T_RETRY + T_NETWORK + T_CLOCK
COUNTERS = [f"c{number}" for number in range(8)]


def commands(minutes: int) -> int:
    return RATE * 60 * minutes


def duplicates(minutes: int) -> int:
    return commands(minutes) * 6 // 100


def test_the_figures_are_those_of_the_example() -> None:
    assert (commands(MINUTES), duplicates(MINUTES)) == (48_000, 2_880)
    assert T_TTL == 135 * SECOND < FEWER_MINUTES * MINUTE


class Caller:
    """Sends each command once when its time comes, and some of them again for an outcome."""

    def __init__(self, app: App, rest: Rest, minutes: int, seed: int) -> None:
        self.app = app
        self.rest = rest
        self.commands = commands(minutes)
        self.draw = random.Random(seed)
        #: (when, token's number, counter) of duplicates to come, soonest first.
        self.due: list[tuple[int, int, str]] = []
        self.tokens: list[Token] = []
        self.originals: Counter[str] = Counter()
        self.duplicates: Counter[str] = Counter()
        self.again = set(self.draw.sample(range(self.commands), duplicates(minutes)))

    async def second(self) -> None:
        """One second's commands, in one request; then the duplicates that are due by now."""
        items: list[Any] = []
        for _ in range(RATE if len(self.tokens) < self.commands else 0):
            number, counter = len(self.tokens), self.draw.choice(COUNTERS)
            # A caller's clock is a little behind the service's, or ahead of it.
            time_us = self.app.clock.now_us() + self.draw.randint(-T_CLOCK // 2, T_CLOCK // 2)
            self.tokens.append(Token(number.to_bytes(16, "big"), time_us))
            items.append(item(counter, 1, self.tokens[number]))
            if number in self.again:
                at_us = self.app.clock.now_us() + self.draw.randint(0, T_TTL - T_CLOCK)
                heapq.heappush(self.due, (at_us, number, counter))
        if items:
            answer = await self.rest.batch_add(items)
            self.originals.update(map(outcome_of, answer.json()["results"]))
        for number, counter in self.now_due():
            answer = await self.rest.add(counter, 1, self.tokens[number])
            if answer.status_code == 503:
                # Too early to decide: its caller retries after Retry-After.
                wait_us = int(answer.headers["retry-after"]) * SECOND
                heapq.heappush(self.due, (self.app.clock.now_us() + wait_us, number, counter))
            else:
                self.duplicates[outcome_of(answer.json())] += 1

    def now_due(self) -> Iterator[tuple[int, str]]:
        while self.due and self.due[0][0] <= self.app.clock.now_us():
            _, number, counter = heapq.heappop(self.due)
            yield number, counter


def outcome_of(result: Any) -> str:
    """The outcome of an add in a response."""
    if "code" in result:
        return str(result["code"])
    return {False: "accepted", True: "replayed", None: "unverified"}[result["replayed"]]


@pytest.mark.parametrize(
    ("storage", "accept_limit", "minutes"),
    [
        ("sqlite", "135s", MINUTES),
        ("memory", "135s", FEWER_MINUTES),
        ("sqlite", "5s", FEWER_MINUTES),
    ],
)
async def test_no_duplicate_is_accepted(
    storage: str, accept_limit: str, minutes: int, fast_dir: Path
) -> None:
    """With a limit that all of them fit in, and with one that has most of them resolved."""
    async with running(storage, fast_dir) as app:
        rest = app.rest.within("example")
        made = await rest.create("ACCURATE", accept_limit=accept_limit, future_limit="5s", shards=4)
        assert made.status_code == 201, made.text
        caller = Caller(app, rest, minutes, seed=6)
        while len(caller.tokens) < caller.commands or caller.due:
            await caller.second()
            await app.roll_up_after(SECOND)
        assert caller.originals == {"accepted": commands(minutes)}
        assert caller.duplicates == {"replayed": duplicates(minutes)}
        counts = [await rest.count(counter) for counter in COUNTERS]
        assert sum(counts) == commands(minutes)
        tally = app.application.service.tally
        assert tally["original"] == commands(minutes)
        assert tally["replayed"] + tally["late_applied"] == duplicates(minutes)
        assert tally["conflict"] == tally["voided"] == 0
