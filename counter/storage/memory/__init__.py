"""Store everything in memory, for tests and the simulation.

:class:`MemoryStore` behaves like the most difficult store, one without transactions: marks, events,
rewrites and voids are separate writes, only the caller checks an event's age, and a void hides
later writes.
"""

from counter.storage.memory.store import DEFAULT_DATASET, MemoryStore

__all__ = ["DEFAULT_DATASET", "MemoryStore"]
