"""Define the settings: from flags, then the environment (``COUNTER_...``), a TOML file, or
defaults.

:class:`Settings` are those of any store. Each kind of store adds its own in a subclass, and
:func:`settings_model` returns all together. docs/configuration.md describes each setting;
counter/config/report.py reports their sources.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from counter import limits
from counter.config.store_kinds import StoreKind, store_kind, store_names
from counter.config.values import (
    CacheAddress,
    Duration,
    Hosts,
    Origins,
    ReadableFile,
    StoreName,
    Word,
    between,
    by_store,
    memcached_servers,
    redis_server,
)
from counter.errors import CounterError, StartupError
from counter.quantities import format_duration
from counter.types import CounterType, Dataset, NamespaceSettings, PayloadCheck

CONFIG_VARIABLE: Final = "COUNTER_CONFIG"
#: Read from the working directory if it exists and no other file is named.
CONFIG_DEFAULT: Final = "counter.toml"
_FUTURE_LIMIT_US: Final = 5 * limits.SECOND

_Retention = Annotated[Duration, between(limits.RETENTION_MIN_US, limits.RETENTION_MAX_US)]
_Slice = Annotated[Duration, between(limits.MINUTE, limits.RETENTION_MAX_US)]
_WriteTimeout = Annotated[Duration, between(limits.MILLISECOND, limits.WRITE_TIMEOUT_MAX_US)]
_Skew = Annotated[Duration, between(0, limits.MINUTE)]
_TimeBucket = Annotated[Duration, between(limits.SECOND, limits.RETENTION_MAX_US)]
_EventBuckets = Annotated[int, Field(ge=1, le=256)]
_Rate = Annotated[int, Field(ge=0, le=limits.RATE_PER_S_MAX)]
_Model = TypeVar("_Model", bound=BaseModel)
_DATASET: Final = re.compile(r"[a-z][a-z0-9_]{0,30}", re.ASCII)


def _time_bucket(store: str, slice_us: int) -> int:
    """Return the default time bucket: the store's if that divides the slice, else the whole
    slice."""
    bucket_us = store_kind(store).defaults.time_bucket
    return slice_us if bucket_us == 0 or slice_us % bucket_us else bucket_us


class DatasetSettings(BaseModel):
    """A table ``[datasets.NAME]``; missing values default to those of the dataset ``default``."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    retention: _Retention | None = None
    slice: _Slice | None = None
    write_timeout: _WriteTimeout | None = None
    clock_skew_max: _Skew | None = None
    time_bucket: _TimeBucket | None = None
    event_buckets: _EventBuckets | None = None
    event_buckets_max: _EventBuckets | None = None


_EXTRA_DATASETS: Final[Any] = Field(
    default={}, description="Further datasets: tables [datasets.NAME] of the file"
)


class Settings(BaseSettings):
    """The settings of one process, whatever its store. Durations are text with a unit: 5s, 250ms,
    7d."""

    model_config = SettingsConfigDict(
        env_prefix="COUNTER_",
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        validate_default=False,
        # Of the classes that only settings_model() puts together, none is built.
        defer_build=True,
        # Errors would show the input, and it may contain a password.
        hide_input_in_errors=True,
    )

    host: Annotated[str, Word("ADDRESS")] = Field(
        "127.0.0.1", description="The address to listen on"
    )
    port: int = Field(8080, ge=0, le=65_535, description="The port; 0 for a free one")
    workers: int = Field(1, ge=1, le=64, description="API processes that share the port")
    metrics_port: int | None = Field(
        None, ge=1, le=65_535, description="A separate metrics port of each process"
    )
    insecure: bool = Field(
        False,
        description="Listen beyond loopback without API keys or TLS: every client has all rights",
    )
    https_cert: ReadableFile | None = Field(
        None, description="The server's certificate, with its chain; turns HTTPS on"
    )
    https_key: ReadableFile | None = Field(None, description="The key of https_cert")
    https_key_password_file: ReadableFile | None = Field(
        None, description="A file with the password of https_key, if it has one"
    )
    https_client_ca: ReadableFile | None = Field(
        None, description="The authority of clients' certificates; a client without one is rejected"
    )
    tls_in_front: bool = Field(
        False, description="A proxy in front terminates TLS, and only it can reach this address"
    )
    connections_max: int = Field(
        limits.CONNECTIONS_MAX,
        ge=10,
        le=1_000_000,
        description="The maximum of connections of a process; more are answered 503",
    )
    connections_per_address: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="Connections of one client address (IPv6: /64) at once; 0 for any number",
    )
    hosts: Hosts = Field(
        (), description="Names allowed in Host if no API keys exist, besides localhost: a.example"
    )
    cors_origins: Origins = Field(
        (),
        description="Web origins whose pages may send requests: https://a.example,https://b.example",
    )
    shutdown_delay: Annotated[Duration, between(0, 5 * limits.MINUTE)] = Field(
        0, description="How long /readyz answers 503 after SIGTERM before the port is closed"
    )
    drain_timeout: Annotated[Duration, between(0, 10 * limits.MINUTE)] = Field(
        limits.DRAIN_TIMEOUT_US,
        description="How long a process may finish its work after SIGTERM",
    )
    body_bytes_max: int = Field(
        limits.BODY_BYTES_MAX, ge=1_024, le=64 * 1024 * 1024, description="The largest body"
    )
    batch_items_max: int = Field(
        limits.BATCH_ITEMS_MAX, ge=1, le=limits.PENDING_WRITES_MAX, description="The largest batch"
    )
    namespaces_max: int = Field(
        limits.NAMESPACES_MAX, ge=1, le=1_000_000, description="The namespaces of one key"
    )
    shards_max: int = Field(
        limits.SHARDS_TOTAL_MAX,
        ge=1,
        le=1_000_000,
        description="The rollup shards of all namespaces together",
    )
    requests_per_s: _Rate = Field(
        0,
        description="Requests that one key may send to a process; 0 for any number",
    )
    adds_per_s: _Rate = Field(
        0,
        description="Adds that one key may send to a process; 0 for any number",
    )
    reservations_per_s: _Rate = Field(
        10_000,
        description="Requests of one key with an arbitrary Idempotency-Key; 0 for any number",
    )
    resolutions_per_s: _Rate = Field(
        1_000,
        description="Late tokens of one key that are resolved; 0 for any number",
    )
    request_timeout: Annotated[Duration, between(limits.MILLISECOND, limits.HOUR)] = Field(
        limits.REQUEST_TIMEOUT_US,
        description="How long a request may take to arrive, and a client to read its answer",
    )
    fast_lane: bool = Field(
        True, description="Answer the usual add and get of one counter without the ASGI application"
    )
    log_format: Literal["auto", "text", "json"] = Field(
        "auto", description="text, json, or auto: text on a terminal, else json"
    )
    log_requests: Literal["none", "failures", "all"] = Field(
        "failures", description="Requests to log: none, failures (5xx) or all"
    )
    audit_log: Path | None = Field(
        None, description="A file to which administrative acts are appended"
    )
    traces: Literal["none", "otlp"] = Field(
        "none", description="none, or otlp: to the collector that OTEL_EXPORTER_OTLP_... names"
    )

    def rates(self) -> dict[str, int]:
        """Return the default rate limits of a key per second, by kind."""
        return {
            "requests": self.requests_per_s,
            "adds": self.adds_per_s,
            "reservations": self.reservations_per_s,
            "resolutions": self.resolutions_per_s,
        }

    config: Path | None = Field(None, description="A TOML file with settings")
    log_level: Annotated[str, Word("LEVEL")] = Field(
        "warning",
        pattern="^(debug|info|warning|error)$",
        description="The lowest level that is logged",
    )

    store: StoreName = Field("sqlite", description="Where counts are kept")
    keyspace: str = Field(
        "counter",
        pattern="^[a-z][a-z0-9_]{0,30}$",
        description="The schema, the keyspace or the prefix of the tables in a shared store",
    )
    cache: CacheAddress = Field(
        "memory",
        description="memory, memcached://host:port,host:port, or redis://host:port",
        repr=False,
    )
    cache_timeout: Annotated[Duration, between(limits.MILLISECOND, 5 * limits.SECOND)] = Field(
        100 * limits.MILLISECOND, description="The time-out of requests to the cache"
    )
    cache_entries_max: int = Field(
        25_000, ge=1, le=10_000_000, description="Counts that a process keeps in its memory"
    )

    start_timeout: Annotated[Duration, between(0, 10 * limits.MINUTE)] = Field(
        limits.START_TIMEOUT_US,
        description="How long startup retries while the store is unavailable",
    )

    retention: _Retention = Field(
        7 * limits.DAY,
        description="How long events are kept, and so how late a retry may be",
    )
    slice: _Slice = Field(limits.DAY, description="The span of one event table")
    write_timeout: _WriteTimeout = Field(
        default_factory=by_store("write_timeout"),
        description="How long a write may take",
    )
    write_wait_max: Annotated[Duration, between(10 * limits.MILLISECOND, limits.MINUTE)] = Field(
        default_factory=by_store("write_wait_max"),
        description="The longest expected wait of a write; a longer one is rejected",
    )
    clock_skew_max: _Skew = Field(
        default_factory=by_store("clock_skew_max"),
        description="How far this clock may be from the store's",
    )
    time_bucket: _TimeBucket = Field(
        default_factory=lambda data: _time_bucket(data["store"], data["slice"]),
        description="The span of one partition of events",
    )
    event_buckets: _EventBuckets = Field(
        default_factory=by_store("event_buckets"),
        description="Partitions that share a counter's time bucket",
    )
    event_buckets_max: _EventBuckets = Field(
        default_factory=by_store("event_buckets_max"),
        description="The limit up to which event_buckets is raised automatically",
    )
    extra_datasets: Mapping[str, DatasetSettings] = _EXTRA_DATASETS

    rollup_window: Duration = Field(
        10 * limits.SECOND, description="The rollup window of new namespaces"
    )
    accept_limit: Duration = Field(
        5 * limits.SECOND,
        description="How old a token may be when its add arrives; an older one is resolved",
    )
    shards: int = Field(
        default_factory=by_store("shards"),
        ge=1,
        le=limits.SHARDS_MAX,
        description="The rollup shards of new namespaces",
    )
    payload_check: PayloadCheck = Field(
        PayloadCheck.GUARD, description="off, guard or strict, of new namespaces"
    )

    rollup: bool = Field(
        default_factory=by_store("rollup"), description="Roll up in the API's process"
    )
    lease_time: Annotated[Duration, between(limits.LEASE_TIME_MIN_US, 5 * limits.MINUTE)] = Field(
        limits.LEASE_TIME_US, description="How long a silent worker keeps its shards"
    )
    audit_interval: Annotated[Duration, between(0, 365 * limits.DAY)] = Field(
        limits.HOUR, description="The pause between audits of some counters; 0 for none"
    )
    audit_rate: int = Field(
        20, ge=1, le=10_000, description="The maximum of audited counters per second"
    )
    rollup_concurrency: int = Field(
        limits.ROLLUP_CONCURRENCY,
        ge=1,
        le=1_024,
        description="The maximum of counters that a worker rolls up at once",
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources in order: arguments, environment, file. Raises StartupError."""
        path = config_file(init_settings().get("config"))
        table = {} if path is None else read_toml(path)
        return init_settings, env_settings, InitSettingsSource(settings_cls, table)

    @model_validator(mode="before")
    @classmethod
    def _take_datasets(cls, values: Any) -> Any:
        """Rename ``datasets`` of the file; here that name is the method that returns all
        datasets."""
        if isinstance(values, dict) and "datasets" in values:
            values = {**values, "extra_datasets": values["datasets"]}
            del values["datasets"]
        return values

    @model_validator(mode="after")
    def _check_relations(self) -> Settings:
        if problems := list(self.problems()):
            raise ValueError("\n".join(problems))
        return self

    @property
    def kind(self) -> StoreKind[Any]:
        """The kind of the store."""
        return store_kind(self.store)

    def dataset(self) -> Dataset:
        """Return the dataset ``default`` as the first start on a data directory creates it."""
        return self.datasets()[0]

    def datasets(self) -> list[Dataset]:
        """Return all datasets, ``default`` first. A store identifies them by name and assigns
        the ids."""
        return [self._dataset(i, *each) for i, each in enumerate(self.settings_of_datasets())]

    def settings_of_datasets(self) -> list[tuple[str, DatasetSettings]]:
        """Return the names of all datasets, with what is set for each of them only."""
        return [("default", _datasets_of(type(self))()), *sorted(self.extra_datasets.items())]

    def of_dataset(self, own: DatasetSettings, name: str) -> Any:
        """Return the setting *name* of a dataset: its *own*, else that of all."""
        value = getattr(own, name)
        return getattr(self, name) if value is None else value

    def _dataset(self, number: int, name: str, own: DatasetSettings) -> Dataset:
        slice_us, bucket_us = self.of_dataset(own, "slice"), self.of_dataset(own, "time_bucket")
        if own.time_bucket is None and own.slice is not None and slice_us % bucket_us:
            bucket_us = _time_bucket(self.store, slice_us)
        return Dataset(
            id=number,
            name=name,
            retention_us=self.of_dataset(own, "retention"),
            slice_us=slice_us,
            time_bucket_us=bucket_us,
            event_buckets=self.of_dataset(own, "event_buckets"),
            event_buckets_max=self.of_dataset(own, "event_buckets_max"),
            write_timeout_us=self.of_dataset(own, "write_timeout"),
            clock_skew_max_us=self.of_dataset(own, "clock_skew_max"),
        )

    def cache_servers(self) -> tuple[tuple[str, int], ...]:
        """Return (host, port) of each memcached; empty for other caches."""
        return () if self.redis_server() else memcached_servers(self.cache)

    def redis_server(self) -> tuple[str, str] | None:
        """Return the URL of Redis, and host:port of it; None for other caches."""
        return redis_server(self.cache)

    def default_namespace(self) -> NamespaceSettings:
        """Return the settings of the namespace ``default``, which are the defaults of new
        namespaces."""
        return NamespaceSettings(
            counter_type=CounterType.ACCURATE,
            dataset="default",
            accept_limit_us=self.accept_limit,
            future_limit_us=max(_FUTURE_LIMIT_US, 2 * self.clock_skew_max),
            rollup_window_us=self.rollup_window,
            shards=self.shards,
            payload_check=self.payload_check,
            key_ttl_us=min(limits.DAY, self.retention // 2),
            cache_ttl_us=10 * limits.SECOND,
        )

    def problems(self) -> Iterator[str]:
        """Return what is wrong with the combination of settings that are each within their
        bounds."""
        yield from _serving_problems(self)
        for name in self.extra_datasets:
            if _DATASET.fullmatch(name) is None:
                yield f"dataset {name[:60]!r} does not match [a-z][a-z0-9_]{{0,30}}"
            elif name == "default":
                yield "dataset 'default' is set by the settings outside of [datasets.NAME]"
        for dataset in self.datasets():
            yield from _dataset_problems(dataset)
        # Imported late so that commands that read no settings start faster.
        from counter.config.namespace_rules import check_settings

        try:
            check_settings(self.default_namespace(), self.dataset())
        except CounterError as error:
            yield error.detail

    def warnings(self) -> Iterator[str]:
        """Return warnings about settings that are allowed and often a mistake."""
        yield from _serving_warnings(self)
        # Imported late so that commands that read no settings start faster.
        from counter.config.namespace_rules import creation_warnings

        namespace = self.default_namespace()
        yield from creation_warnings(namespace, self.dataset())
        yield from self.kind.advice(namespace)
        if self.cache == "memory" and not self.kind.serves_alone:
            yield (
                "cache is memory: each process has its own BEST_EFFORT counts; use"
                " memcached://host:port or redis://host:port"
            )


def _dataset_problems(dataset: Dataset) -> Iterator[str]:
    slice_text = format_duration(dataset.slice_us)
    at = "" if dataset.name == "default" else f"dataset {dataset.name!r}: "
    if dataset.slice_us > dataset.retention_us and at:
        yield (
            f"{at}slice is {slice_text}; it must not be longer than the retention of"
            f" {format_duration(dataset.retention_us)}"
        )
    if dataset.slice_us % dataset.time_bucket_us:
        yield (
            f"{at}time_bucket is {format_duration(dataset.time_bucket_us)}; it must divide the"
            f" slice of {slice_text}"
        )
    if 2 * dataset.clock_skew_max_us > dataset.slice_us and at:
        yield (
            f"{at}clock_skew_max is {format_duration(dataset.clock_skew_max_us)}; it must be at"
            f" most half the slice of {slice_text}"
        )


def _serving_problems(settings: Settings) -> Iterator[str]:
    """Return what is wrong with the settings of serving."""
    if settings.https_cert is None:
        for name in ("https_key", "https_client_ca"):
            if getattr(settings, name) is not None:
                yield f"{name} is set and https_cert is not: give both, or neither for plain HTTP"
    elif settings.https_key is None:
        yield "https_cert is set and https_key is not: give --https-key"
    if settings.https_key is None and settings.https_key_password_file is not None:
        yield "https_key_password_file is set and https_key is not: give both or neither"


def _serving_warnings(settings: Settings) -> Iterator[str]:
    """Return warnings about settings of serving that are allowed and often a mistake."""
    for name in ("https_key", "https_key_password_file"):
        path = getattr(settings, name)
        if path is not None and path.stat().st_mode & stat.S_IROTH:
            yield f"{name} {path} can be read by every user of this machine: chmod o-r {path}"
    plain = [each for each in settings.cors_origins if each.startswith("http://")]
    if plain and settings.https_cert is not None:
        yield (
            f"cors_origins has {plain[0]}: anyone on the network path can change such a page"
            " and its requests; use https://"
        )


@cache
def settings_model() -> type[Settings]:
    """Return the settings of this program: :class:`Settings`, and those of each kind of store that
    is installed."""
    kinds = [store_kind(each) for each in store_names()]
    for one, other in combinations(kinds, 2):
        if both := {*own_settings(one)}.intersection(own_settings(other)):
            raise StartupError(
                f"the stores {one.name!r} and {other.name!r} both have a setting"
                f" {', '.join(sorted(both))}: uninstall the package of one of them"
            )
    models = _with_last(Settings, [each.settings for each in kinds])
    datasets = _with_last(DatasetSettings, map(_datasets_of, models))
    dataset = create_model("InstalledDataset", __base__=datasets, __module__=__name__)
    return create_model(
        "InstalledSettings",
        __base__=models,
        __module__=__name__,
        extra_datasets=(Mapping[str, dataset], _EXTRA_DATASETS),
    )


def __getattr__(name: str) -> Any:
    """Return a class of the settings of this program by its name, for ``pickle``."""
    for each in (settings_model, dataset_model):
        if name.startswith("Installed") and each().__name__ == name:
            return each()
    raise AttributeError(name)


def _with_last(base: type[_Model], others: Iterable[type[_Model]]) -> tuple[type[_Model], ...]:
    """Return different classes, of which *base* is the last one: the others are derived from it."""
    return (*dict.fromkeys(each for each in others if each is not base), base)


def own_settings(kind: StoreKind[Any]) -> Sequence[str]:
    """Return the names of the settings that *kind* adds to those of any store."""
    return [each for each in kind.settings.model_fields if each not in Settings.model_fields]


def dataset_model() -> type[DatasetSettings]:
    """Return the settings that a table ``[datasets.NAME]`` may have in this program."""
    return _datasets_of(settings_model())


def _datasets_of(model: type[Settings]) -> type[DatasetSettings]:
    _, dataset = get_args(model.model_fields["extra_datasets"].annotation)
    found: type[DatasetSettings] = dataset
    return found


def config_file(named: str | Path | None) -> Path | None:
    """Return the file to read: *named*, else the one of the environment, else the default if it
    exists.

    Raises StartupError if a file is named and does not exist.
    """
    name = named or os.environ.get(CONFIG_VARIABLE)
    if name:
        path = Path(name)
        if not path.is_file():
            raise StartupError(f"the configuration {str(path)!r} is not there, or is no file")
        return path
    default = Path(CONFIG_DEFAULT)
    return default if default.is_file() else None


def read_toml(path: Path) -> dict[str, Any]:
    """Return the settings in *path*. Raises StartupError if it is not TOML."""
    try:
        table = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise StartupError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StartupError(f"{path}: it is not TOML: {error}") from error
    if "config" in table:
        raise StartupError(f"{path}: config names another file; there can be only one")
    return table
