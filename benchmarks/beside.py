"""Some subjects of a quick run in a process of their own, beside the others."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness import ROOT, Bench, BenchError, check, python_module

_END_TIMEOUT_S = 60.0


@contextmanager
def beside(bench: Bench, subjects: Sequence[str], folder: Path | None) -> Iterator[None]:
    """Run *subjects* while the block runs: those of a cluster wait most of their time, and no
    figure of a quick run means anything. What they say comes at the end, in one piece.

    Raises BenchError where they fail.
    """
    if not subjects:
        yield
        return
    log = bench.fresh_folder("beside.log")
    flags = ["--quick", *(["--folder", str(folder)] if folder is not None else [])]
    with log.open("wb") as out:
        process = subprocess.Popen(
            python_module("benchmarks", *subjects, *flags),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        yield
        process.wait()
    finally:
        # It ends its own servers.
        process.terminate()
        try:
            process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise BenchError(f"{', '.join(subjects)}: they do not end") from None
        finally:
            bench.console.print(log.read_text("utf-8"), markup=False, highlight=False)
    check(process.returncode == 0, f"of {', '.join(subjects)}, one failed: see above")
