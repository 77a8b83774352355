"""Logging: where log lines go, and how they look: text at a terminal, JSON for machines.

Code logs through the standard library (``logging.getLogger("counter.api")``) and puts fields for
machines into ``extra={"told": {...}}``.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from counter.config.settings import Settings

#: What logs requests, and what logs administrative acts. Settings of their own say how much, so
#: ``log_level`` does not.
REQUESTS: Final = "counter.requests"
AUDIT: Final = "counter.audit"
#: The request that is being answered: each line that is logged meanwhile has its id.
REQUEST_ID: Final[ContextVar[str]] = ContextVar("request_id", default="")

#: A value that is written as it is, because it cannot be taken for anything else.
_UNESCAPED: Final = re.compile(r"[\w.:/+@{}-]+", re.ASCII)
#: Begins each further line of a record's text, so that none can be taken for a record.
_FURTHER: Final = "\n    "


class LineFormatter(logging.Formatter):
    """Formats a record as a line of JSON, or as text with the trace indented below it.

    Nothing that is in a record can end its line or begin another.
    """

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._render = _json if as_json else _text

    def format(self, record: logging.LogRecord) -> str:
        """Return *record* without the end of its last line."""
        moment = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := REQUEST_ID.get():
            line["request_id"] = request_id
        fields = dict(getattr(record, "told", {}))
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            fields["stack_info"] = record.stack_info
        return self._render(
            line | {name: value for name, value in fields.items() if name not in line}
        )


def log_to_stderr(settings: Settings) -> None:
    """Write log records to standard error, from the level of *settings* on; of libraries,
    warnings. It does nothing if logging is set up already."""
    as_json = settings.log_format == "json"
    if settings.log_format == "auto":
        as_json = not sys.stderr.isatty()
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(as_json=as_json))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("counter").setLevel(settings.log_level.upper())
    for each in (REQUESTS, AUDIT):
        logging.getLogger(each).setLevel(logging.INFO)


def _json(fields: Mapping[str, Any]) -> str:
    """In visible ASCII: neither a reader nor a terminal finds a control character in it."""
    return json.dumps(fields, default=repr).replace("\x7f", "\\u007f")


def _text(fields: Mapping[str, Any]) -> str:
    """A line that a person reads, with the trace below it, set off."""
    rest = dict(fields)
    time, level, logger, message = (rest.pop(n) for n in ("time", "level", "logger", "message"))
    trace = [rest.pop(name, "") for name in ("exception", "stack_info")]
    shown = "".join(f" {name}={_value(value)}" for name, value in rest.items())
    line = f"{time} {level.upper()} {logger}: {printable(message)}{shown}"
    below = [printable(each) for text in trace for each in text.splitlines()]
    return _FURTHER.join([line, *below])


def _value(value: object) -> str:
    if isinstance(value, str) and _UNESCAPED.fullmatch(value):
        return value
    return printable(json.dumps(value, ensure_ascii=False, default=repr))


def printable(text: str) -> str:
    """*text* with whatever moves a cursor, ends a line or is not seen written as an escape."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )
