"""How many replicas each data center has, and whether the cluster has the nodes for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from counter.errors import StartupError, StoreUnavailableError
from counter.placements import gap_of, stray_of
from counter.types import Placement

#: Replicas by data center.
Replicas = Mapping[str, int]


def replicas_of(name: str, placement: Placement, nodes: Mapping[str, int]) -> Replicas:
    """The replicas of dataset *name* in a cluster with so many *nodes* in each data center.

    They are said for each data center by name: Cassandra's own ``replication_factor`` would mean
    those that it knows when the keyspace is created, and change nothing of them later. Raises
    StartupError for a data center that is not there, and UnavailableError where there are too few
    nodes for a quorum to answer: others may be joining at this moment.
    """
    replicas: dict[str, int] = {}
    for center, count in placement.replication:
        if center and center not in nodes:
            raise StartupError(
                f"dataset {name!r} is to have {count} replicas in data center {center!r};"
                f" the cluster has {', '.join(sorted(nodes))}: correct --replication"
            )
        for each in (center,) if center else nodes:
            replicas[each] = count
    for center, count in replicas.items():
        quorum = count // 2 + 1
        if nodes[center] < quorum:
            raise StoreUnavailableError(
                f"dataset {name!r} is to have {count} replicas in data center {center!r}, which"
                f" has {nodes[center]} of the {quorum} nodes that a quorum of them needs:"
                " start more nodes, or give a smaller --replication"
            )
    return replicas


def replicas_in(replication: Mapping[str, str], nodes: Mapping[str, int]) -> Replicas:
    """The replicas of a keyspace by its ``replication`` in ``system_schema``.

    Any other strategy than NetworkTopologyStrategy knows no data centers: its replicas may be in
    each that has *nodes*.
    """
    # Cassandra writes 3/1 where one of three replicas is transient.
    counts = {
        name: int(count.partition("/")[0]) for name, count in replication.items() if name != "class"
    }
    if replication["class"].endswith("NetworkTopologyStrategy"):
        return counts
    return dict.fromkeys(nodes, counts.get("replication_factor", 1))


def check_overlap(
    name: str, placement: Placement, replicas: Replicas, datacenter: str | None
) -> None:
    """Raise StartupError if a read of dataset *name* by a process in *datacenter* could miss an
    acknowledged write."""
    centers = [center for center, count in replicas.items() if count]
    problem = gap_of(name, placement, centers)
    if problem is None and len(centers) > 1:
        problem = stray_of(name, placement, datacenter)
    if problem is not None:
        raise StartupError(problem)


def replicas_of_all(parts: Iterable[Replicas]) -> Replicas:
    """As many replicas in each data center as any of *parts* has."""
    most: dict[str, int] = {}
    for each in parts:
        for center, count in each.items():
            most[center] = max(count, most.get(center, 0))
    return most


def replication_cql(replicas: Replicas) -> str:
    """What CQL calls the ``replication`` of a keyspace."""
    counts = "".join(f", '{center}': {count}" for center, count in sorted(replicas.items()))
    return f"{{'class': 'NetworkTopologyStrategy'{counts}}}"


def replicas_text(replicas: Mapping[str, int | str]) -> str:
    """As a setting says it."""
    return ",".join(f"{center}:{count}" for center, count in sorted(replicas.items()))
