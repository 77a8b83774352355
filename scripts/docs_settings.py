"""The reference of settings: each with its flag, variable and key, from the settings themselves."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from counter.config.report import is_duration, is_secret, toml_value
from counter.config.settings import dataset_model, settings_model
from counter.config.store_kinds import store_kind, store_names

_DOCUMENT: Final = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
_SETTINGS: Final = settings_model().model_fields
_ROW: Final = re.compile(r"^\| ((?:`\w+`(?:, )?)+) \|[^|]*\|([^|]*)\|([^|]*)\|$", re.MULTILINE)
#: A link to another page of docs/, which lies a folder above this one.
_LINK: Final = re.compile(r"\]\((\w[\w/-]*\.md)")
_PART: Final = re.compile(r"^## (.*)$", re.MULTILINE)
_HEAD: Final = """# Every setting

Each setting with its flag, its environment variable and its key in the TOML file: the first that is
set applies. [Configuration](../configuration.md) has the settings in groups. If a default depends
on the store, SQLite's comes first.
"""
_DATASETS: Final = """
## Datasets in the file { #further-datasets }

`[datasets.NAME]` is a [further dataset](../configuration.md#datasets). It can have these keys, with
the bounds above; an omitted key has the value of the dataset `default`:
"""


def settings_page() -> str:
    """The page, in Markdown."""
    parts = [_HEAD]
    for title, rows in _parts():
        parts.append(f"\n## {title}")
        parts += [_section(name, *rows[name]) for name in rows if name in _SETTINGS]
    keys = ", ".join(f"[`{name}`](#{name})" for name in dataset_model().model_fields)
    return "\n".join([*parts, _DATASETS, f"{keys}.", ""])


def _parts() -> Iterator[tuple[str, Mapping[str, tuple[str, str]]]]:
    """Return each part of docs/configuration.md that has settings, with each setting's allowed
    values and further text; tests compare those bounds with the code's."""
    _, *rest = _PART.split(_DOCUMENT.read_text(encoding="utf-8"))
    for title, text in zip(rest[::2], rest[1::2], strict=True):
        rows = {
            name: (bounds.strip(), _LINK.sub(r"](../\1", more.strip()))
            for names, bounds, more in _ROW.findall(text)
            for name in re.findall(r"`(\w+)`", names)
        }
        if rows:
            yield title, rows


def _section(name: str, bounds: str, more: str) -> str:
    field = _SETTINGS[name]
    flag = "none: process lists show those" if is_secret(name) else f"`{_flag(name)}`"
    key = "none: it names the file" if name == "config" else f"`{name}`"
    return f"""
### `{name}` {{ #{name} }}

{field.description}.

| where | what |
|---|---|
| flag | {flag} |
| environment | `COUNTER_{name.upper()}` |
| TOML key | {key} |
| default | {_default(name)} |
| allowed | {_allowed(name, bounds)} |
{f"| more | {more} |" if more else ""}
"""


def _flag(name: str) -> str:
    dashed = name.replace("_", "-")
    if _SETTINGS[name].annotation is bool:
        return f"--{dashed}`, `--no-{dashed}"
    return f"--{dashed}"


def _default(name: str) -> str:
    field = _SETTINGS[name]
    if name == "time_bucket":
        value = "the slice"
    elif field.default_factory is None:
        value = _shown(name, field.default)
    else:
        value = _shown(name, getattr(store_kind("sqlite").defaults, name, None))
    return "; ".join([value, *_others(name, value)])


def _others(name: str, usual: str) -> Iterator[str]:
    """Return the defaults of stores for which *name* has another default than the *usual* one."""
    stores: defaultdict[str, list[str]] = defaultdict(list)
    for store in store_names():
        value = getattr(store_kind(store).defaults, name, None)
        is_slice = name == "time_bucket" and value == 0
        if value is not None and not is_slice and (shown := _shown(name, value)) != usual:
            stores[shown].append(store)
    yield from (f"{shown} with {', '.join(names)}" for shown, names in stores.items())


def _shown(name: str, value: Any) -> str:
    if value in (None, ()):
        return "none"
    text = toml_value(name, value).strip('"')
    return f"`{text}`"


def _allowed(name: str, bounds: str) -> str:
    if _SETTINGS[name].annotation is bool:
        return "`true`, `false`"
    return bounds or ("a duration" if is_duration(name) else "text")
