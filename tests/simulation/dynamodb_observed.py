"""Writes in the simulated DynamoDB as the observer knows them: rows of Cassandra on all
replicas."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from counter.storage.dynamodb.layout import COUNTS, HEAD, partition, row_place
from counter.types import CounterUpdate, Namespace
from tests.simulation.cells import NEVER, Cell, Deletion, Key, Partition, Row
from tests.simulation.dynamodb_expressions import Encoded, of_type
from tests.simulation.dynamodb_server import Server
from tests.simulation.observed import Recorder

#: The timestamp of a void: no write is later.
_LAST: Final = 2**62
_PENDING: Final = 1
_Found = Iterator[tuple[str, Key, Key, Row]]


class ItemRecorder(Recorder):
    """Records writes of items, and checks that the rows of a checkpoint are written before it."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self._server = server
        server.wrote = self._wrote
        #: By partition key and time of a checkpoint: the windows of each call that writes it.
        self._rolled: defaultdict[tuple[bytes, int], list[set[int]]] = defaultdict(list)

    def watch(self, store: Any) -> None:
        super().watch(store)
        apply = store.rollups.apply

        def noted(namespace: Namespace, updates: Sequence[CounterUpdate], **more: int) -> Any:
            for each in updates:
                pk = partition(namespace, COUNTS, each.counter)
                windows = {row.window_us for row in each.rows}
                self._rolled[pk, each.checkpoint.time_us].append(windows)
            return apply(namespace, updates, **more)

        store.rollups.apply = noted

    def _wrote(self, name: str, key: tuple[bytes, bytes], item: Encoded | None) -> None:
        now_us = self._server.now_us()
        values = {each: of_type(value)[1] for each, value in (item or {}).items()}
        for table, place, row_key, row in _read(name, *key, values, now_us):
            write = (f"counter.{table}", place, Partition({row_key: row}))
            self.log.extend((now_us, node, write) for node in range(3))
        if key[1] == HEAD and values:
            self._check_rows(name, key[0], values)

    def _check_rows(self, name: str, pk: bytes, head: dict[str, Any]) -> None:
        """Check the rows of a new checkpoint: a worker that reads it then folds them again."""
        time_us, settled_us = head["ct"], head.get("st", -1)
        items = self._server.tables[name].partition(pk).items
        missing = [
            [each for each in windows if each > settled_us and row_place(each) not in items]
            for windows in self._rolled[pk, time_us]
        ]
        if missing and all(missing):
            counter = pk[9:].decode()
            self.problems.append(f"{counter} has a checkpoint at {time_us} before its rows")


def _number(text: bytes) -> int:
    return int.from_bytes(text, "big") - 2**63


def _read(name: str, pk: bytes, sk: bytes, item: dict[str, Any], now_us: int) -> _Found:
    """Yield a write in terms of the model; *item* is empty for a deletion."""
    _, _, kind = name.partition(".default.")
    if kind.startswith("events.") and item:
        cells = {"delta": Cell(now_us, False, None)} if item.keys() & {"c", "d"} else {}
        place = -1 - _number(sk[:8]), sk[8:24], int.from_bytes(sk[24:], "big")
        # A deletion alone hides nothing that lands later.
        row = Row(cells, deleted=Deletion(NEVER if cells else _LAST, now_us))
        yield "events_", (_number(pk[:8]), pk[10:].decode()), place, row
    elif kind == "data" and (read := _KINDS.get(pk[:1])) is not None:
        yield from read(pk, sk, item, now_us)


def _shard(pk: bytes) -> tuple[int, int]:
    return _number(pk[1:9]), int.from_bytes(pk[9:], "big")


def _mark(pk: bytes, _: bytes, item: dict[str, Any], now_us: int) -> _Found:
    if item:
        row = Row({}, Cell(now_us, False, None))
        yield "dirty", (*_shard(pk), item["w"]), (item["c"], item["r"]), row


def _atomic_mark(pk: bytes, _: bytes, item: dict[str, Any], __: int) -> _Found:
    if item:
        yield "atomic_marks", (*_shard(pk), item["w"]), (item["t"], item["e"], b""), Row({})


def _watermark(pk: bytes, sk: bytes, item: dict[str, Any], now_us: int) -> _Found:
    if item:
        row = Row({"through": Cell(now_us, False, item["t"])})
        yield "watermarks", (_number(pk[1:]),), (_number(sk),), row


def _pending(pk: bytes, sk: bytes, item: dict[str, Any], now_us: int) -> _Found:
    if sk.startswith(b"p"):
        place = _PENDING, _number(sk[1:9]), _number(sk[9:])
        yield (
            "counts",
            (_number(pk[1:9]), pk[9:].decode()),
            place,
            Row({}, Cell(now_us, False, None) if item else None),
        )


def _decision(pk: bytes, _: bytes, item: dict[str, Any], now_us: int) -> _Found:
    if item:
        key = _number(pk[1:9]), pk[33:].decode(), _number(pk[9:17]), pk[17:33]
        yield "resolutions", key, (), Row({"outcome": Cell(now_us, False, item["o"])})


_KINDS: Final[dict[bytes, Callable[[bytes, bytes, dict[str, Any], int], _Found]]] = {
    b"m": _mark,
    b"a": _atomic_mark,
    b"w": _watermark,
    b"c": _pending,
    b"d": _decision,
}
