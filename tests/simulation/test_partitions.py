"""Slices that differ in their event buckets, and workers that raise them, in the simulation."""

from dataclasses import replace

import pytest

from tests.simulation.draw import draw
from tests.simulation.run import run_plan
from tests.simulation.shrink import report, shrink

#: A long one, in which slices that were raised come to hold events, and a short one.
SEEDS = (2006, 20)


def test_nothing_promised_is_broken_when_partitions_are_raised() -> None:
    reached: set[str] = set()
    for seed in SEEDS:
        plan = draw(seed)
        plan.config = replace(plan.config, event_buckets_max=8)
        result = run_plan(plan)
        if result.problems:
            pytest.fail(report(shrink(result)), pytrace=False)
        reached |= result.reached
    assert "raised-buckets" in reached
