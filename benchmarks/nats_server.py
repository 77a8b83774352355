"""nats-server, built by Go from the module proxy once, and kept in the user's cache folder.

``python -m benchmarks.nats_server`` builds it ahead of a quick run, which does not wait for that.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

#: Counters need 2.12 or later.
VERSION: Final = "2.15.2"
_MODULE: Final = f"github.com/nats-io/nats-server/v2@v{VERSION}"
_TIMEOUT_S: Final = 600
_LOG_CHARS: Final = 500


class NoNatsError(Exception):
    """There is no nats-server here, and why."""


def path() -> Path:
    """Its folder: below ``$XDG_CACHE_HOME``, or else ``~/.cache``."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "distributed-counter" / f"nats-server-{VERSION}"


def find(build: bool = True) -> Path:
    """The program, built at the first call if *build*. Raises NoNatsError."""
    kept = path()
    if kept.is_file():
        return kept
    if shutil.which("go") is None:
        raise NoNatsError("nats-server is built by Go, and there is no `go` (golang-go in Debian)")
    if not build:
        raise NoNatsError(
            "nats-server is not built yet; `.venv/bin/python -m benchmarks.nats_server` does so in"
            " a minute or two"
        )
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        _install(Path(folder))
        (Path(folder) / "nats-server").replace(kept)
    return kept


def _install(folder: Path) -> None:
    try:
        done = subprocess.run(
            ["go", "install", _MODULE],
            cwd=folder,
            env={**os.environ, "GOBIN": str(folder)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise NoNatsError(f"Go did not build {_MODULE} within {_TIMEOUT_S} s") from None
    if done.returncode:
        said = (done.stdout + done.stderr).strip()[-_LOG_CHARS:]
        raise NoNatsError(f"Go could not build {_MODULE}: {said}")


if __name__ == "__main__":
    sys.stdout.write(f"{find()}\n")
