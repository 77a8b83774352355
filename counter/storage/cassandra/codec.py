"""What is packed into one cell: rollup state, and the items of an atomic add.

Two writes of equal timestamp merge cell by cell, and the greater bytes win. So what must agree lies
in one cell, its time first: of two checkpoints the later one stands.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from counter.errors import invariant
from counter.types import Checkpoint, Event, WindowRow

_TIME_BYTES: Final = 8
_ITEMS_VERSION: Final = 1
#: version, number of items
_ITEMS_HEAD: Final = struct.Struct(">BH")
#: delta, item key, bytes of the counter's name, whether it is a clear
_ITEM: Final = struct.Struct(">qIH?")


def pack_checkpoint(checkpoint: Checkpoint) -> bytes:
    """The time, then the count in as many bytes as it takes, big-endian and signed."""
    return checkpoint.time_us.to_bytes(_TIME_BYTES, "big") + _pack_count(checkpoint.count)


def unpack_checkpoint(cell: bytes) -> Checkpoint:
    """What :func:`pack_checkpoint` packed."""
    return Checkpoint(int.from_bytes(cell[:_TIME_BYTES], "big"), _unpack_count(cell[_TIME_BYTES:]))


def pack_row(row: WindowRow) -> bytes:
    """Whether the window holds a clear, then its sum. Its start is in the row's key."""
    return (b"\x01" if row.cleared else b"\x00") + _pack_count(row.total)


def unpack_row(window_us: int, cell: bytes) -> WindowRow:
    """What :func:`pack_row` packed, of the window that starts at *window_us*."""
    return WindowRow(window_us, cell[0] == 1, _unpack_count(cell[1:]))


def pack_items(events: Sequence[Event]) -> bytes:
    """The items of one atomic add, all that differs among them; the token is in the row's key."""
    parts = [_ITEMS_HEAD.pack(_ITEMS_VERSION, len(events))]
    for event in events:
        name = event.counter.encode()
        parts += (_ITEM.pack(event.delta, event.item_key, len(name), event.clear), name)
    return b"".join(parts)


def unpack_items(
    cell: bytes, event_time_us: int, event_id: bytes, atom: bytes | None
) -> tuple[Event, ...]:
    """The events of what :func:`pack_items` packed, under the token that they share."""
    version, count = _ITEMS_HEAD.unpack_from(cell)
    invariant(version == _ITEMS_VERSION, f"an atomic mark of version {version} is from a later one")
    at = _ITEMS_HEAD.size
    events = []
    for _ in range(count):
        delta, item_key, name_bytes, clear = _ITEM.unpack_from(cell, at)
        at += _ITEM.size
        counter = cell[at : at + name_bytes].decode()
        at += name_bytes
        events.append(Event(counter, event_time_us, event_id, item_key, delta, clear, atom))
    return tuple(events)


def _pack_count(count: int) -> bytes:
    return count.to_bytes(count.bit_length() // 8 + 1, "big", signed=True)


def _unpack_count(packed: bytes) -> int:
    return int.from_bytes(packed, "big", signed=True)
