"""Store everything in Amazon DynamoDB, for any number of processes.

It has no transaction that checks an event's age, so it is of the kind without transactions, as
Cassandra is. Conditional writes tell what was stored before; docs/architecture.md has the design.
"""

from __future__ import annotations

from counter.errors import StartupError

try:
    import aiobotocore  # noqa: F401
except ImportError as error:
    raise StartupError(
        f"the DynamoDB driver is missing ({error}):"
        " install it with pip install '.[dynamodb]' in its checkout"
    ) from error

from counter.storage.dynamodb.driver import DynamodbOptions
from counter.storage.dynamodb.schema import apply_schema, dynamodb_options
from counter.storage.dynamodb.store import DynamodbStore

__all__ = ["DynamodbOptions", "DynamodbStore", "apply_schema", "dynamodb_options"]
