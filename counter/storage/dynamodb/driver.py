"""Call DynamoDB: items as mappings, outcomes of conditions as values, its errors as the service's.

No other module imports the SDK. Nothing is sent twice, because an attempt whose answer was lost may
have been the one that wrote. Only what DynamoDB says it did not do, because another transaction
held the item, is tried again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, ClassVar, Final, cast

from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, NoRegionError

from counter.errors import (
    OverloadedError,
    StartupError,
    StoreUnavailableError,
    UnavailableError,
    WriteTimeoutError,
)
from counter.limits import SECOND, STORE_CALLS_WAITING_MAX
from counter.metrics import StoreTally

#: The attributes of every table's key.
PARTITION: Final = "pk"
SORT: Final = "sk"

#: Attributes by name: text, numbers, bytes and booleans.
Item = Mapping[str, Any]
#: The values of :data:`PARTITION` and :data:`SORT`.
Key = tuple[bytes, bytes]

#: Bounds of the API.
TRANSACTION_ITEMS_MAX: Final = 100
_BATCH_GETS_MAX: Final = 100
_BATCH_WRITES_MAX: Final = 25

_THROTTLED: Final = frozenset(
    {
        *("ProvisionedThroughputExceededException", "ProvisionedThroughputExceeded"),
        *("ThrottlingException", "ThrottlingError", "RequestLimitExceeded"),
    }
)
_CONFLICTS: Final = frozenset({"TransactionConflictException", "TransactionConflict"})
_ATTEMPTS_MAX: Final = 8
#: The longest pause before another attempt, doubled each time.
_PAUSE_S: Final = 0.01
_RETRY_AFTER_US: Final = SECOND
_READS: Final = frozenset({"get_item", "batch_get_item", "query", "list_tables", "describe_table"})


@dataclass(frozen=True, slots=True)
class DynamodbOptions:
    """Where the tables are. *timeout_us* bounds each call: the wait for a connection, and the
    request. Credentials are those that the AWS SDKs find."""

    region: str | None = None
    endpoint: str | None = None
    prefix: str = "counter"
    connections_max: int = 64
    timeout_us: int = 10 * SECOND
    #: Units a second of reads and of writes of each table; None: on demand.
    units: tuple[int, int] | None = None
    #: Whether tables can be restored to any second of the last 35 days.
    recovers: bool = False


class NoTableError(StoreUnavailableError):
    """The table does not exist."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A condition did not hold; *item* is what was stored, None if there was nothing."""

    item: Item | None


@dataclass(frozen=True, slots=True)
class Put:
    """Put *item* into *table* if *condition* holds."""

    table: str
    item: Item
    condition: str = ""
    values: Item = field(default_factory=dict)

    def request(self) -> dict[str, Any]:
        """Return the parameters of PutItem, also within a transaction."""
        return _request(self, Item=_encoded(self.item))


@dataclass(frozen=True, slots=True)
class Update:
    """Do the *change*, an UpdateExpression, to the item of *key* if *condition* holds."""

    table: str
    key: Key
    change: str
    condition: str = ""
    values: Item = field(default_factory=dict)

    def request(self) -> dict[str, Any]:
        """Return the parameters of UpdateItem, also within a transaction."""
        return _request(self, Key=_key(self.key), UpdateExpression=self.change)


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete the item of *key* if *condition* holds."""

    table: str
    key: Key
    condition: str = ""
    values: Item = field(default_factory=dict)

    def request(self) -> dict[str, Any]:
        """Return the parameters of DeleteItem, also within a transaction."""
        return _request(self, Key=_key(self.key))


@dataclass(frozen=True, slots=True)
class Check:
    """In a transaction: do nothing of it unless *condition* holds for the item of *key*."""

    table: str
    key: Key
    condition: str
    values: Item = field(default_factory=dict)

    def request(self) -> dict[str, Any]:
        """Return the parameters of ConditionCheck."""
        return _request(self, Key=_key(self.key))


Write = Put | Update | Delete
_OPERATIONS: Final[Mapping[type, str]] = {
    Put: "put_item",
    Update: "update_item",
    Delete: "delete_item",
}
_ACTIONS: Final[Mapping[type, str]] = {
    Put: "Put",
    Update: "Update",
    Delete: "Delete",
    Check: "ConditionCheck",
}


class Driver:
    """A client of DynamoDB. Any number of calls may be made at once; a bounded number is under way.

    Calls raise OverloadedError if DynamoDB throttles, or too many wait: nothing was written then.
    They raise WriteTimeoutError and StoreUnavailableError if the outcome is unknown, and
    NoTableError.
    """

    #: One for all clients of a process: it reads the description of the API once.
    _sdk: ClassVar[Any] = get_session()

    def __init__(self, options: DynamodbOptions) -> None:
        self.options = options
        self.tally = StoreTally(("write", "read"))
        self._client: Any = None
        self._open = AsyncExitStack()
        self._slots = asyncio.Semaphore(options.connections_max)
        #: The number of calls that wait for others to end.
        self.waiting = 0

    async def open(self) -> None:
        """Make the client; it connects at its first call. Raises StartupError."""
        timeout_s = self.options.timeout_us / SECOND
        config = AioConfig(
            connect_timeout=timeout_s,
            read_timeout=timeout_s,
            max_pool_connections=self.options.connections_max,
            parameter_validation=False,
            retries={"total_max_attempts": 1, "mode": "standard"},
        )
        try:
            self._client = await self._open.enter_async_context(
                self._sdk.create_client(
                    "dynamodb",
                    region_name=self.options.region,
                    endpoint_url=self.options.endpoint,
                    config=config,
                )
            )
        except (NoRegionError, NoCredentialsError, ValueError) as error:
            raise StartupError(f"DynamoDB: {error}: set dynamodb_region, or AWS_REGION") from error

    async def close(self) -> None:
        """Close the connections."""
        self._client = None
        await self._open.aclose()

    async def write(self, write: Write, timeout_us: int | None = None) -> Item | Refused:
        """Do one conditional write; return the item that an update left, else an empty one."""
        request = write.request()
        if isinstance(write, Update):
            request["ReturnValues"] = "ALL_NEW"
        try:
            answer = await self._call(_OPERATIONS[type(write)], timeout_us, **request)
        except ClientError as error:
            return Refused(_decoded(error.response.get("Item")))
        return _decoded(answer.get("Attributes")) or {}

    async def transact(
        self, writes: Sequence[Write | Check], timeout_us: int | None = None
    ) -> Sequence[Refused | None] | None:
        """Do all of up to 100 *writes* or none. Return None if they are done, else which of the
        conditions did not hold."""
        actions = [{_ACTIONS[type(each)]: each.request()} for each in writes]
        for attempt in range(1, _ATTEMPTS_MAX + 1):
            try:
                await self._call("transact_write_items", timeout_us, TransactItems=actions)
            except ClientError as error:
                reasons: Sequence[Mapping[str, Any]] = error.response["CancellationReasons"]
                refused = [
                    Refused(_decoded(each.get("Item")))
                    if each.get("Code") == "ConditionalCheckFailed"
                    else None
                    for each in reasons
                ]
                if any(refused):
                    return refused
                codes = {str(each.get("Code")) for each in reasons} - {"None"}
                if not codes & _CONFLICTS or attempt == _ATTEMPTS_MAX:
                    raise _throttled(", ".join(sorted(codes))) from error
                await _pause(attempt)
            else:
                return None
        raise AssertionError  # The last attempt returns or raises.

    async def get(self, table: str, key: Key) -> Item | None:
        """Return an item, with all that was written before."""
        answer = await self._call("get_item", TableName=table, Key=_key(key), ConsistentRead=True)
        return _decoded(answer.get("Item"))

    async def get_many(self, table: str, keys: Sequence[Key]) -> Mapping[Key, Item]:
        """Return those items that exist."""
        unique, found = list(dict.fromkeys(keys)), {}
        for each in await _together(
            self._get_some(table, unique[at : at + _BATCH_GETS_MAX])
            for at in range(0, len(unique), _BATCH_GETS_MAX)
        ):
            found.update(each)
        return found

    async def _get_some(self, table: str, keys: Sequence[Key]) -> Mapping[Key, Item]:
        found: dict[Key, Item] = {}
        asked: Any = {table: {"Keys": [_key(each) for each in keys], "ConsistentRead": True}}
        for attempt in range(1, _ATTEMPTS_MAX + 1):
            answer = await self._call("batch_get_item", RequestItems=asked)
            for encoded in answer["Responses"].get(table, ()):
                item = _decoded(encoded) or {}
                found[item[PARTITION], item[SORT]] = item
            asked = answer.get("UnprocessedKeys")
            if not asked:
                return found
            await _pause(attempt)
        raise _throttled("UnprocessedKeys")

    async def query(
        self,
        table: str,
        partition: bytes,
        low: bytes | None = None,
        high: bytes | None = None,
        *,
        prefix: bytes = b"",
        after: bytes | None = None,
        limit: int | None = None,
    ) -> list[Item]:
        """Return the items of a partition in the order of their sort keys, and at most *limit* of
        them; with all that was written before. They are in ``[low, high]`` or begin with *prefix*,
        if these are given, and come after *after*, which is such a sort key."""
        condition, values = "pk = :pk", {":pk": partition}
        if low is not None and high is not None:
            condition, values = (
                f"{condition} AND sk BETWEEN :l AND :h",
                {
                    **values,
                    ":l": low,
                    ":h": high,
                },
            )
        elif prefix:
            condition, values = f"{condition} AND begins_with(sk, :p)", {**values, ":p": prefix}
        request: dict[str, Any] = {
            "TableName": table,
            "KeyConditionExpression": condition,
            "ExpressionAttributeValues": _encoded(values),
            "ConsistentRead": True,
        }
        if after is not None:
            request["ExclusiveStartKey"] = _key((partition, after))
        items: list[Item] = []
        while True:
            if limit is not None:
                request["Limit"] = limit - len(items)
            answer = await self._call("query", **request)
            items += [_decoded(each) or {} for each in answer["Items"]]
            last = answer.get("LastEvaluatedKey")
            if last is None or len(items) == limit:
                return items
            request["ExclusiveStartKey"] = last

    async def write_many(
        self,
        table: str,
        puts: Iterable[Item] = (),
        deletes: Iterable[Key] = (),
        timeout_us: int | None = None,
    ) -> None:
        """Put and delete items, each by itself and whatever was there. Raises the first error."""
        actions = [{"PutRequest": {"Item": _encoded(each)}} for each in puts]
        actions += [{"DeleteRequest": {"Key": _key(each)}} for each in deletes]
        await _together(
            self._write_some(table, actions[at : at + _BATCH_WRITES_MAX], timeout_us)
            for at in range(0, len(actions), _BATCH_WRITES_MAX)
        )

    async def _write_some(self, table: str, actions: Any, timeout_us: int | None) -> None:
        asked = {table: actions}
        for attempt in range(1, _ATTEMPTS_MAX + 1):
            answer = await self._call("batch_write_item", timeout_us, RequestItems=asked)
            asked = answer.get("UnprocessedItems")
            if not asked:
                return
            await _pause(attempt)
        raise _throttled("UnprocessedItems")

    async def tables(self) -> list[str]:
        """Return the names of all tables with the prefix."""
        names: list[str] = []
        request: dict[str, Any] = {}
        while True:
            answer = await self._call("list_tables", **request)
            names += [each for each in answer["TableNames"] if each.startswith(self.options.prefix)]
            last = answer.get("LastEvaluatedTableName")
            if last is None:
                return names
            request["ExclusiveStartTableName"] = last

    async def create_table(self, name: str, expires: str | None = None) -> None:
        """Create a table unless it exists, wait until it can be used, and set it up: DynamoDB
        deletes its items by and by once the second of their attribute *expires* is over."""
        keys, options = {PARTITION: "HASH", SORT: "RANGE"}, self.options
        billing: dict[str, Any] = {"BillingMode": "PAY_PER_REQUEST"}
        if options.units is not None:
            reads, writes = options.units
            units = {"ReadCapacityUnits": reads, "WriteCapacityUnits": writes}
            billing = {"BillingMode": "PROVISIONED", "ProvisionedThroughput": units}
        # It may exist, or another process is making it.
        with suppress(ClientError):
            await self._call(
                "create_table",
                TableName=name,
                AttributeDefinitions=[
                    {"AttributeName": each, "AttributeType": "B"} for each in keys
                ],
                KeySchema=[{"AttributeName": each, "KeyType": kind} for each, kind in keys.items()],
                **billing,
            )
        waiter = self._client.get_waiter("table_exists")
        try:
            await waiter.wait(TableName=name, WaiterConfig={"Delay": 1, "MaxAttempts": 60})
        except BotoCoreError as error:
            raise StoreUnavailableError(f"DynamoDB: table {name}: {error}") from error
        if expires is not None:
            expiring = {"Enabled": True, "AttributeName": expires}
            # ValidationException: it is enabled already.
            with suppress(ClientError):
                await self._call(
                    "update_time_to_live", TableName=name, TimeToLiveSpecification=expiring
                )
        if options.recovers:
            await self._call(
                "update_continuous_backups",
                TableName=name,
                PointInTimeRecoverySpecification={"PointInTimeRecoveryEnabled": True},
            )

    async def drop_table(self, name: str) -> None:
        """Drop a table if it exists."""
        try:
            await self._call("delete_table", TableName=name)
        except (NoTableError, ClientError):
            # It is gone, or going.
            return

    async def date(self, table: str) -> str:
        """Return the ``Date`` header of an answer: DynamoDB's time, in whole seconds."""
        answer = await self._call("get_item", TableName=table, Key=_key((b"date", b"\x00")))
        return str(answer["ResponseMetadata"]["HTTPHeaders"]["date"])

    async def _call(self, operation: str, timeout_us: int | None = None, **request: Any) -> Any:
        """Make a request. Raises ClientError only for what the callers handle."""
        if self._client is None:
            raise StoreUnavailableError("DynamoDB: not connected", retry_after_us=_RETRY_AFTER_US)
        if self.waiting >= STORE_CALLS_WAITING_MAX:
            raise OverloadedError(
                f"{self.waiting} calls wait for DynamoDB; at most {STORE_CALLS_WAITING_MAX} may",
                retry_after_us=_RETRY_AFTER_US,
            )
        calls = self.tally.calls["read" if operation in _READS else "write"]
        began_s, failed = perf_counter(), 1
        timeout_us = min(timeout_us or self.options.timeout_us, self.options.timeout_us)
        try:
            async with asyncio.timeout(timeout_us / SECOND):
                self.waiting += 1
                try:
                    await self._slots.acquire()
                finally:
                    self.waiting -= 1
                try:
                    answer = await self._unheld(operation, request)
                finally:
                    self._slots.release()
            failed = 0
            return answer
        except TimeoutError as error:
            raise WriteTimeoutError(
                f"DynamoDB took longer than {timeout_us / SECOND:g} s; ask again with the same"
                " token",
                retry_after_us=_RETRY_AFTER_US,
            ) from error
        except ClientError as error:
            failed = 0
            raise _converted(error) from error
        except (BotoCoreError, OSError) as error:
            raise StoreUnavailableError(
                f"DynamoDB: {error}", retry_after_us=_RETRY_AFTER_US
            ) from error
        finally:
            calls.ended(perf_counter() - began_s, failed)

    async def _unheld(self, operation: str, request: Mapping[str, Any]) -> Any:
        """Make a request, again if a transaction held its item: then nothing was done."""
        for attempt in range(1, _ATTEMPTS_MAX):
            try:
                return await getattr(self._client, operation)(**request)
            except ClientError as error:
                if error.response["Error"]["Code"] not in _CONFLICTS:
                    raise
            await _pause(attempt)
        return await getattr(self._client, operation)(**request)


#: What the callers of :meth:`Driver._call` handle.
_HANDLED: Final = frozenset(
    {
        *("ConditionalCheckFailedException", "TransactionCanceledException"),
        *("ResourceInUseException", "ValidationException"),
    }
)


def _converted(error: ClientError) -> Exception:
    code, text = error.response["Error"]["Code"], f"DynamoDB: {error}"
    if code in _HANDLED:
        return cast(Exception, error)
    if code in _THROTTLED or code in _CONFLICTS:
        return _throttled(code)
    if code == "ResourceNotFoundException":
        return NoTableError(f"{text}: run `counter schema apply`", retry_after_us=_RETRY_AFTER_US)
    return StoreUnavailableError(text, retry_after_us=_RETRY_AFTER_US)


def _throttled(why: str) -> OverloadedError:
    return OverloadedError(
        f"DynamoDB throttles ({why}), and nothing was written: send the same again later",
        retry_after_us=_RETRY_AFTER_US,
    )


async def _pause(attempt: int) -> None:
    await asyncio.sleep(random.uniform(0, _PAUSE_S * 2**attempt))  # noqa: S311


async def _together(calls: Iterable[Any]) -> list[Any]:
    """Return the results of *calls*, or raise the first error once all have ended."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for each in results:
        if isinstance(each, BaseException):
            raise each
    return results


async def each_of(calls: Iterable[Any]) -> list[Any]:
    """Return the results of *calls*, or the UnavailableError in place of one."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for each in results:
        if isinstance(each, BaseException) and not isinstance(each, UnavailableError):
            raise each
    return results


together = _together


def _request(write: Write | Check, **parameters: Any) -> dict[str, Any]:
    request: dict[str, Any] = {"TableName": write.table, **parameters}
    if write.condition:
        request["ConditionExpression"] = write.condition
        request["ReturnValuesOnConditionCheckFailure"] = "ALL_OLD"
    if write.values:
        request["ExpressionAttributeValues"] = _encoded(write.values)
    return request


def _key(key: Key) -> dict[str, Any]:
    return {PARTITION: {"B": key[0]}, SORT: {"B": key[1]}}


def _encoded(item: Item) -> dict[str, Any]:
    return {name: _value(value) for name, value in item.items()}


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bytes):
        return {"B": value}
    if isinstance(value, str):
        return {"S": value}
    if isinstance(value, bool):
        return {"BOOL": value}
    return {"N": str(value)}


def _decoded(encoded: Mapping[str, Any] | None) -> Item | None:
    if not encoded:
        return None
    item = {}
    for name, typed in encoded.items():
        ((kind, value),) = typed.items()
        item[name] = int(value) if kind == "N" else value
    return item
