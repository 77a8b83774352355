"""The settings that only SQLite has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from counter import limits
from counter.config.settings import Settings
from counter.config.values import Word


class SqliteSettings(Settings):
    """The settings of a process over SQLite."""

    data: Annotated[Path, Word("DIRECTORY")] = Field(
        Path("data"), description="The data directory of SQLite"
    )
    wal_bytes_max: int = Field(
        limits.WAL_BYTES_MAX,
        ge=4 * limits.WAL_BYTES_KEPT,
        le=limits.INT64_MAX,
        description="The size of SQLite's write-ahead log, in bytes, at which writes are rejected",
    )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.store == "sqlite" and self.workers > 1:
            yield (
                f"workers is {self.workers} and store is sqlite, whose data directory only one"
                " process can use: use --workers 1, or another --store"
            )
