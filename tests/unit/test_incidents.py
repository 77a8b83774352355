"""Since when a part does not work."""

from counter.limits import SECOND
from counter.telemetry.incidents import Incidents
from counter.testing.clock import FakeClock
from tests.support.times import START_US, rfc3339


def test_an_incident_lasts_from_the_first_failure_until_the_part_works_again() -> None:
    clock = FakeClock(START_US)
    incidents = Incidents(clock)
    assert incidents.record({"store": None, "cache": None}) == ()
    clock.advance(SECOND)
    for detail in ("it is down", "it is still down"):
        (found,) = incidents.record({"store": detail, "cache": None})
        assert found.as_fields() == {
            "part": "store",
            "detail": detail,
            "since": rfc3339(START_US + SECOND),
            "last_worked": rfc3339(START_US),
        }
        clock.advance(SECOND)
    assert incidents.record({"store": None, "cache": None}) == ()
    clock.advance(SECOND)
    (found,) = incidents.record({"store": "down again", "cache": None})
    assert (found.since_us, found.worked_us) == (START_US + 4 * SECOND, START_US + 3 * SECOND)


def test_an_incident_of_a_part_that_never_worked_has_no_time_of_work() -> None:
    found = Incidents(FakeClock(START_US)).record({"cache": "no answer", "store": "no disk"})
    assert [(each.part, each.worked_us) for each in found] == [("cache", None), ("store", None)]
