"""Since when a part does not work."""

from counter.limits import SECOND
from counter.telemetry.incidents import Troubles
from tests.support.clock import FakeClock
from tests.support.times import START_US, rfc3339


def test_a_trouble_lasts_since_it_was_first_seen_until_the_part_works_again() -> None:
    clock = FakeClock(START_US)
    troubles = Troubles(clock)
    assert troubles.note({"store": None, "cache": None}) == ()
    clock.advance(SECOND)
    for detail in ("it is down", "it is still down"):
        (found,) = troubles.note({"store": detail, "cache": None})
        assert found.as_fields() == {
            "part": "store",
            "detail": detail,
            "since": rfc3339(START_US + SECOND),
            "last_worked": rfc3339(START_US),
        }
        clock.advance(SECOND)
    assert troubles.note({"store": None, "cache": None}) == ()
    clock.advance(SECOND)
    (found,) = troubles.note({"store": "down again", "cache": None})
    assert (found.since_us, found.worked_us) == (START_US + 4 * SECOND, START_US + 3 * SECOND)


def test_of_one_that_never_worked_nothing_is_claimed() -> None:
    found = Troubles(FakeClock(START_US)).note({"cache": "no answer", "store": "no disk"})
    assert [(each.part, each.worked_us) for each in found] == [("cache", None), ("store", None)]
