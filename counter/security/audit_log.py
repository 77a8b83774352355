"""Write the audit log: who did what to namespaces, keys, tables and counts.

Each act is one line of JSON, sent to the logger ``counter.audit`` whatever ``log_level`` is. With
the setting ``audit_log`` it also goes to a file, on disk before the response. A rejected act
changed nothing and is not logged; an act with an unknown outcome is.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pwd
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final

from counter.clock import to_rfc3339
from counter.errors import CounterError, RefusedError, StartupError
from counter.ports import Clock
from counter.quantities import format_duration
from counter.regular_file import sync_directory
from counter.telemetry.logs import AUDIT
from counter.types import NamespaceSettings

_log = logging.getLogger(AUDIT)
#: From this status on the outcome is unknown.
_FAULTS: Final = 500
_MODE: Final = 0o600
#: One write per line with O_APPEND: lines of several processes do not mix.
_FLAGS: Final = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Who:
    """Who did it: ``key:<id>`` or ``user:<name>``; ``anyone`` if no key is required."""

    who: str
    #: The client's host and port.
    remote: str | None = None
    request_id: str | None = None
    #: The original user of sudo, as reported by sudo.
    sudo_user: str | None = None


def os_user() -> Who:
    """Return the user of this process, for acts of the command line."""
    uid = os.getuid()
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        # A container may run as a user id without a name.
        name = str(uid)
    return Who(f"user:{name}", sudo_user=os.environ.get("SUDO_USER"))


@dataclass(slots=True)
class Act:
    """The effects of an act, as far as they are known yet."""

    #: The object of the act: ``namespace``, ``counter``, ``key`` and the like.
    to: dict[str, Any]
    #: Settings before and after it, in the API's form; only those that differ.
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)

    def changed(self, before: NamespaceSettings | None, after: NamespaceSettings | None) -> None:
        """Record the settings of a namespace: all if it is created or deleted, else those that
        changed."""
        old, new = _written(before), _written(after)
        self.before = {name: value for name, value in old.items() if new.get(name) != value}
        self.after = {name: value for name, value in new.items() if old.get(name) != value}


class AdminLog:
    """Records acts in the log, and in the file *path* if given. Several processes may share the
    file.

    Raises StartupError if the file is not writable.
    """

    def __init__(self, path: Path | None, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        if path is not None:
            try:
                _append(path, b"")
            except OSError as error:
                raise StartupError(
                    f"audit_log {str(path)!r} cannot be written: {error.strerror}; let the user"
                    " that runs this write there, or name another file"
                ) from error

    @asynccontextmanager
    async def act(self, what: str, who: Who, **to: Any) -> AsyncIterator[Act]:
        """Record an act such as ``namespace.delete`` when the context ends."""
        act = Act(to)
        try:
            yield act
        except RefusedError:
            raise
        except CounterError as error:
            if error.status >= _FAULTS:
                await self._record_in_thread(what, who, act, "unknown")
            raise
        except BaseException:
            # Cancelled, or a bug: write now, because the event loop may not run again.
            self.record(what, who, act, end="unknown")
            raise
        await self._record_in_thread(what, who, act, "done")

    async def _record_in_thread(self, what: str, who: Who, act: Act, end: str) -> None:
        """Record it in a thread, so that the event loop does not block."""
        if self._path is None:
            self.record(what, who, act, end=end)
        else:
            await asyncio.to_thread(self.record, what, who, act, end=end)

    def record(self, what: str, who: Who, act: Act, *, end: str = "done") -> None:
        """Record an act *what*; *end* is ``unknown`` if it may have been done.

        Waits for the disk. A failing file is reported in the log, which contains the line, too.
        """
        by = {name: value for name, value in asdict(who).items() if value is not None}
        line: dict[str, Any] = {"act": what, "end": end, **by, **act.to}
        if act.before:
            line["before"] = act.before
        if act.after:
            line["after"] = act.after
        _log.info("%s %s", what, end, extra={"fields": line})
        if self._path is not None:
            line = {"time": to_rfc3339(self._clock.now_us()), **line}
            try:
                _append(self._path, json.dumps(line, default=str).encode() + b"\n")
            except OSError as error:
                _log.error("audit_log %s lacks the line before: %s", self._path, error.strerror)


def _append(path: Path, line: bytes) -> None:
    """Append *line* to the file, and wait until it is on disk.

    The file is opened each time: acts are rare, and a rotated file is created again.
    """
    is_new = not path.exists()
    file = os.open(path, _FLAGS, _MODE)
    try:
        size = os.fstat(file).st_size
        if line and size and os.pread(file, 1, size - 1) != b"\n":
            # A crash left the last line incomplete.
            line = b"\n" + line
        while line:
            line = line[os.write(file, line) :]
        os.fsync(file)
    finally:
        os.close(file)
    if is_new:
        sync_directory(path.parent)


def _written(settings: NamespaceSettings | None) -> Mapping[str, Any]:
    """Return the settings in the API's form."""
    if settings is None:
        return {}
    found: dict[str, Any] = {}
    for name, value in settings.document().items():
        if name.endswith("_us"):
            found[name.removesuffix("_us")] = format_duration(value)
        else:
            found[name] = value.value if isinstance(value, Enum) else value
    return found
