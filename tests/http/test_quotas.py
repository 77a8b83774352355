"""How many namespaces a key may have, and how many shards all namespaces together."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from counter.api_keys import Scope
from tests.support.app import App, running
from tests.support.keys import hand_out
from tests.support.problems import assert_problem

_MINE = 3
_SHARDS = 8


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[App]:
    async with running("sqlite", tmp_path, namespaces_max=_MINE, shards_max=_SHARDS) as each:
        yield each


@pytest.fixture
async def shop(app: App) -> dict[str, str]:
    return await hand_out(app, Scope.ADMIN, "shop-*")


async def create(app: App, name: str, header: dict[str, str], *, shards: int = 1) -> httpx.Response:
    body = {"counter_type": "ACCURATE", "shards": shards}
    return await app.http.put(f"/v1/namespaces/{name}", json=body, headers=header)


async def test_a_key_may_have_so_many_namespaces(app: App, shop: dict[str, str]) -> None:
    answers = [await create(app, f"shop-{number}", shop) for number in range(_MINE + 1)]
    assert [each.status_code for each in answers] == [201, 201, 201, 403]
    problem = assert_problem(answers[-1], "quota_exceeded", "3 namespaces", "namespaces_max is 3")
    assert (problem["limit"], problem["count"], problem["bound"]) == ("namespaces_max", 3, 3)
    # It can change and delete its own, and then create another one.
    path = "/v1/namespaces/shop-0"
    changed = await app.http.put(path, json={"accept_limit": "4s"}, headers=shop)
    assert changed.status_code == 200
    assert (await app.http.delete(path, headers=shop)).status_code == 204
    assert (await create(app, "shop-9", shop)).status_code == 201


@pytest.mark.parametrize(("pattern", "status"), [("shop-*", 403), ("blog-*", 201)])
async def test_keys_of_the_same_names_share_a_quota_and_others_do_not(
    app: App, shop: dict[str, str], pattern: str, status: int
) -> None:
    for number in range(_MINE):
        assert (await create(app, f"shop-{number}", shop)).status_code == 201
    other = await hand_out(app, Scope.ADMIN, pattern)
    assert (await create(app, pattern.replace("*", "9"), other)).status_code == status


async def test_without_keys_all_namespaces_count(app: App) -> None:
    # One of the three is "default".
    statuses = [(await create(app, f"n{number}", {})).status_code for number in range(_MINE)]
    assert statuses == [201, 201, 403]


async def test_all_namespaces_share_a_budget_of_shards(app: App, shop: dict[str, str]) -> None:
    assert (await create(app, "shop-0", shop, shards=_SHARDS - 2)).status_code == 201
    problem = assert_problem(
        await create(app, "shop-1", shop, shards=2), "quota_exceeded", "7 shards", "shards_max, 8"
    )
    assert (problem["limit"], problem["count"], problem["bound"]) == ("shards_max", 7, 8)
    assert (await create(app, "shop-1", shop, shards=1)).status_code == 201
    other = await hand_out(app, Scope.ADMIN, "blog-*")
    assert (await create(app, "blog-0", other)).status_code == 403


async def test_requests_at_the_same_moment_do_not_pass_the_quota(
    app: App, shop: dict[str, str]
) -> None:
    answers = await asyncio.gather(*(create(app, f"shop-{each}", shop) for each in range(8)))
    assert sorted(each.status_code for each in answers) == [201] * 3 + [403] * 5
