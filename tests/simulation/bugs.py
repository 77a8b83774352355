"""Planted bugs: small, realistic changes, each of which the simulation must catch.

*seeds* is the number of seeds within which each was caught when this was written, with room.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from tests.simulation.mutate import Change, planted


@dataclass(frozen=True, slots=True)
class Bug:
    """One bug: a name, what is broken, and the change that breaks it."""

    name: str
    what: str
    changes: tuple[Change, ...]
    #: Within so many seeds, from 0 on, one fails.
    seeds: int = 1_000

    @property
    def plant(self) -> Callable[[], AbstractContextManager[None]]:
        """Plants it."""
        return partial(planted, self.changes)


def all_bugs() -> Mapping[str, Bug]:
    """Every bug by name."""
    from tests.simulation import bugs_reading, bugs_rollup, bugs_store, bugs_writing

    found = (*bugs_writing.BUGS, *bugs_rollup.BUGS, *bugs_reading.BUGS, *bugs_store.BUGS)
    return {bug.name: bug for bug in found}
