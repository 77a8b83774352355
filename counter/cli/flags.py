"""The flags of commands that need settings: one for each setting, with its description as help."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import field, make_dataclass
from enum import StrEnum
from itertools import chain
from typing import Annotated, Any, Final, Literal, get_args, get_origin

from cyclopts import Group, Parameter

from counter.config.report import Loaded, is_duration, is_secret, load, toml_value
from counter.config.settings import dataset_model, own_settings, settings_model
from counter.config.store_kinds import store_kind, store_names
from counter.config.values import Word
from counter.telemetry.logs import log_to_stderr

_SETTINGS: Final = settings_model().model_fields
_OF_DATASETS: Final = dataset_model().model_fields
_OF_STORES: Final = tuple(own_settings(store_kind(each)) for each in store_names())
#: The settings that locate the store.
STORE: Final = tuple(
    dict.fromkeys(
        each
        for each in (
            *("config", "log_level", "log_format", "audit_log", "store"),
            *chain.from_iterable(_OF_STORES),
            *("keyspace", "start_timeout"),
            # A dataset is the same for each process that creates it, writes it or rolls it up.
            *_OF_DATASETS,
        )
        if not is_secret(each)
    )
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
        ("config", "store", *(names[0] for names in _OF_STORES if names), "keyspace"),
    ),
    (Group("Other settings", sort_key=2), _SETTINGS),
)
#: And of a command that sets a store up or serves it: what most need comes first, and what belongs
#: to one store last.
_OF_ALL: Final[_Panels] = (
    (
        Group("Start", sort_key=1),
        ("config", "store", "data", "host", "port", "insecure", "workers", "cache"),
    ),
    *(
        (Group(f"Only with --store {name}", sort_key=9), settings)
        for name, settings in zip(store_names(), _OF_STORES, strict=True)
    ),
    (Group("Log", sort_key=7), ("log_level", "log_format", "log_requests", "audit_log", "traces")),
    (Group("Dataset", sort_key=3), (*_OF_DATASETS, "keyspace", "start_timeout")),
    (
        Group("Access", sort_key=2),
        (
            *("https_cert", "https_key", "https_key_password_file", "https_client_ca"),
            *("tls_in_front", "hosts", "cors_origins"),
        ),
    ),
    (
        Group("New namespaces", sort_key=4),
        ("rollup_window", "accept_limit", "shards", "payload_check"),
    ),
    (Group("Rollup and cache", sort_key=5), (*_ROLLUP, "rollup")),
    (Group("Limits", sort_key=6), _SETTINGS),
)


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
    setting = _SETTINGS[name]
    value = None if setting.default_factory else setting.default
    default = "" if value in (None, ()) else toml_value(name, value).strip('"')
    text = (setting.description or "") + (f" [{default}]." if default else ".")
    kind = bool if setting.annotation is bool else str
    panel = next(panel for panel, names in panels if name in names)
    return Annotated[kind | None, Parameter(help=text, metavar=_word(name), group=panel)]


def _word(name: str) -> str:
    """Return the word for the value of *name* in the help."""
    kind = _SETTINGS[name].annotation
    for each in _SETTINGS[name].metadata:
        if isinstance(each, Word):
            return each.text
    if is_duration(name):
        return "DURATION"
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


@_flags(
    each
    for each in _SETTINGS
    if each not in (*STORE, *_ROLLUP, "extra_datasets") and not is_secret(each)
)
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
