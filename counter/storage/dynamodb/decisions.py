"""Decisions about late tokens, reserved times of keys, leases of workers, and API keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from counter.api_keys import ApiKey
from counter.errors import UnavailableError
from counter.limits import DAY, HOUR, SECOND
from counter.storage.dynamodb.driver import NEW, Item, Key, Refused, delete, put, update
from counter.storage.dynamodb.layout import ALONE, DECISION, EXPIRES, RESERVED, number, partition
from counter.storage.dynamodb.session import DynamodbSession
from counter.storage.shared.key_documents import KeyReader, key_document, key_from
from counter.storage.shared.write_deadline import write_within
from counter.types import Decision, Event, Namespace, Outcome, Reservation

#: An item says itself when it expires. DynamoDB deletes it this much later, or some days after.
_EXPIRES_AFTER_US: Final = HOUR
_ATTEMPTS_MAX: Final = 5


class DynamodbDecisions:
    """:class:`counter.ports.DecisionStore`."""

    def __init__(self, session: DynamodbSession) -> None:
        self._session = session
        self._driver = session.driver

    async def decide(
        self, namespace: Namespace, events: Sequence[Event], decision: Decision
    ) -> Decision:
        stored = await self._set_decision(namespace, events, None, decision)
        return decision if stored is None else _decision_from(stored)

    async def decided(self, namespace: Namespace, events: Sequence[Event]) -> Decision | None:
        table = self._session.data(namespace.dataset)
        item = await self._driver.get(table, decision_key(namespace, events))
        return _decision_from(item) if item else None

    async def cancel(
        self, namespace: Namespace, events: Sequence[Event], decision: Decision
    ) -> Decision:
        stored: Decision | None = None
        async with write_within("DynamoDB", namespace.dataset.write_timeout_us):
            for _ in range(_ATTEMPTS_MAX):
                left = decision.over(stored)
                if left == stored:
                    return left
                item = await self._set_decision(namespace, events, stored, left)
                if item is None:
                    return left
                stored = _decision_from(item) if item else None
        raise UnavailableError("a decision changes while it is read", retry_after_us=100_000)

    async def _set_decision(
        self,
        namespace: Namespace,
        events: Sequence[Event],
        seen: Decision | None,
        decision: Decision,
    ) -> Item | None:
        """Replace the decision *seen*, or insert if that is None. Return None if it was done, else
        the item in the way, which is empty if there is none any more."""
        dataset, (pk, sk) = namespace.dataset, decision_key(namespace, events)
        # It outlives the event, which is dropped with its slice at latest when retention is over.
        until_us = self._session.clock.now_us() + 2 * dataset.retention_us + dataset.slice_us
        item = {"pk": pk, "sk": sk, EXPIRES: until_us // SECOND, **_cells_of(decision)}
        table = self._session.data(dataset)
        if seen is None:
            write = put(table, item, NEW)
        else:
            write = put(table, item, "o = :o AND f = :f", **_cells_of(seen))
        answer = await self._driver.write(write, dataset.write_timeout_us)
        return answer.item if isinstance(answer, Refused) else None

    async def reserve(self, namespace: Namespace, nonce: bytes, wanted: Reservation) -> int:
        pk, sk = reservation_key(namespace, nonce)
        until_s = (wanted.expires_us + _EXPIRES_AFTER_US) // SECOND
        item = {"pk": pk, "sk": sk, "t": wanted.time_us, "e": wanted.expires_us, EXPIRES: until_s}
        condition, values = f"{NEW} OR e <= :e", {"e": wanted.expired_us}
        if wanted.replaces_us is not None:
            condition, values = f"{condition} OR t = :t", {**values, "t": wanted.replaces_us}
        write = put(self._session.data(namespace.dataset), item, condition, **values)
        answer = await self._driver.write(write, namespace.dataset.write_timeout_us)
        return int(answer.item["t"]) if isinstance(answer, Refused) else wanted.time_us


def decision_key(namespace: Namespace, events: Sequence[Event]) -> Key:
    """Return the key of the decision about the token of *events*."""
    first = events[0]
    token = number(first.event_time_us) + first.event_id + first.scope.encode()
    return partition(namespace, DECISION, token), ALONE


def reservation_key(namespace: Namespace, nonce: bytes) -> Key:
    """Return the key of the time that is reserved for an arbitrary key."""
    return partition(namespace, RESERVED, nonce), ALONE


def _cells_of(decision: Decision) -> Item:
    return {"o": decision.outcome.value, "f": decision.fingerprint.hex()}


def _decision_from(item: Item) -> Decision:
    return Decision(Outcome(item["o"]), bytes.fromhex(item["f"]))


_WORKERS: Final = b"workers"


class DynamodbLeases:
    """:class:`counter.capabilities.LeaseStore`. A lease ends by its readers' clocks."""

    def __init__(self, session: DynamodbSession) -> None:
        self._session = session
        self._driver, self._table = session.driver, session.control

    async def heartbeat(self, worker: str, ttl_us: int) -> None:
        until_us = self._session.clock.now_us() + ttl_us
        until_s = (until_us + _EXPIRES_AFTER_US) // SECOND
        item = {"pk": _WORKERS, "sk": worker.encode(), "u": until_us, EXPIRES: until_s}
        await self._driver.write(put(self._table, item))

    async def leave(self, worker: str) -> None:
        await self._driver.write(delete(self._table, (_WORKERS, worker.encode())))

    async def workers(self) -> Sequence[str]:
        now_us = self._session.clock.now_us()
        items = await self._driver.query(self._table, _WORKERS)
        return [item["sk"].decode() for item in items if item["u"] > now_us]


_KEYS: Final = b"api keys"
_GONE_FOR_S: Final = 30 * DAY // SECOND


class DynamodbKeys:
    """:class:`counter.api_keys.KeyStore`."""

    def __init__(self, session: DynamodbSession) -> None:
        self._session = session
        self._driver, self._table = session.driver, session.control
        self._reader = KeyReader()

    async def api_keys(self) -> Sequence[ApiKey]:
        items = await self._driver.query(self._table, _KEYS)
        return self._reader.keys(
            (item["sk"].decode(), item["document"], item.get("u"))
            for item in items
            if "document" in item
        )

    async def create_api_key(self, key: ApiKey) -> bool:
        item = {"pk": _KEYS, "sk": key.id.encode(), "document": key_document(key)}
        answer = await self._driver.write(put(self._table, item, NEW))
        return not isinstance(answer, Refused) or answer.item == item

    async def change_api_key(self, old: ApiKey, new: ApiKey) -> bool:
        stored, text = await self._stored(old), key_document(new)
        if stored is None:
            return False
        change, condition = "SET document = :d", "document = :o"
        write = update(self._table, _key_of(old), change, condition, d=text, o=stored)
        answer = await self._driver.write(write)
        return not isinstance(answer, Refused) or answer.item.get("document") == text

    async def forget_api_key(self, key: ApiKey) -> bool:
        stored = await self._stored(key)
        if stored is None:
            return False
        # What is left of it refuses a creation from before that lands late.
        until_s = self._session.clock.now_us() // SECOND + _GONE_FOR_S
        gone = {"pk": _KEYS, "sk": key.id.encode(), EXPIRES: until_s}
        answer = await self._driver.write(put(self._table, gone, "document = :o", o=stored))
        return not isinstance(answer, Refused) or "document" not in answer.item

    async def note_api_key_uses(self, uses: Sequence[tuple[str, int]]) -> None:
        is_later = "attribute_exists(document) AND (attribute_not_exists(u) OR u < :u)"
        for key_id, used_us in uses:
            key = _KEYS, key_id.encode()
            await self._driver.write(update(self._table, key, "SET u = :u", is_later, u=used_us))

    async def _stored(self, key: ApiKey) -> str | None:
        """Return the stored text of *key*; None if it is not as *key* says."""
        item = await self._driver.get(self._table, _key_of(key))
        if "document" not in item or key_from(key.id, item["document"], key.last_used_us) != key:
            return None
        return str(item["document"])


def _key_of(key: ApiKey) -> Key:
    return _KEYS, key.id.encode()
