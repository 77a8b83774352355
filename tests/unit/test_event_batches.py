"""Batches of CloudEvents share the event loop, the memory and the write queue."""

import asyncio
import json
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any
from unittest.mock import patch

import pytest

from api.http.call import AsgiCall, Call, Message, RequestIds, Target
from api.http.connections import ReadQueue
from api.routes.events import EventRoutes
from counter import limits
from counter.config.event_rules import CloudEvent, adds_of
from counter.core.results import Keyed
from counter.errors import InvalidBodyError, OverloadedError
from counter.types import EventRule, Namespace
from tests.rollup.world import World

RULES = tuple(EventRule("t", f"c{number}") for number in range(limits.EVENT_RULES_MAX))


async def with_rules(world: World, rules: Sequence[EventRule] = RULES) -> Namespace:
    namespace = await world.begin(shards=1)
    return replace(namespace, settings=replace(namespace.settings, event_rules=tuple(rules)))


def batch(events: int) -> Call:
    body = json.dumps(
        [
            {"specversion": "1.0", "source": "/s", "type": "t", "id": str(number)}
            for number in range(events)
        ]
    ).encode()

    async def receive() -> Message:
        return {"body": body, "type": "http.request"}

    headers = [(b"content-type", b"application/cloudevents-batch+json")]
    scope = {"query_string": b"", "headers": headers}
    return AsgiCall(Target("POST", None), scope, receive, RequestIds(), len(body))


async def test_rules_are_applied_to_a_long_batch_in_many_turns_of_the_event_loop() -> None:
    """Also if several are applied at once: a turn has one part of one batch."""
    world = World()
    namespace = await with_rules(world)
    readings = count()
    routes = EventRoutes(world.api, 1_000, ReadQueue(lambda: next(readings) * 0.004))
    mapped: list[int] = []
    with patch("api.routes.events.adds_of", wraps=adds_of) as mapping:
        tasks = [asyncio.create_task(routes.ingest_events(batch(50), namespace)) for _ in range(3)]
        while not all(each.done() for each in tasks):
            mapping.reset_mock()
            await asyncio.sleep(0)
            mapped.append(mapping.call_count)
    assert sum(mapped) == 150
    assert max(mapped) <= 2 * 10


async def test_the_adds_of_event_batches_under_way_at_once_are_bounded() -> None:
    world, under_way, most = World(), 0, 0
    namespace = await with_rules(world)
    add_atomic = world.api.add_atomic

    async def watched(namespace: Namespace, items: Any, *given: Any, **named: Any) -> Any:
        nonlocal under_way, most
        under_way += len(items)
        most = max(most, under_way)
        try:
            return await add_atomic(namespace, items, *given, **named)
        finally:
            under_way -= len(items)

    items = [(rule.counter, 1) for rule in RULES]
    lists = [[Keyed(source, str(at), items) for at in range(200)] for source in "ab"]
    few = [Keyed("c", "1", items)]
    calls = [world.api.add_keyed(namespace, each) for each in (*lists, few)]
    with patch.object(world.api, "add_atomic", watched):
        ended = [len(await outcomes) for outcomes in asyncio.as_completed(calls)]
    assert most <= limits.KEYED_ADDS_AT_ONCE_MAX
    assert ended == [1, 200, 200]
    assert (await world.api.reader.read_one(namespace, "c7", 0)).count == 401


async def test_a_batch_of_events_is_admitted_by_the_number_of_its_adds() -> None:
    world = World()
    namespace = await with_rules(world)
    routes = EventRoutes(world.api, 1_000, ReadQueue(time.monotonic))
    world.api.one_by_one.most = 10 * len(RULES)
    with pytest.raises(OverloadedError, match="220 more come; at most 200"):
        await routes.ingest_events(batch(11), namespace)
    assert (await world.api.reader.read_one(namespace, "c7", 0)).count == 0
    await routes.ingest_events(batch(10), namespace)
    assert world.api.one_by_one.held == 0
    assert (await world.api.reader.read_one(namespace, "c7", 0)).count == 10


@pytest.mark.parametrize("text", ["x" * 1_000_000, 10**4_000], ids=["text", "number"])
def test_a_template_that_repeats_a_long_value_takes_no_more_memory_than_names(text: Any) -> None:
    event = CloudEvent("1", "/s", "t", None, {"t": text})
    rule = EventRule("t", "x" + "{data.t}" * 127)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidBodyError, match="gives the counter 'x"):
            adds_of([rule], event)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 500_000
