"""What the commands against a service print: tables, JSON, and instants that are given as text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

from cyclopts import Parameter

from counter.cli import printable
from counter.client import Key, Token
from counter.clock import to_rfc3339, to_us
from counter.durations import parse_iso_duration
from counter.errors import StartupError
from counter.tokens import token_of_uuid7

#: The flag of every command that prints an answer.
Json = Annotated[bool, Parameter(help="Print JSON: a document a line.", negative="")]
_SECOND_CHARS: Final = len("2026-01-31T08:15:30")


def json_line(body: object) -> str:
    """*body* on one line. Instants are written as the service writes them."""
    if is_dataclass(body) and not isinstance(body, type):
        body = asdict(body)
    return json.dumps(body, ensure_ascii=False, default=_text)


def _text(value: object) -> str:
    return instant(value) if isinstance(value, datetime) else str(value)


def instant(moment: datetime) -> str:
    """*moment* in RFC 3339, to the microsecond."""
    return to_rfc3339(to_us(moment))


def second(moment: datetime) -> str:
    """*moment* for people, to the second."""
    return instant(moment)[:_SECOND_CHARS].replace("T", " ") + "Z"


def signed(number: int) -> str:
    """*number* with its sign, so that a change is not taken for a count."""
    return f"{number:+}"


def table(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns with a head, as wide as they must be: a name or a token that is cut could not be
    copied. Numbers stand on the right."""
    from rich.cells import cell_len

    cells = [[printable(str(cell)) for cell in row] for row in rows]
    right = [bool(rows) and all(_is_number(row[at]) for row in rows) for at in range(len(names))]
    lines = [list(names), *cells]
    widths = [max(cell_len(line[at]) for line in lines) for at in range(len(names))]
    shown = []
    for line in lines:
        parts = []
        for cell, width, is_right in zip(line, widths, right, strict=True):
            gap = " " * (width - cell_len(cell))
            parts.append(gap + cell if is_right else cell + gap)
        shown.append("  ".join(parts).rstrip())
    return "\n".join(shown)


def _is_number(cell: object) -> bool:
    return isinstance(cell, int | float) or str(cell).lstrip("+-").replace(".", "").isdecimal()


def credential_of(text: str) -> Token | Key:
    """The token or the key that *text* is; a UUIDv7 is a token. Raises InvalidParameterError."""
    of_uuid = token_of_uuid7(text)
    return Token.parse(text) if of_uuid is None else Token(*of_uuid)


def moment_of(name: str, text: str | None, now: datetime) -> datetime | None:
    """The instant that the flag *name* gives: RFC 3339, or how long ago. Raises StartupError."""
    if text is None:
        return None
    try:
        return now - timedelta(microseconds=parse_iso_duration(text))
    except (ValueError, OverflowError):
        pass
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise StartupError(
            f"--{name}: {text[:40]!r} is no instant; write it like 2026-01-31T08:15:30Z, or how"
            " long ago it was, like 24h"
        ) from None
    # Without an offset it could be either; the answers are in UTC.
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
