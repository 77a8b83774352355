"""A namespace that is created again under its name loses no add, however long processes pause."""

from dataclasses import replace

import pytest

from counter.limits import MILLISECOND, SECOND
from tests.simulation.draw import draw
from tests.simulation.plan import BASE, Attempt, Change, Plan, Rebirth, Trap
from tests.simulation.run import Result, run_plan

_FIRST, _ADDS = 100_000, 10


def reborn(*pauses_us: int, traps: tuple[Trap, ...] = ()) -> Result:
    """What comes of ten adds through a process that pauses when the deletion is sent, so long."""
    config = replace(
        draw(1).config,
        apis=2,
        workers=1,
        offsets_us=(0, 0, 0),
        accept_us=2 * SECOND,
        write_timeout_us=500 * MILLISECOND,
        end_us=SECOND,
    )
    adds = tuple(
        Change(
            0,
            _FIRST + n,
            "add",
            "reborn",
            (("hot", BASE**n),),
            _FIRST + n,
            0,
            None,
            (Attempt(n * 200 * MILLISECOND, 1, False),),
        )
        for n in range(_ADDS)
    )
    pauses = tuple((1, 0, pause_us) for pause_us in pauses_us)
    step = Rebirth(0, "reborn", "ACCURATE", 0, 100 * MILLISECOND, pauses, traps, adds)
    return run_plan(Plan(config, [step]))


@pytest.mark.parametrize("pause_ms", [0, 2_300, 3_000, 4_000, 4_800, 7_500])
def test_adds_to_a_namespace_that_is_created_again_count(pause_ms: int) -> None:
    """Whatever a process that slept through the deletion still knows of the old one."""
    result = reborn(pause_ms * MILLISECOND)
    assert not result.problems, "\n".join([*result.problems, *result.trace])


@pytest.mark.parametrize("action", ["pause-before", "pause-after", "hold"])
@pytest.mark.parametrize("table", ["dirty", "events_"])
def test_an_add_that_sleeps_on_its_way_through_the_deletion(table: str, action: str) -> None:
    """Between its mark and its event, or between its event and its answer, for any time."""
    for for_us in (2 * SECOND, 9 * SECOND):
        trap = Trap(0, 1, table, 1, action, for_us)
        result = reborn(3 * SECOND, traps=(trap,))
        assert not result.problems, "\n".join([*result.problems, *result.trace])
