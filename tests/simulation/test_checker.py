"""The checker itself: it accepts correct histories, and rejects others."""

from dataclasses import replace

import pytest

from counter.limits import SECOND
from tests.simulation.checker import check
from tests.simulation.draw import draw
from tests.simulation.history import Changed, History, Item, Seen, Sent
from tests.simulation.plan import BASE, BRIEF, Attempt, Change, Read

CONFIG = draw(1252).config
NAME = CONFIG.namespaces[0][0]
START_US = 1_000_000_000 * SECOND


def history(key: str | None) -> tuple[History, list[Seen]]:
    """An add that is given up and glimpsed, then not seen, and counted half a minute later."""
    plan = Change(0, 21, "add", NAME, (("c", 1),), 21, 0, key, (Attempt(0, 0, retry=False),))
    changed = Changed(plan, START_US, requests=[Sent(START_US, 0)])
    last_us = START_US + 30 * SECOND
    changed.items.append(Item(changed, "c", 1, last_us, applied_us=last_us + SECOND))

    def seen(after_s: int, count: int) -> Seen:
        at_us = START_US + after_s * SECOND
        read = Read(0, NAME, ("c",), None, 0)
        return Seen(read, NAME, "c", at_us, at_us, count, at_us, "accurate")

    return History([changed], [seen(3, 1), seen(9, 0)]), [seen(60, 1)]


def test_an_add_seen_under_an_earlier_time_of_a_key_may_go() -> None:
    """Void under that time, it goes; the key goes on with another."""
    assert check(CONFIG, *history("order:21")) == []


def test_an_add_seen_under_its_only_time_must_stay() -> None:
    (problem,) = check(CONFIG, *history(None))
    assert problem.endswith("change 21 is missing")


@pytest.mark.parametrize("key", [None, "order:21"])
def test_a_missing_add_is_reported(key: str | None) -> None:
    history_found, (final,) = history(key)
    final.count = 0
    assert any("change 21 is missing" in each for each in check(CONFIG, history_found, [final]))


@pytest.mark.parametrize("applied", [True, False])
def test_only_a_delete_that_was_applied_takes_a_counter_off_the_list(applied: bool) -> None:
    """One that had nothing but a void delete may be listed, as one that had a void add may."""
    plan = Change(0, 21, "delete", NAME, (("c", None),), 21, 0, None, ())
    changed = Changed(plan, START_US)
    item = Item(changed, "c", None, START_US, void_us=START_US)
    if applied:
        item.applied_us, item.void_us = START_US, None
    changed.items.append(item)
    problems = check(CONFIG, History([changed], listed={NAME: ["c"]}), [])
    assert any("is listed, and was deleted" in each for each in problems) == applied


def used_again(after_us: int, count: int, *, is_conflict: bool = False) -> list[str]:
    """The problems if a key with a TTL of 4 s is used again, and *count* is read last."""
    changes = []
    for place, sent_us in enumerate((START_US, START_US + after_us)):
        delta, answered_us = BASE**place, sent_us + 1_000
        plan = Change(0, place, "add", BRIEF, (("c", delta),), place, 0, "again", ())
        changed = Changed(plan, sent_us, requests=[Sent(sent_us, 0, answered_us, 200)])
        item = Item(changed, "c", delta, sent_us, applied_us=answered_us)
        if place and is_conflict:
            item.applied_us, item.conflict_us = None, answered_us
        changed.items.append(item)
        changes.append(changed)
    at_us = START_US + 60 * SECOND
    last = Seen(Read(0, BRIEF, ("c",), None, 0), BRIEF, "c", at_us, at_us, count, at_us, "accurate")
    return check(replace(CONFIG, key_ttl_us=4 * SECOND), History(changes), [last])


def test_an_add_under_a_forgotten_key_is_another_add() -> None:
    assert used_again(6 * SECOND, 5) == []
    assert any("change 0 is missing" in each for each in used_again(6 * SECOND, 4))
    history_found = used_again(6 * SECOND, 1, is_conflict=True)
    assert "change 1 is a conflict under a forgotten key" in history_found


def test_an_add_under_a_key_that_is_remembered_is_not_another_add() -> None:
    assert any("one token and count both" in each for each in used_again(SECOND, 5))


@pytest.mark.parametrize("count", [1, 4, 5])
def test_around_its_expiry_a_key_may_be_forgotten_or_not(count: int) -> None:
    assert used_again(4 * SECOND, count) == []
