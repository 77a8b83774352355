"""docs/configuration.md and the settings of any store agree; tests of each store compare its own
section."""

import re
from pathlib import Path

import pytest

from counter.config.settings import DatasetSettings, Settings
from tests.support.settings import documented, settings_text, wrong_rows

#: The text of its section describes these.
WITHOUT_ROW = {"extra_datasets"}


def test_every_setting_has_a_row_with_its_default_and_bounds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    fields = {k: v for k, v in Settings.model_fields.items() if k not in WITHOUT_ROW}
    assert list(wrong_rows(documented(settings_text()), fields, Settings())) == []


def test_the_settings_of_datasets_are_in_their_section() -> None:
    section = settings_text().partition("## Datasets")[2].partition("## New namespaces")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == set(
        DatasetSettings.model_fields
    )


def test_a_wrong_row_is_found() -> None:
    fields = {name: Settings.model_fields[name] for name in ("port", "store", "retention")}
    rows = {"port": ("`80`", "0 to 9"), "store": ("`sqlite`", ""), "retention": ("`7d`", "1d")}
    assert sorted(wrong_rows(rows, fields, Settings())) == [
        "port can be 0 to 65535, not 0 to 9",
        "retention can be 10m to 365d, not 1d",
        "the default of port is `8080`, not `80`",
    ]
    del fields["port"]
    assert "rows or settings are missing: {'port'}" in set(wrong_rows(rows, fields, Settings()))
