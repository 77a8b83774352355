"""The simulated DynamoDB answers as Amazon's local engine does."""

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import Any, Final

from botocore.exceptions import ClientError

from counter.errors import UnavailableError
from counter.storage.dynamodb.driver import (
    Driver,
    DynamodbOptions,
    Write,
    check,
    delete,
    put,
    update,
)
from counter.testing.cases import NOW
from counter.testing.clock import FakeClock
from tests.simulation.dynamodb_store import SimulatedDriver, calm_server, options_for

_TABLE: Final = "counter_drawn"
_STEPS: Final = 250
_CONDITIONS: Final = (
    "attribute_not_exists(pk)",
    "attribute_exists(pk) AND (attribute_not_exists(n) OR n < :x)",
    "attribute_not_exists(n) OR n <= :x OR t = :x",
    "(attribute_not_exists(n) OR n <= :x) AND attribute_not_exists(gone)",
    "n = :x AND t > :x",
    "n >= :x",
)
_CHANGES: Final = ("SET n = :x", "SET n = :x, t = :x", "ADD n :x", "SET t = :x ADD n :x")
#: Conditions of queries, and the values that are given.
_QUERIES: Final = (
    ("pk = :p", ()),
    ("pk = :p AND sk = :l", ("l",)),
    ("pk = :p AND sk <= :l", ("l",)),
    ("pk = :p AND sk > :l", ("l",)),
    ("pk = :p AND begins_with(sk, :l)", ("l",)),
    ("pk = :p AND sk BETWEEN :l AND :h", ("l", "h")),
    ("pk = :p AND sk = :l", ("l", "h")),
)
_CREATE: Final = {
    "AttributeDefinitions": [
        {"AttributeName": each, "AttributeType": "B"} for each in ("pk", "sk")
    ],
    "KeySchema": [
        {"AttributeName": "pk", "KeyType": "HASH"},
        {"AttributeName": "sk", "KeyType": "RANGE"},
    ],
    "BillingMode": "PAY_PER_REQUEST",
}


class Drawing:
    """Draws calls, each as a function of a driver."""

    def __init__(self, random: Random) -> None:
        self.random = random

    def key(self) -> tuple[bytes, bytes]:
        return bytes([self.random.randint(1, 2)]), bytes(self.random.choices(b"ab\xff", k=2))

    def item(self) -> dict[str, Any]:
        pk, sk = self.key()
        item: dict[str, Any] = {"pk": pk, "sk": sk}
        for name, kinds in (("n", (1, 2, 3)), ("t", (2, "two", b"2")), ("gone", (True,))):
            if self.random.random() < 0.5:
                item[name] = self.random.choice(kinds)
        return item

    def write(self) -> Write:
        values: dict[str, Any] = {}
        condition = self.random.choice(("", *_CONDITIONS))
        kind = self.random.choice((put, update, update, delete))
        change = self.random.choice(_CHANGES)
        if ":x" in condition or kind is update:
            values["x"] = self.random.randint(1, 3)
        if kind is put:
            return put(_TABLE, self.item(), condition, **values)
        if kind is update:
            return update(_TABLE, self.key(), change, condition, **values)
        return delete(_TABLE, self.key(), condition, **values)

    def call(self) -> tuple[Any, Callable[[Driver], Awaitable[Any]]]:
        """Return a call and its subject."""
        random = self.random
        one, keys = self.write(), [self.key() for _ in range(random.randint(1, 9))]
        some = [self.write() for _ in range(random.randint(1, 3))]
        some.append(check(_TABLE, self.key(), "attribute_not_exists(n) OR n < :x", x=2))
        some = list({str(_key_of(each)): each for each in some}.values())
        items = list(
            {item["pk"] + item["sk"]: item for item in (self.item(), self.item())}.values()
        )
        gone = [
            key for key in dict.fromkeys(keys) if key not in {(i["pk"], i["sk"]) for i in items}
        ]
        operation, request = self.raw()
        low, high, limit = keys[0][1], keys[-1][1], random.choice((None, 1, 2))
        calls: list[tuple[Any, Callable[[Driver], Awaitable[Any]]]] = [
            (one, lambda driver: driver.write(one)),
            (some, lambda driver: driver.transact(some)),
            (keys, lambda driver: driver.get(_TABLE, keys[0])),
            (keys, lambda driver: driver.get_many((_TABLE, key) for key in keys)),
            (keys, lambda driver: driver.query(_TABLE, keys[0][0], low, high, limit=limit)),
            (keys, lambda driver: driver.query(_TABLE, keys[0][0])),
            (items, lambda driver: driver.write_many(_TABLE, items, gone)),
            ((operation, request), lambda driver: driver._call(operation, **request)),
        ]
        return random.choices(calls, [6, 6, 1, 2, 3, 1, 2, 6])[0]

    def raw(self) -> tuple[str, dict[str, Any]]:
        """Return a request that DynamoDB may find invalid, as the adapter's never are."""
        random = self.random
        pk, sk = self.key()
        key = {
            "pk": {"B": pk},
            "sk": {"B": random.choice((sk, sk, b"", b"s" * 1_024, b"s" * 1_025))},
        }
        table = random.choice((_TABLE, "none"))
        start = {"pk": {"B": pk}, "sk": {"B": random.choice((b"a\x00", b"b\x00", b""))}}
        size = random.choice((1, 2, 25, 26))
        many = [
            {"DeleteRequest": {"Key": {**key, "sk": {"B": bytes([n + 1])}}}} for n in range(size)
        ]
        condition, values = random.choice(_QUERIES)
        query = {
            "TableName": _TABLE,
            "KeyConditionExpression": condition,
            "ExpressionAttributeValues": {":p": {"B": pk}}
            | {f":{name}": {"B": random.choice((b"a", b"ab", sk, sk, b""))} for name in values},
            "ConsistentRead": True,
            **random.choice(({}, {}, {"Limit": 1}, {"Limit": 0})),
            **random.choice(({}, {}, {"ExclusiveStartKey": start})),
        }
        return random.choice(
            (
                ("query", query),
                ("query", query),
                ("get_item", {"TableName": table, "Key": key, "ConsistentRead": True}),
                ("put_item", {"TableName": _TABLE, "Item": key}),
                ("batch_write_item", {"RequestItems": {_TABLE: many}}),
                ("batch_write_item", {"RequestItems": {_TABLE: 2 * many[:1]}}),
                ("batch_get_item", {"RequestItems": {_TABLE: {"Keys": 2 * [key]}}}),
                ("delete_table", {"TableName": "none"}),
                ("create_table", {**_CREATE, "TableName": _TABLE}),
            )
        )


def _key_of(write: Write) -> Any:
    request = write.request
    return {name: request.get("Key", request.get("Item"))[name] for name in ("pk", "sk")}


async def _outcome(call: Awaitable[Any]) -> Any:
    """Return the response of a call, without the parts that only one engine has."""
    try:
        answer = await call
    except ClientError as error:
        return error.response["Error"]["Code"]
    except UnavailableError as error:
        return type(error).__name__
    if isinstance(answer, dict):
        shown = ("Item", "Items", "LastEvaluatedKey", "Attributes", "Responses")
        return {
            name: each for name, each in answer.items() if name in shown or type(name) is not str
        }
    return answer


@asynccontextmanager
async def engines(options: DynamodbOptions) -> AsyncIterator[tuple[Driver, Driver]]:
    """Drivers of the local engine and of the simulated one, each with the table."""
    server = calm_server(FakeClock(NOW))
    server.page = 1_000
    drivers = Driver(options), SimulatedDriver(options_for(), server)
    async with AsyncExitStack() as closing:
        for driver in drivers:
            await driver.open()
            closing.push_async_callback(driver.close)
            await driver.create_table(_TABLE)
            closing.push_async_callback(driver.drop_table, _TABLE)
        yield drivers


async def test_drawn_calls_have_the_same_answers(dynamodb: DynamodbOptions) -> None:
    seed = int.from_bytes(os.urandom(4), "big")
    print(f"seed {seed}")
    drawing = Drawing(Random(seed))
    async with engines(dynamodb) as drivers:
        for step in range(_STEPS):
            about, call = drawing.call()
            real, simulated = [await _outcome(call(driver)) for driver in drivers]
            assert simulated == real, f"seed {seed}, step {step}: {about}"


async def test_a_page_that_ends_at_an_inclusive_bound_is_the_last(
    dynamodb: DynamodbOptions,
) -> None:
    """Regression: found with seed 2860443205."""
    async with engines(dynamodb) as drivers:
        for driver in drivers:
            for sk in (b"a", b"b", b"c"):
                await driver.write(put(_TABLE, {"pk": b"p", "sk": sk}))
        for condition, bounds in (("<= :h", b"b"), ("< :h", b"c"), ("BETWEEN :l AND :h", b"b")):
            request: dict[str, Any] = {
                "TableName": _TABLE,
                "KeyConditionExpression": f"pk = :p AND sk {condition}",
                "ExpressionAttributeValues": {":p": {"B": b"p"}, ":h": {"B": bounds}}
                | ({":l": {"B": b"a"}} if ":l" in condition else {}),
                "ConsistentRead": True,
                "Limit": 2,
            }
            real, simulated = [
                await _outcome(driver._call("query", **request)) for driver in drivers
            ]
            assert simulated == real
            assert ("LastEvaluatedKey" in real) == (condition == "< :h")
