"""One replica: all writes to it, in any order."""

from tests.simulation.cells import Key, Partition

#: (table, partition, write)
Write = tuple[str, Key, Partition]


class Node:
    """One replica."""

    def __init__(self, number: int, center: int = 0) -> None:
        self.number = number
        #: The number of its data center.
        self.center = center
        self.up = True
        #: How far its clock is off.
        self.offset_us = 0
        self.tables: dict[str, dict[Key, Partition]] = {}

    def apply(self, write: Write) -> None:
        """Take in a write; one of a table that is gone is lost."""
        name, key, delta = write
        table = self.tables.get(name)
        if table is not None:
            standing = table.get(key)
            if standing is None:
                standing = table[key] = Partition()
            standing.merge(delta)
