"""Check the names of namespaces and counters, for the service and its clients."""

from __future__ import annotations

import re
from typing import Final

from counter import limits

_NAMESPACE: Final = re.compile(r"[a-z][a-z0-9_-]{0,62}", re.ASCII)
#: First and last code points that no counter's name holds. The list is fixed: Unicode's tables
#: change with Python's version, and a name that was counted once must stay a name. All other code
#: points are allowed, also those that are not assigned yet. The clients have the same list.
REFUSED: Final = (
    (0x00, 0x1F),  # controls
    (0x7F, 0xA0),  # controls, and the no-break space
    (0xAD, 0xAD),  # soft hyphen
    (0x61C, 0x61C),  # mark of direction
    (0x1680, 0x1680),  # space
    (0x180E, 0x180E),  # invisible separator
    (0x2000, 0x200B),  # spaces, and the zero-width space; the joiners U+200C and U+200D are allowed
    (0x200E, 0x200F),  # marks of direction
    (0x2028, 0x202F),  # separators of lines and paragraphs, directions, narrow no-break space
    (0x205F, 0x206F),  # space, invisible operators, directions
    (0x3000, 0x3000),  # ideographic space
    (0xD800, 0xF8FF),  # surrogates, and private use
    (0xFEFF, 0xFEFF),  # byte order mark
    (0xFFF9, 0xFFFB),  # interlinear annotations
    (0xE0001, 0xE0001),  # language tag; the tags of flags, U+E0020 to U+E007F, are allowed
    (0xF0000, 0x10FFFF),  # private use
)
_REFUSED: Final = re.compile(f"[{''.join(f'{chr(one)}-{chr(two)}' for one, two in REFUSED)}]")


def is_namespace_name(name: str) -> bool:
    """Return whether *name* is a valid namespace name."""
    return _NAMESPACE.fullmatch(name) is not None


def check_counter_name(name: str) -> str:
    """Return *name* if it has 1 to 256 characters, none of them in REFUSED. Raises ValueError,
    naming the fault."""
    if not 1 <= len(name) <= limits.COUNTER_NAME_CHARS_MAX:
        raise ValueError(
            f"a counter's name has 1 to {limits.COUNTER_NAME_CHARS_MAX} characters,"
            f" this one has {len(name)}"
        )
    # Most names are ASCII, for which this is faster.
    if (name.isascii() and name.isprintable()) or not (bad := _REFUSED.search(name)):
        return name
    raise ValueError(
        "a counter's name has no controls, invisible marks, characters for private use, or spaces"
        f" but U+0020; this one holds U+{ord(bad[0]):04X}"
    )
