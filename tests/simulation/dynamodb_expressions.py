"""The expressions of DynamoDB that the adapter uses, evaluated; any other raises."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import eq, ge, gt, le, lt
from typing import Any, Final

#: An item as the API has it: values by attribute, each under the letter of its type.
Encoded = Mapping[str, Mapping[str, Any]]
Condition = Callable[[Encoded, Encoded], bool]

_TOKEN: Final = re.compile(r"\s*(:?\w+|<=|>=|[=<>(),])")
_COMPARES: Final = {"=": eq, "<": lt, "<=": le, ">": gt, ">=": ge}


class InvalidError(Exception):
    """DynamoDB would refuse the expression."""


def _tokens(text: str) -> list[str]:
    found, at = [], 0
    while at < len(text.rstrip()):
        match = _TOKEN.match(text, at)
        if match is None:
            raise NotImplementedError(f"in the expression {text!r}: {text[at:]!r}")
        found.append(match[1])
        at = match.end()
    return found


def of_type(value: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the type of a value, and its Python value."""
    ((kind, it),) = value.items()
    if kind not in ("B", "S", "N", "BOOL"):
        raise NotImplementedError(f"a value of type {kind}")
    return kind, int(it) if kind == "N" else it


def _compared(
    name: str, compare: Callable[[Any, Any], bool], operand: str, item: Encoded, values: Encoded
) -> bool:
    if name not in item:
        return False
    (kind, value), (other_kind, other) = of_type(item[name]), of_type(values[operand])
    return kind == other_kind and compare(value, other)


class _Parser:
    """Reads a condition: comparisons with values, functions, AND, OR and parentheses."""

    def __init__(self, text: str) -> None:
        self._left = _tokens(text)
        #: Each comparison: the attribute, the operator and the values.
        self.compares: list[tuple[str, ...]] = []

    def whole(self) -> Condition:
        found = self._any()
        if self._left:
            raise NotImplementedError(f"in a condition: {self._left}")
        return found

    def _next(self, *wanted: str) -> str:
        token = self._left.pop(0) if self._left else ""
        if wanted and token not in wanted:
            raise NotImplementedError(f"in a condition: {token!r} in place of {wanted}")
        return token

    def _any(self) -> Condition:
        parts = [self._all()]
        while self._left[:1] == ["OR"]:
            self._next()
            parts.append(self._all())
        return lambda item, values: any(each(item, values) for each in parts)

    def _all(self) -> Condition:
        parts = [self._one()]
        while self._left[:1] == ["AND"]:
            self._next()
            parts.append(self._one())
        return lambda item, values: all(each(item, values) for each in parts)

    def _one(self) -> Condition:
        token = self._next()
        if token == "(":
            inner = self._any()
            self._next(")")
            return inner
        if token in ("attribute_exists", "attribute_not_exists"):
            self._next("(")
            name, wanted = self._next(), token == "attribute_exists"
            self._next(")")
            return lambda item, _: (name in item) is wanted
        if token == "begins_with":
            self._next("(")
            name, _, operand, _ = (self._next() for _ in range(4))
            self.compares.append((name, token, operand))
            return lambda item, values: _compared(name, bytes.startswith, operand, item, values)
        operator = self._next(*_COMPARES, "BETWEEN")
        if operator == "BETWEEN":
            low, _, high = self._next(), self._next("AND"), self._next()
            self.compares.append((token, operator, low, high))
            return lambda item, values: (
                _compared(token, ge, low, item, values) and _compared(token, le, high, item, values)
            )
        compare, operand = _COMPARES[operator], self._next()
        self.compares.append((token, operator, operand))
        return lambda item, values: _compared(token, compare, operand, item, values)


@lru_cache
def condition(text: str) -> Condition:
    """Return the condition of *text*: a predicate of an item, empty if missing, and its values."""
    return _Parser(text).whole()


@lru_cache
def key_condition(text: str) -> tuple[Condition, str, Sequence[str]]:
    """Return a query's condition: the partition's name, and the bound of its sort key, if any."""
    parser = _Parser(text)
    whole = parser.whole()
    (name, operator, operand), *sorts = parser.compares
    if (name, operator) != ("pk", "=") or [each[0] for each in sorts] not in ([], ["sk"]):
        raise NotImplementedError(f"the query {text!r}")
    return whole, operand, sorts[0][1:] if sorts else ()


@lru_cache
def _changes(text: str) -> Sequence[tuple[str, str, str]]:
    """Return the changes of an UpdateExpression: (SET or ADD, attribute, value)."""
    found, verb, left = [], "", _tokens(text)
    while left:
        if left[0] in ("SET", "ADD"):
            verb = left.pop(0)
        elif left[0] == ",":
            left.pop(0)
        elif verb == "SET" and left[1] == "=":
            found.append((verb, left[0], left[2]))
            del left[:3]
        elif verb == "ADD":
            found.append((verb, left[0], left[1]))
            del left[:2]
        else:
            raise NotImplementedError(f"the update {text!r}")
    return found


def updated(text: str, item: Encoded, values: Encoded) -> Encoded:
    """Return *item* after the update *text*."""
    made = dict(item)
    for verb, name, operand in _changes(text):
        if name in ("pk", "sk"):
            raise InvalidError(f"Cannot update attribute {name}. This attribute is part of the key")
        made[name] = values[operand]
        if verb == "ADD":
            before = of_type(item.get(name, {"N": "0"}))[1]
            made[name] = {"N": str(before + of_type(values[operand])[1])}
    return made


def check_values(values: Encoded, *texts: str) -> None:
    """Raise InvalidError unless the expressions use exactly *values*."""
    used = {each for text in texts for each in _tokens(text) if each.startswith(":")}
    if used != values.keys():
        raise InvalidError(f"values given: {sorted(values)}; used: {sorted(used)}")
