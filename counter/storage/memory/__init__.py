"""The in-memory adapters: what tests and the simulation run the whole service over.

:class:`MemoryStore` keeps the manners of the store that is hardest to be correct over, one without
transactions: marks, events, rewrites and voids are writes of their own, an event's age is nobody's
business but the caller's, and a void hides what lands after it.
"""

from counter.storage.memory.cache import MemoryCache
from counter.storage.memory.store import DEFAULT_DATASET, MemoryStore

__all__ = ["DEFAULT_DATASET", "MemoryCache", "MemoryStore"]
