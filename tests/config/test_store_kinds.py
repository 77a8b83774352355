"""Kinds of stores are found by name, through the entry points that packages install."""

import json
import pickle
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from importlib.metadata import EntryPoint
from pathlib import Path
from unittest.mock import AsyncMock, patch

import pytest
from pydantic import Field

from counter import how_to_install
from counter.cli.commands.backup import _begin_new_life
from counter.clock import SystemClock
from counter.config import store_kinds
from counter.config.report import effective, load
from counter.config.settings import DatasetSettings, Settings, settings_model
from counter.config.store_kinds import GROUP, StoreKind, store_kind, store_names
from counter.errors import StartupError, StoreUnavailableError
from counter.ports import Clock, Store
from counter.storage.memory import MemoryStore
from counter.storage.memory.control import MemoryControl
from counter.storage.server_kind import ServerKind
from counter.storage.sqlite.settings import SqliteSettings

ROOT = Path(__file__).resolve().parents[2]
SERVERS = [kind for kind in map(store_kind, store_names()) if isinstance(kind, ServerKind)]
#: PostgreSQL's is tested on a server.
WITHOUT_TRANSACTIONS = [
    kind for kind in SERVERS if type(kind).begin_new_life is ServerKind.begin_new_life
]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    """The entry points that are found; the test adds some."""
    found: list[EntryPoint] = []
    monkeypatch.setattr(store_kinds, "entry_points", lambda group: found)
    for each in (store_kinds._installed, store_kind, settings_model):
        each.cache_clear()
    yield found
    for each in (store_kinds._installed, store_kind, settings_model):
        each.cache_clear()


def test_the_installed_kinds_are_those_of_the_project() -> None:
    """If not, install it again: scripts/test does."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(store_names()) >= set(project["entry-points"][GROUP])
    assert [store_kind(each).name for each in store_names()] == [*store_names()]


def test_an_unknown_store_is_refused_with_those_that_are_installed() -> None:
    with pytest.raises(StartupError) as refused:
        load({"store": "mysql"})
    first, *_, last = map(repr, sorted(store_names()))
    said = str(refused.value)
    assert said.startswith(f"store (flag --store): Input should be {first}")
    assert said.endswith(f" or {last} (it is 'mysql')")


@pytest.mark.usefixtures("installed")
def test_a_program_whose_stores_are_not_installed_says_what_to_do() -> None:
    """As after an update of a checkout without installing it again."""
    with pytest.raises(StartupError, match=r"store is 'sqlite'; no store is installed: install"):
        load({})
    with pytest.raises(StartupError, match=r"store.*no store is installed: install this program"):
        load({"store": "postgresql"})


class StrangersDataset(DatasetSettings):
    """What a dataset of the file may set of a stranger's store."""

    depth: int | None = None


class StrangersSettings(Settings):
    """The settings that another package brings."""

    depth: int = Field(1, description="The depth")
    extra_datasets: Mapping[str, StrangersDataset] = {}

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.depth > 9:
            yield f"depth is {self.depth}, and nine is the most"

    def warnings(self) -> Iterator[str]:
        yield from super().warnings()
        yield from (
            f"{name} has depth {self.of_dataset(own, 'depth')}"
            for name, own in self.settings_of_datasets()
        )


class StrangersKind(StoreKind[StrangersSettings]):
    """A kind that another package brings: all that it must have."""

    name, settings = "strangers", StrangersSettings

    def open(self, settings: StrangersSettings, clock: Clock, *, to_audit: bool = False) -> Store:
        return MemoryStore(clock)


@pytest.fixture
def strangers(installed: list[EntryPoint]) -> None:
    installed.append(EntryPoint("sqlite", "counter.storage.sqlite:SqliteKind", GROUP))
    installed.append(EntryPoint("strangers", f"{__name__}:StrangersKind", GROUP))


@pytest.mark.usefixtures("strangers")
def test_another_package_adds_a_store_with_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come from a flag, the environment or the file, beside those of the other stores."""
    monkeypatch.setenv("COUNTER_DEPTH", "7")
    loaded = load({"store": "strangers", "datasets": {"other": {"depth": 2}}})
    shown = effective(loaded)
    assert re.search(r"^depth = 7 +# environment COUNTER_DEPTH$", shown, re.MULTILINE)
    assert re.search(r'^data = "data" +# default$', shown, re.MULTILINE)
    assert [each for each in loaded.warnings if "depth" in each] == [
        "default has depth 7",
        "other has depth 2",
    ]
    assert settings_model().model_fields["depth"].description == "The depth"


@pytest.mark.usefixtures("strangers")
def test_the_settings_of_another_package_are_checked() -> None:
    with pytest.raises(StartupError) as refused:
        load({"store": "strangers", "depth": "10", "workers": "2"})
    assert str(refused.value) == "depth is 10, and nine is the most"
    with pytest.raises(StartupError, match=r"datasets.other.deep.*is it depth\?"):
        load({"store": "strangers", "datasets": {"other": {"deep": 2}}})


async def test_a_kind_answers_commands_without_saying_how() -> None:
    kind, clock, place = StrangersKind(), SystemClock(), Path("copy")
    settings = StrangersSettings()
    assert await kind.apply_schema(settings) == ["store is strangers, which has no schema to apply"]
    async with kind.opened_keys(settings, clock) as (keys, guard):
        assert (list(await keys.api_keys()), guard) == ([], None)
    with pytest.raises(StartupError, match="strangers, which `counter backup` cannot copy"):
        kind.back_up(settings, place, now_us=0, bytes_per_s=1, progress=print)
    with pytest.raises(StartupError, match="strangers, which `counter restore` cannot write"):
        kind.restore(settings, place, now_us=0, progress=print, without_keys=False)
    with pytest.raises(StartupError, match="strangers, which has nothing to do after a restore"):
        await kind.begin_new_life(settings, nullcontext())


@pytest.mark.parametrize(
    ("of", "error", "state"),
    [
        ("open", StartupError("it is locked"), "wrong"),
        ("ping", StoreUnavailableError("it is full"), "wrong"),
        ("close", None, "ok"),
    ],
)
async def test_a_store_of_any_kind_is_checked(of: str, error: Exception | None, state: str) -> None:
    """By opening it: it is closed again."""
    store = MemoryStore(SystemClock())
    with (
        patch.object(store, of, AsyncMock(side_effect=error)) as call,
        patch.object(StrangersKind, "open", lambda *_: store),
    ):
        kind = StrangersKind()
        (found,) = [each async for each in kind.check(StrangersSettings(), SystemClock())]
    assert (found.part, found.state) == ("store", state)
    assert error is None or found.detail == str(error)
    call.assert_awaited_once()


def test_settings_are_handed_to_a_process_that_is_started() -> None:
    """Their class exists only once the stores are known."""
    given = {"extra_datasets": {"other": {"retention": "9d"}}, "port": "1"}
    settings = load(given).settings
    assert isinstance(settings, SqliteSettings)
    handed = pickle.loads(pickle.dumps(settings))
    assert (type(handed), handed) == (type(settings), settings)


class RivalSettings(Settings):
    """A setting of a name that another store's has."""

    data: int = 1


class RivalKind(StoreKind[RivalSettings]):
    """Its kind."""

    name, settings = "rival", RivalSettings


def test_two_stores_cannot_have_a_setting_of_one_name(installed: list[EntryPoint]) -> None:
    installed.append(EntryPoint("sqlite", "counter.storage.sqlite:SqliteKind", GROUP))
    installed.append(EntryPoint("rival", f"{__name__}:RivalKind", GROUP))
    with pytest.raises(StartupError, match="the stores 'rival' and 'sqlite' both have a setting"):
        load({})


@pytest.mark.parametrize("kind", SERVERS, ids=[each.name for each in SERVERS])
def test_a_kind_is_found_without_its_driver(
    kind: ServerKind[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening the store names the extra to install."""
    monkeypatch.setitem(sys.modules, kind.driver, None)
    with pytest.raises(StartupError, match=re.escape(how_to_install(kind.name))):
        kind.open(Settings(), SystemClock())


@pytest.mark.parametrize("kind", SERVERS, ids=[each.name for each in SERVERS])
async def test_a_server_that_does_not_answer_is_found(kind: ServerKind[Settings]) -> None:
    """`counter doctor` reports it, with what to do, and checks nothing else of it."""
    store = MemoryStore(SystemClock())
    away = AsyncMock(side_effect=StartupError("it does not answer"))
    with patch.object(store, "open", away), patch.object(type(kind), "open", lambda *_: store):
        (found,) = [each async for each in kind.check(Settings(), SystemClock())]
    assert (found.part, found.state, found.detail) == ("store", "wrong", "it does not answer")
    assert found.do.startswith(kind.start)


@pytest.mark.parametrize("kind", SERVERS, ids=[each.name for each in SERVERS])
def test_a_server_is_backed_up_by_its_own_tools(kind: ServerKind[Settings]) -> None:
    for call in (kind.back_up, kind.restore):
        with pytest.raises(StartupError, match=kind.backed_up_by):
            call(Settings(store=kind.name))


class RestoredControl(MemoryControl):
    """Keeps the time at which a new life began."""

    began_us = 0

    async def begin_new_life(self, now_us: int) -> None:
        self.began_us = now_us


@pytest.mark.parametrize("kind", WITHOUT_TRANSACTIONS)
async def test_restoring_a_store_is_one_audited_act(
    kind: ServerKind[Settings], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a store without transactions, which needs a repair afterwards."""
    store = MemoryStore(SystemClock())
    store.control = control = RestoredControl(store.tables)
    monkeypatch.setattr(type(kind), "open", lambda *_: store)
    log = tmp_path / "audit.jsonl"
    before_us = SystemClock().now_us()
    assert "counter audit --all --repair" in await _begin_new_life(
        Settings(store=kind.name, audit_log=log)
    )
    assert before_us <= control.began_us <= SystemClock().now_us()
    act = json.loads(log.read_text(encoding="utf-8"))
    assert (act["act"], act["end"]) == ("schema.restored", "done")


@pytest.mark.parametrize("kind", WITHOUT_TRANSACTIONS)
async def test_a_restored_store_that_cannot_be_opened_was_not_changed(
    kind: ServerKind[Settings], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So there is no act to record."""
    store = MemoryStore(SystemClock())
    monkeypatch.setattr(store, "open", AsyncMock(side_effect=StartupError("no schema")))
    monkeypatch.setattr(type(kind), "open", lambda *_: store)
    log = tmp_path / "audit.jsonl"
    with pytest.raises(StartupError, match="no schema"):
        await _begin_new_life(Settings(store=kind.name, audit_log=log))
    assert log.read_bytes() == b""
