"""Brings plans into rare situations (see situations.py); each kind has a random source of its
own."""

from collections import Counter
from dataclasses import replace
from random import Random

from counter.limits import HOUR, MILLISECOND, MINUTE, SECOND
from tests.simulation.plan import (
    BASE,
    BRIEF,
    CHANGEABLE,
    DIRECTORY,
    EXACT_US,
    FUTURE_US,
    LOCAL,
    ROUGH,
    ROUGH_BASE,
    Attempt,
    Change,
    Config,
    Fault,
    Plan,
    Read,
    Rebirth,
    Step,
    Trap,
)

#: Short beside production's, and as long as the lengths in proportion to it allow.
_RETENTION_US = 20 * SECOND
_SLICE_US = 10 * SECOND
_LATE_US = 30 * SECOND
_NIGHT_US = 2 * HOUR
#: Until the first slice of a changed accept limit has begun.
_ERA_US = 42 * SECOND
#: The numbers of the first changes that are drawn here.
_EXACT, _KEYED, _LEFT, _ROUGH, _OF_ERAS = 200_000, 300_000, 400_000, 500_000, 600_000
#: Digits to the base ROUGH_BASE that 64 bits hold.
_ROUGH_DIGITS = 19


def reach(plan: Plan) -> None:
    """Change *plan* so that it comes into some of the situations."""
    seed = plan.config.seed
    kinds = (
        _bounds, _retention, _night, _eras, _shards, _nodes, _buckets, _settings, _clocks, _acts,
        _compactions, _proposals, _edges, _exact, _keys, _caches, _centers,
        _best_effort,
    )  # fmt: skip
    for kind in kinds:
        kind(plan, Random(f"{kind.__name__} {seed}"))


def _bounds(plan: Plan, random: Random) -> None:
    """Pages and batches of a few."""
    if random.random() < 0.3:
        plan.config = replace(plan.config, page=random.choice([1, 2, 2, 3]))


def _is_plain(config: Config) -> bool:
    return config.end_us <= MINUTE and config.retention_us > _RETENTION_US


def _retention(plan: Plan, random: Random) -> None:
    """Delay some steps until the slices of the first ones are dropped."""
    if not _is_plain(plan.config) or random.random() > 0.33:
        return
    config = plan.config
    slice_us = _SLICE_US
    plan.config = replace(
        config,
        retention_us=_RETENTION_US,
        slice_us=slice_us,
        time_bucket_us=slice_us
        // (random.choice([1, 1, 2]) if config.window_us < 2 * SECOND else 1),
        end_us=_LATE_US + config.end_us,
    )
    # By then slices are dropped.
    _spread(plan, random, _LATE_US, 22 * SECOND)


def _night(plan: Plan, random: Random) -> None:
    """Have every process stop for hours; then the rollup is behind."""
    config = plan.config
    if not _is_plain(config) or config.wrong_us or random.random() > 0.15:
        return
    plan.config = replace(
        config,
        # Wide windows: few to catch up with.
        window_us=4 * SECOND,
        retention_us=3 * HOUR,
        slice_us=5 * MINUTE,
        time_bucket_us=5 * MINUTE,
        shards=min(2, config.shards),
        page=0,
        key_ttl_us=3 * SECOND,
        end_us=_NIGHT_US + config.end_us,
    )
    plan.steps = [each for each in plan.steps if not isinstance(each, Rebirth)]
    _spread(plan, random, _NIGHT_US, 8 * SECOND)
    begin_us = config.end_us + random.randrange(4) * SECOND
    # By then the rows of keys have run out.
    plan.steps += [Fault(_NIGHT_US - MINUTE, "compact") for _ in range(4)]
    for place, at_us in enumerate((random.randrange(config.end_us), _NIGHT_US + SECOND)):
        plan.steps.append(_keyed(_KEYED + place, at_us, 0, random.randrange(config.apis)))
    for who in range(config.apis + config.workers):
        until_us = _NIGHT_US - 5 * SECOND
        if who >= config.apis:
            # While adds come in again.
            until_us += random.randrange(12 * SECOND)
        plan.steps.append(Fault(begin_us, "crash", who, until_us - begin_us))


def _eras(plan: Plan, random: Random) -> None:
    """Let a changed accept limit, or its announcement, land late, with adds around the limits."""
    config = plan.config
    if not _is_plain(config) or config.wrong_us or config.apis < 2 or random.random() > 0.55:
        return
    plan.config = replace(
        config, slice_us=_SLICE_US, time_bucket_us=_SLICE_US, end_us=_ERA_US + config.end_us
    )
    _spread(plan, random, _ERA_US, 8 * SECOND)
    at_us, who = random.randrange(2 * SECOND), random.randrange(config.apis)
    # Either of the two compare-and-sets.
    late_us = int(random.uniform(18, 38) * SECOND)
    plan.steps.append(Trap(at_us, who, DIRECTORY, random.choice([1, 2]), "pause-before", late_us))
    plan.steps.append(Fault(at_us, "accept", who, 0, random.random()))
    for number in range(_OF_ERAS, _OF_ERAS + random.randint(6, 14)):
        begin_us = at_us + int(random.random() * (late_us + 8 * SECOND))
        age_us = int(random.random() ** 2 * 8 * SECOND)
        attempts = (Attempt(0, random.randrange(config.apis), False),)
        items = (("era", BASE ** (number - _OF_ERAS)),)
        name = config.namespaces[0][0]
        token = (number, age_us, None, attempts)
        plan.steps.append(Change(begin_us, number, "add", name, items, *token))


def _spread(plan: Plan, random: Random, late_us: int, again_us: int) -> None:
    """Delay half of the steps, and resend some tokens then, or up to *again_us* later."""
    steps: list[Step] = []
    for step in plan.steps:
        made = step
        if isinstance(step, Change):
            # A key would be forgotten before the last attempt.
            made = replace(step, key=None)
        if random.random() < 0.5:
            made = replace(made, at_us=made.at_us + late_us)
        elif isinstance(made, Change) and random.random() < 0.4:
            after_us = late_us + random.randrange(again_us)
            again = Attempt(after_us, random.randrange(plan.config.apis), False)
            made = replace(made, attempts=(*made.attempts, again))
        steps.append(made)
    plan.steps = steps


def _shards(plan: Plan, random: Random) -> None:
    if random.random() < 0.35 and plan.config.end_us < HOUR:
        plan.config = replace(plan.config, shards=random.choice([2, 3, 4, 7]))


def _nodes(plan: Plan, random: Random) -> None:
    """Nodes with different clocks; processes are within the bound of each of them."""
    config = plan.config
    plan.config = replace(config, paxos_restamps=random.random() < 0.7)
    if random.random() > 0.35:
        return
    apart_us = config.skew_us // 3
    offsets = [random.choice([-apart_us, 0, apart_us]) for _ in range(2)]
    offsets.append(random.randint(-apart_us, apart_us))
    far_us = config.skew_us - apart_us - 8 * MILLISECOND
    plan.config = replace(
        plan.config,
        nodes_us=tuple(offsets),
        offsets_us=tuple(max(-far_us, min(far_us, each)) for each in config.offsets_us),
    )


def _buckets(plan: Plan, random: Random) -> None:
    """Event buckets that are raised after few events."""
    config = plan.config
    if random.random() < (0.6 if config.end_us > 2 * config.slice_us else 0.1):
        plan.config = replace(config, event_buckets_max=random.choice([4, 8]))


def _settings(plan: Plan, random: Random) -> None:
    """Change settings of a namespace in flight."""
    config = plan.config
    if random.random() > 0.3:
        return
    for which in random.sample(range(len(CHANGEABLE)), random.randint(2, 5)):
        at_us, who = _instant(plan, random), random.randrange(config.apis)
        plan.steps.append(Fault(at_us, "setting", who, which, random.random()))


def _clocks(plan: Plan, random: Random) -> None:
    """Clocks that step back, within their bound."""
    config = plan.config
    if random.random() > 0.3:
        return
    for _ in range(random.randint(1, 3)):
        who = random.randrange(config.apis + config.workers)
        at_us = _instant(plan, random)
        for how_much in (0.62, 0.38):
            plan.steps.append(Fault(at_us, "skew", who, 0, how_much))
            at_us += random.randrange(SECOND)


def _acts(plan: Plan, random: Random) -> None:
    """Control acts by processes with clocks that may be wrong."""
    config = plan.config
    if not config.wrong_us:
        return
    for _ in range(random.randint(0, 3)):
        at_us, who = _instant(plan, random), random.randrange(config.apis)
        plan.steps.append(Fault(at_us, random.choice(["recount", "accept", "accept"]), who))
    wrong_us = random.choice([config.wrong_us, -config.wrong_us])
    for place, step in enumerate(plan.steps):
        if isinstance(step, Rebirth):
            # Early, because all clocks are right at the end.
            early_us, lives_us = step.at_us % SECOND, step.lives_us // 8
            plan.steps[place] = replace(step, at_us=early_us, lives_us=lives_us, wrong_us=wrong_us)


def _compactions(plan: Plan, random: Random) -> None:
    """Compactions on all nodes, again and again."""
    if random.random() > 0.4:
        return
    for _ in range(random.randint(2, 12)):
        plan.steps.append(Fault(_instant(plan, random), "compact"))


def _proposals(plan: Plan, random: Random) -> None:
    """Compare-and-sets that are left undecided, while there are some."""
    config = plan.config
    if random.random() > 0.45:
        return
    for turn in range(random.randint(1, 4)):
        at_us, for_us = _instant(plan, random), random.randrange(2 * SECOND)
        plan.steps.append(Fault(at_us, "unreported", 0, for_us, random.random()))
        if config.end_us > _LATE_US or random.random() < 0.2:
            # The keys would be forgotten before the last attempt.
            continue
        afters_us = (0, *sorted(random.randrange(2 * SECOND) for _ in range(3)))
        attempts = tuple(Attempt(each, random.randrange(config.apis), True) for each in afters_us)
        number, items = _LEFT + turn, (("left", BASE**turn),)
        name = random.choice(config.namespaces)[0]
        key = f"left:{turn}"
        plan.steps.append(Change(at_us, number, "add", name, items, number, 0, key, attempts))


def _edges(plan: Plan, random: Random) -> None:
    """Events at the ends of windows and of slices, and so at watermarks, or a microsecond off."""
    if random.random() > 0.4:
        return
    tokens = Counter(each.nonce for each in plan.steps if isinstance(each, Change))
    window_us = plan.config.window_us
    steps: list[Step] = []
    for step in plan.steps:
        made = step
        is_alone = isinstance(step, Change) and step.key is None and tokens[step.nonce] == 1
        if isinstance(step, Change) and is_alone and random.random() < 0.3:
            # Slices end where windows end.
            time_us = step.at_us - step.age_us
            edge_us = -(-time_us // window_us) * window_us + random.choice([-2, -1, 0, 1])
            made = replace(step, age_us=step.at_us - edge_us)
        steps.append(made)
    plan.steps = steps


def _exact(plan: Plan, random: Random) -> None:
    """Adds that arrive at the limit of their age, or a microsecond off, in a marked window."""
    config = plan.config
    if random.random() > (0.6 if config.retention_us == _RETENTION_US else 0.3):
        return
    name = random.choice(config.namespaces)[0]
    ages_us = [config.accept_us, config.accept_us, -FUTURE_US]
    if config.retention_us == _RETENTION_US:
        ages_us += 4 * [config.known_us]
    for turn in range(random.randint(1, 4)):
        number, api = _EXACT + 2 * turn, random.randrange(config.apis)
        at_us, edge_us = SECOND + _instant(plan, random), random.choice(ages_us)
        # By the clock of the process, when the request is there.
        now_us = at_us + EXACT_US + config.offsets_us[api]
        token_us = now_us - edge_us - random.choice([-1, 0, 0, 1])
        first_us = at_us - random.choice([50, 300]) * MILLISECOND
        again = Attempt(0, api, False, exact=True)
        if edge_us == config.known_us:
            # Known for so long after its first attempt, which was on time.
            token_us, wait_us = first_us, edge_us - (now_us - first_us)
            again = replace(again, after_us=wait_us + random.choice([-1, 0, 1]))
        counter = f"edge-{turn}"
        for place, begin_us, attempt in ((0, first_us, Attempt(0, api, False)), (1, at_us, again)):
            age_us = begin_us - token_us
            items = ((counter, BASE**place),)
            how = (number + place, "add", name, items, number + place, age_us, None)
            plan.steps.append(Change(begin_us, *how, (attempt,), random.random() < 0.5))


def _keys(plan: Plan, random: Random) -> None:
    """Keys that are used again for another add, before and after they are forgotten."""
    config = plan.config
    if config.end_us > MINUTE or random.random() > 0.25:
        return
    key_ttl_us = random.choice([3, 4]) * SECOND
    plan.config = replace(config, key_ttl_us=key_ttl_us)
    for turn in range(random.randint(1, 4)):
        number, at_us = _KEYED + 2 * turn, random.randrange(config.end_us)
        clear_us = 2 * config.skew_us + 2 * SECOND
        after_us = key_ttl_us + random.choice(
            [
                random.randint(-2 * config.skew_us, 2 * config.skew_us),
                random.randint(2 * config.skew_us, max(SECOND, 3 * config.skew_us)),
                random.randint(-2, 2),
                clear_us,
                -random.randrange(key_ttl_us),
            ]
        )
        for place, wait_us in ((0, 0), (1, after_us)):
            api = random.randrange(config.apis)
            plan.steps.append(_keyed(number + place, at_us + wait_us, turn, api))


def _keyed(number: int, at_us: int, turn: int, api: int) -> Change:
    """An add under the key of *turn*."""
    counter, digit = f"key-{turn}", BASE ** (number % 2)
    attempts = (Attempt(0, api, False),)
    token = (number, 0, f"again:{turn}", attempts)
    return Change(at_us, number, "add", BRIEF, ((counter, digit),), *token, forsaken=True)


def _caches(plan: Plan, random: Random) -> None:
    """A cache in servers of its own, which forget, restart and answer late."""
    config = plan.config
    if random.random() > 0.4:
        return
    kind, servers = random.choice([("memcached", 1), ("memcached", 2), ("redis", 1)])
    plan.config = replace(
        config,
        cache=kind,
        cache_servers=servers,
        cache_items=random.choice([0, 0, 2, 4, 8]),
        cache_ttl_us=random.choice([config.cache_ttl_us, SECOND, 30 * SECOND]),
    )
    for _ in range(random.choice([0, 1, 3, 6])):
        at_us, for_us = _instant(plan, random), int(random.expovariate(1) * SECOND)
        if random.random() < 0.3:
            for_us = random.choice([0, for_us])
            plan.steps.append(Fault(at_us, "cache_restart", random.randrange(2), for_us))
        else:
            span_us = random.choice([100 * MILLISECOND, 3 * SECOND])
            plan.steps.append(Fault(at_us, "cache_slow", 0, for_us, random.random(), span_us))


def _centers(plan: Plan, random: Random) -> None:
    """Two data centers, and links between them that are cut one way."""
    config = plan.config
    if random.random() > 0.25:
        return
    levels = ("QUORUM", "QUORUM")
    if config.payload_check != "strict":
        levels = random.choice([*2 * [("EACH_QUORUM", LOCAL)], levels, (LOCAL, LOCAL)])
    members = config.apis + config.workers
    homes = [0] * members
    if levels != (LOCAL, LOCAL):
        homes = [random.randrange(2) for _ in range(members)]
        homes[random.randrange(members)] = 1
    plan.config = replace(config, levels=levels, homes=tuple(homes))
    for _ in range(random.randint(1, 3)):
        for_us = int(random.uniform(0.2, 3) * SECOND)
        plan.steps.append(Fault(_instant(plan, random), "cut", random.randrange(2), for_us))


def _best_effort(plan: Plan, random: Random) -> None:
    """Adds to BEST_EFFORT counters, which are named as exact ones are."""
    config = plan.config
    if random.random() > 0.2:
        return
    plan.config = replace(config, has_rough=True)
    digits = iter(range(_ROUGH_DIGITS))
    for number in range(random.randint(3, 8)):
        attempts = [Attempt(0, random.randrange(config.apis), False)]
        for _ in range(random.choice([0, 0, 1, 2])):
            after_us = random.randrange(2 * SECOND)
            is_retry = random.random() < 0.6
            attempts.append(Attempt(after_us, random.randrange(config.apis), is_retry))
        how = random.choice(["add", "add", "add", "batch", "batch", "clear"])
        items: list[tuple[str, int | None]] = []
        for _ in range(2 if how == "batch" else 1):
            counter, sign = random.choice([("hot", 1), ("hot", 1), ("down", -1)])
            delta = None if how == "clear" else sign * ROUGH_BASE ** next(digits)
            items.append((counter, delta))
        name = random.choice(ROUGH)
        token = (_ROUGH + number, 0, None, tuple(attempts))
        at_us = _instant(plan, random)
        plan.steps.append(Change(at_us, _ROUGH + number, how, name, tuple(items), *token))
        if random.random() < 0.7:
            after_us = random.randrange(3 * SECOND)
            counters = tuple(dict.fromkeys(counter for counter, _ in items))
            api = random.randrange(config.apis)
            plan.steps.append(Read(at_us + after_us, name, counters, None, api))
        if random.random() < 0.2:
            plan.steps.append(Fault(at_us, "deaf", 0, random.randrange(SECOND), 0.8))
        if config.cache and random.random() < 0.3:
            # The cache takes the change, and its response is lost.
            how_much, span_us = 0.8, 100 * MILLISECOND
            plan.steps.append(Fault(at_us, "cache_slow", 0, SECOND, how_much, span_us))
    for _ in range(random.choice([0, 0, 1])):
        plan.steps.append(Fault(_instant(plan, random), "wipe"))


def _instant(plan: Plan, random: Random) -> int:
    """When a step of the plan begins, or soon after."""
    steps = [each.at_us for each in plan.steps if isinstance(each, Change)]
    if not steps or random.random() < 0.3:
        return int(random.random() * min(plan.config.end_us, 9 * SECOND))
    return max(0, random.choice(steps) + int(random.expovariate(1) * 300 * MILLISECOND))
