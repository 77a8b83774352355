"""However events are copied, ordered, batched and sent, the counts are those of distinct events.

Also if counters are deleted meanwhile: an event that came before a delete never counts again.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.app import App
from tests.support.rest import fresh
from tests.support.times import MINUTE, SECOND
from tests.support.virtual import no_deadline_by_the_wall

RULES = [
    {"type": "add.*", "counter": "{data.counter}", "delta": "data.delta"},
    {"type": "add.twice", "counter": "{data.counter}", "delta": "data.delta"},
    {"type": "*", "counter": "{data.run}/all"},
]
#: Events between two batches, in microseconds; each but 0 is followed by a rollup.
PAUSES = st.sampled_from([0, 0, 0, SECOND, 6 * SECOND, MINUTE])
EXAMPLES = settings(max_examples=settings().max_examples // 3)


class Desk:
    """A service that all examples share: each has counters and sources of its own."""

    def __init__(self, storage: str, directory: Path) -> None:
        self.runner = asyncio.Runner()
        self.app = App(storage, directory)
        self.numbers = count()
        self.runner.run(self._start())

    async def _start(self) -> None:
        await self.app.start()
        await self.app.http.put(self.app.rest.path(), json={"event_rules": RULES})

    def close(self) -> None:
        self.runner.run(self.app.stop())
        self.runner.close()

    async def send(self, batches: list[list[dict[str, Any]]]) -> None:
        path = self.app.rest.path(verb="events")
        kind = "application/cloudevents-batch+json"
        for answer in await asyncio.gather(
            *(
                self.app.rest.raw(path, json.dumps(each).encode(), content_type=kind)
                for each in batches
                if each
            )
        ):
            assert answer.status_code == 204, answer.text

    async def delete(self, counters: list[str]) -> None:
        """Delete *counters*, after all that came and before all that will come."""
        for each in counters:
            self.app.clock.advance(1)
            answer = await self.app.rest.delete(each, fresh(self.app.clock.now_us()))
            assert answer.status_code == 200, answer.text
            self.app.clock.advance(1)


@pytest.fixture(scope="module", params=["sqlite", "memory"])
def desk(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Desk]:
    with no_deadline_by_the_wall():
        desk = Desk(request.param, tmp_path_factory.mktemp("events"))
        yield desk
        desk.close()


@EXAMPLES
@given(data=st.data())
def test_counts_are_those_of_the_distinct_events(desk: Desk, data: st.DataObject) -> None:
    run = f"run-{next(desk.numbers)}"
    events = data.draw(
        st.lists(
            st.builds(
                lambda source, number, kind, counter, delta: {
                    "specversion": "1.0",
                    "source": f"{run}/{source}",
                    "id": str(number),
                    "type": kind,
                    "data": {"run": run, "counter": f"{run}/{counter}", "delta": delta},
                },
                *(st.sampled_from("ab"), st.integers(0, 5)),
                *(st.sampled_from(["add.once", "add.twice", "see"]), st.sampled_from("xy")),
                st.integers(-(2**63), 2**63 - 1),
            ),
            min_size=1,
            max_size=8,
            unique_by=lambda each: (each["source"], each["id"]),
        )
    )
    batch = st.lists(st.sampled_from(events), max_size=6)
    deletes = st.lists(st.sampled_from([f"{run}/x", f"{run}/all"]), max_size=1)
    rounds = data.draw(
        st.lists(st.tuples(st.lists(batch, max_size=4), PAUSES, deletes), max_size=4)
    )
    # Each at least once.
    rounds.append(([events], 0, []))
    expected = Counter({f"{run}/{each}": 0 for each in ("x", "y", "all")})
    seen: set[tuple[str, str]] = set()
    for batches, _, deleted in rounds:
        for each in chain(*batches):
            if (name := (each["source"], each["id"])) not in seen:
                seen.add(name)
                expected[f"{run}/all"] += 1
                times = {"see": 0, "add.once": 1, "add.twice": 2}[each["type"]]
                expected[each["data"]["counter"]] += times * each["data"]["delta"]
        for counter in deleted:
            expected[counter] = 0

    async def run_all() -> None:
        for batches, pause_us, deleted in rounds:
            await desk.send(batches)
            await desk.delete(deleted)
            if pause_us:
                desk.app.clock.advance(pause_us)
                await desk.app.roll_up()
        assert {each: await desk.app.rest.count(each) for each in expected} == dict(expected)

    desk.runner.run(run_all())
