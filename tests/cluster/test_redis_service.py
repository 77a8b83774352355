"""The service with Redis as its cache, over each store: adds, cached gets, best-effort adds."""

import asyncio
import json
import re
from pathlib import Path

import pytest

from counter.clock import SystemClock
from scripts.cluster_nodes import Cluster
from scripts.postgresql_server import PostgresqlServer
from tests.cluster.test_commands import flags_of, run_counter
from tests.support.rest import Rest, fresh
from tests.support.server import Server, serving
from tests.support.waiting import eventually

#: The cache and the store have time: a busy machine is slow.
CACHE = {"cache_timeout": "5s"}
DATASET = {"retention": "1h", "slice": "10m", "write_timeout": "5s"}
WINDOWS = {"rollup_window": "200ms", "accept_limit": "5s", "write_timeout": "5s", **CACHE}
_HITS = re.compile(r'^counter_cache_lookups_total\{result="hit"\} (\d+)', re.MULTILINE)


async def hits(rest: Rest) -> int:
    """The counts that were found in the cache so far."""
    found = _HITS.search((await rest.http.get("/metrics")).text)
    return int(found[1]) if found else 0


async def is_cached_and_counts(server: Server) -> None:
    """Adds count, their counts come from Redis, best-effort counters add up in it."""
    async with server.client() as client:
        rest, loose = client.within("views"), client.within("loose")
        assert (await rest.create("EVENTUAL")).status_code == 201
        assert (await loose.create("BEST_EFFORT")).status_code == 201
        token = fresh(SystemClock().now_us())
        assert (await rest.add("c", 5, token)).status_code == 200
        assert (await rest.add("c", 5, token)).status_code == 200
        assert (await rest.add("c", 6, token)).json()["code"] == "token_conflict"

        async def rolled_up() -> bool:
            return await rest.count("c", "10m") == 5 and await hits(rest) > 0

        await eventually(rolled_up, "the count comes out of the cache")
        values = [(await loose.add("d", 1)).status_code for _ in range(20)]
        assert (set(values), await loose.count("d")) == ({200}, 20)
        refusal = await loose.add("d", 2**63 - 1)
        assert refusal.status_code == 400
        assert refusal.json()["code"] == "invalid_body"
        assert "64 bits" in refusal.json()["detail"]
        assert await loose.count("d") == 20
        ready = (await rest.http.get("/readyz")).json()
        assert (ready["status"], ready["cache"]) == ("ready", "ok")


async def doctor_finds_it(url: str, **flags: str) -> None:
    """``counter doctor`` asks the cache."""
    done = await asyncio.to_thread(run_counter, "doctor", "--json", cache=url, **CACHE, **flags)
    found = {each["part"]: each for each in json.loads(done.stdout)["checks"]}
    assert (found["cache"]["state"], found["cache"]["detail"]) == ("ok", f"it answers: {url}")


async def test_over_sqlite(redis: Cluster, tmp_path: Path) -> None:
    """Under a name and a database of its own, by the scheme of Valkey."""
    url = redis.redis_url.replace("redis://", "valkey://") + "/1"
    async with serving(
        tmp_path / "data", tmp_path / "logs", cache=url, keyspace="on_sqlite", **WINDOWS
    ) as server:
        await is_cached_and_counts(server)


async def test_over_postgresql(
    redis: Cluster, postgresql: PostgresqlServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COUNTER_DSN", postgresql.dsn())
    flags = {"store": "postgresql", "keyspace": "on_postgresql"}
    applied = await asyncio.to_thread(run_counter, "schema", "apply", **flags, **DATASET)
    assert applied.returncode == 0, applied.stderr
    async with serving(
        tmp_path, tmp_path / "logs", cache=redis.redis_url, **flags, **WINDOWS
    ) as server:
        await is_cached_and_counts(server)
    await doctor_finds_it(redis.redis_url, **flags)


async def test_over_cassandra(cassandra: Cluster, redis: Cluster, tmp_path: Path) -> None:
    flags = flags_of(cassandra, "on_cassandra") | WINDOWS
    names = ("store", "contact_points", "keyspace", "replication")
    given = {name: flags[name] for name in names} | DATASET
    applied = await asyncio.to_thread(run_counter, "schema", "apply", **given)
    assert applied.returncode == 0, applied.stderr
    async with serving(
        tmp_path, tmp_path / "logs", cache=redis.redis_url, rollup="true", **flags
    ) as server:
        await is_cached_and_counts(server)


async def test_a_password_is_shown_nowhere(
    breakable_redis: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by a start, not while it is wrong, not by the commands that show settings."""
    url = breakable_redis.redis_url.replace("://", "://app:hush-hush@")
    monkeypatch.setenv("COUNTER_CACHE", url)
    flags = {"log_level": "debug", **CACHE}
    async with serving(tmp_path / "data", tmp_path / "logs", **flags) as server:
        async with server.client() as client:
            ready = (await client.http.get("/readyz")).text
            metrics = (await client.http.get("/metrics")).text
        await server.stop()
        logs = server.output("out") + server.output("err")
    assert "invalid username-password pair" in ready
    assert "counter_cache_up 0.0" in metrics
    shown = [
        await asyncio.to_thread(run_counter, *words) for words in (["config", "check"], ["doctor"])
    ]
    texts = [ready, metrics, logs, *(each.stdout + each.stderr for each in shown)]
    assert [text for text in texts if "hush-hush" in text] == []
    assert "********@" in shown[0].stdout
