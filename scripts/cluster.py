"""The command line of ``scripts/cluster``: a real Cassandra and memcached on loopback."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Final, Literal

from cyclopts import App, Parameter

from scripts.cluster_jars import ROOT, missing
from scripts.cluster_nodes import Cluster, Shape
from scripts.cluster_process import ClusterError, ServerProcess, run_command
from scripts.cluster_servers import memcached_missing

DIRECTORY: Final = ROOT / ".cluster" / "dev"
Name = Annotated[str, Parameter(help="A node's number, or a name as `start` shows it.")]

app = App(
    name="scripts/cluster",
    help="Runs a real Cassandra and memcached on loopback. They outlive the command, with data,"
    " logs and pid files in .cluster/dev.",
    help_format="plaintext",
    version_flags=(),
)


@app.command
def start(
    *, nodes: Annotated[Literal[1, 3] | None, Parameter(help="Cassandra nodes [1].")] = None
) -> None:
    """Start the servers that do not run, and show where each listens; a stopped cluster keeps its
    data."""
    if problem := missing() or memcached_missing():
        raise ClusterError(problem)
    standing = Cluster.find(DIRECTORY)
    shape = standing.shape if standing else Shape()
    cluster = Cluster.create(DIRECTORY, replace(shape, nodes=nodes or shape.nodes))
    started = cluster.start()
    print(f"started {', '.join(started)}" if started else "all of it was running already")
    port = cluster.shape.cassandra_port
    places = [f"{each}:{port}" for each in cluster.contact_points] + cluster.memcached_addresses
    for server, place in zip(cluster.servers, places, strict=True):
        print(f"{server.name:12} {place:18} pid {server.pid():<16} {server.log}")


@app.command
def stop() -> None:
    """Stop all servers and keep their data."""
    stopped = _cluster().stop()
    print(f"stopped {', '.join(stopped)}" if stopped else "nothing was running")


@app.command
def wipe() -> None:
    """Kill all servers and delete their data; the jars stay."""
    _cluster().wipe()
    print(f"wiped {DIRECTORY}")


@app.command
def kill(server: Name) -> None:
    """Crash a server: `kill -9`."""
    if not _server(server).kill():
        raise ClusterError(f"{server} is not running; `scripts/cluster restart {server}` starts it")


@app.command
def restart(server: Name) -> None:
    """Stop a server if it runs, and start it with its data."""
    _server(server).stop()
    _server(server).start()


def _cluster() -> Cluster:
    cluster = Cluster.find(DIRECTORY)
    if cluster is None:
        raise ClusterError(f"there is no cluster in {DIRECTORY}; `scripts/cluster start` makes one")
    return cluster


def _server(name: str) -> ServerProcess:
    return _cluster().server(name)


if __name__ == "__main__":
    run_command(app)
