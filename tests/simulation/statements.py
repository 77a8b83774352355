"""What a statement does to a partition, and what it shows of one."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cmp_to_key
from itertools import product
from typing import Any, Final

from counter.limits import SECOND
from tests.simulation.cells import Cell, Deletion, Key, Partition, Range, Row
from tests.simulation.cql import Condition, Schema, Statement, holds

_COMPARE: Final = {
    "=": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
Visible = list[tuple[Key, dict[str, Any]]]


def keys_of(statement: Statement, schema: Schema, values: Sequence[Any]) -> list[Key] | None:
    """The partitions that *statement* names; None for all there are."""
    if statement.verb == "insert":
        given = {name: term.of(values) for name, term in statement.assigned}
        return [tuple(given[name] for name in schema.partition)]
    choices: dict[str, Sequence[Any]] = {}
    several = False
    for columns, how, terms in statement.where:
        if columns[0] in schema.partition:
            marker, value = terms[0]
            value = value if marker is None else values[marker]
            several |= how == "in"
            choices[columns[0]] = list(dict.fromkeys(value)) if how == "in" else (value,)
    if not choices:
        return None
    if not several:
        return [tuple([choices[name][0] for name in schema.partition])]
    return list(product(*(choices[name] for name in schema.partition)))


def delta_of(
    statement: Statement, schema: Schema, values: Sequence[Any], stamp_us: int, now_us: int
) -> Partition:
    """What a write adds to its partition, at *stamp_us* unless it says otherwise."""
    using = {name: term.of(values) for name, term in statement.using.items()}
    stamp_us = using.get("timestamp", stamp_us)
    ttl_us = using.get("ttl", 0) * SECOND
    until_us = now_us + ttl_us if ttl_us else None
    made = Partition()
    if statement.verb == "delete":
        return _deletion(statement, schema, values, Deletion(stamp_us, now_us))
    given = {name: term.of(values) for name, term in statement.assigned}
    if statement.verb == "update":
        given |= {c.columns[0]: c.terms[0].of(values) for c in statement.where}

    def cell(value: Any) -> Cell:
        if value is None:
            return Cell(stamp_us, True, None, now_us)
        return Cell(stamp_us, False, value, until_us, ttl_us)

    made.static = {name: cell(given[name]) for name in sorted(schema.static & given.keys())}
    if all(name in given for name in schema.clustering):
        cells = {name: cell(given[name]) for name in schema.regular if name in given}
        marker = cell(b"") if statement.verb == "insert" else None
        made.rows[tuple(given[name] for name in schema.clustering)] = Row(cells, marker)
    return made


def _deletion(
    statement: Statement, schema: Schema, values: Sequence[Any], deletion: Deletion
) -> Partition:
    made = Partition()
    where = [c for c in statement.where if c.columns[0] in schema.clustering]
    exact = tuple(c.terms[0].of(values) for c in where if c.operator == "=")
    if statement.columns:
        cells = {
            name: Cell(deletion.stamp_us, True, None, deletion.at_us)
            for _, name in statement.columns
        }
        made.rows[exact] = Row(cells)
    elif len(exact) == len(schema.clustering) and exact:
        made.rows[exact] = Row({}, None, deletion)
    elif not where and schema.clustering:
        made.deleted = deletion
    elif not schema.clustering:
        made.rows[()] = Row({}, None, deletion)
    else:
        (last,) = [c for c in where if c.operator != "="]
        if last.operator != "<=":
            raise NotImplementedError(last.operator)
        made.ranges[Range(exact, (*exact, last.terms[0].of(values)), deletion)] = None
    return made


def filter_of(
    statement: Statement, schema: Schema, values: Sequence[Any]
) -> Callable[[Key], bool] | None:
    """Which rows of a partition a read wants; None for all."""
    tests: list[tuple[slice, Callable[[Any, Any], bool], Key]] = []
    for columns, how, terms in statement.where:
        if columns[0] in schema.clustering:
            first = schema.clustering.index(columns[0])
            wanted = tuple(term.of(values) for term in terms)
            tests.append((slice(first, first + len(columns)), _COMPARE[how], wanted))
    if not tests:
        return None
    return lambda key: all(compare(key[at], wanted) for at, compare, wanted in tests)


def rows_of(
    statement: Statement,
    schema: Schema,
    values: Sequence[Any],
    partitions: Iterable[tuple[Key, Partition]],
    now_us: int,
) -> list[tuple[Any, ...]]:
    """What a read shows of the merged *partitions*."""
    limit = statement.limit.of(values) if statement.limit is not None else None
    each_limit = statement.partition_limit and statement.partition_limit.of(values)
    wanted = filter_of(statement, schema, values)
    shown: list[tuple[Any, ...]] = []
    for key, partition in partitions:
        rows = [row for row in partition.visible(now_us) if wanted is None or wanted(row[0])]
        rows.sort(key=_order(schema))
        static = partition.visible_static(now_us)
        if schema.static and static and (statement.distinct or not rows):
            # Only a row of nothing but statics is there, or asked for.
            rows = [((None,) * len(schema.clustering), {})]
        if not rows:
            continue
        named = [
            {
                **dict(zip(schema.partition, key, strict=True)),
                **dict(zip(schema.clustering, row_key, strict=True)),
                **static,
                **cells,
            }
            for row_key, cells in rows[:each_limit]
        ]
        if statement.grouped or any(how for how, _ in statement.columns):
            shown.append(tuple(_aggregate(how, name, named) for how, name in statement.columns))
        else:
            shown += [tuple(row.get(name) for _, name in statement.columns) for row in named]
    if not shown and not statement.grouped and any(how for how, _ in statement.columns):
        return [tuple(0 for _ in statement.columns)]
    return shown[:limit]


def _aggregate(how: str, name: str, rows: Sequence[Mapping[str, Any]]) -> Any:
    if not how:
        return rows[0].get(name)
    found = [row[name] for row in rows if row.get(name) is not None]
    return len(found) if how == "count" else sum(found)


def _order(schema: Schema) -> Callable[[tuple[Key, Any]], Any]:
    """The order of a partition's rows."""
    if not schema.descending:
        return lambda row: row[0]
    down = [name in schema.descending for name in schema.clustering]

    def compare(one: tuple[Key, Any], other: tuple[Key, Any]) -> int:
        for reverse, a, b in zip(down, one[0], other[0], strict=True):
            if a != b:
                return (1 if a > b else -1) * (-1 if reverse else 1)
        return 0

    return cmp_to_key(compare)


def standing_row(
    schema: Schema, key: Key, row_key: Key, partition: Partition, now_us: int
) -> dict[str, Any] | None:
    """The values of one row, its statics too; None where there is no such row."""
    static = partition.visible_static(now_us)
    for each, cells in partition.visible(now_us):
        if each == row_key:
            names = {**dict(zip(schema.partition, key, strict=True))}
            return names | dict(zip(schema.clustering, row_key, strict=True)) | static | cells
    return None


def shown_row(schema: Schema, row: Mapping[str, Any]) -> tuple[Any, ...]:
    """How a refused insert shows the row that stands: keys as declared, then the rest by name."""
    names = (*schema.partition, *schema.clustering, *sorted(schema.static), *schema.regular)
    return (False, *(row.get(name) for name in names))


def is_met(
    statement: Statement,
    values: Sequence[Any],
    row: Mapping[str, Any] | None,
    static: Mapping[str, Any],
) -> bool:
    """Whether the condition of a compare-and-set holds over what stands."""
    if statement.must_exist is not None:
        return (row is not None) == statement.must_exist
    return all(holds(each, row or static, values) for each in statement.conditions or ())


def row_key_of(statement: Statement, schema: Schema, values: Sequence[Any]) -> Key:
    """The clustering key that a compare-and-set names; empty where only statics are."""
    given: dict[str, Any] = {name: term.of(values) for name, term in statement.assigned}
    conditions: Sequence[Condition] = statement.where
    given |= {c.columns[0]: c.terms[0].of(values) for c in conditions}
    if any(name not in given for name in schema.clustering):
        return ()
    return tuple(given[name] for name in schema.clustering)
