"""Call DynamoDB: items as mappings, outcomes of conditions as values, its errors as the service's.

No other module imports the SDK. Nothing is sent twice, because an attempt whose answer was lost may
have been the one that wrote. Only what DynamoDB says it did not do is tried again: what another
transaction held, and what is left over of a batch.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any, ClassVar, Final, TypeVar, cast

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

#: Attributes by name: text, numbers, bytes and booleans. Keys are ``pk`` and ``sk``.
Item = Mapping[str, Any]
Key = tuple[bytes, bytes]
#: A table, and a key in it.
Place = tuple[str, Key]

#: The lowest sort key, and one that is higher than all.
LOW: Final = b"\x00"
HIGH: Final = b"\xff" * 64

#: The condition that there is no item yet.
NEW: Final = "attribute_not_exists(pk)"

#: Bounds of the API.
SORT_KEY_BYTES_MAX: Final = 1_024
_BATCH_GETS_MAX: Final = 100
BATCH_WRITES_MAX: Final = 25

_THROTTLED: Final = frozenset(
    {
        *("ProvisionedThroughputExceededException", "ProvisionedThroughputExceeded"),
        *("ThrottlingException", "ThrottlingError", "RequestLimitExceeded"),
    }
)
_NOT_HELD: Final = "ConditionalCheckFailed"
_CONFLICTS: Final = frozenset({"TransactionConflictException", "TransactionConflict"})
#: The error of each operation that its caller handles.
_HANDLED: Final[Mapping[str, str]] = {
    **dict.fromkeys(("put_item", "update_item", "delete_item"), "ConditionalCheckFailedException"),
    "transact_write_items": "TransactionCanceledException",
    **dict.fromkeys(("create_table", "delete_table"), "ResourceInUseException"),
    "update_time_to_live": "ValidationException",
}
_ATTEMPTS_MAX: Final = 8
#: The longest pause before another attempt, doubled each time.
_PAUSE_S: Final = 0.01
_RETRY_AFTER_US: Final = SECOND
_T = TypeVar("_T")


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
    """A condition did not hold; *item* is what was stored, empty if there was nothing."""

    item: Item


@dataclass(frozen=True, slots=True)
class Write:
    """A write of one item, with the parameters of its request; in a transaction also a check."""

    action: str
    request: Mapping[str, Any]


def put(table: str, item: Item, condition: str = "", **values: Any) -> Write:
    """Return a put of *item* if *condition* holds, in which ``:x`` is the value *x*."""
    return _write("Put", table, condition, values, Item=_encoded(item))


def update(table: str, key: Key, change: str, condition: str = "", **values: Any) -> Write:
    """Return the *change*, an UpdateExpression, of the item of *key*."""
    return _write("Update", table, condition, values, Key=_key(key), UpdateExpression=change)


def delete(table: str, key: Key, condition: str = "", **values: Any) -> Write:
    """Return the deletion of the item of *key*."""
    return _write("Delete", table, condition, values, Key=_key(key))


def check(table: str, key: Key, condition: str, **values: Any) -> Write:
    """Return a check of the item of *key*, for a transaction."""
    return _write("ConditionCheck", table, condition, values, Key=_key(key))


class Driver:
    """A client of DynamoDB. Any number of calls may be made at once; a bounded number is under way.

    Calls raise OverloadedError if DynamoDB throttles, or too many wait: nothing was written then.
    They raise WriteTimeoutError and StoreUnavailableError if the outcome is unknown, and
    NoTableError. All reads see what was written before.
    """

    #: One for all clients of a process: it reads the description of the API once.
    _sdk: ClassVar[Any] = get_session()

    def __init__(self, options: DynamodbOptions) -> None:
        self.options = options
        self.tally = StoreTally(("write", "read"))
        self._client: Any = None
        self._open = AsyncExitStack()
        self._slots = asyncio.Semaphore(options.connections_max)
        self._calls = 0

    @property
    def waiting(self) -> int:
        """The number of calls that wait for others to end."""
        return max(0, self._calls - self.options.connections_max)

    async def open(self) -> None:
        """Make the client; it connects at its first call. Raises StartupError."""
        timeout_s = self.options.timeout_us / SECOND
        config = AioConfig(
            connect_timeout=timeout_s,
            read_timeout=timeout_s,
            max_pool_connections=self.options.connections_max,
            parameter_validation=False,
            # Else the SDK makes one for each request, which takes a tenth of its time or more.
            user_agent="counter",
            retries={"total_max_attempts": 1, "mode": "standard"},
        )
        region, endpoint = self.options.region, self.options.endpoint
        try:
            self._client = await self._open.enter_async_context(
                self._sdk.create_client(
                    "dynamodb", region_name=region, endpoint_url=endpoint, config=config
                )
            )
        except NoRegionError as error:
            raise StartupError(
                "DynamoDB: no region is given: set dynamodb_region, or AWS_DEFAULT_REGION"
            ) from error
        except ValueError as error:
            raise StartupError(f"DynamoDB: {error}: set dynamodb_endpoint right") from error

    async def close(self) -> None:
        """Close the connections."""
        self._client = None
        await self._open.aclose()

    async def write(self, write: Write, timeout_us: int | None = None) -> Item | Refused:
        """Do one conditional write; return the item that an update left, else an empty one."""
        operation, request = f"{write.action.lower()}_item", dict(write.request)
        if write.action == "Update":
            request["ReturnValues"] = "ALL_NEW"
        try:
            answer = await self._call(operation, timeout_us, **request)
        except ClientError as error:
            return Refused(_decoded(error.response.get("Item")))
        return _decoded(answer.get("Attributes"))

    async def transact(
        self, writes: Sequence[Write], timeout_us: int | None = None
    ) -> Sequence[Refused | None] | None:
        """Do all of up to 100 *writes* or none. Return None if they are done, else which of the
        conditions did not hold."""
        actions = [{each.action: each.request} for each in writes]
        codes: set[str] = set()
        for attempt in range(_ATTEMPTS_MAX):
            try:
                await self._call("transact_write_items", timeout_us, TransactItems=actions)
            except ClientError as error:
                reasons: Sequence[Mapping[str, Any]] = error.response["CancellationReasons"]
                codes = {str(each.get("Code")) for each in reasons} - {"None"}
                if _NOT_HELD in codes:
                    return [
                        Refused(_decoded(each.get("Item")))
                        if each.get("Code") == _NOT_HELD
                        else None
                        for each in reasons
                    ]
                if not codes & _CONFLICTS:
                    break
                await _pause(attempt)
            else:
                return None
        why = ", ".join(sorted(codes))
        if codes <= _CONFLICTS | _THROTTLED:
            raise _throttled(why)
        raise StoreUnavailableError(
            f"DynamoDB refused a transaction: {why}", retry_after_us=_RETRY_AFTER_US
        )

    async def get(self, table: str, key: Key) -> Item:
        """Return an item, empty if there is none."""
        answer = await self._call("get_item", TableName=table, Key=_key(key), ConsistentRead=True)
        return _decoded(answer.get("Item"))

    async def get_many(self, places: Iterable[Place]) -> Mapping[Place, Item]:
        """Return those items that exist."""
        found: dict[Place, Item] = {}
        for some in _parts(list(dict.fromkeys(places)), _BATCH_GETS_MAX):
            asked: dict[str, Any] = {}
            for table, key in some:
                of_table = asked.setdefault(table, {"Keys": [], "ConsistentRead": True})
                of_table["Keys"].append(_key(key))
            for answer in await self._all_of("batch_get_item", "UnprocessedKeys", asked):
                for table, items in answer["Responses"].items():
                    read = map(_decoded, items)
                    found |= {(table, (item["pk"], item["sk"])): item for item in read}
        return found

    async def query(
        self,
        table: str,
        partition: bytes,
        low: bytes = LOW,
        high: bytes = HIGH,
        *,
        limit: int | None = None,
        keep: Callable[[Item], bool] | None = None,
    ) -> list[Item]:
        """Return the items of a partition whose sort keys are in ``[low, high]``, in their order:
        the first *limit* of those that *keep* returns true for."""
        if low > high:
            return []
        request: dict[str, Any] = {
            "TableName": table,
            "KeyConditionExpression": "pk = :p AND sk BETWEEN :l AND :h",
            "ExpressionAttributeValues": _encoded({":p": partition, ":l": low, ":h": high}),
            "ConsistentRead": True,
        }
        items: list[Item] = []
        while True:
            if limit is not None:
                request["Limit"] = limit - len(items)
            answer = await self._call("query", **request)
            items += (item for item in map(_decoded, answer["Items"]) if keep is None or keep(item))
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
        """Put and delete items, each by itself and whatever was there."""
        actions = [{"PutRequest": {"Item": _encoded(each)}} for each in puts]
        actions += [{"DeleteRequest": {"Key": _key(each)}} for each in deletes]
        write = partial(self._all_of, "batch_write_item", "UnprocessedItems", timeout_us=timeout_us)
        await asyncio.gather(*(write({table: some}) for some in _parts(actions, BATCH_WRITES_MAX)))

    async def _all_of(
        self, operation: str, left_over: str, asked: Any, timeout_us: int | None = None
    ) -> list[Any]:
        """Return the answers to a batch, the rest of which is sent again."""
        answers: list[Any] = []
        for attempt in range(_ATTEMPTS_MAX):
            answers.append(await self._call(operation, timeout_us, RequestItems=asked))
            asked = answers[-1].get(left_over)
            if not asked:
                return answers
            await _pause(attempt)
        # A part is done: of marks and of what is deleted, that does not matter.
        raise OverloadedError(
            f"DynamoDB throttles ({left_over}): send the same again later",
            retry_after_us=_RETRY_AFTER_US,
        )

    async def tables(self) -> list[str]:
        """Return the names of all tables with the prefix."""
        names: list[str] = []
        request: dict[str, Any] = {}
        while True:
            answer = await self._call("list_tables", **request)
            some = answer["TableNames"]
            names += (each for each in some if each.startswith(f"{self.options.prefix}."))
            last = answer.get("LastEvaluatedTableName")
            if last is None:
                return names
            request["ExclusiveStartTableName"] = last

    async def create_table(self, name: str, expires: str | None = None) -> None:
        """Create a table unless it exists, wait until it can be used, and set it up: DynamoDB
        deletes its items by and by once the second of their attribute *expires* is over."""
        request: dict[str, Any] = {"BillingMode": "PAY_PER_REQUEST"}
        if self.options.units is not None:
            reads, writes = self.options.units
            units = {"ReadCapacityUnits": reads, "WriteCapacityUnits": writes}
            request = {"BillingMode": "PROVISIONED", "ProvisionedThroughput": units}
        keys = (("pk", "HASH"), ("sk", "RANGE"))
        request["AttributeDefinitions"] = [
            {"AttributeName": each, "AttributeType": "B"} for each, _ in keys
        ]
        request["KeySchema"] = [{"AttributeName": each, "KeyType": kind} for each, kind in keys]
        # It may exist, or another process is making it.
        with suppress(ClientError):
            await self._call("create_table", TableName=name, **request)
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
        if self.options.recovers:
            await self._call(
                "update_continuous_backups",
                TableName=name,
                PointInTimeRecoverySpecification={"PointInTimeRecoveryEnabled": True},
            )

    async def drop_table(self, name: str) -> None:
        """Drop a table if it exists."""
        # It is gone, or going.
        with suppress(NoTableError, ClientError):
            await self._call("delete_table", TableName=name)

    async def date(self, table: str) -> str:
        """Return the ``Date`` header of an answer: DynamoDB's time, in whole seconds."""
        answer = await self._call("get_item", TableName=table, Key=_key((b"date", LOW)))
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
        is_read = operation in ("get_item", "batch_get_item", "query", "list_tables")
        self._calls += 1
        began_s, failed = perf_counter(), 1
        timeout_us = min(timeout_us or self.options.timeout_us, self.options.timeout_us)
        try:
            async with asyncio.timeout(timeout_us / SECOND), self._slots:
                answer = await self._unheld(operation, request)
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
            raise _converted(operation, error) from error
        except NoCredentialsError as error:
            raise StoreUnavailableError(
                "DynamoDB: there are no AWS credentials: give the process a role, a profile, or"
                " AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
                retry_after_us=_RETRY_AFTER_US,
            ) from error
        except (BotoCoreError, OSError) as error:
            raise StoreUnavailableError(
                f"DynamoDB: {error}", retry_after_us=_RETRY_AFTER_US
            ) from error
        finally:
            self._calls -= 1
            self.tally.calls["read" if is_read else "write"].ended(perf_counter() - began_s, failed)

    async def _unheld(self, operation: str, request: Mapping[str, Any]) -> Any:
        """Make a request, again if a transaction held its item: then nothing was done."""
        for attempt in range(_ATTEMPTS_MAX - 1):
            try:
                return await getattr(self._client, operation)(**request)
            except ClientError as error:
                if error.response["Error"]["Code"] not in _CONFLICTS:
                    raise
            await _pause(attempt)
        return await getattr(self._client, operation)(**request)


def _converted(operation: str, error: ClientError) -> Exception:
    code, text = error.response["Error"]["Code"], f"DynamoDB: {error}"
    if code == _HANDLED.get(operation):
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
    await asyncio.sleep(random.uniform(0, _PAUSE_S * 2 ** (attempt + 1)))  # noqa: S311


async def each_of(calls: Iterable[Awaitable[_T]]) -> list[_T | UnavailableError]:
    """Return the results of *calls*, or the UnavailableError in place of one."""
    results: list[_T | UnavailableError] = []
    for each in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(each, BaseException) and not isinstance(each, UnavailableError):
            raise each
        results.append(each)
    return results


async def some_at_once(calls: Iterator[Awaitable[_T]], number: int = 64) -> list[_T]:
    """Return the results of *calls*, of which so many are made at once: other calls do not wait
    behind all of them."""
    results: list[_T] = []
    while some := list(islice(calls, number)):
        results += await asyncio.gather(*some)
    return results


def _parts(items: Sequence[_T], size: int) -> Iterable[Sequence[_T]]:
    return (items[at : at + size] for at in range(0, len(items), size))


def _write(action: str, table: str, condition: str, values: Item, **parameters: Any) -> Write:
    request: dict[str, Any] = {"TableName": table, **parameters}
    if condition:
        request["ConditionExpression"] = condition
        request["ReturnValuesOnConditionCheckFailure"] = "ALL_OLD"
    if values:
        request["ExpressionAttributeValues"] = {f":{name}": _value(values[name]) for name in values}
    return Write(action, request)


def _key(key: Key) -> dict[str, Any]:
    return _encoded({"pk": key[0], "sk": key[1]})


def _encoded(item: Item) -> dict[str, Any]:
    return {name: _value(value) for name, value in item.items()}


def _value(value: bytes | str | bool | int) -> dict[str, Any]:
    if isinstance(value, bytes):
        return {"B": value}
    if isinstance(value, str):
        return {"S": value}
    return {"BOOL": value} if isinstance(value, bool) else {"N": str(value)}


def _decoded(encoded: Mapping[str, Any] | None) -> Item:
    values = {name: next(iter(typed.items())) for name, typed in (encoded or {}).items()}
    return {name: int(value) if kind == "N" else value for name, (kind, value) in values.items()}
