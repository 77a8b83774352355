"""The reference of settings: each with its flag, variable and key, from the settings themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from counter.config.report import is_duration, toml_value
from counter.config.settings import DatasetSettings, Settings

_DOCUMENT: Final = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
#: Secrets are never flags, because process lists show flags.
_NO_FLAG: Final = frozenset({"cassandra_password", "dsn", "extra_datasets"})
_ROW: Final = re.compile(r"^\| ((?:`\w+`(?:, )?)+) \|[^|]*\|([^|]*)\|([^|]*)\|$", re.MULTILINE)
#: A link to another page of docs/, which lies a folder above this one.
_LINK: Final = re.compile(r"\]\((\w[\w/-]*\.md)")
_PART: Final = re.compile(r"^## (.*)$", re.MULTILINE)
_HEAD: Final = """# Every setting

Each with its flag, its environment variable and its key in the TOML file, of which the first that
is there holds. [Configuration](../configuration.md) has the same with more to each, in groups.
Where a default depends on the store, both stand here: SQLite's, then Cassandra's.
"""
_DATASETS: Final = """
## Datasets in the file { #further-datasets }

`[datasets.NAME]` is a [further dataset](../configuration.md#datasets). It may have these keys, with
the bounds that they have above; one that it leaves out is as for the dataset `default`:
"""


class Defaults(Settings):
    """Settings that ignore files and variables of the machine that builds this."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


def settings_page() -> str:
    """The page, in Markdown."""
    sqlite, cassandra = Defaults(), Defaults(store="cassandra", contact_points=("one",))
    parts = [_HEAD]
    for title, rows in _parts():
        parts.append(f"\n## {title}")
        parts += [_section(name, *rows[name], (sqlite, cassandra)) for name in rows]
    keys = ", ".join(f"[`{name}`](#{name})" for name in DatasetSettings.model_fields)
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


def _section(name: str, bounds: str, more: str, by_store: Sequence[Settings]) -> str:
    field = Settings.model_fields[name]
    flag = "none: process lists show those" if name in _NO_FLAG else f"`{_flag(name)}`"
    key = "none: it names the file" if name == "config" else f"`{name}`"
    return f"""
### `{name}` {{ #{name} }}

{field.description}.

| where | what |
|---|---|
| flag | {flag} |
| environment | `COUNTER_{name.upper()}` |
| TOML key | {key} |
| default | {_default(name, *by_store)} |
| allowed | {_allowed(name, bounds)} |
{f"| more | {more} |" if more else ""}
"""


def _flag(name: str) -> str:
    dashed = name.replace("_", "-")
    if Settings.model_fields[name].annotation is bool:
        return f"--{dashed}`, `--no-{dashed}"
    return f"--{dashed}"


def _default(name: str, *settings: Settings) -> str:
    values: list[Any] = [getattr(each, name) for each in settings]
    if name == "contact_points" or values[0] in (None, ()):
        return "none"
    texts = [toml_value(name, each).strip('"') for each in values]
    if name == "store" or texts[0] == texts[1]:
        return f"`{texts[0]}`"
    if name == "time_bucket":
        return f"the slice; `{texts[1]}`"
    return f"`{texts[0]}`; `{texts[1]}`"


def _allowed(name: str, bounds: str) -> str:
    if Settings.model_fields[name].annotation is bool:
        return "`true`, `false`"
    return bounds or ("a duration" if is_duration(name) else "text")
