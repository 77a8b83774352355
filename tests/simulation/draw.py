"""How a seed becomes a plan."""

from collections import Counter
from dataclasses import replace
from itertools import count
from random import Random

from counter.limits import INT64_MAX, MILLISECOND, MINUTE, SECOND
from tests.simulation.ambush import Ambush
from tests.simulation.plan import (
    BASE,
    CLEARS,
    DIGITS_MAX,
    LATE,
    Attempt,
    Change,
    Config,
    Fault,
    Plan,
    Read,
    Rebirth,
    Trap,
)
from tests.simulation.reach import reach

_TRAPPED = ("events_", "dirty", "counts", "watermarks", "resolutions", "atomic_marks", "")
_ACTIONS = (
    "hold", "lose", "abandon", "pause-before", "pause-after", "crash-before", "crash-after",
)  # fmt: skip
#: The number of the first change to a namespace that was created again.
_REBORN = 100_000
#: The number of the first change of the first crowd.
_CROWDS = 400_000
#: The share of adds that have bounds, where the store keeps them.
_BOUNDED = 0.15
#: The share of changes that are cancelled.
_CANCELLED = 0.08
#: A clock that is nearer to its bound may be past it for all that its guard can know.
_DOUBT_US = 8 * MILLISECOND


def draw(seed: int, crowds: int = 0, store: str = "cassandra") -> Plan:
    """The plan of *seed*, with so many crowds of clients more, each with counters of its own."""
    random = Random(f"plan {seed}")
    plan = Plan(_config(seed, random))
    if store == "dynamodb":
        plan.config = _with_coarse_clocks(plan.config, Random(f"clocks {seed}"))
    Drawing(plan, random).draw()
    for crowd in range(crowds):
        first = _CROWDS + 1_000 * crowd
        Drawing(plan, Random(f"crowd {crowd} {seed}"), f"{crowd}-", first).draw_clients()
    _draw_wrong_clocks(plan, Random(f"wrong clocks {seed}"))
    draw_cancels(plan, Random(f"cancels {seed}"))
    # With a source of its own: other draws of a seed do not depend on it.
    plan.steps += _rebirths(plan.config, Random(f"rebirth {seed}"))
    reach(plan)
    if store == "dynamodb":
        _have_partitions_fail(plan, Random(f"partitions {seed}"))
    plan.steps.sort(key=lambda step: step.at_us)
    return plan


def _config(seed: int, random: Random) -> Config:
    """Times are short, so that races are likely and a run is soon over."""
    window_us = random.choice([1, 1, 1, 2]) * SECOND
    skew_us = random.choice([30, 50, 200]) * MILLISECOND
    apis, workers = random.choice([1, 2, 2]), random.choice([1, 1, 2, 2])
    is_long = random.random() < 0.06
    end_us = random.randrange(4, 9) * SECOND
    if is_long:
        # Past retention, in wide windows: most of it is waiting.
        end_us, window_us = random.randrange(150, 170) * SECOND, 4 * SECOND
    far_us = skew_us - _DOUBT_US
    edges = [-far_us, far_us, 0, random.randint(-far_us, far_us)]
    offsets = [random.choice(edges) for _ in range(apis + workers)]
    if random.random() < 0.4:
        # As far apart as may be, to the harm of who is late.
        offsets = [-far_us] * apis + [far_us] * workers
    slice_us = 20 * SECOND if is_long else window_us * random.choice([10, 30])
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
        offsets_us=tuple(offsets),
        apis=apis,
        workers=workers,
        end_us=end_us,
    )


def _with_coarse_clocks(config: Config, random: Random) -> Config:
    """The clocks of processes that know the time to a second."""
    skew_us = random.choice([1_100, 1_200, 1_500]) * MILLISECOND
    before_us, far_us = config.skew_us - _DOUBT_US, skew_us - SECOND - 10 * _DOUBT_US
    offsets_us = tuple(each * far_us // before_us for each in config.offsets_us)
    return replace(config, skew_us=skew_us, offsets_us=offsets_us, store="dynamodb")


def _have_partitions_fail(plan: Plan, random: Random) -> None:
    """Let partitions fail instead of nodes, and go on until windows close by coarse clocks."""
    config, late_us = plan.config, plan.config.lag_us + 2 * plan.config.window_us
    plan.config = replace(
        config, end_us=config.end_us + late_us, nodes_us=(0, 0, 0), levels=None, homes=(),
        event_buckets_max=0,
    )  # fmt: skip
    steps, drawing = plan.steps, Drawing(plan, random)
    for draw_step, numbers in (
        (drawing.read, (4, 8, 16)),
        (drawing.fault, (0, 1, 2, 4)),
        (drawing.trap, (0, 2, 6)),
    ):
        for _ in range(random.choice(numbers)):
            at_us = config.end_us + int(random.random() * late_us)
            steps.append(replace(draw_step(), at_us=at_us))
    for place, step in enumerate(steps):
        if isinstance(step, Fault) and step.what in ("node", "cut"):
            what, how_much = random.choice(["hot", "split"]), random.random()
            steps[place] = replace(step, what=what, how_much=how_much)


def _draw_wrong_clocks(plan: Plan, random: Random) -> None:
    """Start a process with a wrong clock, and create and change namespaces during that time."""
    config = plan.config
    if config.end_us > MINUTE or random.random() < 0.6:
        return
    wrong_us = random.choice([5, 15, 60, 400]) * SECOND
    plan.config = replace(config, wrong_us=wrong_us)
    # API processes first: clients use the namespaces that they create.
    apis, workers = range(config.apis), range(config.apis, config.apis + config.workers)
    # A worker that starts with a wrong clock gets no leases, and does nothing by it.
    far = "jump" if wrong_us >= MINUTE else "misset"
    for what, members in (("misset", apis), ("misset", apis), (far, workers)):
        at_us = int(random.random() * config.end_us / 2)
        ahead_us = random.choice([wrong_us, wrong_us, -wrong_us])
        plan.steps.append(Fault(at_us, what, random.choice(members), ahead_us))
    drawn = Plan(replace(config, namespaces=((LATE, "ACCURATE"),)))
    Drawing(drawn, random, first=1_000).draw_clients()
    plan.steps += drawn.steps
    for _ in range(random.randint(1, 4)):
        at_us = int(random.random() * config.end_us)
        plan.steps.append(Fault(at_us, "create", random.choice(apis)))
        plan.steps.append(Fault(at_us, "accept", random.choice(apis), 0, random.random()))


def draw_bounds(plan: Plan, random: Random) -> None:
    """Have some adds refused if they take a count past that of a few of them."""
    for place, step in enumerate(plan.steps):
        if isinstance(step, Change) and step.how not in CLEARS and random.random() < _BOUNDED:
            largest = max(abs(delta or 0) for _, delta in step.items)
            at_most = random.choice((0, 0, largest, 2 * largest, 3 * largest))
            plan.steps[place] = replace(step, at_most=min(at_most, INT64_MAX))


def draw_cancels(plan: Plan, random: Random) -> None:
    """Have some changes cancelled, once or several times at once, at any time."""
    config = plan.config
    uses = Counter(step.nonce for step in plan.steps if isinstance(step, Change))
    for place, step in enumerate(plan.steps):
        if not isinstance(step, Change) or random.random() > _CANCELLED or uses[step.nonce] > 1:
            # The model that histories are compared with has no cancels of a token's other uses.
            continue
        after_us = random.choice([0, 0, config.accept_us, config.lag_us + config.window_us])
        cancels = tuple(
            Attempt(
                int((after_us + turn * 20 * MILLISECOND) * random.uniform(0.5, 1.5)),
                random.randrange(config.apis),
                retry=random.random() < 0.5,
                cancels=True,
            )
            for turn in range(random.choice([1, 1, 2, 3]))
        )
        plan.steps[place] = replace(step, attempts=step.attempts + cancels)


def _rebirths(config: Config, random: Random) -> list[Rebirth]:
    """A namespace of its own that is deleted and created again, or none."""
    if config.apis < 2 or config.end_us > MINUTE or random.random() > 0.5:
        return []
    name, admin = "reborn", random.randrange(config.apis)
    others = [number for number in range(config.apis) if number != admin]

    def who() -> int:
        return random.choice(others) if random.random() < 0.8 else admin

    def pause_us() -> int:
        return int(random.uniform(2, 5) * SECOND)

    pauses = [
        (who(), random.choice([0, 0, random.randrange(5 * SECOND)]), pause_us())
        for _ in range(random.choice([0, 1, 1, 2]))
    ]
    actions = ["pause-before", "pause-after", "hold"]
    traps = [
        Trap(0, who(), random.choice(["dirty", "events_"]), 1, random.choice(actions), pause_us())
        for _ in range(random.choice([0, 0, 1]))
    ]
    adds = [
        Change(
            0,
            number,
            "add",
            name,
            (("hot", BASE ** (number - _REBORN)),),
            number,
            0,
            None,
            (Attempt(int(random.expovariate(1) * SECOND), random.randrange(config.apis), False),),
        )
        for number in range(_REBORN, _REBORN + random.randint(4, 10))
    ]
    return [
        Rebirth(
            random.randrange(config.end_us),
            name,
            random.choice(["ACCURATE", "EVENTUAL"]),
            admin,
            random.randrange(4 * SECOND),
            tuple(pauses),
            tuple(traps),
            tuple(adds),
        )
    ]


class Drawing:
    """Draws the steps of a plan; *prefix* begins its counters' names, *first* its numbers."""

    def __init__(self, plan: Plan, random: Random, prefix: str = "", first: int = 1) -> None:
        self._plan = plan
        self._config = plan.config
        self._random = random
        self._digits: dict[tuple[str, str], int] = {}
        self._numbers = count(first)
        self._changes: list[Change] = []
        names = [f"{prefix}{name}" for name in ("hot", "warm", "cold-1", "cold-2")]
        self.counters = names[: random.randint(1, len(names))]

    def number(self) -> int:
        """The number of another change."""
        return next(self._numbers)

    def draw(self) -> None:
        """All the steps."""
        random, steps = self._random, self._plan.steps
        for _ in range(random.choice([0, 2, 4, 6])):
            steps += Ambush(self, random, self._config).draw()
        self.draw_clients()
        for _ in range(random.choice([0, 1, 3, 7])):
            steps.append(self.fault())
        for _ in range(random.choice([0, 3, 8, 16])):
            steps.append(self.trap())

    def draw_clients(self) -> None:
        """The steps of clients, without faults."""
        random, steps = self._random, self._plan.steps
        for _ in range(random.randint(4, 25)):
            change = self._change()
            if change is not None:
                steps.append(change)
                self._changes.append(change)
        for _ in range(random.randint(2, 12)):
            steps.append(self.read())

    def trap(self) -> Trap:
        """A trap."""
        random, config = self._random, self._config
        table = random.choices(_TRAPPED, [5, 3, 3, 2, 2, 2, 1])[0]
        action = random.choices(_ACTIONS, [6, 2, 3, 2, 2, 1, 1])[0]
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
        end_us = self._config.end_us
        if end_us > MINUTE:
            # At the beginning, or when that is past retention.
            begin_us = self._random.choice([0, end_us - 20 * SECOND])
            return begin_us + int(self._random.random() * 20 * SECOND)
        return int(self._random.random() * end_us)

    def delta(self, namespace: str, counter: str) -> int | None:
        """A delta with a digit of its own; None if they are used up."""
        key = (namespace, counter)
        digit = self._digits.get(key, 0)
        if digit >= DIGITS_MAX - 2:
            return None
        self._digits[key] = digit + 1
        if digit < 2:
            # Two of the great ones are more than 64 bits hold.
            great: int = (BASE**DIGITS_MAX, BASE**DIGITS_MAX + BASE ** (DIGITS_MAX - 1))[digit]
            small: int = BASE ** (DIGITS_MAX - 4 + digit)
            return great if self._random.random() < 0.7 else small
        delta: int = self._random.choice([1, 1, -1]) * BASE ** (digit - 2)
        return delta

    def _change(self) -> Change | None:
        random, config = self._random, self._config
        namespace = random.choice(config.namespaces)[0]
        how = random.choices(
            ["add", "add-and-get", "clear", "batch", "atomic"], [10, 2, 1.5, 2, 3]
        )[0]
        width = random.randint(1, 4) if how in ("batch", "atomic") else 1
        if how == "clear" and len(self._changes) % 2:
            how = "delete"
        items: list[tuple[str, int | None]] = []
        for _ in range(width):
            counter = self.counters[int(random.random() ** 2 * len(self.counters))]
            delta = None if how in CLEARS else self.delta(namespace, counter)
            if delta is not None or how in CLEARS:
                items.append((counter, delta))
        if not items:
            return None
        key = None
        number = self.number()
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
            key = f"order:{number}"
        nonce, at_us = number, self._at()
        rivals = [c for c in self._changes if c.how in ("add", *CLEARS) and c.key is None]
        if how in ("add", *CLEARS) and key is None and rivals and random.random() < 0.1:
            # The token of another: a conflict on the same counter, and none on another one.
            other = random.choice(rivals)
            nonce = other.nonce
            at_us = other.at_us + int(random.random() * 2 * SECOND)
            age_us = at_us - (other.at_us - other.age_us)
        return Change(
            at_us,
            number,
            how,
            namespace,
            tuple(items),
            nonce,
            age_us,
            key,
            self._attempts(),
            random.random() < 0.4,
            how == "atomic" and random.random() < 0.4,
        )

    def _attempts(self) -> tuple[Attempt, ...]:
        random, config = self._random, self._config
        attempts = [Attempt(0, random.randrange(config.apis), False)]
        if random.random() < 0.3:
            hedge_us = int(random.random() * 20 * MILLISECOND)
            attempts.append(Attempt(hedge_us, random.randrange(config.apis), False))
        after_us = 0
        for _ in range(random.choice([0, 1, 1, 2])):
            after_us += self._span()
            is_retry = random.random() < 0.8
            attempts.append(Attempt(after_us, random.randrange(config.apis), is_retry))
        return tuple(attempts)

    def read(self) -> Read:
        """A read."""
        random, config = self._random, self._config
        namespace = random.choice(config.namespaces)[0]
        staleness_us = random.choice([None, None, 0, 0, 2 * SECOND, 10 * SECOND])
        counters = tuple(self.counters)
        if random.random() < 0.6:
            counters = (random.choice(self.counters),)
        return Read(self._at(), namespace, counters, staleness_us, random.randrange(config.apis))

    def fault(self) -> Fault:
        """A fault."""
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
