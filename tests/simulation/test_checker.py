"""The checker itself: what it must take, and what it must not."""

import pytest

from counter.limits import SECOND
from tests.simulation.checker import check
from tests.simulation.draw import draw
from tests.simulation.history import Changed, History, Item, Seen, Sent
from tests.simulation.plan import Attempt, Change, Read

CONFIG = draw(1252).config
NAME = CONFIG.namespaces[0][0]
START_US = 1_000_000_000 * SECOND


def history(key: str | None) -> tuple[History, list[Seen]]:
    """An add whose first attempt is given up and glimpsed, then not seen, and counted at last under
    a time of half a minute later."""
    plan = Change(0, 21, "add", NAME, (("c", 1),), 21, 0, key, (Attempt(0, 0, retry=False),))
    changed = Changed(plan, START_US, requests=[Sent(START_US, 0)])
    last_us = START_US + 30 * SECOND
    changed.items.append(Item(changed, "c", 1, last_us, applied_us=last_us + SECOND))

    def seen(after_s: int, count: int) -> Seen:
        at_us = START_US + after_s * SECOND
        read = Read(0, NAME, ("c",), None, 0)
        return Seen(read, NAME, "c", at_us, at_us, count, at_us, "accurate")

    return History([changed], [seen(3, 1), seen(9, 0)]), [seen(60, 1)]


def test_what_was_seen_under_an_earlier_time_of_a_key_need_not_stay() -> None:
    """Void under that time, it goes; the key goes on with another."""
    assert check(CONFIG, *history("order:21")) == []


def test_what_was_seen_under_its_only_time_must_stay() -> None:
    (problem,) = check(CONFIG, *history(None))
    assert problem.endswith("change 21 is missing")


@pytest.mark.parametrize("key", [None, "order:21"])
def test_what_is_missing_at_last_is_told(key: str | None) -> None:
    told, (final,) = history(key)
    final.count = 0
    assert any("change 21 is missing" in each for each in check(CONFIG, told, [final]))
