"""The control plane's contract: namespaces, listing, leases, purging."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from counter.errors import NamespaceUnknownError
from counter.limits import MINUTE, SECOND
from counter.ports import Store
from counter.testing.cases import (
    DATASET,
    FIRST_SLICE,
    NOW,
    SETTINGS,
    SLICE,
    SLICES_END,
    T0,
    UNUSUAL_NAMES,
    WINDOW,
    StoreCases,
    add,
    make_namespace,
    nonce,
    total,
    updated_namespace,
    write,
)
from counter.testing.clock import FakeClock
from counter.types import (
    Decision,
    Event,
    Mark,
    Namespace,
    Outcome,
    PayloadCheck,
    Pending,
    Reservation,
)
from counter.windows import accept_limit_at, closing_limit_at, settling_time


async def purge(store: Store, now_us: int = NOW) -> None:
    """Purge until there is no more to do."""
    for _ in range(100):
        if not await store.control.purge(now_us):
            return
    raise AssertionError("purge never comes to an end")


class NamespaceCases(StoreCases):
    """A namespace changes by compare-and-set of its version, and its id is its own for ever."""

    async def test_a_new_namespace_is_as_it_was_asked_for(self, store: Store) -> None:
        """All its settings, and the dataset it names, whole."""
        created = await store.control.create_namespace("tests", SETTINGS, NOW)
        assert created is not None
        assert created.name == "tests"
        assert created.settings == SETTINGS
        assert created.created_at_us == NOW
        assert replace(created.dataset, id=DATASET.id) == DATASET
        assert list(await store.control.datasets()) == [created.dataset]
        assert (
            accept_limit_at(created, NOW) == accept_limit_at(created, 0) == SETTINGS.accept_limit_us
        )
        assert list(await store.control.namespaces()) == [created]

    async def test_a_taken_name_is_refused(self, store: Store) -> None:
        """The existing one stays."""
        first = await make_namespace(store, "tests")
        assert (
            await store.control.create_namespace("tests", replace(SETTINGS, shards=9), NOW + 1)
            is None
        )
        assert list(await store.control.namespaces()) == [first]
        assert len(await store.rollups.watermarks(first)) == 1

    async def test_namespaces_are_listed_by_name(self, store: Store) -> None:
        """In whatever order they were made."""
        for name in ("b", "a_", "c", "a-", "a", "a0"):
            await make_namespace(store, name)
        names = [each.name for each in await store.control.namespaces()]
        assert names == ["a", "a-", "a0", "a_", "b", "c"]

    async def test_an_update_is_a_new_version(self, store: Store, namespace: Namespace) -> None:
        """With the new settings; all else stays."""
        settings = replace(SETTINGS, payload_check=PayloadCheck.OFF, cache_ttl_us=1)
        updated = await updated_namespace(store, namespace, settings, T0 + SLICE)
        assert updated is not None
        assert updated.version != namespace.version
        assert updated == replace(namespace, settings=settings, version=updated.version)
        assert list(await store.control.namespaces()) == [updated]

    async def test_an_update_of_an_old_version_is_refused(
        self, store: Store, namespace: Namespace
    ) -> None:
        """Of two that read the same version, one wins."""
        first = replace(SETTINGS, cache_ttl_us=1)
        updated = await updated_namespace(store, namespace, first, T0 + SLICE)
        second = replace(SETTINGS, cache_ttl_us=2)
        assert await updated_namespace(store, namespace, second, T0 + SLICE) is None
        assert list(await store.control.namespaces()) == [updated]

    async def test_an_accept_limit_holds_from_its_slice_on(
        self, store: Store, namespace: Namespace
    ) -> None:
        """Before it the old one holds: a window closes by the limit of its events."""
        settings = replace(SETTINGS, accept_limit_us=SECOND)
        updated = await updated_namespace(store, namespace, settings, T0 + SLICE)
        assert updated is not None
        limits = [accept_limit_at(updated, at) for at in (0, T0 + SLICE - 1, T0 + SLICE)]
        assert limits == [SETTINGS.accept_limit_us, SETTINGS.accept_limit_us, SECOND]
        again = replace(settings, accept_limit_us=2 * SECOND)
        updated = await updated_namespace(store, updated, again, T0 + 2 * SLICE)
        assert updated is not None
        times = (T0, T0 + SLICE, T0 + 2 * SLICE)
        limits = [accept_limit_at(updated, at) for at in times]
        assert limits == [SETTINGS.accept_limit_us, SECOND, 2 * SECOND]

    async def test_a_coming_accept_limit_can_be_replaced(
        self, store: Store, namespace: Namespace
    ) -> None:
        """Two updates before the same slice: the last one holds, or none does."""
        updated: Namespace | None = namespace
        for limit_us in (SECOND, 3 * SECOND, SETTINGS.accept_limit_us):
            assert updated is not None
            settings = replace(SETTINGS, accept_limit_us=limit_us)
            updated = await updated_namespace(store, updated, settings, T0 + SLICE)
            assert updated is not None
            assert accept_limit_at(updated, T0 + SLICE) == limit_us
            assert accept_limit_at(updated, T0 + SLICE - 1) == SETTINGS.accept_limit_us
        assert updated is not None
        starts = [era.from_us for era in updated.eras]
        assert len(set(starts)) == len(starts)
        assert list(await store.control.namespaces()) == [updated]

    async def test_an_announced_accept_limit_is_kept_until_it_is_changed(
        self, store: Store, namespace: Namespace
    ) -> None:
        """Adds are accepted by the shorter one, and windows close by the longer one."""
        announced = namespace.announced(SECOND, T0 + SLICE)
        assert await store.control.update_namespace(namespace, announced)
        assert list(await store.control.namespaces()) == [announced]
        assert closing_limit_at(announced, T0 + SLICE) == SETTINGS.accept_limit_us
        assert accept_limit_at(announced, T0 + SLICE) == SECOND
        settings = replace(SETTINGS, accept_limit_us=SECOND)
        updated = await updated_namespace(store, announced, settings, T0 + SLICE)
        assert list(await store.control.namespaces()) == [updated]
        assert updated == replace(
            namespace.changed(settings, T0 + SLICE), version=namespace.version + 2
        )

    async def test_deleting_asks_for_the_version(self, store: Store, namespace: Namespace) -> None:
        """An older one deletes nothing; a deleted one is neither deleted nor updated again."""
        settings = replace(SETTINGS, cache_ttl_us=1)
        updated = await updated_namespace(store, namespace, settings, T0 + SLICE)
        assert updated is not None
        assert not await store.control.delete_namespace(namespace)
        assert list(await store.control.namespaces()) == [updated]
        assert await store.control.delete_namespace(updated)
        assert list(await store.control.namespaces()) == []
        assert not await store.control.delete_namespace(updated)
        assert await updated_namespace(store, updated, SETTINGS, T0 + SLICE) is None

    async def test_a_deleted_namespace_takes_no_more(
        self, store: Store, namespace: Namespace
    ) -> None:
        """Who still holds it learns that it is gone."""
        await write(store, namespace, add())
        await store.control.delete_namespace(namespace)
        with pytest.raises(NamespaceUnknownError):
            await store.events.append(namespace, [add(number=2)])
        with pytest.raises(NamespaceUnknownError):
            await store.rollups.watermarks(namespace)

    @pytest.mark.parametrize("purged", [False, True], ids=["at-once", "after-purge"])
    async def test_an_id_is_never_used_again(
        self, store: Store, clock: FakeClock, purged: bool
    ) -> None:
        """A namespace of an old name has nothing of its predecessor."""
        ids = []
        for delta in (1, 2, 3):
            namespace = await make_namespace(store, "tests")
            ids.append(namespace.id)
            assert await total(store, namespace) == 0
            assert await store.decisions.decided(namespace, [add("late")]) is None
            assert list(await store.rollups.heads(namespace, ["c"])) == [None]
            assert await store.control.counters(namespace, prefix="", after=None, limit=9) == []
            await write(store, namespace, add(delta=delta))
            await store.decisions.decide(namespace, [add("late")], Decision(Outcome.VOID, b""))
            await store.recounts.write_pending(namespace, [("c", Pending(T0, NOW))])
            assert await store.control.delete_namespace(namespace)
            clock.advance(settling_time(DATASET))
            if purged:
                await purge(store)
        assert len(set(ids)) == 3


class ListingCases(StoreCases):
    """Counters are listed in code point order, each once."""

    async def listed(
        self, store: Store, namespace: Namespace, prefix: str = "", limit: int = 3
    ) -> list[str]:
        """All the names under *prefix*, in pages of *limit*."""
        found: list[str] = []
        while True:
            after = found[-1] if found else None
            page = await store.control.counters(namespace, prefix=prefix, after=after, limit=limit)
            assert len(page) <= limit
            found += page
            if len(page) < limit:
                return found

    @pytest.mark.parametrize("limit", [1, 4, 1_000])
    async def test_in_code_point_order(
        self, store: Store, namespace: Namespace, limit: int
    ) -> None:
        """Whatever the size of the pages; written twice or at several times is one counter."""
        names = (*UNUSUAL_NAMES, "\uffee", "\U00010000", "Z", "é", "z")
        events = [add(name, at) for name in reversed(names) for at in (T0 - SLICE, T0, NOW)]
        await write(store, namespace, *dict.fromkeys(events))
        assert await self.listed(store, namespace, limit=limit) == sorted(set(names))

    async def test_by_prefix(self, store: Store, namespace: Namespace) -> None:
        """It is taken literally, and cuts where it must."""
        names = [
            "a",
            "a%",
            "a%b",
            "aa",
            "ab",
            "ab😀",
            "ab😀c",
            "abc",
            "a_",
            "b",
            "A",
            "e",
            "e\u0301",
        ]
        await write(store, namespace, *(add(name) for name in names))
        for prefix in ("", "a", "ab", "a%", "a_", "ab😀", "e", "\u00e9", "b", "c", "abcd", "*"):
            expected = sorted(name for name in names if name.startswith(prefix))
            assert await self.listed(store, namespace, prefix, limit=2) == expected

    async def test_after_any_name(self, store: Store, namespace: Namespace) -> None:
        """The name to go on after need not be one of the list, nor within the prefix."""
        await write(store, namespace, *(add(name) for name in ("a", "a1", "a2", "b1")))
        cases = {"": ["a", "a1", "a2"], "a": ["a1", "a2"], "a1x": ["a2"], "b": []}
        for after, expected in cases.items():
            page = await store.control.counters(namespace, prefix="a", after=after, limit=9)
            assert list(page) == expected

    async def test_a_counter_stays_listed(self, store: Store, namespace: Namespace) -> None:
        """After its marks are dropped and its events are gone; another namespace's is not."""
        await write(store, await make_namespace(store, "other"), add("theirs"))
        await write(store, namespace, add("ours", FIRST_SLICE + 5 * MINUTE))
        await store.rollups.drop_marks(namespace, 0, SLICES_END)
        await store.control.drop_slice(namespace.dataset, FIRST_SLICE)
        assert await self.listed(store, namespace) == ["ours"]


class LeaseCases(StoreCases):
    """Sequence numbers for tokens that the server issues."""

    async def test_no_number_is_leased_twice(self, store: Store) -> None:
        """Each lease lies above the one before it, for any caller and number."""
        counts = [1, 10, 1, 1_000, 3]
        leases = [await store.control.lease_tokens(count, NOW) for count in counts[:2]]
        leases += await asyncio.gather(
            *(store.control.lease_tokens(count, NOW) for count in counts[2:])
        )
        numbers = [
            number
            for (_, first, _), count in zip(leases, counts, strict=True)
            for number in range(first, first + count)
        ]
        assert numbers[0] >= 0
        assert numbers[:11] == sorted(numbers[:11])
        assert len(set(numbers)) == sum(counts)
        assert min(numbers[11:]) > numbers[10]

    async def test_a_store_has_its_own_bytes(self, store: Store) -> None:
        """Eight of them, the same in every lease."""
        ids = {(await store.control.lease_tokens(1, NOW)).issuer for _ in range(3)}
        assert [len(each) for each in ids] == [8]

    async def test_the_time_of_a_lease_never_steps_back(self, store: Store) -> None:
        """For every later caller, with any clock."""
        times = [(await store.control.lease_tokens(1, NOW + n)).time_us for n in (0, 5, 3, 6)]
        assert times == [NOW, NOW + 5, NOW + 5, NOW + 6]


class NewLifeCases(StoreCases):
    """After a restore of a store whose backups are made by its own tools."""

    async def test_what_may_have_been_given_out_is_not_given_out_again(self, store: Store) -> None:
        """However much the old life gave out after its snapshot."""
        control: Any = store.control
        before = await store.control.lease_tokens(5, NOW)
        old = await make_namespace(store, "old")
        await control.begin_new_life(NOW + SECOND)
        after = await store.control.lease_tokens(5, NOW)
        assert after.first > before.first + 1_000_000_000
        assert after.time_us == NOW + SECOND
        assert (await make_namespace(store, "new")).id > old.id + 1_000


class WorkerLeaseCases(StoreCases):
    """Leases of workers. They count real time where the store is remote, so no case waits for one
    to run out."""

    TTL = 600 * SECOND

    async def test_workers_that_live_are_known(self, store: Store) -> None:
        """In order, until they leave; renewing is saying it again."""
        assert list(await store.leases.workers()) == []
        for name in ("b", "a", "b"):
            await store.leases.heartbeat(name, self.TTL)
        assert list(await store.leases.workers()) == ["a", "b"]
        for name in ("b", "never"):
            await store.leases.leave(name)
        assert list(await store.leases.workers()) == ["a"]

    async def test_many_who_join_at_once_all_live(self, store: Store) -> None:
        """Whatever their number."""
        names = [f"w{n}" for n in range(8)]
        await asyncio.gather(*(store.leases.heartbeat(each, self.TTL) for each in names))
        assert list(await store.leases.workers()) == names


class PurgeCases(StoreCases):
    """Purging comes to an end and takes nothing that anybody can ask for."""

    async def test_an_empty_store_has_nothing_to_purge(self, store: Store) -> None:
        """And says so at once."""
        assert not await store.control.purge(NOW)

    async def test_a_living_namespace_is_left_alone(
        self, store: Store, clock: FakeClock, namespace: Namespace
    ) -> None:
        """With counters of the same names beside a deleted one, and more than one purge deletes."""
        names = [f"c{n}" for n in range(120)]
        events = [add(name, at) for name in names for at in (T0 - SLICE, NOW)]
        doomed = await make_namespace(store, "doomed")
        for each in (namespace, doomed):
            # A slow store writes so many in time.
            for first in range(0, len(events), 40):
                await write(store, each, *events[first : first + 40])
            await store.recounts.write_marks(each, [Mark(NOW, "c0", T0)])
            await store.recounts.write_pending(each, [("c0", Pending(T0, NOW))])
            await store.decisions.reserve(each, nonce(1), Reservation(NOW, NOW + SECOND))
            await store.decisions.decide(each, [add("late")], Decision(Outcome.VOID, b""))
        await store.control.delete_namespace(doomed)
        clock.advance(settling_time(DATASET))
        await purge(store)
        assert list(await store.events.find(namespace, events)) == events
        left = await store.control.counters(namespace, prefix="", after=None, limit=1_000)
        assert left == sorted(names)
        (head,) = await store.rollups.heads(namespace, ["c0"])
        assert head is not None
        assert head.pending == (Pending(T0, NOW),)
        assert (
            await store.decisions.reserve(namespace, nonce(1), Reservation(NOW + 1, NOW + SECOND))
            == NOW
        )
        assert await store.decisions.decided(namespace, [add("late")]) == Decision(
            Outcome.VOID, b""
        )
        assert list(await store.control.namespaces()) == [namespace]

    async def test_expired_keys_go_and_others_stay(
        self, store: Store, namespace: Namespace
    ) -> None:
        """However many: no call does it all, and the calls come to an end."""
        for n in range(30):
            await store.decisions.reserve(namespace, nonce(n), Reservation(NOW, NOW + n))
        await purge(store, NOW + 15)
        for n in range(30):
            time_us = await store.decisions.reserve(
                namespace, nonce(n), Reservation(NOW + 1, NOW + n)
            )
            assert (time_us == NOW) == (n > 15)

    async def test_a_decision_about_the_first_instant_that_is_kept_stays(
        self, store: Store, namespace: Namespace
    ) -> None:
        event, decision = add(at=FIRST_SLICE + SLICE), Decision(Outcome.APPLIED, b"")
        await write(store, namespace, event)
        await store.decisions.decide(namespace, [event], decision)
        await store.control.drop_slice(namespace.dataset, FIRST_SLICE)
        await purge(store, NOW)
        assert await store.decisions.decided(namespace, [event]) == decision

    async def test_a_decision_lives_as_long_as_its_event(
        self, store: Store, namespace: Namespace
    ) -> None:
        """It goes when nothing of the event's time can be asked for any more, not before."""
        old, young = add(at=FIRST_SLICE + 5 * MINUTE), add(at=NOW)
        decision = Decision(Outcome.APPLIED, b"")
        for event in (old, young):
            await write(store, namespace, event)
            await store.decisions.decide(namespace, [event], decision)
        await purge(store, NOW)
        found: list[Event] = [old, young]
        assert [await store.decisions.decided(namespace, [each]) for each in found] == [
            decision
        ] * 2
        await store.control.drop_slice(namespace.dataset, FIRST_SLICE)
        gone_us = old.event_time_us + 2 * DATASET.retention_us + SLICE + WINDOW
        await purge(store, gone_us)
        assert [await store.decisions.decided(namespace, [each]) for each in found] == [
            None,
            decision,
        ]
