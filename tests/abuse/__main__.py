"""Attacks in full size: ``python -m tests.abuse NAME``; without a name their names."""

import sys
from collections.abc import Mapping
from functools import partial

from tests.abuse import connections, floods
from tests.abuse.figures import report
from tests.abuse.whole_namespaces import whole_namespaces

_LATE: Mapping[str, str] = {"resolutions_per_s": "10"}
ATTACKS = {
    "tiny_headers": partial(report, connections.tiny_headers, 2_000, 8.0),
    "silent": partial(report, connections.silent, 10_100, 20.0),
    "silent_tls": partial(report, connections.silent, 1_100, 10.0, tls=True),
    "live_streams": partial(report, connections.live_streams, 300, 5.0),
    "late_streams": partial(report, connections.late_streams, 50, 8.0, flags=_LATE),
    "bad_streams": partial(report, connections.bad_streams, 50, 8.0),
    "unknown_fields": partial(report, floods.unknown_fields, 4, 8.0),
    "many_shards": partial(report, floods.many_shards, 444, 10.0),
    "late_tokens": partial(report, floods.late_tokens, 2, 8.0, flags=_LATE),
    "bad_items": partial(report, floods.bad_items, 50, 8.0),
    "event_batches": partial(report, floods.event_batches, 8, 8.0),
    "lists": partial(report, whole_namespaces, 10_000, 100, 0, 0, 10.0),
    "scrapes": partial(report, whole_namespaces, 10_000, 0, 60, 150, 10.0),
}

if __name__ == "__main__":
    if sys.argv[1:]:
        ATTACKS[sys.argv[1]]()
    else:
        sys.stdout.write("\n".join(ATTACKS) + "\n")
