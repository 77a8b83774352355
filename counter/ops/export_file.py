"""Write the file of ``counter export``: NDJSON, with a header before and a trailer after the
counts.

The header has the format, the namespace and the id; each line is one counter with the instant that
its count is exact as of; the trailer has the number of lines, their sum, and the SHA-256 of all
bytes before it. Counters are in code point order, each once. A file without a trailer is
incomplete.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from typing import Any, BinaryIO, Final

FORMAT: Final = "counter-export"
VERSION: Final = 1


class ExportWriter:
    """Writes an export of a *namespace*, as the service describes it, to *file*. Times are in RFC
    3339, to the microsecond."""

    def __init__(
        self, file: BinaryIO, namespace: Mapping[str, Any], prefix: str, begun_at: str
    ) -> None:
        self.export_id = str(uuid.uuid4())
        self._file = file
        self._digest = hashlib.sha256()
        self._lines = self._sum = 0
        self._first_as_of: str | None = None
        self._last_as_of: str | None = None
        left_out = ("namespace", "created_at", "warnings")
        self._write(
            {
                "format": FORMAT,
                "version": VERSION,
                "export_id": self.export_id,
                "namespace": namespace["namespace"],
                "created_at": namespace["created_at"],
                "prefix": prefix,
                "begun_at": begun_at,
                "settings": {k: v for k, v in namespace.items() if k not in left_out},
            }
        )

    def put(self, counter: str, count: int, as_of: str) -> None:
        """Write one count."""
        self._lines += 1
        self._sum += count
        self._first_as_of = min(self._first_as_of or as_of, as_of)
        self._last_as_of = max(self._last_as_of or as_of, as_of)
        self._write({"counter": counter, "count": count, "as_of": as_of})

    def end(self, ended_at: str) -> Mapping[str, Any]:
        """Write the trailer and return it."""
        trailer = {
            "lines": self._lines,
            "sum": self._sum,
            "first_as_of": self._first_as_of,
            "last_as_of": self._last_as_of,
            "ended_at": ended_at,
            "sha256": self._digest.hexdigest(),
        }
        self._write(trailer)
        self._file.flush()
        return trailer

    def _write(self, content: Mapping[str, Any]) -> None:
        line = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        self._digest.update(line)
        self._file.write(line)
