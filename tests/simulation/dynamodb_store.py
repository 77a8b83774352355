"""The DynamoDB adapter over the simulated DynamoDB."""

import asyncio
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, Final

from counter.limits import SECOND
from counter.ports import Clock
from counter.storage.dynamodb.driver import Driver, DynamodbOptions
from counter.storage.dynamodb.schema import apply_schema
from counter.storage.dynamodb.store import DynamodbStore
from counter.testing.clock import FakeClock
from counter.types import ClockReading, Dataset
from tests.simulation.dynamodb_client import Client
from tests.simulation.dynamodb_expressions import key_condition
from tests.simulation.dynamodb_observed import ItemRecorder
from tests.simulation.dynamodb_server import Server
from tests.simulation.plan import Config
from tests.simulation.weather import UNMET, Met, Weather

#: The plans' names of partitions, by the first byte of the key.
_KINDS: Final[Mapping[int, str]] = dict(
    zip(
        b"mawcndk",
        ("dirty", "atomic_marks", "watermarks", "counts", "names", "resolutions", "keys"),
        strict=True,
    )
)
_TIMEOUT_US: Final = 2 * SECOND
#: The simulated servers of a run, and what records their writes.
Servers = Server
recorder = ItemRecorder


class SimulatedDriver(Driver):
    """The driver as it is, with a client that is connected to the simulated DynamoDB."""

    def __init__(self, options: DynamodbOptions, server: Server) -> None:
        super().__init__(options)
        self._server = server
        #: Called before a request is sent, with its table as plans call it, and whether it changes
        #: a namespace.
        self.meet: Callable[[str, bool], Met] = lambda *_: UNMET

    async def open(self) -> None:
        self._client = Client(self._server, self.options.timeout_us, self._met)

    def _met(self, operation: str, request: Mapping[str, Any]) -> Met:
        name, pk = _first(request)
        _, _, kind = name.partition(".default.")
        if kind.startswith("events."):
            return self.meet(f"counter_default.{kind.replace('.', '_')}", False)
        if kind == "data" and pk:
            return self.meet(f"counter_default.{_KINDS[pk[0]]}", False)
        changes = operation == "put_item" and ":v" in request.get("ExpressionAttributeValues", {})
        return self.meet(f"counter.{pk.decode(errors='replace')}", changes)


def _first(request: Mapping[str, Any]) -> tuple[str, bytes]:
    """Return the first table and partition key that a request is about."""
    if "TransactItems" in request:
        ((_, request),) = request["TransactItems"][0].items()
    if "RequestItems" in request:
        name, asked = next(iter(request["RequestItems"].items()))
        first = asked["Keys"][0] if "Keys" in asked else next(iter(asked[0].values()))
        first = first.get("Item", first.get("Key", first))
    else:
        name, values = request.get("TableName", ""), request.get("ExpressionAttributeValues", {})
        _, partition, _ = key_condition(request.get("KeyConditionExpression", "pk = :pk"))
        first = request.get("Item", request.get("Key", {"pk": values.get(partition, {"B": b""})}))
    return name, first["pk"]["B"]


def options_for(*_: Dataset, **__: object) -> DynamodbOptions:
    """Return options for the simulated DynamoDB."""
    return DynamodbOptions(timeout_us=_TIMEOUT_US)


def options_of(*_: object) -> DynamodbOptions:
    """Return the options of a run."""
    return options_for()


def patches_of(config: Config) -> Mapping[str, object]:
    """Return, by name, what replaces random numbers of the adapter in a run."""
    return {"counter.storage.dynamodb.driver.random": Random(f"dynamodb {config.seed}")}


async def have_schema(server: Server, options: DynamodbOptions, *datasets: Dataset) -> None:
    """Apply the schema as ``counter schema apply`` does."""
    driver = SimulatedDriver(options, server)
    await driver.open()
    await apply_schema(driver, datasets)
    await driver.close()


class SimulatedStore(DynamodbStore):
    """The store as it is, connected to the simulated DynamoDB."""

    def __init__(self, options: DynamodbOptions, clock: Clock, server: Server) -> None:
        self.simulated = SimulatedDriver(options, server)
        super().__init__(options, clock, self.simulated)


class CalmStore(SimulatedStore):
    """A store with its schema, immediate requests, and the clock of the server."""

    def __init__(self, dataset: Dataset, clock: FakeClock, server: Server) -> None:
        super().__init__(options_for(), clock, server)
        self._dataset, self.server = dataset, server
        self.control.read_clock = _right  # type: ignore[method-assign]

    async def open(self) -> None:
        await have_schema(self.server, options_for(), self._dataset)
        await super().open()


def stores_of(dataset: Dataset, clock: FakeClock) -> Callable[[], CalmStore]:
    """Return a factory of stores over the same server, which loses nothing."""

    def at(_: int, call: Any, *args: Any) -> None:
        asyncio.get_running_loop().call_soon(call, *args)

    server = Server(at, clock.now_us, Weather(Random(1), delay_us=0))
    return lambda: CalmStore(dataset, clock, server)


async def _right() -> ClockReading:
    return ClockReading(0, 0)


def calm_server(clock: FakeClock, seed: int = 1) -> Server:
    """Return a server that loses nothing, on any loop."""

    def at(_: int, call: Any, *args: Any) -> None:
        asyncio.get_running_loop().call_soon(call, *args)

    return Server(at, clock.now_us, Weather(Random(seed), delay_us=0))
