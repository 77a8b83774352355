"""The settings of PostgreSQL: what is documented, and what is refused."""

from pathlib import Path

import pytest

from counter.storage.postgresql import PostgresqlKind
from counter.storage.postgresql.settings import PostgresqlSettings
from tests.support.server import ROOT
from tests.support.settings import check_document, refusal

DSN = "postgresql://me:hush@db1/counter"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory without a file of settings."""
    monkeypatch.chdir(tmp_path)


def test_the_document_has_each_setting_with_its_default_and_bounds() -> None:
    check_document(PostgresqlKind(), "PostgreSQL", dsn=DSN)


def test_the_connections_that_are_planned_with_are_the_default() -> None:
    most = PostgresqlSettings.model_fields["postgresql_connections"].default
    page = (ROOT / "docs/how-to/size-it.md").read_text(encoding="utf-8")
    assert f"`postgresql_connections` ({most})" in page


def test_a_database_and_the_store_belong_together(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "dsn is missing: set COUNTER_DSN" in refusal(store="postgresql")
    monkeypatch.setenv("COUNTER_DSN", DSN)
    message = refusal()
    assert "dsn is set and store is sqlite" in message
    assert "--store postgresql" in message
    assert "hush" not in message
