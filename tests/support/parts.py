"""Find the part of a store that has a method."""

from typing import Any

from counter.ports import PARTS


def part_of(store: Any, method: str) -> Any:
    """The part of *store* that has *method*, or the store itself."""
    parts = (getattr(store, name) for name in PARTS)
    return next((part for part in parts if hasattr(part, method)), store)
