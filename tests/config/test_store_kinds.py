"""Kinds of stores are found by name, through the entry points that packages install."""

import json
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from counter.cli.commands.backup import _begin_new_life
from counter.clock import SystemClock
from counter.config import store_kinds
from counter.config.report import load
from counter.config.settings import Settings
from counter.config.store_kinds import GROUP, StoreKind, store_kind, store_names
from counter.errors import StartupError
from counter.storage.cassandra import CassandraKind
from counter.storage.dynamodb import DynamodbKind
from counter.storage.memory import MemoryStore
from counter.storage.memory.control import MemoryControl
from counter.storage.postgresql import PostgresqlKind
from counter.storage.server_kind import ServerKind
from counter.storage.sqlite import SqliteKind

ROOT = Path(__file__).resolve().parents[2]
#: The type checker compares each with the protocol.
KINDS: tuple[StoreKind[Settings], ...] = (
    *(CassandraKind(), DynamodbKind(), PostgresqlKind()),
    SqliteKind(),
)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    """The entry points that are found; the test adds some."""
    found: list[EntryPoint] = []
    monkeypatch.setattr(store_kinds, "entry_points", lambda group: found)
    for each in (store_kinds._installed, store_kind):
        each.cache_clear()
    yield found
    for each in (store_kinds._installed, store_kind):
        each.cache_clear()


def test_the_installed_kinds_are_those_of_the_project() -> None:
    """If not, install it again: scripts/test does."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(store_names()) >= set(project["entry-points"][GROUP])
    for each in KINDS:
        assert type(store_kind(each.name)) is type(each)


def test_an_unknown_store_is_refused_with_those_that_are_installed() -> None:
    with pytest.raises(StartupError) as refused:
        load({"store": "mysql"})
    assert str(refused.value) == (
        "store (flag --store): Input should be 'cassandra', 'dynamodb', 'postgresql' or 'sqlite'"
        " (it is 'mysql')"
    )


@pytest.mark.usefixtures("installed")
def test_a_program_whose_stores_are_not_installed_says_what_to_do() -> None:
    """As after an update of a checkout without installing it again."""
    with pytest.raises(StartupError, match=r"store is 'sqlite'; no store is installed: install"):
        load({})
    with pytest.raises(StartupError, match=r"store.*no store is installed: install this program"):
        load({"store": "postgresql"})


class StrangersKind(SqliteKind):
    """A kind that another package brings."""

    name = "strangers"

    def problems(self, settings: Settings) -> Iterator[str]:
        yield "the stranger objects"


def test_another_package_adds_a_store(installed: list[EntryPoint]) -> None:
    here = f"{__name__}:StrangersKind"
    installed.append(EntryPoint("strangers", here, GROUP))
    with pytest.raises(StartupError) as refused:
        load({"store": "strangers"})
    assert str(refused.value) == "the stranger objects"


@pytest.mark.parametrize("kind", [each for each in KINDS if each.name != "sqlite"])
def test_a_kind_is_found_without_its_driver(
    kind: StoreKind[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening the store names the extra to install."""
    for driver in ("aiobotocore", "asyncpg", "cassandra", "cassandra.cluster"):
        monkeypatch.setitem(sys.modules, driver, None)
    with pytest.raises(StartupError, match=rf"pip install '\.\[{kind.name}\]' in its checkout"):
        kind.open(Settings(), SystemClock())


class RestoredControl(MemoryControl):
    """Keeps the time at which a new life began."""

    began_us = 0

    async def begin_new_life(self, now_us: int) -> None:
        self.began_us = now_us


@pytest.mark.parametrize("kind", [CassandraKind, DynamodbKind])
async def test_restoring_a_store_is_one_audited_act(
    kind: type[ServerKind], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a store without transactions, which needs a repair afterwards."""
    store = MemoryStore(SystemClock())
    store.control = control = RestoredControl(store.tables)
    monkeypatch.setattr(kind, "open", lambda *_: store)
    log = tmp_path / "audit.jsonl"
    before_us = SystemClock().now_us()
    assert "counter audit --all --repair" in await _begin_new_life(_restored(kind, log))
    assert before_us <= control.began_us <= SystemClock().now_us()
    act = json.loads(log.read_text(encoding="utf-8"))
    assert (act["act"], act["end"]) == ("schema.restored", "done")


@pytest.mark.parametrize("kind", [CassandraKind, DynamodbKind])
async def test_a_restored_store_that_cannot_be_opened_was_not_changed(
    kind: type[ServerKind], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So there is no act to record."""
    store = MemoryStore(SystemClock())
    monkeypatch.setattr(store, "open", AsyncMock(side_effect=StartupError("no schema")))
    monkeypatch.setattr(kind, "open", lambda *_: store)
    log = tmp_path / "audit.jsonl"
    with pytest.raises(StartupError, match="no schema"):
        await _begin_new_life(_restored(kind, log))
    assert log.read_bytes() == b""


def _restored(kind: type[ServerKind], log: Path) -> Settings:
    points = ("one",) if kind.address else ()
    return Settings(store=kind.name, contact_points=points, audit_log=log)
