"""A process whose wall clock is not the machine's: ``python -m tests.chaos.clocks`` is ``counter``.

The offset is in a file that both sides map into memory. (libfaketime would do it without
a line of Python, but it breaks the sleeps of Python's own threads.)
"""

import mmap
import os
import struct
import time
from pathlib import Path
from typing import Final

_NANOSECONDS: Final = struct.Struct("<q")
_FILE: Final = "CHAOS_CLOCK"


class ShiftedClock:
    """How far off a process's wall clock is; monotonic clocks go on."""

    def __init__(self, file: Path) -> None:
        if not file.exists():
            file.write_bytes(bytes(_NANOSECONDS.size))
        self.environment = {_FILE: str(file)}
        with file.open("r+b") as opened:
            self._shared = mmap.mmap(opened.fileno(), _NANOSECONDS.size)

    @property
    def shift_ns(self) -> int:
        """So far ahead it is, in nanoseconds."""
        (shift_ns,) = _NANOSECONDS.unpack_from(self._shared)
        return int(shift_ns)

    @shift_ns.setter
    def shift_ns(self, shift_ns: int) -> None:
        _NANOSECONDS.pack_into(self._shared, 0, shift_ns)


def _main() -> None:
    clock = ShiftedClock(Path(os.environ[_FILE]))
    true_ns = time.time_ns

    def time_ns() -> int:
        return true_ns() + clock.shift_ns

    setattr(time, "time_ns", time_ns)  # noqa: B010
    setattr(time, "time", lambda: time_ns() / 1e9)  # noqa: B010
    # Only now, before any module has imported the true one.
    from counter.cli.app import main

    main()


if __name__ == "__main__":
    _main()
