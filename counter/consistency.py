"""Whether every read sees every acknowledged write, whichever data centers they are made in."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from counter.types import Placement

_REACHES_ALL: Final = ("EACH_QUORUM", "ALL")
_LOCAL: Final = ("LOCAL_QUORUM", "LOCAL_QUORUM")


def gap_of(name: str, placement: Placement, datacenters: Collection[str]) -> str | None:
    """What is wrong with the consistencies of dataset *name*, whose replicas are in *datacenters*;
    None if every read overlaps every acknowledged write.

    LOCAL_QUORUM is a quorum of the data center of the process that asks, and QUORUM one of all
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
    """Why a process in *datacenter* must not use dataset *name*; None if it may.

    For datasets whose replicas are in several data centers.
    """
    levels = (placement.write_consistency, placement.read_consistency)
    if levels != _LOCAL or placement.datacenter == datacenter:
        return None
    return (
        f"dataset {name!r} is for processes in data center {placement.datacenter!r} only, as"
        f" `counter schema apply --single-datacenter` was told, and this one is in {datacenter!r}:"
        " correct --local-datacenter, or run `counter schema apply` with --write-consistency"
        " EACH_QUORUM"
    )


def strict_gap_of(placement: Placement) -> str | None:
    """Why ``payload_check: strict`` cannot hold in a dataset with replicas in several data centers;
    None if it can.

    Cassandra completes a compare-and-set that was left half done at a quorum of all replicas,
    whatever the statement that finds it asks for. So only reads that overlap such a quorum see
    every add that a retry was told of.
    """
    write, read = placement.write_consistency, placement.read_consistency
    if read == "ALL" or (write, read) == ("QUORUM", "QUORUM"):
        return None
    return (
        "payload_check strict needs QUORUM for writes and reads, or reads at ALL, where replicas"
        f" are in several data centers; the dataset writes at {write} and reads at {read}"
    )
