"""Seeds of a driver that runs a world for each: all must pass, and reach rare situations."""

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

import pytest

#: A run of this many seeds starts at a drawn one, and must reach each situation so often.
MANY = 1_000
REACHED = 20


class World(Protocol):
    """The results of one seed: its problems, and how often it reached each situation."""

    wrong: list[str]
    seen: Counter[str]


Fault = Callable[[pytest.MonkeyPatch], None]


def check_seeds(run: Callable[[int], World], count: int, situations: Collection[str]) -> None:
    """Run *count* seeds. A failing one is named, with ``wrong`` of its world."""
    start = random.randrange(10**9) if count >= MANY else 0
    reached: Counter[str] = Counter()
    for seed in range(start, start + count):
        world = run(seed)
        assert world.wrong == [], f"seed {seed}"
        reached.update({name for name, times in world.seen.items() if times})
    if count >= MANY:
        # With -s they are shown, for docs/guarantees.md.
        print(*(f"| {each} | {reached[each]} |" for each in sorted(situations)), sep="\n")
    rare = {each: reached[each] for each in situations if reached[each] * MANY < REACHED * count}
    assert count < MANY or not rare


def planted(faults: Iterable[tuple[Fault, int]]) -> pytest.MarkDecorator:
    """Parametrize a test with *faults*, and the seed that found each last."""
    return pytest.mark.parametrize(
        ("fault", "seed"), faults, ids=lambda each: getattr(each, "__name__", "")
    )


def is_found(run: Callable[[int], World], seed: int) -> bool:
    """Return whether *seed*, or one of the first, fails."""
    return any(run(each).wrong for each in (seed, *range(200)))
