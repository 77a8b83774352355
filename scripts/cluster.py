"""The command line of ``scripts/cluster``: a real Cassandra and memcached on loopback.

Servers outlive the command, with data, logs and pid files in ``.cluster/dev``. SERVER is a node's
number, or a name as ``status`` shows it.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final, Literal

from cyclopts import App, Parameter

from scripts.cluster_jars import ROOT, missing
from scripts.cluster_nodes import Cluster, Shape
from scripts.cluster_process import ClusterError
from scripts.cluster_servers import memcached_missing

Directory = Annotated[Path, Parameter(help="Where the cluster keeps everything.")]

DIRECTORY: Final = ROOT / ".cluster" / "dev"
HELP: Final = (
    "Runs a real Cassandra and memcached on loopback. Servers outlive the command. SERVER is a"
    " node's number, or a name as `status` shows it."
)
app = App(name="scripts/cluster", help=HELP, help_format="plaintext", version_flags=())


@app.command
def start(
    *,
    nodes: Literal[1, 3] | None = None,
    memcached: int | None = None,
    auth: bool | None = None,
    address: str | None = None,
    cassandra_port: int | None = None,
    memcached_port: int | None = None,
    heap_mb: int | None = None,
    directory: Directory = DIRECTORY,
) -> None:
    """Start the servers that do not run; a stopped cluster keeps its data.

    Parameters
    ----------
    nodes
        Cassandra nodes [1], at ADDRESS and the addresses after it.
    memcached
        memcached servers [1], at the same addresses.
    auth
        Require a password: PasswordAuthenticator with cassandra/cassandra, CassandraAuthorizer.
    address
        The first server's address [127.0.0.1].
    cassandra_port
        The nodes' native port [9042].
    memcached_port
        The memcached servers' port [11211].
    heap_mb
        Each node's heap [512].
    """
    given = {
        "nodes": nodes,
        "memcached": memcached,
        "auth": auth,
        "address": address,
        "cassandra_port": cassandra_port,
        "memcached_port": memcached_port,
        "heap_mb": heap_mb,
    }
    standing = Cluster.find(directory)
    values = asdict(standing.shape if standing else Shape())
    values |= {name: value for name, value in given.items() if value is not None}
    shape = Shape(**values)
    if problem := missing() or (memcached_missing() if shape.memcached else None):
        raise ClusterError(problem)
    cluster = Cluster.create(directory, shape)
    started = cluster.start()
    print(f"started {', '.join(started)}" if started else "all of it was running already")
    _show(cluster)


@app.command
def stop(*, directory: Directory = DIRECTORY) -> None:
    """Stop all servers and keep their data."""
    stopped = _cluster(directory).stop()
    print(f"stopped {', '.join(stopped)}" if stopped else "nothing was running")


@app.command
def wipe(*, directory: Directory = DIRECTORY) -> None:
    """Kill all servers and delete their data; the jars stay."""
    if cluster := Cluster.find(directory):
        cluster.wipe()
        print(f"wiped {cluster.directory}")
    else:
        print("there was nothing to wipe")


@app.command
def status(*, directory: Directory = DIRECTORY) -> None:
    """Show each server and where it listens."""
    _show(_cluster(directory))


@app.command
def kill(server: str, *, directory: Directory = DIRECTORY) -> None:
    """Crash a server: `kill -9`."""
    _must(_cluster(directory).server(server).kill(), server)


@app.command
def pause(server: str, *, directory: Directory = DIRECTORY) -> None:
    """Freeze a server: its connections stay open, and it does not answer."""
    _must(_cluster(directory).server(server).pause(), server)


@app.command
def resume(server: str, *, directory: Directory = DIRECTORY) -> None:
    """Resume a paused server."""
    _must(_cluster(directory).server(server).resume(), server)


@app.command
def restart(server: str, *, directory: Directory = DIRECTORY) -> None:
    """Stop a server if it runs, and start it with its data."""
    each = _cluster(directory).server(server)
    each.stop()
    each.start()


def _cluster(directory: Path) -> Cluster:
    cluster = Cluster.find(directory)
    if cluster is None:
        raise ClusterError(f"there is no cluster in {directory}; `scripts/cluster start` makes one")
    return cluster


def _must(was_running: bool, server: str) -> None:
    if not was_running:
        raise ClusterError(f"{server} is not running; `scripts/cluster restart {server}` starts it")


def _show(cluster: Cluster) -> None:
    port = cluster.shape.cassandra_port
    places = [f"{each}:{port}" for each in cluster.contact_points] + cluster.memcached_addresses
    for server, place in zip(cluster.servers, places, strict=True):
        pid = server.pid()
        state = "down" if pid is None else f"paused, pid {pid}" if server.paused() else f"pid {pid}"
        print(f"{server.name:12} {place:18} {state:20} {server.log}")


if __name__ == "__main__":
    try:
        app()
    except ClusterError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
