"""Load settings and report them: the source of each, all problems, all effective values."""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, get_args

from pydantic import PlainSerializer, SecretStr, ValidationError
from pydantic_core import ErrorDetails

from counter.config.settings import (
    Settings,
    config_file,
    dataset_model,
    read_toml,
    settings_model,
)
from counter.config.values import without_password
from counter.errors import StartupError
from counter.quantities import format_duration

_PREFIX: Final = "COUNTER_"
#: Environment variables of the commands that call a running service; server processes ignore them.
_CLIENTS: Final = ("url", "namespace", "api_key", "context")
_MASK: Final = "********"
_SHOWN_CHARS_MAX: Final = 80
#: Problems that only follow from other problems.
_FOLLOWS: Final = "default_factory_not_called"


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings, and the source of each one that was given."""

    settings: Settings
    origins: Mapping[str, str]
    warnings: tuple[str, ...]


def load(flags: Mapping[str, Any]) -> Loaded:
    """Return the settings of *flags*, the environment and the file.

    Raises StartupError with every problem, a line each.
    """
    origins = _origins(flags)
    cache = str(flags.get("cache"))
    if without_password(cache) != cache:
        raise StartupError(
            "cache (flag --cache): a password does not belong on a command line, which process"
            " lists show: set COUNTER_CACHE, or cache in the file"
        )
    try:
        settings = settings_model()(**flags)
    except ValidationError as error:
        raise StartupError("\n".join(_problems(error, origins))) from None
    warnings = (*_unknown_in_environment(), *settings.warnings())
    return Loaded(settings, origins, warnings)


def effective(loaded: Loaded) -> str:
    """Return all settings in TOML with the source of each; secrets are masked."""
    settings = loaded.settings
    lines = []
    for name in settings_model().model_fields:
        if name in ("config", "extra_datasets"):
            continue
        value = getattr(settings, name)
        said = f"# {name} is not set" if value is None else f"{name} = {toml_value(name, value)}"
        lines.append(f"{said:<48}# {loaded.origins.get(name, 'default')}")
    for name, own in sorted(settings.extra_datasets.items()):
        lines += ["", f"[datasets.{name}]"]
        for field in dataset_model().model_fields:
            value = getattr(own, field)
            if value is not None:
                lines.append(f"{field} = {toml_value(field, value)}")
    lines += [f"# Warning: {each}" for each in loaded.warnings]
    return "\n".join(lines) + "\n"


def document_of(loaded: Loaded) -> dict[str, Any]:
    """Return the same for programs; values are as in TOML, and datasets are listed by name."""
    read = tomllib.loads(effective(loaded))
    datasets = read.pop("datasets", {})
    return {
        "settings": {
            name: {"value": read.get(name), "from": loaded.origins.get(name, "default")}
            for name in settings_model().model_fields
            if name not in ("config", "extra_datasets")
        },
        "datasets": datasets,
        "warnings": list(loaded.warnings),
    }


def toml_value(name: str, value: Any) -> str:
    """Return the value of the setting *name* as TOML text."""
    if isinstance(value, SecretStr):
        return json.dumps(_MASK)
    if name == "cache":
        value = without_password(value)
    for each in settings_model().model_fields[name].metadata:
        if isinstance(each, PlainSerializer):
            text: str = each.func(value)  # type: ignore[call-arg]
            return text if text.isdigit() else json.dumps(text)
    if isinstance(value, bool | int):
        return json.dumps(value)
    if isinstance(value, tuple):
        return json.dumps(list(value))
    # JSON does not escape DEL, and TOML does not allow it.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def is_duration(name: str) -> bool:
    """Return whether the setting *name* is a duration; durations have their own text form."""
    metadata = settings_model().model_fields[name].metadata
    return any(getattr(each, "func", None) is format_duration for each in metadata)


def is_secret(name: str) -> bool:
    """Return whether the setting *name* is a secret as a whole; ``cache`` only contains one."""
    return SecretStr in get_args(settings_model().model_fields[name].annotation)


def _origins(flags: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the source of each setting that is given. Raises StartupError."""
    path = config_file(flags.get("config"))
    found = {} if path is None else dict.fromkeys(read_toml(path), f"file {path}")
    given = {name.upper() for name, value in os.environ.items() if value}
    for name in settings_model().model_fields:
        if f"{_PREFIX}{name.upper()}" in given:
            found[name] = f"environment {_PREFIX}{name.upper()}"
    for name in flags:
        found[name] = f"flag --{name.replace('_', '-')}"
    for name in filter(is_secret, settings_model().model_fields):
        # The file NAME_file holds the secret NAME.
        if f"{name}_file" in found:
            found.setdefault(name, found[f"{name}_file"])
    return found


def _problems(error: ValidationError, origins: Mapping[str, str]) -> Iterator[str]:
    for each in error.errors(include_url=False):
        message = each["msg"].removeprefix("Value error, ")
        if each["type"] == _FOLLOWS:
            continue
        if not each["loc"]:
            yield from message.split("\n")
            continue
        name, *rest = map(str, each["loc"])
        shown = ".".join(["datasets" if name == "extra_datasets" else name, *rest])
        origin = origins.get("datasets" if name == "extra_datasets" else name)
        yield f"{shown}{f' ({origin})' if origin else ''}: {_what(each, message, name, rest)}"


def _what(each: ErrorDetails, message: str, name: str, rest: list[str]) -> str:
    """Describe what is wrong with one value, which is shown unless it is secret."""
    if each["type"] == "extra_forbidden":
        is_section = isinstance(each["input"], dict) and not rest
        known = (dataset_model() if rest else settings_model()).model_fields
        close = difflib.get_close_matches(
            (rest or [name])[-1], ["datasets"] if is_section else known, 1
        )
        what = "section, only [datasets.NAME]" if is_section else "setting"
        return f"there is no such {what}{f'; is it {close[0]}?' if close else ''}"
    if name == "cache" or is_secret(name):
        return message
    value = str(each["input"])[:_SHOWN_CHARS_MAX]
    return message if value in message else f"{message} (it is {value!r})"


def _unknown_in_environment() -> Iterator[str]:
    known = {f"{_PREFIX}{name}".upper() for name in (*settings_model().model_fields, *_CLIENTS)}
    for name in sorted(os.environ):
        if name.upper().startswith(_PREFIX) and name.upper() not in known:
            close = difflib.get_close_matches(name.upper(), known, 1)
            hint = f"; is it {close[0]}?" if close else ""
            yield f"unknown setting {name} in the environment{hint}"
