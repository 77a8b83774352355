"""Accept limits that were changed: an append judges each event by the limit of the event's time."""

from collections.abc import Sequence
from typing import Final

import pytest

from counter.testing.cases import NOW, WINDOW, add
from counter.types import Era, Event, Written, limit_at
from tests.postgresql.conftest import World

#: Each era's limit, longest last and shortest last; one that begins later than the earliest events.
ERAS: Final = {
    "longer, shorter": (Era(0, 4), Era(NOW - 5 * WINDOW, 9), Era(NOW - 3 * WINDOW, 2)),
    "shorter, longer": (Era(0, 7), Era(NOW - 6 * WINDOW, 3), Era(NOW - 2 * WINDOW, 8)),
    "one that is not yet": (Era(0, 3), Era(NOW + WINDOW, 8)),
    "without the first": (Era(NOW - 4 * WINDOW, 6), Era(NOW - 2 * WINDOW, 1)),
}


def _events(eras: Sequence[Era]) -> list[Event]:
    """Events at each bound of an era, and just within and outside of each limit."""
    bounds = {each.from_us for each in eras if each.from_us}
    bounds |= {NOW - each.accept_limit_us for each in eras}
    times = sorted({bound + off for bound in bounds for off in (-1, 0, 1)} | {NOW})
    return [add(f"c{number}", at, number) for number, at in enumerate(times, 1)]


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
@pytest.mark.parametrize("name", ERAS)
async def test_an_event_is_late_by_the_limit_of_its_own_time(
    world: World, name: str, together: bool
) -> None:
    eras = [Era(each.from_us, each.accept_limit_us * WINDOW) for each in ERAS[name]]
    await world.database.rows(
        "UPDATE {s}.namespaces SET era_from = $1, era_limit = $2, passed = 0",
        [each.from_us for each in eras],
        [each.accept_limit_us for each in eras],
    )
    events = _events(eras)
    expected = [
        Written.LATE
        if each.event_time_us < NOW - limit_at(tuple(eras), each.event_time_us)
        else Written.NEW
        for each in events
    ]
    assert {*expected} == {Written.LATE, Written.NEW}
    groups = [events] if together else [[each] for each in events]
    found = [
        each for group in groups for each in await world.store.events.append(world.namespace, group)
    ]
    assert found == expected


async def test_all_items_of_an_atomic_add_are_late_by_the_limit_of_their_time(world: World) -> None:
    await world.database.rows(
        "UPDATE {s}.namespaces SET era_from = ARRAY[0, $1::bigint],"
        " era_limit = ARRAY[$2::bigint, $3], passed = 0",
        *(NOW - 2 * WINDOW, 3 * WINDOW, WINDOW),
    )
    for windows, expected in ((1, Written.NEW), (2, Written.LATE), (3, Written.NEW)):
        items = [
            add("a", NOW - windows * WINDOW, windows)._replace(item_key=1, atom=b"a"),
            add("b", NOW - windows * WINDOW, windows)._replace(item_key=1, atom=b"a"),
        ]
        assert await world.store.events.append_atomic(world.namespace, items) is expected
