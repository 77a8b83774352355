"""Store everything in Amazon DynamoDB, for any number of processes.

It has no transaction that checks an event's age, so it is of the kind without transactions, as
Cassandra is. Conditional writes tell what was stored before; docs/architecture.md has the design.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from counter.config.store_kinds import StoreDefaults
from counter.limits import MILLISECOND, SECOND
from counter.storage.dynamodb.settings import DynamodbSettings
from counter.storage.server_kind import ServerKind

if TYPE_CHECKING:
    from counter.ports import Clock, Store


class DynamodbKind(ServerKind[DynamodbSettings]):
    """The kind of store of DynamoDB."""

    name, title, driver = "dynamodb", "DynamoDB", "aiobotocore"
    start = "set the region and the credentials right"
    look = "look at DynamoDB's metrics of throttled requests and of errors"
    settings, backed_up_by = DynamodbSettings, "point-in-time recovery"
    defaults = StoreDefaults(
        write_timeout=2 * SECOND,
        write_wait_max=2 * SECOND,
        clock_skew_max=1_500 * MILLISECOND,
        event_buckets=4,
        event_buckets_max=64,
        shards=16,
    )

    def open(self, settings: DynamodbSettings, clock: Clock, *, to_audit: bool = False) -> Store:
        self.require_driver()
        from counter.storage.dynamodb.schema import dynamodb_options
        from counter.storage.dynamodb.store import DynamodbStore

        return DynamodbStore(dynamodb_options(settings), clock)

    async def apply_schema(self, settings: DynamodbSettings) -> Sequence[str]:
        self.require_driver()
        from counter.storage.dynamodb.schema import apply_for

        return await apply_for(settings)
