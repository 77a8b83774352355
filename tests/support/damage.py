"""What a disk does to a file: each function changes the file's bytes and returns what it did. It is
given the bytes of an earlier moment, too."""

import random
from collections.abc import Callable, Sequence

PAGE = 4_096

Damage = Callable[[random.Random, bytearray, bytes], object]


def flip(draw: random.Random, body: bytearray, _: bytes) -> object:
    bits = [draw.randrange(8 * len(body)) for _ in range(draw.choice([1, 1, 1, 2, 16]))]
    for bit in bits:
        body[bit // 8] ^= 1 << bit % 8
    return bits


def flip_used(draw: random.Random, body: bytearray, _: bytes) -> object:
    """Flip a bit of a byte that is not zero: most of a small file is zero."""
    at = draw.choice([at for at, byte in enumerate(body) if byte])
    body[at] ^= 1 << draw.randrange(8)
    return at


def block(draw: random.Random, body: bytearray) -> slice:
    """Return a sector, or a page, or the rest of a page from a sector on."""
    page = draw.randrange(-(-len(body) // PAGE)) * PAGE
    sector = page + 512 * draw.randrange(8)
    return draw.choice(
        [slice(sector, sector + 512), slice(page, page + PAGE), slice(sector, page + PAGE)]
    )


def zero(draw: random.Random, body: bytearray, _: bytes) -> object:
    at = block(draw, body)
    body[at] = bytes(len(body[at]))
    return at


def tear(draw: random.Random, body: bytearray, earlier: bytes) -> object:
    """Lose a write or a part of it: the old data are still there."""
    at = block(draw, body)
    before = earlier[at]
    body[at.start : at.start + len(before)] = before
    return at


def swap(draw: random.Random, body: bytearray, _: bytes) -> object:
    """Write a block to the place of another one."""
    at = block(draw, body)
    other = block(draw, body)
    part = body[other][: len(body[at])]
    body[at.start : at.start + len(part)] = part
    return at, other


def truncate(draw: random.Random, body: bytearray, _: bytes) -> object:
    size = draw.choice([0, draw.randrange(len(body)), draw.randrange(len(body)) // PAGE * PAGE])
    del body[size:]
    return size


def lose_sync(draw: random.Random, body: bytearray, earlier: bytes) -> object:
    """Lose all that was written from some block on."""
    at = draw.randrange(len(body)) // 512 * 512
    body[at:] = earlier[at:] + bytes(max(0, len(body) - max(at, len(earlier))))
    return at


ALL: Sequence[Damage] = (flip, flip, flip, zero, tear, swap, truncate, lose_sync)
