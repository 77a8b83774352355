"""Situations that seeds must reach, because bugs hide there: each run notes those it came into."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from counter.limits import FUTURE_LIMIT_MAX_US, HOUR, SECOND
from counter.types import Dataset, DirtyPage, Namespace, Slice, Span
from counter.windows import settling_time
from tests.simulation.history import Changed, History, Item, expiring
from tests.simulation.plan import CHANGEABLE, Config

#: Situations by name.
SITUATIONS: Final = {
    "small-pages": "the marks of a shard took more than one read",
    "small-batches": "a worker wrote the counters of a pass in more than one batch of a few",
    "window-end": "an event within 1 µs of the end of its window counted",
    "watermark": "an event within 1 µs of a watermark counted",
    "accept-limit": "an add arrived within 1 µs of its accept limit",
    "future-limit": "an add arrived within 1 µs of its future limit",
    "retention-limit": "a retry arrived within 1 µs of when outcomes are forgotten",
    "shards": "several shards of one namespace had marks",
    "node-clocks": "a compare-and-set met the ballot of a node whose clock is ahead",
    "left-over-proposal": "a compare-and-set or SERIAL read completed one that was left over",
    "new-ballot": "the same, under the timestamp of a new ballot, as Paxos v1 does",
    **{f"change-{name}": f"a namespace's `{name}` was changed" for name in CHANGEABLE},
    "era-announced-late": (
        "a changed accept limit, or its announcement, landed too late for its slices while adds"
        " and a worker went on"
    ),
    "cut-off": "a write did not get to another data center over a link that is cut one way",
    "cut-answer": "a write got to another data center, and its answer was lost on such a link",
    "cut-read": "a read got too few answers because of such a link",
    "cut-compare": "a compare-and-set or SERIAL read did",
    "rebirth": "a namespace was created again while a process was paused",
    "wrong-clock-create": "a process with a wrong clock was asked to create a namespace",
    "wrong-clock-change": "a process with a wrong clock was asked to change a namespace",
    "wrong-clock-delete": "a process with a wrong clock was asked to delete a namespace",
    "wrong-clock-recount": "a process with a wrong clock was asked for a recount",
    "wrong-clock-jump": "the clock of a worker that runs jumped by a minute or more",
    "key-expired": "an arbitrary key was used again after its `key_ttl`",
    "key-expires": "an arbitrary key was used again around the end of its `key_ttl`",
    "cancelled": "an acknowledged add was cancelled",
    "cancelled-void": "an add was cancelled that had not counted",
    "cancelled-late": "an add was sent again after it was cancelled",
    "clock-back": "the clock of a running process was set back",
    "raised-buckets": "an event counted in a slice with more event buckets than the first one",
    "equal-stamps": "a deletion on one replica met a cell of its write timestamp on another",
    "compacted": "a compaction made a tombstone of a cell whose TTL had run out",
    "hours-behind": "a watermark was more than an hour behind, and caught up",
    "memcached": "a count was found in memcached",
    "redis": "a count was found in Redis",
    "cache-evicts": "a server of the cache was full, and evicted an entry",
    "cache-restarts": "a server of the cache restarted, and lost its entries",
    "cache-times-out": "a server of the cache did not answer in time",
    "cache-late": "a server of the cache did what it was asked for after the time-out",
    "best-effort": "an acknowledged BEST_EFFORT add was read",
    "best-effort-again": "a BEST_EFFORT add that was sent again counted again",
    "best-effort-unreported": "a BEST_EFFORT add counted more often than it was acknowledged",
    "best-effort-lost": "an acknowledged BEST_EFFORT add was lost or cleared",
    "retention": "a slice with an acknowledged event was dropped",
    "retention-retry": "a token was sent again after its slice was dropped",
}
#: The same, of DynamoDB alone.
OF_DYNAMODB: Final = {
    "hot-partition": "a partition was throttled because it had too many writes a second",
    "split": "a partition was throttled while it was split",
    "unprocessed": "a part of a batch was left over",
    "transaction-conflict": "a write met an item that a transaction held",
    "sent-twice": "a request was delivered twice",
    "too-many-tables": "a table was not made or deleted, because too many were",
    "expired": "an item was deleted because its time to live was over",
}
#: A run of this many seeds is judged by the situations that it reached.
MANY: Final = 1_000
#: Of 1,000 seeds, at least so many reach each, and of these at least so many.
LEAST_PER_1000: Final = 20
MORE_PER_1000: Final = {"retention": 250}


def missed(reached: Mapping[str, int], seeds: int) -> list[str]:
    """The situations that too few of MANY seeds reached; none for fewer seeds."""
    if seeds < MANY:
        return []
    return [
        each
        for each in SITUATIONS
        if 1_000 * reached.get(each, 0) < MORE_PER_1000.get(each, LEAST_PER_1000) * seeds
    ]


class Watch:
    """The requests to the stores of all processes in one run, as far as situations need them."""

    def __init__(self, config: Config, now_us: Callable[[], int]) -> None:
        self.reached: set[str] = set()
        self._config = config
        self._now_us = now_us
        self._watermarks: set[int] = set()
        self._latest: dict[tuple[int, int], int] = {}
        self._marked: dict[int, int] = {}
        #: By namespace: the process and the end of the last batch.
        self._applied: dict[int, tuple[Any, int]] = {}
        #: By start: (end, event buckets).
        self._slices: dict[int, tuple[int, int]] = {}
        self._dropped: dict[int, int] = {}
        #: By namespace: when a watermark moved last.
        self._advanced_us: dict[int, int] = {}
        #: Namespaces with other accept limits, which no process has read yet, the first instant of
        #: these limits, and when they were sent.
        self._sent: list[tuple[Namespace, int, int]] = []
        #: Those that landed too late: the namespace's name, when they were sent, and when read.
        self._late: list[tuple[str, int, int]] = []

    def watch(self, store: Any) -> None:
        """Note the requests to *store* from now on."""
        rollups: Any = store.rollups
        control: Any = store.control
        advance, apply, dirty = rollups.advance, rollups.apply, rollups.dirty
        make_slices, drop_slice = control.make_slices, control.drop_slice

        async def advanced(namespace: Namespace, shards: Sequence[int], through_us: int) -> None:
            await advance(namespace, shards, through_us)
            self._advanced(namespace, shards, through_us)

        async def applied(namespace: Namespace, updates: Any, *, through_us: int) -> None:
            await apply(namespace, updates, through_us=through_us)
            if self._config.page and self._applied.get(namespace.id) == (store, through_us):
                self.reached.add("small-batches")
            self._applied[namespace.id] = (store, through_us)

        async def read(
            namespace: Namespace, shard: int, span: Span, limit: int, rest: object = None
        ) -> DirtyPage:
            page: DirtyPage = await dirty(namespace, shard, span, limit, rest)
            if page.marks:
                if self._marked.setdefault(namespace.id, shard) != shard:
                    self.reached.add("shards")
                if len(page.marks) == limit:
                    self.reached.add("small-pages")
            return page

        async def made(dataset: Dataset, *slices: Slice) -> None:
            await make_slices(dataset, *slices)
            for each in slices:
                self._slices.setdefault(each.start_us, (each.end_us, each.event_buckets))

        async def dropped(dataset: Dataset, start_us: int) -> bool:
            done: bool = await drop_slice(dataset, start_us)
            if done:
                self._dropped.setdefault(start_us, self._now_us())
            return done

        rollups.advance, rollups.apply, rollups.dirty = advanced, applied, read
        control.make_slices, control.drop_slice = made, dropped
        self._watch_directory(control)

    def _watch_directory(self, control: Any) -> None:
        update_namespace, namespaces = control.update_namespace, control.namespaces

        async def updated(before: Namespace, after: Namespace) -> bool:
            new = {*after.eras} - {*before.eras} | {*after.closing_eras} - {*before.closing_eras}
            if new:
                self._sent.append((after, min(each.from_us for each in new), self._now_us()))
            done: bool = await update_namespace(before, after)
            self._found([after] if done else [])
            return done

        async def read() -> Sequence[Namespace]:
            found: Sequence[Namespace] = await namespaces()
            self._found(found)
            return found

        control.update_namespace, control.namespaces = updated, read

    def _found(self, namespaces: Sequence[Namespace]) -> None:
        for sent in [each for each in self._sent if each[0] in namespaces]:
            self._sent.remove(sent)
            self._landed(*sent)

    def _landed(self, namespace: Namespace, from_us: int, sent_us: int) -> None:
        """Note accept limits that landed while an older copy of the directory may be in use."""
        dataset, now_us = namespace.dataset, self._now_us()
        ahead_us = min(FUTURE_LIMIT_MAX_US, dataset.slice_us) + settling_time(dataset)
        if from_us <= now_us + ahead_us and self._advanced_us.get(namespace.id, 0) > sent_us:
            self._late.append((namespace.name, sent_us, now_us))

    def _advanced(self, namespace: Namespace, shards: Sequence[int], through_us: int) -> None:
        self._watermarks.add(through_us)
        self._advanced_us[namespace.id] = self._now_us()
        for shard in shards:
            before_us = self._latest.get((namespace.id, shard))
            if before_us is not None and self._now_us() - before_us > HOUR:
                self.reached.add("hours-behind")
            self._latest[(namespace.id, shard)] = through_us

    def judge(self, history: History) -> None:
        """Note the situations that need the whole *history*."""
        for first, second in expiring(history):
            self._judge_key(first, second)
        for changed in history.changes:
            for item in changed.items:
                self._judge_cancel(changed, item)
                if item.event_time_us is not None and item.applied_us is not None:
                    self._judge(item, item.event_time_us)
                    self._judge_eras(changed.plan.namespace, item.applied_us)

    def _judge_cancel(self, changed: Changed, item: Item) -> None:
        if item.cancelled_us is None:
            return
        if item.applied_us is not None:
            self.reached.add("cancelled")
        if False in item.was_counted:
            self.reached.add("cancelled-void")
        if any(each.sent_us > item.cancelled_us for each in changed.requests):
            self.reached.add("cancelled-late")

    def _judge_eras(self, namespace: str, applied_us: int) -> None:
        if any(
            name == namespace and sent_us < applied_us < landed_us
            for name, sent_us, landed_us in self._late
        ):
            self.reached.add("era-announced-late")

    def _judge_key(self, first: Changed, second: Changed) -> None:
        """Note when *second* used the key of *first* again."""
        doubt_us, sent_us = 2 * self._config.skew_us, second.first_us or 0
        apart_us = sent_us - (first.first_us or 0) - self._config.key_ttl_us
        if abs(apart_us) <= doubt_us + SECOND // 10:
            self.reached.add("key-expires")
        if apart_us > doubt_us and second.items[0].applied_us is not None:
            self.reached.add("key-expired")

    def _judge(self, item: Item, time_us: int) -> None:
        window_us = self._config.window_us
        if (time_us + 1) % window_us <= 2:
            self.reached.add("window-end")
        if any(time_us + off in self._watermarks for off in (-1, 0, 1)):
            self.reached.add("watermark")
        for start_us, (end_us, buckets) in self._slices.items():
            if start_us <= time_us < end_us:
                if buckets > self._config.event_buckets:
                    self.reached.add("raised-buckets")
                at_us = self._dropped.get(start_us)
                if at_us is not None:
                    self.reached.add("retention")
                    if any(each.sent_us > at_us for each in item.change.requests):
                        self.reached.add("retention-retry")
