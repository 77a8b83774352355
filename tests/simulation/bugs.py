"""Planted bugs: small, realistic changes, each of which the simulation must catch.

docs/guarantees.md has how many seeds each took; it is written by `scripts/simulate --table`.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

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


def all_bugs() -> Mapping[str, Bug]:
    """Every bug by name."""
    from tests.simulation import bugs_cache, bugs_reading, bugs_rollup, bugs_store, bugs_writing

    rooms = (bugs_writing, bugs_rollup, bugs_reading, bugs_cache, bugs_store)
    return {each.name: each for room in rooms for each in room.BUGS}
