"""What is needed to reach a cluster, how the data of each dataset lie on it, and whether every read
overlaps every acknowledged write, in whichever data centers they run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from counter.limits import STORE_TIMEOUT_US
from counter.types import Dataset

_REACHES_ALL: Final = ("EACH_QUORUM", "ALL")
_LOCAL: Final = ("LOCAL_QUORUM", "LOCAL_QUORUM")


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificates by path: the authority's, and this client's own where asked for."""

    ca: Path
    cert: Path | None = None
    key: Path | None = None
    #: Whether a node's certificate must name the address at which it is reached.
    check_host: bool = True


@dataclass(frozen=True, slots=True)
class Placement:
    """How a dataset's data are replicated, and how many replicas a write or a read waits for.

    ``replication`` is the number of replicas by data center; ("", n) for all of them alike. All
    processes run in ``datacenter`` unless it is empty.
    """

    replication: tuple[tuple[str, int], ...] = (("", 1),)
    write_consistency: str = "LOCAL_QUORUM"
    read_consistency: str = "LOCAL_QUORUM"
    datacenter: str = ""


@dataclass(frozen=True, slots=True)
class CassandraOptions:
    """How to connect. A dataset's keyspace is named ``<keyspace>_<name>``."""

    contact_points: Sequence[tuple[str, int]]
    local_datacenter: str | None = None
    keyspace: str = "counter"
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: Tls | None = None
    read_timeout_us: int = STORE_TIMEOUT_US
    datasets: Sequence[tuple[Dataset, Placement]] = ()


def gap_of(name: str, placement: Placement, datacenters: Collection[str]) -> str | None:
    """Describe what is wrong with the consistencies of dataset *name*, whose replicas are in
    *datacenters*; return None if every read overlaps every acknowledged write.

    LOCAL_QUORUM is a quorum of the data center of the calling process, and QUORUM one of all
    replicas, in whatever data centers. So a read overlaps all writes if a write waits for a quorum
    of each data center, if a read waits for all replicas, or if both are at QUORUM; and, if all
    processes are in one data center, if both are at LOCAL_QUORUM.
    """
    levels = (placement.write_consistency, placement.read_consistency)
    write, read = levels
    if len(datacenters) <= 1 or write in _REACHES_ALL or read == "ALL":
        return None
    if levels == ("QUORUM", "QUORUM") or (levels == _LOCAL and placement.datacenter):
        return None
    centers = ", ".join(sorted(datacenters))
    return (
        f"dataset {name!r} has replicas in {len(datacenters)} data centers ({centers}), writes at"
        f" {write} and reads at {read}: a read in one may miss an add that was acknowledged in"
        " another; set --write-consistency EACH_QUORUM, or QUORUM for both, or LOCAL_QUORUM for"
        " both and --single-datacenter if all API processes and workers run in one data center"
    )


def stray_of(name: str, placement: Placement, datacenter: str | None) -> str | None:
    """Describe why a process in *datacenter* must not use dataset *name*; return None if it may.

    For datasets whose replicas are in several data centers.
    """
    levels = (placement.write_consistency, placement.read_consistency)
    if levels != _LOCAL or placement.datacenter == datacenter:
        return None
    return (
        f"dataset {name!r} is for processes in data center {placement.datacenter!r} only, because"
        " `counter schema apply` was run with --single-datacenter, and this process is in"
        f" {datacenter!r}:"
        " correct --local-datacenter, or run `counter schema apply` with --write-consistency"
        " EACH_QUORUM"
    )


def strict_gap_of(placement: Placement) -> str | None:
    """Describe why ``payload_check: strict`` cannot hold in a dataset with replicas in several data
    centers; return None if it can.

    Cassandra completes an unfinished compare-and-set at a quorum of all replicas, whatever
    consistency the statement that finds it asks for. So only reads that overlap such a quorum see
    every add that a retry was answered with.
    """
    write, read = placement.write_consistency, placement.read_consistency
    if read == "ALL" or (write, read) == ("QUORUM", "QUORUM"):
        return None
    return (
        "payload_check strict needs QUORUM for writes and reads, or reads at ALL, where replicas"
        f" are in several data centers; the dataset writes at {write} and reads at {read}"
    )
