"""Run ``counter add --stream``: add the lines of standard input.

The client's buffer merges them by counter and sends batches, each item with one token for all of
its attempts. A signal ends the reading between two lines, never the adding of one: so the number of
lines that are counted is known.
"""

from __future__ import annotations

import signal
import sys
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Final

from counter.cli.client import (
    EXIT_NO,
    EXIT_NOT_DONE,
    EXIT_UNKNOWN,
    FINISHING,
    ServiceFlags,
    delta_of,
    duration_us,
    explain,
    fail,
    finishing,
    open_client,
    options_of,
)
from counter.cli.terminal import (
    exiting,
    output_bytes,
    print_error,
    print_out,
    printing,
    remark,
)
from counter.errors import StartupError
from counter.limits import ADD_STREAM_LINE_BYTES_MAX, SECOND
from counter.quantities import plural
from counter_client import Buffer, Flush, RejectedError, UnknownOutcomeError, UnsentError
from counter_client.errors import CounterError, TokenTooOldError
from counter_client.tokens import checked_name

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def add_lines(service: ServiceFlags) -> None:
    """Add each line of standard input, until it ends or a signal comes.

    A line is ``NAME`` or ``NAME DELTA``, with a tab between them if the name has spaces; the first
    one that is neither ends the stream too. Exits with the codes of :mod:`counter.cli.client`.
    """
    stream = _Stream(service)
    options = replace(options_of(service), on_flush=stream.record_refusal)
    with open_client(service, options) as client, _signals(stream):
        buffer = client.buffer()
        failure: Exception | None = None
        try:
            stream.add_to(buffer)
        except (StartupError, CounterError) as error:
            failure = error
        try:
            # The rest has had its time if it could not be sent.
            buffer.close(0 if isinstance(failure, CounterError) else stream.timeout_s)
        except (RejectedError, UnsentError) as error:
            if isinstance(failure, StartupError):
                remark(str(failure))
            failure = error
    stream.end(failure)


class _Stream:
    """The lines and their outcomes."""

    def __init__(self, service: ServiceFlags) -> None:
        self.timeout_s = duration_us("timeout", service.timeout) / SECOND
        self.signal: signal.Signals | None = None
        self.is_reading = False
        self._service = service
        self._lines = 0
        self._sum = 0
        #: The refusal of every batch, if there is one.
        self._refusal: CounterError | None = None

    def record_refusal(self, flush: Flush) -> None:
        """Record a batch that is refused and will always be, as with a key that was revoked."""
        if flush.error is not None and flush.error.retry == "never":
            self._refusal = flush.error

    def add_to(self, buffer: Buffer) -> None:
        """Add the lines. Raises StartupError for one that is wrong, and CounterError if no line is
        sent in time."""
        for number, line in enumerate(self._read(), start=1):
            if not line.strip():
                continue
            counter, delta = _item(line, number)
            buffer.add(counter, delta, timeout=self.timeout_s)
            self._lines += 1
            self._sum += delta
            if self._lines == 1:
                # A wrong URL or key shows before more is read.
                buffer.flush(self.timeout_s)
            if self._refusal is not None:
                raise self._refusal

    def _read(self) -> Iterator[bytes]:
        if sys.stdin is None:
            raise StartupError("standard input is closed: --stream reads lines from it")
        mark = BOM_UTF8
        while self.signal is None:
            self.is_reading = True
            try:
                line = sys.stdin.buffer.readline(ADD_STREAM_LINE_BYTES_MAX + 1)
            except KeyboardInterrupt:
                return
            finally:
                self.is_reading = False
            if not line:
                return
            yield line.removeprefix(mark)
            mark = b""

    def end(self, failure: Exception | None) -> None:
        """Print how many lines are counted; exit unless all are."""
        lines = plural(self._lines, "line is counted, which comes", "lines are counted, which come")
        counted = f"{lines} to {self._sum:,}"
        if isinstance(failure, (RejectedError, UnsentError)):
            self._end_with_left(failure)
            return
        if failure is not None:
            why = explain(failure, self._service) if isinstance(failure, CounterError) else failure
            fail(f"{why}\n{counted}; no line after that", EXIT_NOT_DONE)
        if self.signal is not None:
            fail(f"interrupted: {counted}", 128 + self.signal)
        print_out(counted)

    def _end_with_left(self, error: RejectedError | UnsentError) -> None:
        """Print the adds that are not counted, or not known to be, for another attempt; exit."""
        is_open = isinstance(error, UnsentError)
        unsent: Mapping[str, int] = {}
        if isinstance(error, RejectedError):
            rejected = error.items
        else:
            rejected, unsent = error.rejected, error.unsent
            cause = error.__cause__
            remark(explain(cause, self._service) if isinstance(cause, CounterError) else str(error))
            if error.unfinished:
                remark(f"it is unknown whether these are counted\n{FINISHING}")
            for unfinished in error.unfinished:
                print_error(finishing(unfinished, self._service))
        for each in rejected:
            # A token that is too old and not void: nothing is known of an earlier attempt.
            may_be = isinstance(each.error, (UnknownOutcomeError, TokenTooOldError))
            is_open = is_open or may_be
            what = "may be counted" if may_be else "is not counted"
            remark(f"{each.counter}: {each.delta:+} {what}: {explain(each.error)}")
        if unsent:
            remark("what is not counted is on standard output, as lines for add --stream")
        read = plural(self._lines, "line was", "lines were")
        remark(f"{read} read; what is not named here is counted")
        with exiting(EXIT_UNKNOWN if is_open else EXIT_NO), printing():
            for counter, delta in unsent.items():
                output_bytes().write(f"{counter}\t{delta}\n".encode())
                output_bytes().flush()


@contextmanager
def _signals(stream: _Stream) -> Iterator[None]:
    """Let signals end the reading of *stream*, and nothing else."""

    def interrupt(number: int, _: FrameType | None) -> None:
        stream.signal = signal.Signals(number)
        if stream.is_reading:
            raise KeyboardInterrupt

    before = {each: signal.signal(each, interrupt) for each in _SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _item(line: bytes, number: int) -> tuple[str, int]:
    """Return the counter and the delta of a line. Raises StartupError."""
    try:
        if len(line) > ADD_STREAM_LINE_BYTES_MAX:
            raise StartupError(f"it has more than {ADD_STREAM_LINE_BYTES_MAX:,} bytes")
        text = line.decode().strip("\r\n")
        counter, tab, delta = text.partition("\t")
        if not tab:
            counter, *words = text.split()
            if len(words) > 1:
                raise StartupError(
                    "it has more than a NAME and a DELTA; put a tab between them if a name has"
                    " spaces"
                )
            delta = "".join(words)
        return checked_name(counter), delta_of(delta.strip() or "1")
    except (StartupError, CounterError, UnicodeDecodeError) as error:
        raise StartupError(f"line {number}: {error}") from error
