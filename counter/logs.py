"""Where logs go, and how they look: text for a person at a terminal, JSON for machines.

Code logs through the standard library (``logging.getLogger("counter.api")``), with
``extra={"told": {...}}`` for what a machine looks for; counter/log_lines.py makes lines of it.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from contextvars import ContextVar
from importlib import import_module
from threading import Thread
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from counter.config import Settings

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
                from counter.log_lines import formatter
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
