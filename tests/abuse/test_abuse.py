"""The attacks of this folder, short: they cost little memory, and other clients are answered."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.abuse import connections, floods
from tests.abuse.figures import Attack, measure
from tests.abuse.whole_namespaces import whole_namespaces

LATE: Mapping[str, Any] = {"flags": {"resolutions_per_s": "10"}}


@pytest.mark.parametrize(
    ("attack", "given", "how"),
    [
        (connections.tiny_headers, (300, 1.0), {}),
        # Health checks get in.
        (connections.silent, (150, 2.0), {"flags": {"connections_max": "100"}}),
        (connections.silent, (1_100, 2.0), {"tls": True}),
        (connections.live_streams, (300, 1.0), {}),
        (connections.late_streams, (50, 1.0), LATE),
        (connections.bad_streams, (20, 1.0), {}),
        (floods.unknown_fields, (2, 1.0), {}),
        (floods.event_batches, (8, 2.0), {}),
        (floods.many_shards, (40, 1.0), {}),
        (floods.late_tokens, (1, 1.0), LATE),
        (floods.bad_items, (20, 1.0), {}),
        (whole_namespaces, (3_000, 30, 20, 50, 1.0), {}),
    ],
    ids=lambda part: getattr(part, "__name__", None),
)
@pytest.mark.usefixtures("child_processes")
def test_an_attack_costs_little_and_harms_no_other_client(
    attack: Attack, given: tuple[Any, ...], how: dict[str, Any]
) -> None:
    measure(attack, *given, **how).check()
