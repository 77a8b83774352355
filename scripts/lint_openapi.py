"""Lint the OpenAPI document with the Spectral and the Redocly of clients/generated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from scripts.docs_routes import openapi

_FOLDER: Final = Path(__file__).resolve().parents[1] / "clients" / "generated"
_LINTERS: Final = (
    ("spectral", "lint", "--ruleset", "spectral.yaml", "--fail-severity=warn"),
    ("redocly", "lint", "--config", "redocly.yaml"),
)


def main() -> int:
    """Return 0 if neither finds an error or a warning."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as document:
        json.dump(openapi(), document)
        document.flush()
        environment = os.environ | {
            "REDOCLY_TELEMETRY": "off",
            "REDOCLY_SUPPRESS_UPDATE_NOTICE": "true",
        }
        failed = 0
        for name, *arguments in _LINTERS:
            linter = _FOLDER / "node_modules" / ".bin" / name
            command = [str(linter), *arguments, document.name]
            failed |= subprocess.run(command, cwd=_FOLDER, env=environment, check=False).returncode
    return failed


if __name__ == "__main__":
    sys.exit(main())
