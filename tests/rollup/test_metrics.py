"""The metrics of a worker: shards, leases and slices."""

from unittest.mock import patch

import pytest

from counter.errors import StoreUnavailableError
from counter.limits import MINUTE, SECOND
from rollup.metrics import RollupMetrics
from tests.rollup.world import CLOSING, DATASET, LEASE_TIME, WINDOW, Process, World, begun


def samples(world: World, process: Process) -> dict[str, float]:
    """Each sample's value by its name and the values of its labels."""
    metrics = RollupMetrics(process.worker, world.clock, process.leases)
    return {
        " ".join((sample.name, *sample.labels.values())): sample.value
        for family in metrics.collect()
        for sample in family.samples
    }


async def test_each_shard_reports_how_far_it_is_behind_and_how_much_of_that_is_too_much() -> None:
    world, namespace = await begun(shards=2)
    worker = world.process()
    await worker.worker.tick()
    late = 5 * WINDOW
    world.clock.advance(late)
    behind = samples(world, worker)
    for shard in ("n 0", "n 1"):
        assert behind[f"counter_rollup_overdue_seconds {shard}"] == late / SECOND
        assert behind[f"counter_rollup_windows_behind {shard}"] == 5
    await worker.worker.tick()
    done = samples(world, worker)
    assert done["counter_rollup_overdue_seconds n 0"] == 0
    assert done["counter_rollup_windows_behind n 1"] == 0
    settings = namespace.settings
    least_us = settings.accept_limit_us + DATASET.write_timeout_us + 2 * DATASET.clock_skew_max_us
    lag_s = done["counter_rollup_lag_seconds n 0"]
    assert least_us / SECOND <= lag_s <= (least_us + WINDOW) / SECOND


async def test_the_worst_of_many_more_namespaces_is_reported() -> None:
    """However many there are, there are only so many series."""
    world, _ = await begun(shards=1)
    for number in range(60):
        await world.create(f"n{number}", shards=1)
    worker = world.process()
    await worker.worker.tick()
    found = samples(world, worker)
    lags = [name for name in found if name.startswith("counter_rollup_lag_seconds")]
    assert len(lags) == 51
    assert "counter_rollup_lag_seconds _other _other" in lags


async def test_the_worst_of_many_more_shards_is_reported() -> None:
    world, _ = await begun(shards=600)
    await world.create("m", shards=600)
    worker = world.process()
    await worker.worker.tick()
    found = samples(world, worker)
    assert sum(name.startswith("counter_rollup_lag_seconds") for name in found) == 601


async def test_batches_and_recounts_are_reported() -> None:
    """The world's workers write three counters at a time."""
    world, namespace = await begun(shards=1)
    await world.add_many(7)
    window_us = world.clock.now_us() - world.clock.now_us() % WINDOW
    world.clock.advance(CLOSING)
    worker = world.process()
    await worker.worker.tick()
    found = samples(world, worker)
    assert found["counter_rollup_batch_counters_count"] == 3
    assert found["counter_rollup_batch_counters_sum"] == 7
    assert found["counter_rollup_recounts_total"] == 0
    await world.api.resolver.request_recounts(namespace, [("c1", window_us)], for_readers=False)
    await world.roll_up(worker)
    assert samples(world, worker)["counter_rollup_recounts_total"] == 1


async def test_leases_that_change_hands_are_reported() -> None:
    world, _ = await begun()
    one, two = await world.shared("one", "two")
    first = samples(world, one)
    taken = first["counter_lease_changes_total taken"]
    assert taken - first["counter_lease_changes_total given_back"] == first["counter_rollup_slots"]
    assert first["counter_rollup_workers"] == 2
    world.clock.advance(2 * LEASE_TIME)
    await world.turns(one)
    assert samples(world, one)["counter_lease_changes_total taken"] > taken
    # It was gone for too long, and another one has its slots.
    await world.turns(two, one)
    assert samples(world, two)["counter_rollup_workers"] == 2


async def test_slices_are_reported_by_the_maintainer() -> None:
    world, _ = await begun()
    one, two = await world.shared("one", "two")
    for _ in range(20):
        world.clock.advance(5 * MINUTE)
        await world.turns(one, two)
        for each in (one, two):
            await each.worker.tick()
    found = [samples(world, each) for each in (one, two)]
    (keeper,) = [each for each in found if "counter_slices default" in each]
    assert keeper["counter_slices_ahead default"] == 2
    assert keeper["counter_slice_changes_total dropped"] >= 1
    retention_s = DATASET.retention_us / SECOND
    assert keeper["counter_slices_oldest_age_seconds default"] < retention_s + 20 * 60


async def test_shards_that_were_not_seen_yet_are_reported() -> None:
    """Nothing is known of their lag: it must not look as if there were none."""
    world, _ = await begun()
    worker = world.process()
    broken = StoreUnavailableError("planted")
    with (
        patch.object(world.store.rollups, "watermarks", side_effect=broken),
        patch.object(world.store.rollups, "marked", side_effect=broken),
        pytest.raises(StoreUnavailableError),
    ):
        await worker.worker.tick()
    assert samples(world, worker)["counter_rollup_shards_unseen"] == 16
    await worker.worker.tick()
    assert samples(world, worker)["counter_rollup_shards_unseen"] == 0
