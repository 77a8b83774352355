"""A namespace that is created again under its name loses no add, however long processes pause."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock, patch

import pytest

from counter.errors import NamespaceUnknownError
from counter.limits import HOUR, MILLISECOND, SECOND
from counter.testing.cases import DATASET, NOW, SETTINGS, make_namespace
from counter.testing.control_cases import purge
from counter.windows import settling_time
from tests.simulation.draw import draw
from tests.simulation.plan import BASE, Attempt, Change, Fault, Plan, Rebirth, Trap
from tests.simulation.processes import Processes
from tests.simulation.run import Result, run_plan
from tests.simulation.store import SimulatedStore

_FIRST, _ADDS = 100_000, 10
_CONFIG = replace(
    draw(1).config,
    apis=2,
    workers=1,
    offsets_us=(0, 0, 0),
    accept_us=2 * SECOND,
    write_timeout_us=500 * MILLISECOND,
    end_us=SECOND,
)


def reborn(*pauses_us: int, traps: tuple[Trap, ...] = ()) -> Result:
    """The result of ten adds through a process that pauses at the deletion, for this long."""
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
    return run_plan(Plan(_CONFIG, [step]))


@pytest.mark.parametrize("pause_ms", [0, 2_300, 3_000, 4_000, 4_800, 7_500])
def test_adds_to_a_namespace_that_is_created_again_count(pause_ms: int) -> None:
    """Whatever a process that slept through the deletion still knows of the old one."""
    result = reborn(pause_ms * MILLISECOND)
    assert not result.problems, "\n".join([*result.problems, *result.trace])


@pytest.mark.parametrize("action", ["pause-before", "pause-after", "hold"])
@pytest.mark.parametrize("table", ["dirty", "events_"])
def test_an_add_that_sleeps_on_its_way_through_the_deletion(table: str, action: str) -> None:
    """Between its mark and its event, or between its event and its response, for any time."""
    for for_us in (2 * SECOND, 9 * SECOND):
        trap = Trap(0, 1, table, 1, action, for_us)
        result = reborn(3 * SECOND, traps=(trap,))
        assert not result.problems, "\n".join([*result.problems, *result.trace])


def test_an_audit_expects_no_add_that_had_no_answer_and_lands_late() -> None:
    """Its window is rolled up, so it counts only if its token is resolved, which it is not."""
    steps = [
        Trap(0, 1, "events_", 1, "hold", 6 * SECOND),
        Rebirth(100 * MILLISECOND, "reborn", "ACCURATE", 0, 100 * MILLISECOND, (), (), ()),
        Fault(300 * MILLISECOND, "crash", 1, SECOND, 0.0, 0),
    ]
    result = run_plan(Plan(_CONFIG, steps))
    assert not result.problems, "\n".join([*result.problems, *result.trace])


class Sent:
    """Notes the compare-and-sets that a process sends, and has the first one land once more."""

    def __init__(self, store: SimulatedStore) -> None:
        self._control = store.session.control
        self._compare = self._control.compare
        self._statements: list[tuple[str, Sequence[Any], Any]] = []

    async def compare(self, cql: str, values: Sequence[Any], *, seen_by: Any, **named: Any) -> Any:
        self._statements.append((cql, values, seen_by))
        return await self._compare(cql, values, seen_by=seen_by, **named)

    async def lands_again(self) -> None:
        """As an attempt that timed out, and was held on its way to a node that was not reached."""
        cql, values, seen_by = next(each for each in self._statements if "namespaces" in each[0])
        await self._compare(cql, values, seen_by=seen_by)


async def test_a_creation_that_lands_after_its_deletion_makes_no_namespace() -> None:
    """It would have no watermarks, and its adds would be acknowledged and never counted."""
    processes = Processes()
    one, other = await processes.another(), await processes.another()
    sent = Sent(one)
    with patch.object(one.session.control, "compare", sent.compare):
        namespace = await make_namespace(one)
    assert await one.control.delete_namespace(namespace)
    processes.clock.advance(settling_time(DATASET))
    await purge(one)
    await sent.lands_again()
    assert await other.control.namespaces() == []


async def test_the_row_of_a_deleted_namespace_is_removed_when_no_creation_can_land() -> None:
    processes = Processes()
    store = await processes.another()
    namespace = await make_namespace(store)
    assert await store.control.delete_namespace(namespace)
    rows = []
    for wait_us in (0, settling_time(DATASET), HOUR - settling_time(DATASET) - 1, 1):
        processes.clock.advance(wait_us)
        await purge(store, processes.clock.now_us())
        rows.append(len(await store.session.control.read("SELECT id FROM {control}.namespaces")))
    assert rows == [1, 1, 1, 0]
    assert not await store.session.control.read("SELECT id FROM {control}.departed")


async def test_a_creation_that_lost_a_race_and_lands_later_makes_a_whole_namespace() -> None:
    """Its watermarks are there for as long as it may land; then they are purged."""
    processes = Processes()
    one, other = await processes.another(), await processes.another()
    first = await make_namespace(other)
    free = AsyncMock(return_value=None)
    with patch.object(one.session.control, "settled", free):
        one.control._sequences._seen = dict(other.control._sequences._seen)
        assert await one.control.create_namespace("tests", SETTINGS, NOW) is None
    lost = replace(first, id=first.id + 1)
    for wait_us in (0, HOUR - 1):
        processes.clock.advance(wait_us)
        await purge(one, processes.clock.now_us())
        assert len(await other.rollups.watermarks(lost)) == SETTINGS.shards
    processes.clock.advance(1)
    await purge(one, processes.clock.now_us())
    with pytest.raises(NamespaceUnknownError):
        await other.rollups.watermarks(lost)
    assert await other.rollups.watermarks(first)


async def test_a_deleted_namespace_is_not_read_once_its_name_is_in_use_again() -> None:
    """With an old copy of the directory, and a deletion that was interrupted."""
    processes = Processes()
    one, reader = await processes.another(), await processes.another()
    deleted = await make_namespace(one)
    dies = AsyncMock(side_effect=ConnectionError)
    with (
        patch.object(one.control._purge, "take_watermarks_away", dies),
        pytest.raises(ConnectionError),
    ):
        await one.control.delete_namespace(deleted)
    processes.clock.advance(settling_time(DATASET))
    assert await reader.rollups.watermarks(deleted)
    again = await make_namespace(one)
    assert again.id != deleted.id
    with pytest.raises(NamespaceUnknownError):
        await reader.rollups.watermarks(deleted)
