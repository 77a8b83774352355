"""The contract of API keys: what is on record, and changes by compare-and-set."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from counter.api_keys import ApiKey, Scope
from counter.ports import Store
from counter.security.keys import digest_of, new_id
from counter.testing.cases import NOW, StoreCases


class KeyCases(StoreCases):
    """Keys are made once, never change behind anybody's back, and stay until they are forgotten."""

    @pytest.fixture(autouse=True)
    def ids(self) -> None:
        """Ids of each case's own: over Cassandra, the use of a key lies in the future of the clock
        by which the cases before it were forgotten."""
        self.start = new_id()[:8]

    def key(self, number: int = 1, **more: Any) -> ApiKey:
        """A key with all its fields set, but for those that only time brings."""
        fields: dict[str, Any] = {
            "label": f"number {number}: \u8a08\u6570 'quoted'",
            "digest": digest_of(str(number).encode()),
            "namespaces": ("videos", "team-*"),
            "scope": Scope.WRITE,
            "created_at_us": NOW,
            "expires_at_us": NOW + 1,
            "requests_per_s": 100.0,
            "adds_per_s": 0.1,
            "reservations_per_s": 1.0,
            "resolutions_per_s": 1 / 3,
        }
        return ApiKey(f"{self.start}{number:04}", **fields | more)

    async def test_a_key_is_kept_as_it_was_made(self, store: Store) -> None:
        """All of its fields, set or not; but no use is recorded yet."""
        full = self.key(1)
        plain = ApiKey(f"{self.start}2", "", digest_of(b""), ("*",), Scope.READ, NOW)
        assert list(await store.keys.api_keys()) == []
        for each in (full, plain):
            assert await store.keys.create_api_key(replace(each, last_used_us=NOW))
        assert list(await store.keys.api_keys()) == [full, plain]
        assert [each.last_used_us for each in await store.keys.api_keys()] == [None, None]

    async def test_keys_are_listed_as_they_were_made(self, store: Store) -> None:
        """Those of one instant by id."""
        made = [self.key(n, created_at_us=NOW + at) for n, at in ((3, 1), (2, 1), (1, 2), (4, 0))]
        for each in made:
            assert await store.keys.create_api_key(each)
        assert [each.id[-1] for each in await store.keys.api_keys()] == ["4", "2", "3", "1"]

    async def test_a_taken_id_is_refused(self, store: Store) -> None:
        """The existing one stays."""
        assert await store.keys.create_api_key(self.key(1))
        assert not await store.keys.create_api_key(self.key(1, scope=Scope.ADMIN))
        assert list(await store.keys.api_keys()) == [self.key(1)]

    async def test_a_change_asks_for_what_it_changes(self, store: Store) -> None:
        """Of two that read the same, one wins; the other changes nothing."""
        old, revoked, rotated = (
            self.key(),
            self.key(revoked_at_us=NOW),
            self.key(replaced_by="another"),
        )
        assert await store.keys.create_api_key(old)
        assert await store.keys.change_api_key(old, revoked)
        assert not await store.keys.change_api_key(old, rotated)
        assert list(await store.keys.api_keys()) == [revoked]
        assert not await store.keys.change_api_key(self.key(2), self.key(2, label=""))
        assert list(await store.keys.api_keys()) == [revoked]

    async def test_of_changes_at_once_one_is_made(self, store: Store) -> None:
        """Whatever they ask for."""
        old = self.key()
        assert await store.keys.create_api_key(old)
        asked = [replace(old, label=str(n)) for n in range(4)]
        answers = await asyncio.gather(*(store.keys.change_api_key(old, new) for new in asked))
        assert sorted(answers) == [False, False, False, True]
        assert list(await store.keys.api_keys()) == [asked[answers.index(True)]]

    async def test_of_keys_made_at_once_under_one_id_one_is_made(self, store: Store) -> None:
        """And other processes are notified."""
        asked = [self.key(1, label=str(n)) for n in range(4)]
        answers = await asyncio.gather(*(store.keys.create_api_key(each) for each in asked))
        assert sorted(answers) == [False, False, False, True]
        assert list(await store.keys.api_keys()) == [asked[answers.index(True)]]

    async def test_use_moves_forward_and_is_no_change(self, store: Store) -> None:
        """Who read the key before it was used can change it still, and does not undo the use."""
        assert await store.keys.create_api_key(self.key(1))
        assert await store.keys.create_api_key(self.key(2))
        await store.keys.note_api_key_uses([(self.key(1).id, NOW + 5), (self.key(3).id, NOW)])
        await store.keys.note_api_key_uses([(self.key(1).id, NOW + 4)])
        await store.keys.note_api_key_uses([])
        assert [each.last_used_us for each in await store.keys.api_keys()] == [NOW + 5, None]
        assert await store.keys.change_api_key(self.key(1), self.key(1, revoked_at_us=NOW))
        assert [each.last_used_us for each in await store.keys.api_keys()] == [NOW + 5, None]
        await store.keys.note_api_key_uses([(self.key(1).id, NOW + 6)])
        assert [each.last_used_us for each in await store.keys.api_keys()] == [NOW + 6, None]

    async def test_a_forgotten_key_is_gone_with_its_use(self, store: Store) -> None:
        """If it was as it is said to be; one that is not on record cannot be forgotten."""
        assert await store.keys.create_api_key(self.key(1))
        await store.keys.note_api_key_uses([(self.key(1).id, NOW)])
        assert not await store.keys.forget_api_key(self.key(1, label="another"))
        assert list(await store.keys.api_keys()) == [self.key(1)]
        assert await store.keys.forget_api_key(self.key(1))
        assert not await store.keys.forget_api_key(self.key(1))
        await store.keys.note_api_key_uses([(self.key(1).id, NOW + 1)])
        assert list(await store.keys.api_keys()) == []
