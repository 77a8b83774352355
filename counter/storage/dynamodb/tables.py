"""The tables, and where an item is in them: keys are bytes whose order is that of what they hold.

Every table has a partition key and a sort key. One table holds what all processes agree on, one a
dataset's marks, counts and decisions, and one the events of each slice: a table is dropped in one
free call, and items would have to be deleted one by one, each for the price of a write.
"""

from __future__ import annotations

import hashlib
from typing import Final

from counter.partitions import event_bucket_of, shard_of
from counter.storage.dynamodb.driver import Item, Key
from counter.types import Checkpoint, Dataset, Event, Mark, Namespace, Pending, Slice, WindowRow

#: Numbers are stored as they are, so that negative ones come first.
_OFFSET: Final = 2**63
#: The sort key of an item that is alone in its partition.
ALONE: Final = b"\x00"
#: Sorts after every sort key that begins with a time.
LAST: Final = b"\xff" * 64
#: The attribute by which DynamoDB deletes items some time after they expired, in seconds.
EXPIRES: Final = "expires"


def control_table(prefix: str) -> str:
    """Return the table of what all processes agree on."""
    return f"{prefix}_control"


def data_table(prefix: str, dataset: Dataset) -> str:
    """Return the table of a dataset's marks, counts and decisions."""
    return f"{prefix}_{dataset.name}_data"


def events_table(prefix: str, dataset: Dataset, start_us: int) -> str:
    """Return the table of the slice that starts at *start_us*."""
    return f"{prefix}_{dataset.name}_events_{start_us}"


def number(value: int) -> bytes:
    """Return *value*, of 64 bits with a sign, as bytes in its order."""
    return (value + _OFFSET).to_bytes(8, "big")


def within(namespace: Namespace, kind: bytes, rest: bytes = b"") -> bytes:
    """Return a partition key of the data of *namespace*."""
    return kind + number(namespace.id) + rest


# Events.


def events_partition(namespace_id: int, counter: str, bucket: int) -> bytes:
    """Return the partition key of a counter's events in one of its buckets."""
    return number(namespace_id) + bucket.to_bytes(2, "big") + counter.encode()


def event_key(namespace_id: int, each: Slice, event: Event) -> Key:
    """Return the key of *event*, by which a retry finds it."""
    bucket = event_bucket_of(event.event_id, each.event_buckets)
    place = event_place(event.event_time_us) + event.event_id + event.item_key.to_bytes(4, "big")
    return events_partition(namespace_id, event.counter, bucket), place


def event_place(time_us: int) -> bytes:
    """Return the beginning of the sort keys of an instant: the latest comes first."""
    return number(-1 - time_us)


def event_item(key: Key, event: Event, attempt: bytes) -> Item:
    """Return the item of *event*, which names the *attempt* that wrote it."""
    item: dict[str, object] = {"pk": key[0], "sk": key[1], "o": attempt}
    if event.clear:
        item["c"] = True
    else:
        item["d"] = event.delta
    if event.atom is not None:
        item["a"] = event.atom
    return item


def event_from(item: Item) -> Event | None:
    """Return the event of :func:`event_item`; None if it is void."""
    if "c" not in item and "d" not in item:
        return None
    place: bytes = item["sk"]
    return Event(
        item["pk"][10:].decode(),
        -1 - (int.from_bytes(place[:8], "big") - _OFFSET),
        place[8:24],
        int.from_bytes(place[24:], "big"),
        item.get("d", 0),
        clear="c" in item,
        atom=item.get("a"),
    )


# Marks.


def marks_partition(namespace: Namespace, shard: int) -> bytes:
    """Return the partition key of a shard's marks."""
    return within(namespace, b"m", shard.to_bytes(4, "big"))


def mark_place(mark: Mark) -> bytes:
    """Return the sort key of a mark; a name can be longer than one."""
    name = hashlib.blake2b(mark.counter.encode(), digest_size=16).digest()
    return number(mark.window_us) + number(mark.recount_us) + name


def atomic_partition(namespace: Namespace, shard: int) -> bytes:
    """Return the partition key of a shard's atomic marks."""
    return within(namespace, b"a", shard.to_bytes(4, "big"))


def watermarks_partition(namespace: Namespace) -> bytes:
    """Return the partition key of all watermarks of a namespace."""
    return within(namespace, b"w")


# Counts: in one partition the pending recounts, the head, and the rows of windows.

HEAD: Final = b"q"
PENDING: Final = b"p"
_ROW: Final = b"r"


def counts_partition(namespace: Namespace, counter: str) -> bytes:
    """Return the partition key of a counter's counts."""
    return within(namespace, b"c", counter.encode())


def pending_place(pending: Pending) -> bytes:
    """Return the sort key of a pending recount."""
    return PENDING + number(pending.recount_us) + number(pending.window_us)


def pending_from(place: bytes) -> Pending | None:
    """Return the pending recount of a sort key; None if it is not one's."""
    if not place.startswith(PENDING):
        return None
    recount, window = (int.from_bytes(each, "big") - _OFFSET for each in (place[1:9], place[9:]))
    return Pending(recount, window)


def row_place(window_us: int) -> bytes:
    """Return the sort key of a window's row."""
    return _ROW + number(window_us)


def row_from(item: Item) -> WindowRow:
    """Return the row of an item."""
    window_us = int.from_bytes(item["sk"][1:], "big") - _OFFSET
    return WindowRow(window_us, item["c"], unpacked(item["n"]))


def checkpoint_from(item: Item | None, name: str) -> Checkpoint:
    """Return the checkpoint that the attributes *name*t and *name*n hold."""
    if item is None or f"{name}t" not in item:
        return Checkpoint(0, 0)
    return Checkpoint(item[f"{name}t"], unpacked(item[f"{name}n"]))


def packed(count: int) -> bytes:
    """Return *count* as bytes: it can have more digits than DynamoDB's numbers."""
    return count.to_bytes(count.bit_length() // 8 + 1, "big", signed=True)


def unpacked(count: bytes) -> int:
    """Return the number that :func:`packed` packed."""
    return int.from_bytes(count, "big", signed=True)


# Names, decisions and keys.


def names_partition(namespace: Namespace, bucket: int) -> bytes:
    """Return the partition key of one part of the names of counters."""
    return within(namespace, b"n", bucket.to_bytes(4, "big"))


def name_key(namespace: Namespace, counter: str) -> Key:
    """Return the key of a counter's name."""
    bucket = shard_of(counter, namespace.settings.shards)
    return names_partition(namespace, bucket), counter.encode()


def decision_key(namespace: Namespace, events: list[Event] | tuple[Event, ...]) -> Key:
    """Return the key of the decision about the token of *events*: of its counter, or of the whole
    namespace for an atomic add's."""
    first = events[0]
    scope = first.counter.encode() if first.atom is None else b""
    token = number(first.event_time_us) + first.event_id + scope
    return within(namespace, b"d", token), ALONE


def reservation_key(namespace: Namespace, nonce: bytes) -> Key:
    """Return the key of the time that is reserved for an arbitrary key."""
    return within(namespace, b"k", nonce), ALONE
