"""Three replicas, their coordinators, and what lies between.

Every node holds everything. A quorum is two. Writes reach each replica on their own, reads look at
two of them at times of their own and repair what they find to differ before they answer. Compare-
and-sets are linearizable: each happens at one instant, on two replicas, or is left to the next one
in its partition to bring to its end, or not.

The nodes may be in two data centers. A process's statements are coordinated in its own, and the
link to the other one may be cut, one way.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import cassandra
from cassandra import ConsistencyLevel
from cassandra.query import BatchStatement, BatchType

from counter.limits import MILLISECOND, SECOND
from tests.simulation.cells import Key, Partition, together
from tests.simulation.cql import Schema, Statement
from tests.simulation.node import Node, Write
from tests.simulation.statements import (
    delta_of,
    filter_of,
    is_met,
    keys_of,
    row_key_of,
    rows_of,
    shown_row,
    standing_row,
)
from tests.simulation.weather import Weather

QUORUM: Final = 2
_OF_ONE: Final = (ConsistencyLevel.ANY, ConsistencyLevel.ONE, ConsistencyLevel.LOCAL_ONE)
#: In calm weather most statements reach every replica, and are answered, at one instant: that costs
#: far fewer turns of the loop.
_AT_ONCE: Final = 0.8
_SERVER_TIMEOUT_US: Final = 2 * SECOND
#: An acknowledgement that comes too late.
_NEVER_US: Final = 10 * _SERVER_TIMEOUT_US

#: Of which nodes how many must answer.
_Needed = Sequence[tuple[Sequence[Node], int]]
Done = Callable[[Any], None]


class _Proposal(NamedTuple):
    """The write of a compare-and-set, if it was accepted by most or, perhaps, by fewer."""

    writes: list[Write]
    is_chosen: bool


#: (statement, its values)
Bound = tuple[Statement, Sequence[Any]]


class _Select(NamedTuple):
    """A read: the partitions that it names, if it does, and the rows that it wants, if not all."""

    statement: Statement
    values: Sequence[Any]
    schema: Schema
    keys: list[Key] | None
    wanted: Callable[[Key], bool] | None

    @property
    def table(self) -> str:
        return self.statement.table


def _read_timeout() -> Exception:
    made: Exception = cassandra.ReadTimeout("simulated", consistency=4)
    return made


def _write_timeout() -> Exception:
    made: Exception = cassandra.WriteTimeout("simulated", consistency=4, write_type=0)
    return made


class Cluster:
    """The nodes, and the only way to them."""

    def __init__(
        self,
        at: Callable[..., None],
        now_us: Callable[[], int],
        weather: Weather,
        centers: Sequence[int] = (0, 0, 0),
    ) -> None:
        self._at = at
        self.now_us = now_us
        self.weather = weather
        self._random = weather.random
        self.nodes = [Node(number, center) for number, center in enumerate(centers)]
        self._needed_of: dict[tuple[int, int], _Needed] = {}
        self.schemas: dict[str, Schema] = {}
        #: Of each partition, the compare-and-set that was accepted and not decided.
        self._proposed: dict[tuple[str, Key], _Proposal] = {}
        self._ballots: dict[tuple[str, Key], int] = {}
        #: Whether a left-over one gets the timestamp of the ballot that completes it, as with Paxos
        #: v1; with v2 it keeps its own.
        self.restamps = False
        #: Options of DynamoDB.
        self.page = 0
        #: Whether reads repair; a planted bug has them repair nothing.
        self.repairs = True
        #: Called with each of the situations that seeds must reach.
        self.reach: Callable[[str], object] = lambda _: None
        self.statements = 0

    def create_table(self, name: str, schema: Schema) -> None:
        """Have the table on every node."""
        if name not in self.schemas:
            self.schemas[name] = schema
            for node in self.nodes:
                node.tables[name] = {}

    def drop_table(self, name: str) -> None:
        """Have it on none."""
        self.schemas.pop(name, None)
        for node in self.nodes:
            node.tables.pop(name, None)

    def calm(self) -> None:
        """Have every node up."""
        for node in self.nodes:
            node.up = True

    def compact(self) -> None:
        """Drop, on one node, deleted and expired cells, and tombstones after their grace time."""
        node = self._random.choice(self.nodes)
        now_us = self.now_us() + node.offset_us
        for name, table in node.tables.items():
            for partition in table.values():
                if partition.expires(now_us):
                    self.reach("compacted")
                partition.compact(now_us, self.schemas[name].grace_s * SECOND)

    def _clock_us(self) -> int:
        """The clock of the node that coordinates a statement."""
        if not any(node.offset_us for node in self.nodes):
            return self.now_us()
        return self.now_us() + self._random.choice(self.nodes).offset_us

    def execute(
        self,
        statement: Any,
        timeout_us: int,
        done: Done,
        hold_us: int = 0,
        loses: bool = False,
        abandons: bool = False,
        home: int = 0,
    ) -> None:
        """Run a bound statement or a batch; *done* gets rows, None, or an error of the driver.

        It may be held on its way, its response be lost, or its coordinator, in data center *home*,
        give it up.
        """
        self.statements += 1
        weather = self.weather
        meets = hold_us or loses or abandons
        if weather.is_calm and not meets and self._random.random() < _AT_ONCE:
            self._at(weather.delay(), self._coordinate, statement, done, False, home, True)
            return

        def over() -> None:
            done(cassandra.OperationTimedOut("simulated"))

        answered = False

        def answer(result: Any) -> None:
            nonlocal answered
            if not answered:
                answered = True
                done(result)

        if weather.happens(weather.lost_request):
            self._at(timeout_us, over)
            return
        lost = loses or weather.happens(weather.lost_reply)
        begun_us = self.now_us()

        def reply(result: Any) -> None:
            """Send *result* back: it may come too late, or not at all."""
            delay_us = weather.delay()
            left_us = begun_us + timeout_us - self.now_us()
            if lost or delay_us >= left_us:
                self._at(max(0, left_us), answer, cassandra.OperationTimedOut("simulated"))
            else:
                self._at(delay_us, answer, result)

        if weather.slow or lost or hold_us:
            self._at(timeout_us, answer, cassandra.OperationTimedOut("simulated"))
        self._at(hold_us + weather.delay(), self._coordinate, statement, reply, abandons, home)

    def _coordinate(
        self, statement: Any, reply: Done, abandons: bool, home: int, at_once: bool = False
    ) -> None:
        level = statement.consistency_level
        up = [node for node in self.nodes if node.up]
        is_coordinated = any(node.center == home for node in up)
        if not is_coordinated or not _are_enough(up, self._needed(level, home)):
            reply(
                cassandra.Unavailable(
                    "simulated", consistency=4, required_replicas=QUORUM, alive_replicas=1
                )
            )
            return
        if isinstance(statement, BatchStatement):
            if statement.batch_type is BatchType.LOGGED:
                raise NotImplementedError("a logged batch: it needs more nodes than a quorum")
            bounds = [(query, values) for _, query, values in statement._statements_and_parameters]
        else:
            bounds = [(statement.prepared_statement.query_id, statement.values)]
        for each, _ in bounds:
            if each.table not in self.schemas:
                reply(cassandra.InvalidRequest(f"unconfigured table {each.table}"))
                return
        first = bounds[0][0]
        if first.verb == "select":
            if level == ConsistencyLevel.SERIAL:
                self._read_serially(self._select(*bounds[0]), home, reply)
            else:
                self._read(self._select(*bounds[0]), level, home, reply, at_once)
        elif first.compares:
            self._compare(bounds, level, home, reply)
        else:
            writes = self._writes_of(bounds)
            if at_once and all(self._answers(home, node) for node in self.nodes):
                for node in self.nodes:
                    for write in writes:
                        node.apply(write)
                reply(None)
            else:
                self._write(writes, level, home, abandons, reply)

    # Data centers.

    def _reaches(self, home: int, node: Node) -> bool:
        """Whether a message of a coordinator in *home* gets to *node*."""
        return node.up and self.weather.cut != (home, node.center)

    def _answers(self, home: int, node: Node) -> bool:
        """Whether *node* gets a message of a coordinator in *home*, and its response gets back."""
        return self._reaches(home, node) and self.weather.cut != (node.center, home)

    def _needed(self, level: int, home: int) -> _Needed:
        """Of which nodes how many must answer a coordinator in *home* at a consistency *level*."""
        found = self._needed_of.get((level, home))
        if found is None:
            found = self._needed_of[level, home] = self._groups(level, home)
        return found

    def _groups(self, level: int, home: int) -> _Needed:
        local = [node for node in self.nodes if node.center == home]
        others = [node for node in self.nodes if node.center != home]
        if level in _OF_ONE:
            return [(self.nodes, 1)]
        if level == ConsistencyLevel.LOCAL_QUORUM:
            return [(local, len(local) // 2 + 1)]
        if level == ConsistencyLevel.EACH_QUORUM:
            return [(each, len(each) // 2 + 1) for each in (local, others) if each]
        if level == ConsistencyLevel.ALL:
            return [(self.nodes, len(self.nodes))]
        return [(self.nodes, QUORUM)]

    def _some(self, group: Sequence[Node], count: int, home: int) -> list[Node]:
        """So many of *group* that answer a coordinator in *home*, or all that do."""
        some = [node for node in group if self._answers(home, node)]
        while len(some) > count:
            some.pop(int(self._random.random() * len(some)))
        return some

    def _enough(self, needed: _Needed, home: int) -> list[Node]:
        """As many nodes as are *needed*, or all that answer."""
        return [node for group, count in needed for node in self._some(group, count, home)]

    def _is_serial(self, home: int) -> bool:
        """Whether so many nodes answer that a compare-and-set or a SERIAL read is possible."""
        is_possible = sum(self._answers(home, node) for node in self.nodes) >= QUORUM
        if not is_possible:
            self.reach("cut-compare")
        return is_possible

    def _writes_of(self, bounds: Sequence[Bound]) -> list[Write]:
        """The writes of the statements, merged by partition."""
        found: dict[tuple[str, Key], Partition] = {}
        for statement, values in bounds:
            schema = self.schemas[statement.table]
            keys = keys_of(statement, schema, values)
            if keys is None or len(keys) != 1:
                raise NotImplementedError(f"a write to {keys} of {statement.table}")
            delta = delta_of(statement, schema, values, 0, self._clock_us())
            found.setdefault((statement.table, keys[0]), Partition()).merge(delta)
        return [(name, key, delta) for (name, key), delta in found.items()]

    # Plain writes.

    def _write(
        self, writes: list[Write], level: int, home: int, abandons: bool, reply: Done
    ) -> None:
        weather = self.weather
        acknowledged_us = 0
        for write in writes:
            acks = self._send(write, home, abandons)
            if weather.happens(weather.repeated):
                self._send_to_all(write, home, weather.later())
            for group, count in self._needed(level, home):
                latest_us = sorted(acks[node.number] for node in group)[count - 1]
                acknowledged_us = max(acknowledged_us, latest_us)
        if acknowledged_us >= _SERVER_TIMEOUT_US:
            self._at(_SERVER_TIMEOUT_US, reply, _write_timeout())
        else:
            self._at(acknowledged_us, reply, None)

    def _send(self, write: Write, home: int, abandons: bool) -> list[int]:
        """Send a write to each replica; when its coordinator knows that each has it."""
        weather, random = self.weather, self._random
        gives_up = abandons or weather.happens(weather.abandoned)
        acks = []
        for node in self.nodes:
            is_cut_off = not self._reaches(home, node)
            if is_cut_off and node.up:
                self.reach("cut-off")
            misses = is_cut_off or weather.happens(weather.missed)
            if gives_up and random.random() < 0.7:
                misses = True
            delay_us = weather.delay()
            if misses:
                acks.append(_NEVER_US)
                if not weather.never or random.random() >= weather.never:
                    self._at(weather.later(), self._hint, node, write, home)
                continue
            self._at(delay_us, node.apply, write)
            if self._answers(home, node):
                acks.append(delay_us)
            else:
                self.reach("cut-answer")
                acks.append(_NEVER_US)
        return acks

    def _send_to_all(self, write: Write, home: int, after_us: int) -> None:
        for node in self.nodes:
            self._at(after_us + self.weather.delay(), self._hint, node, write, home)

    def _hint(self, node: Node, write: Write, home: int) -> None:
        """Hand a write over late; again later if the node is down or cannot be reached."""
        if self._reaches(home, node):
            node.apply(write)
        else:
            self._at(SECOND, self._hint, node, write, home)

    # Reads.

    def _select(self, statement: Statement, values: Sequence[Any]) -> _Select:
        schema = self.schemas[statement.table]
        keys = keys_of(statement, schema, values)
        return _Select(statement, values, schema, keys, filter_of(statement, schema, values))

    def _read(self, select: _Select, level: int, home: int, reply: Done, at_once: bool) -> None:
        needed = self._needed(level, home)
        nodes = self._enough(needed, home)
        if not _are_enough(nodes, needed):
            self.reach("cut-read")
            self._at(_SERVER_TIMEOUT_US, reply, _read_timeout())
            return
        if at_once:
            seen = [self._seen_by(node, select, at_once) for node in nodes]
            self._answer_read(select, nodes, seen, reply)
            return
        found: list[dict[Key, Partition] | None] = []

        def look(node: Node) -> None:
            found.append(self._seen_by(node, select))
            if len(found) == len(nodes):
                self._answer_read(select, nodes, found, reply)

        for node in nodes:
            self._at(self.weather.delay(), look, node)

    def _seen_by(
        self, node: Node, select: _Select, at_once: bool = False
    ) -> dict[Key, Partition] | None:
        """The data of a node for a query; None if the table is gone. It need not be a copy."""
        table = node.tables.get(select.table)
        if table is None:
            return None
        keys, wanted = select.keys, select.wanted
        found = list(table) if keys is None else [key for key in keys if key in table]
        if at_once and wanted is None:
            return {key: table[key] for key in found}
        return {key: table[key].part(wanted) for key in found}

    def _answer_read(
        self,
        select: _Select,
        nodes: Sequence[Node],
        found: Sequence[dict[Key, Partition] | None],
        reply: Done,
    ) -> None:
        first = found[0]
        if first is None or None in found or select.table not in self.schemas:
            reply(cassandra.InvalidRequest(f"unconfigured table {select.table}"))
            return
        merged = first
        if found.count(first) != len(found):
            merged = together(found)
            if self.repairs:
                self._repair(select.table, nodes, found, merged)
        order = sorted(merged) if select.keys is None else select.keys
        reply(self._rows_of(select, [(key, merged[key]) for key in order if key in merged]))

    def _rows_of(self, select: _Select, partitions: list[tuple[Key, Partition]]) -> list[Any]:
        """The result of a read of *partitions*, which hold the wanted rows."""
        if not partitions and not select.statement.columns[0][0]:
            return []
        statement, values, schema, *_ = select
        return rows_of(statement, schema, values, partitions, self._clock_us())

    def _repair(
        self,
        table: str,
        nodes: Sequence[Node],
        found: Sequence[dict[Key, Partition] | None],
        merged: dict[Key, Partition],
    ) -> None:
        """Bring *nodes* to their merged state of the read rows, before any response."""
        for key, partition in merged.items():
            parts = [(part or {}).get(key) for part in found]
            if any(part != partition for part in parts):
                known = [part for part in parts if part is not None]
                if any(one.ties(other) for one in known for other in known):
                    self.reach("equal-stamps")
                for node in nodes:
                    node.apply((table, key, partition))

    # Compare-and-sets.

    def _finish(self, table: str, key: Key, home: int) -> None:
        """The next statement in the partition decides an undecided compare-and-set."""
        proposed = self._proposed.pop((table, key), None)
        if proposed is None or (not proposed.is_chosen and self._random.random() < 0.5):
            return
        writes = proposed.writes
        self.reach("left-over-proposal")
        # Who sees a commit of it repairs that one; who sees it accepted proposes it again.
        if self.restamps and (not proposed.is_chosen or self._random.random() < 0.5):
            self.reach("new-ballot")
            writes = _restamped(writes, self._ballot(table, key, self._clock_us()))
        self._commit(writes, ConsistencyLevel.QUORUM, home)

    def _ballot(self, table: str, key: Key, now_us: int) -> int:
        """Another ballot of a partition, by the clock of a coordinator."""
        latest_us = self._ballots.get((table, key), 0)
        if now_us <= latest_us and any(node.offset_us for node in self.nodes):
            self.reach("node-clocks")
        self._ballots[(table, key)] = ballot_us = max(latest_us + 1, now_us)
        return ballot_us

    def _commit(self, writes: list[Write], level: int, home: int) -> bool:
        """Commit at *level*, and to a quorum of all; whether so many answered."""
        needed, nodes = self._needed(level, home), self.nodes
        for write in writes:
            nodes = self._enough(needed, home)
            if len(nodes) < QUORUM:
                others = [node for node in self.nodes if node not in nodes]
                nodes += self._some(others, QUORUM - len(nodes), home)
            for node in nodes:
                node.apply(write)
            for node in self.nodes:
                if node not in nodes:
                    self._at(self.weather.later(), self._hint, node, write, home)
        return _are_enough(nodes, needed)

    def _merged(self, table: str, key: Key, home: int) -> Partition:
        """A partition as a quorum has it at this instant; brought to it by that."""
        found = Partition()
        nodes = self._some(self.nodes, QUORUM, home)
        for node in nodes:
            partition = node.tables[table].get(key)
            if partition is not None:
                found.merge(partition)
        for node in nodes:
            node.apply((table, key, found))
        return found

    def _read_serially(self, select: _Select, home: int, reply: Done) -> None:
        if not self._is_serial(home):
            self._at(_SERVER_TIMEOUT_US, reply, _read_timeout())
            return
        partitions = []
        for key in select.keys or ():
            self._finish(select.table, key, home)
            merged = self._merged(select.table, key, home)
            partitions.append((key, merged.part(select.wanted)))
        reply(self._rows_of(select, partitions))

    def _compare(self, bounds: Sequence[Bound], level: int, home: int, reply: Done) -> None:
        if not self._is_serial(home):
            # No quorum promises anything, so nothing is proposed.
            self._at(_SERVER_TIMEOUT_US, reply, _write_timeout())
            return
        statement, values = bounds[0]
        table, schema = statement.table, self.schemas[statement.table]
        key = (keys_of(statement, schema, values) or [()])[0]
        self._finish(table, key, home)
        standing, now_us = self._merged(table, key, home), self._clock_us()
        static = standing.visible_static(now_us)
        refused: list[tuple[Any, ...]] = []
        for each, given in bounds:
            row_key = row_key_of(each, schema, given)
            row = standing_row(schema, key, row_key, standing, now_us)
            if not is_met(each, given, row, static):
                refused.append(shown_row(schema, row or {}))
        if refused:
            reply(refused)
            return
        ballot_us = self._ballot(table, key, now_us)
        writes = _restamped(self._writes_of(bounds), ballot_us)
        if self.weather.happens(self.weather.unreported):
            if self._random.random() < 0.5:
                self._commit(writes, level, home)
            else:
                is_chosen = self._random.random() < 0.3
                if is_chosen:
                    # Its commit came to one replica.
                    node = self._random.choice(self.nodes)
                    for write in writes:
                        node.apply(write)
                self._proposed[(table, key)] = _Proposal(writes, is_chosen)
            self._at(5 * MILLISECOND, reply, _write_timeout())
            return
        if self._commit(writes, level, home):
            reply([(True,)])
        else:
            self._at(_SERVER_TIMEOUT_US, reply, _write_timeout())


def _are_enough(nodes: Sequence[Node], needed: _Needed) -> bool:
    return all(sum(node in group for node in nodes) >= count for group, count in needed)


def _restamped(writes: Sequence[Write], stamp_us: int) -> list[Write]:
    """Writes of a compare-and-set at the timestamp of a ballot."""
    return [(name, key, delta.restamped(stamp_us)) for name, key, delta in writes]
