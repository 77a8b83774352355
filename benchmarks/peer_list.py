"""The peers: the app, its store, its promise, and how long it knows a retry."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Final

from benchmarks import nats_server, peer_stores
from benchmarks.harness import Bench
from benchmarks.nats_server import NoNatsError
from benchmarks.peer_stores import StoreServer

#: NATS's own default, in two words that its configuration knows.
_NATS_DEFAULT: Final = '"2m"'


@dataclass(frozen=True, slots=True)
class Peer:
    """One row: a server of benchmarks/peer_apps over a store of its own."""

    name: str
    app: str
    #: Starts the server of its store, if there is one.
    store: Callable[[Bench], AbstractContextManager[StoreServer | None]]
    #: When an add is answered, and what of it an outage may take; "" if nothing is kept.
    durability: str = ""
    #: How long a retry is known for one; "" if it is not.
    horizon: str = ""
    #: Of the store and its driver.
    versions: str = ""
    #: How many times as fast as it ours is to be if all adds go to one counter.
    hot_target: float | None = None


def _no_store(_bench: Bench) -> AbstractContextManager[None]:
    return nullcontext()


def floor() -> Peer:
    """Parses, answers, and does nothing else."""
    return Peer("raw ASGI", "floor", _no_store)


def peers(bench: Bench) -> tuple[list[Peer], list[str]]:
    """Those that can run here, and a word about each that cannot."""
    found = [floor(), Peer("FastAPI", "nothing", _no_store)]
    left_out: list[str] = []
    for some in (_redis, postgres, _nats):
        try:
            found += some(bench)
        except _MissingError as missing:
            left_out.append(str(missing))
    return found, left_out


class _MissingError(Exception):
    """The missing peers, which are left out."""


def _redis(_bench: Bench) -> list[Peer]:
    found = peer_stores.redis_version()
    if found is None:
        raise _MissingError("Redis: there is no `redis-server` (apt-get install redis-server)")

    def peer(appendfsync: str, durability: str, target: float | None) -> Peer:
        return Peer(
            name=f"FastAPI + Redis, {appendfsync}",
            app="redis",
            store=partial(peer_stores.redis, appendfsync=appendfsync),
            durability=f"appendfsync {appendfsync}: {durability}",
            horizon="24 h, the TTL of a token's key",
            versions=f"Redis {found}, redis-py {version('redis')}, hiredis {version('hiredis')}",
            hot_target=target,
        )

    return [
        peer("everysec", "an outage may take the last second's adds", 4.0),
        peer("always", "on disk before the answer", None),
    ]


def postgres(_bench: Bench) -> list[Peer]:
    """Those over PostgreSQL."""
    found = peer_stores.postgres_version()
    if found is None:
        raise _MissingError("PostgreSQL: there is no `postgres` (apt-get install postgresql)")

    return [
        Peer(
            name="FastAPI + PostgreSQL, one statement",
            app="postgres",
            store=peer_stores.postgres,
            durability="fsync and synchronous_commit on: on disk before the answer",
            horizon="for ever: nothing removes a token",
            versions=f"PostgreSQL {found}, asyncpg {version('asyncpg')}",
            hot_target=5.0,
        )
    ]


def _nats(bench: Bench) -> list[Peer]:
    try:
        binary = nats_server.find(build=not bench.quick)
    except NoNatsError as problem:
        raise _MissingError(f"NATS: {problem}") from None

    def peer(name: str, sync: str, durability: str, target: float) -> Peer:
        return Peer(
            name=f"FastAPI + NATS counters, {name}",
            app="jetstream",
            store=partial(peer_stores.nats, binary=binary, sync=sync),
            durability=durability,
            horizon="2 min, the default window for duplicates",
            versions=f"nats-server {nats_server.VERSION}, nats-py {version('nats-py')}",
            hot_target=target,
        )

    lost = "file, sync_interval 2m, the default: an outage may take the last two minutes' adds"
    return [
        peer("default sync", _NATS_DEFAULT, lost, 3.0),
        peer("sync always", "always", "file, sync always: on disk before the answer", 5.0),
    ]
