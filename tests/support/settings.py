"""What tests of settings share: refusals, and the tables of docs/configuration.md."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import pytest

from counter.config.report import is_duration, load, toml_value
from counter.config.settings import own_settings
from counter.config.store_kinds import StoreDefaults, StoreKind
from counter.errors import StartupError
from tests.support.server import ROOT

_DOCUMENT = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
_OF_A_STORE = re.compile(r"^### (\w+)\n(.*?)(?=^##)", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"^\| (`\w+`(?:, `\w+`)*) \|([^|]*)\|([^|]*)\|", re.MULTILINE)


def refusal(**values: Any) -> str:
    """Return the reason for which settings are refused."""
    with pytest.raises(StartupError) as caught:
        load(values)
    return str(caught.value)


def settings_text(store: str | None = None) -> str:
    """Return docs/configuration.md without the sections of stores, or that of *store*."""
    if store is None:
        return _OF_A_STORE.sub("", _DOCUMENT)
    sections: dict[str, str] = dict(_OF_A_STORE.findall(_DOCUMENT))
    return sections[store]


def documented(text: str) -> dict[str, tuple[str, str]]:
    """Return default and allowed values by setting, from the tables of *text*."""
    found: dict[str, tuple[str, str]] = {}
    for names, default, allowed in _ROW.findall(text):
        for name in re.findall(r"`(\w+)`", names):
            assert name not in found, f"{name} has two rows"
            found[name] = (default.strip(), allowed.strip())
    return found


def wrong_rows(
    rows: Mapping[str, tuple[str, str]], fields: Mapping[str, Any], defaults: Any
) -> Iterator[str]:
    """Return how *rows* differ from *fields* of settings, and from the values of *defaults*."""
    if set(rows) != set(fields):
        yield f"rows or settings are missing: {set(rows) ^ set(fields)}"
    for name in set(rows) & set(fields):
        default, allowed = rows[name]
        expected = _shown(name, getattr(defaults, name))
        # Text without code, if there is none.
        if default != expected if expected else "`" in default:
            yield f"the default of {name} is {expected}, not {default}"
        bounds = _bounds(name, fields[name])
        if bounds is not None and not allowed.startswith(bounds):
            yield f"{name} can be {bounds}, not {allowed}"


def _shown(name: str, value: Any) -> str:
    if name == "time_bucket":
        return "the slice"
    if value in (None, ()):
        return ""
    text = toml_value(name, value).strip('"')
    return f"`{text}`"


def _bounds(name: str, field: Any) -> str | None:
    """Return the bounds of a number, or those that the refusal of a duration names."""
    low = next((each.ge for each in field.metadata if hasattr(each, "ge")), None)
    high = next((each.le for each in field.metadata if hasattr(each, "le")), None)
    if low is not None and high is not None:
        return f"{low} to {high}"
    if not is_duration(name):
        return None
    found = re.search(r"it must be from (\w+ to \w+)", refusal(**{name: "40000d"}))
    assert found is not None
    return found[1]


def check_document(kind: StoreKind[Any], title: str, **given: Any) -> None:
    """Compare the section *title* of docs/configuration.md with the settings that *kind* adds, and
    with its defaults. *given* is what the store cannot do without."""
    text = settings_text(title)
    own = own_settings(kind)
    fields = {name: kind.settings.model_fields[name] for name in own}
    defaults = kind.settings(store=kind.name, **given)
    rows = {name: row for name, row in documented(text).items() if name not in given}
    assert set(given) <= set(fields)
    for name in given:
        del fields[name]
    assert list(wrong_rows(rows, fields, defaults)) == []
    _, _, listed = text.partition("\nDefaults: ")
    said = tomllib.loads("\n".join(re.findall(r"`(\w+ = [^`]+)`", listed)))
    usual = asdict(StoreDefaults())
    differs = {
        name: tomllib.loads(f"value = {toml_value(name, value)}")["value"]
        for name, value in asdict(kind.defaults).items()
        if value != usual[name]
    }
    assert said == differs
