"""Read the settings of Cassandra's nodes that durability depends on: at startup, and for
``counter doctor``."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from counter.errors import CounterError
from counter.storage.cassandra.connection import CassandraConnection

_GRANT: Final = "GRANT SELECT ON system_views.settings"
#: Answered by each node for itself. Until 4.0 the name of the period ended with its unit.
_SETTINGS: Final = (
    "SELECT name, value FROM system_views.settings WHERE name IN ('commitlog_sync',"
    " 'commitlog_sync_period', 'commitlog_sync_period_in_ms', 'disk_failure_policy')"
)


async def node_warnings(connection: CassandraConnection) -> Sequence[str]:
    """Return what the operator should know about the settings of the nodes that are up in the
    local data center. A node that does not answer is one of the warnings."""
    nodes = connection.near_nodes()
    if not nodes:
        return ("no Cassandra node can be asked for its settings: commitlog_sync is unknown",)
    answers = await asyncio.gather(
        *(connection.ask(node, _SETTINGS) for node in nodes), return_exceptions=True
    )
    found: dict[str, list[str]] = defaultdict(list)
    for node, answer in zip(nodes, answers, strict=True):
        if isinstance(answer, CounterError):
            detail = f"commitlog_sync cannot be read: {answer.detail}; {_GRANT} to the service"
            found[detail].append(node.address)
        elif isinstance(answer, BaseException):
            raise answer
        else:
            for each in _warnings_of(dict(answer)):
                found[each].append(node.address)
    return tuple(
        f"Cassandra at {', '.join(sorted(addresses))}: {warning}"
        for warning, addresses in found.items()
    )


def _warnings_of(settings: Mapping[str, str | None]) -> Iterator[str]:
    """Yield the warnings about a node with these *settings*."""
    if settings.get("disk_failure_policy") == "best_effort":
        yield (
            "disk_failure_policy = best_effort: it answers without what a failed disk holds, and"
            " acknowledged adds may be missing; set disk_failure_policy: stop_paranoid"
        )
    sync = settings.get("commitlog_sync")
    if sync is None:
        yield "it does not report commitlog_sync"
    if sync != "periodic":
        return
    period = settings.get("commitlog_sync_period")
    period = period or f"{settings.get('commitlog_sync_period_in_ms')}ms"
    yield (
        f"commitlog_sync = periodic: an add is acknowledged before it is on disk, and may be lost"
        f" if within {period} of it most of its replicas lose power (or one does while another"
        " one is down); set commitlog_sync: group or batch in cassandra.yaml, or leave it if no"
        " two replicas share their power"
    )
