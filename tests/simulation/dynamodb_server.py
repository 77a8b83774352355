"""A stand-in for DynamoDB: each request is done at one instant, but a transaction item by item.

It is as unkind as AWS lets it be. A read that is not consistent may be a second behind. A
transaction holds its items for a while, which others meet as a conflict, and its writes become
visible one after another. A hot partition, or one that is being split, is throttled. Tables take
time to be made and to go, and their list is behind. Items go at any time after their expiry.

What it does not know it refuses by NotImplementedError.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from email.utils import formatdate
from random import Random
from typing import Any, Final
from zlib import crc32

from botocore.exceptions import ClientError

from counter.limits import MINUTE, SECOND
from tests.simulation.dynamodb_expressions import (
    Encoded,
    InvalidError,
    check_values,
    condition,
    key_condition,
    updated,
)
from tests.simulation.dynamodb_tables import Key, Table, check_size, key_of
from tests.simulation.node import Node
from tests.simulation.weather import Weather

_TRANSACTION_ITEMS_MAX: Final = 100
_BATCH_GETS_MAX: Final = 100
_BATCH_WRITES_MAX: Final = 25
#: How long DynamoDB remembers the token of a transaction.
_TOKEN_US: Final = 10 * MINUTE
#: How far behind a read may be that is not consistent, and a list of tables.
_LAG_US: Final = SECOND
#: Operations of one step in calm weather, which costs fewer turns of the loop.
_AT_ONCE: Final = 0.5
_SPLITS: Final = 3
_THROTTLED: Final = ("ProvisionedThroughputExceededException", "ThrottlingException")
_THROTTLED_REASONS: Final = ("ProvisionedThroughputExceeded", "ThrottlingError")
_COMMON: Final = (
    "TableName ConditionExpression ExpressionAttributeValues ReturnValuesOnConditionCheckFailure "
)
#: The parameters of each write, also within a transaction, and of each operation.
_WRITES: Final[Mapping[str, str]] = {
    "Put": f"{_COMMON} Item",
    "Update": f"{_COMMON} Key UpdateExpression ReturnValues",
    "Delete": f"{_COMMON} Key",
    "ConditionCheck": f"{_COMMON} Key",
}
_PARAMETERS: Final[Mapping[str, str]] = {
    "put_item": _WRITES["Put"],
    "update_item": _WRITES["Update"],
    "delete_item": _WRITES["Delete"],
    "get_item": "TableName Key ConsistentRead",
    "query": (
        "TableName KeyConditionExpression ExpressionAttributeValues ConsistentRead"
        " ExclusiveStartKey Limit"
    ),
    "transact_write_items": "TransactItems ClientRequestToken",
    "batch_get_item": "RequestItems",
    "batch_write_item": "RequestItems",
    "list_tables": "ExclusiveStartTableName",
    "create_table": "TableName AttributeDefinitions KeySchema BillingMode ProvisionedThroughput",
    "delete_table": "TableName",
    "describe_table": "TableName",
    "update_time_to_live": "TableName TimeToLiveSpecification",
    "update_continuous_backups": "TableName PointInTimeRecoverySpecification",
}
OPERATIONS: Final = frozenset(_PARAMETERS)
_ACTIONS: Final = {"put_item": "Put", "update_item": "Update", "delete_item": "Delete"}

Done = Callable[[Any], None]
#: A table, and a key in it.
_Place = tuple[str, Key]


class _RefusedError(Exception):
    """A refusal: its code, and further fields."""

    def __init__(self, code: str, **more: Any) -> None:
        super().__init__(code)
        self.code, self.more = code, more


def error_of(operation: str, code: str, text: str = "simulated", **more: Any) -> ClientError:
    """Return the error that the SDK makes of a refusal."""
    return ClientError({"Error": {"Code": code, "Message": text}, **more}, operation)


class Server:
    """DynamoDB, for all processes of a run."""

    def __init__(
        self,
        at: Callable[..., None],
        now_us: Callable[[], int],
        weather: Weather,
        _centers: Sequence[int] = (),
    ) -> None:
        self.at, self.now_us, self.weather = at, now_us, weather
        self.random: Random = weather.random
        self.tables: dict[str, Table] = {}
        #: When tables were made, and when they were gone.
        self._lives: list[tuple[int, bool, str]] = []
        #: Those that a transaction is writing.
        self._held: set[_Place] = set()
        #: By token: until when its transaction is remembered; None while it is under way.
        self._tokens: dict[str, int | None] = {}
        #: Writes a second that a partition takes; None: any number.
        self.writes_max: int | None = None
        #: Which third of all partitions is being split.
        self.splitting: int | None = None
        self._writes: Counter[tuple[str, bytes, int]] = Counter()
        #: Items of a page; 0: of a drawn number.
        self.page = 0
        self.statements = 0
        #: Called with each of the situations that seeds must reach.
        self.reach: Callable[[str], object] = lambda _: None
        #: Called with the table, the key and the item of each write; None: it is deleted.
        self.wrote: Callable[[str, Key, Encoded | None], object] = lambda *_: None
        # Options of Cassandra's servers.
        self.nodes: Sequence[Node] = ()
        self.restamps = False

    def compact(self) -> None:
        """Delete some of the expired items."""
        now_us = self.now_us()
        for table in self.tables.values():
            for key in list(table.expired(now_us // SECOND)):
                if self.random.random() < 0.5:
                    self.reach("expired")
                    table.put(key, None, now_us)

    def calm(self) -> None:
        """Throttle no partition any more."""
        self.writes_max = self.splitting = None

    def execute(self, operation: str, request: Mapping[str, Any], done: Done) -> None:
        """Do a request; *done* gets the response, or an error."""
        try:
            if unknown := request.keys() - _PARAMETERS[operation].split():
                raise NotImplementedError(f"{operation} with {unknown}")
            if operation == "transact_write_items":
                self._transact(request, done)
                return
            action = _ACTIONS.get(operation)
            if action is not None:
                result: Any = self._write(action, request)
            else:
                result = getattr(self, f"_{operation}")(request)
        except InvalidError as error:
            result = error_of(operation, "ValidationException", str(error))
        except _RefusedError as error:
            result = error_of(operation, error.code, **error.more)
        except (NotImplementedError, LookupError) as error:
            # The caller gets it, and a run that uses an unsupported feature fails.
            result = error
        done(result)

    # Requests that can be refused.

    def _table(self, name: str) -> Table:
        table = self.tables.get(name)
        if table is None or table.status == "CREATING":
            raise _RefusedError("ResourceNotFoundException")
        if table.status == "DELETING" and self.random.random() < 0.5:
            raise _RefusedError("ResourceNotFoundException")
        return table

    def _is_throttled(self, name: str, pk: bytes, *, writes: bool) -> bool:
        weather = self.weather
        if self.splitting == crc32(pk) % _SPLITS and self.random.random() < 0.7:
            self.reach("split")
            return True
        if writes and self.writes_max is not None:
            second = (name, pk, self.now_us() // SECOND)
            self._writes[second] += 1
            if self._writes[second] > self.writes_max:
                self.reach("hot-partition")
                return True
        return weather.happens(weather.missed / 2)

    def _check_throttling(self, name: str, pk: bytes, *, writes: bool) -> None:
        if self._is_throttled(name, pk, writes=writes):
            raise _RefusedError(self.random.choice(_THROTTLED))

    def _is_held(self, place: _Place) -> bool:
        """Whether a transaction holds an item, or is said to."""
        if place in self._held or self.weather.happens(self.weather.unreported / 3):
            self.reach("transaction-conflict")
            return True
        return False

    # Writes.

    def _planned(self, action: str, request: Mapping[str, Any]) -> tuple[_Place, Encoded | None]:
        """Return the place and the value of a write; None deletes. Raises its refusal."""
        if unknown := request.keys() - _WRITES[action].split():
            raise NotImplementedError(f"{action} with {unknown}")
        name, values = request["TableName"], request.get("ExpressionAttributeValues", {})
        table = self._table(name)
        key = key_of(request["Item"], alone=False) if action == "Put" else key_of(request["Key"])
        wanted, change = request.get("ConditionExpression"), request.get("UpdateExpression", "")
        if "ExpressionAttributeValues" in request or wanted or change:
            check_values(values, *filter(None, (wanted, change)))
        standing = table.get(key)
        if wanted and not condition(wanted)(standing or {}, values):
            shows = request.get("ReturnValuesOnConditionCheckFailure") == "ALL_OLD" and standing
            more = {"Item": standing} if shows else {}
            raise _RefusedError("ConditionalCheckFailedException", **more)
        if action == "Put":
            item: Encoded | None = request["Item"]
        elif action == "Update":
            item = updated(change, standing or request["Key"], values)
        else:
            item = None if action == "Delete" else standing
        if item is not None:
            check_size(item)
        return (name, key), item

    def _write(self, action: str, request: Mapping[str, Any]) -> Mapping[str, Any]:
        key = key_of(request["Item" if action == "Put" else "Key"], alone=action != "Put")
        self._table(request["TableName"])
        self._check_throttling(request["TableName"], key[0], writes=True)
        if self._is_held((request["TableName"], key)):
            raise _RefusedError("TransactionConflictException")
        (name, key), item = self._planned(action, request)
        self._put(name, key, item)
        return {"Attributes": item} if request.get("ReturnValues") == "ALL_NEW" else {}

    def _put(self, name: str, key: Key, item: Encoded | None) -> None:
        self.tables[name].put(key, item, self.now_us())
        self.wrote(name, key, item)

    def _batch_write_item(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        left: dict[str, list[Any]] = {}
        for name, action, key in self._each_of_batch(request["RequestItems"]):
            if self._is_held((name, key)) or self._is_throttled(name, key[0], writes=True):
                left.setdefault(name, []).append(action)
                continue
            item = action["PutRequest"]["Item"] if "PutRequest" in action else None
            self._put(name, key, item)
        if left == request["RequestItems"]:
            raise _RefusedError(_THROTTLED[0])
        if left:
            self.reach("unprocessed")
        return {"UnprocessedItems": left}

    def _each_of_batch(self, items: Mapping[str, Any]) -> Iterator[tuple[str, Any, Key]]:
        """Yield the writes of a batch, if all of it is valid."""
        found: list[tuple[str, Any, Key]] = []
        for name, actions in items.items():
            self._table(name)
            for action in actions:
                ((kind, body),) = action.items()
                if kind == "PutRequest":
                    found.append((name, action, key_of(body["Item"], alone=False)))
                    check_size(body["Item"])
                else:
                    found.append((name, action, key_of(body["Key"])))
        if not 0 < len(found) <= _BATCH_WRITES_MAX:
            raise InvalidError(f"a batch of {len(found)} writes")
        if len({(name, key) for name, _, key in found}) < len(found):
            raise InvalidError("Provided list of item keys contains duplicates")
        return iter(found)

    # Transactions.

    def _transact(self, request: Mapping[str, Any], done: Done) -> None:
        token, now_us = request["ClientRequestToken"], self.now_us()
        until_us = self._tokens.get(token, 0)
        if until_us is None:
            raise _RefusedError("TransactionInProgressException")
        if until_us > now_us:
            done({})
            return
        actions = [next(iter(each.items())) for each in request["TransactItems"]]
        if not 0 < len(actions) <= _TRANSACTION_ITEMS_MAX:
            raise InvalidError(f"a transaction of {len(actions)} items")
        planned: list[tuple[_Place, Encoded | None]] = []
        reasons: list[Mapping[str, Any]] = []
        places: set[_Place] = set()
        for action, each in actions:
            key = key_of(each["Item" if action == "Put" else "Key"], alone=action != "Put")
            place = each["TableName"], key
            if place in places:
                raise InvalidError("Transaction request cannot include multiple operations on one")
            places.add(place)
            reasons.append(self._reason(action, each, place, planned))
        if any(each["Code"] != "None" for each in reasons):
            raise _RefusedError("TransactionCanceledException", CancellationReasons=reasons)
        self._tokens[token] = None
        self._held |= places
        self._commit(token, places, planned, done)

    def _reason(
        self, action: str, each: Mapping[str, Any], place: _Place, planned: list[Any]
    ) -> Mapping[str, Any]:
        """Return why one item of a transaction is refused, or add its write to *planned*."""
        try:
            planned_write = self._planned(action, each)
        except _RefusedError as error:
            if error.code != "ConditionalCheckFailedException":
                raise
            return {"Code": "ConditionalCheckFailed", **error.more}
        if self._is_held(place):
            return {"Code": "TransactionConflict"}
        if self._is_throttled(place[0], place[1][0], writes=True):
            return {"Code": self.random.choice(_THROTTLED_REASONS)}
        if action != "ConditionCheck":
            planned.append(planned_write)
        return {"Code": "None"}

    def _commit(
        self,
        token: str,
        places: set[_Place],
        planned: Sequence[tuple[_Place, Encoded | None]],
        done: Done,
    ) -> None:
        """Write one item after another, and then answer."""

        def write(place: _Place, item: Encoded | None) -> None:
            name, key = place
            if name in self.tables:
                self._put(name, key, item)

        def end() -> None:
            self._held -= places
            self._tokens[token] = self.now_us() + _TOKEN_US
            done({})

        weather = self.weather
        if not weather.delay_us or (weather.is_calm and self.random.random() < _AT_ONCE):
            for place, item in planned:
                write(place, item)
            end()
            return
        delay_us, times = 0, self.random.choice((1, 1, 30))
        for place, item in self.random.sample(planned, len(planned)):
            delay_us += min(weather.delay() * times, SECOND)
            self.at(delay_us, write, place, item)
        self.at(delay_us + weather.delay(), end)

    # Reads.

    def _since(self, request: Mapping[str, Any]) -> int | None:
        """Return up to when a read sees writes; None: up to now."""
        if request.get("ConsistentRead"):
            return None
        return self.now_us() - int(self.random.random() * _LAG_US)

    def _seen(self, table: Table, key: Key, since_us: int | None) -> Encoded | None:
        return (
            table.get(key) if since_us is None else table.partition(key[0]).seen(key[1], since_us)
        )

    def _get_item(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        table, key = self._table(request["TableName"]), key_of(request["Key"])
        self._check_throttling(request["TableName"], key[0], writes=False)
        item = self._seen(table, key, self._since(request))
        date = formatdate(self.now_us() // SECOND, usegmt=True)
        answer: dict[str, Any] = {"ResponseMetadata": {"HTTPHeaders": {"date": date}}}
        return answer if item is None else {"Item": item, **answer}

    def _batch_get_item(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        found: dict[str, list[Encoded]] = {}
        left: dict[str, Any] = {}
        for name, asked in request["RequestItems"].items():
            if unknown := asked.keys() - {"Keys", "ConsistentRead"}:
                raise NotImplementedError(f"a batch with {unknown}")
            table, keys = self._table(name), [key_of(each) for each in asked["Keys"]]
            if not 0 < len(keys) <= _BATCH_GETS_MAX:
                raise InvalidError(f"a batch of {len(keys)} keys")
            if len({*keys}) < len(keys):
                raise InvalidError("Provided list of item keys contains duplicates")
            since_us, some = self._since(asked), found.setdefault(name, [])
            missed = []
            for key, encoded in zip(keys, asked["Keys"], strict=True):
                if self._is_throttled(name, key[0], writes=False):
                    missed.append(encoded)
                elif (item := self._seen(table, key, since_us)) is not None:
                    some.append(item)
            self.random.shuffle(some)
            if missed:
                left[name] = {**asked, "Keys": missed}
        if left == request["RequestItems"]:
            raise _RefusedError(_THROTTLED[0])
        if left:
            self.reach("unprocessed")
        return {"Responses": found, "UnprocessedKeys": left}

    def _query(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        name, values = request["TableName"], request["ExpressionAttributeValues"]
        table, text = self._table(name), request["KeyConditionExpression"]
        check_values(values, text)
        wanted, partition, sort = key_condition(text)
        if not all(each["B"] for each in values.values()):
            raise InvalidError("a key attribute cannot contain an empty binary value")
        if sort[:1] == ("BETWEEN",) and values[sort[1]]["B"] > values[sort[2]]["B"]:
            raise InvalidError("The BETWEEN operator requires upper bound to be greater")
        pk, after, limit = values[partition]["B"], b"", request.get("Limit")
        if limit is not None and limit < 1:
            raise InvalidError("Limit must be greater than or equal to 1")
        if "ExclusiveStartKey" in request:
            start = request["ExclusiveStartKey"]
            after = key_of(start)[1]
            if key_of(start)[0] != pk or (sort and not wanted(start, values)):
                raise InvalidError("The provided starting key is outside query boundaries")
        self._check_throttling(name, pk, writes=False)
        page = self.page or self.random.choice((1, 3, 10, 100))
        most = page if limit is None else min(page, limit)
        # No item can follow one at an inclusive bound.
        highest = values[sort[-1]]["B"] if sort[:1] in (("<=",), ("BETWEEN",)) else None
        items: list[Encoded] = []
        for _, item in table.partition(pk).all_seen(after, self._since(request)):
            if wanted(item, values):
                items.append(item)
                if item["sk"]["B"] == highest:
                    break
                if len(items) == most:
                    last = {"pk": item["pk"], "sk": item["sk"]}
                    return {"Items": items, "LastEvaluatedKey": last}
        return {"Items": items}

    # Tables.

    def _check_rate(self) -> None:
        """Refuse to make or delete too many tables at once."""
        if self.weather.happens(self.weather.missed):
            self.reach("too-many-tables")
            raise _RefusedError("LimitExceededException")

    def _create_table(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        name, random = request["TableName"], self.random
        self._check_rate()
        if name in self.tables:
            raise _RefusedError("ResourceInUseException")
        table = self.tables[name] = Table(self.now_us())
        self._lives.append((self.now_us(), True, name))

        def use() -> None:
            table.status = "ACTIVE"

        if self.weather.delay_us:
            self.at(int(random.random() * SECOND), use)
        else:
            use()
        return {}

    def _delete_table(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        name = request["TableName"]
        table = self.tables.get(name)
        self._check_rate()
        if table is None:
            raise _RefusedError("ResourceNotFoundException")
        if table.status == "CREATING":
            raise _RefusedError("ResourceInUseException")

        def go() -> None:
            if self.tables.pop(name, None) is not None:
                self._lives.append((self.now_us(), False, name))

        if not self.weather.delay_us:
            go()
        elif table.status == "ACTIVE":
            table.status = "DELETING"
            self.at(int(self.random.random() * SECOND), go)
        return {}

    def _describe_table(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        table = self.tables.get(request["TableName"])
        if table is None or (table.status == "CREATING" and self.random.random() < 0.5):
            raise _RefusedError("ResourceNotFoundException")
        return {"Table": {"TableStatus": table.status}}

    def _list_tables(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        lag_us = int(self.random.random() * _LAG_US) if self.weather.delay_us else 0
        found: set[str] = set()
        for at_us, made, name in self._lives:
            if at_us <= self.now_us() - lag_us:
                (found.add if made else found.discard)(name)
        after, page = request.get("ExclusiveStartTableName", ""), self.page or 3
        names = sorted(name for name in found if name > after)
        more = {"LastEvaluatedTableName": names[page - 1]} if len(names) > page else {}
        return {"TableNames": names[:page], **more}

    def _update_time_to_live(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        table, wanted = self._table(request["TableName"]), request["TimeToLiveSpecification"]
        if table.expires is not None or not wanted["Enabled"]:
            raise InvalidError("TimeToLive is already enabled")
        table.expires = wanted["AttributeName"]
        return {}

    def _update_continuous_backups(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        self._table(request["TableName"])
        return {}
