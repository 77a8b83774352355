"""Properties of every plan, and of every quantity."""

import json
from contextlib import suppress
from dataclasses import asdict
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from counter import limits
from counter.ops import planner
from counter.ops.planner import DedupNeed, DedupPlan, StorageNeed, StoragePlan
from counter.quantities import (
    format_share,
    parse_count,
    parse_duration,
    parse_number,
    parse_rate,
    parse_share,
    parse_size,
    spell_duration,
)

spans = st.integers(0, 400 * limits.DAY)
rates = st.fractions(0, 10**6, max_denominator=1_000)
shares = st.fractions(0, 10, max_denominator=1_000)
sizes = st.integers(1, 10**7)

dedups = st.builds(
    DedupNeed,
    rate_per_s=rates,
    caller_us=spans,
    retry_us=spans,
    network_us=spans,
    clock_us=spans,
    ttl_us=st.integers(limits.MILLISECOND, 400 * limits.DAY) | st.just(limits.DAY),
    margin=shares,
    duplicates=shares,
    incident_us=spans,
    record_bytes=sizes,
    bits=st.integers(1, 256),
)
retentions = st.integers(6 * limits.HOUR, 800 * limits.DAY)
storages = st.builds(
    StorageNeed,
    retention_us=st.none() | retentions,
    read_interval_us=st.integers(1, 800 * 86_400).map(lambda s: s * limits.SECOND),
    events_per_day=st.fractions(0, 10**9, max_denominator=100),
    event_bytes=sizes,
)


@given(dedups)
def test_a_dedup_plan_keeps_to_its_bounds(need: DedupNeed) -> None:
    plan = planner.plan_dedup(need)
    assert 0 <= plan.collision_probability <= 1
    assert plan.keys * limits.SECOND >= need.rate_per_s * (need.ttl_us or 0)
    assert plan.shards & (plan.shards - 1) == 0
    assert plan.bytes_held <= plan.shards * limits.PARTITION_BYTES_MAX
    assert plan.shards == 1 or plan.bytes_held > plan.shards // 2 * limits.PARTITION_BYTES_MAX
    assert plan.keys_per_shard * plan.shards >= plan.keys


@given(dedups, rates, spans, shares)
def test_more_tokens_never_take_less(
    need: DedupNeed, rate: Fraction, later_us: int, margin: Fraction
) -> None:
    def more(**changed: object) -> DedupPlan:
        return planner.plan_dedup(DedupNeed(**(asdict(need) | changed)))

    first = planner.plan_dedup(need)
    for plan in (
        more(rate_per_s=need.rate_per_s + rate),
        more(ttl_us=(need.ttl_us or 0) + later_us),
        more(margin=min(need.margin + margin, Fraction(10))),
    ):
        assert plan.keys >= first.keys
        assert plan.shards >= first.shards
        assert plan.collision_probability >= first.collision_probability


@given(dedups)
def test_a_dedup_plan_is_the_same_after_json(need: DedupNeed) -> None:
    plan = planner.plan_dedup(need)
    assert DedupPlan(**json.loads(json.dumps(asdict(plan)))) == plan


@given(storages)
def test_a_storage_plan_keeps_to_its_bounds(need: StorageNeed) -> None:
    plan = planner.plan_storage(need)
    assert 1 <= plan.buckets_per_id <= planner.BUCKETS_PER_ID_MAX
    assert 1 <= plan.seconds_per_interval <= need.read_interval_us // limits.SECOND
    assert plan.read_amplification % plan.buckets_per_id == 0
    intervals = plan.read_amplification // plan.buckets_per_id
    assert intervals * plan.seconds_per_interval * limits.SECOND >= need.read_interval_us
    if need.retention_us is None:
        assert plan.seconds_per_slice == 0
    else:
        assert plan.seconds_per_interval <= plan.seconds_per_slice
        assert plan.seconds_per_slice * limits.SECOND <= need.retention_us


@given(retentions, spans)
def test_a_longer_retention_has_no_shorter_slices(retention_us: int, more_us: int) -> None:
    assert planner.slice_for(retention_us) <= planner.slice_for(retention_us + more_us)


@given(storages, st.integers(0, 10**9), sizes)
def test_more_events_never_take_fewer_buckets(
    need: StorageNeed, events: int, more_bytes: int
) -> None:
    first = planner.plan_storage(need)
    many = StorageNeed(**(asdict(need) | {"events_per_day": need.events_per_day + events}))
    large = StorageNeed(**(asdict(need) | {"event_bytes": need.event_bytes + more_bytes}))
    for plan in (planner.plan_storage(many), planner.plan_storage(large)):
        assert plan.buckets_per_id >= first.buckets_per_id
        assert plan.read_amplification >= first.read_amplification


@given(storages)
def test_a_storage_plan_is_the_same_after_json(need: StorageNeed) -> None:
    plan = planner.plan_storage(need)
    assert StoragePlan(**json.loads(json.dumps(asdict(plan)))) == plan


@given(st.integers(0, 10**18))
@example(0)
def test_a_duration_is_spelled_and_read_back(duration_us: int) -> None:
    assert parse_duration(spell_duration(duration_us)) == duration_us


@pytest.mark.parametrize(
    "text",
    ["", "P7D", "PT1H", "1y", "1M", "d", "1", "1D", "-1d", "1d ", "1.5d", "٣d"],
)
def test_a_duration_without_a_fixed_length_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)


@given(st.text(max_size=12) | st.text("0123456789.,eE+/shmdkMGiB% ", max_size=12))
def test_any_text_is_a_quantity_or_is_refused(text: str) -> None:
    for parse in (parse_number, parse_count, parse_rate, parse_size, parse_share):
        with suppress(ValueError):
            assert parse(text) >= 0


@given(st.integers(0, 10**6))
def test_a_share_is_written_and_read_back(thousandths: int) -> None:
    share = Fraction(thousandths % 1_000, 1_000)
    assert parse_share(format_share(share)) == share


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64", 64),
        ("200B", 200),
        ("4MiB", 4 * 2**20),
        ("1TB", 10**12),
        ("1.5kB", 1_500),
        ("1 KB", 1_000),
        ("2GiB", 2**31),
        ("1,000,000", 10**6),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "B", "-1B", "0.5B", "1b", "1EB", "1e19", "4 M", "1e999999"])
def test_an_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a|too large"):
        parse_size(text)


def test_rates_are_read_by_the_second() -> None:
    assert parse_rate("80/s") == 80
    assert parse_rate("4.8/m") == Fraction(8, 100)
    assert parse_rate("1e6/d") == Fraction(10**6, 86_400)
    for text in ("80", "80/y", "/s", "80/ s", "x/s"):
        with pytest.raises(ValueError, match=r"is not a (rate|number)"):
            parse_rate(text)
