"""Making, rotating and revoking keys: records, refusals, and races."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Final
from unittest.mock import AsyncMock, patch

import pytest

from counter.api_keys import ApiKey, Scope
from counter.core.clock_guard import ClockGuard
from counter.errors import (
    ClockSkewError,
    InvalidParameterError,
    NotFoundError,
    PreconditionFailedError,
    StoreUnavailableError,
)
from counter.limits import DAY, HOUR
from counter.security.key_admin import FORGET_AFTER_US, KEYS_MAX, KeyAdmin, Rights
from counter.security.keys import KeyRing, key_text, new_secret
from counter.storage.memory import MemoryStore
from counter.storage.memory.store import MemoryKeys
from counter.testing.clock import FakeClock
from counter.types import ClockReading
from tests.support.times import START_US

RIGHTS: Final = Rights(
    ("videos", "team-*"), Scope.WRITE, "ci", 90 * DAY, requests_per_s=100.0, adds_per_s=0.5
)


class Meddled(MemoryKeys):
    """Keys in which something happens just before the next change."""

    before: Callable[[], Awaitable[object]] | None = None

    async def change_api_key(self, old: ApiKey, new: ApiKey) -> bool:
        if self.before is not None:
            happens, self.before = self.before, None
            await happens()
        return await super().change_api_key(old, new)


class World:
    def __init__(self) -> None:
        self.clock = FakeClock(START_US)
        self.store = MemoryStore(self.clock)
        self.keys = self.store.keys = Meddled()
        self.admin = KeyAdmin(self.store.keys, self.clock)

    async def lets_in(self, text: str) -> bool:
        """Whether a process that reads the keys now would."""
        ring = KeyRing(self.store.keys, self.clock)
        await ring.refresh()
        return ring.find(text.encode()) is not None


async def test_a_key_begins_and_ends_by_a_clock_that_is_known_to_be_right(world: World) -> None:
    """Wrong clocks would make keys too early or late; a key can always be revoked."""
    guard = ClockGuard(world.store.control, world.clock)
    admin = KeyAdmin(world.store.keys, world.clock, guard)
    old = await admin.create(RIGHTS)
    standing = await world.store.keys.api_keys()
    for read in (
        AsyncMock(return_value=ClockReading(HOUR, 1)),
        AsyncMock(side_effect=StoreUnavailableError("down")),
    ):
        wrong = KeyAdmin(
            world.store.keys, world.clock, ClockGuard(world.store.control, world.clock)
        )
        with patch.object(world.store.control, "read_clock", read):
            with pytest.raises(ClockSkewError):
                await wrong.create(RIGHTS)
            with pytest.raises(ClockSkewError):
                await wrong.rotate(old.key.id, HOUR)
            assert await world.store.keys.api_keys() == standing
    with patch.object(world.store.control, "read_clock", read):
        assert (await wrong.revoke(old.key.id))[1]
    assert not await world.lets_in(old.text)


@pytest.fixture
def world() -> World:
    return World()


async def test_a_new_key_has_the_rights_that_were_asked_for(world: World) -> None:
    issued = await world.admin.create(replace(RIGHTS, namespaces=("videos", "team-*", "videos")))
    assert issued.key == ApiKey(
        issued.key.id,
        "ci",
        issued.key.digest,
        ("videos", "team-*"),
        Scope.WRITE,
        START_US,
        START_US + 90 * DAY,
        requests_per_s=100.0,
        adds_per_s=0.5,
    )
    assert list(await world.admin.all()) == [issued.key]
    assert await world.lets_in(issued.text)
    secret = issued.text.rpartition("_")[2]
    assert secret not in repr(issued)
    assert secret not in repr(await world.admin.all())


async def test_only_the_first_key_is_said_to_be_the_first(world: World) -> None:
    """Even if it was revoked since."""
    first = await world.admin.create(RIGHTS)
    await world.admin.revoke(first.key.id)
    second = await world.admin.create(RIGHTS)
    assert (first.is_first, second.is_first) == (True, False)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"namespaces": ()}, "0 namespaces are given"),
        ({"namespaces": ("Videos",)}, "namespace 'Videos' is not valid for a key: give a name"),
        ({"namespaces": ("a*b",)}, "namespace 'a*b'"),
        (
            {"namespaces": tuple(f"n{n}" for n in range(101))},
            "101 namespaces are given; it must be 1 to 100",
        ),
        ({"label": "x" * 101}, "at most 100 printable"),
        ({"label": "a\nb"}, "printable"),
        ({"lifetime_us": 0}, "expires is 0s; it must be from 1s to 3650d"),
        ({"lifetime_us": 3_651 * DAY}, "expires is 3651d"),
        ({"adds_per_s": -1.0}, "adds is -1/s; it must be at most 1e+09/s, or 0/s for any number"),
        ({"resolutions_per_s": 1e10}, "resolutions is 1e+10/s"),
    ],
)
async def test_rights_that_make_no_sense_are_refused(
    world: World, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidParameterError) as raised:
        await world.admin.create(replace(RIGHTS, **wrong))
    assert message in raised.value.detail
    assert list(await world.admin.all()) == []


async def test_a_rotated_key_and_the_new_one_hold_until_the_grace_is_over(world: World) -> None:
    old = await world.admin.create(RIGHTS)
    world.clock.advance(DAY)
    new, ended = await world.admin.rotate(old.text, HOUR)
    now_us = START_US + DAY
    times: dict[str, Any] = {"created_at_us": now_us, "expires_at_us": now_us + 90 * DAY}
    assert new.key == replace(old.key, id=new.key.id, digest=new.key.digest, **times)
    assert ended == replace(old.key, expires_at_us=now_us + HOUR, replaced_by=new.key.id)
    assert [await world.lets_in(each.text) for each in (old, new)] == [True, True]
    world.clock.advance(HOUR)
    assert [await world.lets_in(each.text) for each in (old, new)] == [False, True]


async def test_a_grace_lengthens_no_life(world: World) -> None:
    """A key that expires sooner expires as it was to; one that has expired gives its rights on."""
    old = await world.admin.create(replace(RIGHTS, lifetime_us=HOUR))
    _, ended = await world.admin.rotate(old.key.id, 2 * HOUR)
    assert ended.expires_at_us == START_US + HOUR
    other = await world.admin.create(replace(RIGHTS, lifetime_us=HOUR))
    world.clock.advance(2 * HOUR)
    new, _ = await world.admin.rotate(other.key.id, 0)
    assert [await world.lets_in(each.text) for each in (other, new)] == [False, True]


async def test_a_key_is_rotated_once_and_a_revoked_one_never(world: World) -> None:
    old = await world.admin.create(RIGHTS)
    new, _ = await world.admin.rotate(old.key.id, HOUR)
    with pytest.raises(PreconditionFailedError, match=f"to {new.key.id}: rotate that one"):
        await world.admin.rotate(old.key.id, HOUR)
    await world.admin.revoke(new.key.id)
    with pytest.raises(PreconditionFailedError, match=r"was revoked at .*: create a new one"):
        await world.admin.rotate(new.key.id, HOUR)
    with pytest.raises(InvalidParameterError, match="grace is 366d; it must be from 0s to 365d"):
        await world.admin.rotate(new.key.id, 366 * DAY)


async def test_one_of_two_concurrent_rotations_wins(world: World) -> None:
    """The other's key has no use."""
    old = await world.admin.create(RIGHTS)
    other = KeyAdmin(world.store.keys, world.clock)
    won: list[str] = []

    async def rotated() -> None:
        won.append((await other.rotate(old.key.id, HOUR))[0].key.id)

    world.keys.before = rotated
    with pytest.raises(PreconditionFailedError, match="was rotated before"):
        await world.admin.rotate(old.key.id, HOUR)
    valid = [each.id for each in await world.admin.all() if each.is_valid_at(START_US)]
    assert sorted(valid) == sorted([old.key.id, *won])


async def test_a_key_revoked_during_its_rotation_has_no_successor(world: World) -> None:
    old = await world.admin.create(RIGHTS)
    world.keys.before = lambda: KeyAdmin(world.store.keys, world.clock).revoke(old.key.id)
    with pytest.raises(PreconditionFailedError, match="was revoked"):
        await world.admin.rotate(old.key.id, HOUR)
    assert not any(each.is_valid_at(START_US) for each in await world.admin.all())


async def test_a_key_that_is_rotated_while_it_is_revoked_is_revoked(world: World) -> None:
    old = await world.admin.create(RIGHTS)
    world.keys.before = lambda: KeyAdmin(world.store.keys, world.clock).rotate(old.key.id, HOUR)
    revoked, is_new = await world.admin.revoke(old.key.id)
    assert is_new
    assert revoked.replaced_by is not None
    assert not await world.lets_in(old.text)


async def test_revoking_twice_is_revoking_once(world: World) -> None:
    issued = await world.admin.create(RIGHTS)
    first, is_new = await world.admin.revoke(issued.key.id)
    world.clock.advance(1)
    assert (first.revoked_at_us, is_new) == (START_US, True)
    assert await world.admin.revoke(issued.text) == (first, False)


async def test_revoking_at_once_from_many_sides_is_reported_to_one(world: World) -> None:
    issued = await world.admin.create(RIGHTS)
    answers = await asyncio.gather(*(world.admin.revoke(issued.key.id) for _ in range(5)))
    assert [is_new for _, is_new in answers].count(True) == 1


async def test_a_rotation_with_an_unknown_outcome_reports_the_new_key(world: World) -> None:
    old = await world.admin.create(RIGHTS)

    async def fails() -> None:
        raise StoreUnavailableError("a fault that a test planted")

    world.keys.before = fails
    with pytest.raises(StoreUnavailableError) as raised:
        await world.admin.rotate(old.key.id, HOUR)
    new = next(each for each in await world.admin.all() if each != old.key)
    assert f"a new key {new.id} is stored, and has no use" in raised.value.detail


async def test_an_unknown_id_is_named(world: World) -> None:
    with pytest.raises(NotFoundError, match="there are no keys: make one"):
        await world.admin.revoke("abcdefgh2345")
    await world.admin.create(RIGHTS)
    with pytest.raises(NotFoundError, match="there is no key 'abcdefgh2345'; counter key list"):
        await world.admin.revoke("abcdefgh2345")
    with pytest.raises(NotFoundError, match="this is not the id of a key"):
        await world.admin.revoke("abcdefgh")


async def test_no_error_shows_a_secret(world: World) -> None:
    """Of a key that is mistyped, or only a half of it given, too."""
    issued = await world.admin.create(RIGHTS)
    secret = new_secret()
    for given in (secret, key_text("abcdefgh2345", secret), f"{issued.text}A", secret[:16]):
        with pytest.raises(NotFoundError) as raised:
            await world.admin.find(given)
        assert secret[:16] not in raised.value.detail
        assert issued.text.rpartition("_")[2] not in raised.value.detail


async def test_the_number_of_keys_is_bounded_and_old_ones_are_forgotten(world: World) -> None:
    """But never the last: a record without keys would mean that no key is needed."""
    first = await world.admin.create(RIGHTS)
    await world.admin.revoke(first.key.id)
    for number in range(KEYS_MAX - 1):
        assert await world.store.keys.create_api_key(replace(first.key, id=f"{number:012}"))
    with pytest.raises(PreconditionFailedError, match="2000 keys are on record; at most 2000 may"):
        await world.admin.create(RIGHTS)
    world.clock.advance(FORGET_AFTER_US - 1)
    with pytest.raises(PreconditionFailedError):
        await world.admin.create(RIGHTS)
    world.clock.advance(1)
    issued = await world.admin.create(RIGHTS)
    assert first.key.id not in {each.id for each in await world.admin.all()}
    assert len(await world.admin.all()) == KEYS_MAX

    alone = World()
    last = await alone.admin.create(RIGHTS)
    await alone.admin.revoke(last.key.id)
    alone.clock.advance(FORGET_AFTER_US)
    issued = await alone.admin.create(RIGHTS)
    assert list(await alone.admin.all()) == [issued.key]


async def test_a_key_is_reported_though_old_ones_cannot_be_forgotten(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it was recorded, and not shown to the caller."""
    old = await world.admin.create(RIGHTS)
    await world.admin.revoke(old.key.id)
    world.clock.advance(FORGET_AFTER_US)

    async def fails(_: ApiKey) -> bool:
        raise StoreUnavailableError("a fault that a test planted")

    with monkeypatch.context() as patched:
        patched.setattr(world.store.keys, "forget_api_key", fails)
        issued = await world.admin.create(RIGHTS)
    assert await world.lets_in(issued.text)
    assert len(await world.admin.all()) == 2
    await world.admin.create(RIGHTS)
    assert old.key.id not in {each.id for each in await world.admin.all()}


async def test_rotation_does_not_fill_the_record(world: World) -> None:
    """Regression: each process reads all of it every second, and it only grew."""
    key = (await world.admin.create(RIGHTS)).key
    for _ in range(5):
        issued, _ = await world.admin.rotate(key.id, HOUR)
        key = issued.key
        world.clock.advance(FORGET_AFTER_US + HOUR)
    issued, old = await world.admin.rotate(key.id, HOUR)
    assert {each.id for each in await world.admin.all()} == {issued.key.id, old.id}
