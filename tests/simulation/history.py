"""The requests and responses of clients: the checker knows nothing else."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.plan import BRIEF, Change, Read


@dataclass(slots=True)
class Sent:
    """One request of a change, and its response; instants are of true time, in microseconds."""

    sent_us: int
    api: int
    answered_us: int | None = None
    status: int = 0
    body: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Item:
    """One item of a change: what it adds to which counter; None clears it."""

    change: "Changed"
    counter: str
    delta: int | None
    event_time_us: int | None
    #: Its outcome: the times of the first response that it counts, or never will.
    applied_us: int | None = None
    void_us: int | None = None
    #: It never will, because of a bound.
    refused: bool = False
    conflict_us: int | None = None
    #: When it was first asked to be cancelled, and the first response that it is.
    cancel_us: int | None = None
    cancelled_us: int | None = None
    #: What the cancels said: whether it was counted.
    was_counted: set[bool] = field(default_factory=set)
    #: How often the response was ``replayed: false``.
    reported_new: int = 0


@dataclass(slots=True)
class Changed:
    """A change and all its requests."""

    plan: Change
    token_us: int
    items: list[Item] = field(default_factory=list)
    requests: list[Sent] = field(default_factory=list)
    #: The outcome is unknown: retries failed, or there were none.
    given_up: bool = False

    @property
    def first_us(self) -> int | None:
        """When it was sent first."""
        return min((each.sent_us for each in self.requests), default=None)

    @property
    def is_definite(self) -> bool:
        """Whether all that can be known of it is known."""
        return (
            all(
                item.applied_us is not None
                or item.void_us is not None
                or item.conflict_us is not None
                for item in self.items
            )
            or self.is_cancelled
        )

    @property
    def is_cancelled(self) -> bool:
        """Whether a response said that it is cancelled, or that it cannot be."""
        return all(
            item.cancelled_us is not None or item.conflict_us is not None for item in self.items
        )


@dataclass(slots=True)
class Seen:
    """A count that was read."""

    plan: Read
    namespace: str
    counter: str
    sent_us: int
    answered_us: int
    count: int
    as_of_us: int
    accuracy: str
    #: The item that was added with the same request.
    own: Item | None = None


@dataclass(slots=True)
class History:
    """A whole run as clients saw it."""

    changes: list[Changed] = field(default_factory=list)
    reads: list[Seen] = field(default_factory=list)
    #: The counters of each namespace that are listed at the end.
    listed: dict[str, list[str]] = field(default_factory=dict)
    #: Responses that no client should get.
    surprises: list[str] = field(default_factory=list)


def expiring(history: History) -> Iterator[tuple[Changed, Changed]]:
    """The adds of BRIEF that use a key again, each after the first add of that key."""
    first: dict[str | None, Changed] = {}
    for changed in history.changes:
        if changed.plan.namespace == BRIEF and changed.requests:
            before = first.setdefault(changed.plan.key, changed)
            if before is not changed:
                yield before, changed
