"""API keys over HTTP: an admin key hands down no more than it has, and secrets are shown once."""

import json
import logging
from typing import Any

import httpx
import pytest

from counter.api_keys import Scope
from counter.limits import DAY
from counter.security.key_admin import KEYS_OF_PATTERN_MAX
from tests.support.app import App
from tests.support.keys import hand_out, made
from tests.support.problems import assert_problem
from tests.support.times import START_US

Header = dict[str, str]


async def create(app: App, holder: Header, namespaces: list[str], **more: Any) -> httpx.Response:
    return await app.http.post("/v1/keys", headers=holder, json={"namespaces": namespaces, **more})


async def revoke(app: App, holder: Header, key: str) -> httpx.Response:
    return await app.http.delete(f"/v1/keys/{key}", headers=holder)


async def listed(app: App, holder: Header) -> list[dict[str, Any]]:
    answer = await app.http.get("/v1/keys", headers=holder)
    assert answer.status_code == 200, answer.text
    keys: list[dict[str, Any]] = answer.json()["keys"]
    return keys


async def test_a_key_is_created_used_listed_and_revoked(app: App) -> None:
    admin = await hand_out(app, Scope.ADMIN)
    answer = await create(
        app,
        admin,
        ["default"],
        scope="write",
        label="shop",
        expires="90d",
        limits={"adds_per_s": 5},
    )
    assert answer.status_code == 201, answer.text
    assert answer.headers["cache-control"] == "no-store"
    shown = answer.json()
    text, key_id = shown.pop("key"), shown["id"]
    assert text.startswith(f"ck_{key_id}_")
    assert shown["label"] == "shop"
    assert shown["namespaces"] == ["default"]
    assert shown["limits"] == {"adds_per_s": 5.0}
    assert (shown["scope"], shown["state"]) == ("write", "valid")
    await app.application.keys.refresh()
    used = await app.http.get("/v1/namespaces", headers={"Authorization": f"Bearer {text}"})
    assert used.status_code == 200
    everything = await listed(app, admin)
    assert shown in everything
    assert text.rpartition("_")[2] not in json.dumps(everything)
    for _ in range(2):
        revoked = await revoke(app, admin, key_id)
        assert (revoked.status_code, revoked.json()["state"]) == (200, "revoked")
    await app.application.keys.refresh()
    used = await app.http.get("/v1/namespaces", headers={"Authorization": f"Bearer {text}"})
    assert_problem(used, "key_invalid")


async def test_without_keys_the_first_one_is_not_made_over_http(app: App) -> None:
    """It would close the service to everybody else, for ever."""
    assert await listed(app, {}) == []
    for answer in (await create(app, {}, ["*"]), await revoke(app, {}, "a" * 12)):
        assert_problem(answer, "precondition_failed")
        assert "counter key create" in answer.json()["detail"]
    assert list(await app.store.keys.api_keys()) == []


@pytest.mark.parametrize("scope", [Scope.READ, Scope.WRITE])
async def test_keys_need_the_scope_admin(app: App, scope: Scope) -> None:
    holder = await hand_out(app, scope)
    for answer in (
        await app.http.get("/v1/keys", headers=holder),
        await create(app, holder, ["default"]),
        await revoke(app, holder, "a" * 12),
    ):
        assert_problem(answer, "scope_insufficient")


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"namespaces": ["*"]}, "namespace '*' is not within shop-*, eu"),
        ({"namespaces": ["shop*"]}, "namespace 'shop*'"),
        ({"namespaces": ["shop-a", "e*"]}, "namespace 'e*'"),
        ({"namespaces": ["eu*"]}, "namespace 'eu*'"),
        ({"namespaces": ["eu"], "expires": "11d"}, "expires is 11d, and that key ends in 10d"),
        ({"namespaces": ["eu"], "limits": {"adds_per_s": 0}}, "adds is without bound"),
        ({"namespaces": ["eu"], "limits": {"adds_per_s": 101}}, "adds is 101/s"),
        ({"namespaces": ["eu"], "limits": {"reservations_per_s": 0}}, "reservations is without"),
    ],
)
async def test_no_key_reaches_beyond_the_one_that_creates_it(
    app: App, wanted: dict[str, Any], says: str
) -> None:
    app.application.pipeline.authorizer.rates = {"reservations": 10}
    holder = await hand_out(
        app, Scope.ADMIN, "shop-*", "eu", adds_per_s=100.0, expires_at_us=START_US + 10 * DAY
    )
    before = list(await app.store.keys.api_keys())
    answer = await app.http.post("/v1/keys", headers=holder, json=wanted)
    assert_problem(answer, "scope_insufficient")
    assert says in answer.json()["detail"]
    assert list(await app.store.keys.api_keys()) == before


async def test_a_new_key_inherits_omitted_settings(app: App) -> None:
    holder = await hand_out(
        app, Scope.ADMIN, "shop-*", adds_per_s=100.0, expires_at_us=START_US + 10 * DAY
    )
    app.clock.advance(DAY)
    await app.application.keys.refresh()
    answer = await create(app, holder, ["shop-eu-*", "shop-1"], limits={"requests_per_s": 7})
    assert answer.status_code == 201, answer.text
    made_key = answer.json()
    assert made_key["limits"] == {"requests_per_s": 7.0, "adds_per_s": 100.0}
    assert made_key["scope"] == "read"
    (own,) = [each for each in await listed(app, holder) if each["id"] != made_key["id"]]
    assert made_key["expires_at"] == own["expires_at"]


async def test_keys_beyond_its_namespaces_look_missing(app: App) -> None:
    everything = await hand_out(app, Scope.ADMIN)
    others = (await create(app, everything, ["shop-1", "other"])).json()["id"]
    holder = await hand_out(app, Scope.ADMIN, "shop-*")
    own = (await create(app, holder, ["shop-1"])).json()["id"]
    assert own in {each["id"] for each in await listed(app, holder)}
    assert others not in {each["id"] for each in await listed(app, holder)}
    unknown, foreign = await revoke(app, holder, "a" * 12), await revoke(app, holder, others)
    for answer, key_id in ((unknown, "a" * 12), (foreign, others)):
        assert_problem(answer, "not_found")
        assert (
            answer.json()["detail"] == f"there is no key '{key_id}'; GET /v1/keys lists them by id"
        )
    assert (await revoke(app, holder, own)).status_code == 200
    assert (await revoke(app, everything, others)).status_code == 200


async def test_a_key_that_was_revoked_a_moment_ago_passes_nothing_on(app: App) -> None:
    """This process has not read yet that it was: within a second it would hand down its rights."""
    holder = await hand_out(app, Scope.ADMIN)
    (stored,) = await app.store.keys.api_keys()
    gone = type(stored)(
        *(stored.id, stored.label, stored.digest, stored.namespaces, stored.scope),
        *(stored.created_at_us, None, app.clock.now_us()),
    )
    assert await app.store.keys.change_api_key(stored, gone)
    answer = await create(app, holder, ["*"], scope="admin")
    assert_problem(answer, "key_invalid")
    assert {each.revoked_at_us is None for each in await app.store.keys.api_keys()} == {False}


async def test_one_admin_of_a_pattern_cannot_take_the_room_of_all_keys(app: App) -> None:
    holder = await hand_out(app, Scope.ADMIN, "shop-*")
    for _ in range(KEYS_OF_PATTERN_MAX - 1):
        await app.store.keys.create_api_key(made(Scope.READ, "shop-1")[0])
    answer = await create(app, holder, ["shop-1"])
    assert_problem(answer, "precondition_failed")
    assert f"at most {KEYS_OF_PATTERN_MAX} may be" in answer.json()["detail"]
    everything = await hand_out(app, Scope.ADMIN)
    assert (await create(app, everything, ["shop-1"])).status_code == 201


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "namespaces"),
        ({"namespaces": []}, "namespaces"),
        ({"namespaces": ["default"], "scope": "root"}, "scope"),
        ({"namespaces": ["default"], "limits": {"adds_per_s": -1}}, "limits.adds_per_s"),
        ({"namespaces": ["default"], "expires": "soon"}, "expires"),
        ({"namespaces": ["default"], "secret": "x"}, "secret"),
    ],
)
async def test_a_body_that_is_wrong_names_the_field(
    app: App, body: dict[str, Any], field: str
) -> None:
    holder = await hand_out(app, Scope.ADMIN)
    answer = await app.http.post("/v1/keys", headers=holder, json=body)
    assert_problem(answer, "invalid_body")
    assert field in {each["field"] for each in answer.json()["errors"]}
    answer = await create(app, holder, ["Not a name"])
    assert_problem(answer, "invalid_parameter")


async def test_the_audit_log_has_both_acts_and_no_log_has_a_secret(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    admin = await hand_out(app, Scope.ADMIN)
    by = admin["Authorization"].split("_")[1]
    with caplog.at_level(logging.DEBUG):
        created = (await create(app, admin, ["default"])).json()
        # Like a person who found a leaked key.
        assert (await revoke(app, admin, created["key"])).status_code == 404
        await revoke(app, admin, created["id"])
    acts = [vars(each)["fields"] for each in caplog.records if each.name == "counter.audit"]
    assert [(each["act"], each["end"], each["key"]) for each in acts] == [
        ("key.create", "done", created["id"]),
        ("key.revoke", "done", created["id"]),
    ]
    assert {each["who"] for each in acts} == {f"key:{by}"}
    assert acts[0]["after"] == {"namespaces": ["default"], "scope": "read", "limits": {}}
    secret = created["key"].rpartition("_")[2]
    said = [f"{each.getMessage()} {getattr(each, 'fields', '')}" for each in caplog.records]
    # httpx, the client of this test, logs the URLs of its requests.
    ours = [line for line, each in zip(said, caplog.records, strict=True) if each.name != "httpx"]
    assert not [line for line in ours if secret in line]
