"""Tables of the simulated DynamoDB: partitions of items in the order of their sort keys."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from typing import Any, Final

from tests.simulation.dynamodb_expressions import Encoded, InvalidError, of_type

#: The values of the partition key and of the sort key.
Key = tuple[bytes, bytes]

_KEY_BYTES_MAX: Final = {"pk": 2_048, "sk": 1_024}
_ITEM_BYTES_MAX: Final = 400 * 1_024


def key_of(encoded: Encoded, *, alone: bool = True) -> Key:
    """Return the key of an item; *alone* if there is nothing but it. Raises InvalidError."""
    if alone and encoded.keys() != {"pk", "sk"}:
        raise InvalidError("The provided key element does not match the schema")
    for name, most in _KEY_BYTES_MAX.items():
        kind, value = of_type(encoded.get(name, {"S": ""}))
        if kind != "B" or not 0 < len(value) <= most:
            raise InvalidError(f"the key {name} is {encoded.get(name)}; 1 to {most} bytes may be")
    return encoded["pk"]["B"], encoded["sk"]["B"]


def check_size(item: Encoded) -> None:
    """Raise InvalidError for an item that is too large."""
    values = [(name, of_type(value)[1]) for name, value in item.items()]
    if sum(len(name) + _size(value) for name, value in values) > _ITEM_BYTES_MAX:
        raise InvalidError("Item size has exceeded the maximum allowed size")


def _size(value: object) -> int:
    return len(value if isinstance(value, bytes) else str(value).encode())


class Partition:
    """The items of one partition key: as they are, and as a replica that is behind has them."""

    def __init__(self) -> None:
        self.items: dict[bytes, Encoded] = {}
        self._order: list[bytes] = []
        #: The time of each item's last change, and its value before.
        self._before: dict[bytes, tuple[int, Encoded | None]] = {}

    def put(self, place: bytes, item: Encoded | None, now_us: int) -> None:
        """Replace an item; None deletes it."""
        standing = self.items.get(place)
        self._before[place] = now_us, standing
        if item is None:
            if standing is not None:
                del self.items[place]
                del self._order[bisect_left(self._order, place)]
            return
        if standing is None:
            insort(self._order, place)
        self.items[place] = item

    def seen(self, place: bytes, since_us: int) -> Encoded | None:
        """Return an item as a replica has it that knows of no change after *since_us*."""
        changed_us, before = self._before.get(place, (0, None))
        return before if changed_us > since_us else self.items.get(place)

    def all_seen(self, after: bytes, since_us: int | None) -> Iterator[tuple[bytes, Encoded]]:
        """Yield the items after a place, as such a replica has them; None: as they are."""
        if since_us is None:
            for place in self._order[bisect_left(self._order, after + b"\x00") :]:
                yield place, self.items[place]
            return
        for place in sorted(self._before):
            item = self.seen(place, since_us)
            if place > after and item is not None:
                yield place, item


class Table:
    """One table, and its state over time."""

    def __init__(self, made_us: int) -> None:
        self.status = "CREATING"
        self.made_us = made_us
        self.expires: str | None = None
        self.partitions: dict[bytes, Partition] = {}

    def partition(self, pk: bytes) -> Partition:
        """Return the partition of *pk*."""
        found = self.partitions.get(pk)
        if found is None:
            found = self.partitions[pk] = Partition()
        return found

    def get(self, key: Key) -> Encoded | None:
        """Return an item as it is."""
        found = self.partitions.get(key[0])
        return None if found is None else found.items.get(key[1])

    def put(self, key: Key, item: Encoded | None, now_us: int) -> None:
        """Replace an item; None deletes it."""
        self.partition(key[0]).put(key[1], item, now_us)

    def expired(self, now_s: int) -> Iterator[Key]:
        """Yield the keys of the items that may be deleted because their time is over."""
        if self.expires is None:
            return
        for pk, partition in self.partitions.items():
            for sk, item in partition.items.items():
                until: Mapping[str, Any] = item.get(self.expires, {})
                if int(until.get("N", now_s)) < now_s:
                    yield pk, sk
