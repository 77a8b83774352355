"""The examples of docs/how-to/size-it.md are computed again, with the bounds that the code has."""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import pytest

from counter import limits
from counter.config.settings import Settings
from counter.windows import closing_lag
from tests.support.documents import page

PAGE: Final = page("how-to/size-it.md")
_OPERATIONS: Final[Mapping[type[ast.operator], Callable[[float, float], float]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
#: A name, two spaces or more, the arithmetic, and the rounded result with its unit.
_LINE: Final = re.compile(r"^(\S.*?) {2,}(\S.*?) += ([\d,.]+)(?: \S+)?$")


def computed(node: ast.expr) -> float:
    """The value of sums, products and minima of numbers."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATIONS[type(op)](computed(left), computed(right))
        case ast.Call(func=ast.Name(id="min"), args=[one, other]):
            return min(computed(one), computed(other))
    raise ValueError(f"{ast.unparse(node)} is no arithmetic")


def agrees(line: str) -> bool:
    """Whether the result of *line* is that of its arithmetic, in the digits that are shown."""
    found = _LINE.match(line)
    assert found, line
    arithmetic, result = (re.sub(r"(?<=\d),(?=\d{3})", "", found[each]) for each in (2, 3))
    number = computed(ast.parse(re.sub(r"(\d+)%", r"(\1 / 100)", arithmetic), mode="eval").body)
    return round(number, len(result.partition(".")[2])) == float(result)


BLOCKS: Final = re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)

#: What the page calculates with: the defaults of Cassandra.
CLUSTER: dict[str, Any] = {"clock_skew_max": "500ms", "write_timeout": "2s"}


@pytest.mark.parametrize("line", [line for block in BLOCKS for line in block.splitlines()])
def test_each_example_is_computed_right(line: str) -> None:
    assert agrees(line)


def test_a_wrong_result_is_found() -> None:
    assert agrees("nodes  min(2,000 * 10, 7) / 70%  = 10.0")
    assert not agrees("nodes  min(2,000 * 10, 7) / 70%  = 10.1")


def test_the_examples_have_the_bounds_of_the_code() -> None:
    have = Settings(shards=16, **CLUSTER)
    dataset, namespace = have.dataset(), have.default_namespace()
    lag_us = namespace.accept_limit_us + closing_lag(dataset)
    remembered_us = 2 * (namespace.future_limit_us + lag_us)
    assert f"here {remembered_us // limits.SECOND} s" in PAGE
    assert f"{namespace.shards} shards of a namespace" in PAGE
    assert f"at most {limits.SHARDS_MAX:,}" in PAGE
    assert f"{limits.LEASE_SLOTS} workers, the most" in PAGE
    assert f"once a window ({namespace.rollup_window_us // limits.SECOND} s)" in PAGE
    assert dataset.retention_us + dataset.slice_us == (7 + 1) * limits.DAY
