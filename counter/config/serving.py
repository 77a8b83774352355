"""Define the settings of serving: listening, trust, and load limits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import BaseSettings

from counter import limits
from counter.config.values import Duration, Hosts, Origins, ReadableFile, between

_Rate = Annotated[int, Field(ge=0, le=limits.RATE_PER_S_MAX)]


class ServingSettings(BaseSettings):
    """The settings of serving; :class:`counter.config.settings.Settings` inherits them."""

    host: str = Field("127.0.0.1", description="The address to listen on")
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
