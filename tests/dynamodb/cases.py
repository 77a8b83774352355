"""How the contract suites differ over DynamoDB, on the local engine and in the simulation."""

from counter.limits import HOUR, MINUTE, SECOND
from counter.ports import Store
from counter.storage.dynamodb.decisions import decision_key, reservation_key
from counter.storage.dynamodb.driver import Key
from counter.storage.dynamodb.layout import COUNTS, EXPIRES, partition, row_place
from counter.storage.dynamodb.store import DynamodbStore
from counter.testing.cases import DATASET, FIRST_SLICE, NOW, StoreCases, add, nonce, write
from counter.testing.clock import FakeClock
from counter.testing.control_cases import PurgeCases, purge
from counter.types import CANCELLED_KEY, Decision, Namespace, Outcome, Reservation


class DynamodbCases(StoreCases):
    """A store over DynamoDB."""

    transactional = False
    one_moment = False
    new_life = True

    async def lose_row(self, store: Store, namespace: Namespace, row: tuple[str, int]) -> None:
        assert isinstance(store, DynamodbStore)
        counter, window_us = row
        key = partition(namespace, COUNTS, counter), row_place(window_us)
        await store.driver.write_many(store.session.data(namespace.dataset), deletes=[key])


class DynamodbPurgeCases(PurgeCases):
    """Purging. Keys and decisions are not looked for: DynamoDB deletes them by its own clock."""

    async def test_expired_keys_go_and_others_stay(
        self, store: Store, namespace: Namespace
    ) -> None:
        """Each may go an hour after its expiry, not before; a replaced one as the new one."""
        for n in range(5):
            await store.decisions.reserve(namespace, nonce(n), Reservation(NOW, NOW + n * HOUR))
        await store.decisions.reserve(
            namespace, nonce(0), Reservation(NOW + 1, NOW + 1 + 9 * HOUR, replaces_us=NOW)
        )
        await purge(store, NOW + 3 * HOUR)
        for n, hours in enumerate((9, 1, 2, 3, 4)):
            expires_s = await self.expires_s(store, namespace, reservation_key(namespace, nonce(n)))
            assert expires_s * SECOND // HOUR * HOUR == NOW // HOUR * HOUR + (hours + 1) * HOUR

    async def test_a_decision_lives_as_long_as_its_event(
        self, store: Store, namespace: Namespace
    ) -> None:
        """It is made while the event is kept, and outlives the slice that the event is in."""
        event, decision = add(at=FIRST_SLICE + 5 * MINUTE), Decision(Outcome.APPLIED, b"")
        await write(store, namespace, event)
        await store.decisions.decide(namespace, [event], decision)
        await purge(store, NOW)
        assert await store.decisions.decided(namespace, [event]) == decision
        expires_s = await self.expires_s(store, namespace, decision_key(namespace, [event]))
        assert expires_s * SECOND == NOW + 2 * DATASET.retention_us + DATASET.slice_us

    async def test_a_decision_that_is_cancelled_lives_as_long_again(
        self, store: Store, namespace: Namespace, clock: FakeClock
    ) -> None:
        decision, cancelled = Decision(Outcome.APPLIED, b""), Decision(Outcome.CANCELLED, b"")
        await store.decisions.decide(namespace, [add()], decision)
        clock.advance(HOUR)
        assert await store.decisions.cancel(namespace, [add()], cancelled) == cancelled
        expires_s = await self.expires_s(store, namespace, decision_key(namespace, [add()]))
        life_us = 2 * DATASET.retention_us + DATASET.slice_us
        assert expires_s * SECOND == NOW + HOUR + life_us

    async def test_a_cancelled_key_goes_when_it_is_forgotten(
        self, store: Store, namespace: Namespace
    ) -> None:
        """Its time is stored as another one, which is far ahead."""
        time_us, later_us = NOW + CANCELLED_KEY, NOW + 3 * HOUR
        await store.decisions.reserve(namespace, nonce(1), Reservation(NOW, NOW + HOUR))
        await store.decisions.reserve(
            namespace, nonce(1), Reservation(time_us, later_us, time_us, replaces_us=NOW)
        )
        expires_s = await self.expires_s(store, namespace, reservation_key(namespace, nonce(1)))
        assert expires_s * SECOND == later_us + HOUR

    async def expires_s(self, store: Store, namespace: Namespace, key: Key) -> int:
        """When DynamoDB may delete the item of *key*, by the attribute that it looks at; 0 if it
        never may."""
        assert isinstance(store, DynamodbStore)
        item = await store.driver.get(store.session.data(namespace.dataset), key)
        return int(item.get(EXPIRES, 0))
