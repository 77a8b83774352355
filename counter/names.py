"""Check the names of namespaces and counters, for the service and its clients."""

from __future__ import annotations

import re
from typing import Final

from counter import limits

_NAMESPACE: Final = re.compile(r"[a-z][a-z0-9_-]{0,62}", re.ASCII)
#: Joiners that emoji and some scripts need; str.isprintable() rejects them.
_JOINERS = str.maketrans("", "", "\u200c\u200d")


def is_namespace_name(name: str) -> bool:
    """Return whether *name* is a valid namespace name."""
    return _NAMESPACE.fullmatch(name) is not None


def check_counter_name(name: str) -> str:
    """Return *name* if it is 1 to 256 printable characters. Raises ValueError, naming the fault."""
    if name.isalnum() and len(name) <= limits.COUNTER_NAME_CHARS_MAX:
        return name
    if not 1 <= len(name) <= limits.COUNTER_NAME_CHARS_MAX:
        raise ValueError(
            f"a counter's name has 1 to {limits.COUNTER_NAME_CHARS_MAX} characters,"
            f" this one has {len(name)}"
        )
    if not name.isprintable() and not name.translate(_JOINERS).isprintable():
        bad = next(c for c in name.translate(_JOINERS) if not c.isprintable())
        raise ValueError(f"a counter's name is printable; this one holds U+{ord(bad):04X}")
    return name
