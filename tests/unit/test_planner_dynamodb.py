"""How many units of DynamoDB a load takes, which limits it breaks, and what is said of it."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from counter.config.settings import Settings
from counter.limits import DAY, HOUR, SECOND
from counter.ops.dynamodb_planner import DynamodbNeed, DynamodbPlan, plan_dynamodb
from counter.ops.planner import PlanError


def load(event_buckets: int = 4, **changed: Any) -> DynamodbNeed:
    """1,000 adds a second to as many counters as there are adds in a window, by two processes."""
    defaults = Settings(store="dynamodb", dynamodb_region="eu-central-1")
    dataset = defaults.dataset()
    need: dict[str, Any] = {
        "adds_per_s": Fraction(1_000),
        "counters": 100_000,
        "dataset": replace(
            dataset, retention_us=7 * DAY, slice_us=DAY, event_buckets=event_buckets
        ),
        "settings": replace(defaults.default_namespace(), rollup_window_us=10 * SECOND, shards=16),
        "hottest_per_s": Fraction(10),
        "processes": 2,
    }
    return DynamodbNeed(**(need | changed))


def within(need: DynamodbNeed, **changed: Any) -> DynamodbNeed:
    """*need* with other settings of its namespace."""
    return replace(need, settings=replace(need.settings, **changed))


def warned(plan: DynamodbPlan, text: str) -> bool:
    return any(text in each for each in plan.warnings)


def test_an_add_alone_in_its_window_takes_six_writes() -> None:
    """The event; the mark and its deletion; the row, the head, and the row's end."""
    units = dict(plan_dynamodb(load()).write_units)
    assert units.pop("watermarks") == pytest.approx(1.6)
    assert units.pop("leases") == 4
    assert units == {
        "events": 1_000,
        "marks": 1_000,
        "deletion of marks": 1_000,
        "rollups: head and row": 2_000,
        "deletion of rows": 1_000,
    }


def test_many_adds_of_a_window_share_all_but_the_event() -> None:
    """100 counters in windows of 10 s: each process leaves its own marks."""
    units = plan_dynamodb(load(counters=100)).write_units
    assert (units["events"], units["marks"], units["deletion of marks"]) == (1_000, 20, 10)
    assert units["rollups: head and row"] == 20


def test_fewer_counters_in_a_window_can_be_given() -> None:
    assert plan_dynamodb(load(dirty=100)).write_units["rollups: head and row"] == 20


def test_a_longer_window_has_fewer_rollups() -> None:
    plan = plan_dynamodb(within(load(counters=1_000), rollup_window_us=100 * SECOND))
    assert plan.write_units["rollups: head and row"] == 20


def test_long_names_take_more_units() -> None:
    units = plan_dynamodb(load(name_bytes=1_024)).write_units
    assert (units["events"], units["rollups: head and row"]) == (2_000, 4_000)


def test_an_atomic_add_takes_twice_as_much_and_marks() -> None:
    need = load(adds_per_s=Fraction(0), atomic_adds_per_s=Fraction(100), atomic_items=5)
    plan = plan_dynamodb(need)
    assert plan.write_units["atomic adds"] == 1_000
    assert plan.write_units["marks of atomic adds"] == plan.write_units["their deletion"] == 500
    assert plan.write_units["marks"] == 500
    assert plan.read_units["rollups: atomic adds"] == 600


def test_what_a_process_forgets_is_written_again() -> None:
    """It remembers 200,000 names, and 100,000 marks."""
    units = plan_dynamodb(load(counters=400_000)).write_units
    assert units["names, again"] == units["marks"] / 2
    many = load(adds_per_s=Fraction(40_000), counters=200_000, processes=1)
    # 200,000 first ones in a window, and half of the other 200,000.
    assert plan_dynamodb(many).write_units["marks"] == 30_000


def test_gets_that_are_cached_take_nothing() -> None:
    plan = plan_dynamodb(load(gets_per_s=Fraction(10_000)))
    assert not [each for each in plan.read_units if "gets" in each]


def test_gets_read_the_watermarks_the_count_and_if_accurate_the_tail() -> None:
    rate = Fraction(100)
    units = plan_dynamodb(load(uncached_per_s=rate, accurate_per_s=rate)).read_units
    assert units["gets, not cached"] == units["accurate gets: counts"] == 200
    assert units["accurate gets: tails"] == pytest.approx(404, abs=2)
    many = within(load(uncached_per_s=rate), shards=1_024)
    assert plan_dynamodb(many).read_units["gets, not cached"] == 1_000


def test_processes_are_as_many_as_the_adds_and_gets_take() -> None:
    """20,000 / 8,010 / 70 %."""
    need = load(processes=None, adds_per_s=Fraction(20_000))
    assert plan_dynamodb(need).api_processes == 4


def test_events_and_rows_are_kept_for_retention_and_a_slice() -> None:
    need = load(counters=1, name_bytes=16)
    assert plan_dynamodb(need).stored_bytes == pytest.approx(8 * 86_400 * 1_000 * 171, rel=1e-3)


def test_prices_are_the_callers() -> None:
    assert plan_dynamodb(load()).price_of_a_month is None
    priced = load(write_price=Fraction(1), read_price=Fraction(1, 2), storage_price=Fraction(2))
    plan = plan_dynamodb(priced)
    month_s = 30 * 86_400
    assert plan.price_of_a_month == pytest.approx(
        (plan.write_units_per_s + plan.read_units_per_s / 2) * month_s / 10**6
        + plan.stored_bytes / 10**9 * 2
    )


@pytest.mark.parametrize(
    ("need", "what", "fix"),
    [
        (
            load(hottest_per_s=Fraction(10_000)),
            "an event bucket of the busiest counter: 2,500 units",
            "event_buckets to at least 10",
        ),
        (
            load(hottest_per_s=Fraction(10**6)),
            "an event bucket of the busiest counter",
            "several names",
        ),
        (
            within(load(), shards=1),
            "marks of a shard, and their deletion: 2,000 units",
            "more shards",
        ),
        (
            load(accurate_per_s=Fraction(4_000)),
            "reads of a namespace's watermarks: 4,002 units",
            "max_staleness",
        ),
        (
            load(adds_per_s=Fraction(5_000)),
            "writes of a new table of events, on demand: 5,000 units",
            "dynamodb_write_units",
        ),
        (
            load(adds_per_s=Fraction(50_000)),
            "writes of a table of events: 50,000 units",
            "quota",
        ),
    ],
)
def test_a_limit_that_breaks_is_named_with_a_fix(need: DynamodbNeed, what: str, fix: str) -> None:
    (warning,) = (each for each in plan_dynamodb(need).warnings if each.startswith(what))
    assert fix in warning


def test_what_breaks_first_is_shown() -> None:
    plan = plan_dynamodb(load(event_buckets=1, hottest_per_s=Fraction(500)))
    assert max(plan.limits_used.values()) == 0.5
    (step,) = (each for each in plan.steps if each.what == "breaks first")
    assert step.arithmetic == "an event bucket of the busiest counter"
    assert step.result == "at 2 times the load"


def test_what_makes_most_of_the_writes_is_said() -> None:
    assert warned(plan_dynamodb(load()), "make rollup_window longer than 100s; or merge adds")
    assert plan_dynamodb(load(counters=100)).warnings == ()


def test_an_unknown_busiest_counter_is_said() -> None:
    assert warned(plan_dynamodb(load(hottest_per_s=None)), "--hottest")


@pytest.mark.parametrize(
    "changed",
    [
        {"adds_per_s": Fraction(10**10)},
        {"counters": 0},
        {"dirty": 0},
        {"atomic_items": 101},
        {"name_bytes": 1_025},
        {"processes": 0},
        {"load": Fraction(0)},
        {"event_buckets": 0},
    ],
)
def test_values_past_a_bound_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="must be"):
        plan_dynamodb(load(**changed))


def test_settings_past_a_bound_are_refused() -> None:
    with pytest.raises(PlanError, match="rollup_window is"):
        plan_dynamodb(within(load(), rollup_window_us=2 * HOUR))
