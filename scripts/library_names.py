"""The demo's input: every NAME token of the standard library the interpreter runs with."""

from __future__ import annotations

import os
import signal
import sysconfig
import tokenize
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Final

#: Folders of packages that were installed later: no part of the standard library.
OUTSIDE: Final = frozenset({"site-packages", "dist-packages", "__pycache__"})
_FILES_AT_ONCE: Final = 10


def library_files() -> list[Path]:
    """The library's Python files in a fixed order."""
    found: list[Path] = []
    for folder, folders, files in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = [name for name in folders if name not in OUTSIDE]
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(found)


def names_of(path: Path) -> list[str]:
    """The names in one file; none if it is not valid Python (the library tests with such files)."""
    try:
        with path.open("rb") as file:
            tokens = tokenize.tokenize(file.readline)
            return [token.string for token in tokens if token.type == tokenize.NAME]
    except (OSError, SyntaxError, tokenize.TokenError, UnicodeDecodeError):
        return []


def read_names(limit: int | None = None) -> list[str]:
    """Tokenize the library with all cores, up to *limit* occurrences, in the order of the files."""
    names: list[str] = []
    known: dict[str, str] = {}
    with ProcessPoolExecutor(
        # Ctrl-C is for the parent, which then ends its workers.
        mp_context=get_context("spawn"),
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_IGN),
    ) as pool:
        for found in pool.map(names_of, library_files(), chunksize=_FILES_AT_ONCE):
            # One string a name, not one an occurrence: the list stays small.
            names += [known.setdefault(name, name) for name in found]
            if limit and len(names) >= limit:
                pool.shutdown(wait=False, cancel_futures=True)
                break
    return names[:limit]
