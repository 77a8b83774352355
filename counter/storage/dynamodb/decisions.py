"""Decisions about late tokens, reserved times of keys, leases of workers, and API keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from counter.limits import HOUR, SECOND
from counter.storage.dynamodb.driver import Delete, Item, Put, Refused, Update
from counter.storage.dynamodb.session import Session
from counter.storage.dynamodb.tables import EXPIRES, decision_key, reservation_key
from counter.storage.shared.key_documents import KeyReader, key_document, key_from
from counter.types import ApiKey, Decision, Event, Namespace, Outcome

_NEW: Final = "attribute_not_exists(pk)"
#: An item says itself when it expires. DynamoDB deletes it this much later, or some days after.
_EXPIRES_AFTER_US: Final = HOUR
_ATTEMPTS_MAX: Final = 5


class DynamodbDecisions:
    """:class:`counter.ports.DecisionStore`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._driver = session.driver

    async def decide(
        self, namespace: Namespace, events: Sequence[Event], decision: Decision
    ) -> Decision:
        dataset, key = namespace.dataset, decision_key(namespace, [*events])
        # It outlives the event, which is dropped with its slice at latest when retention is over.
        until_us = self._session.clock.now_us() + 2 * dataset.retention_us + dataset.slice_us
        put = Put(
            self._session.data(dataset),
            {
                "pk": key[0],
                "sk": key[1],
                EXPIRES: until_us // SECOND,
                "o": decision.outcome.value,
                "f": decision.fingerprint.hex(),
            },
            _NEW,
        )
        answer = await self._driver.write(put, dataset.write_timeout_us)
        return _decision_from(answer.item or {}) if isinstance(answer, Refused) else decision

    async def decided(self, namespace: Namespace, events: Sequence[Event]) -> Decision | None:
        key = decision_key(namespace, [*events])
        item = await self._driver.get(self._session.data(namespace.dataset), key)
        return None if item is None else _decision_from(item)

    async def reserve(
        self, namespace: Namespace, nonce: bytes, now_us: int, expires_us: int, kept_us: int = 0
    ) -> int:
        values = {":e": now_us - kept_us}
        return await self._reserve(namespace, nonce, now_us, expires_us, "e <= :e", values)

    async def rereserve(
        self, namespace: Namespace, nonce: bytes, old_us: int, now_us: int, expires_us: int
    ) -> int:
        values = {":e": now_us, ":t": old_us}
        condition = "e <= :e OR t = :t"
        return await self._reserve(namespace, nonce, now_us, expires_us, condition, values)

    async def _reserve(
        self,
        namespace: Namespace,
        nonce: bytes,
        now_us: int,
        expires_us: int,
        condition: str,
        values: Item,
    ) -> int:
        key = reservation_key(namespace, nonce)
        until_s = (expires_us + _EXPIRES_AFTER_US) // SECOND
        put = Put(
            self._session.data(namespace.dataset),
            {"pk": key[0], "sk": key[1], "t": now_us, "e": expires_us, EXPIRES: until_s},
            f"{_NEW} OR {condition}",
            values,
        )
        answer = await self._driver.write(put, namespace.dataset.write_timeout_us)
        return int((answer.item or {})["t"]) if isinstance(answer, Refused) else now_us


def _decision_from(item: Item) -> Decision:
    return Decision(Outcome(item["o"]), bytes.fromhex(item["f"]))


_WORKERS: Final = b"workers"


class DynamodbLeases:
    """:class:`counter.ports.LeaseStore`. A lease ends by the clocks of those that read it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._driver, self._table = session.driver, session.control

    async def heartbeat(self, worker: str, ttl_us: int) -> None:
        until_us = self._session.clock.now_us() + ttl_us
        item = {"pk": _WORKERS, "sk": worker.encode(), "u": until_us}
        until_s = (until_us + _EXPIRES_AFTER_US) // SECOND
        await self._driver.write(Put(self._table, {**item, EXPIRES: until_s}))

    async def leave(self, worker: str) -> None:
        await self._driver.write(Delete(self._table, (_WORKERS, worker.encode())))

    async def workers(self) -> Sequence[str]:
        now_us = self._session.clock.now_us()
        items = await self._driver.query(self._table, _WORKERS)
        return [item["sk"].decode() for item in items if item["u"] > now_us]


_KEYS: Final = b"api keys"


class DynamodbKeys:
    """:class:`counter.ports.KeyStore`."""

    def __init__(self, session: Session) -> None:
        self._driver, self._table = session.driver, session.control
        self._reader = KeyReader()

    async def api_keys(self) -> Sequence[ApiKey]:
        items = await self._driver.query(self._table, _KEYS)
        return self._reader.keys(
            (item["sk"].decode(), item["document"], item.get("u")) for item in items
        )

    async def create_api_key(self, key: ApiKey) -> bool:
        item = {"pk": _KEYS, "sk": key.id.encode(), "document": key_document(key)}
        answer = await self._driver.write(Put(self._table, item, _NEW))
        return not isinstance(answer, Refused) or answer.item == item

    async def change_api_key(self, old: ApiKey, new: ApiKey) -> bool:
        stored = await self._stored(old)
        if stored is None:
            return False
        update = Update(
            self._table,
            (_KEYS, old.id.encode()),
            "SET document = :d",
            "document = :o",
            {":d": key_document(new), ":o": stored},
        )
        answer = await self._driver.write(update)
        if isinstance(answer, Refused):
            return (answer.item or {}).get("document") == key_document(new)
        return True

    async def forget_api_key(self, key: ApiKey) -> bool:
        stored = await self._stored(key)
        if stored is None:
            return False
        where = (_KEYS, key.id.encode())
        delete = Delete(self._table, where, "document = :o", {":o": stored})
        answer = await self._driver.write(delete)
        return not isinstance(answer, Refused) or answer.item is None

    async def note_api_key_uses(self, uses: Sequence[tuple[str, int]]) -> None:
        for key_id, used_us in uses:
            await self._driver.write(
                Update(
                    self._table,
                    (_KEYS, key_id.encode()),
                    "SET u = :u",
                    "attribute_exists(pk) AND (attribute_not_exists(u) OR u < :u)",
                    {":u": used_us},
                )
            )

    async def _stored(self, key: ApiKey) -> str | None:
        """Return the stored text of *key*; None if it is not as *key* says."""
        item = await self._driver.get(self._table, (_KEYS, key.id.encode()))
        if item is None or key_from(key.id, item["document"], key.last_used_us) != key:
            return None
        return str(item["document"])
