"""The PostgreSQL adapter keeps the contracts, over a real server whose clock the test holds."""

from pathlib import Path

import pytest

from counter.ports import Store
from counter.storage.postgresql.database import PostgresqlOptions
from counter.storage.postgresql.store import PostgresqlStore
from counter.testing.cases import DATASET, StoreCases
from counter.testing.clock import FakeClock
from counter.testing.suites import add_suites
from counter.types import Namespace
from scripts.postgresql_server import PostgresqlServer
from tests.support.postgresql import FreshStore


class OnPostgresql(StoreCases):
    """How the suites get a PostgreSQL store."""

    transactional = True
    one_moment = True
    bounds = True

    @pytest.fixture(autouse=True)
    def database(self, postgresql: PostgresqlServer) -> None:
        self.options = PostgresqlOptions(postgresql.dsn(), schema="kept")

    def new_store(self, clock: FakeClock, directory: Path) -> Store:
        return FreshStore(self.options, clock, [DATASET], keeps_schema=True)

    async def lose_row(self, store: Store, namespace: Namespace, row: tuple[str, int]) -> None:
        assert isinstance(store, PostgresqlStore)
        await store._database.rows(
            "DELETE FROM {s}.windows WHERE namespace = $1 AND counter = $2 AND start = $3",
            *(namespace.id, *row),
        )


add_suites(globals(), OnPostgresql)
