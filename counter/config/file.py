"""Find and read the TOML file with settings."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any, Final

from counter.errors import StartupError

CONFIG_VARIABLE: Final = "COUNTER_CONFIG"
#: Read from the working directory if it exists and no other file is named.
CONFIG_DEFAULT: Final = "counter.toml"


def config_file(named: str | Path | None) -> Path | None:
    """Return the file to read: *named*, else the one of the environment, else the default if it
    exists.

    Raises StartupError if a file is named and does not exist.
    """
    name = named or os.environ.get(CONFIG_VARIABLE)
    if name:
        path = Path(name)
        if not path.is_file():
            raise StartupError(f"the configuration {str(path)!r} is not there, or is no file")
        return path
    default = Path(CONFIG_DEFAULT)
    return default if default.is_file() else None


def read_toml(path: Path) -> dict[str, Any]:
    """Return the settings in *path*. Raises StartupError if it is not TOML."""
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise StartupError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StartupError(f"{path}: it is not TOML: {error}") from error
    if "config" in table:
        raise StartupError(f"{path}: config names another file; there can be only one")
    return table
