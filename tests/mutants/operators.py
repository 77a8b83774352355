"""Draw one-line faults from the source of a module, by operators that know this service's mistakes.

A fault replaces one piece of text. It is identified by file, function, operator and text, not by
line number, so that it stays the same fault when the lines around it change.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

#: Statements that only log, measure or trace, and pieces of text for people.
_MEASURES: Final = re.compile(
    r"\b_?(log|logger|logging|metrics|tally|telemetry|tracer|warnings|report|note_incident)\b"
    r"|\.(observe|inc|labels|debug|info|warning|error|exception|set_name|ended|counted)\("
    r"|perf_counter|__slots__|NotImplemented|isEnabledFor"
)
_SQL: Final = re.compile(
    r"\b(SELECT|INSERT|UPDATE|DELETE|WHERE|PRAGMA|BEGIN|USING TIMESTAMP|SET|AND|ORDER BY|LIMIT|"
    r"COMMIT|IF NOT EXISTS|ON CONFLICT)\b"
)
_LOCK: Final = re.compile(
    r"lock|mutex|semaphore|_setting|_turn|transaction|guard|condition|_measuring|_beginning|creation|_taking",
    re.I,
)
_CACHE: Final = re.compile(
    r"cache|known|marked|memory|\blive\b|lane|_seen|gone|hot|recent|_ids\b|ids\b|_entries|settled"
    r"|statements|forget|remember|_head",
    re.I,
)
_PUT: Final = re.compile(
    r"\.?_?(put\w*|set\w*|remember|forget\w*|note\w*|learn|invalidate|evict|pop\w*|clear|discard"
    r"|add|update|increment|guard|expect|setdefault|commit|rollback|delete\w*|store\w*)$"
)
_DURABLE: Final = re.compile(
    r"\.?_?(fsync|flush\w*|commit|sync\w*|fdatasync|checkpoint|_checkpoint|rewrite|save\w*|persist\w*)$"
)
_OPPOSITE: Final = {
    ast.Eq: "!=", ast.NotEq: "==", ast.Lt: ">=", ast.LtE: ">", ast.Gt: "<=", ast.GtE: "<",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_BY_ONE: Final = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
#: Faults in the text of a statement for a database: operator, pattern, replacement.
_TEXTS: Final[tuple[tuple[str, str, str], ...]] = (
    ("boundary", r"(?<![<>=!-])<=(?!>)", "<"),
    ("boundary", r"(?<![<>=!])>=", ">"),
    ("boundary", r"(?<![<>=!])<(?![=><])", "<="),
    ("boundary", r"(?<![<>=!-])>(?![=>])", ">="),
    ("comparison", r"\bIS NOT NULL\b", "IS NULL"),
    ("comparison", r"\bNOT EXISTS \(", "EXISTS ("),
    ("comparison", r"(?<!NOT )\bEXISTS \(", "NOT EXISTS ("),
    ("comparison", r"\bDESC\b", "ASC"),
    ("comparison", r"(?<=[a-z_]) <> ", " = "),
    ("stamp", r"\bgreatest\(", "least("),
    ("stamp", r"\bleast\(", "greatest("),
    ("stamp", r"\bmax\(", "min("),
    ("stamp", r"\bmin\(", "max("),
    ("lock", r" FOR (UPDATE|SHARE|NO KEY UPDATE)\b", ""),
    ("lock", r"\bpg_advisory_xact_lock_shared\(", "int8("),
    ("lock", r"\bBEGIN IMMEDIATE\b", "BEGIN"),
    ("consistency", r"\bOR IGNORE\b", "OR REPLACE"),
    ("consistency", r" ON CONFLICT (\([a-z_, ]*\) )?DO NOTHING", ""),
    ("consistency", r" IF NOT EXISTS(?! \{)", ""),
    ("durability", r"\bsynchronous = FULL\b", "synchronous = OFF"),
    ("durability", r"\bjournal_mode = WAL\b", "journal_mode = MEMORY"),
    ("durability", r"PERFORM wait_as_a_write\(\);", "NULL;"),
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: in *function* of *path*, the *nth* piece of text *old* becomes *new*."""

    path: str
    function: str
    operator: str
    old: str
    new: str
    nth: int
    #: Its place in the file of now.
    begin: int
    end: int
    line: int

    @property
    def id(self) -> str:
        key = "\0".join(
            (self.path, self.function, self.operator, self.old, self.new, str(self.nth))
        )
        return hashlib.sha256(key.encode()).hexdigest()[:10]

    def plant(self, text: str) -> str:
        """Return the *text* of the file with the fault."""
        return text[: self.begin] + self.new + text[self.end :]


#: Operator, begin, end, and replacement.
_Fault = tuple[str, int, int, str]


class _Module:
    """The source of one module, by offsets."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._lines = [line.encode() for line in text.splitlines(keepends=True)]
        self._starts = [0]
        for line in text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self._at(node.lineno, node.col_offset),
            self._at(node.end_lineno, node.end_col_offset),
        )

    def _at(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1][:column].decode())

    def of(self, node: ast.AST) -> str:
        begin, end = self.span(node)
        return self.text[begin:end]

    def line_of(self, offset: int) -> int:
        return self.text.count("\n", 0, offset) + 1


def mutants_of(root: Path, path: str) -> list[Mutant]:
    """Return all faults of the file *path* below *root*."""
    text = (root / path).read_text("utf-8")
    found = _of_sql(text) if path.endswith(".sql") else _of_python(text)
    seen: Counter[tuple[str, ...]] = Counter()
    mutants = []
    # Two operators may make the same fault: it is that of the special one.
    by_place = {(*each[1][1:], each[0]): each for each in sorted(found, key=_is_special)}
    for _, (function, (operator, begin, end, new)) in sorted(by_place.items()):
        old = text[begin:end]
        key = (function, operator, old, new)
        line = text.count("\n", 0, begin) + 1
        mutants.append(Mutant(path, function, operator, old, new, seen[key], begin, end, line))
        seen[key] += 1
    return mutants


def _is_special(found: tuple[str, _Fault]) -> tuple[bool, str]:
    return found[1][0] not in ("swap", "step"), found[1][0]


def _of_sql(text: str) -> Iterator[tuple[str, _Fault]]:
    for part in re.finditer(r"CREATE FUNCTION (\w+).*?(?=\nCREATE FUNCTION|\Z)", text, re.DOTALL):
        body = re.sub(r"--.*", lambda comment: " " * len(comment[0]), part[0])
        for fault in _in_text(body, part.start()):
            yield part[1], fault


def _in_text(text: str, offset: int) -> Iterator[_Fault]:
    for operator, pattern, new in _TEXTS:
        for match in re.finditer(pattern, text):
            yield operator, offset + match.start(), offset + match.end(), new


def _of_python(text: str) -> Iterator[tuple[str, _Fault]]:
    module = _Module(text)
    tree = ast.parse(text)
    for statement in tree.body:
        # Only constants with text for a database.
        if isinstance(statement, ast.AnnAssign | ast.Assign) and statement.value is not None:
            target = statement.target if isinstance(statement, ast.AnnAssign) else None
            if isinstance(target, ast.Name):
                for fault in _texts(module, statement.value):
                    yield target.id, fault
    for name, function in _functions(tree, ""):
        for operator in _OPERATORS:
            for fault in operator(module, function):
                yield name, fault


_Function = ast.FunctionDef | ast.AsyncFunctionDef
_PASSIVE: Final = (ast.Raise, ast.Import, ast.ImportFrom, ast.Assert, ast.Global, ast.Nonlocal)


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, _Function]]:
    """Yield each function that is not within another one, with its qualified name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, _Function) and child.name not in ("__repr__", "__str__"):
            yield f"{prefix}{child.name}", child


def _walk(module: _Module, function: _Function) -> Iterator[ast.AST]:
    """Walk the effective code of a function: no annotations, messages, measurements or
    invariants."""
    todo: list[ast.AST] = list(function.body)
    while todo:
        node = todo.pop()
        if isinstance(node, _PASSIVE):
            continue
        if isinstance(node, ast.Expr):
            text = module.of(node)
            if isinstance(node.value, ast.Constant) or text.startswith("invariant("):
                continue
            if _MEASURES.search(text):
                continue
        if isinstance(node, ast.Call):
            name = module.of(node.func)
            if name.endswith(("Error", "invariant")) or _MEASURES.search(f"{name}("):
                continue
        yield node
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "args") and not isinstance(
                node, ast.Call
            ):
                continue
            values = value if isinstance(value, list) else [value]
            todo += [each for each in values if isinstance(each, ast.AST)]


def _blocks(module: _Module, function: _Function) -> Iterator[list[ast.stmt]]:
    for node in [function, *_walk(module, function)]:
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                yield block


def _comparisons(module: _Module, function: _Function) -> Iterator[_Fault]:
    for node in _walk(module, function):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            begin, end = module.span(node)
            left, right = _operand(module, node.left), _operand(module, node.comparators[0])
            opposite = _OPPOSITE[type(node.ops[0])]
            yield "comparison", begin, end, f"{left} {opposite} {right}"
            by_one = _BY_ONE.get(type(node.ops[0]))
            if by_one and not _MEASURES.search(module.text[begin:end]):
                yield "boundary", begin, end, f"{left} {by_one} {right}"
        elif isinstance(node, ast.If | ast.While) and not isinstance(node.test, ast.Compare):
            begin, end = module.span(node.test)
            text = module.text[begin:end]
            if isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not):
                yield "comparison", begin, end, _operand(module, node.test.operand)
            elif not isinstance(node.test, ast.BoolOp) and text not in ("TYPE_CHECKING", "True"):
                yield "comparison", begin, end, f"not ({text})"
        elif isinstance(node, ast.BoolOp):
            texts = [_operand(module, each) for each in node.values]
            for dropped in range(len(texts)):
                rest = [each for at, each in enumerate(texts) if at != dropped]
                word = " and " if isinstance(node.op, ast.And) else " or "
                begin, end = module.span(node)
                yield "comparison", begin, end, f"({word.join(rest)})"


def _operand(module: _Module, node: ast.expr) -> str:
    text = module.of(node)
    return f"({text})" if isinstance(node, ast.NamedExpr | ast.BoolOp | ast.IfExp) else text


def _by_one(module: _Module, function: _Function) -> Iterator[_Fault]:
    for node in _walk(module, function):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            if isinstance(node.right, ast.Constant) and node.right.value == 1:
                begin, end = module.span(node)
                yield "boundary", begin, end, module.of(node.left)
        elif isinstance(node, ast.Slice):
            for bound in (node.lower, node.upper):
                if bound is not None:
                    begin, end = module.span(bound)
                    yield "boundary", begin, end, f"{module.of(bound)} + 1"


def _awaits(module: _Module, function: _Function) -> Iterator[_Fault]:
    """An awaited call goes on by itself."""
    for node in _walk(module, function):
        if isinstance(node, ast.Expr):
            begin, end = module.span(node)
            if isinstance(node.value, ast.Await):
                awaited = module.of(node.value.value)
                if not awaited.startswith("asyncio.sleep"):
                    yield "await", begin, end, f'__import__("asyncio").ensure_future({awaited})'
            elif isinstance(node.value, ast.Call) and module.of(node.value.func).endswith(
                (".join", ".wait", ".result")
            ):
                yield "await", begin, end, "pass"


def _steps(module: _Module, function: _Function) -> Iterator[_Fault]:
    """Two steps are swapped; or one is left out."""
    for block in _blocks(module, function):
        for first, second in pairwise(block):
            made = _names(first, ast.Store) & _names(second, ast.Load)
            makes = _names(second, ast.Store) & _names(first, ast.Load, ast.Store)
            # Neighbours of which none asks another object for something are in no order.
            # Nor those between which no other task can run.
            both = [*ast.walk(first), *ast.walk(second)]
            awaits = any(isinstance(each, ast.Await) for each in both)
            ordered = awaits or isinstance(function, ast.FunctionDef)
            acts = ordered and _acts(first) and _acts(second) and function.name != "__init__"
            if acts and _is_step(module, first) and _is_step(module, second) and not made | makes:
                yield "swap", *_swapped(module, first, second)
        for step in block:
            if isinstance(step, ast.Expr) and isinstance(step.value, ast.Await | ast.Call):
                text = module.of(step)
                called = step.value.value if isinstance(step.value, ast.Await) else step.value
                name = module.of(called.func) if isinstance(called, ast.Call) else ""
                skip = name.startswith(("asyncio.sleep", "invariant", "super().__init__"))
                if not skip and not _MEASURES.search(text):
                    begin, end = module.span(step)
                    yield _class_of(name, text), begin, end, "pass"


def _swapped(module: _Module, first: ast.stmt, second: ast.stmt) -> tuple[int, int, str]:
    (begin, end), (after, until) = module.span(first), module.span(second)
    text = module.text
    return begin, until, text[after:until] + text[end:after] + text[begin:end]


def _class_of(name: str, text: str) -> str:
    if _DURABLE.search(name) and not _CACHE.search(name):
        return "durability"
    if _CACHE.search(name) and _PUT.search(name):
        return "cache"
    if re.search(r"\b(acquire|release|begin)$", name):
        return "lock"
    return "step"


def _is_step(module: _Module, node: ast.stmt) -> bool:
    """Whether it does something that another step could depend on."""
    if _MEASURES.search(module.of(node)):
        return False
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Await | ast.Call)
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        if node.value is None:
            return False
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        effect = any(isinstance(each, ast.Attribute | ast.Subscript) for each in targets)
        calls = any(isinstance(each, ast.Await | ast.Call) for each in ast.walk(node.value))
        return effect or calls
    return False


def _acts(node: ast.stmt) -> bool:
    """Whether it awaits, calls a method, or changes shared state."""
    return isinstance(node, ast.AugAssign) or any(
        isinstance(each, ast.Await)
        or (isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute))
        or (isinstance(each, ast.Attribute | ast.Subscript) and isinstance(each.ctx, ast.Store))
        for each in ast.walk(node)
    )


def _names(node: ast.AST, *contexts: type) -> set[str]:
    return {
        each.id
        for each in ast.walk(node)
        if isinstance(each, ast.Name) and isinstance(each.ctx, contexts)
    }


def _locks(module: _Module, function: _Function) -> Iterator[_Fault]:
    for node in _walk(module, function):
        if isinstance(node, ast.With | ast.AsyncWith) and len(node.items) == 1:
            item = node.items[0]
            if item.optional_vars is None and _LOCK.search(module.of(item.context_expr)):
                begin, _ = module.span(node)
                _, end = module.span(item.context_expr)
                yield "lock", begin, end, "if True"


def _stamps(module: _Module, function: _Function) -> Iterator[_Fault]:
    arguments = [*function.args.args, *function.args.kwonlyargs]
    names = [each.arg for each in arguments if each.arg.endswith("_us")]
    for node in _walk(module, function):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("now_us", "boottime_us"):
            begin, end = module.span(node)
            yield "stamp", begin, end, f"{module.of(node)} - 1_000_000"
        for value in [*node.args, *(each.value for each in node.keywords)]:
            if isinstance(value, ast.Name | ast.Attribute) and module.of(value).endswith("_us"):
                begin, end = module.span(value)
                text = module.of(value)
                other = next((each for each in names if each != text), None)
                yield "stamp", begin, end, other or f"{text} + 1_000_000"


#: Names for weaker requests to a store, by the stronger ones.
_WEAKER: Final = {
    "write_consistency": "is_spread.__int__()",
    "read_consistency": "is_spread.__int__()",
    "to_settle": "to_read",
    "to_compare": "to_write",
    "_fold_spans_as_of_one_commit": "_folding",
    "SERIAL": "ONE",
    "LOCAL_SERIAL": "ONE",
    "QUORUM": "ONE",
    "LOCAL_QUORUM": "ONE",
    "ALL": "ONE",
}


def _consistency(module: _Module, function: _Function) -> Iterator[_Fault]:
    for node in _walk(module, function):
        if isinstance(node, ast.Attribute) and node.attr in _WEAKER:
            if isinstance(node.ctx, ast.Load):
                begin, end = module.span(node)
                value = module.of(node.value)
                new = "1" if node.attr.endswith("_consistency") else f"{value}.{_WEAKER[node.attr]}"
                yield "consistency", begin, end, new
        elif (
            isinstance(node, ast.keyword)
            and node.arg in ("idempotent", "accurate", "durable")
            and isinstance(node.value, ast.Constant)
        ):
            yield "consistency", *module.span(node.value), str(not node.value.value)


def _caches(module: _Module, function: _Function) -> Iterator[_Fault]:
    """A cache is written before the step that comes before, or not at all."""
    for block in _blocks(module, function):
        for before, node in zip([None, *block], block, strict=False):
            if not _writes_cache(module, function, node):
                continue
            if not isinstance(node, ast.Expr):
                yield "cache", *module.span(node), "pass"
            if before is None or isinstance(before, ast.Return | ast.Raise) or _is_text(before):
                continue
            if not _names(before, ast.Store) & _names(node, ast.Load):
                yield "cache", *_swapped(module, before, node)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _writes_cache(module: _Module, function: _Function, node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr):
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        name = module.of(call.func) if isinstance(call, ast.Call) else ""
        return bool(_CACHE.search(name) and _PUT.search(name))
    if not isinstance(node, ast.Assign | ast.AugAssign) or function.name == "__init__":
        return False
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    kept = [each for each in targets if isinstance(each, ast.Attribute | ast.Subscript)]
    return any(_CACHE.search(module.of(each)) for each in kept)


def _texts(module: _Module, node: ast.AST) -> Iterator[_Fault]:
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            begin, end = module.span(each)
            text = module.text[begin:end]
            if _SQL.search(text) and text[:1] in "\"'f":
                yield from _in_text(text, begin)


def _texts_in(module: _Module, function: _Function) -> Iterator[_Fault]:
    for node in _walk(module, function):
        if isinstance(node, ast.Constant | ast.JoinedStr):
            yield from _texts(module, node)


_OPERATORS: Final[tuple[Callable[[_Module, _Function], Iterator[_Fault]], ...]] = (
    _comparisons, _by_one, _awaits, _steps, _locks, _stamps, _consistency, _caches, _texts_in,
)  # fmt: skip
