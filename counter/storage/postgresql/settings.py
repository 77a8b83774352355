"""The settings that only PostgreSQL has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, SecretStr

from counter.config.settings import Settings


class PostgresqlSettings(Settings):
    """The settings of a process over PostgreSQL. ``keyspace`` is the schema."""

    dsn: SecretStr | None = Field(
        None, description="Where PostgreSQL is: postgresql://user:password@host:port/database"
    )
    postgresql_connections: Annotated[int, Field(ge=2, le=1_000)] = Field(
        8, description="Connections that each process keeps to PostgreSQL, at most"
    )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.store != "postgresql" and self.dsn is not None:
            yield (
                f"dsn is set and store is {self.store}, which has none: add --store postgresql, or"
                " omit dsn"
            )
        elif self.store == "postgresql" and self.dsn is None:
            yield (
                "store is postgresql and dsn is missing: set COUNTER_DSN to"
                " postgresql://user:password@host:port/database"
            )
