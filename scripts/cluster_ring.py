"""Wait until the nodes of a cluster know each other, which is some time after they answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from cassandra.auth import PlainTextAuthProvider
from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile, NoHostAvailable
from cassandra.policies import WhiteListRoundRobinPolicy
from cassandra.query import SimpleStatement

from scripts.cluster_process import ClusterError

_TIMEOUT_S: Final = 120.0
_LOOK_EVERY_S: Final = 0.2


def wait_until_all_know_all(addresses: Sequence[str], port: int, *, auth: bool) -> None:
    """Return when each node reports every other node to clients. Raises ClusterError."""
    until_s = time.monotonic() + _TIMEOUT_S
    for address in addresses:
        while (known := _peers_of(address, port, auth=auth)) < len(addresses) - 1:
            if time.monotonic() > until_s:
                raise ClusterError(
                    f"the node at {address} knows {known} other nodes after {_TIMEOUT_S:.0f} s,"
                    f" not {len(addresses) - 1}"
                )
            time.sleep(_LOOK_EVERY_S)


def _peers_of(address: str, port: int, *, auth: bool) -> int:
    """Return how many other nodes one node knows; -1 while logins fail."""
    policy = WhiteListRoundRobinPolicy([address])
    driver = Cluster(
        [address],
        port=port,
        auth_provider=PlainTextAuthProvider("cassandra", "cassandra") if auth else None,
        execution_profiles={EXEC_PROFILE_DEFAULT: ExecutionProfile(load_balancing_policy=policy)},
        protocol_version=5,
    )
    try:
        with driver, driver.connect() as session:
            return len(list(session.execute(SimpleStatement("SELECT peer FROM system.peers_v2"))))
    except NoHostAvailable:
        return -1
