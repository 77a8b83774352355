"""Lines of the log, by structlog. Nothing that is in a record can end its line or begin another."""

from __future__ import annotations

import json
import logging
import re
from datetime import UTC, datetime
from typing import Any, Final

from structlog.processors import JSONRenderer, format_exc_info
from structlog.stdlib import ExtraAdder, ProcessorFormatter
from structlog.typing import EventDict, WrappedLogger

from counter.logs import REQUEST_ID

#: A value that is written as it is, because it cannot be taken for anything else.
_PLAIN: Final = re.compile(r"[\w.:/+@{}-]+", re.ASCII)
#: Begins each further line of a record's text, so that none can be taken for a record.
_FURTHER: Final = "\n    "


def formatter(*, as_json: bool) -> logging.Formatter:
    """Makes a line of JSON, or of text, of each record."""
    return ProcessorFormatter(
        foreign_pre_chain=[ExtraAdder()],
        processors=[
            _in_order,
            format_exc_info,
            JSONRenderer(_json) if as_json else _text,
        ],
    )


def _in_order(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """What every line has first, then what this one tells besides."""
    record: logging.LogRecord = event.pop("_record")
    del event["_from_structlog"]
    moment = datetime.fromtimestamp(record.created, UTC)
    line: dict[str, Any] = {
        "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": record.levelname.lower(),
        "logger": record.name,
        "message": event.pop("event"),
    }
    if request_id := REQUEST_ID.get():
        line["request_id"] = request_id
    told = event.pop("told", {})
    return line | {name: value for name, value in {**told, **event}.items() if name not in line}


def _json(event: EventDict, **named: Any) -> str:
    """In visible ASCII: neither a reader nor a terminal finds a control character in it."""
    return json.dumps(event, **named).replace("\x7f", "\\u007f")


def _text(_: WrappedLogger, __: str, event: EventDict) -> str:
    """A line that a person reads, with the trace below it, set off."""
    time, level, logger, message = (event.pop(n) for n in ("time", "level", "logger", "message"))
    trace = [event.pop(name, "") for name in ("exception", "stack_info")]
    fields = "".join(f" {name}={_value(value)}" for name, value in event.items())
    line = f"{time} {level.upper()} {logger}: {printable(message)}{fields}"
    below = [printable(each) for text in trace for each in text.splitlines()]
    return _FURTHER.join([line, *below])


def _value(value: object) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value):
        return value
    return printable(json.dumps(value, ensure_ascii=False, default=repr))


def printable(text: str) -> str:
    """*text* with whatever moves a cursor, ends a line or is not seen written as an escape."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )
