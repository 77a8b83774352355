"""The files of a Cassandra table, and the index among them."""

from collections.abc import Mapping
from typing import Final

#: The files of an SSTable by its format, without those that only tools read.
PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "big": ("Index", "Filter", "Summary", "Statistics", "CompressionInfo", "Data"),
    "bti": ("Partitions", "Filter", "Statistics", "CompressionInfo", "Data"),
}


def entries_of(index: bytes) -> list[tuple[int, bytes, int]]:
    """Yield key and positions of each entry of an ``Index.db``, up to the first broken one."""
    found = []
    at = 0
    try:
        while at < len(index):
            begins = at + 2
            ends = begins + int.from_bytes(index[at:begins], "big")
            position, at = _number(index, ends)
            found.append((begins, index[begins:ends], position))
            size, at = _number(index, at)
            at += size
    except IndexError:
        pass
    return found


def _number(body: bytes, at: int) -> tuple[int, int]:
    """The number at *at*, and its end. The leading ones of its first byte count the rest."""
    more = 8 - (body[at] ^ 0xFF).bit_length()
    value = body[at] & 0xFF >> more
    for byte in body[at + 1 : at + 1 + more]:
        value = value << 8 | byte
    return value, at + 1 + more


def misleads(before: bytes, after: bytes) -> bool:
    """Whether the damaged ``Index.db`` *after* gives a partition the rows of another one."""
    right = {key: position for _, key, position in entries_of(before)}
    starts = set(right.values())
    return any(
        key in right and position != right[key] and position in starts
        for _, key, position in entries_of(after)
    )


def rename_a_partition(index: bytearray) -> None:
    """Flip the bit that gives a partition the key of a later one."""
    entries = entries_of(bytes(index))
    for number, (at, key, _) in enumerate(entries):
        for _, other, _ in entries[number + 1 :]:
            flipped = int.from_bytes(key, "big") ^ int.from_bytes(other, "big")
            if len(key) == len(other) and flipped.bit_count() == 1:
                index[at : at + len(key)] = other
                return
    raise AssertionError("there are no two such keys")


def lose_all_bits(bloom_filter: bytearray) -> None:
    """Have it contain nothing. It begins with the numbers of hashes and of words."""
    bloom_filter[8:] = bytes(len(bloom_filter) - 8)
