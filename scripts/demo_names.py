"""The demo's input: every NAME token of the standard library the interpreter runs with."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import sysconfig
import tokenize
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Final

#: Folders of what was installed later: no part of the standard library.
OUTSIDE: Final = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(slots=True)
class Names:
    """Every occurrence, in the order of the files; and how many files were read and skipped."""

    occurrences: list[str] = field(default_factory=list)
    files: int = 0
    skipped: int = 0


def library_files() -> list[Path]:
    """The library's Python files in a fixed order."""
    found: list[Path] = []
    for folder, folders, files in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = [name for name in folders if name not in OUTSIDE]
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(found)


def names_of(path: Path) -> list[str] | None:
    """The names in one file, or None where it is not valid Python (the library tests with such)."""
    try:
        with path.open("rb") as file:
            return [
                sys.intern(token.string)
                for token in tokenize.tokenize(file.readline)
                if token.type == tokenize.NAME
            ]
    except (OSError, SyntaxError, tokenize.TokenError, UnicodeDecodeError):
        return None


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


async def read_names(limit: int | None, begin: Callable[[int], Callable[[int], None]]) -> Names:
    """Tokenize the library with all cores, up to *limit* occurrences.

    ``begin(total)`` opens a progress bar, of files or where limited of occurrences, and gives what
    moves it.
    """
    loop = asyncio.get_running_loop()
    names, known = Names(), {}  # type: Names, dict[str, str]
    paths = library_files()
    advance = begin(limit or len(paths))
    pool = ProcessPoolExecutor(
        mp_context=get_context("spawn"), initializer=_leave_interrupts_to_the_parent
    )
    try:
        for result in [loop.run_in_executor(pool, names_of, path) for path in paths]:
            found = await result
            advance(len(found or ()) if limit else 1)
            names.files += found is not None
            names.skipped += found is None
            # One string a name, not one an occurrence: the list stays small.
            names.occurrences += [known.setdefault(name, name) for name in found or ()]
            if limit and len(names.occurrences) >= limit:
                break
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    if limit:
        del names.occurrences[limit:]
    return names
