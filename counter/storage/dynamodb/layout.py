"""Where an item is in its table: keys are bytes whose order is that of what they hold.

Every table has a partition key and a sort key.
"""

from __future__ import annotations

import hashlib
import json
from typing import Final

from counter.storage.dynamodb.driver import LOW, Item, Key
from counter.types import Checkpoint, Dataset, Event, Mark, Namespace, Pending, Slice, WindowRow
from counter.windows import event_bucket_of

#: Numbers are stored as they are, so that negative ones come first.
_OFFSET: Final = 2**63
#: The sort key of an item that is alone in its partition.
ALONE: Final = LOW
#: The attribute by which DynamoDB deletes items some time after they expired, in seconds.
EXPIRES: Final = "expires"

#: Partitions of the table of control. Slices have DROPPED, ``dropped_before``, before them.
DATASETS: Final = b"datasets"
DROPPED: Final = LOW

#: Kinds of partitions of a namespace: by shard its marks, atomic marks and names; its watermarks;
#: by counter its counts; by token its decisions, and by nonce its reserved times.
MARKS: Final = b"m"
ATOMIC: Final = b"a"
NAMES: Final = b"n"
WATERMARKS: Final = b"w"
COUNTS: Final = b"c"
DECISION: Final = b"d"
RESERVED: Final = b"k"

#: In a partition of counts: the pending recounts, the head, and the rows of windows.
PENDING: Final = b"p"
HEAD: Final = b"q"
ROW: Final = b"r"


def to_text(document: object) -> str:
    """Return *document* as JSON: an item is bounded in bytes, and escapes take many."""
    return json.dumps(document, ensure_ascii=False)


def number(value: int) -> bytes:
    """Return *value*, of 64 bits with a sign, as bytes in its order."""
    return (value + _OFFSET).to_bytes(8, "big")


def _number_of(place: bytes) -> int:
    return int.from_bytes(place, "big") - _OFFSET


def slices_partition(dataset: Dataset) -> bytes:
    """Return the partition key of a dataset's slices."""
    return b"slices" + number(dataset.id)


def partition(namespace: Namespace, kind: bytes, rest: int | str | bytes = b"") -> bytes:
    """Return the partition key of *rest*, a shard, a counter or else, of a kind."""
    if isinstance(rest, int):
        rest = rest.to_bytes(4, "big")
    return kind + number(namespace.id) + (rest.encode() if isinstance(rest, str) else rest)


def events_partition(namespace: Namespace, counter: str, bucket: int) -> bytes:
    """Return the partition key of a counter's events in one of its buckets."""
    return number(namespace.id) + bucket.to_bytes(2, "big") + counter.encode()


def event_key(namespace: Namespace, each: Slice, event: Event) -> Key:
    """Return the key of *event*, by which a retry finds it."""
    bucket = event_bucket_of(event.event_id, each.event_buckets)
    return events_partition(namespace, event.counter, bucket), identity_place(event)


def identity_place(event: Event) -> bytes:
    """Return the sort key of *event*."""
    return event_place(event.event_time_us) + event.event_id + event.item_key.to_bytes(4, "big")


def event_place(time_us: int) -> bytes:
    """Return the beginning of the sort keys of an instant: the latest comes first."""
    return number(-1 - time_us)


def event_item(key: Key, event: Event, attempt: bytes) -> Item:
    """Return the item of *event*, which names the *attempt* that wrote it."""
    payload: Item = {"c": True} if event.clear else {"d": event.delta}
    atom = {} if event.atom is None else {"a": event.atom}
    return {"pk": key[0], "sk": key[1], "o": attempt, **payload, **atom}


def is_event(item: Item) -> bool:
    """Return whether *item* is an event, and not a void one."""
    return "d" in item or "c" in item


def event_from(item: Item) -> Event:
    """Return the event of :func:`event_item`."""
    place: bytes = item["sk"]
    return Event(
        item["pk"][10:].decode(),
        -1 - _number_of(place[:8]),
        place[8:24],
        int.from_bytes(place[24:], "big"),
        item.get("d", 0),
        clear="c" in item,
        atom=item.get("a"),
    )


def mark_place(mark: Mark) -> bytes:
    """Return the sort key of a mark; a name can be longer than one."""
    name = hashlib.blake2b(mark.counter.encode(), digest_size=16).digest()
    return number(mark.window_us) + number(mark.recount_us) + name


def pending_place(pending: Pending) -> bytes:
    """Return the sort key of a pending recount."""
    return PENDING + number(pending.recount_us) + number(pending.window_us)


def pending_from(place: bytes) -> Pending:
    """Return the pending recount of a sort key."""
    return Pending(_number_of(place[1:9]), _number_of(place[9:]))


def row_place(window_us: int) -> bytes:
    """Return the sort key of a window's row."""
    return ROW + number(window_us)


def row_from(item: Item) -> WindowRow:
    """Return the row of an item."""
    return WindowRow(_number_of(item["sk"][1:]), item["c"], unpacked(item["n"]))


def checkpoint_from(head: Item, name: str) -> Checkpoint:
    """Return the checkpoint that the attributes *name*t and *name*n of a head hold."""
    if f"{name}t" not in head:
        return Checkpoint(0, 0)
    return Checkpoint(head[f"{name}t"], unpacked(head[f"{name}n"]))


def packed(count: int) -> bytes:
    """Return *count* as bytes: it can have more digits than DynamoDB's numbers."""
    return count.to_bytes(count.bit_length() // 8 + 1, "big", signed=True)


def unpacked(count: bytes) -> int:
    """Return the number that :func:`packed` packed."""
    return int.from_bytes(count, "big", signed=True)
