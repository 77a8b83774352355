"""Run tests with a fault planted, each fault in a process forked off one that is ready to test.

It runs in a copy of the tree: the fault is written to its file too, for the processes that tests
start. In the forked process the code of the function is replaced.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, Final, NoReturn
from unittest.mock import patch

import pytest

from tests.mutants.operators import Mutant

#: A test that runs for so long with a fault hangs: without one it takes a small part of that.
_TEST_S: Final = 20
_HANG_S: Final = 40.0
_PR_SET_CHILD_SUBREAPER: Final = 36
#: The fault made code that cannot run: nothing that a test was needed for.
_NO_START: Final = ("NameError", "UnboundLocalError", "SyntaxError", "ImportError")
_NO_SYNTAX: Final = ("syntax error", "SyntaxError", "NotImplementedError: ", "cannot parse")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a fault: killed, survived or does not start; by which test or seed, and why."""

    verdict: str
    by: str
    why: str
    took_s: float


class Runner:
    """A plugin of pytest that has *work* try faults, with all tests collected."""

    def __init__(self, work: Callable[[Runner], None]) -> None:
        self._work = work
        self.items: dict[str, pytest.Item] = {}
        self._server = ExitStack()
        self._dsn: str | None = None
        self._failure: tuple[str, str] | None = None
        self._planter: Planter
        self._kept: set[int] = set()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        self._planter = Planter()
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        with self._server:
            self._work(self)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self._failure is None:
            crash = getattr(report.longrepr, "reprcrash", None)
            text = crash.message if crash is not None else str(report.longrepr)
            self._failure = (report.nodeid, text)

    def try_one(
        self, mutant: Mutant | None, tests: Sequence[str], seeds: Sequence[int], budget_s: float
    ) -> Outcome:
        """Run *tests*, then *seeds*, with *mutant* planted, until one fails or takes *budget_s*."""
        items = [self.items[each] for each in tests if each in self.items]
        if any("postgresql" in each.nodeid for each in items):
            self._start_postgresql()
        of_schema = mutant is not None and mutant.path.endswith(".sql")
        if of_schema:
            asyncio.run(_drop_schemas(self._dsn))
        began_s = time.monotonic()
        directory = Path(tempfile.mkdtemp(prefix="mutant-"))
        # The user of a database server has its data below.
        directory.chmod(0o755)
        read, write = os.pipe()
        with _on_disk(mutant) as before, open(read, "rb", buffering=0) as answers:
            child = os.fork()
            if child == 0:
                os.close(read)
                self._run(mutant, before, items, seeds, budget_s, write, directory)
            os.close(write)
            try:
                lines = _answers_of(child, answers.fileno())
            finally:
                self._end_all(child)
        shutil.rmtree(directory, ignore_errors=True)
        if of_schema:
            asyncio.run(_drop_schemas(self._dsn))
        return _outcome_of(lines, time.monotonic() - began_s)

    def _run(
        self,
        mutant: Mutant | None,
        before: str,
        items: Sequence[pytest.Item],
        seeds: Sequence[int],
        budget_s: float,
        write: int,
        directory: Path,
    ) -> NoReturn:
        def say(*words: str) -> None:
            os.write(write, ("\t".join(words).replace("\n", " ")[:2000] + "\n").encode())

        try:
            os.setsid()
            quiet = os.open(directory / "output", os.O_WRONLY | os.O_CREAT)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            _use_directory(directory)
            if mutant is not None:
                try:
                    self._planter.plant(mutant, before)
                except Exception as error:
                    say("no start", "", repr(error))
                    os._exit(0)
            began_s = time.monotonic()
            for item, after in zip_longest(items, items[1:]):
                if time.monotonic() - began_s > budget_s:
                    break
                say("start", item.nodeid)
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
                if self._failure is not None:
                    say("killed", *self._failure)
                    os._exit(0)
            from tests.simulation.run import run_seed

            began_s = time.monotonic()
            is_dynamodb = mutant is not None and "/dynamodb/" in mutant.path
            store = "dynamodb" if is_dynamodb else "cassandra"
            for seed in seeds:
                if time.monotonic() - began_s > budget_s:
                    break
                say("start", f"seed {seed}")
                if problems := run_seed(seed, store=store).problems:
                    say("killed", f"seed {seed}", problems[0])
                    os._exit(0)
            say("survived", f"{len(items)} tests, {len(seeds)} seeds", "")
        except BaseException as error:
            say("broken", "", repr(error))
        finally:
            os._exit(0)

    def _start_postgresql(self) -> None:
        """Start one server for all faults: the fixture of the tests uses it."""
        # Not earlier: pytest prepares some of the imports.
        from tests.support.servers import postgresql_server

        if self._dsn is not None:
            return
        server = self._server.enter_context(postgresql_server())
        self._dsn = server.dsn()
        self._kept = set(_children())

        @contextmanager
        def shared() -> Iterator[Any]:
            yield server

        self._server.enter_context(patch("tests.support.postgresql.postgresql_server", shared))

    def _end_all(self, child: int) -> None:
        """End *child*, and whatever its tests left running."""
        for end in (lambda: os.killpg(child, signal.SIGKILL), lambda: os.waitpid(child, 0)):
            try:
                end()
            except (ProcessLookupError, ChildProcessError):
                continue
        while orphans := set(_children()) - self._kept:
            for each in orphans:
                os.kill(each, signal.SIGKILL)
                os.waitpid(each, 0)


def _children() -> list[int]:
    listed = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(each) for each in listed.read_text().split()]


def _use_directory(directory: Path) -> None:
    """Have all temporary files made in *directory*, which is removed even if this is killed."""
    os.environ["TMPDIR"] = tempfile.tempdir = str(directory)
    make = tempfile.mkdtemp

    def made(suffix: str | None = None, prefix: str | None = None, dir: Any = None) -> str:
        return make(suffix, prefix, directory if dir in (None, Path("/dev/shm")) else dir)

    tempfile.mkdtemp = made  # type: ignore[assignment]


def _answers_of(child: int, pipe: int) -> list[list[str]]:
    """Read the output of *child* until it ends, or is silent for longer than a test may take."""
    text = b""
    while select.select([pipe], [], [], _HANG_S)[0]:
        part = os.read(pipe, 65_536)
        if not part:
            break
        text += part
        if text.rpartition(b"\n")[0].rpartition(b"\n")[2].split(b"\t")[0] != b"start":
            break
    else:
        text += b"hang\n"
    return [line.split("\t") for line in text.decode(errors="replace").splitlines()]


def _outcome_of(lines: list[list[str]], took_s: float) -> Outcome:
    what, *rest = lines[-1] if lines else ["broken"]
    by, why = [*rest, "", ""][:2]
    if what == "hang" or (what == "start" and rest):
        running = next((each[1] for each in reversed(lines) if each[0] == "start"), "")
        return Outcome("killed", running, "hangs" if what == "hang" else "died", took_s)
    if what == "killed":
        if why.startswith(_NO_START) or any(each in why[:200] for each in _NO_SYNTAX):
            return Outcome("does not start", by, why, took_s)
        return Outcome("killed", by, why, took_s)
    return Outcome({"no start": "does not start"}.get(what, what), by, why, took_s)


async def _drop_schemas(dsn: str | None) -> None:
    """Have the next test make the schema again, by the functions of then."""
    import asyncpg

    if dsn is None:
        return

    connection = await asyncpg.connect(dsn)
    for schema in ("kept", "counter"):
        await connection.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE")
    await connection.close()


@contextmanager
def _on_disk(mutant: Mutant | None) -> Iterator[str]:
    """Write the fault to its file with a new time, to bypass compiled files."""
    if mutant is None:
        yield ""
        return
    path = Path(mutant.path)
    before, times = path.read_text("utf-8"), path.stat()
    path.write_text(mutant.plant(before), "utf-8")
    os.utime(path, (times.st_atime, times.st_mtime + 10 + int(mutant.id, 16) % 100_000_000))
    try:
        yield before
    finally:
        path.write_text(before, "utf-8")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


class Planter:
    """Replaces code in this process; all names are looked up before processes are forked."""

    def __init__(self) -> None:
        gc.unfreeze()
        self._functions: dict[str, list[FunctionType]] = {}
        for each in gc.get_objects():
            if type(each) is FunctionType:
                self._functions.setdefault(each.__code__.co_filename, []).append(each)
        gc.freeze()

    def plant(self, mutant: Mutant, before: str) -> None:
        """Replace the code of the fault's function, or the value of its constant.

        The file, which was *before*, has the fault already. Raises LookupError if nothing was
        replaced.
        """
        if mutant.path.endswith(".sql"):
            return
        path = str(Path(mutant.path).resolve())
        name = mutant.path.removesuffix(".py").removeprefix("clients/python/").replace("/", ".")
        if name not in sys.modules:
            importlib.import_module(name)
            return
        there = vars(sys.modules[name])
        new = compile(mutant.plant(before), path, "exec", dont_inherit=True)
        if mutant.function in there and not callable(there[mutant.function]):
            _plant_constant(mutant.function, there, new)
            return
        old = compile(before, path, "exec", dont_inherit=True)
        fresh = _numbered(new)
        made = {
            (each.co_qualname, each.co_firstlineno): fresh.get(key)
            for key, each in _numbered(old).items()
        }
        planted = 0
        for function in self._functions.get(path, ()):
            code = function.__code__
            after = made.get((code.co_qualname, code.co_firstlineno))
            if after is not None and f"{code.co_qualname}.".startswith(f"{mutant.function}."):
                function.__code__ = after
                planted += 1
        if not planted:
            raise LookupError(f"{mutant.function} of {name} is no function that could be replaced")


def _codes(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _codes(each)


def _numbered(code: CodeType) -> dict[tuple[str, int], CodeType]:
    """Return all code within *code* by qualified name, and number among those of that name."""
    found: dict[tuple[str, int], CodeType] = {}
    seen: Counter[str] = Counter()
    for each in _codes(code):
        found[each.co_qualname, seen[each.co_qualname]] = each
        seen[each.co_qualname] += 1
    return found


def _plant_constant(name: str, there: dict[str, Any], code: CodeType) -> None:
    """Give each module that has the constant its new value."""
    fresh = {"__name__": there["__name__"], "__file__": there.get("__file__")}
    old = there[name]
    exec(code, fresh)
    for module in list(sys.modules.values()):
        if getattr(module, name, None) is old:
            setattr(module, name, fresh[name])


def collect(tests: Sequence[str], work: Callable[[Runner], None]) -> int:
    """Collect *tests* and have *work* try faults on them."""
    options = ["-qq", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", "--capture=no"]
    options += ["-p", "no:faulthandler", f"--timeout={_TEST_S}", "--timeout-method=signal"]
    return int(pytest.main([*options, *tests], plugins=[Runner(work)]))
