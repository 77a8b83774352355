"""Compose the DynamoDB store from its parts."""

from __future__ import annotations

from collections.abc import Mapping

from counter.capabilities import Capabilities
from counter.errors import StartupError
from counter.ports import Clock
from counter.storage.dynamodb.control import DynamodbControl
from counter.storage.dynamodb.decisions import DynamodbDecisions, DynamodbKeys, DynamodbLeases
from counter.storage.dynamodb.driver import Driver, DynamodbOptions, put
from counter.storage.dynamodb.events import DynamodbEvents
from counter.storage.dynamodb.layout import ALONE
from counter.storage.dynamodb.rollups import DynamodbRecounts, DynamodbRollups
from counter.storage.dynamodb.session import DynamodbSession


class DynamodbSeparateWrites:
    """:class:`counter.ports.SeparateWrites`, of which each part has its own."""

    def __init__(self, events: DynamodbEvents, rollups: DynamodbRollups) -> None:
        self.mark, self.mark_atomic = rollups.mark, rollups.mark_atomic
        self.dirty_atomic, self.unlist = rollups.dirty_atomic, rollups.unlist
        self.rewrite, self.void = events.rewrite, events.void


class DynamodbStore:
    """:class:`counter.ports.Store` over DynamoDB. Any number of processes share it."""

    def __init__(
        self, options: DynamodbOptions, clock: Clock, driver: Driver | None = None
    ) -> None:
        self.driver = driver or Driver(options)
        self.session = session = DynamodbSession(self.driver, clock)
        self.events = DynamodbEvents(session)
        self.rollups = DynamodbRollups(session)
        self.recounts = DynamodbRecounts(session)
        self.decisions = DynamodbDecisions(session)
        self.separate_writes = DynamodbSeparateWrites(self.events, self.rollups)
        self.control = DynamodbControl(session)
        self.leases = DynamodbLeases(session)
        self.keys = DynamodbKeys(session)
        self.capabilities = Capabilities()
        self.tally = self.driver.tally

    async def open(self) -> None:
        """Connect, and read the datasets. Raises StartupError and UnavailableError."""
        await self.driver.open()
        try:
            await self.session.load()
            if not self.session.states:
                raise StartupError("DynamoDB has no dataset yet: run `counter schema apply`")
        except BaseException:
            await self.driver.close()
            raise

    async def close(self) -> None:
        """Finish what was taken, and close the connections."""
        await self.rollups.close()
        await self.driver.close()

    async def ping(self) -> None:
        """Write an item that means nothing. Raises StoreUnavailableError if that fails."""
        await self.driver.write(put(self.session.control, {"pk": b"ping", "sk": ALONE}))

    def queues(self) -> Mapping[str, int]:
        """Return how many calls wait because too many are under way, and how many marks wait for
        others."""
        return {"store_calls": self.driver.waiting, "store_rows": self.rollups.waiting}
