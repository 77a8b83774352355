"""The store that docs/adapters.md shows: its contracts, its faults, and its service."""

import os
import pickle
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest

from counter.errors import StartupError, StoreUnavailableError
from counter.limits import MINUTE
from counter.testing import cases
from counter.testing.clock import FakeClock
from counter.types import Dataset
from tests.support.child import run_python
from tests.support.documents import page, programs_of, save_programs
from tests.support.rest import new_token
from tests.support.server import ROOT, SMALL_WINDOWS, Server

TEXT = page("adapters.md")
PROGRAMS = programs_of(TEXT)
#: A busy disk is slow.
WINDOWS = {**SMALL_WINDOWS, "accept_limit": "2s", "write_timeout": "2s"}


def imported(name: str) -> ModuleType:
    """The program of the page as a module of this process."""
    module = sys.modules[name] = ModuleType(name)
    exec(compile(PROGRAMS[f"{name}.py"], f"{name}.py", "exec"), vars(module))
    return module


Journal: Any = imported("journal_store").JournalStore
ITS_TESTS = vars(imported("test_journal_store"))
globals().update({name: each for name, each in ITS_TESTS.items() if name[:4] in ("Test", "test")})


def test_the_page_is_short() -> None:
    assert [*PROGRAMS] == ["journal_store.py", "pyproject.toml", "test_journal_store.py"]
    assert sum(len(each.splitlines()) for each in PROGRAMS.values()) < 200


def state(store: Any) -> bytes:
    """All that *store* keeps, without partitions that were looked for and have no events."""
    tables, control = store.memory.tables, store.memory.control
    kept: list[Any] = [tables.namespaces, tables.spaces, tables.deleted, vars(store.memory.keys)]
    kept += [value for name, value in vars(control).items() if name != "_tables"]
    for each in tables.states.values():
        kept += [each.slices, each.dropped_before_us]
        for start_us, spaces in each.tables.items():
            for space_id, partitions in spaces.items():
                events = {key: vars(it) for key, it in partitions.items() if it._rows}
                kept += [(start_us, space_id, each) for each in sorted(events.items())]
    pickler = pickle.Pickler(file := BytesIO())
    # Without references to what occurred before, which depend on what is one object.
    pickler.fast = True
    pickler.dump(kept)
    return file.getvalue()


@pytest.fixture(autouse=True)
def each_store_is_the_same_again(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each case of the contracts, one over the same journal has the same."""
    close = Journal.close

    async def close_and_compare(store: Any) -> None:
        await close(store)
        again = Journal(store._path, store._clock, store._datasets)
        await again.open()
        assert state(again) == state(store)
        await close(again)

    # That case changes the memory alone.
    if request.cls and request.node.name != "test_a_lost_row_is_found_and_put_right":
        monkeypatch.setattr(Journal, "close", close_and_compare)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(cases.NOW)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
async def store(path: Path, clock: FakeClock) -> AsyncIterator[Any]:
    """A journal with a few calls."""
    store = Journal(path, clock, [cases.DATASET])
    await store.open()
    await cases.make_slices(store)
    yield store
    await store.close()


def changed(path: Path, number: int, before: bytes, after: bytes) -> None:
    """Replace a part of a line of the journal."""
    lines = path.read_bytes().split(b"\n")
    lines[number - 1] = lines[number - 1].replace(before, after, 1)
    path.write_bytes(b"\n".join(lines))


async def refusal(path: Path, clock: FakeClock, dataset: Dataset = cases.DATASET) -> str:
    """Why the journal cannot be opened."""
    with pytest.raises(StartupError) as refused:
        await Journal(path, clock, [dataset]).open()
    return str(refused.value).replace(str(path), "it")


@pytest.mark.usefixtures("store")
async def test_a_journal_is_opened_once(path: Path, clock: FakeClock) -> None:
    assert await refusal(path, clock) == "another process has it open: stop it first"


async def test_a_journal_without_calls_is_opened_again(path: Path, clock: FakeClock) -> None:
    for _ in range(3):
        store = Journal(path, clock, [cases.DATASET])
        await store.open()
        await store.close()


async def test_a_damaged_journal_is_refused(store: Any, path: Path, clock: FakeClock) -> None:
    await store.close()
    changed(path, 2, b"A", b"B")
    assert await refusal(path, clock) == "line 2 of it is damaged: use a copy of it"


async def test_other_datasets_are_refused(store: Any, path: Path, clock: FakeClock) -> None:
    await store.close()
    other = replace(cases.DATASET, retention_us=cases.DATASET.retention_us + MINUTE)
    assert await refusal(path, clock, other) == "it has other datasets: set them as they were"


async def test_a_clock_behind_its_own_writes_is_known(store: Any, path: Path) -> None:
    """After the restart no window may be closed by it."""
    await store.close()
    behind = Journal(path, FakeClock(cases.NOW - MINUTE), [cases.DATASET])
    await behind.open()
    assert (await behind.control.read_clock()).offset_us == MINUTE
    await behind.close()


@pytest.mark.parametrize("fault", ["fsync", "write"])
async def test_after_a_failed_write_nothing_is_answered(store: Any, fault: str) -> None:
    """A retry could be answered by a change that is not on disk."""
    namespace, event = await cases.make_namespace(store), cases.add()
    with (
        patch.object(os, fault, side_effect=OSError("no space left")),
        pytest.raises(StoreUnavailableError, match=r"no space left.*start the service again"),
    ):
        await cases.written(store, namespace, [event])
    for call in (store.events.find, store.events.append):
        with pytest.raises(StoreUnavailableError, match="no space left"):
            await call(namespace, [event])
    with pytest.raises(StoreUnavailableError, match="no space left"):
        await store.ping()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, child_processes: None) -> None:
    """Install the package of the page into a folder where programs look for it. All have the
    settings of the server."""
    source, place = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    save_programs(TEXT, source)
    words = ("install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    done = run_python("-m", "pip", *words, "--target", place, source)
    assert done.returncode == 0, done.stderr
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(place), str(ROOT)]))
    for name, value in WINDOWS.items():
        monkeypatch.setenv(f"COUNTER_{name.upper()}", value)


def counter(path: Path, *words: str | Path) -> tuple[int, list[str]]:
    """Exit code and output of a command over the journal."""
    done = run_python("-m", "counter", *words, "--store=journal", f"--journal={path}")
    return done.returncode, (done.stdout + done.stderr).splitlines()


@pytest.mark.usefixtures("installed")
async def test_the_package_serves_and_loses_nothing(path: Path, tmp_path: Path) -> None:
    """After `kill -9` a retry is known, soon or when its token is late, and the count is exact."""
    flags = {"store": "journal", "journal": str(path), **WINDOWS}
    server = Server(tmp_path / "data", tmp_path / "logs", flags)
    token = None
    try:
        for start in range(4):
            await server.start()
            token = token or new_token()
            async with server.client() as rest:
                first, again = [(await rest.add("c", 5, token)).json() for _ in range(2)]
                for _ in range(20):
                    assert (await rest.add("c", 1, new_token())).status_code == 200
                assert (await rest.get("c")).json()["count"] == 5 + 20 * (start + 1)
            server.kill()
            assert first.get("replayed", first.get("applied")) is (start > 0), first
            assert again.get("replayed", again.get("applied")) is True, again
    finally:
        server.clean_up()
    assert counter(path, "audit", "--all") == (0, ["default: 1 counter audited, 0 wrong"])


@pytest.mark.usefixtures("installed")
def test_its_tests_run_in_its_own_folder(tmp_path: Path) -> None:
    """With its own settings of pytest, which none of the suites complains of."""
    words = ("-p", "no:schemathesis", "-p", "no:cacheprovider", "-k", "restart or TestSlices")
    done = run_python("-m", "pytest", "-q", *words, cwd=tmp_path / "source")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "warning" not in done.stdout


@pytest.mark.usefixtures("installed")
def test_its_commands_answer(path: Path) -> None:
    """Those that its kind says nothing of, too."""
    code, lines = counter(path, "doctor")
    assert (code, "ok        store     journal can be opened and written" in lines) == (0, True)
    schema = "store is journal, which has no schema to apply"
    assert counter(path, "schema", "apply") == (0, [schema])
    refused = "counter: store is journal, which `counter backup` cannot copy"
    assert counter(path, "backup", path.with_name("copy")) == (2, [refused])
