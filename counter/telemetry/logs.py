"""Where logs go, and how they look: text for a person at a terminal, JSON for machines.

Code logs through the standard library (``logging.getLogger("counter.api")``), with
``extra={"told": {...}}`` for what a machine looks for; counter/telemetry/logs.py makes lines of it.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from contextlib import suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from importlib import import_module
from threading import Thread
from typing import TYPE_CHECKING, Any, Final

from structlog.processors import JSONRenderer, format_exc_info
from structlog.stdlib import ExtraAdder, ProcessorFormatter
from structlog.typing import EventDict, WrappedLogger

if TYPE_CHECKING:
    from counter.config.settings import Settings


#: What logs requests, and what logs administrative acts. Settings of their own say how much, so
#: ``log_level`` does not.
REQUESTS: Final = "counter.requests"
AUDIT: Final = "counter.audit"
#: The request that is being answered: each line that is logged meanwhile has its id.
REQUEST_ID: Final[ContextVar[str]] = ContextVar("request_id", default="")

_PLAIN: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class LateFormatter(logging.Formatter):
    """Has structlog make the lines. It is imported for the first one: a process that has nothing
    to tell starts without it, a sixth sooner."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__(_PLAIN)
        self._as_json = as_json
        self._formatter: logging.Formatter | None = None

    def format(self, record: logging.LogRecord) -> str:
        """The line of *record*, without its end."""
        if self._formatter is None:
            try:
                from counter.telemetry.logs import formatter
            except (ImportError, OSError):
                # No file can be opened any more, perhaps, which is what the line is about.
                return repr(super().format(record))
            self._formatter = formatter(as_json=self._as_json)
        return self._formatter.format(record)


def log_to_stderr(settings: Settings) -> None:
    """Have what is logged written to standard error, from the level of *settings* on; of what
    libraries log, warnings. It does nothing where logging is set up already."""
    as_json = settings.log_format == "json"
    if settings.log_format == "auto":
        as_json = not sys.stderr.isatty()
    handler = logging.StreamHandler()
    handler.setFormatter(LateFormatter(as_json=as_json))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("counter").setLevel(settings.log_level.upper())
    for each in (REQUESTS, AUDIT):
        logging.getLogger(each).setLevel(logging.INFO)


def load_soon() -> None:
    """Load what makes lines, beside what is going on: else the first line holds everything up for
    as long as that takes, and it may tell of trouble."""

    def load() -> None:
        with suppress(ImportError, OSError):
            import_module("counter.log_lines")

    Thread(target=load, name="counter-logs", daemon=True).start()


#: A value that is written as it is, because it cannot be taken for anything else.
_UNESCAPED: Final = re.compile(r"[\w.:/+@{}-]+", re.ASCII)
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
