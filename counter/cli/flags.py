"""The flags of commands that need settings: one for each setting, with its description as help."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field, make_dataclass
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, get_args, get_origin

from cyclopts import Group, Parameter

from counter.config.report import Loaded, is_duration, load, toml_value
from counter.config.settings import DatasetSettings, Settings
from counter.telemetry.logs import log_to_stderr

#: The settings that say where the store is.
STORE: Final = (
    *("config", "log_level", "log_format", "audit_log", "store", "data", "wal_bytes_max"),
    *(
        "postgresql_connections",
        "contact_points",
        "local_datacenter",
        "single_datacenter",
        "keyspace",
    ),
    *("dynamodb_region", "dynamodb_endpoint", "dynamodb_connections"),
    *("dynamodb_read_units", "dynamodb_write_units", "dynamodb_recovery"),
    *("cassandra_username", "cassandra_password_file"),
    *("tls_ca", "tls_cert", "tls_key", "tls_check_host", "start_timeout"),
    # A dataset is the same for each process that creates it, writes it or rolls it up.
    *DatasetSettings.model_fields,
)
_ROLLUP: Final = (
    *("cache", "cache_timeout", "cache_entries_max", "host", "metrics_port", "hosts", "insecure"),
    *("lease_time", "rollup_concurrency", "audit_interval", "audit_rate", "drain_timeout"),
    "traces",
)
_Panels = Sequence[tuple[Group, Collection[str]]]
#: The panels of the flags in the help of a command for which only the place of the store matters;
#: all settings that are in no panel are in the last one.
_OF_PLACE: Final[_Panels] = (
    (
        Group("Store", sort_key=1),
        ("config", "store", "data", "contact_points", "keyspace"),
    ),
    (Group("Other settings", sort_key=2), Settings.model_fields),
)
#: And of a command that sets up or serves what is there.
_OF_ALL: Final[_Panels] = (
    (Group("Log", sort_key=2), ("log_level", "log_format", "log_requests", "audit_log", "traces")),
    (Group("Dataset", sort_key=3), DatasetSettings.model_fields),
    (Group("Store", sort_key=1), STORE),
    (Group("Rollup", sort_key=4), _ROLLUP),
    (Group("Serve", sort_key=5), Settings.model_fields),
)
#: Words for values that are neither durations, numbers, files, names nor a short choice.
_WORDS: Final[Mapping[str, str]] = {
    "cache": "URL",
    "contact_points": "HOSTS",
    "cors_origins": "ORIGINS",
    "data": "DIRECTORY",
    "dynamodb_endpoint": "URL",
    "dynamodb_region": "REGION",
    "host": "ADDRESS",
    "hosts": "HOSTS",
    "log_level": "LEVEL",
    "read_consistency": "LEVEL",
    "replication": "COPIES",
    "store": "STORE",
    "write_consistency": "LEVEL",
}
#: A secret does not belong on a command line, and tables do not fit there.
_NO_FLAGS: Final = ("cassandra_password", "dsn", "extra_datasets")


def _flags(settings: Iterable[str], panels: _Panels = _OF_ALL) -> Callable[[type], Any]:
    """Give a class a flag for each of *settings*, in *panels* of the help."""

    def give(cls: type) -> Any:
        made = make_dataclass(
            cls.__name__,
            [(name, _flag(name, panels), field(default=None)) for name in settings],
            bases=cls.__bases__,
            namespace={"__doc__": cls.__doc__, "__module__": __name__},
            frozen=True,
            kw_only=True,
        )
        return Parameter(name="*")(made)

    return give


def _flag(name: str, panels: _Panels) -> Any:
    """Return the type of the flag of *name*, with its description and default as help."""
    setting = Settings.model_fields[name]
    value = None if setting.default_factory else setting.default
    default = "" if value in (None, ()) else toml_value(name, value).strip('"')
    text = (setting.description or "") + (f" [{default}]." if default else ".")
    kind = bool if setting.annotation is bool else str
    panel = next(panel for panel, names in panels if name in names)
    return Annotated[kind | None, Parameter(help=text, metavar=_word(name), group=panel)]


def _word(name: str) -> str:
    """Return the word for the value of *name* in the help."""
    kind = Settings.model_fields[name].annotation
    if is_duration(name):
        return "DURATION"
    if name in _WORDS:
        return _WORDS[name]
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return "|".join(kind)
    if kind in (int, int | None):
        return "NUMBER"
    return "FILE" if "Path" in str(kind) else "NAME"


@_flags(STORE, _OF_PLACE)
class StoreFlags:
    """Flags of the store; a flag that is left out is read from the environment or the file."""


@_flags(STORE)
class SchemaFlags(StoreFlags):
    """The same, of a command that sets the store up."""


@_flags(_ROLLUP)
class RollupFlags(SchemaFlags):
    """Further flags of every process that counts."""


@_flags(each for each in Settings.model_fields if each not in (*STORE, *_ROLLUP, *_NO_FLAGS))
class ServeFlags(RollupFlags):
    """Further flags of a process that serves: all other settings."""


def given(flags: StoreFlags | None) -> dict[str, str]:
    """Return the given flags by the names of the settings."""
    return {} if flags is None else {k: v for k, v in vars(flags).items() if v is not None}


def ready(flags: StoreFlags | None) -> Loaded:
    """Return the settings, with logging set up by them. Raises StartupError."""
    loaded = load(given(flags))
    log_to_stderr(loaded.settings)
    for each in loaded.warnings:
        logging.getLogger("counter.config").warning("%s", each)
    return loaded
