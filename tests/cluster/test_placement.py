"""Whether a cluster has the nodes for its replicas, or may have them soon."""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import product
from typing import get_args

import pytest

from counter.errors import StartupError, StoreUnavailableError
from counter.limits import SECOND
from counter.storage.cassandra.options import Placement, gap_of, strict_gap_of
from counter.storage.cassandra.schema import Replicas, check_overlap, replicas_in, replicas_of
from counter.storage.cassandra.settings import ReadConsistency, WriteConsistency
from counter.storage.shared.startup_retry import StartupRetry
from tests.support.virtual import virtually

THREE = Placement((("", 3),))


def test_a_quorum_of_the_nodes_is_enough() -> None:
    assert replicas_of("default", THREE, {"dc1": 2, "dc2": 3}) == {"dc1": 3, "dc2": 3}


def test_nodes_that_are_still_joining_are_waited_for() -> None:
    """Regression: the schema was given up at once if nodes had just been started."""

    async def place() -> Replicas:
        joined = 1 + int(asyncio.get_running_loop().time() // 10)
        return replicas_of("default", THREE, {"dc1": joined})

    assert virtually(StartupRetry(30 * SECOND).run(place)) == {"dc1": 3}


def test_too_few_nodes_are_reported_in_the_end() -> None:
    async def place() -> Replicas:
        return replicas_of("default", THREE, {"dc1": 1})

    with pytest.raises(StoreUnavailableError, match=r"1 of the 2 nodes .* smaller --replication"):
        virtually(StartupRetry(30 * SECOND).run(place))


def test_a_missing_data_center_is_not_waited_for() -> None:
    with pytest.raises(StartupError, match="'dc9'; the cluster has dc1"):
        replicas_of("default", Placement((("dc9", 1),)), {"dc1": 3})


def _least(
    level: str, replicas: tuple[int, ...], homes: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """How many replicas in each data center *level* may wait for at the least: every way."""
    quorums = [count // 2 + 1 for count in replicas]
    if level == "LOCAL_QUORUM":
        for home in homes:
            yield tuple(quorums[home] if at == home else 0 for at in range(len(replicas)))
    elif level == "EACH_QUORUM":
        yield tuple(quorums)
    else:
        total = sum(replicas)
        wanted = total if level == "ALL" else total // 2 + 1
        ways = product(*(range(count + 1) for count in replicas))
        yield from (each for each in ways if sum(each) == wanted)


def _overlaps(write: str, read: str, replicas: tuple[int, ...], homes: Sequence[int]) -> bool:
    """Whether each read has a replica in common with each write, however they are chosen."""
    return all(
        any(w + r > count for w, r, count in zip(wrote, asked, replicas, strict=True))
        for wrote in _least(write, replicas, homes)
        for asked in _least(read, replicas, homes)
    )


@pytest.mark.parametrize("write", get_args(WriteConsistency))
@pytest.mark.parametrize("read", get_args(ReadConsistency))
@pytest.mark.parametrize("home", ["", "dc0"])
def test_allowed_consistencies_overlap(write: str, read: str, home: str) -> None:
    """Tried with every way to choose replicas, in up to three data centers of up to three."""
    placement = Placement((("", 3),), write, read, home)
    refused = False
    for size in (1, 2, 3):
        for replicas in product((1, 2, 3), repeat=size):
            homes = [0] if home else range(size)
            centers = [f"dc{number}" for number in range(size)]
            refused = gap_of("d", placement, centers) is not None
            assert refused or _overlaps(write, read, replicas, homes), replicas
    if refused:
        assert not _overlaps(write, read, (3, 3), [0] if home else (0, 1))


def test_a_dataset_of_one_data_center_is_refused_in_another() -> None:
    placement = Placement((("", 3),), datacenter="dc1")
    check_overlap("d", placement, {"dc1": 3, "dc2": 3}, "dc1")
    check_overlap("d", placement, {"dc2": 3}, "dc2")
    with pytest.raises(StartupError, match="this process is in 'dc2'"):
        check_overlap("d", placement, {"dc1": 3, "dc2": 3}, "dc2")
    everywhere = Placement((("", 3),), "EACH_QUORUM", "LOCAL_QUORUM", "dc1")
    check_overlap("d", everywhere, {"dc1": 3, "dc2": 3}, "dc2")


@pytest.mark.parametrize(
    ("replication", "expected"),
    [
        ({"class": "org.apache.NetworkTopologyStrategy", "dc1": "3", "dc2": "0"}, {"dc1": 3}),
        ({"class": "NetworkTopologyStrategy", "dc1": "3/1"}, {"dc1": 3}),
        ({"class": "SimpleStrategy", "replication_factor": "2"}, {"dc1": 2, "dc2": 2}),
    ],
)
def test_the_replicas_of_a_keyspace(replication: dict[str, str], expected: dict[str, int]) -> None:
    found = replicas_in(replication, {"dc1": 2, "dc2": 1})
    assert {center: count for center, count in found.items() if count} == expected


@pytest.mark.parametrize(
    ("write", "read", "holds"),
    [
        ("QUORUM", "QUORUM", True),
        ("EACH_QUORUM", "ALL", True),
        ("EACH_QUORUM", "LOCAL_QUORUM", False),
        ("LOCAL_QUORUM", "LOCAL_QUORUM", False),
        ("ALL", "LOCAL_QUORUM", False),
    ],
)
def test_strict_needs_reads_that_overlap_a_quorum_of_all(
    write: str, read: str, holds: bool
) -> None:
    placement = Placement((("dc1", 3), ("dc2", 3)), write, read)
    assert (strict_gap_of(placement) is None) is holds
