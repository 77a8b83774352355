"""The statements of a Cassandra store: counted, or kept from being sent."""

from collections.abc import Callable
from typing import Any, Self

from cassandra.query import BatchStatement

from counter.storage.cassandra.store import CassandraStore

#: Gives the error that a statement fails with, or None for one that is sent.
Fault = Callable[[Any], Exception | None]


def statements_of(sent: Any) -> list[Any]:
    """The values of each row that a statement writes or asks for."""
    if isinstance(sent, BatchStatement):
        return [values for _, _, values in sent._statements_and_parameters]
    return [sent.values]


class Statements:
    """Within the block, notes how many rows each statement of *store* carries."""

    def __init__(self, store: CassandraStore, fault: Fault = lambda _: None) -> None:
        self._connection = store.session.connection
        self._execute = store.session.connection._execute
        self._fault = fault
        self.sizes: list[int] = []

    def __enter__(self) -> Self:
        def execute(
            timeout_us: int | None, statement: Any, paging_state: bytes | None, **more: Any
        ) -> Any:
            self.sizes.append(len(statements_of(statement)))
            error = self._fault(statement)
            if error is not None:
                raise error
            return self._execute(timeout_us, statement, paging_state, **more)

        self._connection._execute = execute  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self._connection._execute = self._execute  # type: ignore[method-assign]
