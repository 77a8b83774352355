"""Counts are exact in any order of statements, commits, lost responses and terminated sessions."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final
from unittest.mock import AsyncMock

import pytest

from counter.storage.postgresql import decisions, fence, rollups, schema
from counter.storage.postgresql.database import PostgresqlDatabase
from scripts.postgresql_server import PostgresqlServer
from tests.postgresql.backends import Server
from tests.postgresql.order_world import OrderWorld, dataset_of, draw_plan, run_orders
from tests.properties.seeds import Fault, check_seeds, is_found, planted
from tests.simulation.reported import COVERED, COVERED_MIN

SEEDS: Final = int(os.environ.get("ORDERS", "4"))
SITUATIONS: Final = frozenset(
    {
        *("stopped", "held", "waited", "slow"),
        *("unsent", "unanswered", "unseen commit", "canceled", "killed", "crashed", "clock set"),
        *("limit changed", "cancelled"),
    }
)
LOCK: Final = (
    "PERFORM pg_advisory_xact_lock_shared(('datasets'::regclass::oid::bigint << 32) | p_dataset);"
)


@contextmanager
def served(postgresql: PostgresqlServer, name: str) -> Iterator[Server]:
    """The schema *name*, made of the functions as they are now."""
    server = Server(postgresql.dsn(), name)
    try:
        server.make(dataset_of(draw_plan(0).config))
        yield server
    finally:
        server.close()


def test_counts_are_exact_in_any_order(postgresql: PostgresqlServer) -> None:
    compared: Counter[str] = Counter()
    with served(postgresql, "orders") as server:

        def run(seed: int) -> OrderWorld:
            world = run_orders(server, seed)
            compared.update(world.compared)
            return world

        check_seeds(run, SEEDS, SITUATIONS)
    assert compared[COVERED] >= COVERED_MIN * compared.total(), compared


def append_without_the_lock(patch: pytest.MonkeyPatch) -> None:
    """An append is not seen by those who wait for appends."""
    _change_functions(patch, LOCK, "PERFORM 1;")


def _change_functions(patch: pytest.MonkeyPatch, old: str, new: str) -> None:
    plain = schema._sql

    def changed(name: str) -> str:
        text = plain(name)
        assert name != "functions.sql" or old in text
        return text.replace(old, new)

    patch.setattr(schema, "_sql", changed)


def judge_by_the_longest_limit(patch: pytest.MonkeyPatch) -> None:
    """An append takes the shortcut for events that are young enough by one of the limits."""
    _change_functions(
        patch,
        "(SELECT min(l) FROM unnest(n.era_limit) l)",
        "(SELECT max(l) FROM unnest(n.era_limit) l)",
    )


def judge_by_the_first_limit(patch: pytest.MonkeyPatch) -> None:
    """An append judges an event by the limit of the first era before it, not of the last."""
    _change_functions(patch, "ORDER BY era.since DESC LIMIT 1", "ORDER BY era.since LIMIT 1")


def close_windows_without_waiting(patch: pytest.MonkeyPatch) -> None:
    """A worker sums windows that running appends may still change."""
    patch.setattr(fence, "wait_for_appends", AsyncMock())


def decide_without_waiting(patch: pytest.MonkeyPatch) -> None:
    """A token is void, or cancelled as one that was never counted, although an append of it may
    commit."""
    patch.setattr(decisions, "wait_for_appends", AsyncMock())


def close_windows_without_moving_the_fence(patch: pytest.MonkeyPatch) -> None:
    """A worker closes windows by the server's clock, which an append may find earlier."""

    async def waited(database: PostgresqlDatabase, at_most_us: int) -> int:
        now_us: int = await database.value("SELECT {s}.clock_us()")
        await fence.wait_for_appends(database)
        return min(now_us, at_most_us)

    patch.setattr(rollups, "pass_fence", waited)


FAULTS: list[tuple[Fault, int]] = [
    (append_without_the_lock, 5),
    (close_windows_without_waiting, 27),
    (decide_without_waiting, 22),
    (judge_by_the_longest_limit, 0),
    (judge_by_the_first_limit, 0),
]


@planted(FAULTS)
def test_a_planted_fault_is_found(
    postgresql: PostgresqlServer, fault: Fault, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with served(postgresql, fault.__name__) as server:
        assert is_found(partial(run_orders, server), seed)


def test_a_violation_of_the_model_is_found(
    postgresql: PostgresqlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No client sees this fault unless the server's clock is set back."""
    close_windows_without_moving_the_fence(monkeypatch)
    with served(postgresql, "unfenced") as server:
        wrong = run_orders(server, 0).wrong
    assert wrong
    assert all("the model does not allow passed" in each for each in wrong)
