"""Values as the protocol has them, for the statements that are bound most often.

The driver's own ``bind`` looks up and checks the type of each value anew: for the row of an event
it takes four times as long as this. What is packed here goes into columns of known types.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

from cassandra.query import BoundStatement, PreparedStatement

Packer = Callable[[Any], bytes]

BIGINT: Final = struct.Struct(">q").pack
INT: Final = struct.Struct(">i").pack
TINYINT: Final = struct.Struct(">b").pack
TEXT: Final = str.encode
#: Bytes are their own packing: this makes no copy.
BLOB: Final = bytes


def bound(prepared: Any, packers: Sequence[Packer], values: Sequence[Any]) -> Any:
    """*prepared* bound to *values*, each packed by its packer."""
    if type(prepared) is not PreparedStatement:
        # What stands in for the driver's own binds as it likes.
        return prepared.bind(values)
    statement = BoundStatement(prepared)
    statement.values = [pack(value) for pack, value in zip(packers, values, strict=True)]
    return statement
