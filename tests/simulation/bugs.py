"""Planted bugs: small, realistic changes, each of which the simulation must catch.

docs/guarantees.md has how many seeds each took; it is written by `scripts/simulate --table`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Final

from counter.config.store_kinds import store_names
from tests.simulation.mutate import Change, planted


@dataclass(frozen=True, slots=True)
class Bug:
    """One bug: a name, the broken rule, and the change that breaks it."""

    name: str
    what: str
    changes: tuple[Change, ...]

    @property
    def plant(self) -> Callable[[], AbstractContextManager[None]]:
        """Plants it."""
        return partial(planted, self.changes)


def bug(name: str, what: str, *changes: Change) -> Bug:
    return Bug(name, what, changes)


#: Modules of bugs, by the simulated store over which they are caught.
_ROOMS: Final[Mapping[str, Sequence[str]]] = {
    "cassandra": (
        "bugs_writing",
        "bugs_rollup",
        "bugs_reading",
        "bugs_cache",
        "bugs_store",
        "bugs_cancels",
        "bugs_bounds",
        "bugs_holds",
    ),
    "dynamodb": ("bugs_dynamodb",),
}


def bugs_of(store: str) -> Mapping[str, Bug]:
    """Every bug that is caught over *store*, by name; none if it is not installed."""
    names = _ROOMS[store] if store in store_names() else ()
    rooms = [import_module(f"tests.simulation.{name}") for name in names]
    return {each.name: each for room in rooms for each in room.BUGS}


def all_bugs() -> Mapping[str, Bug]:
    """Every bug by name, but for those of DynamoDB's adapter."""
    return bugs_of("cassandra")
