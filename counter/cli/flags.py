"""The flags of commands that need settings: one for each, and what reads them."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import Annotated

from cyclopts import Parameter

from counter.config.report import Loaded, load, toml_value
from counter.config.settings import Settings
from counter.telemetry.logs import log_to_stderr


def _is(name: str) -> Parameter:
    """The flag of the setting *name*: what it is for, and its default where there is one."""
    field = Settings.model_fields[name]
    given = None if field.default_factory else field.default
    default = "" if given in (None, ()) else toml_value(name, given).strip('"')
    return Parameter(help=(field.description or "") + (f" [{default}]." if default else "."))


_Text = str | None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class StoreFlags:
    """Where counts are kept; a flag that is left out is read from elsewhere."""

    config: Annotated[_Text, _is("config")] = None
    log_level: Annotated[_Text, _is("log_level")] = None
    log_format: Annotated[_Text, _is("log_format")] = None
    audit_log: Annotated[_Text, _is("audit_log")] = None
    store: Annotated[_Text, _is("store")] = None
    data: Annotated[_Text, _is("data")] = None
    wal_bytes_max: Annotated[_Text, _is("wal_bytes_max")] = None
    contact_points: Annotated[_Text, _is("contact_points")] = None
    local_datacenter: Annotated[_Text, _is("local_datacenter")] = None
    single_datacenter: Annotated[bool | None, _is("single_datacenter")] = None
    keyspace: Annotated[_Text, _is("keyspace")] = None
    cassandra_username: Annotated[_Text, _is("cassandra_username")] = None
    cassandra_password_file: Annotated[_Text, _is("cassandra_password_file")] = None
    tls_ca: Annotated[_Text, _is("tls_ca")] = None
    tls_cert: Annotated[_Text, _is("tls_cert")] = None
    tls_key: Annotated[_Text, _is("tls_key")] = None
    tls_check_host: Annotated[bool | None, _is("tls_check_host")] = None
    start_timeout: Annotated[_Text, _is("start_timeout")] = None
    retention: Annotated[_Text, _is("retention")] = None
    slice: Annotated[_Text, _is("slice")] = None
    write_timeout: Annotated[_Text, _is("write_timeout")] = None
    clock_skew_max: Annotated[_Text, _is("clock_skew_max")] = None
    time_bucket: Annotated[_Text, _is("time_bucket")] = None
    event_buckets: Annotated[_Text, _is("event_buckets")] = None
    event_buckets_max: Annotated[_Text, _is("event_buckets_max")] = None
    replication: Annotated[_Text, _is("replication")] = None
    write_consistency: Annotated[_Text, _is("write_consistency")] = None
    read_consistency: Annotated[_Text, _is("read_consistency")] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RollupFlags(StoreFlags):
    """What every process that counts needs besides."""

    cache: Annotated[_Text, _is("cache")] = None
    cache_timeout: Annotated[_Text, _is("cache_timeout")] = None
    cache_entries_max: Annotated[_Text, _is("cache_entries_max")] = None
    host: Annotated[_Text, _is("host")] = None
    metrics_port: Annotated[_Text, _is("metrics_port")] = None
    hosts: Annotated[_Text, _is("hosts")] = None
    insecure: Annotated[bool | None, _is("insecure")] = None
    lease_time: Annotated[_Text, _is("lease_time")] = None
    rollup_concurrency: Annotated[_Text, _is("rollup_concurrency")] = None
    audit_interval: Annotated[_Text, _is("audit_interval")] = None
    audit_rate: Annotated[_Text, _is("audit_rate")] = None
    drain_timeout: Annotated[_Text, _is("drain_timeout")] = None
    traces: Annotated[_Text, _is("traces")] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ServeFlags(RollupFlags):
    """What a process that serves needs besides."""

    port: Annotated[_Text, _is("port")] = None
    workers: Annotated[_Text, _is("workers")] = None
    rollup: Annotated[bool | None, _is("rollup")] = None
    rollup_window: Annotated[_Text, _is("rollup_window")] = None
    accept_limit: Annotated[_Text, _is("accept_limit")] = None
    shards: Annotated[_Text, _is("shards")] = None
    payload_check: Annotated[_Text, _is("payload_check")] = None
    body_bytes_max: Annotated[_Text, _is("body_bytes_max")] = None
    batch_items_max: Annotated[_Text, _is("batch_items_max")] = None
    namespaces_max: Annotated[_Text, _is("namespaces_max")] = None
    shards_max: Annotated[_Text, _is("shards_max")] = None
    requests_per_s: Annotated[_Text, _is("requests_per_s")] = None
    adds_per_s: Annotated[_Text, _is("adds_per_s")] = None
    reservations_per_s: Annotated[_Text, _is("reservations_per_s")] = None
    resolutions_per_s: Annotated[_Text, _is("resolutions_per_s")] = None
    request_timeout: Annotated[_Text, _is("request_timeout")] = None
    write_wait_max: Annotated[_Text, _is("write_wait_max")] = None
    log_requests: Annotated[_Text, _is("log_requests")] = None
    https_cert: Annotated[_Text, _is("https_cert")] = None
    https_key: Annotated[_Text, _is("https_key")] = None
    https_key_password_file: Annotated[_Text, _is("https_key_password_file")] = None
    https_client_ca: Annotated[_Text, _is("https_client_ca")] = None
    tls_in_front: Annotated[bool | None, _is("tls_in_front")] = None
    connections_max: Annotated[_Text, _is("connections_max")] = None
    connections_per_address: Annotated[_Text, _is("connections_per_address")] = None
    cors_origins: Annotated[_Text, _is("cors_origins")] = None
    shutdown_delay: Annotated[_Text, _is("shutdown_delay")] = None


def given(flags: StoreFlags | None) -> dict[str, str]:
    """What was said, by the names of the settings."""
    return {} if flags is None else {k: v for k, v in asdict(flags).items() if v is not None}


def ready(flags: StoreFlags | None) -> Loaded:
    """The settings, with logging set up by them. Raises StartupError."""
    loaded = load(given(flags))
    log_to_stderr(loaded.settings)
    for each in loaded.warnings:
        logging.getLogger("counter.config").warning("%s", each)
    return loaded
