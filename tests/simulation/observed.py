"""What the simulation observes of each add, as a word of the model's letters: see proof/README.md.

Nodes record the writes that reach them, and processes the events that they send. After the run this
becomes, for each item of a change, the order in which things became true for every quorum.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

from counter.limits import TIME_MAX_US
from counter.types import Event, Namespace
from counter.windows import accept_limit_at, closing_limit_at, shard_of, window_of
from tests.simulation.cells import NEVER, Key, Partition
from tests.simulation.history import Changed, History, Item, Seen
from tests.simulation.node import Node, Write
from tests.simulation.plan import LATE, LOCAL, Config, Fault, Plan
from tests.simulation.reported import (
    COVERED,
    LAST,
    OLDER,
    RIVAL,
    Letters,
    ages_of,
    automaton_of,
    counted_of,
    items_of,
    names_of,
    problems_of,
    reported_of,
    why_not_compared,
)

_PENDING: Final = 1
_TABLES: Final = ("dirty", "atomic_marks", "counts", "resolutions", "watermarks")
#: The nodes of each read that sees enough.
_QUORUMS: Final = ((0, 1), (0, 2), (1, 2))
_APART: Final = "one data center alone had it"
#: Letters that depend on the presence of an event: its window is summed, or its token decided.
_LOOKS: Final = frozenset(("passed", "applied", "void"))

#: (namespace id, counter, time, nonce, item number)
_Identity = tuple[int, str, int, bytes, int]


class _Kinds(dict[str, str]):
    """The content of a table, by its name; nothing if it is not observed."""

    def __missing__(self, name: str) -> str:
        _, _, table = name.rpartition(".")
        kind = "events" if table.startswith("events_") else table if table in _TABLES else ""
        return self.setdefault(name, kind)


class Recorder:
    """Records the writes of the nodes of a cluster, and the sends of processes."""

    def __init__(self, cluster: Any) -> None:
        self._now_us = cluster.now_us
        self.kinds = _Kinds()
        #: (instant, node, write), or (instant, None, (namespace id, events)) of a send.
        self.log: list[tuple[int, int | None, Any]] = []
        #: Forbidden writes.
        self.problems: list[str] = []
        for node in cluster.nodes:
            self._watch_node(node)

    def _watch_node(self, node: Node) -> None:
        apply, kinds, log, now_us = node.apply, self.kinds, self.log, self._now_us

        def recorded(write: Write) -> None:
            if kinds[write[0]]:
                log.append((now_us(), node.number, write))
            apply(write)

        node.apply = recorded  # type: ignore[method-assign]

    def watch(self, store: Any) -> None:
        """Record the events that *store* is asked to append: their age was checked just before."""
        events, log, now_us = store.events, self.log, self._now_us
        for name in ("append", "append_atomic"):
            append = getattr(events, name)

            def recorded(
                namespace: Namespace, sent: Sequence[Event], append: Callable[..., Any] = append
            ) -> Any:
                log.append((now_us(), None, (namespace.id, sent)))
                return append(namespace, sent)

            setattr(events, name, recorded)


@dataclass(slots=True, eq=False)
class _Window:
    """A window of a counter: its marks and recounts, and its tokens."""

    end_us: int
    marked: bool = False
    passed: bool = False
    pending: set[int] = field(default_factory=set)
    #: The ends of the windows in which recounts of it are marked, of those that are not passed.
    recounts: set[int] = field(default_factory=set)
    #: Whether its sum was, or may have been, left to be computed again.
    is_recounted: bool = False
    tokens: list["_Token"] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Token:
    """An item of a token, and its observations: (instant, order, letter)."""

    item: Item
    window: _Window
    time_us: int
    #: Whether its own mark is durable, if it is an item of an atomic add.
    marked: bool = True
    letters: Letters = field(default_factory=dict)
    #: The nodes of each read of it that sees enough.
    quorums: Sequence[Sequence[int]] = _QUORUMS
    #: By node: the latest write timestamps of the event, and of its deletion.
    live_us: list[int] = field(default_factory=lambda: [NEVER] * 3)
    gone_us: list[int] = field(default_factory=lambda: [NEVER] * 3)

    @property
    def is_seen(self) -> bool:
        """Whether every quorum sees the event."""
        return all(map(self._is_seen_by, self.quorums))

    @property
    def is_apart(self) -> bool:
        """Whether one does, and another one does not."""
        return len({*map(self._is_seen_by, self.quorums)}) > 1

    def _is_seen_by(self, nodes: Sequence[int]) -> bool:
        live_us, gone_us = self.live_us, self.gone_us
        return max(live_us[node] for node in nodes) > max(gone_us[node] for node in nodes)

    @property
    def is_hidden(self) -> bool:
        """Whether no quorum sees it, however late a write of it lands."""
        latest_us = max(self.time_us, *self.live_us)
        hidden = {node for node, each_us in enumerate(self.gone_us) if each_us >= latest_us}
        return _all_see(self.quorums, hidden)

    @property
    def is_enforced(self) -> bool:
        """Whether its decision is carried out."""
        letters = self.letters
        return ("void" in letters and "hidden" in letters) or (
            "applied" in letters and "landed" in letters
        )

    @property
    def is_of_another_recount(self) -> bool:
        """Whether it landed and its window was recomputed for another token: then it may count."""
        letters = self.letters
        is_settled = "applied" in letters or "hidden" in letters
        return self.window.is_recounted and "landed" in letters and not is_settled


def limit_at(namespace: Namespace, time_us: int) -> int:
    """The accept limit of *time_us*; if another was announced and not set, the one before it."""
    starts_us = sorted({era.from_us for era in (*namespace.eras, *namespace.closing_eras)})
    for from_us in [each for each in starts_us if each <= time_us][::-1]:
        limit_us = accept_limit_at(namespace, from_us)
        if limit_us == closing_limit_at(namespace, from_us):
            return limit_us
        if from_us == starts_us[-1]:
            return namespace.settings.accept_limit_us
    raise ValueError(f"{namespace.name} had no accept limit at {time_us}")


def _quorums_of(config: Config) -> Sequence[Sequence[int]]:
    """The nodes of each read that sees enough."""
    if config.levels is None or config.levels[1] != LOCAL:
        return _QUORUMS
    return [((0, 1), (2,))[home] for home in sorted({*config.homes})]


def _all_see(quorums: Sequence[Sequence[int]], nodes: Set[int]) -> bool:
    """Whether every read sees the data of *nodes*."""
    return all(not nodes.isdisjoint(each) for each in quorums)


class Observed:
    """The observations of each item of a run. *final* are the last reads."""

    def __init__(
        self,
        plan: Plan,
        namespaces: Sequence[Namespace],
        history: History,
        final: Sequence[Seen],
        recorder: Recorder,
    ) -> None:
        self._config = plan.config
        self._quorums = _quorums_of(plan.config)
        self._namespaces = {each.name: each for each in namespaces}
        self._ids = {each.id: each for each in namespaces}
        self._recorder = recorder
        self._has_recounts = any(
            isinstance(step, Fault) and step.what == "recount" for step in plan.steps
        )
        self._windows: dict[tuple[int, str, int], _Window] = {}
        self._of_shard: defaultdict[tuple[int, int], list[_Window]] = defaultdict(list)
        self._decided: defaultdict[Key, list[_Token]] = defaultdict(list)
        self._nodes: defaultdict[tuple[Any, ...], set[int]] = defaultdict(set)
        self._watermarks: dict[tuple[int, int], int] = {}
        self._order = count()
        self._tokens: dict[_Identity, _Token] = {}
        self._items = items_of(history)
        #: How many items were observed, and how many were not by which reason.
        self.covered: Counter[str] = Counter()
        #: Changes of which, when it mattered, a data center had an event that the other had not.
        self._apart: set[int] = set()
        self._find_tokens(history)
        self._replay()
        apart = sum(id(token.item.change) in self._apart for token in self._tokens.values())
        self.covered += Counter({COVERED: -apart, _APART: apart})
        self._tell(final)

    def letters(self) -> Iterator[tuple[Item, Letters]]:
        """The observations of each item."""
        for token in self._tokens.values():
            if id(token.item.change) not in self._apart:
                yield token.item, token.letters

    # Which items are observed.

    def _find_tokens(self, history: History) -> None:
        found: dict[_Identity, Item] = {}
        several: set[_Identity] = set()
        for changed in history.changes:
            for item, (nonce, number) in zip(changed.items, names_of(changed), strict=True):
                why = self._why_not(changed)
                if why:
                    self.covered[why] += 1
                    continue
                namespace = self._namespaces[changed.plan.namespace]
                identity = (namespace.id, item.counter, changed.token_us, nonce, number)
                if identity in found:
                    several.add(identity)
                    self.covered[RIVAL] += 1
                found[identity] = item
        for identity, item in found.items():
            if identity in several:
                self.covered[RIVAL] += 1
            else:
                self.covered[COVERED] += 1
                self._add(identity, item)

    def _why_not(self, changed: Changed) -> str:
        """Why the model does not have a change; nothing if it does."""
        plan, config = changed.plan, self._config
        namespace = self._namespaces.get(plan.namespace)
        why = why_not_compared(changed)
        if why:
            return why
        if plan.namespace not in (*dict(config.namespaces), LATE) or namespace is None:
            return "its namespace was deleted and created again"
        earliest_us = namespace.created_at_us - namespace.eras[0].accept_limit_us
        if changed.token_us < earliest_us - 2 * config.skew_us:
            return OLDER
        is_first = plan.namespace == config.namespaces[0][0]
        if self._has_recounts and is_first and any(name == "hot" for name, _ in plan.items):
            return "a recount of its counter was asked for"
        return ""

    def _add(self, identity: _Identity, item: Item) -> None:
        namespace_id, counter, time_us, nonce, _ = identity
        changed, config = item.change, self._config
        namespace = self._ids[namespace_id]
        window_us = window_of(time_us, config.window_us)
        key = (namespace_id, counter, window_us)
        window = self._windows.get(key)
        if window is None:
            window = self._windows[key] = _Window(window_us + config.window_us)
            shard = shard_of(counter, self._ids[namespace_id].settings.shards)
            self._of_shard[namespace_id, shard].append(window)
        token = self._tokens[identity] = _Token(item, window, time_us, quorums=self._quorums)
        window.tokens.append(token)
        token.marked = changed.plan.how != "atomic"
        scope = counter if token.marked else ""
        self._decided[namespace_id, scope, time_us, nonce].append(token)
        limit_us = limit_at(namespace, time_us)
        token.letters |= reported_of(item, *ages_of(time_us, limit_us, config))

    # Writes of nodes and sends of processes.

    def _replay(self) -> None:
        log = self._recorder.log
        kinds = self._recorder.kinds
        known: dict[int, list[tuple[Callable[..., None], tuple[Any, ...]]]] = {}
        for now_us, node, what in log:
            if node is None:
                self._send(now_us, *what)
                continue
            facts = known.get(id(what[2]))
            if facts is None:
                read = getattr(self, f"_read_{kinds[what[0]]}")
                facts = known[id(what[2])] = list(read(what[1], what[2]))
            for learn, of in facts:
                learn(now_us, node, *of)

    def _note(self, token: _Token, letter: str, now_us: int) -> None:
        if letter not in token.letters:
            if letter in _LOOKS and self._config.is_split and token.is_apart:
                self._apart.add(id(token.item.change))
            token.letters[letter] = (now_us, next(self._order))
            self._look(token, now_us)

    def _look(self, token: _Token, now_us: int) -> None:
        """Note the consequences of the window of *token*."""
        window, letters = token.window, token.letters
        if window.marked and token.marked and now_us >= letters["asked"][0]:
            self._note(token, "marked", now_us)
        if window.passed:
            self._note(token, "passed", now_us)
        if "pending" in letters:
            if window.recounts:
                self._note(token, "recount", now_us)
        elif window.pending and token.is_enforced:
            self._note(token, "pending", now_us)

    def _look_at(self, window: _Window | None, now_us: int) -> None:
        for token in window.tokens if window is not None else ():
            self._look(token, now_us)

    def _is_durable(self, node: int, *fact: Any) -> bool:
        """Whether every read sees it now, and did not before."""
        return self._is_new(self._quorums, node, *fact)

    def _is_new(self, quorums: Sequence[Sequence[int]], node: int, *fact: Any) -> bool:
        nodes = self._nodes[fact]
        if node in nodes or _all_see(quorums, nodes):
            return False
        nodes.add(node)
        return _all_see(quorums, nodes)

    def _send(self, now_us: int, namespace_id: int, events: Sequence[Event]) -> None:
        for event in events:
            token = self._tokens.get((namespace_id, *event[:4]))
            if token is not None:
                self._look(token, now_us)
                self._note(token, "sent", now_us)

    def _read_events(self, key: Key, written: Partition) -> Iterator[Any]:
        namespace_id, counter = key[:2]
        for row_key, row in written.rows.items():
            token = self._tokens.get((namespace_id, counter, *row_key))
            if token is not None:
                cells = [row.cells[name] for name in ("delta", "clear") if name in row.cells]
                live = [each.stamp_us for each in cells if not each.deleted]
                gone = [each.stamp_us for each in cells if each.deleted]
                of = (token, max(live, default=NEVER), max(row.deleted.stamp_us, *gone, NEVER))
                yield self._learn_event, of

    def _learn_event(
        self, now_us: int, node: int, token: _Token, live_us: int, gone_us: int
    ) -> None:
        was_seen = token.is_seen
        token.live_us[node] = max(token.live_us[node], live_us)
        token.gone_us[node] = max(token.gone_us[node], gone_us)
        if token.is_seen and not was_seen:
            self._note(token, "shown-again" if "hidden" in token.letters else "landed", now_us)
        elif gone_us > NEVER and token.is_hidden:
            self._note(token, "hidden", now_us)

    def _read_dirty(self, key: Key, written: Partition) -> Iterator[Any]:
        namespace_id, shard, window_us = key
        for (counter, recount_us), row in written.rows.items():
            if row.marker is not None and not row.marker.deleted:
                of = (namespace_id, shard, window_us, counter, recount_us)
                yield (self._learn_recount if recount_us else self._learn_mark), of

    def _learn_mark(self, now_us: int, node: int, *of: Any) -> None:
        namespace_id, _, window_us, counter, _ = of
        if self._is_durable(node, "mark", *of):
            window = self._windows.get((namespace_id, counter, window_us))
            if window is not None:
                window.marked = True
                self._look_at(window, now_us)

    def _read_atomic_marks(self, key: Key, written: Partition) -> Iterator[Any]:
        namespace_id, shard, window_us = key
        for time_us, nonce, _ in written.rows:
            if window_us == window_of(time_us, self._config.window_us):
                yield self._learn_atomic_mark, (namespace_id, shard, time_us, nonce)

    def _learn_atomic_mark(self, now_us: int, node: int, *of: Any) -> None:
        namespace_id, shard, time_us, nonce = of
        if not self._is_durable(node, "atomic mark", *of):
            return
        for token in self._decided.get((namespace_id, "", time_us, nonce), ()):
            if token.window in self._of_shard[namespace_id, shard]:
                token.marked = True
                self._look(token, now_us)

    def _learn_recount(self, now_us: int, node: int, *of: Any) -> None:
        namespace_id, shard, left_us, counter, window_us = of
        window = self._windows.get((namespace_id, counter, window_us))
        if window is not None:
            window.is_recounted = True
        end_us = left_us + self._config.window_us
        if self._is_durable(node, "recount", *of) and window is not None:
            if self._watermarks.get((namespace_id, shard), 0) < end_us - 1:
                window.recounts.add(end_us)
            self._look_at(window, now_us)

    def _read_counts(self, key: Key, written: Partition) -> Iterator[Any]:
        for (kind, window_us, left_us), row in written.rows.items():
            window = self._windows.get((*key, window_us))
            if kind == _PENDING and window is not None:
                is_gone = row.marker is None or row.deleted.stamp_us >= row.marker.stamp_us
                yield self._learn_pending, (window, left_us, is_gone)

    def _learn_pending(
        self, now_us: int, node: int, window: _Window, left_us: int, is_gone: bool
    ) -> None:
        window.is_recounted = True
        if self._is_durable(node, "done" if is_gone else "pending", id(window), left_us):
            if _all_see(self._quorums, self._nodes["done", id(window), left_us]):
                window.pending.discard(left_us)
            else:
                window.pending.add(left_us)
            self._look_at(window, now_us)

    def _read_resolutions(self, key: Key, written: Partition) -> Iterator[Any]:
        for row in written.rows.values():
            outcome = row.cells.get("outcome")
            if outcome is not None:
                for token in self._decided.get(key, ()):
                    yield self._learn_decision, (token, outcome.value)

    def _learn_decision(self, now_us: int, node: int, token: _Token, outcome: str) -> None:
        # SERIAL reads see it, in whatever data centers.
        if self._is_new(_QUORUMS, node, "decision", id(token), outcome):
            self._note(token, outcome, now_us)

    def _read_watermarks(self, key: Key, written: Partition) -> Iterator[Any]:
        for (shard,), row in written.rows.items():
            yield self._learn_watermark, (key[0], shard, row.cells["through"].value)

    def _learn_watermark(self, now_us: int, node: int, *of: Any) -> None:
        namespace_id, shard, through_us = of
        if not self._is_durable(node, "watermark", *of):
            return
        passed_us = max(through_us, self._watermarks.get((namespace_id, shard), 0))
        self._watermarks[namespace_id, shard] = passed_us
        for window in self._of_shard[namespace_id, shard]:
            window.passed = window.end_us - 1 <= passed_us
            window.recounts = {each for each in window.recounts if each - 1 > passed_us}
            if window.passed:
                self._look_at(window, now_us)

    # Responses to clients.

    def _tell(self, final: Sequence[Seen]) -> None:
        letters = counted_of(self._items, final)
        for token in self._tokens.values():
            letter = letters.get(id(token.item))
            if letter == "counted" and token.is_of_another_recount:
                continue
            if letter is not None:
                token.letters[letter] = (TIME_MAX_US, LAST)


def forbidden(observed: Observed) -> Iterator[str]:
    """Observations that the model forbids."""
    for item, letters in observed.letters():
        yield from problems_of(item, letters, automaton_of(item))
