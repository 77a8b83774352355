"""The attacks of this folder, short: they cost little memory, and other clients are answered."""

import pytest

from tests.abuse import (
    bad_items,
    bad_streams,
    event_batches,
    late_streams,
    late_tokens,
    live_streams,
    many_shards,
    silent_connections,
    tiny_headers,
    unknown_fields,
    whole_namespaces,
)
from tests.abuse.figures import measure

pytestmark = pytest.mark.usefixtures("child_processes")


def test_unfinished_heads_of_many_tiny_headers() -> None:
    measure(tiny_headers.attack, 300, 1.0).check()


def test_silent_connections() -> None:
    """The well-behaved client goes on, and health checks get in."""
    measure(silent_connections.attack, 150, 2.0, flags={"connections_max": "100"}).check()


def test_connections_that_begin_no_handshake() -> None:
    measure(silent_connections.attack, 1_100, 2.0, tls=True).check()


def test_live_streams() -> None:
    measure(live_streams.attack, 300, 1.0).check()


def test_bodies_of_very_many_unknown_fields() -> None:
    measure(unknown_fields.attack, 2, 1.0).check()


def test_batches_of_events_that_many_rules_match() -> None:
    measure(event_batches.attack, 8, 2.0).check()


def test_namespaces_of_very_many_shards() -> None:
    measure(many_shards.attack, 40, 1.0).check()


def test_batches_of_late_tokens_above_the_rate_limit() -> None:
    measure(late_tokens.attack, 1, 1.0, flags=late_tokens.FLAGS).check()


def test_streams_of_late_tokens_above_the_rate_limit() -> None:
    measure(late_streams.attack, 50, 1.0, flags=late_streams.FLAGS).check()


def test_streams_of_invalid_lines() -> None:
    measure(bad_streams.attack, 20, 1.0).check()


def test_small_batches_of_bad_items() -> None:
    measure(bad_items.attack, 20, 1.0).check()


def test_lists_and_scrapes_of_all_counters() -> None:
    measure(whole_namespaces.attack, 3_000, 30, 20, 50, 1.0).check()
