"""The effect of a statement on a partition, and its result."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cmp_to_key, lru_cache
from itertools import product
from typing import Any, Final

from counter.limits import SECOND
from tests.simulation.cells import Cell, Deletion, Key, Partition, Range, Row
from tests.simulation.cql import Condition, Schema, Statement, Term, holds

_COMPARE: Final = {
    "=": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
#: The compared part of a clustering key, the operator, and the term.
_Test = tuple[slice, Callable[[Any, Any], bool], tuple[Term, ...]]


@lru_cache(maxsize=8_192)
def _key_terms(statement: Statement, schema: Schema) -> tuple[tuple[Term, bool], ...]:
    """The terms of the partition key, and whether each is a list; nothing without a partition."""
    if statement.verb == "insert":
        given = dict(statement.assigned)
        return tuple((given[name], False) for name in schema.partition)
    found = {
        columns[0]: (terms[0], how == "in")
        for columns, how, terms in statement.where
        if columns[0] in schema.partition
    }
    return tuple(found[name] for name in schema.partition) if found else ()


def keys_of(statement: Statement, schema: Schema, values: Sequence[Any]) -> list[Key] | None:
    """The partitions that *statement* names; None for all there are."""
    named = _key_terms(statement, schema)
    if not named:
        return None
    if not any(several for _, several in named):
        return [tuple([value if at is None else values[at] for (at, value), _ in named])]
    choices = (
        dict.fromkeys(term.of(values)) if several else (term.of(values),) for term, several in named
    )
    return list(product(*choices))


def delta_of(
    statement: Statement, schema: Schema, values: Sequence[Any], stamp_us: int, now_us: int
) -> Partition:
    """The write to its partition, at *stamp_us* unless it has its own timestamp."""
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


@lru_cache(maxsize=8_192)
def _tests(statement: Statement, schema: Schema) -> tuple[_Test, ...]:
    """The bounds of *statement* on clustering keys."""
    found = []
    for columns, how, terms in statement.where:
        if columns[0] in schema.clustering:
            first = schema.clustering.index(columns[0])
            found.append((slice(first, first + len(columns)), _COMPARE[how], terms))
    return tuple(found)


def filter_of(
    statement: Statement, schema: Schema, values: Sequence[Any]
) -> Callable[[Key], bool] | None:
    """Which rows of a partition a read wants; None for all."""
    tests = [
        (at, compare, tuple([term.of(values) for term in terms]))
        for at, compare, terms in _tests(statement, schema)
    ]
    if not tests:
        return None
    return lambda key: all(compare(key[at], wanted) for at, compare, wanted in tests)


@lru_cache(maxsize=8_192)
def _places(statement: Statement, schema: Schema) -> tuple[tuple[int, Any], ...]:
    """The place of each column of *statement*: in a key, by position, or in a cell."""
    keys = (schema.partition, schema.clustering)
    return tuple(
        next(
            ((which, names.index(name)) for which, names in enumerate(keys) if name in names),
            (2, name),
        )
        for _, name in statement.columns
    )


def rows_of(
    statement: Statement,
    schema: Schema,
    values: Sequence[Any],
    partitions: Iterable[tuple[Key, Partition]],
    now_us: int,
) -> list[tuple[Any, ...]]:
    """The result of a read of *partitions*, which are merged and hold the wanted rows."""
    limit = statement.limit.of(values) if statement.limit is not None else None
    each_limit = statement.partition_limit and statement.partition_limit.of(values)
    places = _places(statement, schema)
    aggregates = any(how for how, _ in statement.columns)
    shown: list[tuple[Any, ...]] = []
    for key, partition in partitions:
        static = partition.visible_static(now_us)
        rows = [] if static and statement.distinct else list(partition.visible(now_us))
        if len(rows) > 1:
            rows.sort(key=_order(schema))
        if static and not rows:
            # Only a row of nothing but statics is there, or asked for.
            rows = [((None,) * len(schema.clustering), {})]
        if not rows:
            continue
        found = [
            _shown(places, (key, row_key, {**static, **cells} if static else cells))
            for row_key, cells in rows[:each_limit]
        ]
        if statement.grouped or aggregates:
            columns = zip(statement.columns, zip(*found, strict=True), strict=True)
            shown.append(tuple(_aggregate(how, column) for (how, _), column in columns))
        else:
            shown += found
    if not shown and not statement.grouped and aggregates:
        return [tuple(0 for _ in statement.columns)]
    return shown[:limit]


def _shown(places: tuple[tuple[int, Any], ...], given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values at *places* of *given*: partition key, clustering key, cells by name."""
    cells = given[2]
    return tuple([cells.get(at) if which == 2 else given[which][at] for which, at in places])


def _aggregate(how: str, column: Sequence[Any]) -> Any:
    if not how:
        return column[0]
    found = [value for value in column if value is not None]
    return len(found) if how == "count" else sum(found)


@lru_cache(maxsize=4_096)
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
    """The values of one row, its statics too; None if there is no such row."""
    row = partition.rows.get(row_key)
    cells = None if row is None else partition.values_of(row_key, row, now_us)
    if cells is None:
        return None
    names = dict(zip(schema.partition, key, strict=True))
    names |= zip(schema.clustering, row_key, strict=True)
    return names | partition.visible_static(now_us) | cells


def shown_row(schema: Schema, row: Mapping[str, Any]) -> tuple[Any, ...]:
    """How a refused insert returns the existing row: keys as declared, then the rest by name."""
    names = (*schema.partition, *schema.clustering, *sorted(schema.static), *schema.regular)
    return (False, *(row.get(name) for name in names))


def is_met(
    statement: Statement,
    values: Sequence[Any],
    row: Mapping[str, Any] | None,
    static: Mapping[str, Any],
) -> bool:
    """Whether the condition of a compare-and-set holds for the existing row."""
    if statement.must_exist is not None:
        return (row is not None) == statement.must_exist
    return all(holds(each, row or static, values) for each in statement.conditions or ())


def row_key_of(statement: Statement, schema: Schema, values: Sequence[Any]) -> Key:
    """The clustering key of a compare-and-set; empty if it has only statics."""
    given: dict[str, Any] = {name: term.of(values) for name, term in statement.assigned}
    conditions: Sequence[Condition] = statement.where
    given |= {c.columns[0]: c.terms[0].of(values) for c in conditions}
    if any(name not in given for name in schema.clustering):
        return ()
    return tuple(given[name] for name in schema.clustering)
