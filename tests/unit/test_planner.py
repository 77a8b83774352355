"""The cost of tokens and of one counter's events: the numbers of a plan, and its bounds."""

from fractions import Fraction

import pytest

from counter import limits
from counter.errors import StartupError
from counter.ops import planner
from counter.ops.planner import DedupNeed, StorageNeed, StoragePlan

MIB = 1024 * 1024


def dedup(**changed: object) -> DedupNeed:
    """80 tokens a second with repetitions up to 135 s later."""
    wanted = {
        "rate_per_s": Fraction(80),
        "caller_us": 10 * limits.SECOND,
        "retry_us": 90 * limits.SECOND,
        "network_us": 30 * limits.SECOND,
        "clock_us": 5 * limits.SECOND,
        "margin": Fraction(1, 5),
        "duplicates": Fraction(6, 100),
        "incident_us": 10 * limits.MINUTE,
        "record_bytes": 200,
    }
    return DedupNeed(**(wanted | changed))  # type: ignore[arg-type]


def storage(retention_us: int | None, **changed: object) -> StorageNeed:
    wanted = {"read_interval_us": limits.DAY, "events_per_day": Fraction(10)}
    return StorageNeed(retention_us=retention_us, **(wanted | changed))  # type: ignore[arg-type]


def test_tokens_are_kept_for_as_long_as_a_repetition_may_take() -> None:
    plan = planner.plan_dedup(dedup())
    assert (plan.ttl_seconds, plan.keys) == (135, 12_960)
    assert plan.duplicates_per_second == 4.8
    assert plan.duplicates_in_incident == 2_880
    assert f"{plan.collision_probability:.2e}" == "2.47e-31"
    assert (plan.bytes_held, plan.bytes_per_day) == (2_592_000, 80 * 86_400 * 200)
    assert (plan.shards, plan.keys_per_shard) == (1, 12_960)


def test_a_day_of_a_thousand_a_second_is_86_million_keys() -> None:
    need = DedupNeed(rate_per_s=Fraction(1_000), ttl_us=limits.DAY, record_bytes=200)
    plan = planner.plan_dedup(need)
    assert plan.keys == plan.keys_per_day == 86_400_000
    assert plan.bytes_held == plan.bytes_per_day == 17_280_000_000
    # 4,120 parts of 4 MiB, in the next power of two.
    assert plan.shards == 8_192


def test_a_collision_is_as_likely_as_the_birthday_bound_says() -> None:
    assert planner.collision_probability(12_960) == pytest.approx(
        12_960 * 12_959 / (2 * 2**128), rel=1e-12
    )
    assert planner.collision_probability(0) == planner.collision_probability(1) == 0
    assert planner.collision_probability(2, 8) == 1 / 256
    assert planner.collision_probability(1_000, 8) == 1


def test_tokens_that_are_forgotten_too_early_are_warned_of() -> None:
    need = dedup(ttl_us=limits.MINUTE)
    (warning,) = planner.dedup_warnings(need)
    assert "ttl is 1m" in warning
    assert "135s after the first attempt" in warning
    assert planner.plan_dedup(need).ttl_seconds == 60
    assert planner.dedup_warnings(dedup()) == ()
    assert planner.dedup_warnings(dedup(ttl_us=135 * limits.SECOND)) == ()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rate_per_s": Fraction(10**10)}, "rate is 10,000,000,000/s; it must be from 0/s to"),
        ({"retry_us": 40_000 * limits.DAY}, "retry is 40000d; it must be from 0s to 36500d"),
        ({"ttl_us": 0}, "ttl is 0s; it must be from 1ms to 36500d"),
        ({"margin": Fraction(11)}, "margin is 1100%; it must be from 0% to 1000%"),
        ({"duplicates": Fraction(-1)}, "duplicates is -100%; it must be from 0% to 1000%"),
        ({"record_bytes": 0}, "record_size is 0 B; it must be from 1 B to"),
        ({"bits": 0}, "bits is 0; it must be from 1 to 1,024"),
    ],
    ids=str,
)
def test_a_value_past_its_bound_is_named_with_it(changed: dict[str, object], message: str) -> None:
    with pytest.raises(StartupError, match="^" + message.replace("(", r"\(")):
        planner.plan_dedup(dedup(**changed))


def test_tokens_that_are_never_repeated_are_not_planned_for() -> None:
    with pytest.raises(StartupError, match=r"caller \+ retry \+ network \+ clock is 0s"):
        planner.plan_dedup(DedupNeed(rate_per_s=Fraction(80)))


@pytest.mark.parametrize(
    ("retention_us", "slice_us"),
    [
        (6 * limits.HOUR, 4 * limits.HOUR),
        (limits.DAY, 4 * limits.HOUR),
        (limits.DAY + 1, limits.DAY),
        (7 * limits.DAY, limits.DAY),
        (7 * limits.DAY + 1, 7 * limits.DAY),
        (14 * limits.DAY, 7 * limits.DAY),
        (14 * limits.DAY + 1, 14 * limits.DAY),
        (30 * limits.DAY, 14 * limits.DAY),
        (30 * limits.DAY + 1, 30 * limits.DAY),
        (90 * limits.DAY, 30 * limits.DAY),
        (90 * limits.DAY + 1, 90 * limits.DAY),
        (180 * limits.DAY, 90 * limits.DAY),
        (180 * limits.DAY + 1, 180 * limits.DAY),
        (365 * limits.DAY, 180 * limits.DAY),
        (365 * limits.DAY + 1, 365 * limits.DAY),
        (5_000 * limits.DAY, 365 * limits.DAY),
        (None, 0),
    ],
)
def test_a_slice_follows_from_the_retention(retention_us: int | None, slice_us: int) -> None:
    """Each bound belongs to the shorter slice."""
    assert planner.slice_for(retention_us) == slice_us


def test_less_than_six_hours_are_no_retention() -> None:
    with pytest.raises(
        StartupError, match="retention is 5h59m59s999ms999us; it must be from 6h to"
    ):
        planner.slice_for(6 * limits.HOUR - 1)


def test_a_week_of_a_million_events_a_day() -> None:
    need = storage(7 * limits.DAY, events_per_day=Fraction(1_000_000), event_bytes=64)
    assert planner.plan_storage(need) == StoragePlan(
        seconds_per_slice=86_400,
        seconds_per_interval=86_400,
        buckets_per_id=8,
        seconds_per_bucket=5,
        accept_limit=600,
        read_amplification=8,
    )


def test_an_interval_is_no_longer_than_a_slice() -> None:
    """A read of three days over slices of four hours looks into eighteen."""
    plan = planner.plan_storage(storage(limits.DAY, read_interval_us=3 * limits.DAY))
    assert (plan.seconds_per_slice, plan.seconds_per_interval) == (14_400, 14_400)
    assert (plan.buckets_per_id, plan.seconds_per_bucket) == (1, 14_400)
    assert plan.read_amplification == 18


def test_a_read_is_rounded_up_to_a_multiple_of_the_slice() -> None:
    plan = planner.plan_storage(storage(limits.DAY, read_interval_us=5 * limits.HOUR))
    assert plan.read_amplification == 2


def test_for_ever_is_one_slice_and_accepts_whatever_its_age() -> None:
    plan = planner.plan_storage(storage(None, read_interval_us=3_000 * limits.DAY))
    assert (plan.seconds_per_slice, plan.accept_limit) == (0, 0)
    assert plan.seconds_per_interval == 3_000 * 86_400
    assert plan.read_amplification == 1


def test_an_accept_limit_that_is_given_stays() -> None:
    plan = planner.plan_storage(storage(7 * limits.DAY, accept_limit_us=5 * limits.SECOND))
    assert plan.accept_limit == 5


@pytest.mark.parametrize(
    ("halves", "buckets"),
    [
        (0, 1),
        (1, 1),
        (2, 1),
        (3, 2),
        (4, 2),
        (5, 2),
        (6, 3),
        (7, 4),
        (9, 4),
        (11, 6),
        (15, 8),
        (99, 8),
    ],
)
def test_buckets_are_rounded_half_to_even(halves: int, buckets: int) -> None:
    """*halves* times 2 MiB a day, read a day at a time."""
    assert planner.buckets_for(limits.DAY, Fraction(halves), 2 * MIB) == buckets


def test_just_past_a_half_is_rounded_up() -> None:
    events = Fraction(5, 2) + Fraction(1, 10**12)
    assert planner.buckets_for(limits.DAY, events, 4 * MIB) == 3


@pytest.mark.parametrize(("read_s", "bucket_s"), [(1, 60), (60, 60), (61, 5), (3_600, 5)])
def test_buckets_turn_more_slowly_if_reads_are_short(read_s: int, bucket_s: int) -> None:
    plan = planner.plan_storage(
        storage(
            7 * limits.DAY, read_interval_us=read_s * limits.SECOND, events_per_day=Fraction(10**12)
        )
    )
    assert (plan.buckets_per_id, plan.seconds_per_bucket) == (8, bucket_s)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"read_interval_us": 0}, "read_interval is 0s; it must be from 1s"),
        ({"read_interval_us": 1_500_000}, "read_interval is 1500ms; it must be a whole number"),
        ({"accept_limit_us": 1}, "accept_limit is 1us; it must be a whole number of seconds"),
        ({"events_per_day": Fraction(-1)}, "events_per_day is -1; it must be from 0 to"),
        ({"event_bytes": 0}, "event_size is 0 B; it must be from 1 B"),
    ],
    ids=str,
)
def test_an_impossible_plan_is_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        planner.plan_storage(storage(7 * limits.DAY, **changed))


def test_unsupported_plans_are_warned_of() -> None:
    def warned(need: StorageNeed) -> tuple[str, ...]:
        return planner.storage_warnings(need, planner.plan_storage(need))

    assert warned(storage(7 * limits.DAY)) == ()
    (unlimited,) = warned(storage(None))
    assert "retention is unlimited; this service keeps events for 365d at most" in unlimited
    (late,) = warned(storage(7 * limits.DAY, accept_limit_us=2 * limits.HOUR))
    assert "accept_limit is 2h; this service takes 1h at most" in late
    (wide,) = warned(storage(7 * limits.DAY, events_per_day=Fraction(10**6)))
    assert "8 buckets are too few; read at most 12h34m58s at once" in wide
    read_us = 45_298 * limits.SECOND
    shorter = storage(7 * limits.DAY, events_per_day=Fraction(10**6), read_interval_us=read_us)
    assert warned(shorter) == ()
