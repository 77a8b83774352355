"""The reference of the Python SDK: every public name of ``counter_client``, from its docstring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import counter_client as client

#: Each name is in one of these sections, which are in reading order.
GROUPS: Final[Mapping[str, Sequence[str]]] = {
    "Clients": ("CounterClient", "AsyncCounterClient", "Options"),
    "Tokens": ("Token", "Key", "Unfinished"),
    "Answers": ("Added", "AddedCount", "Cleared", "Count", "Event", "Point", "Resolved"),
    "Holds": ("Hold", "AsyncHold", "AsyncHolding", "HoldState", "HoldCount", "HoldEvent"),
    "Buffers": ("Buffer", "AsyncBuffer", "Rejected"),
    "Hooks": ("Attempt", "Flush", "Sending", "Watch", "otel.traced_by"),
    "Errors": (
        "CounterError",
        "BoundReachedError",
        "HoldSettledError",
        "HoldReleasedError",
        "HoldExpiredError",
        "HoldUnknownError",
        "UnknownOutcomeError",
        "UnreachableError",
        "UnexpectedAnswerError",
        "BufferFullError",
        "RejectedError",
        "UnsentError",
        "ClosedError",
    ),
}
_HEAD: Final = """# Python SDK, every name

All public names of `counter_client`, from their docstrings. [Python SDK, by example](../python.md)
shows them in use. Instants are `datetime`s in UTC; names that end in `_s` are seconds, those in
`_us` microseconds. The classes of the service's own problems are in `counter_client.errors`:
[Errors](errors.md) names each beside its code.

In signatures, a `Credential` is a `Token` or a `Key`; `Items` are pairs of a counter and a delta,
triples with `Bounds`, or a mapping; `Settings` is a dictionary of a namespace's settings;
`LiveUpdate` is a `Count`, or the `CounterError` of a temporary failure.
"""


def sdk_page() -> str:
    """The page, in Markdown with a directive for each name."""
    grouped = [name for names in GROUPS.values() for name in names]
    others = sorted(set(client.__all__) - set(grouped))
    parts = [_HEAD]
    for title, names in {**GROUPS, "Others": others}.items():
        if names:
            # Bases are shown for errors only, because they say how to catch them.
            options = f"{{heading_level: 3, show_bases: {str(title == 'Errors').lower()}}}"
            parts.append(f"## {title}\n")
            parts += [f"::: counter_client.{name}\n    options: {options}\n" for name in names]
    return "\n".join(parts)
