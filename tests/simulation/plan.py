"""The draw of a seed: settings, steps of clients, and faults. To shrink a plan, leave steps out."""

from dataclasses import dataclass, field

#: Each add to a counter has a digit of its own to base 4, so that a count shows which were counted,
#: and how often.
BASE = 4
DIGITS_MAX = 31
#: A namespace that is created while clients send to it already.
LATE = "late"
#: A namespace that forgets arbitrary keys within the run.
BRIEF = "brief"
#: Namespaces of type BEST_EFFORT. Each of their adds has a digit of its own to a base that is
#: greater than how often it is sent; the counters' names are also those of exact counters.
ROUGH = ("rough", "rough-2")
ROUGH_BASE = 8
#: The settings of a namespace that may change.
CHANGEABLE = (
    "accept_limit", "future_limit", "payload_check", "key_ttl", "cache_ttl", "requests_per_s",
    "adds_per_s", "event_rules",
)  # fmt: skip
#: How long an exact attempt takes to arrive.
EXACT_US = 1_000
#: How far ahead a token may be in these runs.
FUTURE_US = 3_000_000
#: A quorum of the data center of the process.
LOCAL = "LOCAL_QUORUM"
#: The name of the table of namespaces in traps; only changes of a namespace meet them.
DIRECTORY = "namespaces"
#: Verbs of changes that set a counter to 0.
CLEARS = ("clear", "delete")


@dataclass(frozen=True, slots=True)
class Config:
    """The settings of a run."""

    seed: int
    window_us: int
    accept_us: int
    write_timeout_us: int
    skew_us: int
    retention_us: int
    slice_us: int
    time_bucket_us: int
    event_buckets: int
    shards: int
    lease_us: int
    payload_check: str
    cache_ttl_us: int
    #: (name, counter_type)
    namespaces: tuple[tuple[str, str], ...]
    #: How far each process's clock is off, by its number: APIs first, then workers.
    offsets_us: tuple[int, ...]
    apis: int
    workers: int
    #: When clients and faults are done.
    end_us: int
    #: How far the clock of a process may be that is started with a wrong one.
    wrong_us: int = 0
    #: How much a page or a batch holds; 0 for as much as in production.
    page: int = 0
    #: How far the clock of each node is off.
    nodes_us: tuple[int, ...] = (0, 0, 0)
    #: Whether a left-over compare-and-set gets the timestamp of the ballot that completes it (Paxos
    #: v1), or keeps its own (v2).
    paxos_restamps: bool = False
    #: The consistencies of writes and reads if the last node is in a data center of its own.
    levels: tuple[str, str] | None = None
    #: The number of each process's data center if there are two.
    homes: tuple[int, ...] = ()
    #: More than *event_buckets*: they are raised after a few events.
    event_buckets_max: int = 0
    #: How long the namespace BRIEF remembers a key; 0 if there is none.
    key_ttl_us: int = 0
    #: Whether there are the namespaces of ROUGH.
    has_rough: bool = False
    #: The servers of the cache, `memcached` or `redis`; empty if it is in the processes.
    cache: str = ""
    cache_servers: int = 1
    #: How much each of them holds; 0 for everything.
    cache_items: int = 0
    #: The servers of the store, `cassandra` or `dynamodb`.
    store: str = "cassandra"
    #: The accept limit from an instant within the run on; 0 if it is not changed.
    later_accept_us: int = 0

    @property
    def is_split(self) -> bool:
        """Whether a read in one data center may miss an unacknowledged write of the other."""
        return self.levels is not None and self.levels[1] == LOCAL and len({*self.homes}) > 1

    @property
    def lag_us(self) -> int:
        """How long after its end a window is closed by every clock."""
        return self.accept_us + self.write_timeout_us + 4 * self.skew_us

    @property
    def known_us(self) -> int:
        """How long the outcome of a token is known."""
        lag_us = self.accept_us + self.write_timeout_us + 3 * self.skew_us
        return self.retention_us - 2 * (self.window_us + lag_us)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One send of an operation; a retry is skipped if the outcome is definite."""

    after_us: int
    api: int
    retry: bool
    #: Whether it arrives a fixed time later, at the instant that its token's time was chosen for.
    exact: bool = False
    #: Whether it cancels the change. A retry of a cancel is skipped if that has a definite answer.
    cancels: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """Something that begins at an instant."""

    at_us: int


@dataclass(frozen=True, slots=True)
class Change(Step):
    """An add, a clear, a delete of a counter, a batch of adds or an atomic add.

    *items* are (counter, delta), with a delta of None for a clear or a delete. *how* is the verb. A
    token is *nonce* and the step's instant less *age_us*; *key* replaces it.
    """

    number: int
    how: str
    namespace: str
    items: tuple[tuple[str, int | None], ...]
    nonce: int
    age_us: int
    key: str | None
    attempts: tuple[Attempt, ...]
    #: Whether an accurate read follows each definite response.
    reads: bool = False
    #: Whether its client never asks for the outcome.
    forsaken: bool = False
    #: The bound of each of its adds.
    at_most: int | None = None

    @property
    def is_cancelled(self) -> bool:
        """Whether any client tries to cancel it."""
        return any(each.cancels for each in self.attempts)


@dataclass(frozen=True, slots=True)
class Read(Step):
    """A read of counters of a namespace; one alone is read by the route of its own."""

    namespace: str
    counters: tuple[str, ...]
    staleness_us: int | None
    api: int


@dataclass(frozen=True, slots=True)
class Fault(Step):
    """A fault, its length, place and strength."""

    what: str
    who: int = 0
    for_us: int = 0
    how_much: float = 0.0
    span_us: int = 0


@dataclass(frozen=True, slots=True)
class Trap(Step):
    """From its instant on, the *nth* statement of process *who* on tables of a name is met.

    *action* is what happens then, for *for_us*: ``hold`` keeps the statement on its way, ``lose``
    its response; ``abandon`` has its coordinator give it up half done; ``pause`` and ``crash``
    strike the process, ``-before`` the statement is sent or ``-after`` it.
    """

    who: int
    table: str
    nth: int
    action: str
    for_us: int


@dataclass(frozen=True, slots=True)
class Rebirth(Step):
    """A namespace is deleted, and created again as soon as it may be, both through *admin*, while
    processes pause. *pauses* are (who, how long after the deletion is sent, for how long).

    *adds* are sent when the namespace is there again, each so long after as its first attempt says.
    """

    namespace: str
    counter_type: str
    admin: int
    #: How long the first life lasts.
    lives_us: int
    pauses: tuple[tuple[int, int, int], ...]
    traps: tuple[Trap, ...]
    adds: tuple[Change, ...]
    #: How far the clock of *admin* is off when it is asked to delete.
    wrong_us: int = 0


@dataclass(slots=True)
class Plan:
    """A whole run."""

    config: Config
    steps: list[Step] = field(default_factory=list)
