"""``scripts/capacity`` measures a service over Cassandra."""

import subprocess
import sys
from pathlib import Path

from counter.storage.cassandra.control_keyspace import is_deleted
from scripts.cluster_nodes import Cluster
from tests.benchmarks.test_capacity import measured, values
from tests.support.cluster import session_of
from tests.support.server import ROOT


def test_a_cluster_is_measured_in_a_temporary_namespace(
    tmp_path: Path, cassandra: Cluster, memcached: Cluster
) -> None:
    point = f"{cassandra.contact_points[0]}:{cassandra.shape.cassandra_port}"
    flags = (
        *("--store=cassandra", f"--contact-points={point}", "--keyspace=t_bench"),
        *("--replication=1", "--retention=1h", "--slice=10m", "--write-timeout=30s"),
    )
    apply = [sys.executable, "-m", "counter", "schema", "apply", *flags]
    subprocess.run(apply, cwd=ROOT, check=True, capture_output=True, timeout=100)
    # So few adds at once that a busy node does them within their time-out.
    little = ("--counters=50", "--connections=4", f"--cache={memcached.memcached_url}")
    report = measured(tmp_path, *flags, *little)
    assert {"api_adds", "node_adds", "api_gets", "cache_keys"} < set(values(report))
    with session_of(cassandra) as session:
        rows = session.execute("SELECT name, document FROM t_bench.namespaces")
        left = [name for name, document in rows if not is_deleted(document)]
    assert left == ["default"]
