"""Set up logging and format log lines: text at a terminal, JSON for machines.

Code logs through the standard library (``logging.getLogger("counter.api")``) and puts fields for
machines into ``extra={"fields": {...}}``.
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

#: The loggers of requests and of administrative acts. They have their own settings, so
#: ``log_level`` does not apply.
REQUESTS: Final = "counter.requests"
AUDIT: Final = "counter.audit"
#: The id of the current request: each line that is logged during it contains it.
REQUEST_ID: Final[ContextVar[str]] = ContextVar("request_id", default="")

#: A value that needs no quotes, because it cannot be confused with other parts of the line.
_UNESCAPED: Final = re.compile(r"[\w.:/+@{}-]+", re.ASCII)
#: Prefix of each further line of a record's text, so that no such line looks like a record.
_FURTHER: Final = "\n    "


class LineFormatter(logging.Formatter):
    """Formats a record as a line of JSON, or as text with the trace indented below it.

    No content of a record can end its line or begin another.
    """

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._render = _json if as_json else _text

    def format(self, record: logging.LogRecord) -> str:
        """Return *record* without the final line break."""
        moment = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := REQUEST_ID.get():
            line["request_id"] = request_id
        fields = dict(getattr(record, "fields", {}))
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            fields["stack_info"] = record.stack_info
        return self._render(
            line | {name: value for name, value in fields.items() if name not in line}
        )


def log_to_stderr(settings: Settings) -> None:
    """Write log records to standard error, from the level of *settings* on; of libraries,
    warnings only. Does nothing if logging is set up already."""
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
    """Return JSON in printable ASCII, without control characters."""
    return json.dumps(fields, default=repr).replace("\x7f", "\\u007f")


def _text(fields: Mapping[str, Any]) -> str:
    """Return a human-readable line, with the trace indented below it."""
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
    """Return *text* with control characters, line breaks and invisible characters escaped."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )
