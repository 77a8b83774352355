"""Settings: from flags, else from the environment (``COUNTER_...``)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer
from pydantic_settings import BaseSettings, SettingsConfigDict

from counter import limits
from counter.durations import format_duration, parse_duration
from counter.types import CounterType, Dataset, NamespaceSettings, PayloadCheck


def _to_us(value: Any) -> Any:
    return parse_duration(value) if isinstance(value, str) else value


#: A duration, read from text like "5s" and kept in microseconds.
Duration = Annotated[int, BeforeValidator(_to_us), PlainSerializer(format_duration)]


class Settings(BaseSettings):
    """The settings of one ``counter serve``. Durations are text with a unit: 5s, 250ms, 7d."""

    model_config = SettingsConfigDict(env_prefix="COUNTER_", extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    port: int = Field(default=8080, ge=0, le=65_535)
    data: Path = Path("data")

    retention: Duration = Field(
        default=7 * limits.DAY, ge=limits.RETENTION_MIN_US, le=limits.RETENTION_MAX_US
    )
    slice: Duration = Field(default=limits.DAY, ge=limits.MINUTE, le=limits.RETENTION_MAX_US)
    write_timeout: Duration = Field(default=limits.SECOND, ge=limits.MILLISECOND, le=limits.MINUTE)
    rollup_window: Duration = 10 * limits.SECOND
    accept_limit: Duration = 5 * limits.SECOND

    body_bytes_max: int = Field(default=limits.BODY_BYTES_MAX, ge=1_024, le=64 * 1024 * 1024)
    batch_items_max: int = Field(default=limits.BATCH_ITEMS_MAX, ge=1, le=limits.PENDING_WRITES_MAX)
    request_timeout: Duration = Field(
        default=limits.REQUEST_TIMEOUT_US, ge=limits.MILLISECOND, le=limits.HOUR
    )
    cache_entries_max: int = Field(default=25_000, ge=1, le=10_000_000)

    def dataset(self) -> Dataset:
        """The dataset ``default`` as the first start on a data directory makes it."""
        return Dataset(
            id=0,
            name="default",
            retention_us=self.retention,
            slice_us=self.slice,
            time_bucket_us=self.slice,
            event_buckets=1,
            write_timeout_us=self.write_timeout,
            # One process: the store's clock is the process's own.
            clock_skew_max_us=0,
        )

    def default_namespace(self) -> NamespaceSettings:
        """The namespace ``default``, and what a new namespace gets where it says nothing else."""
        return NamespaceSettings(
            counter_type=CounterType.ACCURATE,
            dataset="default",
            accept_limit_us=self.accept_limit,
            future_limit_us=5 * limits.SECOND,
            rollup_window_us=self.rollup_window,
            shards=1,
            payload_check=PayloadCheck.GUARD,
            key_ttl_us=min(limits.DAY, self.retention // 2),
            cache_ttl_us=10 * limits.SECOND,
        )
