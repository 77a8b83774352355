"""docs/configuration.md and the settings say the same."""

import re

import pytest

from counter.config.report import is_duration, load, toml_value
from counter.config.settings import DatasetSettings, Settings
from counter.errors import StartupError
from tests.support.server import ROOT

DOCUMENT = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
#: The text of its section describes these.
WITHOUT_ROW = {"extra_datasets"}


def rows() -> dict[str, tuple[str, str]]:
    """Default and allowed values, by setting."""
    found: dict[str, tuple[str, str]] = {}
    pattern = r"^\| (`\w+`(?:, `\w+`)*) \|([^|]*)\|([^|]*)\|"
    for names, default, allowed in re.findall(pattern, DOCUMENT, re.MULTILINE):
        for name in re.findall(r"`(\w+)`", names):
            assert name not in found, f"{name} is there twice"
            found[name] = (default.strip(), allowed.strip())
    return found


def written(name: str, settings: Settings) -> str:
    return toml_value(name, getattr(settings, name)).strip('"')


def test_every_setting_is_in_a_table() -> None:
    assert set(rows()) == set(Settings.model_fields) - WITHOUT_ROW


def test_the_settings_of_datasets_are_in_their_section() -> None:
    section = DOCUMENT.partition("## Datasets")[2].partition("## New namespaces")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == set(
        DatasetSettings.model_fields
    )


@pytest.mark.parametrize("name", sorted(set(Settings.model_fields) - WITHOUT_ROW))
def test_the_default_in_the_table_is_the_default(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.chdir(tmp_path_factory.getbasetemp())
    default, _ = rows()[name]
    sqlite, cassandra = Settings(), Settings(store="cassandra", contact_points=("one",))
    if getattr(sqlite, name) in (None, ()):
        assert "`" not in default
        return
    both = [written(name, sqlite), written(name, cassandra)]
    if name == "time_bucket":
        assert default == f"the slice; `{both[1]}`"
    elif name in ("store", "contact_points") or both[0] == both[1]:
        assert default == f"`{both[0]}`"
    else:
        assert default == f"`{both[0]}`; `{both[1]}`"


def bounds() -> dict[str, str]:
    """The bounds of numbers, and those that the refusal of a duration names."""
    found = {}
    for name, field in Settings.model_fields.items():
        low = next((m.ge for m in field.metadata if hasattr(m, "ge")), None)
        high = next((m.le for m in field.metadata if hasattr(m, "le")), None)
        if low is not None and high is not None:
            found[name] = f"{low} to {high}"
        elif is_duration(name):
            with pytest.raises(StartupError) as caught:
                load({name: "40000d"})
            said = re.search(r"it must be from (\w+ to \w+)", str(caught.value))
            assert said is not None, str(caught.value)
            found[name] = said[1]
    return found


def test_the_bounds_in_the_tables_are_the_bounds(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.chdir(tmp_path_factory.getbasetemp())
    wrong = {
        name: (said, rows()[name][1])
        for name, said in bounds().items()
        if not rows()[name][1].startswith(said)
    }
    assert wrong == {}
