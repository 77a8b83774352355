"""What one seed draws: settings, what clients do, and what goes wrong, all of it before the run.

A plan is data: to shrink one is to leave steps out.
"""

from dataclasses import dataclass, field
from random import Random
from typing import Any

from counter.limits import MILLISECOND, MINUTE, SECOND

#: Each add to a counter has a digit of its own to base 4, so that a count tells which were counted,
#: and how often.
BASE = 4
DIGITS_MAX = 31


@dataclass(frozen=True, slots=True)
class Config:
    """The settings of a run."""

    seed: int
    window_us: int
    accept_us: int
    write_timeout_us: int
    skew_us: int
    retention_us: int
    slice_us: int
    time_bucket_us: int
    event_buckets: int
    shards: int
    lease_us: int
    payload_check: str
    cache_ttl_us: int
    #: (name, counter_type)
    namespaces: tuple[tuple[str, str], ...]
    #: How far each process's clock is off, by its number: APIs first, then workers.
    offsets_us: tuple[int, ...]
    apis: int
    workers: int
    #: When clients and faults are done.
    end_us: int

    @property
    def lag_us(self) -> int:
        """How long after its end a window is closed by every clock."""
        return self.accept_us + self.write_timeout_us + 4 * self.skew_us


@dataclass(frozen=True, slots=True)
class Attempt:
    """One send of an operation; a retry is left out where an answer is definite already."""

    after_us: int
    api: int
    retry: bool


@dataclass(frozen=True, slots=True)
class Step:
    """Something that begins at an instant."""

    at_us: int


@dataclass(frozen=True, slots=True)
class Change(Step):
    """An add, a clear, a batch of adds or an atomic add.

    *items* are (counter, delta), with a delta of None for a clear. *how* is the verb. A token is
    *nonce* and the step's instant less *age_us*; *key* stands in its place.
    """

    number: int
    how: str
    namespace: str
    items: tuple[tuple[str, int | None], ...]
    nonce: int
    age_us: int
    key: str | None
    attempts: tuple[Attempt, ...]
    #: Whether an accurate read follows each answer that says what became of it.
    reads: bool = False


@dataclass(frozen=True, slots=True)
class Read(Step):
    """A read of counters of a namespace; one alone is read by the route of its own."""

    namespace: str
    counters: tuple[str, ...]
    staleness_us: int | None
    api: int


@dataclass(frozen=True, slots=True)
class Fault(Step):
    """What goes wrong, for how long, and to whom or how much."""

    what: str
    who: int = 0
    for_us: int = 0
    how_much: float = 0.0
    span_us: int = 0


@dataclass(frozen=True, slots=True)
class Trap(Step):
    """From its instant on, the *nth* statement of process *who* on tables of a name is met.

    *action* is what happens then, for *for_us*: ``hold`` keeps the statement on its way, ``lose``
    its answer; ``pause`` and ``crash`` strike the process, ``-before`` the statement is sent or
    ``-after`` it.
    """

    who: int
    table: str
    nth: int
    action: str
    for_us: int


@dataclass(slots=True)
class Plan:
    """A whole run."""

    config: Config
    steps: list[Step] = field(default_factory=list)


def draw(seed: int) -> Plan:
    """The plan of *seed*."""
    random = Random(f"plan {seed}")
    plan = Plan(_config(seed, random))
    _Drawing(plan, random).draw()
    plan.steps.sort(key=lambda step: step.at_us)
    return plan


def _config(seed: int, random: Random) -> Config:
    """Times are short, so that what must not meet comes close, and a run is soon over."""
    window_us = random.choice([1, 1, 1, 2]) * SECOND
    skew_us = random.choice([10, 50, 200]) * MILLISECOND
    apis, workers = random.choice([1, 2, 2]), random.choice([1, 1, 2, 2])
    is_long = random.random() < 0.03
    end_us = random.randrange(130, 170) * SECOND if is_long else random.randrange(4, 9) * SECOND
    edges = [-skew_us, skew_us, 0, random.randint(-skew_us, skew_us)]
    slice_us = window_us * random.choice([10, 30])
    return Config(
        seed=seed,
        window_us=window_us,
        accept_us=random.choice([200, 500, 1_000, 2_000]) * MILLISECOND,
        write_timeout_us=random.choice([200, 500, 1_000]) * MILLISECOND,
        skew_us=skew_us,
        retention_us=2 * MINUTE,
        slice_us=slice_us,
        time_bucket_us=slice_us // random.choice([1, 1, 2]),
        event_buckets=random.choice([1, 2]),
        shards=random.choice([1, 1, 2]),
        lease_us=random.choice([3, 10, 20]) * SECOND,
        payload_check=random.choice(["guard", "guard", "off", "strict"]),
        cache_ttl_us=random.choice([0, 0, 1, 30]) * SECOND,
        namespaces=random.choice(
            [
                (("one", "EVENTUAL"),),
                (("one", "ACCURATE"),),
                (("one", "ACCURATE"), ("two", "EVENTUAL")),
            ]
        ),
        offsets_us=tuple(random.choice(edges) for _ in range(apis + workers)),
        apis=apis,
        workers=workers,
        end_us=end_us,
    )


_TRAPPED = ("events_", "dirty", "counts", "watermarks", "resolutions", "atomic_marks", "")
_ACTIONS = ("hold", "lose", "pause-before", "pause-after", "crash-before", "crash-after")


class _Drawing:
    """Draws the steps of a plan."""

    def __init__(self, plan: Plan, random: Random) -> None:
        self._plan = plan
        self._config = plan.config
        self._random = random
        self._digits: dict[tuple[str, str], int] = {}
        self._number = 0
        self._changes: list[Change] = []
        names = ["hot", "warm", "cold-1", "cold-2"]
        self._counters = names[: random.randint(1, len(names))]

    def draw(self) -> None:
        """All the steps."""
        random, steps = self._random, self._plan.steps
        for _ in range(random.choice([0, 2, 4, 6])):
            steps += self._ambush()
        for _ in range(random.randint(4, 25)):
            change = self._change()
            if change is not None:
                steps.append(change)
                self._changes.append(change)
        for _ in range(random.randint(2, 12)):
            steps.append(self._read())
        for _ in range(random.choice([0, 1, 3, 7])):
            steps.append(self._fault())
        for _ in range(random.choice([0, 3, 8, 16])):
            steps.append(self._trap())

    def _trap(self) -> Trap:
        random, config = self._random, self._config
        table = random.choices(_TRAPPED, [5, 3, 3, 2, 2, 2, 1])[0]
        action = random.choices(_ACTIONS, [6, 2, 2, 2, 1, 1])[0]
        for_us = self._span()
        if action == "hold" and random.random() < 0.6:
            # Not so long that it is given up.
            for_us = int(config.write_timeout_us * random.uniform(0.3, 0.98))
        return Trap(
            self._at(),
            random.randrange(config.apis + (config.workers if random.random() < 0.5 else 0)),
            table,
            random.choice([1, 1, 1, 2, 3]),
            action,
            for_us,
        )

    def _ambush(self) -> list[Step]:
        """An add that is nearly late, at the end of its window, with traps for its statements; and
        a retry when the window is closed, or soon will be."""
        random, config = self._random, self._config
        namespace = random.choice(config.namespaces)[0]
        counter = random.choice(self._counters)
        delta = self._delta(namespace, counter)
        if delta is None:
            return []
        self._number += 1
        api = random.randrange(config.apis)
        latest_us = config.accept_us - config.offsets_us[api]
        age_us = latest_us - random.randint(4, 40) * MILLISECOND
        window = random.randrange(1, max(2, config.end_us // config.window_us))
        token_us = window * config.window_us - random.randint(1, 60) * MILLISECOND
        timeout_us = config.write_timeout_us
        actions = random.choice(
            [
                [("dirty", "hold", 0.9), ("events_", "hold", 0.95)],
                [("events_", "hold", 0.95)],
                [("dirty", "pause-after", 2)],
                [("events_", "pause-before", 2)],
                [("events_", "pause-after", 2)],
                [("events_", "hold", 4)],
                [("events_", "hold", 12)],
                [("events_", "lose", 1)],
                [("events_", "crash-after", 1)],
                [("dirty", "crash-after", 1)],
                [("dirty", "hold", 4)],
            ]
        )
        at_us = max(0, token_us + age_us)
        traps = [
            Trap(at_us, api, table, 1, action, int(timeout_us * times * random.uniform(0.5, 1)))
            for table, action, times in actions
        ]
        closed_us = config.window_us + config.accept_us + timeout_us + 2 * config.skew_us
        attempts = [Attempt(2 * MILLISECOND, api, False)]
        for _ in range(random.randint(0, 2)):
            after_us = int(closed_us * random.uniform(0.1, 1.3))
            attempts.append(Attempt(after_us, random.randrange(config.apis), True))
        reads = random.random() < 0.7
        change = Change(
            *(at_us, self._number, "add", namespace, ((counter, delta),), self._number),
            *(at_us - token_us, None, tuple(attempts), reads),
        )
        return [*traps, change]

    def _span(self) -> int:
        """A time of the order of those that the protocol waits for."""
        random, config = self._random, self._config
        spans = [
            config.write_timeout_us,
            config.accept_us,
            config.accept_us + config.write_timeout_us,
            config.lag_us + config.window_us,
            2 * (config.lag_us + config.window_us),
        ]
        return int(random.choice(spans) * random.uniform(0.5, 1.2))

    def _at(self) -> int:
        return int(self._random.random() * self._config.end_us)

    def _delta(self, namespace: str, counter: str) -> int | None:
        """A delta with a digit of its own; None where they are used up."""
        key = (namespace, counter)
        digit = self._digits.get(key, 0)
        if digit >= DIGITS_MAX - 2:
            return None
        self._digits[key] = digit + 1
        if digit < 2:
            # Two of the great ones are more than 64 bits hold.
            great: int = (BASE**DIGITS_MAX, BASE**DIGITS_MAX + BASE ** (DIGITS_MAX - 1))[digit]
            small: int = BASE ** (DIGITS_MAX - 4 + digit)
            return great if self._random.random() < 0.4 else small
        delta: int = self._random.choice([1, 1, -1]) * BASE ** (digit - 2)
        return delta

    def _change(self) -> Change | None:
        random, config = self._random, self._config
        namespace = random.choice(config.namespaces)[0]
        how = random.choices(
            ["add", "add-and-get", "clear", "batch", "atomic"], [10, 2, 1.5, 2, 3]
        )[0]
        count = random.randint(1, 4) if how in ("batch", "atomic") else 1
        items: list[tuple[str, int | None]] = []
        for _ in range(count):
            counter = self._counters[int(random.random() ** 2 * len(self._counters))]
            delta = None if how == "clear" else self._delta(namespace, counter)
            if delta is not None or how == "clear":
                items.append((counter, delta))
        if not items:
            return None
        self._number += 1
        key = None
        age_us = int(random.expovariate(1) * 200 * MILLISECOND)
        draw = random.random()
        if draw < 0.35:
            # On the edge of being late.
            age_us = int(random.uniform(0.6, 1.05) * config.accept_us)
        elif draw < 0.45:
            age_us = self._span()
        elif draw < 0.52:
            age_us = -int(random.random() * (config.skew_us + SECOND))
        if how != "batch" and random.random() < 0.12 and config.end_us <= 40 * SECOND:
            key = f"order:{self._number}"
        nonce, at_us = self._number, self._at()
        rivals = [c for c in self._changes if c.how in ("add", "clear") and c.key is None]
        if how in ("add", "clear") and key is None and rivals and random.random() < 0.1:
            # The token of another: a conflict on the same counter, and none on another one.
            other = random.choice(rivals)
            nonce = other.nonce
            at_us = other.at_us + int(random.random() * 2 * SECOND)
            age_us = at_us - (other.at_us - other.age_us)
        return Change(
            at_us,
            self._number,
            how,
            namespace,
            tuple(items),
            nonce,
            age_us,
            key,
            self._attempts(),
            random.random() < 0.4,
        )

    def _attempts(self) -> tuple[Attempt, ...]:
        random, config = self._random, self._config
        attempts = [Attempt(0, random.randrange(config.apis), False)]
        if random.random() < 0.3:
            hedge_us = int(random.random() * 20 * MILLISECOND)
            attempts.append(Attempt(hedge_us, random.randrange(config.apis), False))
        after_us = 0
        for _ in range(random.choice([0, 1, 2, 3])):
            after_us += self._span()
            is_retry = random.random() < 0.8
            attempts.append(Attempt(after_us, random.randrange(config.apis), is_retry))
        return tuple(attempts)

    def _read(self) -> Read:
        random, config = self._random, self._config
        namespace = random.choice(config.namespaces)[0]
        staleness_us = random.choice([None, None, 0, 0, 2 * SECOND, 10 * SECOND])
        counters = tuple(self._counters)
        if random.random() < 0.6:
            counters = (random.choice(self._counters),)
        return Read(self._at(), namespace, counters, staleness_us, random.randrange(config.apis))

    def _fault(self) -> Fault:
        random, config = self._random, self._config
        what = random.choices(
            [
                "storm", "abandon", "crash", "pause", "node", "wipe", "skew", "recount", "accept",
                "compact",
            ],
            [5, 5, 2, 2, 3, 1, 1, 1, 1, 1],
        )[0]  # fmt: skip
        who = random.randrange(config.apis + config.workers)
        for_us = int(random.expovariate(1) * 3 * SECOND)
        return Fault(self._at(), what, who, for_us, random.random(), self._span())


def describe(step: Any) -> str:
    """A step in a line."""
    return f"{step.at_us / SECOND:10.6f} s  {step}"
