"""The flags of commands that need settings: one for each setting, with its description as help."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import field, make_dataclass
from typing import Annotated, Any, Final

from cyclopts import Parameter

from counter.config.report import Loaded, load, toml_value
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
#: A secret does not belong on a command line, and tables do not fit there.
_NO_FLAGS: Final = ("cassandra_password", "dsn", "extra_datasets")


def _flags(settings: Iterable[str]) -> Callable[[type], Any]:
    """Give a class a flag for each of *settings*, besides those of its base."""

    def give(cls: type) -> Any:
        made = make_dataclass(
            cls.__name__,
            [(name, _flag(name), field(default=None)) for name in settings],
            bases=cls.__bases__,
            namespace={"__doc__": cls.__doc__, "__module__": __name__},
            frozen=True,
            kw_only=True,
        )
        return Parameter(name="*")(made)

    return give


def _flag(name: str) -> Any:
    """Return the type of the flag of *name*, with its description and default as help."""
    setting = Settings.model_fields[name]
    value = None if setting.default_factory else setting.default
    default = "" if value in (None, ()) else toml_value(name, value).strip('"')
    text = (setting.description or "") + (f" [{default}]." if default else ".")
    kind = bool if setting.annotation is bool else str
    return Annotated[kind | None, Parameter(help=text)]


@_flags(STORE)
class StoreFlags:
    """Flags of the store; a flag that is left out is read from the environment or the file."""


@_flags(_ROLLUP)
class RollupFlags(StoreFlags):
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
