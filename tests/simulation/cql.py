"""A parser for the statements that the adapter prepares. Unknown syntax raises."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, NamedTuple

_TOKEN: Final = re.compile(r"'[^']*'|-?\d+|[a-z_][\w.]*|<=|>=|[=<>(),?*]", re.IGNORECASE)
_COLUMN: Final = re.compile(r"(\w+) (?:bigint|int|tinyint|text|blob)( static)?( PRIMARY KEY)?")
_PRIMARY: Final = re.compile(r"PRIMARY KEY \((?:\(([^)]*)\)|(\w+))((?:, \w+)*)\)")
_CREATE: Final = re.compile(
    r"CREATE TABLE IF NOT EXISTS (\S+) \((.*)\) WITH .*?gc_grace_seconds = (\d+)"
    r"(?:.*CLUSTERING ORDER BY \(([^)]*)\))?"
)


class Term(NamedTuple):
    """A value: that of a marker, or a literal."""

    marker: int | None
    value: Any = None

    def of(self, values: Sequence[Any]) -> Any:
        return self.value if self.marker is None else values[self.marker]


class Condition(NamedTuple):
    """*columns* *operator* *terms*; ``in`` has one term, a sequence."""

    columns: tuple[str, ...]
    operator: str
    terms: tuple[Term, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Schema:
    """A table's columns by their role; *descending* are clustering columns. Compared by
    identity."""

    partition: tuple[str, ...]
    clustering: tuple[str, ...]
    static: frozenset[str]
    regular: tuple[str, ...]
    descending: frozenset[str]
    grace_s: int


@dataclass(slots=True, eq=False)
class Statement:
    """A statement; *assigned* are the cells of a write, *columns* what a read or deletion names."""

    verb: str
    table: str = ""
    columns: tuple[tuple[str, str], ...] = ()
    where: tuple[Condition, ...] = ()
    assigned: tuple[tuple[str, Term], ...] = ()
    conditions: tuple[Condition, ...] | None = None
    must_exist: bool | None = None
    distinct: bool = False
    grouped: bool = False
    limit: Term | None = None
    partition_limit: Term | None = None
    using: dict[str, Term] = field(default_factory=dict)

    @property
    def compares(self) -> bool:
        """Whether it is a compare-and-set."""
        return self.conditions is not None or self.must_exist is not None


@lru_cache(maxsize=4_096)
def schema_of(cql: str) -> tuple[str, Schema] | None:
    """The name and schema of the table that *cql* creates; None if it creates none."""
    found = _CREATE.match(" ".join(cql.split()))
    if found is None:
        return None
    name, body, grace, order = found.groups()
    columns = _COLUMN.findall(body)
    primary = _PRIMARY.search(body)
    if primary is None:
        partition: tuple[str, ...] = tuple(each for each, _, key in columns if key)
        clustering: tuple[str, ...] = ()
    else:
        partition = tuple((primary[1] or primary[2]).split(", "))
        clustering = tuple(primary[3].split(", ")[1:])
    static = frozenset(each for each, is_static, _ in columns if is_static)
    keys = {*partition, *clustering, *static}
    regular = tuple(sorted(each for each, _, _ in columns if each not in keys))
    descending = frozenset(re.findall(r"(\w+) DESC", order or ""))
    return name, Schema(partition, clustering, static, regular, descending, int(grace))


@lru_cache(maxsize=4_096)
def parse(cql: str) -> Statement:
    """The statement that *cql* is."""
    return _Parser(cql).statement()


class _Parser:
    """Recursive descent over the tokens of one statement."""

    def __init__(self, cql: str) -> None:
        self._cql = cql
        self._tokens = _TOKEN.findall(cql)
        if "".join(self._tokens) != "".join(cql.split()):
            stripped = [token.replace(" ", "") for token in self._tokens]
            if "".join(stripped) != "".join(cql.split()):
                raise NotImplementedError(f"not understood: {cql}")
        self._at = 0
        self._markers = 0

    def statement(self) -> Statement:
        verb = self._next().lower()
        made = Statement(verb)
        getattr(self, f"_{verb}")(made)
        if self._at != len(self._tokens):
            raise NotImplementedError(f"{self._tokens[self._at :]} of: {self._cql}")
        return made

    def _select(self, made: Statement) -> None:
        made.distinct = self._take("DISTINCT")
        columns = [self._selected()]
        while self._take(","):
            columns.append(self._selected())
        made.columns = tuple(columns)
        self._must("FROM")
        made.table = self._next()
        self._where(made)
        if self._take("GROUP", "BY"):
            self._names()
            made.grouped = True
        if self._take("PER", "PARTITION", "LIMIT"):
            made.partition_limit = self._term()
        if self._take("LIMIT"):
            made.limit = self._term()

    def _selected(self) -> tuple[str, str]:
        name = self._next()
        if name.upper() == "COUNT":
            return "count", self._in_brackets()
        if name.upper() == "SUM":
            self._must("(", "CAST", "(")
            column = self._next()
            self._must("AS", "varint", ")", ")")
            return "sum", column
        return "", name

    def _in_brackets(self) -> str:
        self._must("(")
        name = self._next()
        self._must(")")
        return name

    def _insert(self, made: Statement) -> None:
        self._must("INTO")
        made.table = self._next()
        self._must("(")
        names = self._names()
        self._must(")", "VALUES", "(")
        terms = [self._term()]
        while self._take(","):
            terms.append(self._term())
        self._must(")")
        made.assigned = tuple(zip(names, terms, strict=True))
        if self._take("IF", "NOT", "EXISTS"):
            made.must_exist = False
        self._using(made)

    def _update(self, made: Statement) -> None:
        made.table = self._next()
        self._using(made)
        self._must("SET")
        assigned = [self._assigned()]
        while self._take(","):
            assigned.append(self._assigned())
        made.assigned = tuple(assigned)
        self._where(made)
        self._if(made)

    def _assigned(self) -> tuple[str, Term]:
        name = self._next()
        self._must("=")
        return name, self._term()

    def _delete(self, made: Statement) -> None:
        if not self._take("FROM"):
            made.columns = tuple(("", name) for name in self._names())
            self._must("FROM")
        made.table = self._next()
        self._using(made)
        self._where(made)
        self._if(made)

    def _using(self, made: Statement) -> None:
        if self._take("USING"):
            while True:
                name = self._next().lower()
                made.using[name] = self._term()
                if not self._take("AND"):
                    return

    def _where(self, made: Statement) -> None:
        if self._take("WHERE"):
            made.where = self._all_of()

    def _if(self, made: Statement) -> None:
        if self._take("IF", "EXISTS"):
            made.must_exist = True
        elif self._take("IF"):
            made.conditions = self._all_of()

    def _all_of(self) -> tuple[Condition, ...]:
        found = [self._condition()]
        while self._take("AND"):
            found.append(self._condition())
        return tuple(found)

    def _condition(self) -> Condition:
        if self._take("("):
            columns = tuple(self._names())
            self._must(")")
            operator = self._next()
            self._must("(")
            terms = [self._term()]
            while self._take(","):
                terms.append(self._term())
            self._must(")")
            return Condition(columns, operator, tuple(terms))
        name, operator = self._next(), self._next().lower()
        return Condition((name,), operator, (self._term(),))

    def _term(self) -> Term:
        token = self._next()
        if token == "?":
            self._markers += 1
            return Term(self._markers - 1)
        if token.startswith("'"):
            return Term(None, token[1:-1])
        return Term(None, None if token.lower() == "null" else int(token))

    def _names(self) -> list[str]:
        names = [self._next()]
        while self._take(","):
            names.append(self._next())
        return names

    def _next(self) -> str:
        self._at += 1
        return str(self._tokens[self._at - 1])

    def _take(self, *words: str) -> bool:
        """Whether *words* come next; they are passed then."""
        some = self._tokens[self._at : self._at + len(words)]
        if [each.upper() for each in some] != [each.upper() for each in words]:
            return False
        self._at += len(words)
        return True

    def _must(self, *words: str) -> None:
        if not self._take(*words):
            raise NotImplementedError(f"{words} at {self._tokens[self._at :]}: {self._cql}")


def holds(condition: Condition, row: Mapping[str, Any], values: Sequence[Any]) -> bool:
    """Whether *row* satisfies the condition of a compare-and-set; columns may be missing."""
    standing, wanted = row.get(condition.columns[0]), condition.terms[0].of(values)
    if condition.operator == "=":
        return bool(standing == wanted)
    if condition.operator == "<":
        return standing is not None and bool(standing < wanted)
    raise NotImplementedError(condition.operator)
