"""When a window is closed: never while an acknowledged event can still land in it."""

from dataclasses import replace

from hypothesis import assume, example, given
from hypothesis import strategies as st

from counter import limits
from counter.types import CounterType, Dataset, Era, Namespace, NamespaceSettings, PayloadCheck
from counter.windows import (
    accept_limit_at,
    closed_through,
    closes_at,
    closing_limit_at,
    honoured_for,
    window_of,
)

SLICE_US = 1_000


def namespace_of(
    window_us: int, eras: tuple[Era, ...], *, write_timeout_us: int, skew_us: int
) -> Namespace:
    dataset = Dataset(1, "d", limits.DAY, SLICE_US, SLICE_US, 1, write_timeout_us, skew_us)
    settings = NamespaceSettings(
        CounterType.ACCURATE, "d", eras[-1][1], 1, window_us, 1, PayloadCheck.GUARD, 1, 1
    )
    return Namespace(1, "n", settings, eras, dataset, 0, 1)


@st.composite
def namespaces(draw: st.DrawFn) -> Namespace:
    """A namespace with an accept limit that changes from slice to slice, in small numbers."""
    window_us = draw(st.sampled_from([1, 10, 50, 100, 250, 1_000]))
    borders = sorted(draw(st.sets(st.integers(1, 8), max_size=3)))
    accept_limits = st.integers(1, 700)
    eras = [Era(0, draw(accept_limits))]
    eras += [Era(border * SLICE_US, draw(accept_limits)) for border in borders]
    write_timeout_us = draw(st.integers(0, 100))
    skew_us = draw(st.integers(0, 50))
    found = namespace_of(window_us, tuple(eras), write_timeout_us=write_timeout_us, skew_us=skew_us)
    if draw(st.booleans()):
        return found.announced(draw(accept_limits), draw(st.integers(1, 8)) * SLICE_US)
    return found


instants = st.integers(0, 10 * SLICE_US)


@given(namespaces(), instants, instants)
def test_no_event_lands_in_a_closed_window(
    namespace: Namespace, now_us: int, event_us: int
) -> None:
    """Admitted at any instant of any process's clock, it lands before its window closes."""
    through_us = closed_through(namespace, now_us)
    dataset = namespace.dataset
    latest_landing_us = event_us + accept_limit_at(namespace, event_us)
    latest_landing_us += dataset.write_timeout_us + 2 * dataset.clock_skew_max_us
    if latest_landing_us >= now_us:
        assert event_us > through_us


@example(namespace_of(10, (Era(0, 20),), write_timeout_us=7, skew_us=3), 9)
@given(namespaces(), instants)
def test_a_window_is_open_until_the_last_add_of_it_can_have_landed(
    namespace: Namespace, event_us: int
) -> None:
    """By a slow clock at the last instant, a landing just in time, and a fast clock that asks."""
    dataset = namespace.dataset
    checked_us = event_us + accept_limit_at(namespace, event_us) + dataset.clock_skew_max_us
    landed_us = checked_us + dataset.write_timeout_us
    asked_us = landed_us + dataset.clock_skew_max_us
    assert closed_through(namespace, asked_us) < event_us


@given(namespaces(), instants)
def test_closed_through_is_the_end_of_a_run_of_closed_windows(
    namespace: Namespace, now_us: int
) -> None:
    through_us = closed_through(namespace, now_us)
    size_us = namespace.settings.rollup_window_us
    assert (through_us + 1) % size_us == 0
    first = through_us + 1
    closed = [
        closes_at(namespace, start_us) <= now_us
        for start_us in range(max(0, first - 20 * size_us), first + size_us, size_us)
    ]
    assert all(closed[:-1]), "every window up to it is closed"
    assert not closed[-1] or through_us == -1, "and the next one is open"


@given(namespaces(), instants, st.integers(0, 2_000))
def test_closed_stays_closed(namespace: Namespace, now_us: int, later_us: int) -> None:
    assert closed_through(namespace, now_us) <= closed_through(namespace, now_us + later_us)


@given(namespaces(), instants)
def test_a_window_closes_for_all_its_instants_at_once(namespace: Namespace, event_us: int) -> None:
    size_us = namespace.settings.rollup_window_us
    start_us = window_of(event_us, size_us)
    last_us = start_us + size_us - 1
    assert closes_at(namespace, start_us) == closes_at(namespace, last_us)


@given(namespaces(), st.integers(1, 700), st.integers(1, 8), instants)
def test_an_announcement_is_between_what_was_and_what_comes(
    namespace: Namespace, limit_us: int, border: int, event_us: int
) -> None:
    """So a copy before it, it and the change may be in use together, in any order of landing. The
    service announces no limit that is the latest already."""
    assume(not namespace.accepts_by(limit_us))
    from_us = border * SLICE_US
    announced = namespace.announced(limit_us, from_us)
    settings = replace(namespace.settings, accept_limit_us=limit_us)
    changed = announced.changed(settings, from_us)
    for each in (namespace, changed):
        span = [
            accept_limit_at(announced, event_us),
            accept_limit_at(each, event_us),
            closing_limit_at(each, event_us),
            closing_limit_at(announced, event_us),
        ]
        assert span == sorted(span)
    assert changed.accepts_by(limit_us)
    for limit_at in (accept_limit_at, closing_limit_at):
        is_new = event_us >= from_us
        assert limit_at(changed, event_us) == (
            limit_us if is_new else limit_at(namespace, event_us)
        )


@given(namespaces(), st.integers(0, limits.HOUR))
def test_a_key_is_honoured_while_every_process_remembers_it(
    namespace: Namespace, kept_us: int
) -> None:
    margin_us = limits.STORE_CLOCK_STEP_MAX_US + 2 * namespace.dataset.clock_skew_max_us
    settings = replace(namespace.settings, key_ttl_us=margin_us + kept_us)
    assert honoured_for(replace(namespace, settings=settings), is_key=True) == kept_us
