"""Another process gets ahead between two round trips: each such moment, one at a time."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import pytest

from counter.storage.memcached import commands
from counter.storage.memcached.commands import ContentionError, pack_value, unpack_value
from counter.storage.memcached.connection import MemcachedConnection
from counter.storage.shared.cache_entries import Change, Entry, Note, unpack_count
from counter.testing.cases import NOW
from counter.types import Checkpoint, Guarded
from scripts.cluster_nodes import Cluster

KEY = b"a-key-of-the-races"
TTL_S = 100


class Overtaken(MemcachedConnection):
    """After its first response, and before its owner sees it, somebody else does something."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port, 10.0)
        self.meanwhile: list[Callable[[], object]] = []

    def gets_many(self, keys: Iterable[bytes]) -> Mapping[bytes, tuple[bytes, bytes]]:
        found = super().gets_many(keys)
        self._happen()
        return found

    def pipeline(self, commands: Sequence[bytes]) -> Sequence[bytes]:
        answers = super().pipeline(commands)
        self._happen()
        return answers

    def _happen(self) -> None:
        if self.meanwhile:
            self.meanwhile.pop(0)()


@pytest.fixture
def ours(memcached: Cluster) -> Iterator[Overtaken]:
    """The process that is overtaken; nothing is there when it begins."""
    host, _, port = memcached.memcached_addresses[0].partition(":")
    connection = Overtaken(host, int(port))
    connection.pipeline([b"delete %b\r\n" % KEY])
    yield connection
    connection.close()


@pytest.fixture
def theirs(memcached: Cluster) -> Iterator[MemcachedConnection]:
    """The process that overtakes."""
    host, _, port = memcached.memcached_addresses[0].partition(":")
    connection = MemcachedConnection(host, int(port), 10.0)
    yield connection
    connection.close()


def put(connection: MemcachedConnection, time_us: int) -> None:
    commands.put(connection, [Entry(KEY, TTL_S, Checkpoint(time_us, time_us))])


def standing(connection: MemcachedConnection) -> int | None:
    """The time of the stored count."""
    [found] = commands.read(connection, [KEY])
    checkpoint = None if found is None else unpack_count(found)
    return None if checkpoint is None else checkpoint.time_us


@pytest.mark.parametrize("before", [None, NOW])
@pytest.mark.parametrize(("own", "other"), [(NOW + 1, NOW + 2), (NOW + 2, NOW + 1)])
def test_the_newer_count_is_kept_in_either_order(
    ours: Overtaken, theirs: MemcachedConnection, before: int | None, own: int, other: int
) -> None:
    if before is not None:
        put(theirs, before)
    ours.meanwhile = [lambda: put(theirs, other)]
    put(ours, own)
    assert standing(theirs) == max(own, other)


def test_a_count_that_vanishes_during_a_put_is_stored(
    ours: Overtaken, theirs: MemcachedConnection
) -> None:
    put(theirs, NOW)
    ours.meanwhile = [lambda: theirs.pipeline([b"delete %b\r\n" % KEY])]
    put(ours, NOW + 1)
    assert standing(theirs) == NOW + 1


def test_two_concurrent_first_increments_both_count(
    ours: Overtaken, theirs: MemcachedConnection
) -> None:
    """One of them makes it, the other adds to it."""
    ours.meanwhile = [lambda: commands.change(theirs, [Change(KEY, 5)])]
    assert list(commands.change(ours, [Change(KEY, -7)])) == [-2]
    [found] = commands.read(theirs, [KEY])
    assert found is not None
    assert unpack_value(found) == -2


def test_a_counter_that_keeps_vanishing_is_given_up(
    ours: Overtaken, theirs: MemcachedConnection
) -> None:
    """It existed at each add, and was missing at each increment."""

    def make() -> None:
        value = pack_value(0)
        theirs.pipeline([b"set %b 0 0 %d\r\n%b\r\n" % (KEY, len(value), value)])

    def clear() -> None:
        commands.change(theirs, [Change(KEY, None)])

    ours.meanwhile = [make, clear] * 100
    with pytest.raises(ContentionError):
        commands.change(ours, [Change(KEY, 1)])


def test_a_token_that_is_evicted_during_a_check_counts_as_new(
    ours: Overtaken, theirs: MemcachedConnection
) -> None:
    """The guard may forget: it never says more than it knows."""
    note = Note(KEY, TTL_S, b"p" * 16)
    assert list(commands.note(theirs, [note])) == [Guarded.NEW]
    ours.meanwhile = [lambda: theirs.pipeline([b"delete %b\r\n" % KEY])]
    assert list(commands.note(ours, [note])) == [Guarded.NEW]
