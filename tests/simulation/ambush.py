"""Ambushes: an add at the end of its window that is nearly late, with traps and late retries."""

from random import Random
from typing import NamedTuple, Protocol

from counter.limits import MILLISECOND
from tests.simulation.plan import Attempt, Change, Config, Step, Trap


class Numbers(Protocol):
    """The part of the drawing that an ambush uses."""

    counters: list[str]

    def number(self) -> int: ...

    def delta(self, namespace: str, counter: str) -> int | None: ...


class Act(NamedTuple):
    """A trap: its table, its action, and its length in write time-outs."""

    table: str
    action: str
    times: float
    #: Whether it waits for the retry, if that goes to another API.
    other: bool = False


#: Each with how often it is drawn.
_SCENES: tuple[tuple[int, tuple[Act, ...]], ...] = (
    (4, (Act("dirty", "hold", 0.9), Act("events_", "hold", 0.97))),
    (4, (Act("events_", "hold", 0.97),)),
    (2, (Act("dirty", "pause-after", 3),)),
    (1, (Act("events_", "pause-before", 3),)),
    (2, (Act("events_", "pause-after", 3),)),
    (2, (Act("events_", "hold", 4),)),
    (4, (Act("events_", "hold", 9),)),
    (4, (Act("events_", "abandon", 1),)),
    (1, (Act("events_", "lose", 1),)),
    (1, (Act("events_", "crash-after", 1),)),
    (1, (Act("dirty", "crash-after", 1),)),
    (2, (Act("dirty", "hold", 9),)),
    (3, (Act("events_", "hold", 0.97), Act("events_", "pause-after", 4, other=True))),
    (2, (Act("events_", "hold", 9), Act("resolutions", "crash-after", 1, other=True))),
    (2, (Act("events_", "abandon", 1), Act("counts", "crash-after", 1, other=True))),
)


class Ambush:
    """Draws one."""

    def __init__(self, numbers: Numbers, random: Random, config: Config) -> None:
        self._numbers = numbers
        self._random = random
        self._config = config

    def draw(self) -> list[Step]:
        """The steps; none if the digits of a counter are used up."""
        random, config = self._random, self._config
        namespace = random.choice(config.namespaces)[0]
        api = random.randrange(config.apis)
        acts = random.choices([acts for _, acts in _SCENES], [often for often, _ in _SCENES])[0]
        # Late by the clock of the API that it goes to, in a moment.
        age_us = config.accept_us - config.offsets_us[api]
        age_us -= random.randint(4, 40) * MILLISECOND
        windows = config.end_us // config.window_us
        token_us = random.randrange(1, max(2, windows)) * config.window_us
        token_us -= random.randint(1, 60) * MILLISECOND
        at_us = max(0, token_us + age_us)
        held_us = [
            int(config.write_timeout_us * act.times * random.uniform(0.6, 1)) for act in acts
        ]
        other = (api + 1) % config.apis
        steps: list[Step] = [
            Trap(at_us, other if act.other else api, act.table, 1, act.action, for_us)
            for act, for_us in zip(acts, held_us, strict=True)
        ]
        attempts = (Attempt(2 * MILLISECOND, api, False), *self._retries(acts, held_us, other))
        how = random.choice(["add", "add", "atomic"])
        change = self._change(namespace, how, at_us, at_us - token_us, attempts)
        if change is None:
            return []
        steps.append(change)
        if random.random() < 0.4:
            # Another add in the same window, on its heels: it does not mark what is marked.
            after_us = at_us + random.randint(1, 30) * MILLISECOND
            first = Attempt(2 * MILLISECOND, api, False)
            heels = self._change(namespace, "add", after_us, at_us - token_us, (first,))
            if heels is not None:
                steps.append(heels)
        return steps

    def _retries(
        self, acts: tuple[Act, ...], held_us: list[int], other: int
    ) -> tuple[Attempt, ...]:
        """Retries after the window is closed, and after the held statement has landed."""
        random, config = self._random, self._config
        closes_us = config.write_timeout_us + 2 * config.skew_us
        if any(act.other for act in acts):
            instants = [random.randint(20, 90) * MILLISECOND]
            if acts[0].times > 1 or acts[0].action == "abandon":
                instants = [max(closes_us, held_us[0]) + random.randint(0, 400) * MILLISECOND]
        else:
            instants = [int(closes_us * random.uniform(0.7, 1.5)) + 150 * MILLISECOND]
            instants.append(held_us[0] + random.randint(-5, 300) * MILLISECOND)
        attempts = []
        for after_us in instants:
            for _ in range(random.choice([1, 1, 2])):
                shift_us = random.randint(0, 15) * MILLISECOND
                api = random.choice([other, random.randrange(config.apis)])
                attempts.append(Attempt(max(0, after_us + shift_us), api, True))
        return tuple(attempts)

    def _change(
        self, namespace: str, how: str, at_us: int, age_us: int, attempts: tuple[Attempt, ...]
    ) -> Change | None:
        random, counters = self._random, self._numbers.counters
        width = random.randint(2, 3) if how == "atomic" else 1
        items: list[tuple[str, int | None]] = []
        for _ in range(width):
            counter = random.choice(counters)
            delta = self._numbers.delta(namespace, counter)
            if delta is None:
                return None
            items.append((counter, delta))
        number = self._numbers.number()
        reads = random.random() < 0.7
        forsaken = how == "atomic" and random.random() < 0.5
        if forsaken:
            attempts = attempts[:1]
        return Change(
            *(at_us, number, how, namespace, tuple(items), number, age_us, None, attempts),
            *(reads, forsaken),
        )
