"""API keys: their text, and the ring while the store comes and goes."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final
from unittest.mock import create_autospec

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counter.api_keys import ApiKey, Scope
from counter.core.clock_guard import ClockGuard
from counter.errors import StoreUnavailableError
from counter.limits import MINUTE, SECOND
from counter.security.keys import (
    RING_AGE_MAX_US,
    KeyRing,
    covers,
    digest_of,
    id_in,
    is_pattern,
    key_text,
    new_id,
    new_secret,
)
from counter.storage.memory import MemoryStore
from counter.storage.memory.store import MemoryKeys
from counter.testing.clock import FakeClock
from tests.support.times import START_US
from tests.support.waiting import eventually

ID: Final = "abcdefgh2345"


def key_of(secret: str, key_id: str = ID, **more: Any) -> ApiKey:
    """A key for the namespace ``videos``."""
    fields: dict[str, Any] = {"label": "", "namespaces": ("videos",), "scope": Scope.WRITE} | more
    return ApiKey(key_id, digest=digest_of(secret.encode()), created_at_us=START_US, **fields)


class Shaky(MemoryKeys):
    """A store with keys that can be out of reach, or take for ever; it counts recorded uses."""

    down = False
    hangs = False
    notes_hang = False
    hung = 0
    noted: Sequence[tuple[str, int]] = ()

    async def api_keys(self) -> Sequence[ApiKey]:
        if self.hangs:
            await asyncio.Event().wait()
        if self.down:
            raise StoreUnavailableError("a fault that a test planted")
        return await super().api_keys()

    async def note_api_key_uses(self, uses: Sequence[tuple[str, int]]) -> None:
        if self.notes_hang:
            self.hung += 1
            await asyncio.Event().wait()
        if self.down:
            raise StoreUnavailableError("a fault that a test planted")
        self.noted = uses
        await super().note_api_key_uses(uses)


class World:
    """A ring over a store that holds one key."""

    def __init__(self) -> None:
        self.clock = FakeClock(START_US)
        self.store = Shaky()
        self.ring = KeyRing(self.store, self.clock)
        self.secret = new_secret()
        self.key = key_of(self.secret)
        self.sent = key_text(ID, self.secret).encode()

    async def change(self, **changes: Any) -> None:
        changed = replace(self.key, **changes)
        assert await self.store.change_api_key(self.key, changed)
        self.key = changed

    @asynccontextmanager
    async def turning(self) -> Any:
        stop = asyncio.Event()
        task = asyncio.create_task(self.ring.run(stop))
        try:
            yield
        finally:
            stop.set()
            await task


@pytest.fixture
async def world() -> World:
    world = World()
    assert await world.store.create_api_key(world.key)
    await world.ring.refresh()
    return world


def test_a_new_key_is_random_enough() -> None:
    """160 bits and more are in the secret; the text holds nothing that a shell or URL minds."""
    ids, secrets = {new_id() for _ in range(100)}, {new_secret() for _ in range(100)}
    assert (len(ids), len(secrets)) == (100, 100)
    assert {len(each) for each in secrets} == {32}
    assert set("".join(ids | secrets)) == set("abcdefghijklmnopqrstuvwxyz234567")


def test_the_id_of_a_key_is_parsed_from_it() -> None:
    """A finder of a leaked key can paste it to have it revoked."""
    for text in (ID, f"ck_{ID}", key_text(ID, new_secret())):
        assert id_in(text) == ID
    for text in ("", "ck_", ID[:-1], ID + "a", f"{ID}_A", ID.upper(), f" {ID}", f"{ID}\n"):
        assert id_in(text) is None


def test_a_key_never_shows_its_digest() -> None:
    key = key_of(new_secret())
    assert "digest" not in repr(key)
    assert key.digest.hex() not in repr(key)


def test_scopes_are_in_order() -> None:
    assert Scope.READ < Scope.WRITE < Scope.ADMIN


@pytest.mark.parametrize(
    ("pattern", "namespace", "expected"),
    [
        ("videos", "videos", True),
        ("videos", "videos2", False),
        ("videos", "video", False),
        ("team-*", "team-", True),
        ("team-*", "team-a", True),
        ("team-*", "team", False),
        ("team-*", "steam-a", False),
        ("*", "anything", True),
    ],
)
def test_a_pattern_is_a_name_or_a_beginning(pattern: str, namespace: str, expected: bool) -> None:
    assert is_pattern(pattern)
    assert covers(pattern, namespace) is expected


@pytest.mark.parametrize("text", ["", "**", "a*b", "*a", "Videos", "a b", "-a", "a" * 64, "é*"])
def test_a_pattern_that_matches_no_namespace_is_invalid(text: str) -> None:
    assert not is_pattern(text)


@given(st.binary(max_size=60) | st.from_regex(rb"ck_[a-z2-7]{12}_[a-z2-7]{32}", fullmatch=True))
def test_an_unknown_key_finds_nothing(presented: bytes) -> None:
    """Whatever its bytes: no error, and no key."""

    async def found() -> ApiKey | None:
        world = World()
        await world.store.create_api_key(world.key)
        await world.ring.refresh()
        return world.ring.find(presented)

    assert asyncio.run(found()) is None


async def test_a_key_is_found_by_all_of_its_text(world: World) -> None:
    assert world.ring.find(world.sent) == world.key
    wrong = [new_secret(), world.secret[:-1], world.secret + "a", world.secret.upper(), ""]
    for sent in [*(key_text(ID, each) for each in wrong), key_text(new_id(), world.secret), ID]:
        assert world.ring.find(sent.encode()) is None


async def test_an_unknown_id_is_compared_as_a_wrong_secret_is(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of a look-up must not show whether an id exists."""
    compared: list[tuple[int, int]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return one == other

    monkeypatch.setattr("counter.security.keys.compare_digest", compare)
    for key_id in (ID, new_id()):
        assert world.ring.find(key_text(key_id, new_secret()).encode()) is None
    assert compared == [(32, 32), (32, 32)]


async def test_a_service_without_keys_requires_none(world: World) -> None:
    """Revoked and expired keys still count; so does one that is gone from the record."""
    without = KeyRing(MemoryStore(world.clock).keys, world.clock)
    await without.refresh()
    assert not without.required
    assert world.ring.required
    await world.change(revoked_at_us=START_US)
    await world.ring.refresh()
    assert world.ring.required
    assert await world.store.forget_api_key(world.key)
    await world.ring.refresh()
    assert world.ring.required
    assert world.ring.find(world.sent) is None


async def test_a_use_is_not_noted_by_a_clock_that_is_wrong(world: World) -> None:
    """Of two uses the later one stays on record: one from the future would stay for long."""
    guard = create_autospec(ClockGuard, trouble="this server's clock is 1 h ahead of the store's")
    ring = KeyRing(world.store, world.clock, guard)
    await ring.refresh()
    stop = asyncio.Event()
    stop.set()
    assert ring.find(world.sent) == world.key
    await ring.run(stop)
    assert not world.store.noted
    guard.trouble = None
    assert ring.find(world.sent) == world.key
    await ring.run(stop)
    assert list(world.store.noted) == [(ID, START_US)]


async def test_a_revoked_key_is_refused_and_caches_are_notified(world: World) -> None:
    remembered = world.ring.version
    await world.ring.refresh()
    assert world.ring.version == remembered
    await world.change(revoked_at_us=START_US)
    await world.ring.refresh()
    assert world.ring.version != remembered
    assert world.ring.find(world.sent) is None


async def test_a_key_holds_up_to_its_expiry_and_then_the_version_moves(world: World) -> None:
    await world.change(expires_at_us=START_US + SECOND)
    await world.ring.refresh()
    remembered = world.ring.version
    world.clock.advance(SECOND - 1)
    await world.ring.refresh()
    assert world.ring.find(world.sent) is not None
    assert world.ring.version == remembered
    world.clock.advance(1)
    assert world.ring.find(world.sent) is None
    await world.ring.refresh()
    assert world.ring.version != remembered


@pytest.mark.parametrize("trouble", ["down", "hangs"])
async def test_keys_that_cannot_be_read_hold_for_a_bounded_time(world: World, trouble: str) -> None:
    """Else a process that is cut off from the store would know nothing of a revocation, ever."""
    setattr(world.store, trouble, True)
    remembered = world.ring.version
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("counter.security.keys._READ_EVERY_S", 0.001)
        async with world.turning():
            world.clock.advance(RING_AGE_MAX_US)
            assert world.ring.find(world.sent) == world.key
            world.clock.advance(1)

            await eventually(
                lambda: world.ring.version != remembered, "caches of the key are invalidated"
            )
            with pytest.raises(StoreUnavailableError, match="could not be read for over 60 s"):
                world.ring.find(world.sent)
            if trouble == "down":
                world.store.down = False

                async def let_in() -> bool:
                    try:
                        return world.ring.find(world.sent) == world.key
                    except StoreUnavailableError:
                        return False

                await eventually(let_in, "the store is read again")
            world.store.down = False


async def test_a_ring_that_was_never_read_rejects_all_requests() -> None:
    with pytest.raises(StoreUnavailableError):
        KeyRing(World().store, FakeClock(START_US)).find(b"")


async def test_uses_are_recorded_and_failed_records_are_retried(world: World) -> None:
    ring = world.ring
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("counter.security.keys._NOTE_EVERY_S", 0.001)
        async with world.turning():
            assert ring.find(world.sent)
            world.clock.advance(MINUTE)

            await eventually(lambda: world.store.noted == [(ID, START_US)], "the use is noted")
            remembered = ring.version
            assert ring.find(world.sent)
    assert ring.version != remembered
    (key,) = await world.store.api_keys()
    assert key.last_used_us == START_US + MINUTE, "what is left is noted at the end"

    world.clock.advance(1)
    ring.find(world.sent)
    world.store.down = True
    with pytest.raises(StoreUnavailableError):
        await ring._save_uses()
    world.store.down = False
    await ring._save_uses()
    assert world.store.noted == [(ID, START_US + MINUTE + 1)]


async def test_a_key_is_revoked_while_uses_are_noted_for_long(world: World) -> None:
    """Regression: nothing was read before the last of them was noted, one write each."""
    world.store.notes_hang = True
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("counter.security.keys._READ_EVERY_S", 0.001)
        patched.setattr("counter.security.keys._NOTE_EVERY_S", 0.001)
        async with world.turning():
            assert world.ring.find(world.sent)
            world.clock.advance(MINUTE)

            await eventually(lambda: world.store.hung > 0, "its use is being noted")
            await world.change(revoked_at_us=START_US)

            await eventually(lambda: world.ring.find(world.sent) is None, "it is refused")
            world.store.notes_hang = False
    noted = [key_id for key_id, _ in world.store.noted]
    assert noted == [ID], "what was given up is noted at the end"


async def test_changes_of_keys_are_logged_without_their_secrets(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "counter.keys")
    other = key_of(new_secret(), new_id())
    await world.store.create_api_key(other)
    await world.change(revoked_at_us=START_US)
    await world.ring.refresh()
    world.ring.find(world.sent)
    lines = [each.getMessage() for each in caplog.records]
    assert sorted(lines) == sorted([f"API key {ID} was revoked", f"API key {other.id} was made"])


async def test_a_later_reading_is_not_undone_by_an_earlier_one(world: World) -> None:
    """The earlier one may not hold the revocation that the later one saw."""
    old = await world.store.api_keys()
    arrived, go_on = asyncio.Event(), asyncio.Event()

    class Slow(Shaky):
        async def api_keys(self) -> Sequence[ApiKey]:
            arrived.set()
            await go_on.wait()
            return old

    slow, world.ring._store = Slow(), Slow()
    early = asyncio.create_task(world.ring.refresh())
    await arrived.wait()
    del slow
    world.ring._store = world.store
    world.clock.advance(1)
    await world.change(revoked_at_us=START_US)
    await world.ring.refresh()
    go_on.set()
    await early
    assert world.ring.find(world.sent) is None
