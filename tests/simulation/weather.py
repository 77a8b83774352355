"""The network and the nodes: faults of messages, drawn by one seed."""

from dataclasses import dataclass
from random import Random
from typing import Final, NamedTuple

from counter.limits import MILLISECOND, SECOND

#: The names of the data centers.
CENTERS: Final = ("dc1", "dc2")


class Met(NamedTuple):
    """The fate of a statement: a delay, a loss, or a coordinator that gives up."""

    hold_us: int = 0
    loses: bool = False
    abandons: bool = False
    vanishes: bool = False


#: Nothing.
UNMET: Final = Met()


@dataclass(slots=True)
class Weather:
    """Probabilities of faults, each of one message or statement; all 0 by default."""

    random: Random
    delay_us: int = 2 * MILLISECOND
    #: A message that takes up to *slow_us* instead.
    slow: float = 0.0
    slow_us: int = 3 * SECOND
    #: A statement that never reaches the cluster, or whose answer is lost.
    lost_request: float = 0.0
    lost_reply: float = 0.0
    #: A write that one replica does not get in time: it gets it by a hint later, or never.
    missed: float = 0.0
    hint_us: int = 3 * SECOND
    never: float = 0.3
    #: A write that its coordinator gives up: it is on some replicas, or on none.
    abandoned: float = 0.0
    #: A plain write that is sent once more, perhaps much later.
    repeated: float = 0.0
    #: A compare-and-set whose outcome is not reported, or not even decided yet.
    unreported: float = 0.0
    #: The link between two data centers that is cut: from which one to which.
    cut: tuple[int, int] | None = None
    #: The same between clients and the API.
    client_lost_request: float = 0.0
    client_lost_reply: float = 0.0
    client_slow: float = 0.0

    def calm(self) -> None:
        """Have nothing go wrong from now on."""
        self.slow = self.lost_request = self.lost_reply = self.missed = self.abandoned = 0.0
        self.repeated = self.unreported = 0.0
        self.cut = None
        self.client_lost_request = self.client_lost_reply = self.client_slow = 0.0

    @property
    def is_calm(self) -> bool:
        """Whether nothing goes wrong between the service and the cluster."""
        return not (
            self.slow
            or self.lost_request
            or self.lost_reply
            or self.missed
            or self.abandoned
            or self.repeated
            or self.unreported
            or self.cut
        )

    def happens(self, chance: float) -> bool:
        """Draw; without a chance nothing is drawn."""
        return chance > 0 and self.random.random() < chance

    def delay(self) -> int:
        """How long one message takes, in microseconds."""
        if self.slow and self.random.random() < self.slow:
            return int(self.random.random() * self.slow_us)
        return 50 + int(self.random.random() * self.delay_us)

    def later(self) -> int:
        """How long a hint takes."""
        return int(self.random.random() * self.hint_us)
