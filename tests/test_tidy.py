"""House style, enforced: which way imports go, how long things get, what shipped code never does.

Each rule is a function from a parsed source to violations, so that the last test can plant one of
each and see it caught.
"""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.store_folders import owner_of

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("counter", "counter_client", "rollup", "api")
#: Packages that are distributions of their own, by the folder that is on the path.
FOLDERS = {"counter_client": "clients/python"}
SHIPPED = tuple(f"{FOLDERS.get(each, '.')}/{each}".removeprefix("./") for each in PACKAGES)
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 800
MODULES_MAX = 15
PRINTS = "counter/cli/terminal.py"
#: The modules that hold the application of the command line.
COMMAND_LINE = "counter/cli/app.py"
#: The one module besides the stores that may use a driver, and only the standard library's: what a
#: client keeps on its own disk.
SPOOL = "clients/python/counter_client/spool.py"

FRAMEWORKS = ("fastapi", "starlette", "uvicorn")
DRIVERS = (
    *("sqlite3", "_sqlite3", "aiobotocore", "asyncpg", "botocore", "cassandra", "hiredis"),
    *("pymemcache", "redis"),
)
#: The suites for pytest that are shipped. No other room imports them.
SUITES = "counter/testing/"
#: Which rooms the modules of a room may import, besides each other: a room is a folder, and one
#: that ends in "." and a module's name is that module alone. Imports go down only.
ROOMS: Mapping[str, tuple[str, ...]] = {
    "counter": (),
    # It knows nothing of the server.
    "counter_client": (),
    "counter/core": ("counter",),
    "counter/config": ("counter", "counter/core"),
    "counter/telemetry": ("counter", "counter/core", "counter/config"),
    "counter/security": ("counter", "counter/core", "counter/telemetry"),
    "counter/storage/shared": ("counter",),
    "counter/storage/memory": ("counter",),
    "counter/storage/memcached": ("counter", "counter/storage/shared"),
    "counter/storage/redis": ("counter", "counter/storage/shared"),
    "counter/storage": (
        *("counter", "counter/core", "counter/config", "counter/storage/shared"),
        *("counter/storage/memory", "counter/storage/memcached", "counter/storage/redis"),
    ),
    "counter/storage/sqlite": (
        *("counter", "counter/config", "counter/telemetry", "counter/storage/shared"),
        "counter/storage/memory",
    ),
    "counter/storage/cassandra": (
        *("counter", "counter/core", "counter/config", "counter/telemetry"),
        *("counter/storage", "counter/storage/shared"),
    ),
    "counter/storage/postgresql": (
        *("counter", "counter/config", "counter/storage", "counter/storage/shared"),
    ),
    "counter/storage/dynamodb": (
        *("counter", "counter/config", "counter/storage", "counter/storage/shared"),
    ),
    "counter/ops": (
        *("counter", "counter_client", "counter/core", "counter/config", "counter/storage"),
        "counter/storage/shared",
    ),
    "counter/cli": ("counter", "counter_client", "counter/config", "counter/telemetry"),
    "rollup": (
        *("counter", "counter/core", "counter/config", "counter/telemetry", "counter/security"),
        *("counter/ops", "counter/storage", "counter/storage/shared"),
    ),
    "api/http": ("counter", "counter/core", "counter/telemetry", "counter/security"),
    "api/console": ("counter", "api/http"),
    "api/document": ("counter", "counter/core", "api/http"),
    "api/telemetry": (
        *("counter", "counter/core", "counter/telemetry", "counter/security", "rollup"),
        "api/http",
    ),
    "api/routes": (
        *("counter", "counter/core", "counter/config", "counter/security", "rollup", "api/http"),
        *("api/console", "api/document", "api/telemetry"),
    ),
    "api/server": ("counter", "counter/config", "api/http"),
    "api/fastlane": ("counter", "counter/core", "api/http", "api/server"),
    "api": (
        *("counter", "counter/core", "counter/config", "counter/telemetry", "counter/security"),
        *("counter/storage", "counter/storage/shared", "rollup"),
        *("api/http", "api/routes", "api/telemetry", "api/server", "api/fastlane"),
    ),
    "counter/cli/commands": (
        *("counter", "counter_client", "counter/core", "counter/config", "counter/telemetry"),
        *("counter/security", "counter/ops", "counter/storage", "counter/storage/shared"),
        *("counter/storage/memory", "counter/cli", "rollup", "api"),
    ),
    # In the list of no other room: nothing that serves needs pytest.
    "counter/testing": (
        *("counter", "counter/core", "counter/security", "counter/ops", "counter/storage/shared"),
        *("counter/storage/memory", "rollup", "api/routes"),
    ),
}
#: What carries the promise, in the order of docs/architecture.md.
PROMISE = (
    *("counter/types.py", "counter/ports.py", "counter/windows.py", "counter/bounds.py"),
    *("counter/tokens.py", "counter/core/service.py", "counter/core/adds.py"),
    *("counter/core/gather.py", "counter/core/write.py", "counter/core/read.py"),
    *("counter/core/resolve.py", "counter/core/key_times.py", "counter/core/results.py"),
    *("counter/holds.py", "counter/core/holds.py", "counter/core/namespaces.py"),
    *("counter/core/clock_guard.py", "counter/storage/memory/"),
)
#: These of the core decide only what is not begun.
PROMISE_BESIDE = ("counter/core/admission.py", "counter/core/rate_limits.py")
PROMISE_IMPORTS = (
    *("counter.errors", "counter.limits", "counter.clock", "counter.metrics", "counter.api_keys"),
    *("counter.capabilities", "counter.core.admission", "counter.core.rate_limits"),
)
PROMISE_LINES_MAX = 5_550
ENTRIES = ("counter/__main__.py", "rollup/__main__.py")

MUTABLE_LITERALS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MUTABLE_TYPES = "list dict set bytearray defaultdict deque OrderedDict Counter WeakValueDictionary"
SYNC_TYPES = "Lock RLock Condition Event Semaphore Queue SimpleQueue LifoQueue PriorityQueue local"
READ_ONLY_TYPES = ("Mapping", "Sequence", "Collection", "Iterable", "AbstractSet")
#: Write returns, reports, again, no client, the caller, exists.
UNPLAIN = re.compile(
    # "nobody" alone is a user of Unix.
    r'(?<![a-z])(told|tells|anew|(?<!")nobody|whoever|whom|stands)(?![a-z])',
    re.IGNORECASE,
)
#: A reference of a docstring.
REFERENCE = re.compile(r":(?:class|meth|func|mod|data|attr):`~?([\w.]+)`")
UNFINISHED = re.compile(r"\b(TO[D]O|FIX[M]E|XX[X])\b")


@dataclass(frozen=True, slots=True)
class Source:
    """One file: its path from the root with forward slashes, and its text."""

    path: str
    text: str

    @property
    def package(self) -> str:
        return self.path.split("/", 1)[0]

    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    def at(self, line: int, message: str) -> str:
        return f"{self.path}:{line}: {message}"


Rule = Callable[[Source], Iterator[str]]


@cache
def sources(*folders: str, suffix: str = ".py") -> tuple[Source, ...]:
    paths = (path for folder in folders for path in sorted((ROOT / folder).rglob(f"*{suffix}")))
    return tuple(
        Source(
            path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8", errors="replace")
        )
        for path in paths
        if path.is_file()
        and path.suffix != ".png"
        and not {"__pycache__", "node_modules"}.intersection(path.parts)
    )


def shipped() -> tuple[Source, ...]:
    return sources(*SHIPPED)


def all_python() -> tuple[Source, ...]:
    return sources(*SHIPPED, "tests", "benchmarks", "scripts")


def top_documents() -> tuple[Source, ...]:
    return tuple(Source(path.name, path.read_text(encoding="utf-8")) for path in ROOT.glob("*.md"))


def violations(rule: Rule, found: tuple[Source, ...]) -> str:
    return "\n".join(message for source in found for message in rule(source))


def must_hold(rule: Rule, found: tuple[Source, ...]) -> None:
    """Fail with every violation, a line each, and no trace: the trace would show this file."""
    if broken := violations(rule, found):
        pytest.fail(broken, pytrace=False)


def imports(source: Source) -> Iterator[tuple[int, str, bool]]:
    """Yield line, dotted name and whether it runs late (inside a function), for every import."""

    def visit(node: ast.AST, late: bool) -> Iterator[tuple[int, str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((child.lineno, alias.name, late) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                prefix = "." * child.level + (child.module or "")
                yield from ((child.lineno, f"{prefix}.{name.name}", late) for name in child.names)
            else:
                is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                yield from visit(child, late or is_function)

    return visit(source.tree(), late=False)


def is_in(name: str, modules: tuple[str, ...]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def path_of(name: str) -> Path:
    """The path of the package, or of the module without its suffix, of the dotted *name*."""
    return ROOT / FOLDERS.get(name.partition(".")[0], ".") / name.replace(".", "/")


def name_of(source: Source) -> str:
    """The dotted name of the module *source*."""
    path = source.path.removesuffix(".py").removesuffix("/__init__")
    return path.removeprefix("clients/python/").replace("/", ".")


def room_of(name: str) -> str:
    """The room of the module or package *name*; for a name in a module, that of the module."""
    while not path_of(name).is_dir():
        name = name.rpartition(".")[0]
    return name.replace(".", "/")


def module_of(name: str) -> str:
    """The module that *name* is, or is in."""
    while "." in name:
        path = path_of(name)
        if path.is_dir() or path.with_suffix(".py").is_file():
            return name
        name = name.rpartition(".")[0]
    return name


def imports_the_wrong_room(source: Source) -> Iterator[str]:
    room = Path(source.path).parent.as_posix().removeprefix("clients/python/")
    allowed = ROOMS.get(room)
    if allowed is None:
        yield source.at(1, f"{room} is no room of ROOMS: say there what it may import")
        return
    for line, name, _ in imports(source):
        if not is_in(name, PACKAGES):
            continue
        other, module = room_of(name), module_of(name)
        if other == room or other in allowed or module in allowed or source.path in ENTRIES:
            continue
        yield source.at(line, f"imports {name}; ROOMS lets {room} import {', '.join(allowed)}")


def carries_the_promise(path: str) -> bool:
    return path.startswith(PROMISE)


def imports_beyond_the_promise(source: Source) -> Iterator[str]:
    for line, name, _ in imports(source):
        if not carries_the_promise(source.path) or not is_in(name, PACKAGES):
            continue
        module = module_of(name)
        path = f"{module.replace('.', '/')}{'/' if path_of(module).is_dir() else '.py'}"
        if module not in PROMISE_IMPORTS and not carries_the_promise(path):
            allowed = ", ".join(PROMISE_IMPORTS)
            yield source.at(line, f"imports {name}; what carries the promise imports {allowed}")


def imports_a_framework(source: Source) -> Iterator[str]:
    for line, name, _ in imports(source):
        if source.package != "api" and is_in(name, FRAMEWORKS):
            yield source.at(line, f"imports {name}; only api/ may know a web framework")


def imports_a_driver(source: Source) -> Iterator[str]:
    for line, name, _ in imports(source):
        if source.path == SPOOL and is_in(name, ("sqlite3",)):
            continue
        if is_in(name, DRIVERS) and not source.path.startswith("counter/storage/"):
            yield source.at(line, f"imports {name}; only counter/storage/ may know a driver")


def names_a_store(node: ast.expr) -> bool:
    """Return whether *node* is the name of a store: a variable, an attribute or a key ``store``."""
    match node:
        case ast.Name(id="store") | ast.Attribute(attr="store"):
            return True
        case ast.Subscript(slice=ast.Constant(value="store")):
            return True
    return False


def branches_on_a_store(source: Source) -> Iterator[str]:
    if source.path.startswith("counter/storage/"):
        return
    for node in ast.walk(source.tree()):
        match node:
            case ast.Compare(left=left, comparators=others):
                sides = (left, *others)
                texts = any(
                    isinstance(each, ast.Constant) and isinstance(each.value, str)
                    for side in sides
                    for each in ast.walk(side)
                    if not names_a_store(side)
                )
                branches = texts and any(map(names_a_store, sides))
            case ast.Match(subject=looked) | ast.Subscript(slice=looked):
                branches = names_a_store(looked)
            case _:
                continue
        if branches:
            yield source.at(
                node.lineno,
                "branches on a store's name: ask its kind (counter/config/store_kinds.py)",
            )


def imports_another_store(source: Source) -> Iterator[str]:
    own = owner_of(source.path)
    for line, name, late in imports(source):
        if late and source.package == "benchmarks":
            continue
        # A name of a module or of something in it.
        paths = ("/".join(name.split(".")[:end]) for end in range(2, name.count(".") + 2))
        for path in paths:
            store = owner_of(f"{path}.py") or owner_of(f"{path}/")
            if store not in (own, None):
                yield source.at(line, f"imports {name}, which only the store {store} has")
                break


def circles(found: tuple[Source, ...]) -> list[list[str]]:
    """Every set of modules that import each other, directly or indirectly."""
    graph = {}
    for source in found:
        name = name_of(source)
        graph[name] = {
            module_of(each) for _, each, _ in imports(source) if is_in(each, PACKAGES)
        } - {name}
    order = TopologicalSorter(graph)
    try:
        order.prepare()
    except CycleError as error:
        return [error.args[1]]
    return []


def is_too_long(source: Source) -> Iterator[str]:
    if (lines := len(source.text.splitlines())) > FILE_LINES_MAX:
        yield source.at(lines, f"the file has {lines} lines; at most {FILE_LINES_MAX}")


def has_a_long_function(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree()):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield source.at(
                    node.lineno, f"{node.name} has {lines} lines; at most {FUNCTION_LINES_MAX}"
                )


def asserts(source: Source) -> Iterator[str]:
    if source.path.startswith(SUITES):
        return
    for node in ast.walk(source.tree()):
        if isinstance(node, ast.Assert):
            yield source.at(
                node.lineno, "assert vanishes under python -O; use invariant(condition, message)"
            )


def prints(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree()):
        match node:
            case ast.Call(func=ast.Name(id="print")) if source.path != PRINTS:
                yield source.at(node.lineno, f"print; only {PRINTS} speaks to a terminal")


def called_name(node: ast.expr) -> str:
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name
        case ast.Call(func=ast.Subscript(value=ast.Name(id=name))):
            return name
    return ""


def is_shared_state(name: str, value: ast.expr, annotation: str) -> bool:
    """Tell whether a module-level `name: annotation = value` is state that all importers share.

    Lower-case names bound to an object count too: a constant is upper-case, so this is an instance.
    """
    if name == "__all__" or annotation.removeprefix("Final[").startswith(READ_ONLY_TYPES):
        return False
    if isinstance(value, MUTABLE_LITERALS):
        return True
    made = called_name(value)
    if made in (MUTABLE_TYPES + " " + SYNC_TYPES).split():
        return True
    return bool(made) and name == name.lower() and made not in ("getLogger", "get_logger")


def keeps_state_in_a_module(source: Source) -> Iterator[str]:
    for node in source.tree().body:
        match node:
            case ast.Assign(targets=targets, value=value):
                names, annotation = [ast.unparse(target) for target in targets], ""
            case ast.AnnAssign(target=target, annotation=kind, value=ast.expr() as value):
                names, annotation = [ast.unparse(target)], ast.unparse(kind)
            case _:
                continue
        for name in names:
            is_cli_app = source.path == COMMAND_LINE and called_name(value) == "App"
            if is_shared_state(name, value, annotation) and not is_cli_app:
                yield source.at(
                    node.lineno,
                    f"module-level {name} = {ast.unparse(value)[:40]} is shared by all importers; "
                    "make it an attribute, a tuple, or annotate it Mapping[...] or Sequence[...]",
                )
    for inner in ast.walk(source.tree()):
        if isinstance(inner, ast.Global):
            yield source.at(inner.lineno, f"global {', '.join(inner.names)}: state of a module")


def lacks_a_docstring(source: Source) -> Iterator[str]:
    name = Path(source.path).name
    is_public = not name.startswith("_") or name in ("__init__.py", "__main__.py")
    if is_public and not ast.get_docstring(source.tree()):
        yield source.at(1, "a public module says in a docstring what it is for")


def defined(source: Source) -> set[str]:
    """Return the names that a module defines or imports, those of members and attributes too."""
    found: set[str] = set()
    for node in ast.walk(source.tree()):
        match node:
            case (
                ast.ClassDef(name=name)
                | ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.alias(name=name)
                | ast.Name(id=name)
                | ast.Attribute(attr=name)
            ):
                found.add(name)
    return found


def is_missing(name: str) -> bool:
    """Whether the module of the dotted *name*, or the package, does not have the rest of it."""
    module = module_of(name)
    path, rest = path_of(module), name.removeprefix(module).split(".")[1:]
    if path.is_dir():
        # What a package has is defined elsewhere, with its members.
        path, rest = path / "__init__.py", rest[:1]
    else:
        path = path.with_suffix(".py")
    place = Source(module, path.read_text(encoding="utf-8") if path.is_file() else "")
    return not defined(place).issuperset(rest)


def refers_to_nothing(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.text.splitlines(), start=1):
        for name in REFERENCE.findall(line):
            ours = is_in(name, PACKAGES)
            if is_missing(name) if ours else name.split(".")[0] not in defined(source):
                yield source.at(number, f"{name} is referred to, and does not exist")


def patches_nothing(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree()):
        if isinstance(node, ast.Call) and called_name(node) in ("patch", "setattr") and node.args:
            name = getattr(node.args[0], "value", None)
            if isinstance(name, str) and is_in(name, PACKAGES) and is_missing(name):
                yield source.at(node.lineno, f"{name} is patched, and does not exist")


def is_unfinished(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.text.splitlines(), start=1):
        if found := UNFINISHED.search(line):
            yield source.at(number, f"{found[0]}: finish it, or say in the docs what is open")


def is_not_plain(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.text.splitlines(), start=1):
        if found := UNPLAIN.search(line):
            yield source.at(number, f"{found[0]}: say it in plain technical English")


def names_of_two_classes(found: tuple[Source, ...]) -> dict[str, list[str]]:
    """Return each class name that several modules of one program define, with their paths."""
    paths: defaultdict[tuple[bool, str], list[str]] = defaultdict(list)
    for source in found:
        is_client = source.path.startswith("clients/")
        for node in source.tree().body:
            if isinstance(node, ast.ClassDef):
                paths[is_client, node.name].append(source.path)
    return {name: where for (_, name), where in paths.items() if len(where) > 1}


def names_an_address(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.text.splitlines(), start=1):
        if "://" in line:
            yield source.at(number, f"a lock names packages and hashes, no address: {line.strip()}")


def test_imports_go_down_only() -> None:
    """Each module imports the rooms that ROOMS allows."""
    must_hold(imports_the_wrong_room, shipped())


def test_the_promise_is_read_in_an_afternoon() -> None:
    """The modules that carry it are short, and need few others. The core has only such."""
    must_hold(imports_beyond_the_promise, shipped())
    core = {each.path for each in shipped() if each.path.startswith("counter/core/")}
    assert core <= {*PROMISE, *PROMISE_BESIDE, "counter/core/__init__.py"}
    lines = {
        each.path: len(each.text.splitlines())
        for each in shipped()
        if carries_the_promise(each.path)
    }
    assert all(any(path.startswith(each) for path in lines) for each in PROMISE)
    assert sum(lines.values()) <= PROMISE_LINES_MAX, lines


def test_the_architecture_names_what_carries_the_promise() -> None:
    """It begins with these modules, in reading order."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    first = text.partition("\n## ")[2].partition("\n## ")[0]
    assert tuple(re.findall(r"`(counter/[\w/.]+)`", first)) == PROMISE


def test_rooms_form_no_circle() -> None:
    """ROOMS itself has an order from the bottom to the top."""
    below = {room: {each for each in allowed if each in ROOMS} for room, allowed in ROOMS.items()}
    assert set(TopologicalSorter(below).static_order()) == set(ROOMS)


def rooms_drawn(text: str) -> set[str]:
    """Return the rooms in the tree of folders below *Rooms* in docs/architecture.md."""
    tree = text.partition("\n### Rooms\n")[2].partition("\n## ")[0]
    above: list[str] = []
    drawn = set()
    for line in re.findall(r"^ {4} *[a-z_/]+/(?: .*)?$", tree, re.MULTILINE):
        del above[(len(line) - len(line.lstrip())) // 2 - 2 :]
        # Several rooms may share a line. What follows two spaces says what is in them.
        folders = re.split(" {2,}", line.strip())[0].split()
        drawn |= {"".join((*above, each)).rstrip("/") for each in folders}
        above.append(folders[-1])
    return {each.removeprefix("clients/python/") for each in drawn}


def test_the_architecture_draws_the_rooms() -> None:
    """The tree of folders in docs/architecture.md has the rooms of ROOMS, and no other."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    no_rooms = {f"clients/{each}" for each in ("python", "go", "typescript", "conformance")}
    assert rooms_drawn(text) - no_rooms == {*ROOMS}
    assert "api/http" not in rooms_drawn(text.replace("      http/  ", "      web/   "))


def test_no_modules_import_each_other() -> None:
    """There is no import circle, not even one that only type checkers or functions close."""
    assert circles(shipped()) == []


def test_rooms_stay_small() -> None:
    """No package holds more than MODULES_MAX modules besides __init__ and __main__."""
    sizes = Counter(
        Path(each.path).parent.as_posix()
        for each in shipped()
        if not Path(each.path).name.startswith("__")
    )
    assert {room: size for room, size in sizes.items() if size > MODULES_MAX} == {}


def test_only_the_api_knows_a_web_framework() -> None:
    """Nothing outside api/ imports FastAPI, Starlette or uvicorn."""
    must_hold(imports_a_framework, shipped())


def test_only_storage_knows_a_driver() -> None:
    """Nothing outside counter/storage/ imports a database or cache driver."""
    must_hold(imports_a_driver, shipped())


def test_only_the_stores_know_their_names() -> None:
    """Nothing outside counter/storage/ does one thing for one store and another for the rest."""
    must_hold(branches_on_a_store, shipped())


def test_only_its_own_files_import_a_store() -> None:
    """Without the files of one store (tests/support/store_folders.py) the rest is a program."""
    must_hold(imports_another_store, all_python())


def test_files_stay_small() -> None:
    """No Python file is longer than FILE_LINES_MAX lines."""
    must_hold(is_too_long, all_python())


def test_functions_fit_a_screen() -> None:
    """No function is longer than FUNCTION_LINES_MAX lines, its docstring included."""
    must_hold(has_a_long_function, all_python())


def test_shipped_code_never_asserts() -> None:
    """It states what must never happen with invariant(), which no flag removes: only suites for
    pytest assert."""
    must_hold(asserts, shipped())


def test_only_the_command_line_prints() -> None:
    """Nothing but counter/cli/terminal.py writes to the terminal with print."""
    must_hold(prints, shipped())


def test_modules_keep_no_state() -> None:
    """No shipped module holds a mutable object or an instance at its top level."""
    must_hold(keeps_state_in_a_module, shipped())


def test_public_modules_have_a_docstring() -> None:
    """Every public shipped module, benchmark and script says what it is for."""
    must_hold(lacks_a_docstring, sources(*SHIPPED, "benchmarks", "scripts"))


def test_what_docstrings_refer_to_exists() -> None:
    must_hold(refers_to_nothing, shipped())


def test_what_tests_patch_exists() -> None:
    must_hold(patches_nothing, sources("tests"))


def test_everything_is_in_plain_english() -> None:
    """Python with its names, messages and comments, SQL, shell and documents."""
    python = (each for each in all_python() if each.path != "tests/test_tidy.py")
    scripts = (each for each in sources("scripts", ".ci", suffix="") if "." not in each.path[4:])
    folders = ("docs", "proof", "clients", "deploy", "tests", "benchmarks")
    texts = (*sources(*folders, suffix=".md"), *sources("counter", suffix=".sql"), *top_documents())
    must_hold(is_not_plain, (*python, *scripts, *texts))


def test_a_class_name_has_one_meaning() -> None:
    assert names_of_two_classes(shipped()) == {}


def test_nothing_is_left_unfinished() -> None:
    """No source, script or document holds a note that something is still to be done."""
    others = sources("docs", "scripts", ".ci", suffix="")
    must_hold(is_unfinished, (*all_python(), *others, *top_documents()))


def test_locks_carry_no_address() -> None:
    """The lock files exist and can be installed from any index, because they name none."""
    locks = [ROOT / f"requirements{kind}.lock" for kind in ("", "-bench", "-dev")]
    locks += [*ROOT.glob("clients/*/package-lock.json"), *ROOT.glob("scripts/*/package-lock.json")]
    found = tuple(Source(lock.name, lock.read_text(encoding="utf-8")) for lock in locks)
    must_hold(names_an_address, found)


Cases = list[tuple[Rule, str, str]]


def names(cases: Cases) -> list[str]:
    return [f"{rule.__name__}-{number}" for number, (rule, _, _) in enumerate(cases)]


PLANTED: Cases = [
    (
        imports_the_wrong_room,
        "counter/core/service.py",
        "def f():\n    from api.app import create_app",
    ),
    (imports_the_wrong_room, "counter/nowhere/made.py", "import json"),
    (imports_beyond_the_promise, "counter/core/read.py", "from counter.quantities import a"),
    (
        imports_beyond_the_promise,
        "counter/types.py",
        "def f():\n    from counter import quantities",
    ),
    (imports_beyond_the_promise, "counter/core/service.py", "import rollup.parts"),
    (imports_beyond_the_promise, "counter/storage/memory/x.py", "from counter.storage import y"),
    (imports_a_framework, "counter/errors.py", "def f():\n    from starlette import status"),
    (imports_a_framework, "rollup/worker.py", "import fastapi"),
    (imports_a_driver, "api/app.py", "import sqlite3"),
    (imports_a_driver, "counter/core/service.py", "from cassandra.cluster import Cluster"),
    (imports_a_driver, "clients/python/counter_client/sync.py", "import sqlite3"),
    (imports_a_driver, SPOOL, "from cassandra.cluster import Cluster"),
    (imports_the_wrong_room, SPOOL, "from counter.errors import CounterError"),
    (imports_the_wrong_room, "counter/core/read.py", "from counter_client import Token"),
    (branches_on_a_store, "api/app.py", 'if settings.store == "sqlite":\n    pass'),
    (branches_on_a_store, "rollup/process.py", 'x = self.settings.store not in ("a", "b")'),
    (branches_on_a_store, "counter/config/values.py", 'x = "cassandra" == data["store"]'),
    (branches_on_a_store, "counter/ops/doctor.py", "x = SERVERS[settings.store]"),
    (branches_on_a_store, "counter/ops/doctor.py", 'match store:\n    case "a":\n        pass'),
    (imports_another_store, "api/app.py", "import counter.storage.cassandra.store"),
    (imports_another_store, "tests/unit/x.py", "from counter.storage.dynamodb import DynamodbKind"),
    (imports_another_store, "tests/dynamodb/x.py", "from counter.storage import postgresql"),
    (imports_another_store, "scripts/x.py", "def f():\n    from tests.cluster import test_schema"),
    (imports_another_store, "tests/http/x.py", "from tests.support.postgresql import stores_of"),
    (is_too_long, "api/app.py", "\n" * (FILE_LINES_MAX + 1)),
    (has_a_long_function, "api/app.py", "async def f():\n" + "    pass\n" * FUNCTION_LINES_MAX),
    (imports_the_wrong_room, "counter/ops/doctor.py", "from counter.testing import clock"),
    (asserts, "rollup/windows.py", "def f(x):\n    assert x"),
    (prints, "api/app.py", "def f():\n    print('here')"),
    (keeps_state_in_a_module, "api/app.py", "SEEN = {}"),
    (keeps_state_in_a_module, "api/app.py", "SEEN: dict[str, int] = {}"),
    (keeps_state_in_a_module, "api/app.py", "LOCK = threading.Lock()"),
    (keeps_state_in_a_module, "api/app.py", "settings = Settings()"),
    (keeps_state_in_a_module, "api/app.py", "def f():\n    global seen"),
    (lacks_a_docstring, "api/app.py", "x = 1"),
    (refers_to_nothing, "api/app.py", '"""See :meth:`leave`."""'),
    (refers_to_nothing, "api/app.py", '"""See :class:`counter.errors.GoneError`."""'),
    (refers_to_nothing, "api/app.py", '"""See :func:`rollup.gone.run`."""'),
    (patches_nothing, "tests/unit/test_x.py", "patch('api.app.gone', 1)"),
    (is_unfinished, "api/app.py", "# TO" + "DO: later"),
    (is_not_plain, "rollup/worker.py", "x = 1  # Nobody reads it."),
    (is_not_plain, "counter/core/read.py", 'def f():\n    """Read\n    it anew."""'),
    (is_not_plain, "counter/core/read.py", "text = f'{name} is told'"),
    (is_not_plain, "docs/http.md", "Whoever has a key can add."),
    (is_not_plain, "tests/unit/test_x.py", "def test_the_newest_stands() -> None: ..."),
    (names_an_address, "requirements.lock", "--index-url " + "https" + "://" + "host/simple"),
]


@pytest.mark.parametrize(("rule", "path", "text"), PLANTED, ids=names(PLANTED))
def test_a_planted_violation_is_caught(rule: Rule, path: str, text: str) -> None:
    """Each rule names the file of a violation it is shown: none passes by being blind."""
    assert violations(rule, (Source(path, text),)).startswith(f"{path}:")


def test_a_wrong_import_in_any_room_is_caught() -> None:
    """A module of every room that imports any module that ROOMS does not let it import."""
    names = [name_of(each) for each in shipped()]
    text = "\n".join(f"import {name}" for name in names)
    for room, allowed in ROOMS.items():
        caught = violations(imports_the_wrong_room, (Source(f"{room}/scratch.py", text),))
        wrong = {name for name in names if f"imports {name};" in caught}
        may = {name for name in names if room_of(name) in (room, *allowed) or name in allowed}
        assert wrong == set(names) - may, room


def test_a_circle_is_caught() -> None:
    """Also one that only a function closes."""
    one = Source("counter/types.py", "from counter import limits")
    other = Source("counter/limits.py", "def f():\n    from counter.types import Slice")
    assert circles((one, other)) == [["counter.types", "counter.limits", "counter.types"]]


def test_a_class_name_with_two_meanings_is_caught() -> None:
    """The Python client is a program of its own: it has the names of the service's errors."""
    one = Source("counter/core/read.py", "class Count:\n    pass")
    other = Source("api/app.py", "class Count:\n    pass")
    client = Source("clients/python/counter_client/answers.py", "class Count:\n    pass")
    assert names_of_two_classes((one, other)) == {"Count": [one.path, other.path]}
    assert names_of_two_classes((one, client)) == {}


ALLOWED: Cases = [
    (imports_the_wrong_room, "counter/cli/commands/serve.py", "from api.app import create_app"),
    (imports_the_wrong_room, SPOOL, "from counter_client.tokens import Token"),
    (imports_beyond_the_promise, "counter/core/read.py", "from counter.errors import invariant"),
    (imports_beyond_the_promise, "counter/core/write.py", "from counter.core.read import Count"),
    (imports_a_framework, "api/app.py", "import fastapi"),
    (imports_a_driver, "counter/storage/sqlite.py", "import sqlite3"),
    (imports_a_driver, SPOOL, "import sqlite3"),
    (asserts, f"{SUITES}x.py", "assert 1"),
    (
        branches_on_a_store,
        "counter/storage/sqlite/offline.py",
        'x = settings.store == "sqlite"',
    ),
    (branches_on_a_store, "api/app.py", "x = store_kind(data['store']), self.store is None"),
    (imports_another_store, "tests/cluster/x.py", "from counter.storage.cassandra import store"),
    (imports_another_store, "tests/unit/x.py", "from counter.storage.sqlite import SqliteStore"),
    (keeps_state_in_a_module, "api/app.py", "UNITS: Final[Mapping[str, int]] = {'s': 1}"),
    (keeps_state_in_a_module, "api/app.py", "log = logging.getLogger(__name__)\nN = int('1')"),
    (is_too_long, "api/app.py", "\n" * FILE_LINES_MAX),
    (is_not_plain, "rollup/worker.py", "outstanding = 'retold', \"nobody\""),
]


@pytest.mark.parametrize(("rule", "path", "text"), ALLOWED, ids=names(ALLOWED))
def test_allowed_code_passes(rule: Rule, path: str, text: str) -> None:
    """A rule says nothing about code that keeps to it."""
    assert violations(rule, (Source(path, text),)) == ""
