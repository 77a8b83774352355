"""The settings that only DynamoDB has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from counter.config.settings import Settings
from counter.config.values import Word
from counter.limits import SECOND
from counter.quantities import format_duration

_Connections = Annotated[int, Field(ge=2, le=1_000)]
_Units = Annotated[int, Field(ge=0, le=1_000_000)]


class DynamodbSettings(Settings):
    """The settings of a process over DynamoDB. ``keyspace`` is the prefix of the tables."""

    dynamodb_region: Annotated[str | None, Word("REGION")] = Field(
        None,
        pattern="^[a-z0-9-]{1,32}$",
        description="DynamoDB's region; by default that of the AWS SDKs",
    )
    dynamodb_endpoint: Annotated[str | None, Word("URL")] = Field(
        None,
        pattern=r"^https?://[a-z0-9.:\[\]-]{1,253}/?$",
        description="Where DynamoDB is, if not at the usual address of the region",
    )
    dynamodb_connections: _Connections = Field(
        64, description="Connections that each process keeps to DynamoDB, at most"
    )
    dynamodb_read_units: _Units = Field(
        0, description="Read units a second of each new table; 0: on demand"
    )
    dynamodb_write_units: _Units = Field(
        0, description="Write units a second of each new table; 0: on demand"
    )
    dynamodb_recovery: bool = Field(False, description="Point-in-time recovery of new tables")

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if (self.dynamodb_read_units == 0) != (self.dynamodb_write_units == 0):
            yield (
                "dynamodb_read_units and dynamodb_write_units belong together: give both or neither"
            )
        for each in self.datasets():
            if self.store == "dynamodb" and each.clock_skew_max_us < SECOND:
                yield (
                    f"clock_skew_max of dataset {each.name!r} is"
                    f" {format_duration(each.clock_skew_max_us)}, and DynamoDB reports its time in"
                    " whole seconds: give 1s or more"
                )
